//! What is opened, what is refused, and with which words.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use rusqlite::Connection;

use super::super::OpenError;
use super::super::schema::MIGRATIONS;
use super::*;

fn refusal(place: &Place) -> OpenError {
    Store::open(&place.path()).err().expect("is refused")
}

#[tokio::test]
async fn all_is_there_after_it_was_closed() {
    let place = Place::new();
    let store = place.open();
    let record = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    add_lease(&store, 1, &lease(1), Some(event("routed"))).await.expect("adds");
    // Not awaited: closing writes what was submitted.
    drop(add_lease(&store, 1, &lease(2), None));
    drop(store);
    assert_eq!(fs::metadata(place.path()).expect("is there").mode() & 0o777, 0o600);
    let leftovers = place.directory.path().join("kiln.db-wal");
    assert!(!leftovers.exists(), "a closed database is one file");

    let store = place.open();
    assert_eq!(store.project(&key(1)).await.expect("reads"), Some(record));
    assert_eq!(store.leases(&key(1)).await.expect("reads").len(), 2);
    assert_eq!(store.events(0, 10).await.expect("reads")[0].text, "routed");
    assert_eq!(store.record(event("next")).await.expect("is written"), 2);
}

#[test]
fn only_one_at_a_time() {
    let place = Place::new();
    let first = place.open();
    let error = refusal(&place);
    assert!(matches!(error, OpenError::Held { pid: Some(pid), .. } if pid == std::process::id()), "{error}");
    drop(first);
    place.open();
}

#[test]
fn the_directory_must_be_there() {
    let place = Place::new();
    let missing = place.directory.path().join("missing/kiln.db");
    let error = Store::open(&missing).err().expect("is refused");
    assert!(matches!(error, OpenError::Directory { .. }));
    assert!(error.to_string().contains("make the directory"), "{error}");
    fs::write(place.directory.path().join("file"), "").expect("writes");
    assert!(matches!(Store::open(&place.directory.path().join("file/kiln.db")), Err(OpenError::Directory { .. })));
}

#[test]
fn a_file_that_is_no_database() {
    let place = Place::new();
    fs::write(place.path(), "certainly not what SQLite writes at the beginning of a file".repeat(100)).expect("writes");
    let error = refusal(&place);
    assert!(matches!(error, OpenError::Corrupt { .. }), "{error:?}");
    assert!(error.to_string().contains("move it away"), "{error}");
}

#[tokio::test]
async fn a_damaged_page() {
    let place = Place::new();
    let store = place.open();
    for number in 0..200 {
        store.create_project(&spec(number), POOL, NOW).await.expect("creates");
    }
    drop(store);
    let file = fs::File::options().write(true).open(place.path()).expect("opens");
    let pages = file.metadata().expect("is there").len() / 4096;
    for page in 1..pages {
        file.write_all_at(&[0xff; 512], page * 4096 + 8).expect("damages");
    }
    assert!(matches!(refusal(&place), OpenError::Corrupt { .. }));
}

#[test]
fn a_newer_kilns_and_another_programs() {
    let place = Place::new();
    drop(place.open());
    let connection = Connection::open(place.path()).expect("opens");
    connection.execute_batch("PRAGMA user_version = 99").expect("writes");
    let error = refusal(&place);
    assert!(
        matches!(error, OpenError::Newer { found: 99, known, .. } if usize::try_from(known) == Ok(MIGRATIONS.len())),
        "{error}"
    );
    connection.execute_batch("PRAGMA user_version = 2; PRAGMA application_id = 7").expect("writes");
    assert!(matches!(refusal(&place), OpenError::Foreign { .. }));
}
