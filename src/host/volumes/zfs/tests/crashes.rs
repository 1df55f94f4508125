//! Kilnd killed between any two commands: whoever opens the root afterwards finds the old state or the new one, and can go on.

use super::*;

/// Runs `change` with only so many commands to go, for ever more, until it succeeds; after each crash the root is opened
/// anew and `whole` looks at it, which is told the key. Each time it is another key, prepared by `prepare`.
async fn at_every_command(
    root: &ZfsRoot,
    prepare: impl AsyncFn(&ZfsEngine, &Key),
    change: impl AsyncFn(&ZfsEngine, &Key) -> Result<(), VolumeError>,
    whole: impl AsyncFn(&ZfsEngine, &Key, bool),
) {
    let mut engine = open(root).await;
    for commands in 0..40 {
        let key: Key = format!("p{commands:016x}").parse().expect("a key");
        prepare(&engine, &key).await;
        engine.zfs.stop_after(commands);
        let done = change(&engine, &key).await.is_ok();
        // What goes on in the background after an answer is cut with it, or not.
        drop(engine);
        engine = open(root).await;
        whole(&engine, &key, done).await;
        for volume in engine.list().await.expect("listed") {
            engine.discard(&volume.key).await.expect("discarded");
        }
        purge_all(&engine).await;
        if done {
            drop(engine);
            drop(open(root).await);
            assert!(root.contents().is_empty(), "{:?}", root.contents());
            eprintln!("it takes {commands} commands");
            assert!(commands > 1);
            return;
        }
    }
    panic!("it never succeeds");
}

async fn with_history(engine: &ZfsEngine, key: &Key) {
    let volume = engine.create(key, &given(), Some(64 << 20)).await.expect("created");
    for text in ["one", "two", "three"] {
        write(&volume, "file", text);
        engine.snapshot(key).await.expect("a snapshot");
    }
    write(&volume, "file", "four");
}

#[tokio::test]
async fn zfs_rollback_is_done_or_not_done_wherever_it_is_cut() {
    let Some(root) = ZfsRoot::new() else { return };
    let second = "kiln-000002".parse().expect("a name");
    let change = async |engine: &ZfsEngine, key: &Key| engine.rollback(key, second).await.map(drop);
    let whole = async |engine: &ZfsEngine, key: &Key, done: bool| {
        let volume = engine.get(key).await.expect("looked").expect("it is there, old or new");
        let text = read(&volume, "file").expect("with its contents");
        let (history, trash) = (names(engine, key).await, engine.trash().await.expect("trash").len());
        match text.as_str() {
            "four" => assert!(!done && history.len() == 3 && trash == 0, "{history:?} {trash}"),
            "two" => assert_eq!((history.len(), trash), (2, 1)),
            other => panic!("it holds {other:?}"),
        }
        assert_eq!(engine.usage(key).await.expect("measured").size, Some(64 << 20));
        assert_eq!(engine.list().await.expect("listed"), std::slice::from_ref(&volume));
        if text == "four" {
            engine.rollback(key, second).await.expect("rolled back after all");
            assert_eq!(read(&volume, "file").as_deref(), Some("two"));
        }
        assert_eq!(engine.snapshot(key).await.expect("a snapshot").name.sequence(), 4);
    };
    at_every_command(&root, with_history, change, whole).await;
}

#[tokio::test]
async fn zfs_rollback_that_was_cut_is_taken_up_when_its_key_is_asked_for() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = open(&root).await;
    let second = "kiln-000002".parse().expect("a name");
    for commands in 3..8 {
        let key: Key = format!("p{commands:016x}").parse().expect("a key");
        with_history(&engine, &key).await;
        engine.zfs.stop_after(commands);
        let rolled = engine.rollback(&key, second).await;
        engine.zfs.stop_after(usize::MAX);
        let volume = engine.get(&key).await.expect("looked").expect("there");
        let text = read(&volume, "file").expect("with its contents");
        assert!(if rolled.is_ok() { text == "two" } else { text == "two" || text == "four" }, "{text}");
        engine.discard(&key).await.expect("discarded");
        purge_all(&engine).await;
    }
    assert!(root.contents().is_empty(), "{:?}", root.contents());
}

