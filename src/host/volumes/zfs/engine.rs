//! The engine itself: opened on a root, finding volumes in it, and making one fit for use.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_domain::Key;

use super::super::command::Failure;
use super::super::listing::{CACHE, TRASH};
use super::super::root::unusable;
use super::super::tree::blocking;
use super::super::{TrashName, Volume, VolumeError};
use super::claim::{Claimed, claim};
use super::cli::Zfs;
use super::dataset::{Found, INTENT, LAST_TRASH, VOLUME, io, mountpoint};
use super::fault::Fault;
use super::mounts;
use super::names::Root;
use super::rows::Facts;
use super::verbs::{Setting, Verbs};
use crate::clock::Clock;
use crate::host::files;
use crate::host::key_locks::KeyLocks;
use crate::host::occupancy::Held;

/// A [`super::VolumeEngine`] below one dataset.
pub struct ZfsEngine {
    pub(super) root: Root,
    /// Where the root is mounted.
    pub(super) base: PathBuf,
    pub(super) zfs: Zfs,
    pub(super) verbs: Arc<dyn Verbs>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) locks: KeyLocks,
    last_trash: tokio::sync::Mutex<u64>,
    _held: Held,
}

/// What there is of a key at one moment.
pub(super) struct Seen {
    pub live: Option<Facts>,
    /// A rollback under way, or cut off.
    pub half: Option<Facts>,
}

impl ZfsEngine {
    /// `dataset` must exist and have `base` as its mountpoint; `search` are the directories in which programs are looked for,
    /// as [`super::super::SEARCH`]; `clock` says when a snapshot was taken and something went to the trash.
    pub async fn at(
        dataset: &str,
        base: &Path,
        search: &[PathBuf],
        clock: Arc<dyn Clock>,
    ) -> Result<Self, VolumeError> {
        let root = Root::parse(dataset).ok_or_else(|| {
            let remedy =
                "give the name of a file system of ZFS, as tank/kiln/cache: at most 95 of A-Z a-z 0-9 - _ . : and /";
            unusable(Path::new(dataset), "it is not the name of a dataset", remedy)
        })?;
        let zfs = Zfs::find(search, root.pool())?;
        let verbs = verbs(&zfs);
        Self::open(root, base, zfs, verbs, clock).await
    }

