//! The names that engines give to what is in the trash. As with snapshots, they end in a sequence number that an engine never
//! gives out twice, so that a repeated request for an old name can not hit something newer.

use std::fmt;
use std::str::FromStr;

use kiln_domain::Key;
use kiln_domain::cache::snapshot::sequence;
use thiserror::Error;

/// Sequences are written with at least so many digits, so that names sort by age in a listing.
const MIN_DIGITS: usize = 6;

/// An entry of the trash: the key and a sequence, `<key>.000007`, so that one key can be thrown away many times.
/// Ordered by key, then by age.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrashName {
    key: Key,
    sequence: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not the name of an entry of the trash: one looks like pbcce5b6205652dd7.000007")]
pub struct ParseNameError(String);

impl TrashName {
    pub const fn new(key: Key, sequence: u64) -> Self {
        Self { key, sequence }
    }

    pub const fn key(&self) -> &Key {
        &self.key
    }

    pub const fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl fmt::Display for TrashName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:0MIN_DIGITS$}", self.key, self.sequence)
    }
}

impl FromStr for TrashName {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, ParseNameError> {
        text.split_once('.')
            .and_then(|(key, digits)| Some(Self { key: key.parse().ok()?, sequence: sequence(digits)? }))
            .ok_or_else(|| ParseNameError(text.chars().take(64).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_printed_and_read_back() {
        let key: Key = "forkpbcce5b6205652dd7".parse().expect("a key");
        assert_eq!(TrashName::new(key.clone(), 7).to_string(), "forkpbcce5b6205652dd7.000007");
        for sequence in [0, 1, 999_999, 1_000_000, u64::MAX] {
            let trash = TrashName::new(key.clone(), sequence);
            assert_eq!(trash.to_string().parse(), Ok(trash));
        }
    }

    #[test]
    fn what_is_not_a_name() {
        for text in
            ["", "pbcce5b6205652dd7", "pbcce5b6205652dd7.7", "pbcce5b6205652dd7.000007.x", "x.000007", ".000007"]
        {
            assert!(text.parse::<TrashName>().is_err(), "{text:?} was taken for trash");
        }
    }
}
