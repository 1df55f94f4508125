//! What admins asked of caches, and were not refused.

use std::collections::BTreeMap;

use crate::history::{Ending, Entry, Fact, Project, Request, Verb};

/// One that was asked for may be done long after its asker has gone: kilnd had begun it.
#[derive(Default)]
pub(super) struct Wishes {
    asked: BTreeMap<Request, (Verb, Project)>,
    /// Removals and resets.
    discards: BTreeMap<Project, u32>,
    /// `None`: to the newest good one.
    ways_back: Vec<(Project, Option<u64>)>,
}

impl Wishes {
    pub(super) fn see(&mut self, entry: &Entry) {
        match &entry.fact {
            Fact::Asked { request, verb, project } => {
                match verb {
                    Verb::Remove | Verb::Reset { .. } => *self.discards.entry(*project).or_default() += 1,
                    Verb::Rollback { to, .. } => self.ways_back.push((*project, *to)),
                    _ => {}
                }
                self.asked.insert(*request, (*verb, *project));
            }
            Fact::Ended { request, ending } => self.ended(*request, ending),
            Fact::HungUp { request } => drop(self.asked.remove(request)),
            Fact::KilndDied => self.asked.clear(),
            _ => {}
        }
    }

    fn ended(&mut self, request: Request, ending: &Ending) {
        let Some((verb, project)) = self.asked.remove(&request) else { return };
        // Only these are a no for good: what failed may be done all the same.
        let no = |why: &str| why.contains(" is busy: ") || why.contains("no project") || why.contains(" has no ");
        let refused = matches!(ending, Ending::Bad(why) if no(why));
        match verb {
            Verb::Remove | Verb::Reset { .. } if refused => {
                let count = self.discards.entry(project).or_default();
                *count = count.saturating_sub(1);
            }
            Verb::Rollback { to, .. } if refused => {
                self.take(project, to);
            }
            _ => {}
        }
    }

    /// Whether somebody asks for it at this moment.
    pub(super) fn is_asked(&self, is_it: impl Fn(Verb, Project) -> bool) -> bool {
        self.asked.values().any(|(verb, project)| is_it(*verb, *project))
    }

    /// False: nobody had asked. One answers all of them.
    pub(super) fn discarded(&mut self, project: Project) -> bool {
        self.discards.insert(project, 0).is_some_and(|count| count > 0)
    }

    fn take(&mut self, project: Project, to: Option<u64>) -> bool {
        let at = self.ways_back.iter().position(|wish| *wish == (project, to));
        at.map(|at| self.ways_back.remove(at)).is_some()
    }

    /// False: nobody had asked.
    pub(super) fn went_back(&mut self, project: Project, to: u64) -> bool {
        self.take(project, Some(to)) || self.take(project, None)
    }
}
