//! The record layer of a hello: joins the fragments of the first handshake message, in one pass over the bytes.

use crate::{HelloError, MAX_BYTES};

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const RECORD_HEADER: usize = 5;
const MESSAGE_HEADER: usize = 4;

/// 2^14 of content (RFC 8446 section 5.1).
pub(crate) const USUAL_RECORD: usize = 16 * 1024;

/// The most that TLS 1.2 lets any record have (RFC 5246 section 6.2.3), and what the reference accepts.
pub(crate) const MAX_RECORD: usize = USUAL_RECORD + 2048;

/// How far the bytes have been read.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Bytes consumed so far; everything before belongs to `message` or to a record header.
    read: usize,
    /// Bytes of the current record that are still to come.
    left_in_record: usize,
    message: Vec<u8>,
}

impl Records {
    /// Continues where it stopped. `bytes` is the whole stream from its start; the answer is the first handshake
    /// message with its header, once it is complete.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> Result<Option<&[u8]>, HelloError> {
        loop {
            if let Some(length) = self.message_length()?
                && self.message.len() >= length
            {
                // Whatever follows it in its record is for the daemon to judge.
                return Ok(self.message.get(..length));
            }
            let rest = bytes.get(self.read..).unwrap_or_default();
            if self.left_in_record == 0 {
                let Some(length) = record_length(rest)? else { return Ok(None) };
                self.left_in_record = length;
                self.read += RECORD_HEADER;
                continue;
            }
            let fragment = rest.get(..self.left_in_record.min(rest.len())).unwrap_or_default();
            if fragment.is_empty() {
                return Ok(None);
            }
            self.message.extend_from_slice(fragment);
            self.read += fragment.len();
            self.left_in_record -= fragment.len();
        }
    }

    /// With its header; `None` while the header is incomplete.
    fn message_length(&self) -> Result<Option<usize>, HelloError> {
        match *self.message.as_slice() {
            [kind, ..] if kind != CLIENT_HELLO => Err(HelloError::NotClientHello(kind)),
            [_, a, b, c, ..] => {
                let length = MESSAGE_HEADER + usize::from(a) * 0x1_0000 + usize::from(b) * 0x100 + usize::from(c);
                // It would not fit even in one record without end, so there is no need to wait for it.
                if length + RECORD_HEADER > MAX_BYTES { Err(HelloError::TooLarge) } else { Ok(Some(length)) }
            }
            _ => Ok(None),
        }
    }
}

/// The length that a record header announces; refuses as soon as a byte cannot be one of a handshake record.
fn record_length(bytes: &[u8]) -> Result<Option<usize>, HelloError> {
    let is_tls = match bytes {
        [] => true,
        [kind] => *kind == HANDSHAKE,
        [kind, major, ..] => *kind == HANDSHAKE && *major == 3,
    };
    if !is_tls {
        let first = bytes.get(..8.min(bytes.len())).unwrap_or_default();
        return Err(HelloError::NotTls(first.escape_ascii().to_string()));
    }
    match *bytes {
        [_, _, _, high, low, ..] => match usize::from(high) * 0x100 + usize::from(low) {
            length @ 1..=MAX_RECORD => Ok(Some(length)),
            length => Err(HelloError::RecordLength(length)),
        },
        _ => Ok(None),
    }
}

/// The header of a handshake record; `length` is at most [`USUAL_RECORD`].
pub(crate) fn handshake_header(length: usize) -> [u8; RECORD_HEADER] {
    [HANDSHAKE, 3, 1, (length >> 8) as u8, length as u8]
}
