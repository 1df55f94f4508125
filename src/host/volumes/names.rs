//! The names that engines give away: snapshots and entries of the trash.
//!
//! Both end in a sequence number that an engine never gives out twice, so that a repeated request for an old name can
//! not hit something newer.

use std::fmt;
use std::str::FromStr;

use kiln_domain::Key;
use thiserror::Error;

const SNAPSHOT_PREFIX: &str = "kiln-";
/// Sequences are written with at least so many digits, so that names sort by age in a listing.
const MIN_DIGITS: usize = 6;

/// Our prefix and a sequence: `kiln-000042`. Snapshots of any other name are nobody's business. Ordered by age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotName(u64);

/// An entry of the trash: the key and a sequence, `<key>.000007`, so that one key can be thrown away many times.
/// Ordered by key, then by age.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrashName {
    key: Key,
    sequence: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not the name of {kind}: one looks like {example}")]
pub struct ParseNameError {
    text: String,
    kind: &'static str,
    example: &'static str,
}

impl SnapshotName {
    pub const fn new(sequence: u64) -> Self {
        Self(sequence)
    }

    pub const fn sequence(self) -> u64 {
        self.0
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SNAPSHOT_PREFIX}{:0MIN_DIGITS$}", self.0)
    }
}

impl FromStr for SnapshotName {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, ParseNameError> {
        text.strip_prefix(SNAPSHOT_PREFIX)
            .and_then(sequence)
            .map(Self)
            .ok_or_else(|| ParseNameError::new(text, "a snapshot", "kiln-000042"))
    }
}

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
            .ok_or_else(|| ParseNameError::new(text, "an entry of the trash", "pbcce5b6205652dd7.000007"))
    }
}

impl ParseNameError {
    fn new(text: &str, kind: &'static str, example: &'static str) -> Self {
        Self { text: text.chars().take(64).collect(), kind, example }
    }
}

/// One number has one spelling: at least six digits, and leading zeros only to reach six.
fn sequence(digits: &str) -> Option<u64> {
    let padded_needlessly = digits.len() > MIN_DIGITS && digits.starts_with('0');
    let is_number = digits.len() >= MIN_DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
    if is_number && !padded_needlessly { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_printed_and_read_back() {
        assert_eq!(SnapshotName::new(42).to_string(), "kiln-000042");
        let key: Key = "forkpbcce5b6205652dd7".parse().expect("a key");
        assert_eq!(TrashName::new(key.clone(), 7).to_string(), "forkpbcce5b6205652dd7.000007");
        for sequence in [0, 1, 999_999, 1_000_000, u64::MAX] {
            let snapshot = SnapshotName::new(sequence);
            assert_eq!(snapshot.to_string().parse(), Ok(snapshot));
            let trash = TrashName::new(key.clone(), sequence);
            assert_eq!(trash.to_string().parse(), Ok(trash));
        }
    }

    #[test]
    fn age_orders_names_beyond_the_padding() {
        assert!(SnapshotName::new(999_999) < SnapshotName::new(1_000_000));
    }

    #[test]
    fn what_is_not_a_name() {
        for text in [
            "",
            "kiln-",
            "kiln-1",
            "kiln-00042",
            "kiln-0000042",
            "kiln--00042",
            "kiln-+00042",
            "kiln-00004x",
            "Kiln-000042",
            "daily-000042",
            "kiln-000042/..",
            "kiln-99999999999999999999999",
            "kiln-00004\u{0662}",
        ] {
            assert!(text.parse::<SnapshotName>().is_err(), "{text:?} was taken for a snapshot");
        }
        for text in
            ["", "pbcce5b6205652dd7", "pbcce5b6205652dd7.7", "pbcce5b6205652dd7.000007.x", "x.000007", ".000007"]
        {
            assert!(text.parse::<TrashName>().is_err(), "{text:?} was taken for trash");
        }
    }
}
