//! Whose code a daemon runs, and what follows from that for what it may use.

use std::fmt;

/// Everything that runs in one instance is of one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Code that somebody of the project has vouched for.
    Trusted,
    /// Code of anybody: a pull request from a fork, say.
    Untrusted,
}

impl Lane {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trusted => "trusted",
            Self::Untrusted => "untrusted",
        }
    }

    /// As [`Lane::name`] writes it. What is not known is untrusted: that is the safe side.
    pub fn of_mark(mark: Option<&str>) -> Self {
        if mark == Some(Self::Trusted.name()) { Self::Trusted } else { Self::Untrusted }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What one daemon with its builds may use; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub cpus: Option<u32>,
    pub processes: Option<u32>,
}
