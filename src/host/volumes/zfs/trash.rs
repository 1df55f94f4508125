//! Thrown away, brought back, and freed.
//!
//! **What pins what.** A clone needs its snapshot, a snapshot its dataset. So an entry of the trash with clones cannot simply
//! go, and to wait for the clones could be for ever. It is freed all the same: of its snapshots those go that no clone needs, and one
//! clone of the youngest that is left is promoted: it takes over that snapshot and the older ones (under names that are part
//! of no history, and marked to go with the clones that still need them), and what is left depends on nothing.

use kiln_domain::Key;

use super::super::listing::TRASH;
use super::super::tree::blocking;
use super::super::tree::hold_cache;
use super::super::{TrashName, Trashed, Volume, VolumeError};
use super::cli::Below;
use super::dataset::{DISCARDED, Found, KEY, PROPERTIES, SNAPSHOT, TAKEN, discarded, mountpoint};
use super::engine::ZfsEngine;
use super::fault::Fault;
use super::names::{is_passing, kept_name};
use super::rows::{Facts, Rows};
use super::text::decode;
use super::verbs::Setting;

/// A snapshot of a volume that is to be freed.
struct Pinned {
    name: String,
    /// Orders them by age.
    made: u64,
    clones: Vec<String>,
}

impl ZfsEngine {
    pub(super) async fn throw_away(&self, key: &Key) -> Result<TrashName, VolumeError> {
        const OPERATION: &str = "discard";
        let _locked = self.locks.lock(key).await;
        let found = self.require(OPERATION, key).await?;
        self.keep_out(OPERATION, &found).await?;
        self.unmount(OPERATION, key).await?;
        let name = self.next_trash(OPERATION, key).await?;
        self.move_to_trash(OPERATION, key, &name).await?;
        // With the directory that it was mounted on, copies of the mount go that other namespaces have, as of a container that
        // somebody forgot: they would keep it from being freed.
        let point = mountpoint(&self.base, key);
        if let Err(error) = tokio::fs::remove_dir(&point).await {
            tracing::debug!(path = %point.display(), %error, "a mountpoint stays");
        }
        Ok(name)
    }

    /// That no daemon is in it. Nothing keeps one out from here on: that would itself be a use; but one that starts in between is
    /// seen by the unmounting.
    pub(super) async fn keep_out(&self, operation: &'static str, found: &Found) -> Result<(), VolumeError> {
        let cache = found.volume(&self.base).path;
        blocking(&cache, hold_cache).await.map(drop).map_err(|e| e.during(operation, &found.key))
    }

    /// What is unmounted.
    pub(super) async fn move_to_trash(
        &self,
        operation: &'static str,
        key: &Key,
        name: &TrashName,
    ) -> Result<(), VolumeError> {
        let live = self.root.live(key);
        let now = self.clock.now().as_millis().to_string();
        // Its mountpoint is that of whatever takes its place.
        let settings = [Setting::word("canmount", "off", 0), Setting::text(DISCARDED, now)];
        let moved = async {
            self.zfs.set(&live, &settings).await?;
            self.zfs.rename(&live, &self.root.trashed(name)).await
        };
        match moved.await {
            Ok(()) => Ok(()),
            Err(fault) => Err(self.explain(fault, operation, key, &live).await),
        }
    }

    pub(super) async fn entries(&self) -> Result<Vec<Trashed>, VolumeError> {
        let rows = self.zfs.list(&[KEY, PROPERTIES, DISCARDED], Below::Datasets(&self.root.room(TRASH), 1)).await;
        let rows = rows.map_err(|e| e.during("list", "trash"))?;
        let mut entries: Vec<Trashed> = rows.iter().filter_map(|(dataset, facts)| self.entry(dataset, facts)).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn entry(&self, dataset: &str, facts: &Facts) -> Option<Trashed> {
        let name: TrashName = dataset.rsplit('/').next()?.parse().ok()?;
        facts.local(KEY)?;
        Some(Trashed {
            name,
            // Damaged by hand, then: as if it were new, so that nothing is freed early.
            since: discarded(facts).unwrap_or_else(|| self.clock.now()),
            properties: facts.local(PROPERTIES).and_then(decode).unwrap_or_default(),
        })
    }

    pub(super) async fn bring_back(&self, trashed: &TrashName) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "restore";
        let key = trashed.key();
        let _locked = self.locks.lock(key).await;
        let from = self.root.trashed(trashed);
        let facts = self.zfs.look(&[KEY], &from).await.map_err(|e| e.during(OPERATION, trashed))?;
        if facts.is_none_or(|facts| facts.local(KEY).is_none()) {
            return Err(VolumeError::Missing { operation: OPERATION, name: trashed.to_string() });
        }
        match self.find(OPERATION, key).await {
            Ok(None) => {}
            Ok(Some(_)) | Err(VolumeError::Foreign { .. }) => {
                return Err(VolumeError::Exists { operation: OPERATION, name: key.to_string() });
            }
            Err(error) => return Err(error),
        }
        if let Err(fault) = self.zfs.rename(&from, &self.root.live(key)).await {
            return Err(self.explain(fault, OPERATION, trashed, &from).await);
        }
        let found = self.require(OPERATION, key).await?;
        self.ready(OPERATION, &found).await
    }

