//! What engines that keep volumes in directories have in common: everything but four operations of a [`Medium`].
//!
//! ```text
//! <root>/kiln-volumes.json               marks the root as ours
//! <root>/live/<key>/record.json          identity
//! <root>/live/<key>/cache                what an instance gets
//! <root>/live/<key>/snapshots/kiln-000042
//! <root>/trash/<key>.000007/             the same again
//! ```
//!
//! Whatever comes into being is made under a name that begins with `.half-` and then renamed; whatever goes is renamed
//! first. So every change is one rename: a volume with its snapshots and its identity is there or not, in use or in the
//! trash, and what a crash leaves is recognised by its name and removed at the next opening. The one change that takes more, a
//! rollback, is told in [`rollback`].

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::cache::size::Fill;
use kiln_domain::{Key, Snapshot, SnapshotName, Verdict};
use rustix::fs::{CWD, RenameFlags};

use super::command::{Failure, QUICK};
use super::listing::{
    CACHE, Home, LIVE, RECORD, SNAPSHOTS, TRASH, describe, entries, found_below, fullness_of, history, leftovers,
    names_in, read_home,
};
use super::medium::Medium;
use super::record::{KEY_PROPERTY, Kept, Marker, Origin, Record};
use super::root::{Claim, marker_path};
use super::{FoundVolume, Fullness, TrashName, Trashed, Usage, Volume, VolumeEngine, VolumeError};
use crate::clock::Clock;
use crate::host::files::HALF;
use crate::host::key_locks::KeyLocks;
use crate::host::occupancy::{self, Held, Occupancy};
use crate::host::{Properties, files};

mod halves;
mod making;
mod newcomers;
mod rollback;
#[cfg(test)]
mod tests;

use halves::{Halves, What};
use making::Source;
use newcomers::Newcomers;

/// How long the end of a snapshot waits for its bytes.
const SOON: Duration = Duration::from_secs(30);

/// A [`VolumeEngine`] below one directory.
pub struct Tree<M> {
    root: PathBuf,
    medium: Arc<M>,
    halves: Arc<Halves<M>>,
    clock: Arc<dyn Clock>,
    marker: tokio::sync::Mutex<Marker>,
    locks: KeyLocks,
    _held: Held,
}

impl<M: Medium> Tree<M> {
    /// Checks and claims `root`, then removes what a killed run left half-made.
    pub(super) async fn open(
        root: &Path,
        medium: M,
        clock: Arc<dyn Clock>,
        suits: impl FnOnce(&Path) -> Result<(), VolumeError> + Send + 'static,
    ) -> Result<Self, VolumeError> {
        let (wanted, engine) = (root.to_owned(), medium.name());
        let claim = tokio::task::spawn_blocking(move || Claim::new(&wanted, engine, &[LIVE, TRASH], suits));
        let claim =
            claim.await.map_err(|e| Failure::io(root, io::Error::other(e)).during("open", root.display()))??;
        let medium = Arc::new(medium);
        let tree = Self {
            root: claim.root,
            halves: Arc::new(Halves::new(Arc::clone(&medium))),
            medium,
            clock,
            marker: tokio::sync::Mutex::new(claim.marker),
            locks: KeyLocks::default(),
            _held: claim.held,
        };
        tree.sweep().await.map_err(|e| e.during("open", root.display()))?;
        Ok(tree)
    }

    /// A leftover that cannot be removed costs space and nothing else, so it does not keep Kiln from starting.
    async fn sweep(&self) -> Result<(), Failure> {
        let (homes, copies) = blocking(&self.root, leftovers).await?;
        for home in homes {
            tracing::info!(path = %home.display(), "removing a volume that a killed run left half-made");
            // What cannot be removed has been told of.
            let _ = self.halves.remove(What::Home, &home).await;
        }
        for copy in copies {
            tracing::info!(path = %copy.display(), "removing what a killed run left half-made");
            let _ = self.halves.remove(What::Copy, &copy).await;
        }
        self.take_up_rollbacks().await
    }

