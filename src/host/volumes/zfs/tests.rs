//! What the contract does not ask for: real pools in all states that they get into, and crashes between any two commands.
//! Where `KILN_TEST_ZFS` names a dataset to make some in, as root.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use kiln_domain::Key;
use kiln_domain::cache::Verdict;

use super::super::mounts::{ZfsRoot, tool};
use super::super::{Volume, VolumeEngine, VolumeError, search_path};
use super::ZfsEngine;
use crate::clock::SystemClock;
use crate::host::Properties;
use crate::host::occupancy::Held;

mod crashes;
mod pools;
mod refusals;

fn key() -> Key {
    "pbcce5b6205652dd7".parse().expect("a key")
}

fn given() -> Properties {
    [("repo".to_owned(), "r".to_owned())].into()
}

async fn open(root: &ZfsRoot) -> ZfsEngine {
    try_open(root).await.expect("opened")
}

async fn try_open(root: &ZfsRoot) -> Result<ZfsEngine, VolumeError> {
    ZfsEngine::at(&root.dataset, &root.path, &search_path(), Arc::new(SystemClock)).await
}

fn read(volume: &Volume, name: &str) -> Option<String> {
    std::fs::read_to_string(volume.path.join(name)).ok()
}

fn write(volume: &Volume, name: &str, text: &str) {
    std::fs::write(volume.path.join(name), text).expect("written");
}

fn occupy(volume: &Volume) -> Held {
    let lock = std::fs::File::create(volume.path.join("buildkitd.lock")).expect("made");
    Held::try_lock(lock.into()).expect("no error").expect("free")
}

async fn names(engine: &ZfsEngine, key: &Key) -> Vec<String> {
    engine.snapshots(key).await.expect("listed").into_iter().map(|snapshot| snapshot.name.to_string()).collect()
}

/// So many bytes that zstd makes nothing smaller of.
fn noise(bytes: u64) -> Vec<u8> {
    use sha2::{Digest as _, Sha256};

    (0..bytes / 32).flat_map(|block| Sha256::digest(block.to_le_bytes())).collect()
}

/// Everything in the trash, gone.
async fn purge_all(engine: &ZfsEngine) {
    for trashed in engine.trash().await.expect("trash") {
        engine.purge(&trashed.name).await.expect("purged");
    }
}

#[tokio::test]
async fn zfs_states_all_properties_and_hides_a_cache_from_everybody() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), Some(64 << 20)).await.expect("created");
    engine.fork(&key(), &key().fork(), &given()).await.expect("forked");
    for name in ["live/pbcce5b6205652dd7", "live/forkpbcce5b6205652dd7"] {
        for (property, value) in [
            ("compression", "zstd"),
            ("recordsize", "131072"),
            ("atime", "off"),
            ("xattr", "on"),
            ("acltype", "off"),
            ("setuid", "off"),
            ("exec", "off"),
            ("devices", "off"),
            ("canmount", "noauto"),
            ("refquota", "67108864"),
            ("snapdir", "hidden"),
            ("com.sun:auto-snapshot", "false"),
        ] {
            let found = root.get(property, name);
            let same = found == value || (property == "xattr" && found == "sa");
            assert!(same, "{property} of {name} is {found}");
        }
    }
    let mode = |path: &Path| std::fs::metadata(path).expect("there").mode() & 0o777;
    assert_eq!(mode(&root.path.join("live")), 0o700);
    assert_eq!(mode(&volume.path), 0o700);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("read");
    let line = mounts.lines().find(|line| line.contains("/live/pbcce5b6205652dd7 ")).expect("mounted");
    assert!(line.contains("nosuid,nodev,noexec"), "{line}");
}

#[tokio::test]
async fn zfs_mounts_a_cache_again_after_a_reboot_and_shows_none_that_is_not_mounted() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    write(&volume, "file", "kept");
    let dataset = format!("{}/live/{}", root.dataset, key());
    tool("zfs", &["unmount", &dataset]);
    assert!(!volume.path.exists(), "an instance would find no empty cache");
    assert_eq!(engine.list().await.expect("listed"), std::slice::from_ref(&volume), "listed, and not mounted for it");
    assert!(!volume.path.exists());
    drop(engine);
    tool("zfs", &["unmount", &root.dataset]);
    let engine = open(&root).await;
    assert_eq!(engine.get(&key()).await.expect("looked"), Some(volume.clone()));
    assert_eq!(read(&volume, "file").as_deref(), Some("kept"));

    // What an admin may have done to it.
    for change in ["mountpoint=legacy", "mountpoint=none", "mountpoint=/elsewhere-kiln", "canmount=off"] {
        tool("zfs", &["set", change, &dataset]);
        assert_eq!(engine.get(&key()).await.expect(change), Some(volume.clone()));
        assert_eq!(read(&volume, "file").as_deref(), Some("kept"), "{change}");
        assert_eq!(
            root.get("mountpoint", &format!("live/{}", key())),
            root.path.join("live").join(key().as_str()).display().to_string()
        );
    }
}

