//! The range that instances' addresses come from.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use kiln_domain::Key;
use thiserror::Error;

/// An IPv4 network whose prefix length is 8, 12, 16, 20 or 24: an interface's name is `kiln` and the address in
/// hexadecimal, and those lengths end between two digits, so one pattern names exactly the range's interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    network: Ipv4Addr,
    length: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not a range for instances: {1}; write it like 10.88.0.0/16")]
pub struct ParseRangeError(String, &'static str);

impl Range {
    pub fn contains(self, address: Ipv4Addr) -> bool {
        address.to_bits() & self.mask() == self.network.to_bits()
    }

    /// Matches the names of the range's interfaces, in nft's way of writing.
    pub fn interfaces(self) -> String {
        let name = Key::interface_name(self.network);
        let digits = usize::from(self.length / 4);
        format!("{}*", &name[..name.len() - 8 + digits])
    }

    /// The address that the name of one of the range's interfaces holds.
    pub fn address_of(self, interface: &str) -> Option<Ipv4Addr> {
        let bits = u32::from_str_radix(interface.strip_prefix("kiln")?, 16).ok()?;
        let address = Ipv4Addr::from_bits(bits);
        (self.contains(address) && Key::interface_name(address) == interface).then_some(address)
    }

    const fn mask(self) -> u32 {
        u32::MAX << (32 - self.length)
    }
}

impl FromStr for Range {
    type Err = ParseRangeError;

    fn from_str(text: &str) -> Result<Self, ParseRangeError> {
        let error = |why| ParseRangeError(text.chars().take(64).collect(), why);
        let (network, length) = text.split_once('/').ok_or_else(|| error("the prefix length is missing"))?;
        let network: Ipv4Addr = network.parse().map_err(|_| error("that is no IPv4 address"))?;
        let length: u8 = length.parse().map_err(|_| error("the prefix length is not a number"))?;
        if !matches!(length, 8 | 12 | 16 | 20 | 24) {
            return Err(error("the prefix length is not 8, 12, 16, 20 or 24"));
        }
        let range = Self { network, length };
        if !range.contains(network) {
            return Err(error("the address has bits set after the prefix"));
        }
        if !network.is_private() {
            return Err(error("the addresses are not private (10/8, 172.16/12, 192.168/16)"));
        }
        Ok(range)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_names_exactly_the_range() {
        for (text, pattern) in [
            ("10.88.0.0/16", "kiln0a58*"),
            ("10.0.0.0/8", "kiln0a*"),
            ("172.16.0.0/12", "kilnac1*"),
            ("192.168.7.0/24", "kilnc0a807*"),
        ] {
            let range: Range = text.parse().expect("valid");
            assert_eq!(range.interfaces(), pattern, "of {text}");
            assert_eq!(range.to_string(), text);
        }
        let range: Range = "10.88.0.0/16".parse().expect("valid");
        let address = Ipv4Addr::new(10, 88, 1, 200);
        assert_eq!(range.address_of(&Key::interface_name(address)), Some(address));
        for other in ["kiln0a5901c8", "kiln0A5801C8", "kiln0a58", "kiln+a5801c8", "eth0", "kiln", "kilnstray"] {
            assert_eq!(range.address_of(other), None, "of {other}");
        }
        assert!(range.contains(Ipv4Addr::new(10, 88, 255, 1)) && !range.contains(Ipv4Addr::new(10, 89, 0, 1)));
    }

    #[test]
    fn what_is_not_a_range() {
        for (text, why) in [
            ("", "missing"),
            ("10.88.0.0", "missing"),
            ("x/16", "no IPv4"),
            ("10.88.0.0/x", "not a number"),
            ("10.88.0.0/17", "not 8, 12"),
            ("10.88.0.0/0", "not 8, 12"),
            ("10.88.0.1/16", "bits set"),
            ("8.8.0.0/16", "not private"),
        ] {
            let error = text.parse::<Range>().expect_err("accepted").to_string();
            assert!(error.contains(why), "of {text:?}: {error}");
        }
    }
}
