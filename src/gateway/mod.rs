//! Reads a ClientHello, finds the daemon that it names, relays bytes.
//!
//! Promises: TLS is never terminated and the bytes read are replayed exactly; there is no default route; whatever is
//! refused gets a TLS alert; a sleeping project is woken while the connection waits; an open connection is counted at
//! its project for as long as it lives, so nothing stops the daemon under it (K2).
//!
//! The gateway knows keys and addresses only, through [`Directory`].

use std::fmt;
use std::net::SocketAddrV4;

use async_trait::async_trait;
use kiln_domain::Key;

/// A way to a daemon. The project counts as connected until this is dropped.
pub struct Door {
    pub address: SocketAddrV4,
    /// Dropped with the door; what it does is the directory's business.
    pub held: Box<dyn Send>,
}

/// Why a connection gets no daemon. The client sees only a TLS alert; the text is for our log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoDoor {
    /// No such project.
    Unknown,
    /// It exists but could not be woken.
    Unavailable(String),
}

impl fmt::Display for NoDoor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("there is no such project"),
            Self::Unavailable(why) => f.write_str(why),
        }
    }
}

/// Where the gateway looks names up; waking what sleeps is part of it.
#[async_trait]
pub trait Directory: Send + Sync + 'static {
    async fn open(&self, key: &Key) -> Result<Door, NoDoor>;
}