    fn home(&self, key: &Key) -> PathBuf {
        self.root.join(LIVE).join(key.as_str())
    }

    fn trashed(&self, name: &TrashName) -> PathBuf {
        self.root.join(TRASH).join(name.to_string())
    }

    async fn find(&self, operation: &'static str, key: &Key) -> Result<Option<(Volume, Record)>, VolumeError> {
        let wanted = key.clone();
        let read = blocking(&self.home(key), move |home| Ok(read_home(home, &wanted)));
        match read.await.map_err(|e| e.during(operation, key))? {
            Home::Absent => Ok(None),
            Home::Ours(volume, record) => Ok(Some((volume, record))),
            Home::Foreign(found) => Err(VolumeError::Foreign { operation, key: key.clone(), found }),
            Home::Unreadable(path, source) => Err(Failure::io(&path, source).during(operation, key)),
        }
    }

    async fn require(&self, operation: &'static str, key: &Key) -> Result<(Volume, Record), VolumeError> {
        let found = self.find(operation, key).await?;
        found.ok_or_else(|| VolumeError::Missing { operation, name: key.to_string() })
    }

    async fn write_record(&self, key: &Key, record: Record) -> Result<(), Failure> {
        let path = self.home(key).join(RECORD);
        blocking(&path, move |path| files::write(path, &record).map_err(|e| Failure::io(path, e))).await
    }

    /// What uses the cache, if anything does.
    async fn hold(&self, operation: &'static str, key: &Key, volume: &Volume) -> Result<Option<Held>, VolumeError> {
        blocking(&volume.path, hold_cache).await.map_err(|e| e.during(operation, key))
    }

    fn snapshot_at(&self, key: &Key, snapshot: SnapshotName) -> PathBuf {
        self.home(key).join(SNAPSHOTS).join(snapshot.to_string())
    }

    /// Where a snapshot that exists is.
    async fn require_snapshot(
        &self,
        operation: &'static str,
        key: &Key,
        snapshot: SnapshotName,
    ) -> Result<PathBuf, VolumeError> {
        let path = self.snapshot_at(key, snapshot);
        let missing = || VolumeError::Missing { operation, name: format!("{key}@{snapshot}") };
        if exists(&path).await.map_err(|e| e.during(operation, key))? { Ok(path) } else { Err(missing()) }
    }

    /// What was made of `origin` before; `None` when there is nothing of that name.
    async fn derived(
        &self,
        operation: &'static str,
        target: &Key,
        origin: &Origin,
    ) -> Result<Option<Volume>, VolumeError> {
        match self.find(operation, target).await? {
            None => Ok(None),
            Some((volume, record)) if record.origin.as_ref() == Some(origin) => Ok(Some(volume)),
            Some(_) => Err(VolumeError::Exists { operation, name: target.to_string() }),
        }
    }

    /// The next name in the trash. Whatever becomes of it, its number is used up.
    async fn next_in_trash(&self, key: &Key) -> Result<TrashName, Failure> {
        let mut marker = self.marker.lock().await;
        let next = Marker { last_trash: marker.last_trash + 1, ..marker.clone() };
        let name = TrashName::new(key.clone(), next.last_trash);
        *marker = next.clone();
        let path = marker_path(&self.root);
        blocking(&path, move |path| files::write(path, &next).map_err(|e| Failure::io(path, e))).await?;
        Ok(name)
    }
}

