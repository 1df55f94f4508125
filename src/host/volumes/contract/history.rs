//! What every engine must do with the past of a volume: verdicts, forks, going back.

use super::*;

fn project() -> Key {
    "p9f75a8e0cb6e0600".parse().expect("a key")
}

pub(super) async fn keeps_the_contract(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    times_and_verdicts(engine, contents).await;
    forks(engine, contents).await;
    rollback(engine, contents).await;
}

async fn snapshots_of(engine: &dyn VolumeEngine) -> Vec<Snapshot> {
    history_of(engine, &project()).await
}

/// Everything that a refused change must leave as it is.
async fn state(engine: &dyn VolumeEngine) -> (Vec<Volume>, Vec<Snapshot>, Vec<Trashed>) {
    let volumes = engine.list().await.expect("listed");
    (volumes, snapshots_of(engine).await, engine.trash().await.expect("trash"))
}

async fn times_and_verdicts(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let key = project();
    let volume = engine.create(&key, &properties(&[("repo", "r")]), Some(64 << 20)).await.expect("created");
    contents.write(&volume, "file", "one");
    let first = engine.snapshot(&key).await.expect("a snapshot");
    let written = engine.written_since(&key, first.name).await.expect("looked");
    assert_ne!(written, Some(true), "taking a snapshot writes nothing");
    contents.write(&volume, "file", "two");
    let written = engine.written_since(&key, first.name).await.expect("looked");
    assert_ne!(written, Some(false), "what was written is seen at once");
    let second = engine.snapshot(&key).await.expect("a snapshot");
    assert!(first.taken >= BEGIN && first.taken < second.taken, "{first:?} {second:?}");
    assert_eq!((first.verdict, second.verdict), (Verdict::Unchecked, Verdict::Unchecked));
    assert_eq!(snapshots_of(engine).await, [first, second]);

    for (snapshot, expected) in [(first, "one"), (second, "two")] {
        let path = engine.snapshot_path(&key, snapshot.name).await.expect("a path");
        assert_eq!(contents.read_snapshot(&path, "file").as_deref(), Some(expected));
    }
    engine.judge(&key, second.name, Verdict::Good).await.expect("judged");
    engine.judge(&key, first.name, Verdict::Good).await.expect("judged");
    engine.judge(&key, first.name, Verdict::Bad).await.expect("judged again");
    engine.judge(&key, first.name, Verdict::Bad).await.expect("judged so already");
    let judged = [Snapshot { verdict: Verdict::Bad, ..first }, Snapshot { verdict: Verdict::Good, ..second }];
    assert_eq!(snapshots_of(engine).await, judged);
    engine.set_properties(&key, &properties(&[("new", "1")])).await.expect("set");
    let trashed = engine.discard(&key).await.expect("discarded");
    engine.restore(&trashed).await.expect("restored");
    assert_eq!(snapshots_of(engine).await, judged, "a verdict goes with its snapshot");

    let third = engine.snapshot(&key).await.expect("a snapshot");
    engine.destroy_snapshot(&key, second.name).await.expect("destroyed");
    assert_eq!(snapshots_of(engine).await, [judged[0], third]);
    for error in [
        engine.judge(&key, second.name, Verdict::Good).await.err(),
        engine.snapshot_path(&key, second.name).await.err(),
        engine.written_since(&key, second.name).await.err(),
        engine.judge(&key.fork(), first.name, Verdict::Good).await.err(),
        engine.snapshot_path(&key.fork(), first.name).await.err(),
        engine.written_since(&key.fork(), first.name).await.err(),
    ] {
        assert!(matches!(error, Some(VolumeError::Missing { .. })), "{error:?}");
    }
    engine.destroy_snapshot(&key.fork(), first.name).await.expect("where there is no volume there is none");
    for snapshot in [first, third] {
        engine.destroy_snapshot(&key, snapshot.name).await.expect("destroyed");
    }
}

