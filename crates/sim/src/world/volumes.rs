//! The caches of the model host: volumes, their snapshots, copies of them, and the trash. Nothing here waits.

use std::collections::BTreeMap;

use kiln::host::Properties;
use kiln::host::volumes::{TrashName, VolumeError};
use kiln_domain::cache::history::newest_good;
use kiln_domain::plan::Done;
use kiln_domain::{Key, ProjectRecord, Role, Snapshot, SnapshotName, Timestamp, Verdict};

use super::host::marks;
use super::{Host, World};
use crate::config::SECOND;
use crate::history::{Fact, Lineage, Project};

#[derive(Debug, Clone)]
pub(crate) struct Volume {
    pub(crate) lineage: Lineage,
    pub(crate) properties: Properties,
    /// It stands where a project's should and is somebody else's.
    pub(crate) foreign: bool,
    pub(crate) contents: Contents,
    snapshots: BTreeMap<SnapshotName, Moment>,
    /// What it holds alone.
    bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Contents {
    /// Another after each write, anywhere.
    pub(crate) version: u64,
    /// No daemon opens it.
    pub(crate) damaged: bool,
}

#[derive(Debug, Clone, Copy)]
struct Moment {
    contents: Contents,
    taken: Timestamp,
    verdict: Verdict,
    /// What it holds alone.
    bytes: u64,
}

/// Numbers that are given out once.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    lineages: Lineage,
    versions: u64,
    trashed: u64,
    /// Of snapshots, for each key.
    sequences: BTreeMap<Key, u64>,
}

impl Volume {
    pub(super) const fn own_bytes(&self) -> u64 {
        self.bytes
    }

    /// With its snapshots.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes + self.snapshots.values().map(|moment| moment.bytes).sum::<u64>()
    }

    pub(super) fn grow(&mut self, by: u64, most: u64, most_of_a_snapshot: u64) {
        self.bytes = (self.bytes + by / 2).min(most);
        if let Some(newest) = self.snapshots.values_mut().next_back() {
            newest.bytes = (newest.bytes + by / 2).min(most_of_a_snapshot);
        }
    }

    pub(crate) fn list(&self) -> Vec<Snapshot> {
        let listed = |(name, moment): (&SnapshotName, &Moment)| Snapshot {
            name: *name,
            taken: moment.taken,
            verdict: moment.verdict,
            bytes: Some(moment.bytes),
        };
        self.snapshots.iter().map(listed).collect()
    }
}

/// What somebody else does to the host between a look and what follows from it goes unseen: the look may hang, its event come late,
/// and what follows is written down first.
const UNSEEN: u64 = 15 * SECOND;

fn missing(operation: &'static str, name: &impl ToString) -> VolumeError {
    VolumeError::Missing { operation, name: name.to_string() }
}

impl World {
    fn next_version(&mut self) -> u64 {
        self.host.numbers.versions += 1;
        self.host.numbers.versions
    }

    fn next_lineage(&mut self) -> Lineage {
        self.host.numbers.lineages += 1;
        self.host.numbers.lineages
    }

    fn put(&mut self, key: &Key, properties: Properties, contents: Contents, foreign: bool) -> Lineage {
        let lineage = self.next_lineage();
        let volume = Volume { lineage, properties, foreign, contents, snapshots: BTreeMap::new(), bytes: 0 };
        self.host.volumes.insert(key.clone(), volume);
        lineage
    }

    pub(crate) fn make_volume(&mut self, record: &ProjectRecord) {
        let contents = Contents { version: self.next_version(), damaged: false };
        let lineage = self.put(&record.key, marks(record), contents, false);
        let project = self.project(&record.key);
        self.record(Fact::VolumeMade { project, lineage });
    }

    /// Somebody else's, in the place of a project's.
    pub(crate) fn make_foreign_volume(&mut self, key: &Key) {
        let properties = [("key".to_owned(), "somebody else's".to_owned())].into_iter().collect();
        let contents = Contents { version: self.next_version(), damaged: false };
        self.put(key, properties, contents, true);
    }