#[async_trait]
impl<M: Medium> VolumeEngine for Tree<M> {
    fn name(&self) -> &'static str {
        self.medium.name()
    }

    fn copies_are_instant(&self) -> bool {
        self.medium.copies_are_instant()
    }

    async fn create(&self, key: &Key, properties: &Properties, size: Option<u64>) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "create";
        let _locked = self.locks.lock(key).await;
        if let Some((volume, _)) = self.find(OPERATION, key).await? {
            return Ok(volume);
        }
        let record = Record::new(key, properties, size, None);
        self.build(key, self.home(key), record, Source::Nothing).await.map_err(|e| e.during(OPERATION, key))?;
        Ok(self.require(OPERATION, key).await?.0)
    }

    async fn get(&self, key: &Key) -> Result<Option<Volume>, VolumeError> {
        Ok(self.find("look at", key).await?.map(|(volume, _)| volume))
    }

    async fn list(&self) -> Result<Vec<Volume>, VolumeError> {
        let listed = blocking(&self.root.join(LIVE), |live| {
            let mut volumes = Vec::new();
            for (name, path) in entries(live)? {
                let Ok(key) = name.parse::<Key>() else { continue };
                match read_home(&path, &key) {
                    Home::Ours(volume, _) => volumes.push(volume),
                    Home::Absent => {}
                    Home::Foreign(found) => tracing::warn!(path = %path.display(), %found, "not a volume of ours"),
                    Home::Unreadable(path, source) => return Err(Failure::io(&path, source)),
                }
            }
            volumes.sort_by(|a, b| a.key.cmp(&b.key));
            Ok(volumes)
        });
        listed.await.map_err(|e| e.during("list", "all"))
    }

    async fn found(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        let found = blocking(&self.root, found_below);
        found.await.map_err(|e| e.during("list", "all"))
    }

    async fn fullness(&self) -> Result<Fullness, VolumeError> {
        let measured = tokio::time::timeout(QUICK, blocking(&self.root, fullness_of)).await;
        let waited_for = || format!("the file system of {}", self.root.display());
        let measured = measured.unwrap_or_else(|_| Err(Failure::TimedOut { waited_for: waited_for(), after: QUICK }));
        measured.map_err(|e| e.during("measure", "all"))
    }

    async fn freed(&self) -> Result<(), VolumeError> {
        self.halves.gone().await;
        self.medium.freed(&self.root).await.map_err(|e| e.during("wait until freed", "all"))
    }

    async fn set_properties(&self, key: &Key, properties: &Properties) -> Result<(), VolumeError> {
        const OPERATION: &str = "set properties of";
        let _locked = self.locks.lock(key).await;
        let (_, mut record) = self.require(OPERATION, key).await?;
        if let Some(other) = properties.get(KEY_PROPERTY).filter(|other| *other != key.as_str()) {
            return Err(VolumeError::Foreign { operation: OPERATION, key: key.clone(), found: format!("{other:?}") });
        }
        record.properties.extend(properties.clone());
        self.write_record(key, record).await.map_err(|e| e.during(OPERATION, key))
    }

    async fn usage(&self, key: &Key) -> Result<Usage, VolumeError> {
        const OPERATION: &str = "measure";
        let (volume, _) = self.require(OPERATION, key).await?;
        let measured = async {
            let names = blocking(&self.home(key).join(SNAPSHOTS), names_in::<SnapshotName>).await?;
            let snapshots: Vec<PathBuf> = names.into_iter().map(|name| self.snapshot_at(key, name)).collect();
            self.medium.usage(&volume.path, &snapshots).await
        };
        measured.await.map_err(|e| e.during(OPERATION, key))
    }

    async fn fill(&self, key: &Key) -> Result<Option<Fill>, VolumeError> {
        const OPERATION: &str = "measure";
        let (volume, _) = self.require(OPERATION, key).await?;
        self.medium.fill(&volume.path).await.map_err(|e| e.during(OPERATION, key))
    }

    async fn resize(&self, key: &Key, size: Option<u64>) -> Result<(), VolumeError> {
        const OPERATION: &str = "resize";
        let _locked = self.locks.lock(key).await;
        let (volume, mut record) = self.require(OPERATION, key).await?;
        if record.size == size {
            return Ok(());
        }
        // The volume first: a crash in between means that it is done again.
        self.medium.resize(&volume.path, size).await.map_err(|e| e.during(OPERATION, key))?;
        record.size = size;
        self.write_record(key, record).await.map_err(|e| e.during(OPERATION, key))
    }

    async fn snapshot(&self, key: &Key) -> Result<Snapshot, VolumeError> {
        const OPERATION: &str = "snapshot";
        let _locked = self.locks.lock(key).await;
        let (volume, mut record) = self.require_settled(OPERATION, key).await?;
        // Held until the copy is made, so that no daemon starts to write meanwhile.
        let _quiet = if self.medium.copies_are_instant() { None } else { self.hold(OPERATION, key, &volume).await? };
        let made = async {
            // What is known of those that are gone is forgotten here.
            let existing = blocking(&self.home(key).join(SNAPSHOTS), names_in::<SnapshotName>).await?;
            record.snapshots.retain(|sequence, _| existing.contains(&SnapshotName::new(*sequence)));
            record.last_snapshot += 1;
            let name = SnapshotName::new(record.last_snapshot);
            let kept = Kept { taken: self.clock.now(), verdict: Verdict::Unchecked };
            record.snapshots.insert(name.sequence(), kept);
            self.write_record(key, record).await?;
            self.copy_aside(&volume.path, &self.snapshot_at(key, name)).await?;
            Ok(Snapshot { name, taken: kept.taken, verdict: kept.verdict, bytes: None })
        };
        made.await.map_err(|e: Failure| e.during(OPERATION, key))
    }

    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, VolumeError> {
        const OPERATION: &str = "list the snapshots of";
        let (_, record) = self.require(OPERATION, key).await?;
        let listed = blocking(&self.home(key), move |home| history(home, &record));
        listed.await.map_err(|e| e.during(OPERATION, key))
    }

    async fn written_since(&self, key: &Key, snapshot: SnapshotName) -> Result<Option<bool>, VolumeError> {
        const OPERATION: &str = "look for changes of";
        let (volume, _) = self.require(OPERATION, key).await?;
        let path = self.require_snapshot(OPERATION, key, snapshot).await?;
        let looked = self.medium.written_since(&volume.path, &path);
        looked.await.map_err(|e| e.during(OPERATION, key))
    }

    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), VolumeError> {
        const OPERATION: &str = "judge a snapshot of";
        let _locked = self.locks.lock(key).await;
        let (_, mut record) = self.require(OPERATION, key).await?;
        self.require_snapshot(OPERATION, key, snapshot).await?;
        let judged = async {
            let known = record.clone();
            let history = blocking(&self.home(key), move |home| history(home, &known)).await?;
            let taken = history.iter().find(|found| found.name == snapshot).map(|found| found.taken);
            let kept = Kept { taken: taken.unwrap_or_else(|| self.clock.now()), verdict };
            if record.snapshots.insert(snapshot.sequence(), kept) == Some(kept) {
                return Ok(());
            }
            self.write_record(key, record).await
        };
        judged.await.map_err(|e| e.during(OPERATION, key))
    }

    async fn snapshot_path(&self, key: &Key, snapshot: SnapshotName) -> Result<PathBuf, VolumeError> {
        const OPERATION: &str = "look at a snapshot of";
        self.require(OPERATION, key).await?;
        self.require_snapshot(OPERATION, key, snapshot).await
    }

    async fn destroy_snapshot(&self, key: &Key, snapshot: SnapshotName) -> Result<(), VolumeError> {
        const OPERATION: &str = "destroy a snapshot of";
        let _locked = self.locks.lock(key).await;
        let Some((_, record)) = self.find(OPERATION, key).await? else { return Ok(()) };
        let (path, half) = (self.snapshot_at(key, snapshot), self.home(key).join(SNAPSHOTS));
        let half = half.join(format!("{HALF}{snapshot}"));
        let destroyed = async {
            self.settle(key, record).await?;
            retire(&path, &half).await?;
            // It is out of the list, and the rest comes about without us.
            let removed = tokio::time::timeout(SOON, self.halves.remove(What::Copy, &half));
            removed.await.unwrap_or(Ok(()))
        };
        destroyed.await.map_err(|e| e.during(OPERATION, format!("{key}@{snapshot}")))
    }

    async fn clone_snapshot(
        &self,
        source: &Key,
        snapshot: SnapshotName,
        target: &Key,
        properties: &Properties,
    ) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "clone";
        let (of_source, _of_target) = self.locks.lock_both(source, target).await;
        let origin = Origin { key: source.clone(), snapshot: Some(snapshot.sequence()) };
        if let Some(volume) = self.derived(OPERATION, target, &origin).await? {
            return Ok(volume);
        }
        let (_, parent) = self.require(OPERATION, source).await?;
        let from = self.require_snapshot(OPERATION, source, snapshot).await?;
        let record = Record::new(target, properties, parent.size, Some(origin));
        if !self.medium.copies_are_instant() {
            // Its project goes before, whatever it wants to do with it.
            drop(of_source);
        }
        let built = self.build(target, self.home(target), record, Source::Snapshot(&from));
        built.await.map_err(|e| e.during(OPERATION, target))?;
        Ok(self.require(OPERATION, target).await?.0)
    }

    async fn fork(&self, source: &Key, target: &Key, properties: &Properties) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "fork";
        let (of_source, _of_target) = self.locks.lock_both(source, target).await;
        let origin = Origin { key: source.clone(), snapshot: None };
        if let Some(volume) = self.derived(OPERATION, target, &origin).await? {
            return Ok(volume);
        }
        let (parent, of_parent) = self.require(OPERATION, source).await?;
        let record = Record::new(target, properties, of_parent.size, Some(origin));
        let from = if self.medium.copies_are_instant() {
            Source::Still(&parent.path)
        } else {
            let quiet = self.hold(OPERATION, source, &parent).await?;
            let watched = blocking(&self.home(source), |home| Newcomers::watch(home, &home.join(CACHE))).await;
            // From here on its project goes before: neither its daemon nor whatever is done to it waits for the copy.
            drop((quiet, of_source));
            Source::Watched(&parent.path, watched.map_err(|e| e.during(OPERATION, source))?)
        };
        let built = self.build(target, self.home(target), record, from);
        built.await.map_err(|e| e.during(OPERATION, target))?;
        Ok(self.require(OPERATION, target).await?.0)
    }

    async fn rollback(&self, key: &Key, snapshot: SnapshotName) -> Result<TrashName, VolumeError> {
        const OPERATION: &str = "roll back";
        let _locked = self.locks.lock(key).await;
        let (volume, record) = self.require_settled(OPERATION, key).await?;
        self.require_snapshot(OPERATION, key, snapshot).await?;
        let _quiet = self.hold(OPERATION, key, &volume).await?;
        let exchanged = self.go_back(key, snapshot, record).await.map_err(|e| e.during(OPERATION, key))?;
        if let Err(error) = self.require_settled(OPERATION, key).await {
            // It is rolled back; older snapshots that did not come along yet do so before anything else happens to it.
            tracing::warn!(%key, %error, "older snapshots of a volume that was rolled back are still in the trash");
        }
        Ok(exchanged)
    }

    async fn discard(&self, key: &Key) -> Result<TrashName, VolumeError> {
        const OPERATION: &str = "discard";
        let _locked = self.locks.lock(key).await;
        let (volume, record) = self.require_settled(OPERATION, key).await?;
        let _quiet = self.hold(OPERATION, key, &volume).await?;
        let record = Record { discarded: Some(self.clock.now()), ..record };
        let moved = async {
            self.write_record(key, record).await?;
            let name = self.next_in_trash(key).await?;
            let trashed = self.trashed(&name);
            blocking(&self.home(key), move |home| move_to(home, &trashed)).await?;
            Ok(name)
        };
        moved.await.map_err(|e: Failure| e.during(OPERATION, key))
    }

    async fn trash(&self) -> Result<Vec<Trashed>, VolumeError> {
        let trash = blocking(&self.root.join(TRASH), |trash| {
            let names = names_in::<TrashName>(trash)?.into_iter();
            // One may have been purged since it was listed.
            let described = names.map(|name| describe(&trash.join(name.to_string()), name).transpose());
            described.flatten().collect()
        });
        trash.await.map_err(|e| e.during("list", "trash"))
    }

    async fn restore(&self, trashed: &TrashName) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "restore";
        let key = trashed.key();
        let _locked = self.locks.lock(key).await;
        let (from, to) = (self.trashed(trashed), self.home(key));
        let wanted = trashed.clone();
        let described = blocking(&from, move |from| describe(from, wanted)).await;
        if described.map_err(|e| e.during(OPERATION, trashed))?.is_none() {
            return Err(VolumeError::Missing { operation: OPERATION, name: trashed.to_string() });
        }
        if exists(&to).await.map_err(|e| e.during(OPERATION, trashed))? {
            return Err(VolumeError::Exists { operation: OPERATION, name: key.to_string() });
        }
        blocking(&from, move |from| move_to(from, &to)).await.map_err(|e| e.during(OPERATION, trashed))?;
        let (volume, record) = self.require(OPERATION, key).await?;
        let restored = Record { discarded: None, ..record };
        if let Err(failure) = self.write_record(key, restored).await {
            // What it says means nothing here.
            tracing::debug!(%key, ?failure, "a restored volume still says when it was discarded");
        }
        Ok(volume)
    }

    async fn purge(&self, trashed: &TrashName) -> Result<(), VolumeError> {
        const OPERATION: &str = "purge";
        let locked = self.locks.lock(trashed.key()).await;
        if let Ok(Some((_, record))) = self.find(OPERATION, trashed.key()).await {
            self.settle(trashed.key(), record).await.map_err(|e| e.during(OPERATION, trashed))?;
        }
        let half = self.root.join(TRASH).join(format!("{HALF}{trashed}"));
        let purged = async {
            retire(&self.trashed(trashed), &half).await?;
            // What is out of sight is nobody's: the project may have its next volume meanwhile.
            drop(locked);
            self.halves.remove(What::Home, &half).await
        };
        purged.await.map_err(|e| e.during(OPERATION, trashed))
    }
}

