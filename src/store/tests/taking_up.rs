//! What a start finds, in whatever state it is.

use std::fmt::Write as _;
use std::time::Instant;

use rusqlite::Connection;

use super::*;

/// A hand in the closed file.
fn by_hand(place: &Place, sql: &str) {
    let connection = Connection::open(place.path()).expect("opens");
    connection.execute_batch("PRAGMA foreign_keys = OFF").expect("sets");
    connection.execute_batch(sql).expect("writes");
}

#[tokio::test]
async fn a_damaged_row_is_told_of_and_spoils_nothing_else() {
    let place = Place::new();
    let store = place.open();
    for number in 0..8 {
        store.create_project(&spec(number), POOL, NOW).await.expect("creates");
        add_lease(&store, number, &lease(number as u64), None).await.expect("adds");
    }
    drop(store);
    let other_digits = "p0123456789abcdef";
    let mut hand = String::new();
    let mut damage = |number, set: &str| {
        writeln!(hand, "UPDATE projects SET {set} WHERE key = '{}';", key(number)).expect("fits");
    };
    damage(1, "settings = '{\"colour\": 3}'");
    damage(2, "builds = 'often'");
    damage(3, "phase = 'sleepy'");
    damage(4, "arch = 'z80'");
    damage(5, &format!("key = '{other_digits}'"));
    damage(6, "key = 'not a key'");
    by_hand(&place, &hand);

    let store = place.open();
    let found = store.take_up().await.expect("reads");
    let mut whole = [key(0), key(7)];
    whole.sort();
    assert_eq!(found.projects.iter().map(|record| record.key.clone()).collect::<Vec<_>>(), whole);
    assert_eq!(store.projects().await.expect("reads"), found.projects);
    assert_eq!(found.leases.len(), 8, "a daemon without a readable record may have builds all the same");
    let why = |key: &str| {
        let of_key: Vec<_> = found.damaged.iter().filter(|damaged| damaged.key == key).collect();
        assert_eq!(of_key.len(), 1, "{key} in {:?}", found.damaged);
        of_key[0].why.clone()
    };
    for (named, part) in [
        (key(1).as_str(), "as settings"),
        (key(2).as_str(), "\"often\" as builds"),
        (key(3).as_str(), "\"sleepy\" as phase"),
        (key(4).as_str(), "\"z80\" as arch"),
        (other_digits, key(5).as_str()),
        ("not a key", "as key"),
        (key(5).as_str(), "there is no such project"),
        (key(6).as_str(), "there is no such project"),
    ] {
        assert!(why(named).contains(part), "{}", why(named));
    }
    assert_eq!(found.damaged.len(), 8);

    assert!(store.project(&other_digits.parse().expect("a key")).await.is_err(), "no cache under a wrong key");
    assert!(store.create_project(&spec(3), POOL, NOW).await.is_err(), "a damaged project is not made anew");
    // The one that was renamed comes again under its own key, with its lease.
    assert!(store.create_project(&spec(5), POOL, NOW).await.expect("creates").new);
    assert_eq!(store.leases(&key(5)).await.expect("reads"), [lease(5)]);
}

