//! What every engine must do, and what single engines promise beyond it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use kiln_domain::{Key, Timestamp};

use super::mounts::{BtrfsMount, Mount, ZfsRoot, run};
use super::*;
use crate::clock::Clock;
use crate::host::occupancy::Held;

mod btrfs;
mod dir;
mod history;
mod zfs;

/// How a test reaches into a volume.
trait Contents: Sync {
    fn write(&self, volume: &Volume, name: &str, text: &str);
    fn read(&self, volume: &Volume, name: &str) -> Option<String>;
    /// Below what `snapshot_path` told.
    fn read_snapshot(&self, path: &Path, name: &str) -> Option<String>;
    /// Puts a daemon into the volume, until [`Contents::vacate`] gets back what this returned.
    fn occupy(&self, volume: &Volume) -> Option<Held>;
    fn vacate(&self, volume: &Volume, daemon: Option<Held>);
}

struct OnDisk;

impl Contents for OnDisk {
    fn write(&self, volume: &Volume, name: &str, text: &str) {
        std::fs::write(volume.path.join(name), text).expect("written");
    }

    fn read(&self, volume: &Volume, name: &str) -> Option<String> {
        std::fs::read_to_string(volume.path.join(name)).ok()
    }

    fn read_snapshot(&self, path: &Path, name: &str) -> Option<String> {
        std::fs::read_to_string(path.join(name)).ok()
    }

    fn occupy(&self, volume: &Volume) -> Option<Held> {
        Some(occupy(volume))
    }

    fn vacate(&self, _volume: &Volume, daemon: Option<Held>) {
        drop(daemon);
    }
}

impl Contents for FakeVolumes {
    fn write(&self, volume: &Volume, name: &str, text: &str) {
        assert!(Self::write(self, &volume.key, name, text));
    }

    fn read(&self, volume: &Volume, name: &str) -> Option<String> {
        Self::read(self, &volume.key, name)
    }

    fn read_snapshot(&self, path: &Path, name: &str) -> Option<String> {
        Self::read_snapshot(self, path, name)
    }

    fn occupy(&self, volume: &Volume) -> Option<Held> {
        self.set_busy(&volume.key, true);
        None
    }

    fn vacate(&self, volume: &Volume, _daemon: Option<Held>) {
        self.set_busy(&volume.key, false);
    }
}

pub(super) fn key() -> Key {
    "pbcce5b6205652dd7".parse().expect("a key")
}

fn properties(pairs: &[(&str, &str)]) -> Properties {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// A clock that goes on by a second with each look.
struct Ticking(AtomicI64);

const BEGIN: Timestamp = Timestamp::from_millis(1_800_000_000_000);

impl Clock for Ticking {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.fetch_add(1000, Ordering::SeqCst))
    }
}

pub(super) fn clock() -> Arc<dyn Clock> {
    Arc::new(Ticking(AtomicI64::new(BEGIN.as_millis())))
}

async fn names_of(engine: &dyn VolumeEngine) -> Vec<TrashName> {
    engine.trash().await.expect("trash").into_iter().map(|trashed| trashed.name).collect()
}

/// Without what only some engines know, and what changes by itself.
async fn history_of(engine: &dyn VolumeEngine, key: &Key) -> Vec<Snapshot> {
    let snapshots = engine.snapshots(key).await.expect("listed");
    snapshots.into_iter().map(|snapshot| Snapshot { bytes: None, ..snapshot }).collect()
}

async fn contract(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    identity(engine, contents).await;
    snapshots_and_clones(engine, contents).await;
    trash(engine, contents).await;
    history::keeps_the_contract(engine, contents).await;
    races(engine).await;
    for volume in engine.list().await.expect("listed") {
        let trashed = engine.discard(&volume.key).await.expect("discarded");
        engine.purge(&trashed).await.expect("purged");
    }
    assert!(engine.trash().await.expect("trash").is_empty());
    engine.freed().await.expect("free");
}

