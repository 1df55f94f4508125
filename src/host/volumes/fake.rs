//! A model of a volume engine in memory, for tests and simulation of what stands above.
//!
//! It passes the same contract as the real engines. Its paths exist nowhere; [`FakeVolumes::write`] and
//! [`FakeVolumes::read`] stand for what a daemon would do below them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use kiln_domain::{Key, Timestamp};

use super::{FoundVolume, Fullness, SnapshotName, TrashName, Trashed, Usage, Volume, VolumeEngine, VolumeError};
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
    origin: Option<(Key, SnapshotName)>,
    files: Files,
    snapshots: BTreeMap<SnapshotName, Files>,
    last_snapshot: u64,
    busy: bool,
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
        let model = state.live.get_mut(key);
        model.map(|model| model.files.insert(name.to_owned(), text.to_owned())).is_some()
    }

    pub fn read(&self, key: &Key, name: &str) -> Option<String> {
        self.state().live.get(key)?.files.get(name).cloned()
    }

    /// Whether a daemon is in the volume.
    pub fn set_busy(&self, key: &Key, busy: bool) {
        if let Some(model) = self.state().live.get_mut(key) {
            model.busy = busy;
        }
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
        let used = model.files.values().map(|text| text.len() as u64).sum();
        let available = if full { 0 } else { model.size.unwrap_or(ROOM).saturating_sub(used) };
        Ok(Usage { used, size: model.size, available })
    }

    async fn resize(&self, key: &Key, size: Option<u64>) -> Result<(), VolumeError> {
        self.state().require("resize", key)?.size = size;
        Ok(())
    }

    async fn snapshot(&self, key: &Key) -> Result<SnapshotName, VolumeError> {
        let mut state = self.state();
        state.need_space("snapshot", key)?;
        let model = state.require("snapshot", key)?;
        model.last_snapshot += 1;
        let name = SnapshotName::new(model.last_snapshot);
        model.snapshots.insert(name, model.files.clone());
        Ok(name)
    }

    async fn snapshots(&self, key: &Key) -> Result<Vec<SnapshotName>, VolumeError> {
        Ok(self.state().require("list the snapshots of", key)?.snapshots.keys().copied().collect())
    }

    async fn destroy_snapshot(&self, key: &Key, snapshot: &SnapshotName) -> Result<(), VolumeError> {
        if let Some(model) = self.state().live.get_mut(key) {
            model.snapshots.remove(snapshot);
        }
        Ok(())
    }

    async fn clone_snapshot(
        &self,
        source: &Key,
        snapshot: &SnapshotName,
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "clone";
        let mut state = self.state();
        let origin = Some((source.clone(), *snapshot));
        if let Some(model) = state.live.get(target) {
            let again = model.origin == origin;
            return if again {
                Ok(model.volume(target))
            } else {
                Err(VolumeError::Exists { operation: OPERATION, name: target.to_string() })
            };
        }
        state.need_space(OPERATION, target)?;
        let parent = state.require(OPERATION, source)?;
        let files = parent.snapshots.get(snapshot).cloned();
        let size = parent.size;
        let files =
            files.ok_or_else(|| VolumeError::Missing { operation: OPERATION, name: format!("{source}@{snapshot}") })?;
        let model = Model { origin, files, ..Model::new(target, properties, size) };
        let volume = model.volume(target);
        state.live.insert(target.clone(), model);
        Ok(volume)
    }

    async fn discard(&self, key: &Key) -> Result<TrashName, VolumeError> {
        const OPERATION: &str = "discard";
        let mut state = self.state();
        if state.require(OPERATION, key)?.busy {
            let holder = "its buildkitd, which must be stopped first".to_owned();
            return Err(VolumeError::Busy { operation: OPERATION, name: key.to_string(), holder });
        }
        state.last_trash += 1;
        let name = TrashName::new(key.clone(), state.last_trash);
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
        self.state().trash.remove(trashed);
        Ok(())
    }
}
