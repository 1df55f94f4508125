//! Snapshots. Ours are those with a name of ours that say of themselves when they were taken: one without either is somebody
//! else's, is in no list, and is never touched.

use std::path::PathBuf;

use kiln_domain::Key;
use kiln_domain::cache::{Snapshot, SnapshotName, Verdict};

use super::super::VolumeError;
use super::super::command::Failure;
use super::super::listing::CACHE;
use super::super::tree::blocking;
use super::cli::Below;
use super::dataset::{LAST_SNAPSHOT, SNAPSHOT, TAKEN, VERDICT, mountpoint, snapshot};
use super::engine::ZfsEngine;
use super::fault::Fault;
use super::names::snapshot_of;
use super::rows::Facts;
use super::verbs::Setting;

impl ZfsEngine {
    pub(super) async fn take(&self, key: &Key) -> Result<Snapshot, VolumeError> {
        const OPERATION: &str = "snapshot";
        /// Names that somebody else has taken are passed over.
        const ATTEMPTS: u64 = 8;
        let _locked = self.locks.lock(key).await;
        let found = self.require(OPERATION, key).await?;
        let dataset = self.root.live(key);
        for number in 1..=ATTEMPTS {
            let name = SnapshotName::new(found.last_snapshot() + number);
            let used_up = Setting::text(LAST_SNAPSHOT, name.sequence().to_string());
            self.zfs.set(&dataset, &[used_up]).await.map_err(|e| e.during(OPERATION, key))?;
            let taken = self.clock.now();
            let settings = [
                Setting::text(TAKEN, taken.as_millis().to_string()),
                Setting::text(VERDICT, Verdict::Unchecked.name()),
            ];
            match self.verbs.snapshot(&snapshot_of(&dataset, name), &settings).await {
                Ok(()) => return Ok(Snapshot { name, taken, verdict: Verdict::Unchecked, bytes: None }),
                Err(Fault::Exists) => tracing::warn!(%key, %name, "somebody has a snapshot of that name"),
                Err(fault) => return Err(fault.during(OPERATION, key)),
            }
        }
        Err(Fault::Exists.during(OPERATION, key))
    }

    pub(super) async fn history(&self, key: &Key) -> Result<Vec<Snapshot>, VolumeError> {
        const OPERATION: &str = "list the snapshots of";
        self.peek(OPERATION, key).await?;
        let rows = self.zfs.list(&SNAPSHOT, Below::Snapshots(&self.root.live(key), 1)).await;
        let rows = rows.map_err(|e| e.during(OPERATION, key))?;
        let named = rows.iter().filter_map(|(name, facts)| snapshot(name.split_once('@')?.1, facts));
        let mut snapshots: Vec<Snapshot> = named.collect();
        snapshots.sort_by_key(|snapshot| snapshot.name);
        Ok(snapshots)
    }

    pub(super) async fn written(&self, key: &Key, name: SnapshotName) -> Result<Option<bool>, VolumeError> {
        const OPERATION: &str = "compare";
        self.peek(OPERATION, key).await?;
        self.require_snapshot(OPERATION, key, name).await?;
        let property = format!("written@{name}");
        let fail = |fault: Fault| fault.during(OPERATION, key);
        let dataset = self.root.live(key);
        let bytes = async || {
            let facts = self.zfs.look(&[&property], &dataset).await.map_err(fail)?;
            Ok::<_, VolumeError>(facts.and_then(|facts| facts.number(&property)))
        };
        let mut written = bytes().await?;
        if written == Some(0) {
            // What was written in the last seconds is not counted before it is on the disks.
            self.zfs.sync().await.map_err(fail)?;
            written = bytes().await?;
        }
        Ok(written.map(|bytes| bytes > 0))
    }

    pub(super) async fn write_verdict(
        &self,
        key: &Key,
        name: SnapshotName,
        verdict: Verdict,
    ) -> Result<(), VolumeError> {
        const OPERATION: &str = "judge a snapshot of";
        let _locked = self.locks.lock(key).await;
        self.require(OPERATION, key).await?;
        self.require_snapshot(OPERATION, key, name).await?;
        let (snapshot, setting) = (snapshot_of(&self.root.live(key), name), Setting::text(VERDICT, verdict.name()));
        self.zfs.set(&snapshot, &[setting]).await.map_err(|e| e.during(OPERATION, format!("{key}@{name}")))
    }

    /// The kernel mounts it when somebody looks into it, and forgets it after a while.
    pub(super) async fn path_of(&self, key: &Key, name: SnapshotName) -> Result<PathBuf, VolumeError> {
        const OPERATION: &str = "read a snapshot of";
        if self.lookup(key).await?.is_none() {
            return Err(VolumeError::Missing { operation: OPERATION, name: key.to_string() });
        }
        self.require_snapshot(OPERATION, key, name).await?;
        let path = mountpoint(&self.base, key).join(".zfs/snapshot").join(name.to_string()).join(CACHE);
        let there = blocking(&path, |path| path.try_exists().map_err(|e| Failure::io(path, e))).await;
        if there.map_err(|e| e.during(OPERATION, key))? {
            return Ok(path);
        }
        Err(VolumeError::Missing { operation: OPERATION, name: format!("{key}@{name}") })
    }

    pub(super) async fn forget(&self, key: &Key, name: SnapshotName) -> Result<(), VolumeError> {
        const OPERATION: &str = "destroy a snapshot of";
        let _locked = self.locks.lock(key).await;
        let shown = format!("{key}@{name}");
        let dataset = self.root.live(key);
        let facts = self.look_at_snapshot(OPERATION, key, name).await?;
        let Some(facts) = facts.filter(|facts| snapshot(&name.to_string(), facts).is_some()) else { return Ok(()) };
        if facts.number("userrefs").is_some_and(|holds| holds > 0) {
            let holds = self.zfs.holds(&snapshot_of(&dataset, name)).await.unwrap_or_default();
            tracing::info!(snapshot = %shown, ?holds, "somebody holds a snapshot: it goes when that is released");
        }
        match self.verbs.destroy_snapshots(&dataset, &[name.to_string()]).await {
            Ok(()) => Ok(()),
            Err(fault) => Err(self.explain(fault, OPERATION, &shown, &dataset).await),
        }
    }

    async fn look_at_snapshot(
        &self,
        operation: &'static str,
        key: &Key,
        name: SnapshotName,
    ) -> Result<Option<Facts>, VolumeError> {
        let snapshot = snapshot_of(&self.root.live(key), name);
        self.zfs.look(&SNAPSHOT, &snapshot).await.map_err(|e| e.during(operation, format!("{key}@{name}")))
    }

    /// That it is part of the history; what it holds, in bytes.
    pub(super) async fn require_snapshot(
        &self,
        operation: &'static str,
        key: &Key,
        name: SnapshotName,
    ) -> Result<u64, VolumeError> {
        let facts = self.look_at_snapshot(operation, key, name).await?;
        let ours = facts.filter(|facts| snapshot(&name.to_string(), facts).is_some());
        let ours = ours.ok_or_else(|| VolumeError::Missing { operation, name: format!("{key}@{name}") })?;
        Ok(ours.number("referenced").unwrap_or_default())
    }
}
