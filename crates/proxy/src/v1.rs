//! Version 1: a line of text, as `PROXY TCP4 192.0.2.7 198.51.100.1 40000 1234`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{Header, Progress, ProxyError, client};

pub(crate) const SIGNATURE: &[u8] = b"PROXY ";

/// The longest that the protocol allows, line end included.
const MAX_LINE: usize = 107;

pub(crate) fn read(bytes: &[u8]) -> Result<Progress, ProxyError> {
    let seen = bytes.get(..MAX_LINE).unwrap_or(bytes);
    let Some(end) = seen.windows(2).position(|pair| pair == b"\r\n") else {
        let full = bytes.len() >= MAX_LINE;
        return if full { Err(ProxyError::TooLong(MAX_LINE)) } else { Ok(Progress::NeedMore) };
    };
    let line = seen.get(SIGNATURE.len()..end).ok_or(ProxyError::Malformed("the line is too short"))?;
    Ok(Progress::Header(Header { from: source(line)?, length: end + 2 }))
}

fn source(line: &[u8]) -> Result<Option<SocketAddr>, ProxyError> {
    let line = std::str::from_utf8(line).map_err(|_| ProxyError::Malformed("the line is no text"))?;
    let mut words = line.split(' ');
    let family = words.next().unwrap_or_default();
    if family == "UNKNOWN" {
        // Whatever else stands there is to be ignored.
        return Ok(None);
    }
    let [Some(from), Some(to), Some(from_port), Some(to_port), None] =
        [words.next(), words.next(), words.next(), words.next(), words.next()]
    else {
        return Err(ProxyError::Malformed("the line does not have two addresses and two ports"));
    };
    let address = |text: &str| -> Option<IpAddr> {
        match family {
            "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
            "TCP6" => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            _ => None,
        }
    };
    let wrong = ProxyError::Malformed("it is neither TCP4 nor TCP6 nor UNKNOWN, or an address is not of that kind");
    let (Some(from), Some(_)) = (address(from), address(to)) else { return Err(wrong) };
    let (Some(port), Some(_)) = (port(from_port), port(to_port)) else {
        return Err(ProxyError::Malformed("a port is no number from 0 to 65535"));
    };
    client(from, port)
}

/// Digits only, and no zero in front.
fn port(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit()) && (text.len() == 1 || !text.starts_with('0'));
    digits.then(|| text.parse().ok()).flatten()
}