async fn identity(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let key = key();
    assert_eq!(engine.get(&key).await.expect("looked"), None);
    assert!(engine.list().await.expect("listed").is_empty());
    for error in [
        engine.discard(&key).await.err(),
        engine.usage(&key).await.err(),
        engine.snapshot(&key).await.err(),
        engine.snapshots(&key).await.err(),
        engine.fork(&key, &key.fork(), &Properties::new()).await.err(),
        engine.rollback(&key, SnapshotName::new(1)).await.err(),
        engine.resize(&key, None).await.err(),
    ] {
        assert!(matches!(error, Some(VolumeError::Missing { .. })), "{error:?}");
    }

    let given = properties(&[("repo", "github.com/o/r"), ("key", key.as_str()), ("odd", "a \"b\"\n\u{fc}")]);
    let volume = engine.create(&key, &given, Some(64 << 20)).await.expect("created");
    assert_eq!((&volume.key, &volume.properties), (&key, &given));
    contents.write(&volume, "kept", "cache");
    let again = engine.create(&key, &properties(&[("repo", "other")]), None).await.expect("created again");
    assert_eq!(again, volume, "an existing volume is returned as it is");
    assert_eq!(contents.read(&again, "kept").as_deref(), Some("cache"));

    engine.set_properties(&key, &properties(&[("repo", "moved"), ("new", "1")])).await.expect("set");
    let expected = properties(&[("repo", "moved"), ("new", "1"), ("key", key.as_str()), ("odd", "a \"b\"\n\u{fc}")]);
    assert_eq!(engine.get(&key).await.expect("looked").expect("there").properties, expected);
    let stolen = engine.set_properties(&key, &properties(&[("key", "p0000000000000000")])).await;
    assert!(matches!(stolen, Err(VolumeError::Foreign { .. })), "a volume keeps its key: {stolen:?}");
    assert_eq!(engine.list().await.expect("listed").len(), 1);
    let found = engine.found().await.expect("found");
    assert_eq!(
        found.iter().map(|found| (&found.key, &found.properties)).collect::<Vec<_>>(),
        [(&Some(key.clone()), &expected)]
    );
    assert!(found[0].name.ends_with(key.as_str()), "{found:?}");

    let usage = engine.usage(&key).await.expect("measured");
    assert!(usage.available > 0 && usage.used < 64 << 20, "{usage:?}");
    for part in [usage.shared, usage.snapshots] {
        assert!(part.is_none_or(|bytes| bytes < 1 << 20), "nothing was shared, and nothing snapshotted: {usage:?}");
    }
    assert!(usage.inodes_available.is_none_or(|inodes| inodes > 0), "{usage:?}");
}

async fn snapshots_and_clones(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let (key, fork) = (key(), key().fork());
    let volume = engine.get(&key).await.expect("looked").expect("there");
    contents.write(&volume, "file", "one");
    let first = engine.snapshot(&key).await.expect("a snapshot");
    contents.write(&volume, "file", "two");
    let second = engine.snapshot(&key).await.expect("a snapshot");
    assert_eq!(history_of(engine, &key).await, [first, second]);

    let given = properties(&[("repo", "fork of it")]);
    let clone = engine.clone_snapshot(&key, first.name, &fork, &given).await.expect("cloned");
    assert_eq!(clone.properties, properties(&[("repo", "fork of it"), ("key", fork.as_str())]), "nothing is inherited");
    assert_eq!(contents.read(&clone, "file").as_deref(), Some("one"));
    let sizes = (engine.usage(&key).await.expect("measured").size, engine.usage(&fork).await.expect("measured").size);
    assert_eq!(sizes.0, sizes.1, "a clone is as large as its parent may be");
    contents.write(&clone, "file", "the fork's");
    assert_eq!(contents.read(&volume, "file").as_deref(), Some("two"), "a clone is writable and apart");
    assert!(engine.snapshots(&fork).await.expect("listed").is_empty(), "snapshots are not cloned");
    let again = engine.clone_snapshot(&key, first.name, &fork, &given).await.expect("the same clone again");
    assert_eq!(contents.read(&again, "file").as_deref(), Some("the fork's"));
    let other = engine.clone_snapshot(&key, second.name, &fork, &given).await;
    assert!(matches!(other, Err(VolumeError::Exists { .. })), "{other:?}");
    let taken = engine.clone_snapshot(&fork, first.name, &key, &given).await;
    assert!(matches!(taken, Err(VolumeError::Exists { .. })), "{taken:?}");

    engine.destroy_snapshot(&key, first.name).await.expect("a snapshot with a clone can go");
    engine.destroy_snapshot(&key, second.name).await.expect("destroyed");
    engine.destroy_snapshot(&key, second.name).await.expect("destroyed already");
    assert!(engine.snapshots(&key).await.expect("listed").is_empty());
    assert_eq!(contents.read(&clone, "file").as_deref(), Some("the fork's"));
    let third = engine.snapshot(&key).await.expect("a snapshot");
    assert!(third.name > second.name, "a sequence is not used twice: {third:?} after {second:?}");
    let gone = engine.clone_snapshot(&key, first.name, &key.clone_number(1), &given).await;
    assert!(matches!(gone, Err(VolumeError::Missing { .. })), "{gone:?}");
    assert_eq!(engine.get(&key.clone_number(1)).await.expect("looked"), None, "a failed clone leaves nothing");
}

