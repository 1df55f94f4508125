//! A damaged database makes way, whole, and nothing else does.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rusqlite::Connection;

use super::super::{OpenError, Opened, aside};
use super::durability::Disk;
use super::*;

fn open_or_set_aside(place: &Place) -> Opened {
    Store::open_or_set_aside(&place.path(), NOW).expect("opens")
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    path.with_file_name(format!("{}{suffix}", path.file_name().expect("has a name").to_string_lossy()))
}

fn names(place: &Place) -> Vec<String> {
    let entry = |entry: std::io::Result<fs::DirEntry>| entry.expect("reads").file_name().into_string().expect("a text");
    let mut names: Vec<String> = fs::read_dir(place.directory.path()).expect("reads").map(entry).collect();
    names.retain(|name| name.contains("corrupt"));
    names.sort();
    names
}

/// As a killed Kiln leaves it, with the latest event in the log only.
async fn killed() -> Place {
    let (living, place) = (Place::new(), Place::new());
    let store = living.open();
    for number in 0..200 {
        store.create_project(&spec(number), POOL, NOW).await.expect("creates");
    }
    drop(store);
    let store = living.open();
    store.record(event("the last words")).await.expect("writes");
    for side in ["", "-wal", "-shm"] {
        fs::copy(beside(&living.path(), side), beside(&place.path(), side)).expect("copies");
    }
    place
}

/// Its database and its log.
fn contents(path: &Path) -> [Vec<u8>; 2] {
    ["", "-wal"].map(|side| fs::read(beside(path, side)).expect("is there"))
}

async fn killed_and_damaged() -> Place {
    let place = killed().await;
    let file = fs::File::options().write(true).open(place.path()).expect("opens");
    let pages = file.metadata().expect("is there").len() / 4096;
    assert!(pages > 8);
    for page in 1..pages {
        file.write_all_at(&[0xff; 512], page * 4096 + 8).expect("damages");
    }
    place
}

async fn assert_new(store: &Store) {
    assert_eq!(store.take_up().await.expect("reads"), super::super::TakenUp::default());
    assert!(store.needs_rebuild().await.expect("reads"));
    assert_eq!(store.record(event("the first")).await.expect("writes"), 1, "nothing of the old journal is in it");
}

#[tokio::test]
async fn a_damaged_database_is_refused_and_left_alone_or_kept_whole() {
    let place = killed_and_damaged().await;
    let before = contents(&place.path());
    let refused = Store::open(&place.path()).err().expect("is refused");
    assert!(matches!(refused, OpenError::Corrupt { .. }), "{refused:?}");
    assert!(contents(&place.path()) == before, "refusing changes nothing");

    let Opened { store, set_aside } = open_or_set_aside(&place);
    let kept = set_aside.expect("was damaged");
    assert_eq!(kept, beside(&place.path(), ".corrupt-2023-11-14T221320"));
    assert!(contents(&kept) == before);
    assert_new(&store).await;
    drop(store);
    let Opened { store, set_aside } = open_or_set_aside(&place);
    assert_eq!((set_aside, store.latest_event_id().await.expect("reads")), (None, 1), "the new one is fine");
}

#[tokio::test]
async fn two_of_one_second_have_two_names() {
    let place = killed_and_damaged().await;
    let first = open_or_set_aside(&place).set_aside.expect("was damaged");
    fs::write(place.path(), "no database".repeat(1000)).expect("writes");
    let second = open_or_set_aside(&place).set_aside.expect("was damaged");
    assert_eq!(second, beside(&first, "-2"));
    assert!(first.exists() && second.exists());
}

/// The process dies before the first step, between any two, and after the last.
#[tokio::test]
async fn whoever_is_interrupted_is_finished_by_the_next() {
    let original = killed_and_damaged().await;
    let before = contents(&original.path());
    let kept = |place: &Place| beside(&place.path(), ".corrupt-begun");
    let count = aside::steps(&original.path(), &kept(&original)).len();
    assert!(count >= 8, "{count}");
    for done in 0..=count {
        let place = Place::new();
        for side in ["", "-wal", "-shm"] {
            fs::copy(beside(&original.path(), side), beside(&place.path(), side)).expect("copies");
        }
        for step in aside::steps(&place.path(), &kept(&place)).into_iter().take(done) {
            step.carry_out().expect("works");
        }
        let Opened { store, set_aside } = open_or_set_aside(&place);
        let expected = match done {
            0 => Some(beside(&place.path(), ".corrupt-2023-11-14T221320")),
            // The last is the flush of the directory.
            _ if done >= count - 1 => None,
            _ => Some(kept(&place)),
        };
        assert_eq!(set_aside, expected, "after {done} of {count} steps");
        assert!(contents(&expected.unwrap_or_else(|| kept(&place))) == before, "after {done} of {count} steps");
        assert_eq!(names(&place).len(), 2, "after {done} of {count} steps: {:?}", names(&place));
        assert_new(&store).await;
    }
}