#[tokio::test]
async fn a_damaged_row_is_left_out_of_every_list_and_told_of_once() {
    let place = Place::new();
    let store = place.open();
    for number in 0..3 {
        store.create_project(&spec(number), POOL, NOW).await.expect("creates");
        add_lease(&store, number, &lease(number as u64), None).await.expect("adds");
        add_lease(&store, number, &lease(10 + number as u64), None).await.expect("adds");
    }
    for number in 0..8 {
        let event = NewEvent::new(NOW, Some(&key(0)), "test", number.to_string());
        store.record(event).await.expect("is written");
    }
    drop(store);
    let lease_at = |number: u64| lease(number).token.as_str().to_owned();
    by_hand(
        &place,
        &format!(
            "UPDATE leases SET key = 'not a key' WHERE token = '{}';
             UPDATE leases SET token = CAST(X'FF' AS TEXT) WHERE token = '{}';
             UPDATE leases SET key = CAST(X'FF' AS TEXT) WHERE token = '{}';
             UPDATE events SET key = 'not a key' WHERE id IN (2, 3, 4);
             UPDATE events SET text = CAST(X'FF' AS TEXT) WHERE id IN (6, 8);",
            lease_at(1),
            lease_at(10),
            lease_at(2),
        ),
    );

    let store = place.open();
    let of = |number: usize, lease: Lease| (key(number), lease);
    let mut whole = vec![of(0, lease(0)), of(1, lease(11)), of(2, lease(12))];
    whole.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(store.all_leases().await.expect("reads"), whole);
    assert_eq!(store.leases(&key(0)).await.expect("reads"), [lease(0)]);
    let ids = |events: Vec<super::super::Event>| events.iter().map(|event| event.id).collect::<Vec<_>>();
    assert_eq!(ids(store.events(0, 100).await.expect("reads")), [1, 5, 7]);
    // A page that is full may have another after it, and one that is not is the last.
    assert_eq!(ids(store.events(1, 1).await.expect("reads")), [5]);
    assert_eq!(ids(store.events(0, 2).await.expect("reads")), [1, 5]);
    assert!(store.events(7, 1).await.expect("reads").is_empty());
    assert_eq!(ids(store.events_of(&key(0), 2).await.expect("reads")), [5, 7]);

    let taken_up = store.take_up().await.expect("reads");
    assert_eq!((taken_up.projects.len(), taken_up.leases), (3, whole));
    let (_, damaged) = store.read(|connection| super::super::rows::events(connection, 0, 100)).await.expect("reads");
    let named: Vec<_> = damaged.iter().map(|row| row.key.as_str()).collect();
    assert_eq!(named, ["event 2", "event 3", "event 4", "event 6", "event 8"]);
    assert!(damaged[0].why.contains("\"not a key\" as key"), "{damaged:?}");
    assert!(damaged[3].why.contains("cannot read the text"), "{damaged:?}");
    for row in [damaged, taken_up.damaged] {
        assert_eq!(store.told.news(&row), [], "once is enough");
    }
    let other = [super::super::Damaged { key: "event 9".to_owned(), why: "torn".to_owned() }];
    assert_eq!(store.told.news(&other), other);
}

#[tokio::test]
async fn a_database_is_complete_when_it_was_said_to_be() {
    let place = Place::new();
    let store = place.open();
    assert!(store.needs_rebuild().await.expect("reads"));
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    drop(store);
    let store = place.open();
    assert!(store.needs_rebuild().await.expect("reads"), "a crash in between leaves it to be done again");
    store.rebuilt(Some(event("rebuilt"))).await.expect("writes");
    drop(store);
    let store = place.open();
    assert!(!store.needs_rebuild().await.expect("reads"));
    assert_eq!(store.latest_event_id().await.expect("reads"), 1);
}

/// A figure and not a test of one: shown by `--nocapture`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_projects() {
    let place = Place::new();
    let store = place.open();
    let mut builds = BuildTimes::default();
    (0..BuildTimes::KEPT).for_each(|_| builds.note(NOW));
    for hundred in 0..100 {
        let numbers = hundred * 100..(hundred + 1) * 100;
        let writes: Vec<_> = numbers
            .map(|number| {
                drop(store.create_project(&spec(number), POOL, NOW));
                store.add_lease(&key(number), &lease(number as u64), &builds, Some(event("routed")))
            })
            .collect();
        for write in writes {
            write.await.expect("is written");
        }
    }
    drop(store);
    let bytes = std::fs::metadata(place.path()).expect("is there").len();
    let started = Instant::now();
    let store = place.open();
    let opened = started.elapsed();
    let found = store.take_up().await.expect("reads");
    let taken_up = started.elapsed().saturating_sub(opened);
    assert_eq!((found.projects.len(), found.leases.len(), found.damaged.len()), (10_000, 10_000, 0));
    eprintln!(
        "10 000 projects with 30 builds and a lease each, {} KiB: opened in {opened:.1?}, taken up in {taken_up:.1?}",
        bytes / 1024
    );
}
