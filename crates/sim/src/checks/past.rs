//! K3, of a cache's past: a snapshot is what it is said to be, a way back leads to it, and Kiln goes it by itself only to rescue.

use std::collections::{BTreeMap, BTreeSet};

use super::Check;
use super::wishes::Wishes;
use crate::config::{RESCUE_AGAIN, SECOND};
use crate::history::{Ending, Entry, Fact, Lineage, Project, Request, Verb};

#[derive(Default)]
pub(super) struct ThePastIsTrue {
    wishes: Wishes,
    live: BTreeMap<Project, Lineage>,
    /// Of each cache, wherever it lies, the sequences of its snapshots.
    held: BTreeMap<Lineage, BTreeSet<u64>>,
    snapshots: BTreeMap<(Project, u64), Moment>,
    last: BTreeMap<Project, u64>,
    /// What the next daemon has to find, as nothing was written since the cache went back.
    back: BTreeMap<Project, u64>,
    rescues: BTreeMap<Project, u64>,
    /// A record cannot be kept.
    disk_full: bool,
    /// Who asked, when, and what the cache was then.
    asked: BTreeMap<Request, Asked>,
    went: Vec<(u64, Project, u64)>,
}

struct Asked {
    at: u64,
    verb: Verb,
    project: Project,
    cache: Option<Lineage>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Moment {
    version: u64,
    damaged: bool,
    opened: Option<bool>,
    good: bool,
}

/// A rescue that was reported as failed is tried again.
const ONE_RESCUE: u64 = 120 * SECOND;
/// Until what is done is written down.
const WRITTEN_AFTER: u64 = 30 * SECOND;

impl ThePastIsTrue {
    fn moment(&mut self, project: Project, sequence: u64) -> &mut Moment {
        self.snapshots.entry((project, sequence)).or_default()
    }

    fn of(&self, project: Project) -> Option<&BTreeSet<u64>> {
        self.held.get(self.live.get(&project)?)
    }

    fn newest_good(&self, project: Project) -> Option<u64> {
        let good = |sequence: &&u64| self.snapshots.get(&(project, **sequence)).is_some_and(|moment| moment.good);
        self.of(project)?.iter().rev().find(good).copied()
    }

    fn taken(&mut self, project: Project, lineage: Lineage, sequence: u64, moment: Moment) -> Result<(), String> {
        let last = self.last.insert(project, sequence).unwrap_or_default();
        self.held.entry(lineage).or_default().insert(sequence);
        self.snapshots.insert((project, sequence), moment);
        if sequence > last {
            return Ok(());
        }
        Err(format!("a snapshot of {project} got number {sequence}, and {last} was given out before"))
    }

    fn gone(&mut self, project: Project, sequence: u64) -> Result<(), String> {
        let good = self.newest_good(project);
        let newest = self.of(project).and_then(BTreeSet::last).copied();
        if let Some(held) = self.live.get(&project).and_then(|lineage| self.held.get_mut(lineage)) {
            held.remove(&sequence);
        }
        if good == Some(sequence) {
            return Err(format!("{project}'s newest good snapshot, {sequence}, was destroyed"));
        }
        if newest == Some(sequence) {
            return Err(format!("{project}'s newest snapshot, {sequence}, was destroyed"));
        }
        Ok(())
    }

    fn judged(&mut self, project: Project, sequence: u64, good: bool) -> Result<(), String> {
        let moment = self.moment(project, sequence);
        moment.good = good;
        let (opened, damaged) = (moment.opened, moment.damaged);
        if opened == Some(good) && !(good && damaged) {
            return Ok(());
        }
        Err(format!("snapshot {sequence} of {project} was judged (good: {good}), and was opened: {opened:?}"))
    }

    fn went_back(
        &mut self,
        entry: &Entry,
        project: Project,
        (from, lineage): (Lineage, Lineage),
        to: u64,
        damaged: bool,
    ) -> Result<(), String> {
        let older = self.held.get_mut(&from).map(|held| {
            let younger = held.split_off(&(to + 1));
            std::mem::replace(held, younger)
        });
        let older = older.unwrap_or_default();
        let there = older.contains(&to);
        self.held.insert(lineage, older);
        self.live.insert(project, lineage);
        let Moment { version, good, .. } = *self.moment(project, to);
        self.back.insert(project, version);
        self.went.push((entry.at, project, to));
        if !there {
            return Err(format!("{project} went back to {to}, which it does not have"));
        }
        if self.wishes.went_back(project, to) {
            return Ok(());
        }
        self.rescued(entry, project, to, good, damaged)
    }

