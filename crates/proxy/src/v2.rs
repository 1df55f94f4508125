//! Version 2: binary, with a length.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{Header, MAX_BYTES, Progress, ProxyError, client};

pub(crate) const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// Signature, version with command, family with protocol, length of the rest.
const FIXED: usize = 16;

pub(crate) fn read(bytes: &[u8]) -> Result<Progress, ProxyError> {
    // Each is judged as soon as it is there.
    let command = match bytes.get(12) {
        None => return Ok(Progress::NeedMore),
        Some(0x20) => Command::Local,
        Some(0x21) => Command::Proxy,
        Some(_) => return Err(ProxyError::Malformed("neither version nor command is known")),
    };
    let family = match bytes.get(13) {
        None => return Ok(Progress::NeedMore),
        Some(0x00 | 0x31) => Family::NoAddress,
        Some(0x11) => Family::V4,
        Some(0x21) => Family::V6,
        Some(_) if command == Command::Local => Family::NoAddress,
        Some(_) => return Err(ProxyError::Malformed("it is not for a TCP connection")),
    };
    let (Some(high), Some(low)) = (bytes.get(14), bytes.get(15)) else { return Ok(Progress::NeedMore) };
    let length = FIXED + usize::from(*high) * 0x100 + usize::from(*low);
    if length > MAX_BYTES {
        return Err(ProxyError::TooLong(MAX_BYTES));
    }
    let from = match (command, family) {
        (Command::Local, _) | (_, Family::NoAddress) => {
            return Ok(whole(bytes, length).map_or(Progress::NeedMore, |_| done(None, length)));
        }
        (Command::Proxy, Family::V4) if length >= FIXED + 12 => v4,
        (Command::Proxy, Family::V6) if length >= FIXED + 36 => v6,
        (Command::Proxy, _) => return Err(ProxyError::Malformed("it is too short for its addresses")),
    };
    let Some(rest) = whole(bytes, length) else { return Ok(Progress::NeedMore) };
    let (address, port) = from(rest).ok_or(ProxyError::Malformed("it is too short for its addresses"))?;
    Ok(done(client(address, port)?, length))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Command {
    /// Of the load balancer itself.
    Local,
    Proxy,
}

#[derive(Clone, Copy)]
enum Family {
    V4,
    V6,
    /// Unspecified, or a unix socket.
    NoAddress,
}

/// What follows the fixed part, once all of it is there.
fn whole(bytes: &[u8], length: usize) -> Option<&[u8]> {
    bytes.get(FIXED..length)
}

fn done(from: Option<SocketAddr>, length: usize) -> Progress {
    Progress::Header(Header { from, length })
}

/// Source, destination, and their ports.
fn v4(rest: &[u8]) -> Option<(IpAddr, u16)> {
    let address = rest.first_chunk::<4>()?;
    Some((Ipv4Addr::from(*address).into(), port(rest, 8)?))
}

fn v6(rest: &[u8]) -> Option<(IpAddr, u16)> {
    let address = rest.first_chunk::<16>()?;
    Some((Ipv6Addr::from(*address).into(), port(rest, 32)?))
}

fn port(rest: &[u8], at: usize) -> Option<u16> {
    rest.get(at..)?.first_chunk::<2>().map(|port| u16::from_be_bytes(*port))
}