async fn forks(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let (key, fork, given) = (project(), project().pull_request("1"), properties(&[("repo", "a fork")]));
    let volume = engine.get(&key).await.expect("looked").expect("there");
    contents.write(&volume, "file", "before");
    let snapshot = engine.snapshot(&key).await.expect("a snapshot");
    contents.write(&volume, "file", "now");
    let forked = engine.fork(&key, &fork, &given).await.expect("forked");
    assert_eq!(forked.properties, properties(&[("repo", "a fork"), ("key", fork.as_str())]), "nothing is inherited");
    assert_eq!(contents.read(&forked, "file").as_deref(), Some("now"));
    assert_eq!(snapshots_of(engine).await, [snapshot], "a fork leaves no trace in the history");
    assert!(engine.snapshots(&fork).await.expect("listed").is_empty());
    let sizes = (engine.usage(&key).await.expect("measured").size, engine.usage(&fork).await.expect("measured").size);
    assert_eq!(sizes.0, sizes.1, "a fork is as large as its parent may be");
    contents.write(&forked, "file", "the fork's");
    contents.write(&volume, "file", "later");
    let again = engine.fork(&key, &fork, &given).await.expect("the same fork again");
    assert_eq!((&again, contents.read(&again, "file").as_deref()), (&forked, Some("the fork's")));
    assert_eq!(contents.read(&volume, "file").as_deref(), Some("later"));

    let (cloned, other) = (key.clone_number(1), key.clone_number(2));
    engine.clone_snapshot(&key, snapshot.name, &cloned, &given).await.expect("cloned");
    engine.create(&other, &given, None).await.expect("created");
    for taken in [
        engine.fork(&key, &cloned, &given).await,
        engine.fork(&key, &other, &given).await,
        engine.fork(&other, &fork, &given).await,
        engine.fork(&key, &key, &given).await,
        engine.clone_snapshot(&key, snapshot.name, &fork, &given).await,
    ] {
        assert!(matches!(taken, Err(VolumeError::Exists { .. })), "{taken:?}");
    }
    let orphan = engine.fork(&key.trial(), &key.clone_number(3), &given).await;
    assert!(matches!(orphan, Err(VolumeError::Missing { .. })), "{orphan:?}");
    assert_eq!(engine.get(&key.clone_number(3)).await.expect("looked"), None, "a failed fork leaves nothing");

    engine.destroy_snapshot(&key, snapshot.name).await.expect("one that was cloned can go");
    for volume in [fork, cloned, other] {
        let trashed = engine.discard(&volume).await.expect("discarded");
        engine.purge(&trashed).await.expect("purged");
    }
}

async fn rollback(engine: &dyn VolumeEngine, contents: &dyn Contents) {
    let key = project();
    let before = engine.get(&key).await.expect("looked").expect("there");
    let size = engine.usage(&key).await.expect("measured").size;
    let mut taken = Vec::new();
    for (text, verdict) in [("one", Verdict::Good), ("two", Verdict::Unchecked), ("three", Verdict::Bad)] {
        contents.write(&before, "file", text);
        let snapshot = engine.snapshot(&key).await.expect("a snapshot");
        engine.judge(&key, snapshot.name, verdict).await.expect("judged");
        taken.push(Snapshot { verdict, ..snapshot });
    }
    let [first, second, third] = taken[..] else { panic!("three") };
    contents.write(&before, "file", "four");
    refused(engine, contents, &before, second.name).await;

    let trashed = engine.rollback(&key, second.name).await.expect("rolled back");
    assert_eq!(trashed.key(), &key);
    assert_eq!(engine.get(&key).await.expect("looked").as_ref(), Some(&before), "properties and path stay");
    assert_eq!(contents.read(&before, "file").as_deref(), Some("two"));
    assert_eq!(snapshots_of(engine).await, [first, second], "history goes on from there");
    assert_eq!(engine.usage(&key).await.expect("measured").size, size);
    let described = engine.trash().await.expect("trash");
    let [described] = &described[..] else { panic!("one entry: {described:?}") };
    assert_eq!((&described.name, &described.properties), (&trashed, &before.properties));
    assert!(described.since > third.taken, "{described:?}");
    let path = engine.snapshot_path(&key, first.name).await.expect("a path");
    assert_eq!(contents.read_snapshot(&path, "file").as_deref(), Some("one"));

    contents.write(&before, "file", "five");
    let fourth = engine.snapshot(&key).await.expect("a snapshot");
    assert!(fourth.name > third.name, "a sequence is not used twice: {fourth:?} after {third:?}");
    let again = engine.rollback(&key, first.name).await.expect("rolled back again");
    assert!(again > trashed);
    assert_eq!(contents.read(&before, "file").as_deref(), Some("one"));
    assert_eq!(snapshots_of(engine).await, [first]);
    let fifth = engine.snapshot(&key).await.expect("a snapshot");
    assert!(fifth.name > fourth.name, "a sequence is not used twice: {fifth:?} after {fourth:?}");

    let present = engine.discard(&key).await.expect("discarded");
    assert_eq!(engine.restore(&trashed).await.expect("restored"), before);
    assert_eq!(contents.read(&before, "file").as_deref(), Some("four"));
    assert_eq!(snapshots_of(engine).await, [third], "what was younger came along");
    let undone = engine.rollback(&key, third.name).await.expect("rolled back");
    assert_eq!(contents.read(&before, "file").as_deref(), Some("three"));
    for name in [undone, present, again] {
        engine.purge(&name).await.expect("purged");
    }
}