    /// Something was written to it.
    pub(crate) fn write_to(&mut self, key: &Key) {
        let version = self.next_version();
        if let Some(volume) = self.host.volumes.get_mut(key) {
            volume.contents.version = version;
        }
        self.grow(key);
    }

    pub(crate) fn damage(&mut self, key: &Key) {
        self.write_to(key);
        if let Some(volume) = self.host.volumes.get_mut(key) {
            volume.contents.damaged = true;
            let project = self.project(key);
            self.record(Fact::Damaged { project });
        }
    }

    pub(crate) fn is_damaged(&self, key: &Key) -> bool {
        self.host.volumes.get(key).is_some_and(|volume| volume.contents.damaged)
    }

    pub(crate) fn mend(&mut self, project: Project) {
        let key = self.key(project);
        if let Some(volume) = self.host.volumes.get_mut(&key) {
            volume.contents.damaged = false;
        }
    }

    /// Forks, members and trials take everything along that they had: or what is left of one.
    pub(crate) fn nothing_derived_is_left(&self) -> Result<(), String> {
        let Host { volumes, trash, files, instances, .. } = &self.host;
        let kinds: [(&str, Vec<&Key>); 4] = [
            ("an instance", instances.keys().collect()),
            ("a volume", volumes.keys().collect()),
            ("something in the trash", trash.keys().map(TrashName::key).collect()),
            // A trial's are overwritten by the next, and of those that are written late nobody could tell; nor of those that were
            // the last of what went as the database was lost.
            (
                "certificates",
                files.keys().filter(|key| key.role() != Role::Trial && !self.files_may_be_left(key)).collect(),
            ),
        ];
        for (what, keys) in kinds {
            if let Some(key) = keys.into_iter().find(|key| key.role().is_derived()) {
                return Err(format!("{what} of {}, which is only a copy, is left", self.project(key)));
            }
        }
        Ok(())
    }

    fn files_may_be_left(&self, key: &Key) -> bool {
        self.late_files.contains(key) || self.faults.contains_key("database lost")
    }

    pub(super) fn runs_on(&self, key: &Key) -> bool {
        self.host.instances.get(key).is_some_and(|instance| instance.daemon.is_some())
    }

    /// As the engines, it refuses what would go from under a daemon. That kilnd relies on that when it could know is wrong: when the
    /// daemon `ran` as it was asked for. What lands while it waits for its turn nobody can know of.
    fn must_not_run(&mut self, operation: &'static str, key: &Key, ran: bool) -> Result<(), VolumeError> {
        if !self.runs_on(key) {
            return Ok(());
        }
        let unseen = |at: &u64| self.now() - at < UNSEEN;
        if ran && !self.host.started_by_hand.get(key).is_some_and(unseen) {
            let why = format!("kilnd asked to {operation} the cache of {} under a daemon that runs", self.project(key));
            self.record(Fact::Wrong { invariant: "K3", why });
        }
        let holder = "its buildkitd".to_owned();
        Err(VolumeError::Busy { operation, name: key.to_string(), holder })
    }

    // === Copies

