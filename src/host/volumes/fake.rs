//! A model of a volume engine in memory, for tests and simulation of what stands above.
//!
//! It passes the same contract as the real engines. Its paths exist nowhere; [`FakeVolumes::write`] and
//! [`FakeVolumes::read`] stand for what a daemon would do below them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use kiln_domain::cache::size::Fill;
use kiln_domain::{Key, Snapshot, SnapshotName, Timestamp, Verdict};

use super::{FoundVolume, Fullness, TrashName, Trashed, Usage, Volume, VolumeEngine, VolumeError};
use crate::clock::Clock;
use crate::host::Properties;

/// See the module.
pub struct FakeVolumes {
    state: Mutex<State>,
    clock: Arc<dyn Clock>,
}

#[derive(Debug, Default)]
struct State {
    live: BTreeMap<Key, Model>,
    trash: BTreeMap<TrashName, (Timestamp, Model)>,
    /// What is in our place and not ours.
    strangers: BTreeSet<String>,
    last_trash: u64,
    /// What of their trash somebody has a hold on.
    held: BTreeSet<Key>,
    full: bool,
    fullness: Fullness,
}

/// It is always the same moment.
struct Still;

impl Clock for Still {
    fn now(&self) -> Timestamp {
        Timestamp::EPOCH
    }
}

type Files = BTreeMap<String, String>;

#[derive(Debug, Clone, Default)]
struct Model {
    properties: Properties,
    size: Option<u64>,
    /// `None` in it: what the volume held just then.
    origin: Option<(Key, Option<SnapshotName>)>,
    files: Files,
    /// What it was made of, as long as it lives.
    inherited: Files,
    /// How often something was written.
    writes: u64,
    snapshots: BTreeMap<SnapshotName, Moment>,
    last_snapshot: u64,
    busy: bool,
}

#[derive(Debug, Clone)]
struct Moment {
    files: Files,
    writes: u64,
    taken: Timestamp,
    verdict: Verdict,
}

