//! What is in the way, and what is said of it.

use super::*;

fn said(error: Option<VolumeError>) -> String {
    error.map(|error| error.to_string()).unwrap_or_default()
}

#[tokio::test]
async fn zfs_takes_nobody_s_dataset_for_a_volume() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let dataset = format!("{}/live/{}", root.dataset, key());
    // An identity that is inherited is nobody's.
    let inherited = format!("kiln:key={}", key());
    tool("zfs", &["set", &inherited, &root.dataset]);
    for args in [
        vec!["create", "-o", "canmount=noauto", &dataset],
        vec!["create", "-V", "1M", &dataset],
        vec!["create", "-o", "canmount=noauto", "-o", "kiln:key=p0000000000000000", &dataset],
        vec!["create", "-o", "canmount=noauto", "-o", &inherited, "-o", "kiln:properties={\n\"key", &dataset],
    ] {
        tool("zfs", &args);
        for error in [
            engine.get(&key()).await.err(),
            engine.create(&key(), &given(), None).await.err(),
            engine.discard(&key()).await.err(),
            engine.snapshot(&key()).await.err(),
        ] {
            let text = format!("{error:?}");
            // Of a value with a line end in it nothing is known, not even that much.
            assert!(
                matches!(error, Some(VolumeError::Foreign { .. } | VolumeError::Command { .. })),
                "{args:?}: {text}"
            );
        }
        assert!(engine.list().await.expect("listed").is_empty());
        let found = engine.found().await.expect("found");
        assert_eq!(
            found.iter().map(|f| (f.name.as_str(), &f.key)).collect::<Vec<_>>(),
            [(format!("live/{}", key()).as_str(), &None)]
        );
        tool("zfs", &["destroy", &dataset]);
    }
    let by_hand = format!("{}/trash/{}.000001", root.dataset, key());
    tool("zfs", &["create", "-o", "canmount=off", &by_hand]);
    assert!(engine.trash().await.expect("trash").is_empty());
    let name = format!("{}.000001", key()).parse().expect("a name");
    assert!(matches!(engine.purge(&name).await, Err(VolumeError::Foreign { .. })));
    assert!(matches!(engine.restore(&name).await, Err(VolumeError::Missing { .. })));
    assert_eq!(engine.found().await.expect("found").len(), 1);
}

#[tokio::test]
async fn zfs_names_who_is_in_a_cache() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    let daemon = occupy(&volume);
    engine.snapshot(&key()).await.expect("a snapshot of a volume in use");
    engine.fork(&key(), &key().fork(), &given()).await.expect("a fork of a volume in use");
    for error in [engine.discard(&key()).await.err(), engine.rollback(&key(), snapshot.name).await.err()] {
        assert!(said(error).contains("buildkitd"));
    }
    drop(daemon);
    let mut sleeper = Command::new("sleep").arg("600").current_dir(&volume.path).spawn().expect("started");
    for error in [engine.discard(&key()).await.err(), engine.rollback(&key(), snapshot.name).await.err()] {
        assert!(matches!(error, Some(VolumeError::Busy { .. })), "{error:?}");
        let text = said(error);
        assert!(text.contains(&format!("process {} (sleep)", sleeper.id())), "{text}");
    }
    assert_eq!(engine.get(&key()).await.expect("looked"), Some(volume.clone()), "nothing changed");
    assert!(engine.trash().await.expect("trash").is_empty());
    sleeper.kill().and_then(|()| sleeper.wait()).expect("ended");

    assert_eq!(engine.list().await.expect("listed").len(), 2, "with the fork");
}

/// A process in a mount namespace of its own, as of a container that somebody forgot.
fn elsewhere(script: &str) -> std::process::Child {
    let mut other = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", script])
        .spawn()
        .expect("started");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // Until then what is unmounted here is unmounted there, too.
    let comm = format!("/proc/{}/comm", other.id());
    while std::fs::read_to_string(&comm).expect("it runs").trim() != "sleep" {
        assert!(other.try_wait().expect("asked").is_none(), "it ended");
        assert!(std::time::Instant::now() < deadline, "it has no namespace of its own");
        std::thread::yield_now();
    }
    other
}

