//! Kiln's own range of addresses, one for each project's daemon.

use std::fmt;
use std::net::Ipv4Addr;

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

impl fmt::Display for AddressPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