impl FakeVolumes {
    /// Without time: everything was discarded at the epoch.
    pub fn new() -> Self {
        Self::with_clock(Arc::new(Still))
    }

    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        Self { state: Mutex::default(), clock }
    }

    /// Something that is not ours.
    pub fn add_stranger(&self, name: &str) {
        self.state().strangers.insert(name.to_owned());
    }

    /// What is answered from now on, whatever is written; a size of 0 until then.
    pub fn set_fullness(&self, fullness: Fullness) {
        self.state().fullness = fullness;
    }

    /// What a daemon would write into the volume; false when there is none.
    pub fn write(&self, key: &Key, name: &str, text: &str) -> bool {
        let mut state = self.state();
        let Some(model) = state.live.get_mut(key) else { return false };
        model.files.insert(name.to_owned(), text.to_owned());
        model.writes += 1;
        true
    }

    pub fn read(&self, key: &Key, name: &str) -> Option<String> {
        self.state().live.get(key)?.files.get(name).cloned()
    }

    /// What can be read below a path that [`VolumeEngine::snapshot_path`] told.
    pub fn read_snapshot(&self, path: &Path, name: &str) -> Option<String> {
        let snapshot: SnapshotName = path.file_name()?.to_str()?.parse().ok()?;
        let key: Key = path.parent()?.parent()?.file_name()?.to_str()?.parse().ok()?;
        self.state().live.get(&key)?.snapshots.get(&snapshot)?.files.get(name).cloned()
    }

    /// Whether a daemon is in the volume.
    pub fn set_busy(&self, key: &Key, busy: bool) {
        if let Some(model) = self.state().live.get_mut(key) {
            model.busy = busy;
        }
    }

    /// Whether somebody keeps what is in the trash of this from being freed.
    pub fn set_held(&self, key: &Key, held: bool) {
        let mut state = self.state();
        if held {
            state.held.insert(key.clone())
        } else {
            state.held.remove(key)
        };
    }

    /// While set, whatever needs space is [`VolumeError::Full`].
    pub fn set_full(&self, full: bool) {
        self.state().full = full;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for FakeVolumes {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn require(&mut self, operation: &'static str, key: &Key) -> Result<&mut Model, VolumeError> {
        self.live.get_mut(key).ok_or_else(|| VolumeError::Missing { operation, name: key.to_string() })
    }

    fn require_snapshot(
        &mut self,
        operation: &'static str,
        key: &Key,
        snapshot: SnapshotName,
    ) -> Result<&mut Moment, VolumeError> {
        let found = self.require(operation, key)?.snapshots.get_mut(&snapshot);
        found.ok_or_else(|| VolumeError::Missing { operation, name: format!("{key}@{snapshot}") })
    }

    fn require_idle(&mut self, operation: &'static str, key: &Key) -> Result<&mut Model, VolumeError> {
        let model = self.require(operation, key)?;
        if model.busy {
            let holder = "its buildkitd, which must be stopped first".to_owned();
            return Err(VolumeError::Busy { operation, name: key.to_string(), holder });
        }
        Ok(model)
    }

    fn next_in_trash(&mut self, key: &Key) -> TrashName {
        self.last_trash += 1;
        TrashName::new(key.clone(), self.last_trash)
    }

    /// A clone or fork: what was made so before, or a new one with `files`.
    fn derive(
        &mut self,
        operation: &'static str,
        origin: (Key, Option<SnapshotName>),
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError> {
        if let Some(model) = self.live.get(target) {
            let again = model.origin.as_ref() == Some(&origin);
            let exists = || VolumeError::Exists { operation, name: target.to_string() };
            return if again { Ok(model.volume(target)) } else { Err(exists()) };
        }
        self.need_space(operation, target)?;
        let parent = self.require(operation, &origin.0)?;
        let (size, mut files) = (parent.size, parent.files.clone());
        if let Some(snapshot) = origin.1 {
            files = self.require_snapshot(operation, &origin.0, snapshot)?.files.clone();
        }
        let inherited = files.clone();
        let model = Model { origin: Some(origin), files, inherited, ..Model::new(target, properties, size) };
        let volume = model.volume(target);
        self.live.insert(target.clone(), model);
        Ok(volume)
    }

    fn need_space(&self, operation: &'static str, key: &Key) -> Result<(), VolumeError> {
        if self.full { Err(VolumeError::Full { operation, name: key.to_string() }) } else { Ok(()) }
    }
}

impl Model {
    fn new(key: &Key, properties: &Properties, size: Option<u64>) -> Self {
        let mut properties = properties.clone();
        properties.insert("key".to_owned(), key.to_string());
        Self { properties, size, ..Self::default() }
    }

    fn moment(&self, taken: Timestamp) -> Moment {
        Moment { files: self.files.clone(), writes: self.writes, taken, verdict: Verdict::Unchecked }
    }

    /// Whether a file is also in a snapshot, or in what the volume was made of.
    fn shares(&self, name: &String, text: &String) -> bool {
        let snapshots = self.snapshots.values().map(|moment| &moment.files);
        snapshots.chain([&self.inherited]).any(|files| files.get(name) == Some(text))
    }

    fn volume(&self, key: &Key) -> Volume {
        let path = PathBuf::from("/nowhere").join(key.as_str());
        Volume { key: key.clone(), path, properties: self.properties.clone() }
    }
}

#[async_trait]
impl VolumeEngine for FakeVolumes {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn copies_are_instant(&self) -> bool {
        true
    }

    async fn create(&self, key: &Key, properties: &Properties, size: Option<u64>) -> Result<Volume, VolumeError> {
        let mut state = self.state();
        if let Some(model) = state.live.get(key) {
            return Ok(model.volume(key));
        }
        state.need_space("create", key)?;
        let model = Model::new(key, properties, size);
        let volume = model.volume(key);
        state.live.insert(key.clone(), model);
        Ok(volume)
    }

    async fn get(&self, key: &Key) -> Result<Option<Volume>, VolumeError> {
        Ok(self.state().live.get(key).map(|model| model.volume(key)))
    }

    async fn list(&self) -> Result<Vec<Volume>, VolumeError> {
        Ok(self.state().live.iter().map(|(key, model)| model.volume(key)).collect())
    }

    async fn found(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        let state = self.state();
        let ours = state.live.iter().map(|(key, model)| FoundVolume {
            name: format!("live/{key}"),
            key: Some(key.clone()),
            properties: model.properties.clone(),
        });
        let others = state.strangers.iter().map(|name| FoundVolume {
            name: name.clone(),
            key: None,
            properties: Properties::new(),
        });
        let mut found: Vec<_> = ours.chain(others).collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    async fn fullness(&self) -> Result<Fullness, VolumeError> {
        Ok(self.state().fullness)
    }

    async fn freed(&self) -> Result<(), VolumeError> {
        Ok(())
    }

    async fn set_properties(&self, key: &Key, properties: &Properties) -> Result<(), VolumeError> {
        const OPERATION: &str = "set properties of";
        let mut state = self.state();
        let model = state.require(OPERATION, key)?;
        if let Some(other) = properties.get("key").filter(|other| *other != key.as_str()) {
            return Err(VolumeError::Foreign { operation: OPERATION, key: key.clone(), found: format!("{other:?}") });
        }
        model.properties.extend(properties.clone());
        Ok(())
    }

    async fn usage(&self, key: &Key) -> Result<Usage, VolumeError> {
        const ROOM: u64 = 1 << 40;
        let mut state = self.state();
        let full = state.full;
        let model = state.require("measure", key)?;
        let (mut used, mut shared) = (0, 0);
        for (name, text) in &model.files {
            *(if model.shares(name, text) { &mut shared } else { &mut used }) += text.len() as u64;
        }
        let moments = model.snapshots.values().flat_map(|moment| &moment.files);
        let alone: BTreeSet<_> = moments.filter(|(name, text)| model.files.get(*name) != Some(text)).collect();
        let snapshots = Some(alone.into_iter().map(|(_, text)| text.len() as u64).sum());
        let available = if full { 0 } else { model.size.unwrap_or(ROOM).saturating_sub(used + shared) };
        Ok(Usage { used, shared: Some(shared), snapshots, size: model.size, available, inodes_available: None })
    }

    async fn fill(&self, key: &Key) -> Result<Option<Fill>, VolumeError> {
        let Usage { used, shared, size, available, inodes_available, .. } = self.usage(key).await?;
        let used = used + shared.unwrap_or(0);
        Ok(size.map(|size| Fill { used, size, available, inodes_available }))
    }

    async fn resize(&self, key: &Key, size: Option<u64>) -> Result<(), VolumeError> {
        self.state().require("resize", key)?.size = size;
        Ok(())
    }

    async fn snapshot(&self, key: &Key) -> Result<Snapshot, VolumeError> {
        let mut state = self.state();
        state.need_space("snapshot", key)?;
        let model = state.require("snapshot", key)?;
        model.last_snapshot += 1;
        let name = SnapshotName::new(model.last_snapshot);
        let moment = model.moment(self.clock.now());
        let snapshot = Snapshot { name, taken: moment.taken, verdict: moment.verdict, bytes: None };
        model.snapshots.insert(name, moment);
        Ok(snapshot)
    }

    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, VolumeError> {
        let mut state = self.state();
        let snapshots = state.require("list the snapshots of", key)?.snapshots.iter();
        let described = snapshots.map(|(name, moment)| Snapshot {
            name: *name,
            taken: moment.taken,
            verdict: moment.verdict,
            bytes: None,
        });
        Ok(described.collect())
    }

    async fn written_since(&self, key: &Key, snapshot: SnapshotName) -> Result<Option<bool>, VolumeError> {
        const OPERATION: &str = "look for changes of";
        let mut state = self.state();
        let then = state.require_snapshot(OPERATION, key, snapshot)?.writes;
        Ok(Some(state.require(OPERATION, key)?.writes != then))
    }

    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), VolumeError> {
        self.state().require_snapshot("judge a snapshot of", key, snapshot)?.verdict = verdict;
        Ok(())
    }

    async fn snapshot_path(&self, key: &Key, snapshot: SnapshotName) -> Result<PathBuf, VolumeError> {
        const OPERATION: &str = "look at a snapshot of";
        let mut state = self.state();
        state.require_snapshot(OPERATION, key, snapshot)?;
        let volume = state.require(OPERATION, key)?.volume(key);
        Ok(volume.path.join("snapshots").join(snapshot.to_string()))
    }

    async fn destroy_snapshot(&self, key: &Key, snapshot: SnapshotName) -> Result<(), VolumeError> {
        if let Some(model) = self.state().live.get_mut(key) {
            model.snapshots.remove(&snapshot);
        }
        Ok(())
    }

    async fn clone_snapshot(
        &self,
        source: &Key,
        snapshot: SnapshotName,
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError> {
        self.state().derive("clone", (source.clone(), Some(snapshot)), target, properties)
    }

    async fn fork(&self, source: &Key, target: &Key, properties: &Properties) -> Result<Volume, VolumeError> {
        self.state().derive("fork", (source.clone(), None), target, properties)
    }

    async fn rollback(&self, key: &Key, snapshot: SnapshotName) -> Result<TrashName, VolumeError> {
        const OPERATION: &str = "roll back";
        let mut state = self.state();
        let moment = state.require_snapshot(OPERATION, key, snapshot)?.clone();
        state.require_idle(OPERATION, key)?;
        state.need_space(OPERATION, key)?;
        let name = state.next_in_trash(key);
        let model = state.require(OPERATION, key)?;
        let mut old = model.clone();
        model.files = moment.files;
        model.writes += 1;
        old.snapshots = model.snapshots.split_off(&SnapshotName::new(snapshot.sequence() + 1));
        state.trash.insert(name.clone(), (self.clock.now(), old));
        Ok(name)
    }

    async fn discard(&self, key: &Key) -> Result<TrashName, VolumeError> {
        let mut state = self.state();
        state.require_idle("discard", key)?;
        let name = state.next_in_trash(key);
        if let Some(model) = state.live.remove(key) {
            state.trash.insert(name.clone(), (self.clock.now(), model));
        }
        Ok(name)
    }

    async fn trash(&self) -> Result<Vec<Trashed>, VolumeError> {
        let state = self.state();
        let described = state.trash.iter().map(|(name, (since, model))| Trashed {
            name: name.clone(),
            since: *since,
            properties: model.properties.clone(),
        });
        Ok(described.collect())
    }

    async fn restore(&self, trashed: &TrashName) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "restore";
        let (mut state, key) = (self.state(), trashed.key());
        let missing = || VolumeError::Missing { operation: OPERATION, name: trashed.to_string() };
        let (_, model) = state.trash.get(trashed).cloned().ok_or_else(missing)?;
        if state.live.contains_key(key) {
            return Err(VolumeError::Exists { operation: OPERATION, name: key.to_string() });
        }
        state.trash.remove(trashed);
        let volume = model.volume(key);
        state.live.insert(key.clone(), model);
        Ok(volume)
    }

    async fn purge(&self, trashed: &TrashName) -> Result<(), VolumeError> {
        let mut state = self.state();
        if state.trash.contains_key(trashed) && state.held.contains(trashed.key()) {
            let holder = "a snapshot of somebody's".to_owned();
            return Err(VolumeError::Busy { operation: "purge", name: trashed.to_string(), holder });
        }
        state.trash.remove(trashed);
        Ok(())
    }
}
