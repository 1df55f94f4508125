//! K7: what is derived from a project is kept apart from it, from every other, and within bounds.

use std::collections::BTreeMap;

use kiln_domain::cache::FanOutPolicy;
use kiln_domain::cache::ForkBounds;

use super::Check;
use crate::cast::{Cast, Part};
use crate::history::{Entry, Fact, Incarnation, Lineage, Project};

/// A copy is of its own project's cache and lies in a volume of its own; no two daemons have one address; and no more forks are
/// at work than may be.
pub(super) struct CopiesAreKeptApart {
    cast: Cast,
    bounds: ForkBounds,
    fan_out: FanOutPolicy,
    owners: BTreeMap<Lineage, Project>,
    running: BTreeMap<Incarnation, (Project, String)>,
}

impl CopiesAreKeptApart {
    pub(super) fn new(cast: Cast, bounds: ForkBounds, fan_out: FanOutPolicy) -> Self {
        Self { cast, bounds, fan_out, owners: BTreeMap::new(), running: BTreeMap::new() }
    }

    fn started(&self, project: Project, lineage: Lineage, address: &str) -> Result<(), String> {
        if let Some(owner) = self.owners.get(&lineage).filter(|owner| **owner != project) {
            return Err(format!("{project} was started on cache {lineage}, which is {owner}'s"));
        }
        match self.running.values().find(|(_, other)| other == address) {
            Some((other, _)) => Err(format!("{project} was started at {address}, where {other} runs")),
            None => Ok(()),
        }
    }

    fn is_counted(&self, project: Project) -> bool {
        matches!(self.cast.part(project), Part::Fork | Part::PullRequest(_) | Part::Member(_))
    }

    fn within_bounds(&self, project: Project) -> Result<(), String> {
        let parent = self.cast.parent(project);
        let forks = self.cast.is_fork(project);
        let (per_project, on_host) = if forks {
            (self.bounds.per_project, self.bounds.on_host)
        } else {
            (usize::from(self.fan_out.members), self.fan_out.on_host)
        };
        let copies = self.running.values().map(|(copy, _)| *copy).filter(|copy| self.is_counted(*copy));
        let alike: Vec<Project> = copies.filter(|copy| self.cast.is_fork(*copy) == forks).collect();
        let own = alike.iter().filter(|copy| self.cast.parent(**copy) == parent).count();
        if own <= per_project && alike.len() <= on_host {
            return Ok(());
        }
        let (what, all) = (if forks { "forks" } else { "members" }, alike.len());
        Err(format!("{parent} has {own} {what} of {all} that run, and {per_project} of {on_host} may be"))
    }
}

impl Check for CopiesAreKeptApart {
    fn name(&self) -> &'static str {
        "K7"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        match &entry.fact {
            Fact::VolumeMade { project, lineage } | Fact::WentBack { project, lineage, .. } => {
                self.owners.insert(*lineage, *project);
            }
            Fact::Cloned { project, lineage, from } => {
                self.owners.insert(*lineage, *project);
                let parent = self.cast.parent(*project);
                if !self.cast.is_derived(*project) || self.owners.get(from) != Some(&parent) {
                    return Err(format!("{project} got a copy of cache {from}, which is not that of {parent}"));
                }
            }
            Fact::Started { project, incarnation, lineage, address, .. } => {
                self.started(*project, *lineage, address)?;
                self.running.insert(*incarnation, (*project, address.clone()));
                return if self.is_counted(*project) { self.within_bounds(*project) } else { Ok(()) };
            }
            Fact::Gone { incarnation, .. } => drop(self.running.remove(incarnation)),
            _ => {}
        }
        Ok(())
    }
}
