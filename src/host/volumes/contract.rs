//! What every engine must do, and what single engines promise beyond it.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use kiln_domain::{Key, Timestamp};

use super::mounts::{BtrfsMount, Mount, run};
use super::*;
use crate::clock::Clock;
use crate::host::occupancy::Held;

/// How a test reaches into a volume.
trait Contents: Sync {
    fn write(&self, volume: &Volume, name: &str, text: &str);
    fn read(&self, volume: &Volume, name: &str) -> Option<String>;
}

struct OnDisk;

impl Contents for OnDisk {
    fn write(&self, volume: &Volume, name: &str, text: &str) {
        std::fs::write(volume.path.join(name), text).expect("written");
    }

    fn read(&self, volume: &Volume, name: &str) -> Option<String> {
        std::fs::read_to_string(volume.path.join(name)).ok()
    }
}

impl Contents for FakeVolumes {
    fn write(&self, volume: &Volume, name: &str, text: &str) {
        assert!(Self::write(self, &volume.key, name, text));
    }

    fn read(&self, volume: &Volume, name: &str) -> Option<String> {
        Self::read(self, &volume.key, name)
    }
}

fn key() -> Key {
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

fn clock() -> Arc<dyn Clock> {
    Arc::new(Ticking(AtomicI64::new(BEGIN.as_millis())))
}

async fn names_of(engine: &dyn VolumeEngine) -> Vec<TrashName> {
    engine.trash().await.expect("trash").into_iter().map(|trashed| trashed.name).collect()
}

async fn contract(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    identity(engine, contents).await;
    snapshots_and_clones(engine, contents).await;
    trash(engine, contents).await;
    races(engine).await;
    for volume in engine.list().await.expect("listed") {
        let trashed = engine.discard(&volume.key).await.expect("discarded");
        engine.purge(&trashed).await.expect("purged");
    }
    assert!(engine.trash().await.expect("trash").is_empty());
}

async fn identity(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let key = key();
    assert_eq!(engine.get(&key).await.expect("looked"), None);
    assert!(engine.list().await.expect("listed").is_empty());
    for error in [
        engine.discard(&key).await.err(),
        engine.usage(&key).await.err(),
        engine.snapshot(&key).await.err(),
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
}

async fn snapshots_and_clones(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let (key, fork) = (key(), key().fork());
    let volume = engine.get(&key).await.expect("looked").expect("there");
    contents.write(&volume, "file", "one");
    let first = engine.snapshot(&key).await.expect("a snapshot");
    contents.write(&volume, "file", "two");
    let second = engine.snapshot(&key).await.expect("a snapshot");
    assert_eq!(engine.snapshots(&key).await.expect("listed"), [first, second]);

    let given = properties(&[("repo", "fork of it")]);
    let clone = engine.clone_snapshot(&key, &first, &fork, &given).await.expect("cloned");
    assert_eq!(clone.properties, properties(&[("repo", "fork of it"), ("key", fork.as_str())]), "nothing is inherited");
    assert_eq!(contents.read(&clone, "file").as_deref(), Some("one"));
    contents.write(&clone, "file", "the fork's");
    assert_eq!(contents.read(&volume, "file").as_deref(), Some("two"), "a clone is writable and apart");
    assert!(engine.snapshots(&fork).await.expect("listed").is_empty(), "snapshots are not cloned");
    let again = engine.clone_snapshot(&key, &first, &fork, &given).await.expect("the same clone again");
    assert_eq!(contents.read(&again, "file").as_deref(), Some("the fork's"));
    let other = engine.clone_snapshot(&key, &second, &fork, &given).await;
    assert!(matches!(other, Err(VolumeError::Exists { .. })), "{other:?}");
    let taken = engine.clone_snapshot(&fork, &first, &key, &given).await;
    assert!(matches!(taken, Err(VolumeError::Exists { .. })), "{taken:?}");

    engine.destroy_snapshot(&key, &first).await.expect("a snapshot with a clone can go");
    engine.destroy_snapshot(&key, &second).await.expect("destroyed");
    engine.destroy_snapshot(&key, &second).await.expect("destroyed already");
    assert!(engine.snapshots(&key).await.expect("listed").is_empty());
    assert_eq!(contents.read(&clone, "file").as_deref(), Some("the fork's"));
    let third = engine.snapshot(&key).await.expect("a snapshot");
    assert!(third > second, "a sequence is not used twice: {third} after {second}");
    let gone = engine.clone_snapshot(&key, &first, &key.clone_number(1), &given).await;
    assert!(matches!(gone, Err(VolumeError::Missing { .. })), "{gone:?}");
    assert_eq!(engine.get(&key.clone_number(1)).await.expect("looked"), None, "a failed clone leaves nothing");
}

async fn trash(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let (key, nothing) = (key(), Properties::new());
    let before = engine.get(&key).await.expect("looked").expect("there");
    let snapshots = engine.snapshots(&key).await.expect("listed");
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
    assert_eq!(engine.snapshots(&key).await.expect("listed"), snapshots, "snapshots travel along");
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

#[tokio::test]
async fn btrfs_enforces_a_size_where_quotas_are_on() {
    let Some(mount) = BtrfsMount::new() else { return };
    run("btrfs", &["quota".as_ref(), "enable".as_ref(), mount.path.as_os_str()]);
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), Some(8 << 20)).await.expect("created");
    let error = std::fs::write(volume.path.join("big"), vec![7; 16 << 20]);
    let synced = std::fs::File::open(&volume.path).and_then(|file| file.sync_all());
    assert!(error.is_err() || synced.is_err(), "more was written than the volume may hold");
    let usage = engine.usage(&key()).await.expect("measured");
    assert_eq!(usage.size, Some(8 << 20));
    assert!(usage.available < 8 << 20, "{usage:?}");
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    engine.clone_snapshot(&key(), &snapshot, &key().fork(), &Properties::new()).await.expect("cloned");
    assert_eq!(
        engine.usage(&key().fork()).await.expect("measured").size,
        Some(8 << 20),
        "a clone has its parent's size"
    );
    engine.resize(&key(), Some(32 << 20)).await.expect("grown");
    std::fs::write(volume.path.join("big"), vec![7; 16 << 20]).expect("there is room now");
    std::fs::File::open(volume.path.join("big")).and_then(|file| file.sync_all()).expect("on the disk");
    engine.resize(&key(), Some(1 << 20)).await.expect("as far as it goes");
    let usage = engine.usage(&key()).await.expect("measured");
    assert!(usage.size.is_some_and(|size| size > 17 << 20) && usage.available > 1 << 20, "not full: {usage:?}");
    engine.resize(&key(), None).await.expect("without a limit");
    assert_eq!(engine.usage(&key()).await.expect("measured").size, None);
}

#[tokio::test]
async fn btrfs_removes_what_a_daemon_made_inside_and_snapshots_a_busy_volume() {
    let Some(mount) = BtrfsMount::new() else { return };
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let inner = volume.path.join("nested");
    run("btrfs", &["subvolume".as_ref(), "create".as_ref(), inner.as_os_str()]);
    std::fs::write(inner.join("file"), "x").expect("written");
    let daemon = occupy(&volume);
    engine.snapshot(&key()).await.expect("a snapshot of a volume in use");
    assert!(matches!(engine.discard(&key()).await, Err(VolumeError::Busy { .. })));
    drop(daemon);
    let trashed = engine.discard(&key()).await.expect("discarded");
    engine.purge(&trashed).await.expect("purged");
    assert!(mount.subvolumes().is_empty(), "{:?}", mount.subvolumes());
}

#[tokio::test]
async fn btrfs_refuses_another_file_system() {
    if !Path::new("/dev/shm").is_dir() {
        eprintln!("skipped: no /dev/shm");
        return;
    }
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let error = BtrfsEngine::at(root.path(), &search_path(), clock()).await.err().expect("refused").to_string();
    assert!(error.contains("not on a btrfs") && error.contains("mkfs.btrfs"), "{error}");
    assert_eq!(names(root.path()).len(), 0, "nothing was changed");
}

#[tokio::test]
async fn roots_that_cannot_be_used_are_left_alone() {
    let parent = tempfile::tempdir().expect("a directory");
    let at = |name: &str| parent.path().join(name);
    let refused = async |root: &Path| {
        DirEngine::at(root, &search_path(), clock()).await.err().map(|e| e.to_string()).unwrap_or_default()
    };

    let error = refused(&at("missing")).await;
    assert!(error.contains("no such directory") && error.contains("mkdir -p"), "{error}");
    std::fs::write(at("file"), "").expect("written");
    assert!(refused(&at("file")).await.contains("not a directory"));
    assert!(refused(Path::new("relative")).await.contains("absolute"));

    std::fs::create_dir_all(at("foreign/live/precious")).expect("made");
    let error = refused(&at("foreign")).await;
    assert!(error.contains("not Kiln's"), "{error}");
    assert_eq!(names(&at("foreign")), ["live"]);

    std::fs::create_dir(at("used")).expect("made");
    let engine = DirEngine::at(&at("used"), &search_path(), clock()).await.expect("opened");
    let error = refused(&at("used")).await;
    assert!(error.contains("another kilnd"), "{error}");
    drop(engine);
    DirEngine::at(&at("used"), &search_path(), clock()).await.expect("opened again");
    let marker = at("used").join("kiln-volumes.json");
    for (text, complaint) in [
        ("{", "cannot be read"),
        ("{\"format\":99,\"engine\":\"dir\",\"last_trash\":0}", "newer Kiln"),
        ("{\"format\":1,\"engine\":\"btrfs\",\"last_trash\":0}", "engine btrfs"),
    ] {
        std::fs::write(&marker, text).expect("written");
        let error = refused(&at("used")).await;
        assert!(error.contains(complaint), "{error}");
        assert_eq!(std::fs::read_to_string(&marker).expect("read"), text);
    }
    let error =
        DirEngine::at(&at("used"), &[PathBuf::from("/nonexistent")], clock()).await.err().map(|e| e.to_string());
    assert!(error.is_some_and(|e| e.contains("no program cp") && e.contains("coreutils")));
}

#[tokio::test]
async fn a_read_only_and_a_full_root_are_refused() {
    let Some(mount) = Mount::new(&["-t", "tmpfs", "-o", "size=64k,mode=0700", "none"]) else { return };
    std::fs::write(mount.path.join("fill"), vec![1; 128 << 10]).expect_err("more than fits");
    let error = DirEngine::at(&mount.path, &search_path(), clock()).await.err().expect("refused").to_string();
    assert!(error.contains("full") && error.contains("free some"), "{error}");
    std::fs::remove_file(mount.path.join("fill")).expect("removed");
    run("mount", &["-o".as_ref(), "remount,ro".as_ref(), mount.path.as_os_str()]);
    let error = DirEngine::at(&mount.path, &search_path(), clock()).await.err().expect("refused").to_string();
    assert!(error.contains("read-only") && error.contains("remount"), "{error}");
    assert_eq!(names(&mount.path).len(), 0, "nothing was changed");
}

#[tokio::test]
async fn a_copy_that_does_not_fit_is_full_and_leaves_nothing() {
    let Some(mount) = Mount::new(&["-t", "tmpfs", "-o", "size=1m,mode=0700", "none"]) else { return };
    let engine = DirEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    std::fs::write(volume.path.join("fill"), vec![1; 700 << 10]).expect("written");
    let error = engine.snapshot(&key()).await;
    assert!(matches!(error, Err(VolumeError::Full { operation: "snapshot", .. })), "{error:?}");
    assert!(engine.snapshots(&key()).await.expect("listed").is_empty());
    assert_eq!(names(&volume.path.with_file_name("snapshots")).len(), 0, "the half copy was removed");
}

#[tokio::test]
async fn dir_copies_everything_that_a_cache_is_made_of() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    assert_eq!(std::fs::metadata(&volume.path).expect("there").permissions().mode() & 0o7777, 0o700);
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: owners, devices and trusted attributes need root");
        return;
    }
    let script = "set -e; cd \"$1\"; echo x >a; ln a b; chown 12:34 a; chmod 4751 a; touch -h -d @1000000000 a; ln -s /nowhere l; \
        mknod whiteout c 0 0; mkfifo pipe; mkdir o; chmod 1777 o";
    run("sh", &["-c".as_ref(), script.as_ref(), "sh".as_ref(), volume.path.as_os_str()]);
    rustix::fs::setxattr(volume.path.join("o"), "trusted.overlay.opaque", b"y", rustix::fs::XattrFlags::empty())
        .expect("set");

    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    let clone = engine.clone_snapshot(&key(), &snapshot, &key().fork(), &Properties::new()).await.expect("cloned");
    let (of, meta) =
        (|name: &str| clone.path.join(name), |name: &str| clone.path.join(name).symlink_metadata().expect("there"));
    assert_eq!(
        (meta("a").mode() & 0o7777, meta("a").uid(), meta("a").gid(), meta("a").mtime()),
        (0o4751, 12, 34, 1_000_000_000)
    );
    assert_eq!((meta("a").ino(), meta("a").nlink()), (meta("b").ino(), 2), "hard links stay");
    assert_eq!(std::fs::read_link(of("l")).expect("a link"), Path::new("/nowhere"));
    assert_eq!((meta("whiteout").mode() & 0o170_000, meta("whiteout").rdev()), (0o020_000, 0));
    assert_eq!((meta("pipe").mode() & 0o170_000, meta("o").mode() & 0o7777), (0o010_000, 0o1777));
    let mut value = [0; 8];
    let length = rustix::fs::getxattr(of("o"), "trusted.overlay.opaque", &mut value).expect("the attribute was copied");
    assert_eq!(&value[..length], b"y");
    assert_eq!(meta("").mode() & 0o7777, 0o700);
}