#[tokio::test]
async fn zfs_frees_what_another_mount_namespace_has_unless_somebody_works_in_it() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    engine.create(&key(), &given(), None).await.expect("created");
    let mut other = elsewhere("exec sleep 600");
    let trashed = engine.discard(&key()).await.expect("ours is unmounted");
    engine.purge(&trashed).await.expect("theirs went with the directory that it was mounted on");
    other.kill().and_then(|()| other.wait()).expect("ended");

    let volume = engine.create(&key(), &given(), None).await.expect("created");
    let mut other = elsewhere(&format!("cd {} && exec sleep 600", volume.path.display()));
    let trashed = engine.discard(&key()).await.expect("ours is unmounted");
    let error = engine.purge(&trashed).await.expect_err("it is used");
    assert!(matches!(error, VolumeError::Busy { .. }), "{error}");
    assert_eq!(engine.trash().await.expect("trash").len(), 1, "it is still to be seen");
    assert!(engine.restore(&trashed).await.is_ok_and(|restored| restored == volume), "and can be brought back");
    let trashed = engine.discard(&key()).await.expect("discarded");
    other.kill().and_then(|()| other.wait()).expect("ended");
    engine.purge(&trashed).await.expect("purged");
    assert!(root.contents().is_empty(), "{:?}", root.contents());
}

#[tokio::test]
async fn zfs_respects_holds_and_what_others_made_of_a_cache() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    engine.create(&key(), &given(), None).await.expect("created");
    let (first, second) =
        (engine.snapshot(&key()).await.expect("a snapshot"), engine.snapshot(&key()).await.expect("a snapshot"));
    let full = |name: &str| format!("{}/live/{}@{name}", root.dataset, key());
    tool("zfs", &["hold", "mine", &full("kiln-000001")]);
    engine.destroy_snapshot(&key(), first.name).await.expect("it goes when it is released");
    assert_eq!(names(&engine, &key()).await, [second.name.to_string()]);
    let trashed = engine.discard(&key()).await.expect("discarded");
    let text = said(engine.purge(&trashed).await.err());
    assert!(text.contains("a hold") && text.contains("mine"), "{text}");
    let in_trash = format!("{}/trash/{trashed}", root.dataset);
    tool("zfs", &["release", "mine", &format!("{in_trash}@kiln-000001")]);
    assert!(root.contents().iter().all(|name| !name.contains("@kiln-000001")), "gone when it was released");

    let by_hand = format!("{}/by-hand", root.dataset);
    tool("zfs", &["clone", "-o", "canmount=off", &format!("{in_trash}@kiln-000002"), &by_hand]);
    let text = said(engine.purge(&trashed).await.err());
    assert!(text.contains(&format!("the clone {by_hand}")), "{text}");
    tool("zfs", &["destroy", &by_hand]);
    let child = format!("{in_trash}/child");
    tool("zfs", &["create", "-o", "canmount=off", &child]);
    let text = said(engine.purge(&trashed).await.err());
    assert!(text.contains(&format!("the dataset {child}")), "{text}");
    tool("zfs", &["destroy", &child]);
    assert_eq!(engine.trash().await.expect("trash").len(), 1, "it stayed in the trash");
    engine.purge(&trashed).await.expect("purged");
}

#[tokio::test]
async fn zfs_gives_a_volume_its_size_and_never_less_than_it_holds() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), Some(8 << 20)).await.expect("created");
    let noise = noise(16 << 20);
    let written = std::fs::write(volume.path.join("big"), &noise);
    let synced = std::fs::File::open(volume.path.join("big")).and_then(|file| file.sync_all());
    assert!(written.is_err() || synced.is_err(), "more was written than the volume may hold");
    engine.resize(&key(), Some(64 << 20)).await.expect("grown");
    std::fs::write(volume.path.join("big"), &noise).expect("there is room now");
    tool("zpool", &["sync", root.pool()]);
    engine.resize(&key(), Some(1 << 20)).await.expect("as far as it goes");
    let usage = engine.usage(&key()).await.expect("measured");
    assert!(usage.size.is_some_and(|size| size > 16 << 20) && usage.available > 1 << 20, "not full: {usage:?}");
    let fork = engine.fork(&key(), &key().fork(), &given()).await.expect("forked");
    assert_eq!(engine.usage(&fork.key).await.expect("measured").size, usage.size, "what its parent has grown to");
    engine.resize(&key(), None).await.expect("without a limit");
    assert_eq!(engine.usage(&key()).await.expect("measured").size, None);
}