    pub(super) async fn purge_entry(&self, trashed: &TrashName) -> Result<(), VolumeError> {
        const OPERATION: &str = "purge";
        let _locked = self.locks.lock(trashed.key()).await;
        let (entry, dying) = (self.root.trashed(trashed), self.root.dying(trashed));
        let fail = |fault: Fault| fault.during(OPERATION, trashed);
        let rows = self.zfs.get(&[KEY], &[&entry, &dying]).await.map_err(fail)?;
        let ours = |name: &String| rows.get(name).is_some_and(|facts| facts.local(KEY).is_some());
        let dataset = if ours(&dying) {
            &dying
        } else if ours(&entry) {
            &entry
        } else {
            if rows.contains_key(&entry) {
                let found = format!("{entry}, which has no {KEY} of its own");
                return Err(VolumeError::Foreign { operation: OPERATION, key: trashed.key().clone(), found });
            }
            return Ok(());
        };
        // Everything that would stop it half-way is looked for first.
        let pinned = self.pins(dataset, trashed).await?;
        if dataset == &entry
            && let Err(fault) = self.zfs.rename(&entry, &dying).await
        {
            return Err(self.explain(fault, OPERATION, trashed, &entry).await);
        }
        match self.free(&dying, trashed, pinned).await {
            Ok(()) => Ok(()),
            Err(fault) => {
                let error = self.explain(fault, OPERATION, trashed, &dying).await;
                // Seen again, or nobody would try again before the next start.
                if let Err(fault) = self.zfs.rename(&dying, &entry).await {
                    tracing::warn!(%trashed, ?fault, "an entry of the trash is out of sight until the next start");
                }
                Err(error)
            }
        }
    }

    /// The snapshots, unless something of somebody else's is in the way: that is never destroyed, nor promoted.
    async fn pins(&self, dataset: &str, trashed: &TrashName) -> Result<Vec<Pinned>, VolumeError> {
        const OPERATION: &str = "purge";
        let fail = |fault: Fault| fault.during(OPERATION, trashed);
        let busy = |holder: String| VolumeError::Busy { operation: OPERATION, name: trashed.to_string(), holder };
        let children = self.zfs.list(&[KEY], Below::Datasets(dataset, 1)).await.map_err(fail)?;
        if let Some(child) = children.keys().find(|name| *name != dataset) {
            return Err(busy(format!("the dataset {child}, which is not Kiln's: zfs rename or zfs destroy it")));
        }
        let properties: Vec<&str> = SNAPSHOT.into_iter().chain(["createtxg"]).collect();
        let snapshots: Rows = self.zfs.list(&properties, Below::Snapshots(dataset, 1)).await.map_err(fail)?;
        let mut pinned = Vec::new();
        for (full, facts) in snapshots {
            let Some((_, name)) = full.split_once('@') else { continue };
            if facts.local(TAKEN).is_none() {
                return Err(busy(format!(
                    "the snapshot {full}, which is not Kiln's: zfs destroy it if nobody needs it"
                )));
            }
            if facts.number("userrefs").is_some_and(|holds| holds > 0) {
                let holds = self.zfs.holds(&full).await.map_err(fail)?.join(", ");
                return Err(busy(format!("a hold of somebody's on {full}, which zfs release ends: {holds}")));
            }
            let made = facts.number("createtxg").unwrap_or_default();
            pinned.push(Pinned { name: name.to_owned(), made, clones: facts.names("clones") });
        }
        let clones: Vec<&String> = pinned.iter().flat_map(|snapshot| &snapshot.clones).collect();
        if !clones.is_empty() {
            let rows = self.zfs.get(&[KEY], &clones).await.map_err(fail)?;
            let ours = |name: &str| {
                self.root.relative(name).is_some() && rows.get(name).is_some_and(|facts| facts.local(KEY).is_some())
            };
            if let Some(stranger) = clones.iter().find(|name| !ours(name)) {
                return Err(busy(format!("the clone {stranger}, which is not Kiln's: zfs promote or zfs destroy it")));
            }
        }
        pinned.sort_by_key(|snapshot| snapshot.made);
        Ok(pinned)
    }

    /// See above. Each step leaves something that the next attempt can go on with.
    async fn free(&self, dying: &str, trashed: &TrashName, pinned: Vec<Pinned>) -> Result<(), Fault> {
        let mut moved = Vec::new();
        let (needed, free): (Vec<Pinned>, Vec<Pinned>) =
            pinned.into_iter().partition(|snapshot| !snapshot.clones.is_empty());
        let free: Vec<String> = free.into_iter().map(|snapshot| snapshot.name).collect();
        self.verbs.destroy_snapshots(dying, &free).await?;
        if let Some(heir) = needed.last().map(|youngest| self.heir(&youngest.clones)) {
            for snapshot in &needed {
                let kept = kept_name(trashed, snapshot.made);
                if is_passing(&snapshot.name) {
                    moved.push(snapshot.name.clone());
                } else {
                    self.zfs.rename_snapshot(&format!("{dying}@{}", snapshot.name), &format!("{dying}@{kept}")).await?;
                    moved.push(kept);
                }
            }
            self.verbs.promote(&heir).await?;
        }
        // After a promotion, now or in an earlier attempt, it is a clone of the youngest that it had.
        let origin = self.zfs.look(&["origin"], dying).await?;
        self.zfs.destroy(dying).await?;
        if let Some((heir, name)) = origin.as_ref().and_then(|facts| facts.text("origin")?.split_once('@'))
            && is_passing(name)
        {
            moved.push(name.to_owned());
            moved.sort();
            moved.dedup();
            self.drop_passing(heir, &moved).await;
        }
        Ok(())
    }

    /// One that is in use before one in the trash: it would have to be promoted again.
    fn heir(&self, clones: &[String]) -> String {
        let in_trash = |name: &&String| self.root.relative(name).is_some_and(|name| name.starts_with(TRASH));
        let live = clones.iter().find(|name| !in_trash(name));
        live.or(clones.first()).cloned().unwrap_or_default()
    }
}