#[tokio::test]
async fn zfs_fork_and_clone_are_whole_wherever_they_are_cut() {
    let Some(root) = ZfsRoot::new() else { return };
    let change = async |engine: &ZfsEngine, key: &Key| engine.fork(key, &key.fork(), &given()).await.map(drop);
    let whole = async |engine: &ZfsEngine, key: &Key, _done: bool| {
        if let Some(fork) = engine.get(&key.fork()).await.expect("looked") {
            assert_eq!(read(&fork, "file").as_deref(), Some("four"));
        }
        let fork = engine.fork(key, &key.fork(), &given()).await.expect("forked after all");
        assert_eq!(read(&fork, "file").as_deref(), Some("four"));
        assert_eq!(names(engine, key).await.len(), 3, "without a trace");
        let seeds = root.contents().into_iter().filter(|name| name.contains("@kiln-seed-")).count();
        assert!(seeds <= 2, "the one that the fork needs, and at most one of the attempt before: {seeds}");
    };
    at_every_command(&root, with_history, change, whole).await;
}

#[tokio::test]
async fn zfs_discard_and_restore_are_whole_wherever_they_are_cut() {
    let Some(root) = ZfsRoot::new() else { return };
    let change = async |engine: &ZfsEngine, key: &Key| {
        let trashed = engine.discard(key).await?;
        engine.restore(&trashed).await.map(drop)
    };
    let whole = async |engine: &ZfsEngine, key: &Key, _done: bool| {
        let volume = if let Some(volume) = engine.get(key).await.expect("looked") {
            volume
        } else {
            let [trashed] = &engine.trash().await.expect("trash")[..] else { panic!("it is nowhere") };
            engine.restore(&trashed.name).await.expect("restored")
        };
        assert_eq!(read(&volume, "file").as_deref(), Some("four"));
        assert_eq!(names(engine, key).await.len(), 3);
    };
    at_every_command(&root, with_history, change, whole).await;
}

#[tokio::test]
async fn zfs_purge_with_clones_is_taken_up_wherever_it_was_cut() {
    let Some(root) = ZfsRoot::new() else { return };
    let prepare = async |engine: &ZfsEngine, key: &Key| {
        with_history(engine, key).await;
        let second = "kiln-000002".parse().expect("a name");
        engine.clone_snapshot(key, second, &key.clone_number(1), &given()).await.expect("cloned");
        engine.snapshot(&key.clone_number(1)).await.expect("of a name that its parent has, too");
        engine.fork(key, &key.fork(), &given()).await.expect("forked");
        engine.discard(key).await.expect("discarded");
    };
    let change = async |engine: &ZfsEngine, _key: &Key| {
        let trashed = engine.trash().await?.remove(0);
        engine.purge(&trashed.name).await
    };
    let whole = async |engine: &ZfsEngine, key: &Key, _done: bool| {
        purge_all(engine).await;
        for (key, text) in [(key.clone_number(1), "two"), (key.fork(), "four")] {
            let volume = engine.get(&key).await.expect("looked").expect("there");
            assert_eq!(read(&volume, "file").as_deref(), Some(text));
        }
        assert_eq!(names(engine, &key.clone_number(1)).await, ["kiln-000001"]);
        assert!(names(engine, &key.fork()).await.is_empty());
        assert!(engine.trash().await.expect("trash").is_empty());
    };
    at_every_command(&root, prepare, change, whole).await;
}

#[tokio::test]
async fn zfs_create_and_snapshot_are_whole_wherever_they_are_cut() {
    let Some(root) = ZfsRoot::new() else { return };
    let change = async |engine: &ZfsEngine, key: &Key| {
        engine.create(key, &given(), Some(64 << 20)).await?;
        engine.snapshot(key).await.map(drop)
    };
    let whole = async |engine: &ZfsEngine, key: &Key, _done: bool| {
        let volume = engine.create(key, &given(), Some(64 << 20)).await.expect("created after all");
        write(&volume, "file", "x");
        let before = engine.snapshots(key).await.expect("listed");
        let next = engine.snapshot(key).await.expect("a snapshot");
        assert!(before.iter().all(|snapshot| snapshot.name < next.name), "{before:?} {next:?}");
    };
    at_every_command(&root, async |_, _| {}, change, whole).await;
}