#[tokio::test]
async fn a_volume_in_use_is_neither_copied_nor_discarded_by_dir() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let daemon = occupy(&volume);
    for error in [engine.snapshot(&key()).await.err(), engine.discard(&key()).await.err()] {
        let error = error.expect("refused").to_string();
        assert!(error.contains("in use by its buildkitd"), "{error}");
    }
    drop(daemon);
    engine.snapshot(&key()).await.expect("a snapshot");
    engine.discard(&key()).await.expect("discarded");
}

#[tokio::test]
async fn leftovers_go_and_foreign_things_stay() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    engine.create(&key(), &Properties::new(), None).await.expect("created");
    drop(engine);
    let live = root.path().join("live");
    let home = live.join(key().as_str());
    let halves =
        [live.join(".half-x-1-1"), root.path().join("trash/.half-x"), home.join("snapshots/.half-kiln-000001")];
    for half in &halves {
        std::fs::create_dir_all(half.join("cache/deep")).expect("made");
    }
    let half_files = [root.path().join(".half-1"), home.join(".half-2")];
    for half in &half_files {
        std::fs::write(half, "{").expect("written");
    }
    std::fs::create_dir_all(home.join("snapshots/by-hand")).expect("made");
    std::fs::create_dir_all(live.join("p1111111111111111/cache")).expect("made");
    std::fs::create_dir_all(live.join("somebody")).expect("made");

    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    assert!(halves.iter().chain(&half_files).all(|half| !half.exists()), "half-made things are removed");
    assert!(home.join("snapshots/by-hand").exists() && live.join("somebody").exists());
    assert!(engine.snapshots(&key()).await.expect("listed").is_empty());
    assert_eq!(engine.list().await.expect("listed").len(), 1, "what is not ours is not listed");
    let unmarked: Key = "p1111111111111111".parse().expect("a key");
    for error in [
        engine.get(&unmarked).await.err(),
        engine.create(&unmarked, &Properties::new(), None).await.err(),
        engine.discard(&unmarked).await.err(),
    ] {
        assert!(matches!(error, Some(VolumeError::Foreign { .. })), "{error:?}");
    }
    // A home that was renamed by hand says whose it is.
    std::fs::rename(&home, live.join("p2222222222222222")).expect("renamed");
    let error = engine.get(&"p2222222222222222".parse().expect("a key")).await.expect_err("foreign").to_string();
    assert!(error.contains(key().as_str()), "{error}");
    std::fs::rename(live.join("p2222222222222222"), &home).expect("renamed");
    // An identity whose cache is gone is damage, never an empty cache.
    std::fs::remove_dir(home.join("cache")).expect("removed");
    assert!(matches!(engine.create(&key(), &Properties::new(), None).await, Err(VolumeError::Foreign { .. })));
    assert!(engine.list().await.expect("listed").is_empty(), "damage to one volume does not hide the others");
}

