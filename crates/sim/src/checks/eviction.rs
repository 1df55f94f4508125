//! K3, where the storage runs short: what is worth least goes first, nothing that is used, and no more than it takes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Check;
use crate::cast::Cast;
use crate::config::{EVICTION, MINUTE, POLICY, SECOND};
use crate::history::{Change, Entry, Fact, LeaseId, Lineage, Project, Verb};
use crate::world::OTHERWISE;

/// How full kilnd was told that the storage is.
#[derive(Default)]
pub(super) struct Told(VecDeque<(u64, u32)>);

/// From the look to the end of what follows from it, with every step of that at its deadline, and late.
const FOLLOWS: u64 = 5 * MINUTE;

impl Told {
    pub(super) fn see(&mut self, entry: &Entry) {
        if let Fact::Fullness { permille } = entry.fact {
            self.0.push_back((entry.at, permille));
            while self.0.len() > 1 && self.0.front().is_some_and(|(at, _)| at + FOLLOWS < entry.at) {
                self.0.pop_front();
            }
        }
    }

    fn highest(&self, now: u64) -> Option<f64> {
        let lately = self.0.iter().filter(|(at, _)| at + FOLLOWS >= now);
        lately.map(|(_, permille)| *permille).max().map(percent)
    }

    fn latest(&self) -> Option<f64> {
        self.0.back().map(|(_, permille)| percent(*permille))
    }

    /// Whether what goes now may go for want of room.
    pub(super) fn is_short(&self, now: u64) -> bool {
        self.highest(now).is_some_and(|percent| percent > EVICTION.end_percent)
    }
}

fn percent(permille: u32) -> f64 {
    f64::from(permille) / 10.0
}

pub(super) struct WhatIsWorthLeastGoes {
    cast: Cast,
    told: Told,
    caches: BTreeMap<Project, Cache>,
    trash: BTreeMap<Lineage, u64>,
    leases: BTreeMap<LeaseId, Project>,
    ever_hot: BTreeSet<Project>,
    /// What fails is passed over for a while, and the next goes.
    passes_over_until: u64,
    /// Nothing can be said of when something was used last by a clock that leaps, or from a database that was lost.
    dates_are_true: bool,
}

#[derive(Default)]
struct Cache {
    /// Not before this, its last use: an answer, or the end of a build.
    used: u64,
    /// Not after this.
    touched: u64,
    /// An answer has named it since it is there, so it is somebody's.
    known: bool,
}

/// As the product's: what did not go is not asked for longer.
const PASSED_OVER: u64 = 6 * MINUTE;

/// What came to be or went to rest meanwhile was not there to be chosen.
const CHOSEN: u64 = 3 * MINUTE;

/// After which nobody can have anything in mind with a project of which nothing was heard.
const QUIET: u64 = POLICY.lease.max_build_age.as_millis() as u64 + MINUTE;

impl WhatIsWorthLeastGoes {
    pub(super) fn new(cast: Cast) -> Self {
        Self {
            cast,
            told: Told::default(),
            caches: BTreeMap::new(),
            trash: BTreeMap::new(),
            leases: BTreeMap::new(),
            ever_hot: BTreeSet::new(),
            passes_over_until: 0,
            dates_are_true: true,
        }
    }

    fn touch(&mut self, project: Project, at: u64) {
        if let Some(cache) = self.caches.get_mut(&project) {
            cache.touched = at;
        }
    }

    fn is_strict(&self, now: u64) -> bool {
        now >= self.passes_over_until
    }

    fn not_below_the_floor(&self, now: u64, what: &str) -> Result<(), String> {
        match self.told.latest() {
            Some(percent) if self.is_strict(now) && percent <= EVICTION.end_percent => {
                Err(format!("{what} had to make room, and the storage was known to be only {percent:.0} % full"))
            }
            _ => Ok(()),
        }
    }

    fn evicted(&mut self, now: u64, project: Project) -> Result<(), String> {
        let Some(Cache { used, .. }) = self.caches.remove(&project) else { return Ok(()) };
        self.not_below_the_floor(now, &format!("the cache of {project}"))?;
        let keep = EVICTION.keep_newer.as_millis() as u64;
        let urgent = self.told.highest(now).is_some_and(|percent| percent >= EVICTION.urgent_percent);
        if self.dates_are_true && !urgent && now < used + keep {
            let ago = (now - used) / 1000;
            return Err(format!(
                "the cache of {project}, used {ago} s ago, was freed, and the storage was not so full"
            ));
        }
        if !self.is_strict(now) {
            return Ok(());
        }
        if let Some((lineage, since)) = self.trash.iter().find(|(_, since)| **since + CHOSEN < now) {
            let ago = (now - since) / 1000;
            return Err(format!("the cache of {project} was freed, and {lineage} has been in the trash for {ago} s"));
        }
        let goes_before = |(other, cache): &(&Project, &Cache)| {
            cache.known
                && !self.ever_hot.contains(other)
                && !self.cast.is_derived(**other)
                && cache.touched + QUIET < now
                && cache.touched + MINUTE < used
        };
        match self.caches.iter().find(goes_before).filter(|_| self.dates_are_true) {
            Some((other, cache)) => Err(format!(
                "the cache of {project} was freed, used {} s ago, before that of {other}, unused for {} s",
                (now - used) / 1000,
                (now - cache.touched) / 1000
            )),
            None => Ok(()),
        }
    }
}

impl Check for WhatIsWorthLeastGoes {
    fn name(&self) -> &'static str {
        "K3"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        self.told.see(entry);
        if let Some(project) = entry.fact.project() {
            self.touch(project, entry.at);
        }
        match &entry.fact {
            Fact::VolumeMade { project, .. } | Fact::Cloned { project, .. } => {
                self.caches.insert(*project, Cache { touched: entry.at, ..Cache::default() });
            }
            Fact::Restored { project, lineage } => {
                self.trash.remove(lineage);
                self.caches.insert(*project, Cache { touched: entry.at, ..Cache::default() });
            }
            Fact::Discarded { project, .. } => drop(self.caches.remove(project)),
            Fact::Trashed { lineage, .. } => drop(self.trash.insert(*lineage, entry.at)),
            Fact::Freed { project, lineage } => {
                self.trash.remove(lineage);
                if self.cast.is_derived(*project) {
                    self.caches.remove(project);
                } else {
                    return self.evicted(entry.at, *project);
                }
            }
            Fact::Purged { lineage, .. } => drop(self.trash.remove(lineage)),
            Fact::MadeHot { project } => drop(self.ever_hot.insert(*project)),
            Fact::Asked { verb: Verb::Remove, project, .. } => {
                if let Some(cache) = self.caches.get_mut(project) {
                    cache.known = false;
                }
            }
            Fact::Leased { lease, project, row: Some(_), .. } => {
                self.leases.insert(*lease, *project);
                if let Some(cache) = self.caches.get_mut(project) {
                    (cache.used, cache.known) = (entry.at, true);
                }
            }
            Fact::Released { lease, change: Change::Done } => {
                let cache = self.leases.get(lease).and_then(|project| self.caches.get_mut(project));
                if let Some(cache) = cache {
                    (cache.used, cache.touched) = (entry.at, entry.at);
                }
            }
            Fact::ClockJumped { .. } | Fact::DatabaseLost => self.dates_are_true = false,
            Fact::Fault(kind) if *kind == OTHERWISE => {}
            Fact::Fault(_) | Fact::KilndDied => self.passes_over_until = entry.at + PASSED_OVER + 30 * SECOND,
            _ => {}
        }
        Ok(())
    }
}
