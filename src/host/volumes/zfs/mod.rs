//! Datasets of ZFS: each volume has a size that is enforced, a history that costs what differs, and forks in an instant.
//!
//! ```text
//! tank/kiln/cache                        the root: made by the admin, mounted where volumes.path says
//! tank/kiln/cache/live/<key>             a volume, mounted at <path>/live/<key>; its directory `cache` is what an instance gets
//! tank/kiln/cache/live/<key>@kiln-000042 its history
//! tank/kiln/cache/trash/<key>.000007     not mounted
//! ```
//!
//! | file | what it does |
//! |---|---|
//! | `names`, `text`, `rows`, `dataset` | what things are called, and what is written on them and read back |
//! | `cli`, `verbs`, `fault` | the ways into ZFS, and what they end with; `lzc` is the second one, with the feature `libzetta` |
//! | `version`, `claim` | whether this OpenZFS, pool and root will do |
//! | `engine`, `mounts`, `sweep` | finding a volume, having it mounted, and taking up what a killed run left |
//! | `live`, `history`, `copies`, `rollback`, `trash` | the operations |
//!
//! Identity is in user properties `kiln:…`, and counts only where it was set on the very dataset. Made for OpenZFS 2.2 to 2.4.

use std::path::PathBuf;

use async_trait::async_trait;
use kiln_domain::Key;
use kiln_domain::cache::size::Fill;
use kiln_domain::cache::{Snapshot, SnapshotName, Verdict};

use super::{FoundVolume, Fullness, TrashName, Trashed, Usage, Volume, VolumeEngine, VolumeError};
use crate::host::Properties;

mod claim;
mod cli;
mod copies;
mod dataset;
mod engine;
mod fault;
mod history;
mod live;
#[cfg(feature = "libzetta")]
mod lzc;
mod mounts;
mod names;
mod rollback;
mod rows;
mod sweep;
#[cfg(test)]
mod tests;
mod text;
mod trash;
mod verbs;
mod version;

pub use engine::ZfsEngine;

#[async_trait]
impl VolumeEngine for ZfsEngine {
    fn name(&self) -> &'static str {
        "zfs"
    }

    fn copies_are_instant(&self) -> bool {
        true
    }

    async fn create(&self, key: &Key, properties: &Properties, size: Option<u64>) -> Result<Volume, VolumeError> {
        self.make(key, properties, size).await
    }

    async fn get(&self, key: &Key) -> Result<Option<Volume>, VolumeError> {
        self.lookup(key).await
    }

    async fn list(&self) -> Result<Vec<Volume>, VolumeError> {
        self.volumes().await
    }

    async fn found(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        self.everything().await
    }

    async fn fullness(&self) -> Result<Fullness, VolumeError> {
        self.measure_all().await
    }

    async fn freed(&self) -> Result<(), VolumeError> {
        self.zfs.freed().await.map_err(|e| e.during("wait until freed", "all"))
    }

    async fn set_properties(&self, key: &Key, properties: &Properties) -> Result<(), VolumeError> {
        self.describe(key, properties).await
    }

    async fn usage(&self, key: &Key) -> Result<Usage, VolumeError> {
        self.measure(key).await
    }

    async fn fill(&self, key: &Key) -> Result<Option<Fill>, VolumeError> {
        let Usage { used, shared, size, available, inodes_available, .. } = self.measure(key).await?;
        let used = used.saturating_add(shared.unwrap_or(0));
        Ok(size.map(|size| Fill { used, size, available, inodes_available }))
    }

    async fn resize(&self, key: &Key, size: Option<u64>) -> Result<(), VolumeError> {
        self.grow(key, size).await
    }

    async fn snapshot(&self, key: &Key) -> Result<Snapshot, VolumeError> {
        self.take(key).await
    }

    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, VolumeError> {
        self.history(key).await
    }

    async fn written_since(&self, key: &Key, snapshot: SnapshotName) -> Result<Option<bool>, VolumeError> {
        self.written(key, snapshot).await
    }

    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), VolumeError> {
        self.write_verdict(key, snapshot, verdict).await
    }

    async fn snapshot_path(&self, key: &Key, snapshot: SnapshotName) -> Result<PathBuf, VolumeError> {
        self.path_of(key, snapshot).await
    }

    async fn destroy_snapshot(&self, key: &Key, snapshot: SnapshotName) -> Result<(), VolumeError> {
        self.forget(key, snapshot).await
    }

    async fn clone_snapshot(
        &self,
        source: &Key,
        snapshot: SnapshotName,
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError> {
        self.clone_of(source, snapshot, target, properties).await
    }

    async fn fork(&self, source: &Key, target: &Key, properties: &Properties) -> Result<Volume, VolumeError> {
        self.fork_of(source, target, properties).await
    }

    async fn rollback(&self, key: &Key, snapshot: SnapshotName) -> Result<TrashName, VolumeError> {
        self.go_back(key, snapshot).await
    }

    async fn discard(&self, key: &Key) -> Result<TrashName, VolumeError> {
        self.throw_away(key).await
    }

    async fn trash(&self) -> Result<Vec<Trashed>, VolumeError> {
        self.entries().await
    }

    async fn restore(&self, trashed: &TrashName) -> Result<Volume, VolumeError> {
        self.bring_back(trashed).await
    }

    async fn purge(&self, trashed: &TrashName) -> Result<(), VolumeError> {
        self.purge_entry(trashed).await
    }
}