    /// As the engines' `fork`, and what Kiln makes of their answers.
    pub(crate) fn clone_volume(&mut self, record: &ProjectRecord) -> Result<Done, VolumeError> {
        let (key, parent) = (&record.key, record.key.project());
        if let Some(volume) = self.host.volumes.get(key) {
            let found = "somebody else".to_owned();
            let foreign = VolumeError::Foreign { operation: "fork", key: key.clone(), found };
            return if volume.foreign { Err(foreign) } else { Ok(Done::Cloned { from: parent.to_string() }) };
        }
        let Some(of) = self.host.volumes.get(&parent) else {
            self.make_volume(record);
            return Ok(Done::Cloned { from: "nothing".to_owned() });
        };
        if of.foreign {
            let found = "somebody else".to_owned();
            return Err(VolumeError::Foreign { operation: "fork", key: parent, found });
        }
        let contents = if !self.profile.cheap && self.runs_on(&parent) {
            let holder = "its buildkitd".to_owned();
            let busy = VolumeError::Busy { operation: "fork", name: parent.to_string(), holder };
            let good = newest_good(&of.list()).and_then(|good| of.snapshots.get(&good.name).copied());
            good.ok_or(busy)?.contents
        } else {
            of.contents
        };
        let from = of.lineage;
        self.copy(record, contents, from);
        Ok(Done::Cloned { from: parent.to_string() })
    }

    fn copy(&mut self, record: &ProjectRecord, contents: Contents, from: Lineage) {
        let lineage = self.put(&record.key, marks(record), contents, false);
        let project = self.project(&record.key);
        self.record(Fact::Cloned { project, lineage, from });
    }

    /// For a trial.
    pub(crate) fn clone_snapshot(
        &mut self,
        of: &Key,
        name: SnapshotName,
        trial: &ProjectRecord,
    ) -> Result<(), VolumeError> {
        let volume = self.host.volumes.get(of).ok_or_else(|| missing("clone", of))?;
        let moment = volume.snapshots.get(&name).ok_or_else(|| missing("clone", &name))?;
        if self.host.volumes.contains_key(&trial.key) {
            return Err(VolumeError::Exists { operation: "clone", name: trial.key.to_string() });
        }
        let (contents, from) = (moment.contents, volume.lineage);
        self.copy(trial, contents, from);
        Ok(())
    }

    // === The past

    pub(crate) fn take_snapshot(&mut self, key: &Key) -> Result<Done, VolumeError> {
        let (runs, taken, cheap) = (self.runs_on(key), self.wall(), self.profile.cheap);
        let volume = self.host.volumes.get_mut(key).filter(|volume| !volume.foreign);
        let volume = volume.ok_or_else(|| missing("snapshot", key))?;
        if runs && !cheap {
            let holder = "its buildkitd".to_owned();
            return Err(VolumeError::Busy { operation: "snapshot", name: key.to_string(), holder });
        }
        let (contents, lineage) = (volume.contents, volume.lineage);
        if volume.snapshots.values().next_back().is_some_and(|newest| newest.contents == contents) {
            return Ok(Done::Snapshots { all: volume.list(), taken: false });
        }
        let last = self.host.numbers.sequences.entry(key.clone()).or_default();
        *last += 1;
        let sequence = *last;
        volume
            .snapshots
            .insert(SnapshotName::new(sequence), Moment { contents, taken, verdict: Verdict::Unchecked, bytes: 0 });
        let all = volume.list();
        let (project, Contents { version, damaged }) = (self.project(key), contents);
        self.record(Fact::SnapshotTaken { project, lineage, sequence, version, damaged });
        Ok(Done::Snapshots { all, taken: true })
    }

    pub(crate) fn list_snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, VolumeError> {
        self.host.volumes.get(key).map(Volume::list).ok_or_else(|| missing("list the snapshots of", key))
    }

    pub(crate) fn destroy_snapshot(&mut self, key: &Key, name: SnapshotName) {
        let gone = self.host.volumes.get_mut(key).and_then(|volume| volume.snapshots.remove(&name));
        if gone.is_some() {
            let (project, sequence) = (self.project(key), name.sequence());
            self.record(Fact::SnapshotGone { project, sequence });
        }
    }

    pub(crate) fn judge(&mut self, key: &Key, name: SnapshotName, verdict: Verdict) -> Result<(), VolumeError> {
        let volume = self.host.volumes.get_mut(key).ok_or_else(|| missing("judge", key))?;
        volume.snapshots.get_mut(&name).ok_or_else(|| missing("judge", &name))?.verdict = verdict;
        let (project, sequence) = (self.project(key), name.sequence());
        self.record(Fact::Judged { project, sequence, good: verdict == Verdict::Good });
        Ok(())
    }

