//! Who may say, by the PROXY protocol, whom it speaks for.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use thiserror::Error;

/// An address, or a network of them: `192.0.2.7`, `10.1.0.0/16`, `2001:db8::/32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrustedSource {
    network: IpAddr,
    length: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no source: {1}; write it like 192.0.2.7, 10.1.0.0/16 or 2001:db8::/32")]
pub struct ParseTrustedSourceError(String, &'static str);

impl TrustedSource {
    pub fn contains(self, address: IpAddr) -> bool {
        match (self.network, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                (network.to_bits() ^ address.to_bits()).leading_zeros() >= u32::from(self.length)
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                (network.to_bits() ^ address.to_bits()).leading_zeros() >= u32::from(self.length)
            }
            _ => false,
        }
    }
}

impl FromStr for TrustedSource {
    type Err = ParseTrustedSourceError;

    fn from_str(text: &str) -> Result<Self, ParseTrustedSourceError> {
        let error = |why| ParseTrustedSourceError(text.chars().take(64).collect(), why);
        let (network, length) = text.split_once('/').map_or((text, None), |(network, length)| (network, Some(length)));
        let network: IpAddr = network.parse().map_err(|_| error("that is no address"))?;
        let longest = if network.is_ipv4() { 32 } else { 128 };
        let length = length.map_or(Some(longest), |length| length.parse().ok().filter(|length| *length <= longest));
        let length = length.filter(|length| *length > 0).ok_or_else(|| error("that is no length of a prefix"))?;
        let zeros = match network {
            IpAddr::V4(v4) => v4.to_bits().trailing_zeros(),
            IpAddr::V6(v6) => v6.to_bits().trailing_zeros(),
        };
        if zeros < u32::from(longest - length) {
            return Err(error("the address has bits set after the prefix"));
        }
        Ok(Self { network, length })
    }
}

impl fmt::Display for TrustedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_what_is_theirs() {
        for (network, inside, outside) in [
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("10.1.0.0/16", "::ffff:10.1.255.255", "10.2.0.0"),
            ("128.0.0.0/1", "255.0.0.1", "127.0.0.1"),
            ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::1"),
            ("::1", "::1", "127.0.0.1"),
        ] {
            let source: TrustedSource = network.parse().expect("a source");
            assert!(source.contains(inside.parse().expect("an address")), "{network} {inside}");
            assert!(!source.contains(outside.parse().expect("an address")), "{network} {outside}");
            assert_eq!(source.to_string().parse(), Ok(source));
        }
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for text in
            ["", "lb.example.com", "10.1.0.0/33", "10.1.0.0/15", "10.1.0.0/", "0.0.0.0/0", "2001:db8::1/64", "::/129"]
        {
            assert!(text.parse::<TrustedSource>().is_err(), "{text}");
        }
    }
}
