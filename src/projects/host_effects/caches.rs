//! What is done to a cache as a whole: cloning it, going back, trying a snapshot out.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kiln_domain::cache::history::newest_good;
use kiln_domain::plan::{Done, Step, Stop};
use kiln_domain::{Key, ProjectRecord, Role, Settings, Snapshot, SnapshotName, Timestamp, Verdict};

use super::super::reconcile::record_of;
use super::{EffectError, Effects as _, HostEffects, HostParts, described, size_of};
use crate::host::RuntimeError;
use crate::host::volumes::{TrashName, Volume, VolumeError, broken_database, changed_blobs, emptied_database};

/// A daemon that opens a large cache for the first time reads through it.
const TRIAL_PATIENCE: Duration = Duration::from_mins(2);

/// Between two tries to free what somebody has a hold on.
const FREE_AGAIN: Duration = Duration::from_mins(10);

impl HostEffects {
    /// A copy of what the project's cache holds now; where a running daemon cannot be copied, of its newest good snapshot. A
    /// project without a cache gives an empty one: its first build is no reason to refuse a pull request.
    pub(super) async fn clone_volume(&self, record: &ProjectRecord, settings: &Settings) -> Result<Done, EffectError> {
        let (volumes, parent, own) = (&self.parts.volumes, record.key.project(), described(record));
        let from = match volumes.fork(&parent, &record.key, &own).await {
            Ok(_) => format!("what {parent} holds now"),
            Err(VolumeError::Missing { .. }) => {
                volumes.create(&record.key, &own, size_of(record, settings)).await?;
                format!("nothing: {parent} has no cache yet")
            }
            Err(busy @ VolumeError::Busy { .. }) => {
                let snapshots = volumes.snapshots(&parent).await?;
                let Some(good) = newest_good(&snapshots) else { return Err(busy.into()) };
                volumes.clone_snapshot(&parent, good.name, &record.key, &own).await?;
                format!("{parent}@{}, because its daemon is at work", good.name)
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Done::Cloned { from })
    }

    /// `None`: there was none.
    pub(super) async fn discard_cache(&self, key: &Key) -> Result<Option<TrashName>, EffectError> {
        match self.parts.volumes.discard(key).await {
            Ok(name) => Ok(Some(name)),
            Err(VolumeError::Missing { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) async fn destroy_volume(&self, key: &Key) -> Result<(), EffectError> {
        if let Some(name) = self.discard_cache(key).await? {
            self.free(&name).await?;
        }
        // One that was cut off between the two.
        self.clear_out(key).await
    }

    /// Frees what is in the trash of a copy: it was on its way out and did not get there.
    pub(super) async fn clear_out(&self, key: &Key) -> Result<(), EffectError> {
        if !key.role().is_derived() {
            return Ok(());
        }
        let mut outcome = Ok(());
        for entry in self.parts.volumes.trash().await? {
            if entry.name.key() == key {
                outcome = outcome.and(self.free(&entry.name).await);
            }
        }
        outcome
    }

    /// Frees an entry of the trash. One that somebody has a hold on, which may be for good, is in the trash until that ends:
    /// whose it was does not wait for it.
    async fn free(&self, name: &TrashName) -> Result<(), EffectError> {
        let error = match self.parts.volumes.purge(name).await {
            Err(error @ VolumeError::Busy { .. }) => error,
            freed => return Ok(freed?),
        };
        let first = self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        if first {
            tracing::warn!(%error, "a copy of a cache stays in the trash until it can be freed");
            let (volumes, held, name) = (Arc::clone(&self.parts.volumes), Arc::clone(&self.held), name.clone());
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(FREE_AGAIN).await;
                    // It may have been freed, or brought back, by others.
                    match volumes.purge(&name).await {
                        Ok(()) => break,
                        Err(error) => tracing::debug!(%error, "it still cannot be freed"),
                    }
                }
                held.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
            });
        }
        Ok(())
    }

    pub(super) async fn rollback(&self, record: &ProjectRecord, to: SnapshotName) -> Result<(), EffectError> {
        self.parts.volumes.rollback(&record.key, to).await?;
        // The settings beside the cache are today's, whatever the cache is.
        self.describe(record).await
    }

    /// What it has grown to is written down beside it: the database may be lost, and what is in the trash has no other.
    pub(super) async fn resize(&self, record: &ProjectRecord, to: u64) -> Result<(), EffectError> {
        self.parts.volumes.resize(&record.key, Some(to)).await?;
        let mut resized = record.clone();
        resized.cache.size = Some(to);
        self.describe(&resized).await
    }

    /// None is taken of what is as it was.
    pub(super) async fn take_snapshot(&self, record: &ProjectRecord) -> Result<Done, EffectError> {
        let (volumes, key) = (&self.parts.volumes, &record.key);
        let mut snapshots = volumes.snapshots(key).await?;
        let unchanged = match snapshots.last() {
            Some(newest) => volumes.written_since(key, newest.name).await? == Some(false),
            None => false,
        };
        if !unchanged {
            snapshots.push(volumes.snapshot(key).await?);
        }
        Ok(Done::Snapshots { all: snapshots, taken: !unchanged })
    }

    /// Before a daemon is let into a cache: what must not change is as it was in its newest good snapshot.
    pub(super) async fn check_cache(&self, record: &ProjectRecord) -> Result<(), EffectError> {
        if record.key.role() != Role::Project {
            return Ok(());
        }
        let Some(volume) = self.parts.volumes.get(&record.key).await? else { return Ok(()) };
        let snapshots = self.parts.volumes.snapshots(&record.key).await?;
        self.look_for_damage(&record.key, &volume, newest_good(&snapshots)).await
    }

    /// In `volume`, of which `good` is an older state: a snapshot of `key`.
    async fn look_for_damage(&self, key: &Key, volume: &Volume, good: Option<&Snapshot>) -> Result<(), EffectError> {
        let good = match good {
            Some(good) => Some(self.parts.volumes.snapshot_path(key, good.name).await?),
            None => None,
        };
        let path = volume.path.clone();
        let checked = tokio::task::spawn_blocking(move || {
            if let Some(what) = broken_database(&path)? {
                return Ok(Some(what));
            }
            let Some(good) = good else { return Ok(None) };
            match emptied_database(&path, &good)? {
                None => changed_blobs(&path, &good),
                emptied => Ok(emptied),
            }
        });
        match checked.await.map_err(|_| EffectError::Interrupted { what: "a look at a cache" })? {
            Ok(None) => Ok(()),
            Ok(Some(what)) => Err(EffectError::Damaged { key: volume.key.clone(), what }),
            // The daemon will tell.
            Err(error) => {
                tracing::debug!(key = %volume.key, %error, "its cache could not be looked at before the start");
                Ok(())
            }
        }
    }

    /// One daemon more, for as long as it takes to answer.
    pub(super) async fn try_snapshot(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
        snapshot: SnapshotName,
    ) -> Result<Verdict, EffectError> {
        let Some(address) = self.config.trial_address else { return Ok(Verdict::Unchecked) };
        let trial = ProjectRecord { key: record.key.trial(), address, ..record.clone() };
        self.clear_trial(&trial, settings).await?;
        self.no_other_trial_runs(&trial.key).await?;
        self.parts.volumes.clone_snapshot(&record.key, snapshot, &trial.key, &described(&trial)).await?;
        let tried = tokio::time::timeout(TRIAL_PATIENCE, self.open_clone(&trial, settings, (&record.key, snapshot)));
        let tried = tried.await;
        let cleared = self.clear_trial(&trial, settings).await;
        let verdict = match tried {
            Ok(Ok(())) => Verdict::Good,
            Ok(Err(error)) if error.damage().is_some() => {
                tracing::warn!(key = %record.key, %snapshot, %error, "a snapshot is damaged");
                Verdict::Bad
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(EffectError::TimedOut { step: "try a snapshot out", after: TRIAL_PATIENCE }),
        };
        cleared.map(|()| verdict)
    }

    /// All trials have one address: what is left of another, and could not be removed, may be there.
    async fn no_other_trial_runs(&self, trial: &Key) -> Result<(), EffectError> {
        let is_other = |key: &Key| key.role() == Role::Trial && key != trial;
        let mut found = self.parts.runtime.found().await?.into_iter();
        let Some(other) = found.find(|found| found.running && found.key.as_ref().is_some_and(is_other)) else {
            return Ok(());
        };
        let why = "what an earlier trial has left still runs, at the address that all of them have".to_owned();
        Err(RuntimeError::Refused { operation: "try a snapshot out beside", instance: other.name, why }.into())
    }

    /// `trial` has a clone of this snapshot of `key`.
    async fn open_clone(
        &self,
        trial: &ProjectRecord,
        settings: &Settings,
        (key, snapshot): (&Key, SnapshotName),
    ) -> Result<(), EffectError> {
        let Some(volume) = self.parts.volumes.get(&trial.key).await? else {
            return Err(VolumeError::Missing { operation: "try out", name: trial.key.to_string() }.into());
        };
        // Compared with the last that was found good: what is damaged since would be what all later ones are compared with.
        let snapshots = self.parts.volumes.snapshots(key).await?;
        let older: Vec<Snapshot> = snapshots.into_iter().filter(|other| other.name < snapshot).collect();
        self.look_for_damage(key, &volume, newest_good(&older)).await?;
        for step in [Step::WriteFiles, Step::CreateInstance, Step::StartInstance, Step::AwaitServing] {
            self.perform(step, trial, settings).await?;
        }
        // It reads what it has of every record.
        self.settle(trial).await;
        Ok(())
    }

    /// Nobody builds there, so nothing is drained.
    async fn clear_trial(&self, trial: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        for step in [Step::StopInstance(Stop::Force), Step::DestroyInstance, Step::DestroyVolume] {
            self.perform(step, trial, settings).await?;
        }
        self.forget(&trial.key).await
    }

    pub(super) async fn sweep(&self) -> Result<(), EffectError> {
        let HostParts { runtime, volumes, .. } = &self.parts;
        let is_trial = |key: &Option<Key>| key.as_ref().is_some_and(|key| key.role() == Role::Trial);
        // What of one trial cannot be removed keeps nothing of the others.
        let mut outcome = Ok(());
        for found in runtime.found().await?.into_iter().filter(|found| is_trial(&found.key)) {
            let Ok(trial) = record_of(&found.properties, Timestamp::EPOCH) else { continue };
            outcome = outcome.and(self.clear_trial(&trial, &Settings::default()).await);
        }
        // Cut off at any other step, it has left its volume, here or on its way through the trash.
        let volumes_of = volumes.found().await?.into_iter().filter_map(|found| found.key);
        let trashed = volumes.trash().await?.into_iter().map(|entry| entry.name.key().clone());
        for key in volumes_of.chain(trashed).filter(|key| key.role() == Role::Trial) {
            let freed = self.destroy_volume(&key).await;
            outcome = outcome.and(freed).and(self.forget(&key).await);
        }
        outcome
    }
}