    pub(super) async fn open(
        root: Root,
        base: &Path,
        zfs: Zfs,
        verbs: Arc<dyn Verbs>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, VolumeError> {
        let Claimed { claim, last_trash } = claim(&zfs, &root, base).await?;
        let engine = Self {
            root,
            base: claim.root,
            zfs,
            verbs,
            clock,
            locks: KeyLocks::default(),
            last_trash: last_trash.into(),
            _held: claim.held,
        };
        tracing::debug!(root = %engine.root, verbs = engine.verbs.name(), "caches are datasets");
        engine.sweep().await?;
        Ok(engine)
    }

    pub(super) async fn look(&self, operation: &'static str, key: &Key) -> Result<Seen, VolumeError> {
        let [seen] = self.look_at(operation, [key]).await?;
        Ok(seen)
    }

    async fn look_at<const N: usize>(
        &self,
        operation: &'static str,
        keys: [&Key; N],
    ) -> Result<[Seen; N], VolumeError> {
        let names: Vec<String> = keys.iter().flat_map(|key| [self.root.live(key), self.root.half(key)]).collect();
        let properties: Vec<&str> = VOLUME.into_iter().chain([INTENT]).collect();
        let rows = self.zfs.get(&properties, &names).await;
        let mut rows = rows.map_err(|e| e.during(operation, keys.map(Key::as_str).join(" and ")))?;
        Ok(keys.map(|key| Seen {
            half: rows.remove(&self.root.half(key)).filter(|facts| facts.local(INTENT).is_some()),
            live: rows.get(&self.root.live(key)).cloned(),
        }))
    }

    /// With the key's lock held: what a crash left of a rollback is completed or undone first.
    pub(super) async fn find(&self, operation: &'static str, key: &Key) -> Result<Option<Found>, VolumeError> {
        let seen = self.look(operation, key).await?;
        self.settle(operation, key, seen).await
    }

    /// As [`Self::find`], of two, with both locks held.
    pub(super) async fn find_both(
        &self,
        operation: &'static str,
        one: &Key,
        other: &Key,
    ) -> Result<(Option<Found>, Option<Found>), VolumeError> {
        let [of_one, of_other] = self.look_at(operation, [one, other]).await?;
        Ok((self.settle(operation, one, of_one).await?, self.settle(operation, other, of_other).await?))
    }

    async fn settle(&self, operation: &'static str, key: &Key, mut seen: Seen) -> Result<Option<Found>, VolumeError> {
        if let Some(half) = seen.half {
            self.take_up_rollback(key, seen.live.as_ref(), &half).await?;
            seen = self.look(operation, key).await?;
        }
        let foreign = |found| VolumeError::Foreign { operation, key: key.clone(), found };
        seen.live.map(|facts| Found::read(key, facts).map_err(foreign)).transpose()
    }

    pub(super) async fn require(&self, operation: &'static str, key: &Key) -> Result<Found, VolumeError> {
        let found = self.find(operation, key).await?;
        found.ok_or_else(|| VolumeError::Missing { operation, name: key.to_string() })
    }

    /// Without the lock: in the middle of a rollback there is a moment in which the name is nobody's, so that nothing is there
    /// is believed only when nobody is about to change it.
    pub(super) async fn peek(&self, operation: &'static str, key: &Key) -> Result<Found, VolumeError> {
        if let Some(facts) = self.look(operation, key).await?.live
            && let Ok(found) = Found::read(key, facts)
        {
            return Ok(found);
        }
        let _locked = self.locks.lock(key).await;
        self.require(operation, key).await
    }

    /// With the key's lock held: mounted where it belongs, which a reboot or an admin may have changed.
    pub(super) async fn ready(&self, operation: &'static str, found: &Found) -> Result<Volume, VolumeError> {
        let (key, dataset) = (&found.key, self.root.live(&found.key));
        let point = mountpoint(&self.base, key);
        let mut settings = Vec::new();
        if found.facts.is("canmount", "off") {
            settings.push(Setting::word("canmount", "noauto", 2));
        }
        if found.facts.text("mountpoint") != point.to_str() {
            tracing::warn!(%key, mountpoint = found.facts.text("mountpoint"), "a cache had another mountpoint, and gets its own back");
            settings.push(Setting::text("mountpoint", point.to_string_lossy()));
        }
        if !settings.is_empty()
            && let Err(fault) = self.zfs.set(&dataset, &settings).await
        {
            return Err(self.explain(fault, operation, key, &dataset).await);
        }
        self.mounted(operation, key).await?;
        Ok(found.volume(&self.base))
    }

    /// With the key's lock held, of a dataset that knows its mountpoint.
    pub(super) async fn mounted(&self, operation: &'static str, key: &Key) -> Result<(), VolumeError> {
        let (dataset, point) = (self.root.live(key), mountpoint(&self.base, key));
        let seen = || mounts::dataset_at(&point).map_err(|e| io(operation, &point, e));
        if seen()?.as_deref() != Some(dataset.as_str()) {
            if let Err(fault) = self.zfs.mount(&dataset).await {
                return Err(self.explain(fault, operation, key, &dataset).await);
            }
            match seen()? {
                Some(there) if there == dataset => {}
                Some(other) => return Err(unusable(&point, &format!("{other} is mounted there"), "unmount that")),
                None => {
                    let remedy =
                        "see whether kilnd has a mount namespace of its own (PrivateMounts=), which it must not have";
                    return Err(unusable(&point, &format!("{dataset} was mounted and is not"), remedy));
                }
            }
        }
        blocking(&point.join(CACHE), make_cache).await.map_err(|e| e.during(operation, key))
    }

    /// Whether there is nothing that [`Self::ready`] would do.
    pub(super) fn is_ready(&self, found: &Found) -> bool {
        let point = mountpoint(&self.base, &found.key);
        let mounted = mounts::dataset_at(&point).ok().flatten();
        found.facts.text("mountpoint") == point.to_str()
            && mounted.as_deref() == Some(self.root.live(&found.key).as_str())
            && point.join(CACHE).is_dir()
    }

    /// With the key's lock held. Not by force: who works in it is told of, and nothing is changed.
    pub(super) async fn unmount(&self, operation: &'static str, key: &Key) -> Result<(), VolumeError> {
        let dataset = self.root.live(key);
        let mounted = mounts::points_of(&dataset).map_err(|e| io(operation, Path::new("/proc/self/mountinfo"), e))?;
        if mounted.is_empty() {
            return Ok(());
        }
        match self.zfs.unmount(&dataset).await {
            Ok(()) => Ok(()),
            Err(fault) => Err(self.explain(fault, operation, key, &dataset).await),
        }
    }

    /// The next name in the trash, never given out before.
    pub(super) async fn next_trash(&self, operation: &'static str, key: &Key) -> Result<TrashName, VolumeError> {
        let mut last = self.last_trash.lock().await;
        // Whatever becomes of this attempt, its number is used up.
        *last += 1;
        let name = TrashName::new(key.clone(), *last);
        let used_up = [Setting::text(LAST_TRASH, last.to_string())];
        self.zfs.set(&self.root.room(TRASH), &used_up).await.map_err(|e| e.during(operation, key))?;
        Ok(name)
    }

    /// Who is in the way, if somebody is.
    pub(super) async fn explain(
        &self,
        fault: Fault,
        operation: &'static str,
        name: &(impl std::fmt::Display + Sync),
        dataset: &str,
    ) -> VolumeError {
        let Fault::Busy(said) = fault else { return fault.during(operation, name) };
        let dataset = dataset.to_owned();
        let holders = tokio::task::spawn_blocking(move || mounts::holders_of(&dataset)).await.unwrap_or_default();
        let holder =
            if holders.is_empty() { format!("somebody who cannot be found; ZFS says: {said}") } else { holders };
        Fault::Busy(holder).during(operation, name)
    }
}

#[cfg(feature = "libzetta")]
fn verbs(zfs: &Zfs) -> Arc<dyn Verbs> {
    match super::lzc::Lzc::new(zfs) {
        Ok(lzc) => Arc::new(lzc),
        Err(error) => {
            tracing::warn!(error, "libzfs_core cannot be used, so the zfs command is");
            Arc::new(zfs.clone())
        }
    }
}

#[cfg(not(feature = "libzetta"))]
fn verbs(zfs: &Zfs) -> Arc<dyn Verbs> {
    Arc::new(zfs.clone())
}

/// In a dataset that is known to be mounted, so a cache that is not there has not been made yet.
fn make_cache(cache: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::PermissionsExt as _;

    let fail = |error| Failure::io(cache, error);
    let point = cache.parent().unwrap_or(cache);
    if cache.is_dir() {
        return Ok(());
    }
    std::fs::set_permissions(point, std::fs::Permissions::from_mode(0o700)).map_err(fail)?;
    files::make_private_directory(cache).map_err(fail)
}