    fn rescued(&mut self, entry: &Entry, project: Project, to: u64, good: bool, damaged: bool) -> Result<(), String> {
        let last = self.rescues.get(&project).copied();
        let again = last.is_some_and(|last| entry.at - last <= ONE_RESCUE);
        if !good {
            return Err(format!("{project} was taken back to {to} by Kiln itself, and that is not known to be good"));
        }
        if !damaged {
            return Err(format!("{project} was taken back to {to}, and nobody had asked, and it was not damaged"));
        }
        if let Some(last) = last.filter(|last| !again && entry.at - last < RESCUE_AGAIN) {
            return Err(format!("{project} was taken back by Kiln itself again after {} s", (entry.at - last) / 1000));
        }
        if !self.disk_full {
            self.rescues.insert(project, entry.at);
        }
        Ok(())
    }

    /// Another cache is in its place, or none.
    fn replaced(&mut self, project: Project, by: Option<Lineage>) {
        self.back.remove(&project);
        self.rescues.remove(&project);
        match by {
            Some(lineage) => drop(self.live.insert(project, lineage)),
            None => drop(self.live.remove(&project)),
        }
    }

    fn told(&self, request: Request, sequence: u64) -> Result<(), String> {
        let Some(Asked { at, verb, project, .. }) = self.asked.get(&request) else { return Ok(()) };
        let is_so = match verb {
            Verb::Rollback { to, .. } => {
                // It may have gone there a moment before it was asked to; then nothing has run since.
                let since = if self.back.contains_key(project) { 0 } else { *at };
                let went = |(when, who, to): &(u64, Project, u64)| *when >= since && who == project && *to == sequence;
                to.is_none_or(|to| to == sequence) && self.went.iter().any(went)
            }
            _ => self.snapshots.contains_key(&(*project, sequence)),
        };
        if is_so { Ok(()) } else { Err(format!("{project} answered {verb:?} with {sequence}, and that was not done")) }
    }

    fn ended(&mut self, request: Request, ending: &Ending) -> Result<(), String> {
        let Some(Asked { verb, project, cache, .. }) = self.asked.remove(&request) else { return Ok(()) };
        let same = cache.is_some() && self.live.get(&project).copied() == cache;
        if matches!(verb, Verb::Reset { .. }) && *ending == Ending::Good && same {
            return Err(format!("{project} was said to begin anew, and has cache {cache:?} as before"));
        }
        Ok(())
    }

    /// What has to do with kilnd and its disk: what it may have forgotten.
    fn forget(&mut self, entry: &Entry) {
        match entry.fact {
            Fact::KilndDied => {
                self.asked.clear();
                self.rescues.retain(|_, at| *at + WRITTEN_AFTER < entry.at);
            }
            Fact::DatabaseLost | Fact::ClockJumped { .. } => self.rescues.clear(),
            Fact::Fault("disk full" | "disk stalled") => {
                self.disk_full = true;
                self.rescues.retain(|_, at| *at + WRITTEN_AFTER < entry.at);
            }
            Fact::Fault("disk has room") => self.disk_full = false,
            _ => {}
        }
    }
}

impl Check for ThePastIsTrue {
    fn name(&self) -> &'static str {
        "K3"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        self.wishes.see(entry);
        self.forget(entry);
        match &entry.fact {
            Fact::VolumeMade { project, lineage }
            | Fact::Cloned { project, lineage, .. }
            | Fact::Restored { project, lineage } => self.replaced(*project, Some(*lineage)),
            Fact::Discarded { project, .. } | Fact::Freed { project, .. } => self.replaced(*project, None),
            Fact::SnapshotTaken { project, lineage, sequence, version, damaged } => {
                let moment = Moment { version: *version, damaged: *damaged, ..Moment::default() };
                return self.taken(*project, *lineage, *sequence, moment);
            }
            Fact::SnapshotGone { project, sequence } => return self.gone(*project, *sequence),
            Fact::TriedOut { project, sequence, opened } => {
                self.moment(*project, *sequence).opened = Some(*opened);
            }
            Fact::Judged { project, sequence, good } => return self.judged(*project, *sequence, *good),
            Fact::WentBack { project, lineage, from, to, damaged, .. } => {
                return self.went_back(entry, *project, (*from, *lineage), *to, *damaged);
            }
            Fact::Damaged { project } => drop(self.back.remove(project)),
            Fact::Started { project, version, .. } => {
                if let Some(wanted) = self.back.remove(project).filter(|wanted| wanted != version) {
                    return Err(format!("{project} went back to version {wanted} and was started on {version}"));
                }
            }
            Fact::Asked { request, verb, project } => {
                let cache = self.live.get(project).copied();
                self.asked.insert(*request, Asked { at: entry.at, verb: *verb, project: *project, cache });
            }
            Fact::HungUp { request } => drop(self.asked.remove(request)),
            Fact::Told { request, sequence } => return self.told(*request, *sequence),
            Fact::Ended { request, ending } => return self.ended(*request, ending),
            _ => {}
        }
        Ok(())
    }
}
