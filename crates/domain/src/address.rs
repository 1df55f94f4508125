//! Kiln's own range of addresses, one for each project's daemon.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The addresses that daemons get, both ends included. Which of them are taken is the store's knowledge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressPool {
    pub first: Ipv4Addr,
    pub last: Ipv4Addr,
}

impl AddressPool {
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        (self.first..=self.last).contains(&address)
    }

    /// How many projects have room; 0 when the ends are the wrong way round.
    pub fn size(&self) -> u64 {
        let (first, last) = (u64::from(self.first.to_bits()), u64::from(self.last.to_bits()));
        (last + 1).saturating_sub(first)
    }
}

impl AddressPool {
    /// The addresses of projects, and the one kept for the daemon that tries snapshots out: the last, where there are enough.
    pub fn with_one_aside(self) -> (Self, Option<Ipv4Addr>) {
        const ENOUGH: u64 = 4;
        if self.size() < ENOUGH {
            return (self, None);
        }
        (Self { last: Ipv4Addr::from_bits(self.last.to_bits() - 1), ..self }, Some(self.last))
    }
}

impl fmt::Display for AddressPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// An IPv4 network, written `10.88.0.0/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AddressRange {
    network: Ipv4Addr,
    length: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not a range of addresses: {1}; write it like 10.88.0.0/16")]
pub struct ParseRangeError(String, &'static str);

impl AddressRange {
    /// `None` unless `length` is 8 to 30 and nothing is set in `network` behind it.
    pub const fn new(network: Ipv4Addr, length: u8) -> Option<Self> {
        let fits = matches!(length, 8..=30) && network.to_bits() & (u32::MAX >> length) == 0;
        if fits { Some(Self { network, length }) } else { None }
    }

    /// Its hosts: all but the first address, which names the network, and the last, which means everybody in it.
    pub fn hosts(self) -> AddressPool {
        let (first, last) = (self.network.to_bits(), self.network.to_bits() | (u32::MAX >> self.length));
        AddressPool { first: Ipv4Addr::from_bits(first + 1), last: Ipv4Addr::from_bits(last - 1) }
    }

    pub fn contains(self, address: Ipv4Addr) -> bool {
        (address.to_bits() ^ self.network.to_bits()) & !(u32::MAX >> self.length) == 0
    }

    pub fn is_loopback(self) -> bool {
        self.network.is_loopback()
    }

    pub fn is_private(self) -> bool {
        self.network.is_private() && self.hosts().last.is_private()
    }
}

impl FromStr for AddressRange {
    type Err = ParseRangeError;

    fn from_str(text: &str) -> Result<Self, ParseRangeError> {
        let error = |why| ParseRangeError(text.chars().take(64).collect(), why);
        let (network, length) = text.split_once('/').ok_or_else(|| error("the prefix length is missing"))?;
        let network = network.parse().map_err(|_| error("that is no IPv4 address"))?;
        let length = length.parse().map_err(|_| error("the prefix length is no number"))?;
        Self::new(network, length).ok_or_else(|| error("the length is not 8 to 30, or the address has bits behind it"))
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.length)
    }
}

impl TryFrom<String> for AddressRange {
    type Error = ParseRangeError;

    fn try_from(text: String) -> Result<Self, ParseRangeError> {
        text.parse()
    }
}

impl From<AddressRange> for String {
    fn from(range: AddressRange) -> Self {
        range.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_is_kept_aside_where_there_are_enough() {
        let pool = |last: u8| AddressPool { first: Ipv4Addr::new(10, 0, 0, 1), last: Ipv4Addr::new(10, 0, 0, last) };
        assert_eq!(pool(4).with_one_aside(), (pool(3), Some(Ipv4Addr::new(10, 0, 0, 4))));
        assert_eq!(pool(3).with_one_aside(), (pool(3), None));
        assert_eq!(pool(0).with_one_aside(), (pool(0), None));
    }

    #[test]
    fn a_range_has_hosts_between_its_ends() {
        let range: AddressRange = "10.88.0.0/16".parse().expect("a range");
        let pool = range.hosts();
        assert_eq!((pool.first, pool.last), (Ipv4Addr::new(10, 88, 0, 1), Ipv4Addr::new(10, 88, 255, 254)));
        assert!(range.is_private() && !range.is_loopback());
        assert!(range.contains(Ipv4Addr::new(10, 88, 0, 0)) && range.contains(Ipv4Addr::new(10, 88, 255, 255)));
        assert!(!range.contains(Ipv4Addr::new(10, 89, 0, 0)) && !range.contains(Ipv4Addr::new(10, 87, 255, 255)));
        assert_eq!(range.to_string(), "10.88.0.0/16");
        for text in ["10.88.0.0", "10.88.0.1/16", "10.88.0.0/31", "0.0.0.0/0", "10.88.0.0/x", "::/16", "300.0.0.0/8"] {
            assert!(text.parse::<AddressRange>().is_err(), "{text} was taken for a range");
        }
        assert!(!"172.0.0.0/8".parse::<AddressRange>().expect("a range").is_private());
    }

    #[test]
    fn both_ends_belong_to_it() {
        let pool = AddressPool { first: Ipv4Addr::new(10, 0, 0, 2), last: Ipv4Addr::new(10, 0, 1, 1) };
        assert_eq!(pool.size(), 256);
        assert!(pool.contains(pool.first) && pool.contains(pool.last));
        assert!(!pool.contains(Ipv4Addr::new(10, 0, 1, 2)));
        let everything = AddressPool { first: Ipv4Addr::UNSPECIFIED, last: Ipv4Addr::BROADCAST };
        assert_eq!(everything.size(), 1 << 32);
        assert_eq!(AddressPool { first: pool.last, last: pool.first }.size(), 0);
    }
}