#[tokio::test]
async fn what_is_not_ours_is_found() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    engine.create(&key(), &Properties::new(), None).await.expect("created");
    engine.create(&key().fork(), &Properties::new(), None).await.expect("created");
    let at = |name: &str| root.path().join(name);
    for directory in
        ["lost+found", "backup", "live/by-hand", "live/p1111111111111111/cache", "trash/old", "live/.half-x"]
    {
        std::fs::create_dir_all(at(directory)).expect("made");
    }
    std::fs::write(at("note"), "").expect("written");
    std::fs::write(root.path().join(std::ffi::OsStr::from_bytes(b"odd\xff")), "").expect("written");
    // Ours, but damaged: it is shown, and not taken for a volume.
    std::fs::write(at("live").join(key().fork().as_str()).join("record.json"), "{").expect("written");
    let found = engine.found().await.expect("found");
    let strangers: Vec<_> = found.iter().filter(|found| found.key.is_none()).map(|found| found.name.as_str()).collect();
    let damaged = format!("live/{}", key().fork());
    let mut expected =
        ["backup", "live/by-hand", "live/p1111111111111111", "note", "odd\u{fffd}", "trash/old", &damaged];
    expected.sort_unstable();
    assert_eq!(strangers, expected);
    assert_eq!(found.iter().filter_map(|found| found.key.clone()).collect::<Vec<_>>(), [key()]);
    // They can be asked for by the names they are shown under.
    let nameable = found.iter().filter(|found| kiln_wire::is_orphan_name(&found.name));
    assert_eq!(nameable.count(), found.len() - 1, "all but the one whose name is no text");
}

