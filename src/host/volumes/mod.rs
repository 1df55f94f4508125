//! Where caches live: one trait for three kinds of storage, and one contract test for all.
//!
//! A volume is named by its key and carries its project's identity as properties. Nothing is destroyed at once: it
//! goes to the trash first, and only [`VolumeEngine::purge`] frees it (K3). A volume without our mark is never touched.
//!
//! What must not be here: when to snapshot, what to keep, who may use a clone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::cache::size::Fill;
use kiln_domain::cache::{Snapshot, SnapshotName, Verdict};
use kiln_domain::{Key, Timestamp};
use thiserror::Error;

use super::Properties;

pub mod btrfs;
mod command;
#[cfg(test)]
mod contract;
pub mod dir;
#[cfg(test)]
pub mod fake;
mod listing;
mod medium;
#[cfg(test)]
mod mounts;
mod names;
mod record;
mod root;
mod sound;
mod tree;
pub mod zfs;

pub use btrfs::BtrfsEngine;
pub use dir::DirEngine;
#[cfg(test)]
pub use fake::FakeVolumes;
pub use names::{ParseNameError, TrashName};
pub use sound::{broken_database, changed_blobs, emptied_database};
pub use zfs::ZfsEngine;

/// Where programs that run as root may come from: the places of a distribution and of NixOS. Never `$PATH`.
pub const SEARCH: [&str; 6] =
    ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/run/current-system/sw/bin", "/run/current-system/sw/sbin"];

/// [`SEARCH`] as engines take it.
pub fn search_path() -> Vec<PathBuf> {
    SEARCH.iter().map(PathBuf::from).collect()
}

/// Whether an engine could live in `root`, as far as that can be told without changing anything.
pub fn check(root: &Path) -> Result<(), VolumeError> {
    root::check(root).map(drop)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    pub key: Key,
    /// Where it is mounted; what an instance gets as its cache.
    pub path: PathBuf,
    pub properties: Properties,
}

/// Something where our volumes are, ours or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundVolume {
    /// Where it lies in the engine's root, for people: `live/pbcce5b6205652dd7`.
    pub name: String,
    /// `None` for what does not carry our mark, or carries a damaged one.
    pub key: Option<Key>,
    pub properties: Properties,
}

/// A volume in the trash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trashed {
    pub name: TrashName,
    /// When it was discarded.
    pub since: Timestamp,
    /// As it had them; empty where they cannot be read any more.
    pub properties: Properties,
}

/// How full that is what all volumes share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fullness {
    pub bytes_used: u64,
    /// Used and still to be had; what is kept for root is not counted.
    pub bytes_total: u64,
    pub inodes_used: u64,
    /// 0 where inodes are made as they are needed.
    pub inodes_total: u64,
}

/// Where the bytes of one volume are. What cannot be told without walking through it is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes that would be free without this volume while its snapshots stay.
    pub used: u64,
    /// Bytes that it has in common with its own snapshots, or with what it was cloned from.
    pub shared: Option<u64>,
    /// Bytes that its snapshots alone hold: free when all of them are gone.
    pub snapshots: Option<u64>,
    /// What the volume may grow to, if the engine enforces it.
    pub size: Option<u64>,
    /// What can still be written.
    pub available: u64,
    /// Files that can still be made, where that is bounded.
    pub inodes_available: Option<u64>,
}