/// Renames durably, never over something.
pub(super) fn move_to(from: &Path, to: &Path) -> Result<(), Failure> {
    rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(|e| Failure::io(to, e))?;
    // Each costs a commit where a snapshot was just made.
    let to = to.parent().filter(|to| from.parent() != Some(to));
    for directory in [from.parent(), to].into_iter().flatten() {
        files::sync_directory(directory).map_err(|e| Failure::io(directory, e))?;
    }
    Ok(())
}

/// Takes a name out of sight before what it named is removed, unless an earlier attempt did so already.
async fn retire(path: &Path, half: &Path) -> Result<(), Failure> {
    let half = half.to_owned();
    blocking(path, move |path| {
        if !path.try_exists().map_err(|e| Failure::io(path, e))? {
            return Ok(());
        }
        if let Some(point) = occupancy::mounts_below(path).map_err(|e| Failure::io(path, e))?.first() {
            return Err(Failure::Busy { holder: format!("the mount {}", point.display()) });
        }
        move_to(path, &half)
    })
    .await
}

/// Keeps daemons out of a cache. `None` when none has ever been in there.
pub(super) fn hold_cache(cache: &Path) -> Result<Option<Held>, Failure> {
    match occupancy::keep_daemon_out(cache).map_err(|e| Failure::io(cache, e))? {
        Occupancy::Free(held) => Ok(held),
        Occupancy::Taken => Err(Failure::Busy { holder: "its buildkitd, which must be stopped first".to_owned() }),
    }
}

async fn exists(path: &Path) -> Result<bool, Failure> {
    tokio::fs::try_exists(path).await.map_err(|e| Failure::io(path, e))
}

/// File-system calls block, so they leave the runtime's threads alone. `work` gets the path back.
pub(super) fn blocking<T, F>(path: &Path, work: F) -> impl Future<Output = Result<T, Failure>> + Send + use<T, F>
where
    T: Send + 'static,
    F: FnOnce(&Path) -> Result<T, Failure> + Send + 'static,
{
    let path = path.to_owned();
    let for_work = path.clone();
    let task = move || work(&for_work);
    async move {
        match tokio::task::spawn_blocking(task).await {
            Ok(result) => result,
            Err(error) => Err(Failure::io(&path, io::Error::other(error))),
        }
    }
}
