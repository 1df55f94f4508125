//! Pools of their own, in the states that pools get into.

use super::*;

#[tokio::test]
async fn zfs_works_on_a_degraded_pool() {
    let Some(root) = ZfsRoot::on_a_pool(2, &[]) else { return };
    let second = tool("zpool", &["list", "-HPv", "-o", "name", root.pool()]);
    let second = second
        .lines()
        .rev()
        .find_map(|line| line.trim().split('\t').next().filter(|n| n.starts_with('/')))
        .expect("a file");
    tool("zpool", &["offline", root.pool(), second]);
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    write(&volume, "file", "x");
    engine.snapshot(&key()).await.expect("a snapshot");
    engine.fork(&key(), &key().fork(), &given()).await.expect("forked");
}

#[tokio::test]
async fn zfs_says_so_when_a_pool_is_full_and_can_still_free_what_is_thrown_away() {
    let Some(root) = ZfsRoot::on_a_pool(1, &[]) else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    tool("zfs", &["set", "compression=off", &format!("{}/live/{}", root.dataset, key())]);
    let filled = std::fs::write(volume.path.join("big"), vec![7; 300 << 20]);
    assert!(filled.is_err(), "the pool holds less");
    tool("zpool", &["sync", root.pool()]);
    for error in [
        engine.create(&key().trial(), &given(), None).await.err(),
        engine.snapshot(&key()).await.err(),
        engine.fork(&key(), &key().fork(), &given()).await.err(),
    ] {
        assert!(matches!(error, Some(VolumeError::Full { .. })), "{error:?}");
    }
    let fullness = engine.fullness().await.expect("measured");
    assert!(fullness.bytes_used * 100 / fullness.bytes_total >= 99, "{fullness:?}");
    assert_eq!(engine.usage(&key()).await.expect("measured").available, 0);
    drop(engine);
    let engine = open(&root).await;
    let trashed = engine.discard(&key()).await.expect("discarded");
    engine.purge(&trashed).await.expect("purged");
    tool("zpool", &["sync", root.pool()]);
    engine.create(&key(), &given(), None).await.expect("there is room again");
}

#[tokio::test]
async fn zfs_names_the_key_that_is_not_loaded() {
    let Some(outer) = ZfsRoot::on_a_pool(1, &[]) else { return };
    let secret = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(secret.path(), "correct horse").expect("written");
    let location = format!("keylocation=file://{}", secret.path().display());
    let root = ZfsRoot::below(outer.pool(), &["-o", "encryption=on", "-o", "keyformat=passphrase", "-o", &location]);
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    write(&volume, "file", "secret");
    engine.fork(&key(), &key().fork(), &given()).await.expect("forked");
    drop(engine);
    for name in [format!("live/{}", key()), format!("live/{}", key().fork()), String::new()] {
        tool("zfs", &["unmount", format!("{}/{name}", root.dataset).trim_end_matches('/')]);
    }
    tool("zfs", &["unload-key", &root.dataset]);
    let text = try_open(&root).await.err().expect("no key").to_string();
    assert!(text.contains(&format!("zfs load-key {}", root.dataset)), "{text}");
    tool("zfs", &["load-key", &root.dataset]);
    let engine = open(&root).await;
    let found = engine.get(&key()).await.expect("looked").expect("there");
    assert_eq!(read(&found, "file").as_deref(), Some("secret"));
}

#[tokio::test]
async fn zfs_refuses_a_pool_that_is_imported_read_only() {
    let Some(root) = ZfsRoot::on_a_pool(1, &[]) else { return };
    let file = tool("zpool", &["list", "-HPv", "-o", "name", root.pool()]);
    let file =
        file.lines().find_map(|line| line.trim().split('\t').next().filter(|n| n.starts_with('/'))).expect("a file");
    let directory = Path::new(file).parent().expect("in a directory").display().to_string();
    tool("zpool", &["export", root.pool()]);
    tool("zpool", &["import", "-o", "readonly=on", "-d", &directory, root.pool()]);
    let error = try_open(&root).await.err().expect("refused");
    assert!(matches!(error, VolumeError::Unusable { .. }), "{error}");
    assert!(error.to_string().contains("read-only"), "{error}");
}

#[tokio::test]
async fn zfs_does_not_wait_for_a_pool_that_is_suspended() {
    // On a file system that is too small for it, so that its writes fail.
    let Some(small) = super::super::super::mounts::Mount::new(&["-t", "tmpfs", "-o", "size=96m", "none"]) else {
        return;
    };
    if std::env::var("KILN_TEST_ZFS").is_err() {
        return;
    }
    let (file, pool) = (small.path.join("disk"), format!("ktsusp{}", std::process::id()));
    std::fs::File::create(&file).and_then(|file| file.set_len(512 << 20)).expect("a sparse file");
    tool("zpool", &["create", "-O", "mountpoint=none", "-O", "compression=off", &pool, &file.display().to_string()]);
    let root = ZfsRoot::below(&pool, &[]);
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    tool("zfs", &["set", "compression=off", &format!("{}/live/{}", root.dataset, key())]);
    let big = volume.path.join("big");
    // Whoever writes there waits until the pool goes on.
    let writer = std::thread::spawn(move || std::fs::write(big, vec![7; 200 << 20]));
    let state = format!("/proc/spl/kstat/zfs/{pool}/state");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while std::fs::read_to_string(&state).expect("imported").trim() != "SUSPENDED" {
        assert!(std::time::Instant::now() < deadline, "it is never suspended");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    let asked = std::time::Instant::now();
    for error in [
        engine.create(&key().fork(), &given(), None).await.err(),
        engine.get(&key().fork()).await.err(),
        engine.fullness().await.err(),
        try_open(&root).await.err(),
    ] {
        let text = format!("{error:?}");
        assert!(matches!(error, Some(VolumeError::Unusable { .. })) && text.contains("zpool clear"), "{text}");
    }
    assert!(asked.elapsed() < std::time::Duration::from_secs(20), "{:?}", asked.elapsed());
    tool("mount", &["-o", "remount,size=700m", &small.path.display().to_string()]);
    tool("zpool", &["clear", &pool]);
    drop(writer.join());
    engine.snapshot(&key()).await.expect("it goes on");
    drop(engine);
    drop(root);
    tool("zpool", &["destroy", "-f", &pool]);
}