#[tokio::test]
async fn since_when_it_is_in_the_trash_is_remembered() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    let given = properties(&[("repo", "r"), ("key", key().as_str())]);
    engine.create(&key(), &given, None).await.expect("created");
    let name = engine.discard(&key()).await.expect("discarded");
    let before = engine.trash().await.expect("trash");
    assert_eq!(before, [Trashed { name: name.clone(), since: BEGIN, properties: given.clone() }]);
    drop(engine);
    let later: Arc<dyn Clock> = Arc::new(Ticking(AtomicI64::new(0)));
    let engine = DirEngine::at(root.path(), &search_path(), later).await.expect("opened again");
    assert_eq!(engine.trash().await.expect("trash"), before);

    // Of a Kiln that did not write it down; and one whose record is gone. What the directory itself says will do.
    let record = root.path().join("trash").join(name.to_string()).join("record.json");
    let text = std::fs::read_to_string(&record).expect("read");
    let mut value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    value.as_object_mut().expect("an object").remove("discarded").expect("it was written down");
    let now = crate::clock::SystemClock.now();
    for (text, known) in [(value.to_string(), given), ("{".to_owned(), Properties::new())] {
        std::fs::write(&record, text).expect("written");
        let trashed = engine.trash().await.expect("trash").remove(0);
        assert_eq!((&trashed.name, &trashed.properties), (&name, &known));
        let apart = now.since(trashed.since).max(trashed.since.since(now));
        assert!(apart < std::time::Duration::from_secs(60), "{trashed:?}");
    }
    engine.purge(&name).await.expect("purged all the same");
    assert!(engine.trash().await.expect("trash").is_empty());
}

