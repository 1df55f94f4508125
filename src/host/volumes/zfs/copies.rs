//! Clones: of a snapshot, and of what a volume holds now.
//!
//! A clone needs its snapshot for as long as it lives. So a fork gets one of its own, which is marked to go with it as soon as
//! the fork exists, and history never waits for a fork.

use kiln_domain::Key;
use kiln_domain::cache::SnapshotName;

use super::super::{Volume, VolumeError};
use super::dataset::{Birth, Found, TAKEN, at_least, cache_path, io, settings, with_key};
use super::engine::ZfsEngine;
use super::fault::Fault;
use super::names::{seed_of, snapshot_of};
use super::sweep::drop_passing;
use super::verbs::Setting;
use crate::host::Properties;

impl ZfsEngine {
    pub(super) async fn clone_of(
        &self,
        source: &Key,
        snapshot: SnapshotName,
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "clone";
        let _locked = self.locks.lock_both(source, target).await;
        let origin = format!("{source}@{snapshot}");
        let (taken, parent) = self.find_both(OPERATION, target, source).await?;
        if let Some(found) = taken {
            return self.again(OPERATION, &found, &origin).await;
        }
        let parent = parent.ok_or_else(|| Fault::Absent.during(OPERATION, source))?;
        let holds = self.require_snapshot(OPERATION, source, snapshot).await?;
        // It may hold more than its volume may by now, and ZFS gives nothing a size below what it holds.
        let size = parent.size().map(|size| if size > holds { size } else { at_least(holds) });
        let from = snapshot_of(&self.root.live(source), snapshot);
        let birth = Birth { key: target, properties, size, origin: Some(origin), last_snapshot: 0 };
        self.clone_from(OPERATION, &from, &birth).await
    }

    pub(super) async fn fork_of(
        &self,
        source: &Key,
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "fork";
        /// Seeds of one name, from a clock that stands still or goes back, are passed over.
        const ATTEMPTS: i64 = 64;
        let _locked = self.locks.lock_both(source, target).await;
        let origin = source.to_string();
        let (taken, parent) = self.find_both(OPERATION, target, source).await?;
        if let Some(found) = taken {
            return self.again(OPERATION, &found, &origin).await;
        }
        let parent = parent.ok_or_else(|| Fault::Absent.during(OPERATION, source))?;
        let (dataset, now) = (self.root.live(source), self.clock.now().as_millis());
        let settings = [Setting::text(TAKEN, now.to_string())];
        let mut seed = String::new();
        for attempt in 0..ATTEMPTS {
            seed = seed_of(&dataset, target, now.saturating_add(attempt));
            match self.verbs.snapshot(&seed, &settings).await {
                Ok(()) => break,
                Err(Fault::Exists) if attempt + 1 < ATTEMPTS => {}
                Err(fault) => return Err(fault.during(OPERATION, source)),
            }
        }
        let birth = Birth { key: target, properties, size: parent.size(), origin: Some(origin), last_snapshot: 0 };
        let made = self.clone_from(OPERATION, &seed, &birth).await;
        if let Some((_, name)) = seed.split_once('@') {
            let (verbs, name) = (self.verbs.clone(), name.to_owned());
            // Nobody has to wait for that: it costs a transaction of its own, and what is cut off here is done at the next start.
            tokio::spawn(async move { drop_passing(verbs.as_ref(), &dataset, &[name]).await });
        }
        made
    }

    async fn again(&self, operation: &'static str, found: &Found, origin: &str) -> Result<Volume, VolumeError> {
        if found.origin() == Some(origin) {
            return self.ready(operation, found).await;
        }
        Err(VolumeError::Exists { operation, name: found.key.to_string() })
    }

    async fn clone_from(
        &self,
        operation: &'static str,
        snapshot: &str,
        birth: &Birth<'_>,
    ) -> Result<Volume, VolumeError> {
        let target = birth.key;
        let settings = settings(&self.base, birth).map_err(|e| io(operation, &self.base, e))?;
        let cloned = self.verbs.clone_snapshot(snapshot, &self.root.live(target), &settings).await;
        cloned.map_err(|e| e.during(operation, target))?;
        self.mounted(operation, target).await?;
        Ok(Volume {
            key: target.clone(),
            path: cache_path(&self.base, target),
            properties: with_key(target, birth.properties),
        })
    }
}
