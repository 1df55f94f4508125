//! What is the business of btrfs alone.

use super::*;

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
    engine.clone_snapshot(&key(), snapshot.name, &key().fork(), &Properties::new()).await.expect("cloned");
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
    engine.fork(&key(), &key().clone_number(1), &Properties::new()).await.expect("forked");
    let size = engine.usage(&key().clone_number(1)).await.expect("measured").size;
    assert!(size.is_some_and(|size| size > 17 << 20), "a fork is not born full: {size:?}");
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
async fn a_fork_of_a_busy_btrfs_volume_is_one_instant() {
    use std::os::unix::fs::FileExt as _;
    use std::sync::atomic::AtomicBool;

    let Some(mount) = BtrfsMount::new() else { return };
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let daemon = occupy(&volume);
    let (stop, started) = (Arc::new(AtomicBool::new(false)), Arc::new(tokio::sync::Notify::new()));
    let (stopped, ready, path) = (stop.clone(), started.clone(), volume.path.clone());
    let writer = std::thread::spawn(move || {
        let files = [0, 1].map(|n: usize| std::fs::File::create(path.join(n.to_string())).expect("made"));
        for number in 1_u64.. {
            for file in &files {
                file.write_all_at(&number.to_le_bytes(), 0).and_then(|()| file.sync_all()).expect("written");
            }
            ready.notify_one();
            if stopped.load(Ordering::SeqCst) {
                return;
            }
        }
    });
    for index in 1..=5 {
        started.notified().await;
        let fork = engine.fork(&key(), &key().clone_number(index), &Properties::new()).await.expect("forked");
        let number = |name: &str| {
            let bytes = std::fs::read(fork.path.join(name)).expect("read");
            u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
        };
        let (first, second) = (number("0"), number("1"));
        assert!(first == second || first == second + 1, "{first} is on the disk before {second}");
    }
    stop.store(true, Ordering::SeqCst);
    writer.join().expect("it wrote");
    drop(daemon);
    assert!(engine.snapshots(&key()).await.expect("listed").is_empty());
}

#[tokio::test]
async fn btrfs_tells_whether_something_was_written() {
    let Some(mount) = BtrfsMount::new() else { return };
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let other = engine.create(&key().fork(), &Properties::new(), None).await.expect("created");
    std::fs::write(volume.path.join("file"), "x").expect("written");
    let written = async |snapshot: &Snapshot| engine.written_since(&key(), snapshot.name).await.expect("looked");
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    std::fs::write(other.path.join("file"), "x").expect("written");
    engine.judge(&key(), snapshot.name, Verdict::Good).await.expect("judged");
    engine.clone_snapshot(&key(), snapshot.name, &key().clone_number(1), &Properties::new()).await.expect("cloned");
    assert_eq!(written(&snapshot).await, Some(false), "others wrote");
    // Data, and what is no data.
    std::fs::write(volume.path.join("file"), "y").expect("written");
    assert_eq!(written(&snapshot).await, Some(true));
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    assert_eq!(written(&snapshot).await, Some(false));
    std::fs::rename(volume.path.join("file"), volume.path.join("renamed")).expect("renamed");
    assert_eq!(written(&snapshot).await, Some(true));
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    std::fs::remove_file(volume.path.join("renamed")).expect("removed");
    assert_eq!(written(&snapshot).await, Some(true));
}

#[tokio::test]
async fn btrfs_tells_where_the_bytes_are_where_quotas_are_on() {
    const MIB: u64 = 1 << 20;
    let Some(mount) = BtrfsMount::new() else { return };
    run("btrfs", &["quota".as_ref(), "enable".as_ref(), mount.path.as_os_str()]);
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let write = |name: &str, mib: u64| {
        let bytes: Vec<u8> = (0..mib * MIB).map(|n| ((n * 31) >> 3) as u8).collect();
        std::fs::write(volume.path.join(name), bytes).expect("written");
    };
    let mib = |bytes: Option<u64>| bytes.map(|bytes| (bytes + MIB / 2) / MIB);
    let measure = async || {
        let usage = engine.usage(&key()).await.expect("measured");
        assert_eq!(usage.inodes_available, None, "made as they are needed");
        (mib(Some(usage.used)), mib(usage.shared), mib(usage.snapshots))
    };
    write("kept", 8);
    assert_eq!(measure().await, (Some(8), Some(0), Some(0)));
    write("gone", 4);
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    write("own", 2);
    assert_eq!(measure().await, (Some(2), Some(12), Some(0)));
    std::fs::remove_file(volume.path.join("gone")).expect("removed");
    assert_eq!(measure().await, (Some(2), Some(8), Some(4)));
    engine.destroy_snapshot(&key(), snapshot.name).await.expect("destroyed");
    assert_eq!(measure().await.2, Some(0));
}

#[tokio::test]
async fn snapshots_of_btrfs_stay_read_only_when_they_are_carried() {
    let Some(mount) = BtrfsMount::new() else { return };
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    engine.create(&key(), &Properties::new(), None).await.expect("created");
    let first = engine.snapshot(&key()).await.expect("a snapshot");
    let second = engine.snapshot(&key()).await.expect("a snapshot");
    engine.rollback(&key(), second.name).await.expect("rolled back");
    for snapshot in [first, second] {
        let path = engine.snapshot_path(&key(), snapshot.name).await.expect("a path");
        let error = std::fs::write(path.join("file"), "x").expect_err("read-only");
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    }
}

#[tokio::test]
async fn what_btrfs_frees_behind_one_s_back_is_waited_for() {
    const MIB: u64 = 1 << 20;
    let Some(mount) = BtrfsMount::new() else { return };
    let engine = BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened");
    let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
    let used = async || engine.fullness().await.expect("measured").bytes_used / MIB;
    let before = used().await;
    let bytes: Vec<u8> = (0..24 * MIB).map(|n| ((n * 31) >> 3) as u8).collect();
    std::fs::write(volume.path.join("file"), bytes).expect("written");
    engine.freed().await.expect("there is nothing to wait for");
    assert!(used().await >= before + 24, "{before} MiB before");
    let trashed = engine.discard(&key()).await.expect("discarded");
    engine.purge(&trashed).await.expect("purged");
    engine.freed().await.expect("free");
    assert!(used().await < before + 12, "{} MiB, and {before} before", used().await);
}
