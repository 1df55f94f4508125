//! A moment of a cache that one can go back to.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::time::Timestamp;

const PREFIX: &str = "kiln-";
/// Sequences are written with at least so many digits, so that names sort by age in a listing.
const MIN_DIGITS: usize = 6;

/// Our prefix and a sequence: `kiln-000042`. Snapshots of any other name are nobody's business. Ordered by age: a
/// sequence is never given out twice, so an old name can not hit something newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotName(u64);

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not the name of a snapshot: one looks like kiln-000042, and `kiln cache log` lists them")]
pub struct ParseSnapshotError(String);

/// Whether a daemon could work with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Verdict {
    /// Nobody has looked yet.
    #[default]
    Unchecked,
    /// A daemon answered on a clone of it, and its databases could be read.
    Good,
    /// It could not.
    Bad,
}

/// One that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Snapshot {
    pub name: SnapshotName,
    pub taken: Timestamp,
    pub verdict: Verdict,
    /// What its destruction alone would free, in bytes; `None` where that is not known cheaply.
    pub bytes: Option<u64>,
}

impl Verdict {
    /// As it is written beside a snapshot, and shown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unchecked => "unchecked",
            Self::Good => "good",
            Self::Bad => "bad",
        }
    }

    /// The inverse of [`Verdict::name`]; what is not known was not looked at.
    pub fn from_name(text: &str) -> Self {
        match text {
            "good" => Self::Good,
            "bad" => Self::Bad,
            _ => Self::Unchecked,
        }
    }
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
        write!(f, "{PREFIX}{:0MIN_DIGITS$}", self.0)
    }
}

impl FromStr for SnapshotName {
    type Err = ParseSnapshotError;

    /// With an `@` in front or without.
    fn from_str(text: &str) -> Result<Self, ParseSnapshotError> {
        let name = text.strip_prefix('@').unwrap_or(text);
        let error = || ParseSnapshotError(text.chars().take(64).collect());
        name.strip_prefix(PREFIX).and_then(sequence).map(Self).ok_or_else(error)
    }
}

/// One number has one spelling: at least six digits, and leading zeros only to reach six.
pub fn sequence(digits: &str) -> Option<u64> {
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
        for sequence in [0, 1, 999_999, 1_000_000, u64::MAX] {
            let snapshot = SnapshotName::new(sequence);
            assert_eq!(snapshot.to_string().parse(), Ok(snapshot));
            assert_eq!(format!("@{snapshot}").parse(), Ok(snapshot));
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
            "@",
            "kiln-",
            "kiln-1",
            "kiln-00042",
            "kiln-0000042",
            "kiln--00042",
            "kiln-+00042",
            "kiln-00004x",
            "Kiln-000042",
            "@@kiln-000042",
            "daily-000042",
            "kiln-000042/..",
            "kiln-99999999999999999999999",
            "kiln-00004\u{0662}",
        ] {
            assert!(text.parse::<SnapshotName>().is_err(), "{text:?} was taken for a snapshot");
        }
    }

    #[test]
    fn verdicts_have_names() {
        for verdict in [Verdict::Unchecked, Verdict::Good, Verdict::Bad] {
            assert_eq!(Verdict::from_name(verdict.name()), verdict);
        }
        assert_eq!(Verdict::from_name("excellent"), Verdict::Unchecked);
    }
}