#[tokio::test]
async fn a_log_alone_is_kept_and_never_read_into_a_new_database() {
    let place = killed().await;
    fs::remove_file(place.path()).expect("removes");
    let refused = Store::open(&place.path()).err().expect("is refused");
    assert!(matches!(refused, OpenError::Corrupt { .. }), "{refused:?}");
    assert!(!place.path().exists(), "refusing makes nothing");
    let Opened { store, set_aside } = open_or_set_aside(&place);
    let kept = set_aside.expect("the log is kept");
    assert!(beside(&kept, "-wal").exists() && !kept.exists());
    assert_new(&store).await;
}

#[tokio::test]
async fn a_database_that_is_gone_is_made_anew() {
    let place = killed().await;
    for side in ["", "-wal", "-shm"] {
        fs::remove_file(beside(&place.path(), side)).expect("removes");
    }
    let Opened { store, set_aside } = open_or_set_aside(&place);
    assert_eq!(set_aside, None);
    assert_new(&store).await;
}

#[tokio::test]
async fn what_is_not_damaged_is_never_set_aside() {
    let place = killed().await;
    let opened = open_or_set_aside(&place);
    assert_eq!(opened.set_aside, None);
    let journal = opened.store.events(0, 9).await.expect("reads");
    assert_eq!(journal.last().map(|event| event.text.as_str()), Some("the last words"));
    assert!(matches!(Store::open_or_set_aside(&place.path(), NOW), Err(OpenError::Held { .. })));
    drop(opened);

    let connection = Connection::open(place.path()).expect("opens");
    connection.execute_batch("PRAGMA user_version = 99").expect("writes");
    assert!(matches!(Store::open_or_set_aside(&place.path(), NOW), Err(OpenError::Newer { .. })));
    connection.execute_batch("PRAGMA user_version = 2; PRAGMA application_id = 7").expect("writes");
    assert!(matches!(Store::open_or_set_aside(&place.path(), NOW), Err(OpenError::Foreign { .. })));
    drop(connection);

    fs::remove_file(place.path()).expect("removes");
    fs::create_dir(place.path()).expect("makes");
    assert!(matches!(Store::open_or_set_aside(&place.path(), NOW), Err(OpenError::Io { .. })));
    assert_eq!(names(&place), [""; 0]);
}

#[tokio::test]
async fn a_disk_that_is_full_or_read_only_is_no_damage() {
    let Some(disk) = Disk::mount("size=64m") else { return };
    let killed = killed().await;
    for side in ["", "-wal", "-shm"] {
        fs::copy(beside(&killed.path(), side), beside(&disk.place.path(), side)).expect("copies");
    }
    // An index of another boot is no index; it must be made anew, for which there is no room.
    fs::remove_file(beside(&disk.place.path(), "-shm")).expect("removes");
    let before = contents(&disk.place.path());
    let filler = disk.place.directory.path().join("filler");
    let chunk = vec![1; 1 << 16];
    let mut file = fs::File::create(&filler).expect("creates");
    while std::io::Write::write_all(&mut file, &chunk).is_ok() {}
    while std::io::Write::write_all(&mut file, &[1]).is_ok() {}
    drop(file);
    let refused = Store::open_or_set_aside(&disk.place.path(), NOW).err().expect("there is no room");
    assert!(matches!(refused, OpenError::Full { .. }), "{refused:?}");
    assert!(contents(&disk.place.path()) == before);

    disk.remount("ro");
    let refused = Store::open_or_set_aside(&disk.place.path(), NOW).err().expect("is read-only");
    assert!(matches!(refused, OpenError::Io { .. }), "{refused:?}");
    disk.remount("rw");
    fs::remove_file(filler).expect("removes");
    let opened = open_or_set_aside(&disk.place);
    assert_eq!((opened.set_aside, names(&disk.place).len()), (None, 0));
    let journal = opened.store.events(0, 9).await.expect("reads");
    assert_eq!(journal.last().map(|event| event.text.as_str()), Some("the last words"));
}
