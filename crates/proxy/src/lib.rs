//! Reads the header of the PROXY protocol, versions 1 and 2, from bytes as they arrive: who a load balancer says it speaks
//! for. Sans-I/O.
//!
//! ```text
//!   bytes so far ──read──▶ not enough yet │ an address and how many bytes it took │ this is none
//! ```
//!
//! Promises: never panics; allocates nothing; the answer does not depend on how the bytes were cut, and what follows the
//! header changes nothing; at most [`MAX_BYTES`] are needed to answer. Numbers and addresses have one spelling each:
//! whoever may send this header is trusted, and a header that is odd means that somebody else sent it.
//!
//! What must not be here: sockets, and the decision who is trusted.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use thiserror::Error;

mod v1;
mod v2;

/// Of the longer header, version 2: what it adds after the addresses (TLS and cloud details) is skipped, and seldom more
/// than a few hundred bytes.
pub const MAX_BYTES: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    NeedMore,
    Header(Header),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// `None`: the load balancer speaks for itself (a health check), or for a client without an address of this kind.
    pub from: Option<SocketAddr>,
    /// Bytes of the header; the client's own begin after them.
    pub length: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ProxyError {
    #[error("this is no PROXY header")]
    NotProxy,
    #[error("a PROXY header of more than {0} bytes")]
    TooLong(usize),
    #[error("PROXY protocol: {0}")]
    Malformed(&'static str),
}

/// `bytes` is all that has come so far.
pub fn read(bytes: &[u8]) -> Result<Progress, ProxyError> {
    if begins_alike(bytes, &v2::SIGNATURE) {
        v2::read(bytes)
    } else if begins_alike(bytes, v1::SIGNATURE) {
        v1::read(bytes)
    } else {
        Err(ProxyError::NotProxy)
    }
}

/// As far as both go. The two signatures differ in their first byte.
fn begins_alike(bytes: &[u8], signature: &[u8]) -> bool {
    bytes.iter().zip(signature).all(|(a, b)| a == b)
}

/// An address that a client can have.
fn client(address: IpAddr, port: u16) -> Result<Option<SocketAddr>, ProxyError> {
    let none = match address {
        IpAddr::V4(v4) => v4 == Ipv4Addr::UNSPECIFIED,
        IpAddr::V6(v6) => v6 == Ipv6Addr::UNSPECIFIED,
    };
    if none {
        return Err(ProxyError::Malformed("the client's address is unspecified"));
    }
    Ok(Some(SocketAddr::new(address.to_canonical(), port)))
}