#[derive(Debug, Error)]
pub enum VolumeError {
    #[error("cannot {operation} volume {key}: the name is taken by {found}")]
    Foreign { operation: &'static str, key: Key, found: String },
    #[error("cannot {operation} volume {name}: there is none")]
    Missing { operation: &'static str, name: String },
    #[error("cannot {operation} {name}: it exists already")]
    Exists { operation: &'static str, name: String },
    #[error("cannot {operation} volume {name}: it is in use by {holder}")]
    Busy { operation: &'static str, name: String, holder: String },
    #[error("cannot {operation} volume {name}: no space left; free some, or give the volume more")]
    Full { operation: &'static str, name: String },
    #[error("volume storage {path} cannot be used: {why}; {remedy}")]
    Unusable { path: String, why: String, remedy: String },
    #[error("cannot {operation} {path}")]
    Io {
        operation: &'static str,
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot {operation} volume {name}: {command} said: {said}")]
    Command { operation: &'static str, name: String, command: String, said: String },
    #[error("cannot {operation} volume {name}: gave up after {} s waiting for {waited_for}", .after.as_secs())]
    TimedOut { operation: &'static str, name: String, waited_for: String, after: Duration },
}

#[async_trait]
pub trait VolumeEngine: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// Whether a snapshot or a clone costs next to nothing, and is one instant of a volume that is being written.
    fn copies_are_instant(&self) -> bool;

    /// Makes an empty volume of at most `size` bytes (where the engine can enforce it). One that exists with an equal
    /// `key` property is returned as it is; one with another is [`VolumeError::Foreign`].
    async fn create(&self, key: &Key, properties: &Properties, size: Option<u64>) -> Result<Volume, VolumeError>;

    /// `None` only when it is known not to exist.
    async fn get(&self, key: &Key) -> Result<Option<Volume>, VolumeError>;

    /// All volumes with our mark.
    async fn list(&self) -> Result<Vec<Volume>, VolumeError>;

    /// Everything in the root, ours or not, sorted by name. What we have half-made is nobody's, and the trash has a list
    /// of its own. Nothing is changed by it.
    async fn found(&self) -> Result<Vec<FoundVolume>, VolumeError>;

    async fn fullness(&self) -> Result<Fullness, VolumeError>;

    /// Returns when what was destroyed before is counted in [`VolumeEngine::fullness`]: some storage frees behind one's back,
    /// for minutes where it was much.
    async fn freed(&self) -> Result<(), VolumeError>;

    /// Replaces the properties given and keeps the others.
    async fn set_properties(&self, key: &Key, properties: &Properties) -> Result<(), VolumeError>;

    async fn usage(&self, key: &Key) -> Result<Usage, VolumeError>;

    /// How full a volume is whose size is enforced; `None` where it is not. Cheap: it is asked for all the time.
    async fn fill(&self, key: &Key) -> Result<Option<Fill>, VolumeError>;

    /// What it may grow to from now on, where the engine can enforce it; clones made later inherit it. Never below what it
    /// holds and a tenth of that: a daemon cannot even start on a full one, nor throw anything away.
    async fn resize(&self, key: &Key, size: Option<u64>) -> Result<(), VolumeError>;

    /// Takes a snapshot under the next sequence number, which is never used twice. [`VolumeError::Busy`] from an engine
    /// that cannot copy a volume while a daemon writes to it.
    async fn snapshot(&self, key: &Key) -> Result<Snapshot, VolumeError>;

    /// Ours only, oldest first.
    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, VolumeError>;

    /// Whether something was written to the volume since `snapshot` was taken. `None`: it cannot be told cheaply.
    async fn written_since(&self, key: &Key, snapshot: SnapshotName) -> Result<Option<bool>, VolumeError>;

    /// Writes beside a snapshot what was found of it.
    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), VolumeError>;

    /// Where the contents of a snapshot can be read, and not written.
    async fn snapshot_path(&self, key: &Key, snapshot: SnapshotName) -> Result<PathBuf, VolumeError>;

    /// Absent already is success. One that clones still need is out of the list at once, and gone with the last of them.
    async fn destroy_snapshot(&self, key: &Key, snapshot: SnapshotName) -> Result<(), VolumeError>;

    /// A writable volume `target` with the contents of a snapshot and its own `properties`: nothing is inherited but
    /// the size. One that was cloned from the same snapshot before is returned as it is; any other of that name is
    /// [`VolumeError::Exists`].
    async fn clone_snapshot(
        &self,
        source: &Key,
        snapshot: SnapshotName,
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError>;

    /// As [`VolumeEngine::clone_snapshot`], of what `source` holds now, in one instant, and without a trace in its history.
    /// A `target` that was made so before is returned as it is. [`VolumeError::Busy`] as in [`VolumeEngine::snapshot`].
    async fn fork(&self, source: &Key, target: &Key, properties: &Properties) -> Result<Volume, VolumeError>;

    /// Goes back to a snapshot: the volume holds what that holds, keeps its properties and size, and its history up to there.
    /// What it held until now goes to the trash under the name returned, with the snapshots younger than that.
    /// [`VolumeError::Busy`] while a daemon uses it. At each moment there is the old volume or the new one, after a crash too.
    async fn rollback(&self, key: &Key, snapshot: SnapshotName) -> Result<TrashName, VolumeError>;

    /// Moves a volume, its snapshots included, to the trash; [`VolumeError::Busy`] while a daemon uses it.
    async fn discard(&self, key: &Key) -> Result<TrashName, VolumeError>;

    /// By key, then by age.
    async fn trash(&self) -> Result<Vec<Trashed>, VolumeError>;

    /// Brings a volume back under its key; [`VolumeError::Exists`] when there is a new one.
    async fn restore(&self, trashed: &TrashName) -> Result<Volume, VolumeError>;

    /// Frees it for good. Absent already is success, and a purge that failed half-way is taken up by the next.
    async fn purge(&self, trashed: &TrashName) -> Result<(), VolumeError>;
}
