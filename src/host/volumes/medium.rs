//! What engines that keep volumes in directories differ in.

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use kiln_domain::cache::size::Fill;

use super::Usage;
use super::command::Failure;

/// How a kind of storage makes, copies, measures and removes one directory of cache.
#[async_trait]
pub trait Medium: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// Whether a copy of a volume that is being written is one instant of it.
    fn copies_are_instant(&self) -> bool;

    /// Makes an empty one at a path that does not exist.
    async fn make(&self, at: &Path, size: Option<u64>) -> Result<(), Failure>;

    /// Copies to a path that does not exist.
    async fn copy(&self, from: &Path, to: &Path, use_: Copy) -> Result<(), Failure>;

    /// Moves a snapshot to another directory. What a crash left of an earlier attempt is completed, and one that is there
    /// already stays as it is.
    async fn carry(&self, from: &Path, to: &Path) -> Result<(), Failure>;

    /// Removes it with all that is in it; absent already is success.
    async fn remove(&self, at: &Path) -> Result<(), Failure>;

    /// Returns when what was removed before below `root` is free; see [`super::VolumeEngine::freed`].
    async fn freed(&self, root: &Path) -> Result<(), Failure>;

    async fn usage(&self, at: &Path, snapshots: &[PathBuf]) -> Result<Usage, Failure>;

    /// See [`super::VolumeEngine::fill`].
    async fn fill(&self, at: &Path) -> Result<Option<Fill>, Failure>;

    /// See [`super::VolumeEngine::written_since`].
    async fn written_since(&self, at: &Path, snapshot: &Path) -> Result<Option<bool>, Failure>;

    /// Where it can be enforced; see [`super::VolumeEngine::resize`].
    async fn resize(&self, at: &Path, size: Option<u64>) -> Result<(), Failure>;
}

/// What a copy is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copy {
    Snapshot,
    Volume { size: Option<u64> },
}
