//! K6, K7 and K10: what becomes of those who ask.

use std::collections::BTreeMap;

use kiln_domain::Step;

use super::Check;
use crate::config::{CONNECT_WAIT, DEADLINES, MINUTE, ROUTE_WAIT, SECOND};
use crate::history::{Ending, Entry, Fact, Project, Request, Verb};

/// K6: where nothing goes wrong but clients that hang up, everybody else gets what he asked for.
pub(super) struct AHangUpHarmsNobody {
    calm: bool,
    asked: BTreeMap<Request, (Verb, Project)>,
}

impl AHangUpHarmsNobody {
    pub(super) const fn new(calm: bool) -> Self {
        Self { calm, asked: BTreeMap::new() }
    }
}

impl Check for AHangUpHarmsNobody {
    fn name(&self) -> &'static str {
        "K6"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        if !self.calm {
            return Ok(());
        }
        match &entry.fact {
            Fact::Asked { request, verb, project } => drop(self.asked.insert(*request, (*verb, *project))),
            Fact::HungUp { request } => drop(self.asked.remove(request)),
            Fact::Ended { request, ending } => {
                let asked = self.asked.remove(request);
                if let (Some((verb, project)), Ending::Bad(why)) = (asked, ending)
                    // There may be so many forks and no more, and that is said.
                    && !why.contains("are at work, and")
                    && matches!(verb, Verb::Route | Verb::RouteOrLease { .. } | Verb::Prewarm | Verb::Complete)
                {
                    return Err(format!("{project}: nothing had gone wrong, and {verb:?} ended with: {why}"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// K7: where nothing keeps untrusted builds apart, they get nothing.
#[derive(Default)]
pub(super) struct UntrustedIsRefused {
    asked: BTreeMap<Request, Project>,
}

impl Check for UntrustedIsRefused {
    fn name(&self) -> &'static str {
        "K7"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        match &entry.fact {
            Fact::Asked { request, verb: Verb::Untrusted, project } => drop(self.asked.insert(*request, *project)),
            Fact::Ended { request, ending } => {
                if let (Some(project), Ending::Good) = (self.asked.remove(request), ending) {
                    return Err(format!("an untrusted build was let in at {project}"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// K10: every request ends within its deadline.
#[derive(Default)]
pub(super) struct EveryWaitEnds {
    open: BTreeMap<Request, (u64, Verb, Project)>,
}

/// What a request may wait beyond its own patience: a few commits on a disk that stalls (8 s at most, one stall at a time),
/// and the way to the host and back.
const SLACK: u64 = 30 * SECOND;

fn limit(verb: Verb) -> u64 {
    let millis = |span: std::time::Duration| span.as_millis() as u64;
    let stop = millis(DEADLINES.observe + DEADLINES.of(Step::CountBuilds)) + millis(DEADLINES.drain) + 30 * SECOND;
    let patience = match verb {
        Verb::Route => millis(ROUTE_WAIT),
        Verb::RouteOrLease { wait } | Verb::Poll { wait } => wait,
        Verb::Connect => millis(CONNECT_WAIT),
        Verb::Stop | Verb::Force => stop,
        Verb::Remove => 2 * stop + millis(DEADLINES.destroy_volume),
        Verb::Rollback { .. } | Verb::Reset { .. } => 2 * stop + millis(DEADLINES.create_volume),
        Verb::Snapshot => millis(DEADLINES.observe + DEADLINES.create_volume),
        Verb::Set | Verb::Why | Verb::CacheLog => millis(DEADLINES.observe),
        // The host's own deadlines, entry by entry.
        Verb::Restore
        | Verb::Purge
        | Verb::EmptyTrash
        | Verb::Trash
        | Verb::Orphans
        | Verb::Adopt
        | Verb::CacheUsage => 10 * MINUTE,
        _ => 0,
    };
    patience + SLACK
}

impl EveryWaitEnds {
    fn in_time(entry: &Entry, (asked, verb, project): (u64, Verb, Project)) -> Result<(), String> {
        let took = entry.at - asked;
        if took <= limit(verb) {
            return Ok(());
        }
        Err(format!("{project}: {verb:?} took {} s, and at most {} are allowed", took / 1000, limit(verb) / 1000))
    }
}

impl Check for EveryWaitEnds {
    fn name(&self) -> &'static str {
        "K10"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        match &entry.fact {
            Fact::Asked { request, verb, project } => {
                self.open.insert(*request, (entry.at, *verb, *project));
            }
            Fact::HungUp { request } => drop(self.open.remove(request)),
            Fact::Ended { request, ending } => {
                if let Some(open) = self.open.remove(request) {
                    if let (Verb::CompleteWrong, Ending::Bad(why)) = (open.1, ending) {
                        return Err(format!("{}: {why}", open.2));
                    }
                    return Self::in_time(entry, open);
                }
            }
            Fact::KilndDied => self.open.clear(),
            Fact::FaultsEnd | Fact::Settled { .. } => {
                return self.open.values().try_for_each(|open| Self::in_time(entry, *open));
            }
            _ => {}
        }
        Ok(())
    }
}
