//! Files of earlier versions, made by the migrations of those versions.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use kiln_domain::{Generation, Phase, Settings, Tier};
use rusqlite::Connection;

use super::super::schema::{MIGRATIONS, open_writer};
use super::super::{Event, OpenError};
use super::*;

/// A file as the first Kiln left it, with `rows` in it.
fn of_version_1(place: &Place, rows: &str) {
    drop(open_writer(&place.path(), &MIGRATIONS[..1]).expect("opens"));
    let connection = Connection::open(place.path()).expect("opens");
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).expect("reads");
    assert_eq!(version, 1);
    connection.execute_batch("PRAGMA foreign_keys = OFF").expect("sets");
    connection.execute_batch(rows).expect("writes");
}

fn project_of_version_1(number: usize, columns: &str) -> String {
    let address = POOL.first.to_bits() + u32::try_from(number).expect("small");
    let (key, now) = (key(number), NOW.as_millis());
    let BuildSpec { repo, name, target, arch } = spec(number);
    let (repo, arch) = (repo.as_str(), arch.as_str());
    format!(
        "INSERT INTO projects VALUES ('{key}', '{repo}', '{name}', '{target}', '{arch}', {address}, 'warm', NULL, 7,
            'run 7', {columns}, {now}, {now});"
    )
}

/// F6: a migration fails towards busy.
#[tokio::test]
async fn nothing_of_the_first_version_is_lost_and_running_builds_stay_running() {
    let place = Place::new();
    let (token, of, now) = (lease(1).token, key(1), NOW.as_millis());
    let rows = [
        project_of_version_1(0, "'warm', NULL, NULL"),
        project_of_version_1(1, "'hot', 5000, 1099511627776"),
        project_of_version_1(2, "'warm', 90500, NULL"),
        project_of_version_1(3, "'warm', 99999999999999, 2147483648"),
        format!("INSERT INTO leases VALUES ('{}', '{of}', {now}, {now});", token.as_str()),
        "INSERT INTO events VALUES (41, 5, NULL, 'old', 'told long ago');".to_owned(),
    ];
    of_version_1(&place, &rows.concat());
    let store = place.open();
    let found = store.take_up().await.expect("reads");
    assert_eq!(found.damaged, []);
    assert_eq!(found.leases, [(key(1), lease(1))], "two hours from its birth");
    assert!(found.leases[0].1.is_alive(NOW.plus(Duration::from_mins(119)), true, &POLICY));
    let settings =
        |tier, idle_window, volume_bytes| Settings { tier, idle_window, volume_bytes, ..Settings::default() };
    for (number, expected) in [
        (0, settings(None, None, None)),
        (1, settings(Some(Tier::Hot), None, Some(1 << 40))),
        (2, settings(None, Some(Duration::from_millis(90_500)), None)),
        (3, settings(None, Some(Settings::LONGEST_WINDOW), Some(1 << 31))),
    ] {
        let record = found.projects.iter().find(|record| record.key == key(number)).expect("is there");
        assert_eq!((&record.settings, record.settings.check()), (&expected, Ok(())));
        assert_eq!((&record.phase, record.generation), (&Phase::Warm, Generation::from_stored(7)));
        assert_eq!((record.incarnation.as_deref(), &record.builds), (Some("run 7"), &BuildTimes::default()));
        assert_eq!((record.created, record.last_activity), (NOW, NOW));
    }
    let journal = store.events(0, 9).await.expect("reads");
    assert_eq!((journal[0].id, journal[0].by.as_str(), journal[0].rule.as_deref()), (41, "kiln", None));
    assert_eq!(store.record(event("next")).await.expect("writes"), 42);
    assert!(!store.needs_rebuild().await.expect("reads"), "it knew its projects all along");
}

#[tokio::test]
async fn a_lease_of_nothing_does_not_stop_a_migration() {
    let place = Place::new();
    of_version_1(&place, "INSERT INTO leases VALUES ('t', 'nobody', 0, 0)");
    let found = place.open().take_up().await.expect("reads");
    assert_eq!(found.damaged.len(), 2, "its key is none, and there is no such project: {:?}", found.damaged);
}

#[tokio::test]
async fn a_migration_keeps_a_copy_and_fails_as_a_whole() {
    let place = Place::new();
    of_version_1(&place, &project_of_version_1(1, "'warm', NULL, NULL"));
    let copy = place.directory.path().join("kiln.db.before-2");
    assert!(!copy.exists(), "there was nothing to copy at the first start");

    let fails = [MIGRATIONS[0], "CREATE TABLE more (a INTEGER) STRICT; INSERT INTO nowhere VALUES (1)"];
    assert!(matches!(Store::open_with(&place.path(), &fails), Err(OpenError::Sqlite { doing: "migrate", .. })));
    let record = place.open().project(&key(1)).await.expect("reads");
    assert!(record.is_some(), "it was version 1 still");

    let more = ["CREATE TABLE more (a INTEGER) STRICT"];
    let works = [MIGRATIONS, &more].concat();
    let store = Store::open_with(&place.path(), &works).expect("migrates");
    assert_eq!(store.project(&key(1)).await.expect("reads"), record);
    drop(store);
    let error = Store::open(&place.path()).err().expect("is refused");
    let known_here = i64::try_from(MIGRATIONS.len()).expect("few");
    assert!(
        matches!(error, OpenError::Newer { found, known, .. } if (found, known) == (known_here + 1, known_here)),
        "{error}"
    );
    assert_eq!(fs::metadata(&copy).expect("is there").mode() & 0o777, 0o600);
    let store = Store::open(&copy).expect("the copy is a database of the version before");
    assert_eq!(store.project(&key(1)).await.expect("reads"), record);
}

/// What was told before there was an index is found by it.
#[tokio::test]
async fn the_journal_of_the_second_version_is_indexed() {
    let place = Place::new();
    drop(open_writer(&place.path(), &MIGRATIONS[..2]).expect("opens"));
    let connection = Connection::open(place.path()).expect("opens");
    let (one, other) = (key(1), key(2));
    let rows = format!(
        "INSERT INTO events (id, at, key, kind, text) VALUES (1, 5, '{one}', 'old', 'a'), (2, 5, '{other}', 'old', 'b'),
            (3, 5, NULL, 'old', 'c'), (4, 5, '{one}', 'old', 'd')"
    );
    connection.execute_batch(&rows).expect("writes");
    drop(connection);
    let store = place.open();
    let ids = |events: Vec<Event>| events.into_iter().map(|event| event.id).collect::<Vec<_>>();
    assert_eq!(ids(store.later_events_of(&one, 0, 9).await.expect("reads")), [1, 4]);
    assert_eq!(ids(store.events_of(&other, 9).await.expect("reads")), [2]);
    assert_eq!(ids(store.events(0, 9).await.expect("reads")), [1, 2, 3, 4]);
    assert!(place.directory.path().join("kiln.db.before-3").exists());
}
