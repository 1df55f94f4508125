//! What a direction borrows while it has something to move: buffers and pipes. Those that are not in use are kept for the
//! next, up to a bound; the rest goes back to the system.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

/// Frames of gRPC and records of TLS fit in; whatever fills it is bulk, and goes by a pipe from then on.
pub(super) const BUFFER: usize = 16 * 1024;

/// What a pipe takes at most. The kernel's usual 64 KiB doubles the number of calls.
pub(super) const PIPE: usize = 256 * 1024;

const BUFFERS_KEPT: usize = 64;

/// At a time, in use or kept. Two descriptors each: see `daemon/descriptors.rs`. Where more have bulk to move, they copy.
pub(crate) const PIPES: usize = 64;

#[derive(Default)]
pub(crate) struct Pools {
    buffers: Mutex<Vec<Box<[u8]>>>,
    pipes: Mutex<Vec<Pipe>>,
    pipes_open: AtomicUsize,
}

struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pools {
    pub(super) fn buffer(self: &Arc<Self>) -> Buffer {
        let kept = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Buffer { bytes: kept.unwrap_or_else(|| vec![0; BUFFER].into_boxed_slice()), home: Arc::clone(self) }
    }

    /// An empty one. `None`: so many are in use, or the system gives none.
    pub(super) fn pipe(self: &Arc<Self>) -> Option<LentPipe> {
        let kept = self.pipes.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let pipe = match kept {
            Some(pipe) => pipe,
            None => self.new_pipe()?,
        };
        Some(LentPipe { pipe: Some(pipe), home: Arc::clone(self), holds: 0 })
    }

    #[cfg(test)]
    pub(super) fn buffers_kept(&self) -> usize {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    #[cfg(test)]
    pub(super) fn pipes_kept(&self) -> usize {
        self.pipes.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    #[cfg(test)]
    pub(super) fn pipes_open(&self) -> usize {
        self.pipes_open.load(Relaxed)
    }

    fn new_pipe(&self) -> Option<Pipe> {
        if self.pipes_open.fetch_add(1, Relaxed) < PIPES
            && let Ok(pipe) = Pipe::new()
        {
            return Some(pipe);
        }
        self.pipes_open.fetch_sub(1, Relaxed);
        None
    }
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // A user who has many large ones already gets the usual size, which works as well.
        let _ = fcntl_setpipe_size(&write, PIPE);
        Ok(Self { read, write })
    }
}

/// Goes home when dropped, also when the task that has it is.
pub(super) struct Buffer {
    pub(super) bytes: Box<[u8]>,
    home: Arc<Pools>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut kept = self.home.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < BUFFERS_KEPT {
            kept.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// Goes home when dropped, unless something is left in it.
pub(super) struct LentPipe {
    /// `None` only while it is dropped.
    pipe: Option<Pipe>,
    home: Arc<Pools>,
    /// Bytes that are in it.
    pub(super) holds: usize,
}

impl LentPipe {
    /// What is in it.
    pub(super) fn into_bytes(mut self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.holds];
        while self.holds > 0 {
            let rest = bytes.len() - self.holds;
            match rustix::io::read(self.ends()?.0, bytes.get_mut(rest..).unwrap_or_default())? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.holds -= count,
            }
        }
        Ok(bytes)
    }

    pub(super) fn ends(&self) -> io::Result<(&OwnedFd, &OwnedFd)> {
        let pipe = self.pipe.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok((&pipe.read, &pipe.write))
    }
}

impl Drop for LentPipe {
    fn drop(&mut self) {
        if self.holds == 0 {
            self.home.pipes.lock().unwrap_or_else(PoisonError::into_inner).extend(self.pipe.take());
        } else {
            self.home.pipes_open.fetch_sub(1, Relaxed);
        }
    }
}