#[tokio::test]
async fn zfs_never_touches_a_snapshot_of_somebody_else() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    let dataset = format!("{}/live/{}", root.dataset, key());
    for name in ["daily", "kiln-000002", "kiln-seed-by-hand"] {
        tool("zfs", &["snapshot", &format!("{dataset}@{name}")]);
    }
    write(&volume, "file", "one");
    let first = engine.snapshot(&key()).await.expect("a snapshot");
    let next = engine.snapshot(&key()).await.expect("a snapshot beside the one of that name");
    assert_eq!((first.name.sequence(), next.name.sequence()), (1, 3));
    assert_eq!(names(&engine, &key()).await, ["kiln-000001", "kiln-000003"]);
    let stranger = "kiln-000002".parse().expect("a name");
    engine.destroy_snapshot(&key(), stranger).await.expect("there is none of ours");
    for error in [
        engine.judge(&key(), stranger, Verdict::Bad).await.err(),
        engine.clone_snapshot(&key(), stranger, &key().fork(), &given()).await.err(),
        engine.rollback(&key(), stranger).await.err(),
    ] {
        assert!(matches!(error, Some(VolumeError::Missing { .. })), "{error:?}");
    }
    drop(engine);
    let engine = open(&root).await;
    let strangers = || {
        let listed = tool("zfs", &["list", "-H", "-r", "-t", "snapshot", "-o", "name", &root.dataset]);
        let of_them =
            |name: &&str| ["@daily", "@kiln-000002", "@kiln-seed-by-hand"].iter().any(|end| name.ends_with(end));
        listed.lines().filter(of_them).count()
    };
    assert_eq!(strangers(), 3, "no sweep took them");

    engine.rollback(&key(), first.name).await.expect("rolled back");
    assert_eq!(strangers(), 3, "they go with what they are of");
    let trashed = engine.discard(&key()).await.expect("discarded");
    let error = engine.purge(&trashed).await.expect_err("theirs would go along").to_string();
    assert!(error.contains("zfs destroy"), "{error}");
    assert_eq!(strangers(), 3);
    for name in ["daily", "kiln-000002", "kiln-seed-by-hand"] {
        tool("zfs", &["destroy", &format!("{}/trash/{trashed}@{name}", root.dataset)]);
    }
    purge_all(&engine).await;
    assert!(root.contents().is_empty(), "{:?}", root.contents());
}

#[tokio::test]
async fn zfs_gives_no_sequence_twice_though_somebody_destroys_a_snapshot() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    engine.create(&key(), &given(), None).await.expect("created");
    let first = engine.snapshot(&key()).await.expect("a snapshot");
    tool("zfs", &["destroy", &format!("{}/live/{}@{}", root.dataset, key(), first.name)]);
    drop(engine);
    let engine = open(&root).await;
    assert!(engine.snapshot(&key()).await.expect("a snapshot").name > first.name);
}

