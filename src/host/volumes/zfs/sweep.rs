//! What a killed run left behind.

use kiln_domain::Key;

use super::super::listing::{LIVE, TRASH};
use super::super::{TrashName, VolumeError};
use super::cli::Below;
use super::dataset::{INTENT, KEY, TAKEN};
use super::engine::ZfsEngine;
use super::fault::Fault;
use super::names::is_passing;
use super::verbs::Verbs;
use crate::host::files::HALF;

impl ZfsEngine {
    /// Takes up what a killed run left in the middle. What cannot be taken up now is met again when its key is asked for, or
    /// costs space and nothing else; so it does not keep Kiln from starting.
    pub(super) async fn sweep(&self) -> Result<(), VolumeError> {
        let fail = |fault: Fault| fault.during("open", &self.root);
        let rows = self.zfs.list(&[KEY, INTENT], Below::Datasets(self.root.as_str(), 2)).await.map_err(fail)?;
        for name in rows.iter().filter(|(_, facts)| facts.local(KEY).is_some()).map(|(name, _)| name) {
            let name = self.root.relative(name).unwrap_or_default();
            let half = |room: &str| name.strip_prefix(room)?.strip_prefix('/')?.strip_prefix(HALF);
            let taken_up = if let Some(Ok(key)) = half(LIVE).map(str::parse::<Key>) {
                tracing::info!(%key, "taking up a rollback that a killed run left half-done");
                let _locked = self.locks.lock(&key).await;
                self.find("roll back", &key).await.map(drop)
            } else if let Some(Ok(trashed)) = half(TRASH).map(str::parse::<TrashName>) {
                tracing::info!(%trashed, "freeing what a killed run left half-freed");
                self.purge_entry(&trashed).await
            } else {
                continue;
            };
            if let Err(error) = taken_up {
                tracing::warn!(name, %error, "a leftover cannot be taken up");
            }
        }
        let snapshots = self.zfs.list(&["defer_destroy", TAKEN], Below::Snapshots(self.root.as_str(), 3)).await;
        for (name, facts) in snapshots.map_err(fail)? {
            let Some((dataset, snapshot)) = name.split_once('@') else { continue };
            if is_passing(snapshot) && facts.local(TAKEN).is_some() && !facts.is("defer_destroy", "on") {
                self.drop_passing(dataset, &[snapshot.to_owned()]).await;
            }
        }
        Ok(())
    }

    /// Snapshots that are part of no history, and go with the clones that need them. One that stays costs space until the
    /// next start.
    pub(super) async fn drop_passing(&self, dataset: &str, names: &[String]) {
        drop_passing(self.verbs.as_ref(), dataset, names).await;
    }
}

/// See [`ZfsEngine::drop_passing`].
pub(super) async fn drop_passing(verbs: &dyn Verbs, dataset: &str, names: &[String]) {
    if let Err(fault) = verbs.destroy_snapshots(dataset, names).await {
        tracing::warn!(dataset, ?names, ?fault, "snapshots that nobody needs stay until the next start");
    }
}
