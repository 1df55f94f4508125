//! How old things get as kilnd has to see it: while it runs, a leap of the wall clock makes nothing older or younger, and when
//! it starts it takes the clock as it finds it.

use std::collections::BTreeMap;

use kiln_domain::Timestamp;

use crate::config::{POLICY, SECOND};
use crate::history::{Entry, Fact, LeaseRow, Request};

/// What is less may be drift of the clock, as far as kilnd can tell (`follow_the_clock`).
const LEAP: u64 = 5 * SECOND;

/// The clock of what grows older while kilnd runs. Shown every entry before anything is asked of it.
#[derive(Default)]
pub(super) struct Steady {
    /// By how much the wall clock has gone forward in leaps that kilnd takes for drift.
    drift: u64,
    jumps: u32,
    /// When each request was made.
    asked: BTreeMap<Request, Asked>,
}

struct Asked {
    age: u64,
    jumps: u32,
}

impl Steady {
    pub(super) fn see(&mut self, entry: &Entry) {
        match &entry.fact {
            Fact::Asked { request, .. } => {
                let asked = Asked { age: self.age(entry), jumps: self.jumps };
                self.asked.insert(*request, asked);
            }
            Fact::Ended { request, .. } | Fact::HungUp { request } => drop(self.asked.remove(request)),
            Fact::KilndDied => self.asked.clear(),
            Fact::ClockJumped { by } => {
                self.jumps += 1;
                self.drift += u64::try_from(*by).ok().filter(|by| *by < LEAP).unwrap_or(0);
            }
            _ => {}
        }
    }

    /// Leaps make nothing older, and a little of each is drift.
    pub(super) const fn age(&self, entry: &Entry) -> u64 {
        entry.at + self.drift
    }

    /// The lease of an answer, which may come long after its birth. Where the clock has jumped meanwhile its row does not
    /// tell when that was: not before it was asked for.
    pub(super) fn born(&self, entry: &Entry, request: Request, row: &LeaseRow) -> Life {
        let born = match self.asked.get(&request) {
            Some(asked) if asked.jumps != self.jumps => asked.age,
            _ => self.told_by(entry, row),
        };
        Life { renewed: born.cast_signed(), ends: born + LONGEST, taken_up: None }
    }

    /// The same, seen from the other side: not after its answer.
    pub(super) fn born_at_the_latest(&self, entry: &Entry, request: Request, row: &LeaseRow) -> u64 {
        match self.asked.get(&request) {
            Some(asked) if asked.jumps != self.jumps => self.age(entry),
            _ => self.told_by(entry, row),
        }
    }

    fn told_by(&self, entry: &Entry, row: &LeaseRow) -> u64 {
        self.age(entry).saturating_sub(millis(entry.wall.since(row.created)))
    }
}

const LONGEST: u64 = POLICY.lease.max_build_age.as_millis() as u64;
const GRACE: i64 = POLICY.lease.grace.as_millis() as i64;

const fn millis(span: std::time::Duration) -> u64 {
    span.as_millis() as u64
}

/// Of a lease, by [`Steady::age`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Life {
    /// Since when it has not been used: maybe before the schedule began.
    renewed: i64,
    /// The end, whatever its client does.
    ends: u64,
    /// When it was read from the disk, and what stood there.
    taken_up: Option<(u64, LeaseRow)>,
}

impl Life {
    pub(super) const fn renewed(&mut self, age: u64) {
        self.renewed = age.cast_signed();
    }

    /// What is from the future is from now, and ends one longest life from now.
    pub(super) fn taken_up(&mut self, entry: &Entry, age: u64, row: &LeaseRow) {
        (self.renewed, self.ends) = Self::found(entry.wall, age, row);
        self.taken_up = Some((entry.at, *row));
    }

    /// In the very moment of a start kilnd may have read its clock on either side of a jump.
    pub(super) fn jumped(&mut self, entry: &Entry, age: u64) {
        if let Some((_, row)) = self.taken_up.filter(|(at, _)| *at == entry.at) {
            let (renewed, ends) = Self::found(entry.wall, age, &row);
            (self.renewed, self.ends) = (self.renewed.min(renewed), self.ends.min(ends));
        }
    }

    fn found(wall: Timestamp, age: u64, row: &LeaseRow) -> (i64, u64) {
        let (unused, left) = (millis(wall.since(row.renewed)), millis(row.expires.since(wall)));
        (age.cast_signed() - unused.cast_signed(), age + left.min(LONGEST))
    }

    pub(super) const fn is_alive(&self, age: u64, connected: bool) -> bool {
        !self.is_over(age) && (connected || age.cast_signed() - self.renewed < GRACE)
    }

    pub(super) const fn is_over(&self, age: u64) -> bool {
        age >= self.ends
    }
}