    pub(crate) fn roll_back(&mut self, record: &ProjectRecord, to: SnapshotName, ran: bool) -> Result<(), VolumeError> {
        let key = &record.key;
        let volume = self.host.volumes.get(key).filter(|volume| !volume.foreign);
        let volume = volume.ok_or_else(|| missing("roll back", key))?;
        let contents = volume.snapshots.get(&to).ok_or_else(|| missing("roll back to", &to))?.contents;
        self.must_not_run("roll back", key, ran)?;
        let Some(mut old) = self.host.volumes.remove(key) else { return Ok(()) };
        let younger = old.snapshots.split_off(&SnapshotName::new(to.sequence() + 1));
        let snapshots = std::mem::replace(&mut old.snapshots, younger);
        let (from, damaged) = (old.lineage, old.contents.damaged);
        self.throw_away(key, old);
        let lineage = self.put(key, marks(record), contents, false);
        if let Some(volume) = self.host.volumes.get_mut(key) {
            volume.snapshots = snapshots;
        }
        let (project, to, version) = (self.project(key), to.sequence(), contents.version);
        self.record(Fact::WentBack { project, lineage, from, to, version, damaged });
        Ok(())
    }

    // === The trash

    fn throw_away(&mut self, key: &Key, volume: Volume) {
        self.host.numbers.trashed += 1;
        let name = TrashName::new(key.clone(), self.host.numbers.trashed);
        let (since, project, lineage) = (self.wall(), self.project(key), volume.lineage);
        self.host.trash.insert(name, (since, volume));
        self.record(Fact::Trashed { project, lineage });
    }

    /// `forgets`: the project goes with it.
    pub(crate) fn discard(&mut self, key: &Key, forgets: bool, ran: bool) -> Result<(), VolumeError> {
        self.must_not_run("discard", key, ran)?;
        let Some(volume) = self.host.volumes.remove(key) else { return Ok(()) };
        let (project, lineage) = (self.project(key), volume.lineage);
        if volume.foreign {
            let why = format!("somebody else's volume in the place of {project}'s was moved to the trash");
            self.record(Fact::Wrong { invariant: "K5", why });
        }
        self.throw_away(key, volume);
        if forgets {
            self.host.files.remove(key);
        }
        self.record(Fact::Discarded { project, lineage });
        Ok(())
    }

    /// For good, by way of the trash. `half`: and no further.
    pub(crate) fn free(&mut self, key: &Key, half: bool, ran: bool) -> Result<(), VolumeError> {
        self.must_not_run("free", key, ran)?;
        let project = self.project(key);
        if let Some(volume) = self.host.volumes.remove(key) {
            let lineage = volume.lineage;
            if volume.foreign {
                let why = format!("somebody else's volume in the place of {project}'s was freed");
                self.record(Fact::Wrong { invariant: "K5", why });
            }
            self.record(Fact::Freed { project, lineage });
            if half {
                self.throw_away(key, volume);
            }
        }
        if !half {
            self.clear_out(key);
        }
        Ok(())
    }

    /// What is only a copy leaves nothing in the trash.
    pub(crate) fn clear_out(&mut self, key: &Key) {
        if !key.role().is_derived() {
            return;
        }
        let of_it: Vec<TrashName> = self.host.trash.keys().filter(|name| name.key() == key).cloned().collect();
        for name in &of_it {
            self.purge(name);
        }
    }

    pub(crate) fn purge(&mut self, name: &TrashName) {
        let Some((since, volume)) = self.host.trash.remove(name) else { return };
        let (project, age) = (self.project(name.key()), self.wall().as_millis() - since.as_millis());
        self.record(Fact::Purged { project, lineage: volume.lineage, age });
    }
}
