//! Rows that do not fit. Whoever reads a list gets the others.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// A row that only somebody else's hand, or a fault, can have written. It stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damaged {
    /// As it stands in the row, which may not be the form of a key; of the journal's rows: `event 17`.
    pub key: String,
    /// What is wrong, and what to do.
    pub why: String,
}

/// More than that nobody reads one by one.
const MOST: usize = 1024;

/// Those that were told of already: a list may be read each second.
#[derive(Default)]
pub(super) struct Told(Mutex<BTreeSet<Damaged>>);

impl Told {
    /// Those of `damaged` that nobody was told of yet; now they count as told of.
    pub(super) fn news(&self, damaged: &[Damaged]) -> Vec<Damaged> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        damaged.iter().filter(|row| told.len() < MOST && told.insert((*row).clone())).cloned().collect()
    }
}
