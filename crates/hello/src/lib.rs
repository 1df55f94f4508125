//! Reads a TLS ClientHello from bytes as they arrive: sans-I/O, without cryptography.
//!
//! ```text
//!   bytes ──feed──▶ records ──▶ handshake message ──▶ rustls ──▶ the name that the client asks for
//!     └───────────────────────── kept as they came ───────────▶ replay to the daemon
//! ```
//!
//! The record layer is read here: a hello may be cut anywhere, into TCP segments and into TLS records, and reading it
//! must cost time in proportion to its size however it is cut. The message itself is judged by rustls, once, when all of
//! it is there.
//!
//! Promises: never panics; keeps every byte that it was fed; needs at most [`MAX_BYTES`] of a connection to answer; the
//! answer does not depend on how the bytes were cut.
//!
//! A hello without `signature_algorithms`, which rustls does not go on with, is read all the same: what it may lead to is for
//! the daemon to say.
//!
//! What must not be here: sockets, clocks, routing.

mod alert;
mod completed;
mod records;

use std::io;

use rustls::server::Acceptor;
use rustls::{InvalidMessage, PeerIncompatible};
use thiserror::Error;

pub use alert::Alert;
use records::Records;

/// A hello that is not complete after this many bytes is refused. Record headers count: they are what an attacker can
/// send without end.
pub const MAX_BYTES: usize = 64 * 1024;

/// What a client says first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Lower case, a valid DNS name. `None` when the client names no host or names an IP address.
    pub server_name: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    NeedMore,
    /// Said once; what is fed afterwards is kept and not looked at.
    Hello(Hello),
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HelloError {
    #[error("this is not TLS: the first bytes are {0}")]
    NotTls(String),
    #[error("a TLS record of {0} bytes: between 1 and {max} are allowed", max = records::MAX_RECORD)]
    RecordLength(usize),
    #[error("the first handshake message is of type {0}, not a ClientHello")]
    NotClientHello(u8),
    #[error("no complete ClientHello within {MAX_BYTES} bytes")]
    TooLarge,
    #[error("the ClientHello is malformed: {0}")]
    Malformed(String),
    /// Well-formed, and of a kind that no daemon would talk to.
    #[error("the ClientHello cannot lead to a connection: {0}")]
    Unsuitable(String),
}

impl HelloError {
    /// What to tell the client.
    pub fn alert(&self) -> Alert {
        match self {
            Self::NotTls(_) | Self::NotClientHello(_) => Alert::UnexpectedMessage,
            Self::RecordLength(_) => Alert::RecordOverflow,
            Self::TooLarge | Self::Malformed(_) => Alert::DecodeError,
            Self::Unsuitable(_) => Alert::HandshakeFailure,
        }
    }
}

/// Feed it what arrives until it answers, then take the bytes back.
#[derive(Debug, Default)]
pub struct HelloReader {
    bytes: Vec<u8>,
    records: Records,
    outcome: Option<Result<(), HelloError>>,
}

impl HelloReader {
    pub fn new() -> Self {
        Self::default()
    }

    /// An error is final: it is returned again by every later call.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Progress, HelloError> {
        self.bytes.extend_from_slice(bytes);
        match &self.outcome {
            Some(Ok(())) => return Ok(Progress::NeedMore),
            Some(Err(error)) => return Err(error.clone()),
            None => {}
        }
        let answer = self.look();
        match &answer {
            Ok(Progress::NeedMore) => {}
            Ok(Progress::Hello(_)) => self.outcome = Some(Ok(())),
            Err(error) => self.outcome = Some(Err(error.clone())),
        }
        answer
    }

    /// Everything that was fed, in order.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Everything that was fed, in order, to be replayed.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    fn look(&mut self) -> Result<Progress, HelloError> {
        match self.records.read(&self.bytes)? {
            Some(message) => judge(message).map(Progress::Hello),
            None if self.bytes.len() >= MAX_BYTES => Err(HelloError::TooLarge),
            None => Ok(Progress::NeedMore),
        }
    }
}

fn judge(message: &[u8]) -> Result<Hello, HelloError> {
    match ask_rustls(message) {
        Err(rustls::Error::PeerIncompatible(PeerIncompatible::SignatureAlgorithmsExtensionRequired)) => {
            let Some(message) = completed::with_signature_algorithms(message) else {
                return Ok(Hello { server_name: None });
            };
            ask_rustls(&message)
        }
        answer => answer,
    }
    .map_err(|error| refusal(&error))
}

/// Hands over the complete message, in records of the usual size.
fn ask_rustls(message: &[u8]) -> Result<Hello, rustls::Error> {
    let mut acceptor = Acceptor::default();
    for piece in message.chunks(records::USUAL_RECORD) {
        let header = records::handshake_header(piece.len());
        for mut part in [&header[..], piece] {
            while !part.is_empty() {
                acceptor.read_tls(&mut part).map_err(|e: io::Error| rustls::Error::General(e.to_string()))?;
            }
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                return Ok(Hello { server_name: accepted.client_hello().server_name().map(str::to_owned) });
            }
            Ok(None) => {}
            Err((error, _)) => return Err(error),
        }
    }
    Err(rustls::Error::General("its length does not match its content".to_owned()))
}

fn refusal(error: &rustls::Error) -> HelloError {
    match error {
        rustls::Error::InvalidMessage(InvalidMessage::HandshakePayloadTooLarge) => HelloError::TooLarge,
        rustls::Error::PeerIncompatible(why) => HelloError::Unsuitable(format!("{why:?}")),
        rustls::Error::General(why) => HelloError::Malformed(why.clone()),
        other => HelloError::Malformed(other.to_string()),
    }
}
