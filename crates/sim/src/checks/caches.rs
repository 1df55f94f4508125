//! K3 and K5: the cache outlives everything, and the host is the truth.

use std::collections::{BTreeMap, BTreeSet};

use super::Check;
use super::eviction::Told;
use super::wishes::Wishes;
use crate::cast::Cast;
use crate::config::{LONGEST_STALL, TRASH_KEPT};
use crate::history::{Entry, Fact, Lineage, Project, Verb};

/// K3: a cache leaves a project only by an admin's removal, reset or way back, or for want of room, and the trash by an admin's
/// word, age, or for want of room. What is only a copy goes with those who needed it.
pub(super) struct NoCacheIsLost {
    cast: Cast,
    live: BTreeMap<Project, Lineage>,
    wishes: Wishes,
    told: Told,
}

impl NoCacheIsLost {
    pub(super) fn new(cast: Cast) -> Self {
        Self { cast, live: BTreeMap::new(), wishes: Wishes::default(), told: Told::default() }
    }

    fn made(&mut self, project: Project, lineage: Lineage) -> Result<(), String> {
        match self.live.insert(project, lineage) {
            Some(before) => Err(format!("{project} got the new cache {lineage} in the place of {before}")),
            None => Ok(()),
        }
    }

    fn discarded(&mut self, project: Project) -> Result<(), String> {
        self.live.remove(&project);
        if self.wishes.discarded(project) {
            return Ok(());
        }
        Err(format!("the cache of {project} went to the trash, and nobody had asked for its removal"))
    }

    fn freed(&mut self, entry: &Entry, project: Project) -> Result<(), String> {
        self.live.remove(&project);
        if self.cast.is_derived(project) || self.told.is_short(entry.at) {
            return Ok(());
        }
        Err(format!("the cache of {project}, which is no copy, was freed for good with storage enough"))
    }

    fn purged(&self, entry: &Entry, project: Project, age: i64) -> Result<(), String> {
        let of_admin =
            self.wishes.is_asked(|verb, of| verb == Verb::EmptyTrash || (verb == Verb::Purge && of == project));
        if of_admin
            || self.told.is_short(entry.at)
            || age >= TRASH_KEPT.as_millis() as i64
            || self.cast.is_derived(project)
        {
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
        self.wishes.see(entry);
        self.told.see(entry);
        match &entry.fact {
            Fact::VolumeMade { project, lineage } | Fact::Cloned { project, lineage, .. } => {
                return self.made(*project, *lineage);
            }
            Fact::Started { project, lineage, .. } if self.live.get(project) != Some(lineage) => {
                return Err(format!("{project} was started on cache {lineage}, which is not its own"));
            }
            Fact::Discarded { project, .. } => return self.discarded(*project),
            Fact::Freed { project, .. } => return self.freed(entry, *project),
            Fact::WentBack { project, lineage, .. } | Fact::Restored { project, lineage } => {
                self.live.insert(*project, *lineage);
            }
            Fact::Purged { project, age, .. } => return self.purged(entry, *project, *age),
            _ => {}
        }
        Ok(())
    }
}

/// K5: whatever the host has of a project is found again when the database is lost.
pub(super) struct TheHostIsTheTruth {
    cast: Cast,
    there: Objects,
    /// What landed on the host for a kilnd whose database is lost, when the next one may have looked through the host already: nobody
    /// knows of it before its project is asked for again, or it is looked for anew.
    late: Objects,
    /// Projects that something was done for since a kilnd began with a new database; `None`: none has, since it was lost if it was.
    known: Option<BTreeSet<Project>>,
    /// Projects whose rows are gone, and that nothing was done for since.
    forgotten: BTreeSet<Project>,
    /// The database was lost, and is not known to be whole again.
    lost: bool,
    /// The host could not be looked through, or the disk not be written to, in this life.
    hindered: bool,
    disk_full: bool,
    disk_stalls_until: u64,
}

#[derive(Default)]
struct Objects {
    volumes: BTreeSet<Project>,
    instances: BTreeSet<Project>,
}

impl TheHostIsTheTruth {
    pub(super) fn new(cast: Cast) -> Self {
        let (there, late, forgotten) = Default::default();
        let (lost, hindered, disk_full, disk_stalls_until) = (false, false, false, 0);
        Self { cast, there, late, known: None, forgotten, lost, hindered, disk_full, disk_stalls_until }
    }

    fn of(&mut self, project: Project) -> &mut Objects {
        let unknown = self.known.as_ref().is_some_and(|known| !known.contains(&project));
        let is_late = unknown || self.forgotten.contains(&project);
        if is_late { &mut self.late } else { &mut self.there }
    }

    /// It has its record, so all that is there of it is its own.
    fn is_known(&mut self, project: Project) {
        let was_forgotten = self.forgotten.remove(&project);
        let is_new = self.known.as_mut().is_some_and(|known| known.insert(project));
        if is_new || was_forgotten {
            self.there.volumes.extend(self.late.volumes.take(&project));
            self.there.instances.extend(self.late.instances.take(&project));
        }
    }

    fn database_lost(&mut self) {
        (self.lost, self.known) = (true, None);
        self.forgotten.clear();
        self.there.volumes.append(&mut self.late.volumes);
        self.there.instances.append(&mut self.late.instances);
    }

    fn kilnd_started(&mut self, entry: &Entry) {
        self.hindered = self.disk_full || entry.at < self.disk_stalls_until;
        if self.lost {
            self.known.get_or_insert_default();
        }
    }

    fn all_are_in(&self, projects: &[Project]) -> Result<(), String> {
        // What is only a copy has nothing to lose: it goes, and the end of a schedule asks for that.
        let is_somebody = |project: &&Project| !self.cast.is_derived(**project);
        let mut all = self.there.volumes.union(&self.there.instances).filter(is_somebody);
        match all.find(|project| !projects.contains(project)) {
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
        if let Fact::KilndReady { projects } = &entry.fact {
            for project in projects {
                self.is_known(*project);
            }
        }
        match &entry.fact {
            Fact::Op { project, .. } => self.is_known(*project),
            // Nothing had come of it; what lands of it now was begun by a kilnd that died, and nobody knows of that.
            Fact::Forgotten { project } => drop(self.forgotten.insert(*project)),
            // Put back where its record could not be: whoever asked was told so, and the same again finishes it.
            Fact::Restored { project, .. } => drop(self.of(*project).volumes.insert(*project)),
            Fact::VolumeMade { project, .. } | Fact::Cloned { project, .. } => {
                self.of(*project).volumes.insert(*project);
            }
            Fact::Discarded { project, .. } | Fact::Freed { project, .. } => {
                self.there.volumes.remove(project);
                self.late.volumes.remove(project);
            }
            Fact::InstanceMade { project } => drop(self.of(*project).instances.insert(*project)),
            Fact::InstanceDestroyed { project } => {
                self.there.instances.remove(project);
                self.late.instances.remove(project);
            }
            Fact::DatabaseLost => self.database_lost(),
            Fact::KilndStarted { .. } => self.kilnd_started(entry),
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