#[tokio::test]
async fn fullness_is_of_the_file_system() {
    let Some(mount) = Mount::new(&["-t", "tmpfs", "-o", "size=1m,nr_inodes=100,mode=0700", "none"]) else { return };
    let engine = DirEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let empty = engine.fullness().await.expect("measured");
    assert_eq!((empty.bytes_total, empty.inodes_total), (1 << 20, 100));
    std::fs::write(mount.path.join("fill"), vec![1; 512 << 10]).expect("written");
    let half = engine.fullness().await.expect("measured");
    assert_eq!(half.bytes_used - empty.bytes_used, 512 << 10);
    assert_eq!(half.inodes_used - empty.inodes_used, 1);
    let Some(btrfs) = BtrfsMount::new() else { return };
    let engine = BtrfsEngine::at(&btrfs.path, &search_path(), clock()).await.expect("opened");
    let fullness = engine.fullness().await.expect("measured");
    assert!(fullness.bytes_used < fullness.bytes_total && fullness.bytes_total <= 256 << 20, "{fullness:?}");
    assert_eq!(fullness.inodes_total, 0, "btrfs makes them as they are needed");
}

#[tokio::test]
async fn what_is_mounted_below_a_volume_keeps_it_from_being_purged() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let point = volume.path.join("rootfs");
    std::fs::create_dir(&point).expect("made");
    let Some(mount) = Mount::over(&point, &["-t", "tmpfs", "none"]) else { return };
    std::fs::write(point.join("precious"), "x").expect("written");
    let trashed = engine.discard(&key()).await.expect("discarded");
    let error = engine.purge(&trashed).await.expect_err("busy");
    assert!(matches!(error, VolumeError::Busy { .. }), "{error}");
    assert_eq!(names_of(&engine).await, std::slice::from_ref(&trashed));
    drop(mount);
    let moved = root.path().join("trash").join(trashed.to_string()).join("cache/rootfs");
    run("umount", &["-l".as_ref(), moved.as_os_str()]);
    engine.purge(&trashed).await.expect("purged");
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
