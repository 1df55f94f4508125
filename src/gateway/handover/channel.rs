//! Records with their descriptors, from one process to another over a unix socket.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketType, recvmsg, sendmsg, sockopt,
};

use super::HandoverError;
use super::record::{MOST_BYTES, Record};

/// What the other side may take for a record. It holds each as soon as it has it, and looks nothing up in between.
const PATIENCE: Duration = Duration::from_secs(5);

/// One more than any record has, so that a surplus is seen.
const MOST_DESCRIPTORS: usize = 3;

/// Somewhere to keep connections while nobody serves them: a successor's process, or what systemd keeps for the next.
pub(crate) trait Keeper {
    fn put(&mut self, record: &Record, descriptors: &[BorrowedFd<'_>]) -> Result<(), HandoverError>;

    /// The next, with as many descriptors as its kind has, all of them stream sockets.
    fn take(&mut self) -> Result<(Record, Vec<OwnedFd>), HandoverError>;
}

/// Between two processes that both live. Blocking, with a bound.
pub struct Channel(pub(super) UnixStream);

impl Channel {
    pub fn new(stream: UnixStream) -> Result<Self, HandoverError> {
        Self::with_patience(stream, PATIENCE)
    }

    pub(super) fn with_patience(stream: UnixStream, patience: Duration) -> Result<Self, HandoverError> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self(stream))
    }

    pub(super) fn has_patience(&self, patience: Duration) -> Result<(), HandoverError> {
        Ok(self.0.set_read_timeout(Some(patience))?)
    }

    /// The descriptors come with the first byte of the length.
    fn take_length(&mut self) -> Result<(usize, Vec<OwnedFd>), HandoverError> {
        let (mut length, mut descriptors) = ([0; 4], Vec::new());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let count = recvmsg(&self.0, &mut [IoSliceMut::new(&mut length)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let count = count.map_err(io::Error::from)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if count == 0 {
            return Err(HandoverError::Gone);
        }
        self.0.read_exact(length.get_mut(count..).unwrap_or_default())?;
        Ok((usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX), descriptors))
    }
}

impl Keeper for Channel {
    fn put(&mut self, record: &Record, descriptors: &[BorrowedFd<'_>]) -> Result<(), HandoverError> {
        let bytes = record.to_bytes();
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(HandoverError::Descriptors { got: descriptors.len(), wanted: record.descriptors() });
        }
        let sent = sendmsg(&self.0, &[IoSlice::new(&length)], &mut control, SendFlags::NOSIGNAL);
        let sent = sent.map_err(io::Error::from)?;
        self.0.write_all(length.get(sent..).unwrap_or_default())?;
        self.0.write_all(&bytes)?;
        Ok(())
    }

    fn take(&mut self) -> Result<(Record, Vec<OwnedFd>), HandoverError> {
        let (length, descriptors) = self.take_length()?;
        if length > MOST_BYTES {
            return Err(HandoverError::TooLong(length));
        }
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes)?;
        let record = Record::from_bytes(&bytes)?;
        if descriptors.len() != record.descriptors() {
            return Err(HandoverError::Descriptors { got: descriptors.len(), wanted: record.descriptors() });
        }
        for descriptor in &descriptors {
            if sockopt::socket_type(descriptor.as_fd()).ok() != Some(SocketType::STREAM) {
                return Err(HandoverError::NoSocket);
            }
        }
        Ok((record, descriptors))
    }
}