/// Refusals change nothing.
async fn refused(engine: &dyn VolumeEngine, contents: &dyn Contents, volume: &Volume, snapshot: SnapshotName) {
    let (key, before) = (&volume.key, state(engine).await);
    let missing = engine.rollback(key, SnapshotName::new(999_999)).await;
    assert!(matches!(missing, Err(VolumeError::Missing { .. })), "{missing:?}");
    let daemon = contents.occupy(volume);
    let busy = engine.rollback(key, snapshot).await;
    assert!(matches!(busy, Err(VolumeError::Busy { .. })), "{busy:?}");
    contents.vacate(volume, daemon);
    assert_eq!(state(engine).await, before);
    assert_eq!(contents.read(volume, "file").as_deref(), Some("four"));
}

/// Who opens the same volumes again knows the same.
async fn survives_a_restart<E: VolumeEngine>(open: impl AsyncFn() -> E) {
    let (engine, key) = (open().await, project());
    engine.create(&key, &Properties::new(), None).await.expect("created");
    let first = engine.snapshot(&key).await.expect("a snapshot");
    engine.judge(&key, first.name, Verdict::Good).await.expect("judged");
    let second = engine.snapshot(&key).await.expect("a snapshot");
    engine.fork(&key, &key.fork(), &Properties::new()).await.expect("forked");
    let expected = [Snapshot { verdict: Verdict::Good, ..first }, second];
    drop(engine);
    let engine = open().await;
    assert_eq!(snapshots_of(&engine).await, expected);
    engine.fork(&key, &key.fork(), &Properties::new()).await.expect("the same fork");
    engine.rollback(&key, first.name).await.expect("rolled back");
    drop(engine);
    let engine = open().await;
    assert_eq!(snapshots_of(&engine).await, expected[..1]);
    assert!(engine.snapshot(&key).await.expect("a snapshot").name > second.name);
}

#[tokio::test]
async fn dir_remembers_its_history() {
    let root = tempfile::tempdir().expect("a directory");
    survives_a_restart(async || DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened")).await;
}

#[tokio::test]
async fn btrfs_remembers_its_history() {
    let Some(mount) = BtrfsMount::new() else { return };
    survives_a_restart(async || BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened")).await;
}

#[tokio::test]
async fn zfs_remembers_its_history() {
    let Some(root) = ZfsRoot::new() else { return };
    let open = async || ZfsEngine::at(&root.dataset, &root.path, &search_path(), clock()).await.expect("opened");
    survives_a_restart(open).await;
}

#[tokio::test]
async fn snapshots_that_are_not_written_down_are_unchecked_and_of_their_directory_s_time() {
    let root = tempfile::tempdir().expect("a directory");
    let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
    let key = project();
    let volume = engine.create(&key, &Properties::new(), None).await.expect("created");
    let names = [engine.snapshot(&key).await.expect("a snapshot"), engine.snapshot(&key).await.expect("a snapshot")];
    let names = names.map(|snapshot| snapshot.name);
    engine.judge(&key, names[0], Verdict::Good).await.expect("judged");
    let record = volume.path.with_file_name("record.json");
    let text = std::fs::read_to_string(&record).expect("read");
    let mut value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    value.as_object_mut().expect("an object").remove("snapshots").expect("it was written down");
    std::fs::write(&record, value.to_string()).expect("written");

    let now = crate::clock::SystemClock.now();
    let [first, second] = snapshots_of(&engine).await[..] else { panic!("two") };
    for (found, name) in [(first, names[0]), (second, names[1])] {
        assert_eq!((found.name, found.verdict), (name, Verdict::Unchecked));
        let apart = now.since(found.taken).max(found.taken.since(now));
        assert!(apart < std::time::Duration::from_secs(60), "{found:?}");
    }
    // What is known now is kept when directories move.
    engine.judge(&key, second.name, Verdict::Bad).await.expect("judged");
    engine.rollback(&key, second.name).await.expect("rolled back");
    assert_eq!(snapshots_of(&engine).await, [first, Snapshot { verdict: Verdict::Bad, ..second }]);
}
