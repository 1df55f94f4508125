//! Going back to a snapshot, without `zfs rollback`: that destroys what it goes back over, and half of it does not exist.
//!
//! ```text
//!                                   live/K                  live/.half-K           trash/K.7
//! at first                          old
//! 1 clone the snapshot              old                     clone of old
//! 2 promote the clone               clone of new            new, with the history
//! 3 set, rename: old to the trash                           new, with the history   old, clone of new
//! 4 rename: new in its place        new, with the history                           old, clone of new
//! ```
//!
//! What a crash leaves after each of these tells of itself by which of the two is a clone of the other. After 1 it is undone,
//! after 2 and 3 completed, when the root is opened or the key asked for, whichever is first.

use kiln_domain::Key;
use kiln_domain::cache::SnapshotName;

use super::super::{TrashName, VolumeError};
use super::dataset::{Birth, INTENT, ROLLBACK, at_least, io, settings};
use super::engine::ZfsEngine;
use super::names::snapshot_of;
use super::rows::Facts;
use super::verbs::Setting;

const OPERATION: &str = "roll back";

impl ZfsEngine {
    pub(super) async fn go_back(&self, key: &Key, snapshot: SnapshotName) -> Result<TrashName, VolumeError> {
        let _locked = self.locks.lock(key).await;
        let found = self.require(OPERATION, key).await?;
        let holds = self.require_snapshot(OPERATION, key, snapshot).await?;
        self.keep_out(OPERATION, &found).await?;
        self.unmount(OPERATION, key).await?;
        let birth = Birth {
            key,
            properties: &found.properties,
            size: found.size().map(|size| if size > holds { size } else { at_least(holds) }),
            origin: found.origin().map(str::to_owned),
            last_snapshot: found.last_snapshot(),
        };
        let mut settings = settings(&self.base, &birth).map_err(|e| io(OPERATION, &self.base, e))?;
        settings.push(Setting::text(INTENT, ROLLBACK));
        let (live, half) = (self.root.live(key), self.root.half(key));
        let fail = |fault: super::fault::Fault| fault.during(OPERATION, key);
        self.verbs.clone_snapshot(&snapshot_of(&live, snapshot), &half, &settings).await.map_err(fail)?;
        if let Err(fault) = self.verbs.promote(&half).await {
            if let Err(left) = self.zfs.destroy(&half).await {
                tracing::warn!(%key, ?left, "a rollback that failed is undone when the key is next asked for");
            }
            return Err(fail(fault));
        }
        let trashed = self.change_places(key).await?;
        self.put_in_place(key).await?;
        let found = self.require(OPERATION, key).await?;
        self.ready(OPERATION, &found).await?;
        Ok(trashed)
    }

    /// With the key's lock held.
    pub(super) async fn take_up_rollback(
        &self,
        key: &Key,
        live: Option<&Facts>,
        half: &Facts,
    ) -> Result<(), VolumeError> {
        let name = self.root.half(key);
        if half.local(INTENT) != Some(ROLLBACK) {
            let found = format!("{name}, which a newer Kiln left half-made");
            return Err(VolumeError::Foreign { operation: OPERATION, key: key.clone(), found });
        }
        if let Some(live) = live {
            let promoted =
                live.text("origin").and_then(|origin| origin.split_once('@')).is_some_and(|(of, _)| of == name);
            if !promoted {
                return self.zfs.destroy(&name).await.map_err(|e| e.during(OPERATION, key));
            }
            self.unmount(OPERATION, key).await?;
            self.change_places(key).await?;
        }
        self.put_in_place(key).await
    }

    async fn change_places(&self, key: &Key) -> Result<TrashName, VolumeError> {
        let trashed = self.next_trash(OPERATION, key).await?;
        self.move_to_trash(OPERATION, key, &trashed).await?;
        Ok(trashed)
    }

    async fn put_in_place(&self, key: &Key) -> Result<(), VolumeError> {
        let live = self.root.live(key);
        self.zfs.rename(&self.root.half(key), &live).await.map_err(|e| e.during(OPERATION, key))?;
        // Under this name it means nothing.
        if let Err(fault) = self.zfs.unset(&live, INTENT).await {
            tracing::debug!(%key, ?fault, "a volume still says that it was to be rolled back to");
        }
        Ok(())
    }
}