#[tokio::test]
async fn zfs_frees_what_living_clones_were_made_from() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    let (a, b, c) = (key().clone_number(1), key().clone_number(2), key().clone_number(3));
    let mut clones = Vec::new();
    for (text, target) in [("one", &a), ("two", &b)] {
        write(&volume, "file", text);
        let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
        clones.push(engine.clone_snapshot(&key(), snapshot.name, target, &given()).await.expect("cloned"));
        // Of the same names as its parent's.
        engine.snapshot(target).await.expect("a snapshot");
    }
    write(&volume, "file", "three");
    engine.snapshot(&key()).await.expect("a snapshot");
    clones.push(engine.fork(&key(), &c, &given()).await.expect("forked"));
    // A clone of a clone.
    let d = key().clone_number(4);
    clones.push(engine.fork(&a, &d, &given()).await.expect("forked"));

    let trashed = engine.discard(&key()).await.expect("discarded");
    engine.purge(&trashed).await.expect("purged, though clones need it");
    assert!(root.contents().iter().all(|name| !name.contains(&trashed.to_string()) || name.contains("@kiln-kept-")));
    for (clone, text) in clones.iter().zip(["one", "two", "three", "one"]) {
        assert_eq!(read(clone, "file").as_deref(), Some(text));
        assert_eq!(engine.get(&clone.key).await.expect("looked").as_ref(), Some(clone));
    }
    for (key, history) in [(&a, vec!["kiln-000001"]), (&b, vec!["kiln-000001"]), (&c, vec![]), (&d, vec![])] {
        assert_eq!(names(&engine, key).await, history, "of {key}");
    }
    assert!(engine.snapshot(&c).await.expect("a snapshot").name.sequence() == 1);
    drop(engine);
    let engine = open(&root).await;
    for key in [&a, &c, &b, &d] {
        let trashed = engine.discard(key).await.expect("discarded");
        engine.purge(&trashed).await.expect("purged");
    }
    assert!(root.contents().is_empty(), "{:?}", root.contents());
}

#[tokio::test]
async fn zfs_tells_where_the_bytes_are_and_how_full_it_is() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), Some(64 << 20)).await.expect("created");
    let noise = noise(4 << 20);
    std::fs::write(volume.path.join("a"), &noise).expect("written");
    tool("zpool", &["sync", root.pool()]);
    let usage = engine.usage(&key()).await.expect("measured");
    assert!(usage.used > 1 << 20 && usage.shared == Some(0) && usage.snapshots == Some(0), "{usage:?}");
    assert_eq!(usage.size, Some(64 << 20));
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    std::fs::remove_file(volume.path.join("a")).expect("removed");
    std::fs::write(volume.path.join("b"), &noise).expect("written");
    assert_eq!(
        engine.written_since(&key(), snapshot.name).await.expect("looked"),
        Some(true),
        "before it is on the disk"
    );
    tool("zpool", &["sync", root.pool()]);
    let after = engine.usage(&key()).await.expect("measured");
    assert!(after.snapshots.is_some_and(|bytes| bytes > 1 << 20), "{after:?}");
    let fork = engine.fork(&key(), &key().fork(), &given()).await.expect("forked");
    let of_fork = engine.usage(&fork.key).await.expect("measured");
    assert!(of_fork.used < 1 << 20 && of_fork.shared.is_some_and(|bytes| bytes > 1 << 20), "{of_fork:?}");
    let [listed] = engine.snapshots(&key()).await.expect("listed")[..] else { panic!("one") };
    assert!(listed.bytes.is_some_and(|bytes| bytes > 1 << 20), "{listed:?}");
    let fullness = engine.fullness().await.expect("measured");
    assert!(fullness.bytes_used > 4 << 20 && fullness.bytes_used < fullness.bytes_total, "{fullness:?}");
}

/// The contract, then, is of that.
#[cfg(feature = "libzetta")]
#[tokio::test]
async fn zfs_is_spoken_to_through_libzfs_core() {
    let Some(root) = ZfsRoot::new() else { return };
    assert_eq!(open(&root).await.verbs.name(), "libzfs_core");
}

/// Not a test of anything that must be: what a fork costs beside the two bare commands.
#[tokio::test]
async fn zfs_forks_about_as_quickly_as_its_bare_commands() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    engine.create(&key(), &given(), None).await.expect("created");
    let dataset = format!("{}/live/{}", root.dataset, key());
    let bare = std::time::Instant::now();
    tool("zfs", &["snapshot", &format!("{dataset}@bare")]);
    let target = format!("{}/by-hand", root.dataset);
    tool("zfs", &["clone", "-o", "canmount=noauto", &format!("{dataset}@bare"), &target]);
    let bare = bare.elapsed();
    let ours = std::time::Instant::now();
    engine.fork(&key(), &key().fork(), &given()).await.expect("forked");
    let ours = ours.elapsed();
    let taken = std::time::Instant::now();
    engine.snapshot(&key()).await.expect("a snapshot");
    eprintln!("figure: snapshot and clone {bare:?}, a fork {ours:?}, a snapshot of the engine {:?}", taken.elapsed());
    drop(Command::new("zfs").args(["destroy", &target]).output());
}
