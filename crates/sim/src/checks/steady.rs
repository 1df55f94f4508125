//! How long a lease counts by a clock that does not leap: while kilnd runs it goes by that one, and when it starts it takes
//! the wall clock as it finds it.

use std::collections::BTreeMap;

use kiln_domain::Timestamp;

use crate::config::{POLICY, SECOND};
use crate::history::{Entry, Fact, LeaseRow, Request};

/// What is less may be drift of the clock, as far as kilnd can tell.
const LEAP: u64 = 5 * SECOND;

/// By how much a jump of the clock makes everything older.
pub(super) fn drift(by: i64) -> u64 {
    u64::try_from(by).ok().filter(|by| *by < LEAP).unwrap_or(0)
}

/// In milliseconds since the schedule began, and never later than it may be over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steady {
    grace_ends: u64,
    ends: u64,
}

impl Steady {
    pub(super) const fn born(at: u64) -> Self {
        let ends = at.saturating_add(POLICY.lease.max_build_age.as_millis() as u64);
        Self { grace_ends: grace_from(at), ends }
    }

    /// `at`: when that was asked for.
    pub(super) const fn renewed(&mut self, at: u64) {
        self.grace_ends = grace_from(at);
    }

    /// kilnd reads it from the disk, and cannot know what leaps there were since it was written.
    pub(super) fn read(&mut self, entry: &Entry, row: &LeaseRow) {
        let left = |until: Timestamp| entry.at.saturating_add(until.since(entry.wall).as_millis() as u64);
        self.grace_ends = self.grace_ends.min(left(row.renewed.plus(POLICY.lease.grace)));
        self.ends = self.ends.min(left(row.expires));
    }

    pub(super) const fn grow_older(&mut self, by: u64) {
        self.grace_ends = self.grace_ends.saturating_sub(by);
        self.ends = self.ends.saturating_sub(by);
    }

    pub(super) const fn is_alive(&self, at: u64, connected: bool) -> bool {
        !self.is_over(at) && (connected || at < self.grace_ends)
    }

    pub(super) const fn is_over(&self, at: u64) -> bool {
        at >= self.ends
    }
}

const fn grace_from(at: u64) -> u64 {
    at.saturating_add(POLICY.lease.grace.as_millis() as u64)
}

/// When the lease of an answer was born: the answer may have come long after.
#[derive(Default)]
pub(super) struct Births {
    asked: BTreeMap<Request, Asked>,
    jumps: u32,
}

struct Asked {
    /// Or earlier, by what the clock drifted since.
    at: u64,
    jumps: u32,
}

impl Births {
    pub(super) fn see(&mut self, entry: &Entry) {
        match &entry.fact {
            Fact::Asked { request, .. } => {
                let asked = Asked { at: entry.at, jumps: self.jumps };
                self.asked.insert(*request, asked);
            }
            Fact::Ended { request, .. } | Fact::HungUp { request } => drop(self.asked.remove(request)),
            Fact::ClockJumped { by } => {
                self.jumps += 1;
                for asked in self.asked.values_mut() {
                    asked.at = asked.at.saturating_sub(drift(*by));
                }
            }
            Fact::KilndDied => self.asked.clear(),
            _ => {}
        }
    }

    /// Where the clock has jumped meanwhile the row does not say it: not before it was asked for, then.
    pub(super) fn of(&self, entry: &Entry, request: Request, row: &LeaseRow) -> u64 {
        let age = entry.wall.since(row.created).as_millis() as u64;
        match self.asked.get(&request) {
            Some(asked) if asked.jumps != self.jumps => asked.at,
            _ => entry.at.saturating_sub(age),
        }
    }
}