#[tokio::test]
async fn zfs_goes_back_to_what_is_larger_than_the_volume_may_be_by_now() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), Some(64 << 20)).await.expect("created");
    std::fs::write(volume.path.join("big"), noise(16 << 20)).expect("written");
    let snapshot = engine.snapshot(&key()).await.expect("a snapshot");
    std::fs::remove_file(volume.path.join("big")).expect("removed");
    tool("zpool", &["sync", root.pool()]);
    engine.resize(&key(), Some(8 << 20)).await.expect("smaller");
    assert_eq!(engine.usage(&key()).await.expect("measured").size, Some(8 << 20));
    engine.clone_snapshot(&key(), snapshot.name, &key().trial(), &given()).await.expect("cloned");
    engine.rollback(&key(), snapshot.name).await.expect("rolled back");
    for key in [key(), key().trial()] {
        let usage = engine.usage(&key).await.expect("measured");
        assert!(usage.size.is_some_and(|size| size > 16 << 20) && usage.available > 1 << 20, "not full: {usage:?}");
    }
}

#[tokio::test]
async fn zfs_refuses_a_root_that_does_not_do() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    assert!(said(try_open(&root).await.err()).contains("another kilnd uses it"));
    drop(engine);
    let at = async |dataset: &str, path: &Path| {
        said(ZfsEngine::at(dataset, path, &search_path(), Arc::new(SystemClock)).await.err())
    };
    let text = at(&root.dataset, Path::new("/elsewhere")).await;
    assert!(text.contains("zfs set mountpoint=/elsewhere"), "{text}");
    let text = at(&format!("{}/nothing", root.dataset), &root.path).await;
    assert!(text.contains("zfs create -p -o mountpoint="), "{text}");
    let text = at("no-such-pool/x", &root.path).await;
    assert!(text.contains("zpool import no-such-pool"), "{text}");
    let text = at("-r", &root.path).await;
    assert!(text.contains("not the name of a dataset"), "{text}");
    tool("zfs", &["set", "canmount=off", &root.dataset]);
    assert!(said(try_open(&root).await.err()).contains("zfs set canmount=on"));
    tool("zfs", &["set", "canmount=on", &root.dataset]);
    tool("zfs", &["set", "readonly=on", &root.dataset]);
    assert!(said(try_open(&root).await.err()).contains("zfs set readonly=off"));
    tool("zfs", &["set", "readonly=off", &root.dataset]);
    open(&root).await;

    // Rooms that are somebody else's, though they seem to have our mark.
    let other = ZfsRoot::new().expect("as before");
    tool("zfs", &["set", "kiln:room=live", &other.dataset]);
    tool("zfs", &["create", "-o", "canmount=off", &format!("{}/live", other.dataset)]);
    let text = said(try_open(&other).await.err());
    assert!(text.contains("\"live\", which is not Kiln's"), "{text}");
}

#[tokio::test]
async fn zfs_mounts_nothing_over_files_that_somebody_left() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let volume = engine.create(&key(), &given(), None).await.expect("created");
    tool("zfs", &["unmount", &format!("{}/live/{}", root.dataset, key())]);
    std::fs::create_dir_all(&volume.path).expect("made");
    let text = said(engine.get(&key()).await.err());
    assert!(text.contains("move them away"), "{text}");
    std::fs::remove_dir(&volume.path).expect("removed");
    assert_eq!(engine.get(&key()).await.expect("looked"), Some(volume));
}
