//! K10, where a damaged cache is rescued: whoever waited for its daemon gets it.

use std::collections::{BTreeMap, BTreeSet};

use super::Check;
use super::wishes::Wishes;
use crate::history::{Ending, Entry, Fact, Project, Request, Verb};

pub(super) struct RescueServesWhoWaits {
    /// Nothing that is asked of the host fails by chance.
    obedient: bool,
    wishes: Wishes,
    open: BTreeMap<Request, (Verb, Project)>,
    /// Those that a rescue was for, and nothing else went wrong since.
    waiting: BTreeSet<Request>,
}

impl RescueServesWhoWaits {
    pub(super) fn new(obedient: bool) -> Self {
        Self { obedient, wishes: Wishes::default(), open: BTreeMap::new(), waiting: BTreeSet::new() }
    }

    fn is_route_to(&self, request: Request, of: Project) -> bool {
        matches!(self.open.get(&request), Some((Verb::Route, project)) if *project == of)
    }
}

impl Check for RescueServesWhoWaits {
    fn name(&self) -> &'static str {
        "K10"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        self.wishes.see(entry);
        match &entry.fact {
            Fact::Asked { request, verb, project } => {
                let others = self.waiting.iter().filter(|waiting| self.is_route_to(**waiting, *project));
                let others: Vec<Request> = others.copied().collect();
                let asks_for_more = matches!(verb, Verb::Route | Verb::RouteOrLease { .. } | Verb::Prewarm);
                if !asks_for_more {
                    self.waiting.retain(|waiting| !others.contains(waiting));
                }
                self.open.insert(*request, (*verb, *project));
            }
            // Where an admin wants to go back to may be no better.
            Fact::WentBack { project, to, .. } if self.wishes.went_back(*project, *to) => {}
            Fact::WentBack { project, damaged: true, .. } if self.obedient => {
                let of_it = self.open.keys().filter(|request| self.is_route_to(**request, *project)).copied();
                let of_it: Vec<Request> = of_it.collect();
                self.waiting.extend(of_it);
            }
            // Whatever else goes wrong may be why.
            Fact::Fault(_) | Fact::ClockJumped { .. } => self.waiting.clear(),
            Fact::HungUp { request } => {
                self.open.remove(request);
                self.waiting.remove(request);
            }
            Fact::KilndDied => (self.open, self.waiting) = Default::default(),
            Fact::Ended { request, ending } => {
                let asked = self.open.remove(request);
                if let (true, Some((_, project)), Ending::Bad(why)) = (self.waiting.remove(request), asked, ending)
                    // Who was out of patience may have waited for others.
                    && !why.contains("gave up after")
                {
                    return Err(format!("{project}'s cache was rescued, and whoever had waited was told: {why}"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
