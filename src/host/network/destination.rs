//! Private places that builds may be let through to.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::str::FromStr;

use thiserror::Error;

/// Metadata services, which hand out the host's own credentials; and the link-local range as a whole.
const METADATA: [(Ipv4Addr, u8); 3] = [
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    // Azure's and Alibaba's.
    (Ipv4Addr::new(168, 63, 129, 16), 32),
    (Ipv4Addr::new(100, 100, 100, 200), 32),
];

/// Where private networks are: RFC 1918, and RFC 6598 for carriers.
const PRIVATE: [(Ipv4Addr, u8); 4] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
];

/// A TCP port of one address, or of each in a network: `10.1.2.3:5000`, `10.1.0.0/16:443`. Within one private range and
/// smaller than it, and never a metadata service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destination {
    network: Ipv4Addr,
    length: u8,
    port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no destination: {1}; write it like 10.1.2.3:5000 or 10.1.0.0/16:443")]
pub struct ParseDestinationError(String, &'static str);

impl Destination {
    pub fn covers(self, target: SocketAddrV4) -> bool {
        self.port == target.port() && within(*target.ip(), self.network, self.length)
    }

    /// In the words of nft.
    pub(super) fn matcher(self) -> String {
        format!("ip daddr {}/{} tcp dport {}", self.network, self.length, self.port)
    }
}

impl FromStr for Destination {
    type Err = ParseDestinationError;

    fn from_str(text: &str) -> Result<Self, ParseDestinationError> {
        let error = |why| ParseDestinationError(text.chars().take(64).collect(), why);
        let (place, port) = text.rsplit_once(':').ok_or_else(|| error("the port is missing"))?;
        let port: u16 = port.parse().ok().filter(|port| *port != 0).ok_or_else(|| error("that is no port number"))?;
        let (network, length) = place.split_once('/').unwrap_or((place, "32"));
        let network: Ipv4Addr = network.parse().map_err(|_| error(why_no_address(network)))?;
        let length: u8 = length
            .parse()
            .ok()
            .filter(|length| (1..=32).contains(length))
            .ok_or_else(|| error("the prefix length is not 1 to 32"))?;
        if network.to_bits() & mask(length) != network.to_bits() {
            return Err(error("the address has bits set after the prefix"));
        }
        let overlaps = |&(other, other_length): &(Ipv4Addr, u8)| {
            let shorter = length.min(other_length);
            (network.to_bits() ^ other.to_bits()) & mask(shorter) == 0
        };
        if METADATA.iter().any(overlaps) {
            return Err(error("a metadata service is in it, which gives this host's credentials to whoever asks"));
        }
        match PRIVATE.iter().find(|range| overlaps(range)) {
            Some(&(_, all)) if length <= all => Err(error("that is a private range as a whole: name less of it")),
            Some(_) => Ok(Self { network, length, port }),
            None => Err(error("that is not private (10/8, 172.16/12, 192.168/16, 100.64/10)")),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.length {
            32 => write!(f, "{}:{}", self.network, self.port),
            length => write!(f, "{}/{length}:{}", self.network, self.port),
        }
    }
}

/// A registry mirror, by address: builds of both lanes reach it, wherever it is.
pub fn parse_mirror(text: &str) -> Result<SocketAddrV4, ParseMirrorError> {
    let error = |why| ParseMirrorError(text.chars().take(64).collect(), why);
    let (address, port) = text.rsplit_once(':').ok_or_else(|| error("the port is missing"))?;
    let port: u16 = port.parse().ok().filter(|port| *port != 0).ok_or_else(|| error("that is no port number"))?;
    let ip: Ipv4Addr = address.parse().map_err(|_| error(why_no_address(address)))?;
    if METADATA.iter().any(|&(network, length)| within(ip, network, length)) {
        return Err(error("that is link-local, or a metadata service"));
    }
    if ip.is_loopback() {
        return Err(error("for a build that is the build's own loopback: name an address that others see too"));
    }
    if ip.is_unspecified() || ip.is_multicast() || ip.is_broadcast() {
        return Err(error("that is not the address of one host"));
    }
    Ok(SocketAddrV4::new(ip, port))
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no registry mirror: {1}; write it like 10.1.2.3:5000")]
pub struct ParseMirrorError(String, &'static str);

fn why_no_address(text: &str) -> &'static str {
    if text.contains("//") {
        "that is a URL: leave out its scheme and its path"
    } else if text.contains(':') || text.starts_with('[') {
        "instances have IPv4 only"
    } else if text.bytes().any(|byte| byte.is_ascii_alphabetic()) {
        "that is a name, and the firewall knows addresses only: what a name stands for may change, and is not Kiln's to trust"
    } else {
        "that is no IPv4 address"
    }
}

fn within(address: Ipv4Addr, network: Ipv4Addr, length: u8) -> bool {
    (address.to_bits() ^ network.to_bits()) & mask(length) == 0
}

/// `length` is 1 to 32.
const fn mask(length: u8) -> u32 {
    u32::MAX << (32 - length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_read_as_they_are_written() {
        for text in ["10.1.2.3:5000", "10.1.0.0/16:443", "172.20.0.0/24:80", "192.168.7.0/25:1", "100.64.0.9:65535"] {
            assert_eq!(text.parse::<Destination>().expect("valid").to_string(), text);
        }
        let network: Destination = "10.1.0.0/16:443".parse().expect("valid");
        let covers = |target: &str| network.covers(target.parse().expect("an address"));
        assert!(covers("10.1.255.1:443") && !covers("10.1.255.1:80") && !covers("10.2.0.1:443"));
        assert_eq!(network.matcher(), "ip daddr 10.1.0.0/16 tcp dport 443");
    }

    #[test]
    fn what_is_no_destination() {
        for (text, why) in [
            ("", "port is missing"),
            ("10.1.2.3", "port is missing"),
            ("10.1.2.3:0", "no port"),
            ("10.1.2.3:http", "no port"),
            ("10.1.2.3:99999", "no port"),
            ("registry.internal:5000", "a name"),
            ("10.1.2:80", "no IPv4"),
            ("[fd00::1]:80", "IPv4 only"),
            ("fd00::/8:80", "IPv4 only"),
            ("10.1.2.3/0:80", "1 to 32"),
            ("10.1.2.3/33:80", "1 to 32"),
            ("10.1.2.3/16:80", "bits set"),
            ("169.254.169.254:80", "metadata"),
            ("169.254.0.0/17:80", "metadata"),
            ("168.63.129.16:80", "metadata"),
            ("168.0.0.0/8:80", "metadata"),
            ("100.100.0.0/16:80", "metadata"),
            ("128.0.0.0/1:80", "metadata"),
            ("10.0.0.0/8:80", "as a whole"),
            ("8.0.0.0/6:80", "as a whole"),
            ("192.168.0.0/16:80", "as a whole"),
            ("9.9.9.9:53", "not private"),
            ("127.0.0.1:80", "not private"),
            ("224.0.0.1:80", "not private"),
        ] {
            let error = text.parse::<Destination>().map_or_else(|e| e.to_string(), |d| format!("taken as {d}"));
            assert!(error.contains(why), "of {text:?}: {error}");
        }
    }

    #[test]
    fn what_is_a_mirror_and_what_is_not() {
        assert_eq!(parse_mirror("10.1.2.3:5000").expect("valid").to_string(), "10.1.2.3:5000");
        assert_eq!(parse_mirror("9.9.9.9:443").expect("valid").to_string(), "9.9.9.9:443");
        for (text, why) in [
            ("", "port is missing"),
            ("10.1.2.3", "port is missing"),
            ("10.1.2.3:0", "no port"),
            ("mirror.example.com:5000", "a name"),
            ("https://10.1.2.3:5000", "a URL"),
            ("[::1]:5000", "IPv4 only"),
            ("10.1.2.0/24:5000", "no IPv4"),
            ("169.254.169.254:80", "metadata"),
            ("168.63.129.16:80", "metadata"),
            ("127.0.0.1:5000", "own loopback"),
            ("0.0.0.0:5000", "not the address of one host"),
        ] {
            let error = parse_mirror(text).map_or_else(|e| e.to_string(), |m| format!("taken as {m}"));
            assert!(error.contains(why), "of {text:?}: {error}");
        }
    }
}
