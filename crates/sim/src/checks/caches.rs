//! K3 and K5: the cache outlives everything, and the host is the truth.

use std::collections::{BTreeMap, BTreeSet};

use super::Check;
use crate::config::{LONGEST_STALL, TRASH_KEPT};
use crate::history::{Ending, Entry, Fact, Lineage, Project, Request, Verb};

/// K3: a cache leaves a project only by an admin's removal, and the trash by an admin's word, age, or for want of room.
#[derive(Default)]
pub(super) struct NoCacheIsLost {
    live: BTreeMap<Project, Lineage>,
    trash: BTreeMap<Lineage, Project>,
    /// Removals that were asked for and not refused.
    removals: BTreeMap<Project, u32>,
    asked: BTreeMap<Request, (Verb, Project)>,
}

impl NoCacheIsLost {
    fn ended(&mut self, request: Request, ending: &Ending) {
        let Some((verb, project)) = self.asked.remove(&request) else { return };
        // Only "busy" is a no for good: what failed goes on by itself.
        let refused = matches!(ending, Ending::Bad(why) if why.contains(" is busy: ") || why.contains("no project"));
        if let (Verb::Remove, true, Some(count)) = (verb, refused, self.removals.get_mut(&project)) {
            *count = count.saturating_sub(1);
        }
    }

    fn discarded(&mut self, project: Project, lineage: Lineage) -> Result<(), String> {
        self.live.remove(&project);
        self.trash.insert(lineage, project);
        match self.removals.insert(project, 0) {
            Some(1..) => Ok(()),
            _ => Err(format!("the cache of {project} went to the trash, and nobody had asked for its removal")),
        }
    }

    fn purged(&mut self, project: Project, lineage: Lineage, age: i64, full: bool) -> Result<(), String> {
        self.trash.remove(&lineage);
        let of_admin =
            self.asked.values().any(|(verb, of)| *verb == Verb::EmptyTrash || (*verb == Verb::Purge && *of == project));
        if of_admin || full || age >= TRASH_KEPT.as_millis() as i64 {
            return Ok(());
        }
        Err(format!("a cache of {project} was freed for good after {} s in the trash", age / 1000))
    }
}

impl Check for NoCacheIsLost {
    fn name(&self) -> &'static str {
        "K3"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        match &entry.fact {
            Fact::VolumeMade { project, lineage } => {
                if let Some(before) = self.live.insert(*project, *lineage) {
                    return Err(format!("{project} got the new cache {lineage} in the place of {before}"));
                }
            }
            Fact::Started { project, lineage, .. } if self.live.get(project) != Some(lineage) => {
                return Err(format!("{project} was started on cache {lineage}, which is not its own"));
            }
            Fact::Discarded { project, lineage } => return self.discarded(*project, *lineage),
            Fact::Restored { project, lineage } => {
                self.trash.remove(lineage);
                self.live.insert(*project, *lineage);
            }
            Fact::Purged { project, lineage, age, full } => return self.purged(*project, *lineage, *age, *full),
            Fact::Asked { request, verb, project } => {
                self.asked.insert(*request, (*verb, *project));
                if *verb == Verb::Remove {
                    *self.removals.entry(*project).or_default() += 1;
                }
            }
            Fact::Ended { request, ending } => self.ended(*request, ending),
            Fact::HungUp { request } => drop(self.asked.remove(request)),
            Fact::KilndDied => self.asked.clear(),
            _ => {}
        }
        Ok(())
    }
}

/// K5: whatever the host has of a project is found again when the database is lost.
#[derive(Default)]
pub(super) struct TheHostIsTheTruth {
    volumes: BTreeSet<Project>,
    instances: BTreeSet<Project>,
    /// The database was lost, and is not known to be whole again.
    lost: bool,
    /// The host could not be looked through, or the disk not be written to, in this life.
    hindered: bool,
    disk_full: bool,
    disk_stalls_until: u64,
}

impl TheHostIsTheTruth {
    fn all_are_in(&self, projects: &[Project]) -> Result<(), String> {
        match self.volumes.union(&self.instances).find(|project| !projects.contains(project)) {
            Some(missing) => Err(format!("{missing} is on the host and was not found again")),
            None => Ok(()),
        }
    }
}

impl Check for TheHostIsTheTruth {
    fn name(&self) -> &'static str {
        "K5"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        match &entry.fact {
            Fact::VolumeMade { project, .. } | Fact::Restored { project, .. } => drop(self.volumes.insert(*project)),
            Fact::Discarded { project, .. } => drop(self.volumes.remove(project)),
            Fact::InstanceMade { project } => drop(self.instances.insert(*project)),
            Fact::InstanceDestroyed { project } => drop(self.instances.remove(project)),
            Fact::DatabaseLost => self.lost = true,
            Fact::KilndStarted { .. } => self.hindered = self.disk_full || entry.at < self.disk_stalls_until,
            Fact::Fault("look failed" | "look hung") => self.hindered = true,
            Fact::Fault("disk stalled") => {
                (self.disk_stalls_until, self.hindered) = (entry.at + LONGEST_STALL, true);
            }
            Fact::Fault("disk full") => (self.disk_full, self.hindered) = (true, true),
            Fact::Fault("disk has room") => self.disk_full = false,
            Fact::KilndReady { projects } if self.lost && !self.hindered => {
                self.lost = false;
                return self.all_are_in(projects);
            }
            // Whatever hindered it is over.
            Fact::Rested { projects } => return self.all_are_in(projects),
            _ => {}
        }
        Ok(())
    }
}