async fn trash(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let (key, nothing) = (key(), Properties::new());
    let before = engine.get(&key).await.expect("looked").expect("there");
    let snapshots = history_of(engine, &key).await;
    let first = engine.discard(&key).await.expect("discarded");
    assert_eq!((first.key(), engine.get(&key).await.expect("looked")), (&key, None));
    let fresh = engine.create(&key, &nothing, None).await.expect("a new one");
    assert_eq!(contents.read(&fresh, "file"), None, "a new volume is empty");
    let blocked = engine.restore(&first).await;
    assert!(matches!(blocked, Err(VolumeError::Exists { .. })), "{blocked:?}");
    let second = engine.discard(&key).await.expect("discarded");
    assert_eq!(names_of(engine).await, [first.clone(), second.clone()]);

    let described = engine.trash().await.expect("trash");
    assert_eq!(described[0].properties, before.properties, "it says whose it was");
    assert!(described[0].since >= BEGIN && described[0].since < described[1].since, "{described:?}");
    assert_eq!(
        engine.trash().await.expect("trash"),
        described,
        "time goes on, and what was discarded then was so then"
    );
    assert!(engine.found().await.expect("found").iter().all(|found| found.key.as_ref() != Some(&key)));

    assert_eq!(engine.restore(&first).await.expect("restored"), before);
    assert_eq!(contents.read(&before, "file").as_deref(), Some("two"));
    assert_eq!(history_of(engine, &key).await, snapshots, "snapshots travel along");
    let again = engine.restore(&first).await;
    assert!(matches!(again, Err(VolumeError::Missing { .. })), "{again:?}");

    engine.purge(&second).await.expect("purged");
    engine.purge(&second).await.expect("purged already");
    assert!(engine.trash().await.expect("trash").is_empty());
    engine.discard(&key).await.expect("discarded");
    let third = names_of(engine).await.remove(0);
    assert!(third > second, "a name in the trash is not used twice: {third} after {second}");
    let again = engine.trash().await.expect("trash").remove(0).since;
    assert!(again > described[1].since, "restored and discarded again, it is in the trash since then");
    engine.restore(&third).await.expect("restored");
}

async fn races(engine: &dyn VolumeEngine) {
    let key = key().clone_number(7);
    let given = properties(&[("repo", "r")]);
    let (a, b, c) = tokio::join!(
        engine.create(&key, &given, None),
        engine.create(&key, &given, None),
        engine.create(&key, &given, None)
    );
    let a = a.expect("created");
    assert_eq!((&a, &a), (&b.expect("created"), &c.expect("created")));
    assert_eq!(engine.list().await.expect("listed").iter().filter(|v| v.key == key).count(), 1);
    let (a, b) = tokio::join!(engine.snapshot(&key), engine.snapshot(&key));
    assert_ne!(a.expect("a snapshot"), b.expect("another"));
}

#[tokio::test]
async fn the_fake_keeps_the_contract() {
    let engine = FakeVolumes::with_clock(clock());
    contract(&engine, &engine).await;
    let key = key();
    engine.create(&key, &Properties::new(), None).await.expect("created");
    engine.set_busy(&key, true);
    assert!(matches!(engine.discard(&key).await, Err(VolumeError::Busy { .. })));
    engine.add_stranger("by-hand");
    assert_eq!(engine.found().await.expect("found").iter().filter(|found| found.key.is_none()).count(), 1);
    let fullness = Fullness { bytes_used: 3, bytes_total: 4, ..Fullness::default() };
    engine.set_fullness(fullness);
    assert_eq!(engine.fullness().await.expect("measured"), fullness);
    engine.set_full(true);
    assert!(matches!(engine.create(&key.fork(), &Properties::new(), None).await, Err(VolumeError::Full { .. })));
}

#[tokio::test]
async fn dir_keeps_the_contract() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    contract(&engine, &OnDisk).await;
    let left = Command::new("find").arg(root.path()).args(["-mindepth", "2"]).output().expect("find");
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "everything was purged");
}

#[tokio::test]
async fn btrfs_keeps_the_contract() {
    let Some(mount) = BtrfsMount::new() else { return };
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    contract(&engine, &OnDisk).await;
    assert!(mount.subvolumes().is_empty(), "everything was purged: {:?}", mount.subvolumes());
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("listed");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

/// Does what buildkitd does to its root.
fn occupy(volume: &Volume) -> Held {
    let lock = std::fs::File::create(volume.path.join("buildkitd.lock")).expect("made");
    Held::try_lock(lock.into()).expect("no error").expect("free")
}
