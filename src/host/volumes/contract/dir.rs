//! Roots, leftovers and the trash as any engine that keeps volumes in directories has them, and what is the business of
//! plain directories alone.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use super::*;

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
    let clone = engine.clone_snapshot(&key(), snapshot.name, &key().fork(), &Properties::new()).await.expect("cloned");
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
    let nothing = Properties::new();
    for error in [
        engine.snapshot(&key()).await.err(),
        engine.fork(&key(), &key().fork(), &nothing).await.err(),
        engine.discard(&key()).await.err(),
    ] {
        let error = error.expect("refused").to_string();
        assert!(error.contains("in use by its buildkitd"), "{error}");
    }
    assert_eq!(engine.get(&key().fork()).await.expect("looked"), None, "a refused fork leaves nothing");
    drop(daemon);
    engine.snapshot(&key()).await.expect("a snapshot");
    engine.fork(&key(), &key().fork(), &nothing).await.expect("forked");
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

#[tokio::test]
async fn usage_of_dir_counts_what_files_can_still_be_made() {
    let Some(mount) = Mount::new(&["-t", "tmpfs", "-o", "size=1m,nr_inodes=100,mode=0700", "none"]) else { return };
    let engine = DirEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let left = engine.usage(&key()).await.expect("measured").inodes_available.expect("they are counted");
    assert!(left < 100);
    std::fs::write(volume.path.join("file"), "").expect("written");
    let usage = engine.usage(&key()).await.expect("measured");
    assert_eq!(usage.inodes_available, Some(left - 1));
    assert_eq!((usage.shared, usage.snapshots, usage.size), (None, None, None), "nobody can tell");
}
