//! What writes do, alone and together.

use std::sync::mpsc;

use futures_util::future::join_all;
use rusqlite::ffi::{SQLITE_CANTOPEN, SQLITE_IOERR_FSYNC, SQLITE_IOERR_WRITE, SQLITE_READONLY_DIRECTORY};

use super::super::commit::Writing;
use super::super::{StoreError, events};
use super::*;

/// Occupies the writer until the sender is dropped, so that what is submitted meanwhile shares one commit.
fn hold_the_writer(store: &Store) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel::<()>();
    let (started, has_started) = mpsc::channel();
    drop(store.submit(move |_| {
        let _ = started.send(());
        let _ = held.recv_timeout(Duration::from_secs(20));
        Ok(())
    }));
    has_started.recv_timeout(Duration::from_secs(20)).expect("the writer takes the write");
    release
}

pub(super) fn sql(text: &'static str) -> impl FnOnce(&mut Writing<'_>) -> Result<(), StoreError> + Send + 'static {
    move |writing| writing.connection.execute_batch(text).map_err(StoreError::sqlite("test"))
}

#[tokio::test]
async fn a_lease_lives_until_it_is_released_or_forgotten() {
    let place = Place::new();
    let store = place.open();
    assert!(matches!(add_lease(&store, 1, &lease(1), None).await, Err(StoreError::UnknownProject { .. })));
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    let mut late = lease(1);
    late.created = NOW.plus(Duration::from_mins(1));
    late.renewed = late.created;
    add_lease(&store, 1, &late, Some(event("routed"))).await.expect("adds");
    add_lease(&store, 1, &lease(2), None).await.expect("adds");
    assert_eq!(store.leases(&key(1)).await.expect("reads"), [lease(2), late.clone()], "the oldest first");
    let activity = |record: Option<kiln_domain::ProjectRecord>| record.expect("is there").last_activity;
    let last = activity(store.project(&key(1)).await.expect("reads"));
    assert_eq!(last, late.created, "the older lease did not move it back");

    let later = NOW.plus(Duration::from_mins(2));
    let unknown = store.remove_lease(&lease(9).token, later, Some(event("completed"))).await;
    assert!(!unknown.expect("is no error"));
    assert_eq!(store.latest_event_id().await.expect("reads"), 1, "a miss writes nothing");
    assert_eq!(activity(store.project(&key(1)).await.expect("reads")), last, "a miss is nobody's activity");

    assert!(store.remove_lease(&late.token, later, Some(event("completed"))).await.expect("removes"));
    assert_eq!(activity(store.project(&key(1)).await.expect("reads")), later);
    assert!(!store.remove_lease(&late.token, later, None).await.expect("is no error"), "only once");
    assert_eq!(store.forget_leases(vec![lease(2).token, lease(3).token]).await.expect("forgets"), 1);
    assert_eq!(store.leases(&key(1)).await.expect("reads"), []);
}

#[tokio::test]
async fn what_gathers_shares_a_commit() {
    let place = Place::new();
    let store = place.open();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    let release = hold_the_writer(&store);
    let before = store.figures();
    let waiting: Vec<_> = (0..500).map(|i| add_lease(&store, 1, &lease(i), None)).collect();
    drop(release);
    for outcome in join_all(waiting).await {
        outcome.expect("is written");
    }
    let after = store.figures();
    assert_eq!(after.writes - before.writes, 501);
    assert_eq!(after.commits - before.commits, 3, "the one that held the writer, and two for the rest");
    assert_eq!(store.leases(&key(1)).await.expect("reads").len(), 500);
}

#[tokio::test]
async fn one_that_fails_harms_nobody_in_its_commit() {
    let place = Place::new();
    let store = place.open();
    let mut heard = store.subscribe();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    let release = hold_the_writer(&store);
    let first = add_lease(&store, 1, &lease(1), Some(event("first")));
    let same_token = add_lease(&store, 1, &lease(1), Some(event("same token")));
    let panics = store.submit::<(), _>(|writing| {
        events::record(writing, event("half"))?;
        panic!("a fault in a write (this panic is part of a test)");
    });
    let last = add_lease(&store, 1, &lease(2), Some(event("last")));
    drop(release);
    first.await.expect("is written");
    assert!(matches!(same_token.await, Err(StoreError::Sqlite { doing: "add the lease", .. })));
    assert!(panics.await.is_err());
    last.await.expect("is written");
    let journal = store.events(0, 10).await.expect("reads");
    assert_eq!(journal.iter().map(|e| e.text.as_str()).collect::<Vec<_>>(), ["first", "last"]);
    assert_eq!([heard.try_recv(), heard.try_recv()].map(|e| e.expect("was announced")).to_vec(), journal);
    assert!(heard.try_recv().is_err());
}

#[tokio::test]
async fn when_a_commit_fails_all_of_it_hear_so_and_the_next_is_fine() {
    let place = Place::new();
    let store = place.open();
    let mut heard = store.subscribe();
    let ways_to_fail = [
        // At COMMIT itself: a lease of nobody, found only then.
        "PRAGMA defer_foreign_keys = ON; INSERT INTO leases VALUES ('t', 'nobody', 0, 0, 0)",
        // In the middle, as a full disk does: the transaction is gone when the statement returns.
        "ROLLBACK; SELECT * FROM nowhere",
    ];
    for way in ways_to_fail {
        let release = hold_the_writer(&store);
        let before = store.record(event("before"));
        let culprit = store.submit(sql(way));
        let after = store.record(event("after"));
        drop(release);
        assert!(before.await.is_err() && culprit.await.is_err() && after.await.is_err(), "{way}");
        assert!(heard.try_recv().is_err(), "nothing is announced that was not written");
        assert_eq!(store.latest_event_id().await.expect("reads"), 0);
    }
    store.record(event("fine")).await.expect("the writer goes on");
    assert_eq!(heard.try_recv().expect("is announced").text, "fine");
}

#[tokio::test]
async fn a_full_queue_refuses_at_once() {
    let place = Place::new();
    let store = place.open();
    let release = hold_the_writer(&store);
    let mut accepted = Vec::new();
    let refusal = loop {
        let mut next = store.record(event("one of many"));
        match futures_util::poll!(&mut next) {
            std::task::Poll::Pending => accepted.push(next),
            std::task::Poll::Ready(outcome) => break outcome.expect_err("the writer is held"),
        }
    };
    assert!(matches!(refusal, StoreError::WritesWaiting { waiting } if waiting == accepted.len()), "{refusal}");
    assert!(refusal.is_retryable());
    drop(release);
    for outcome in join_all(accepted).await {
        outcome.expect("what was let in is written");
    }
}

#[tokio::test]
async fn a_write_stands_when_nobody_waits_for_it() {
    let place = Place::new();
    let store = place.open();
    drop(store.record(event("unheard")));
    assert_eq!(store.record(event("heard")).await.expect("is written"), 2, "in the order of submission");
}

#[tokio::test]
async fn a_lease_is_found_by_its_token_and_a_renewal_never_takes_one_back() {
    let place = Place::new();
    let store = place.open();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    assert!(!store.renew_lease(&lease(1).token, NOW).await.expect("there is none"));
    assert_eq!(store.lease(&lease(1).token).await.expect("reads"), None);
    add_lease(&store, 1, &lease(1), None).await.expect("adds");
    let (sooner, later) = (NOW.plus(Duration::from_mins(1)), NOW.plus(Duration::from_mins(2)));
    assert!(store.renew_lease(&lease(1).token, later).await.expect("renews"));
    assert!(store.renew_lease(&lease(1).token, sooner).await.expect("comes late"));
    let renewed = Lease { renewed: later, ..lease(1) };
    assert_eq!(store.lease(&lease(1).token).await.expect("reads"), Some((key(1), renewed)));
}

#[tokio::test]
async fn a_route_stores_lease_activity_and_builds_together() {
    let place = Place::new();
    let store = place.open();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    let mut builds = BuildTimes::default();
    builds.note(NOW);
    builds.note(NOW.plus(Duration::from_secs(7)));
    let born = NOW.plus(Duration::from_secs(7));
    let before = store.figures();
    let routed = store.add_lease(&key(1), &Lease { created: born, ..lease(1) }, &builds, Some(event("routed")));
    routed.await.expect("adds");
    assert_eq!(store.figures().commits - before.commits, 1);
    let record = store.project(&key(1)).await.expect("reads").expect("is there");
    assert_eq!((&record.builds, record.last_activity), (&builds, born));
    // A completion is activity and no build.
    assert!(store.remove_lease(&lease(1).token, born, None).await.expect("removes"));
    assert_eq!(store.project(&key(1)).await.expect("reads").expect("is there").builds, builds);
}

#[tokio::test]
async fn a_ping_is_a_write_and_leaves_one_row() {
    let place = Place::new();
    let store = place.open();
    for pings in 1..=3 {
        let before = store.figures();
        store.ping().await.expect("writes");
        assert_eq!(store.figures().commits - before.commits, 1);
        let rows = store.read(|connection| {
            let sql = "SELECT count(*), max(value) FROM notes WHERE name = 'pings'";
            let row = connection.query_row(sql, [], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)));
            row.map_err(StoreError::sqlite("test"))
        });
        assert_eq!(rows.await.expect("reads"), (1, pings));
    }
}

#[tokio::test]
async fn an_event_says_by_whom_and_by_which_rule_and_is_found_by_its_project() {
    let place = Place::new();
    let store = place.open();
    for number in 0..10 {
        let of = key(number % 2);
        let event = NewEvent::new(NOW, Some(&of), "test", number.to_string());
        store.record(event.by(format!("client {number}")).rule("drain-when-idle")).await.expect("writes");
    }
    let told = store.events_of(&key(1), 3).await.expect("reads");
    assert_eq!(told.iter().map(|event| event.text.as_str()).collect::<Vec<_>>(), ["5", "7", "9"]);
    assert_eq!((told[2].by.as_str(), told[2].rule.as_deref()), ("client 9", Some("drain-when-idle")));
    assert_eq!(store.events_of(&key(2), 3).await.expect("reads"), []);
}

#[tokio::test]
async fn a_disk_that_takes_nothing_is_named_and_worth_another_try() {
    let place = Place::new();
    let store = place.open();
    let path = place.path().display().to_string();
    // What SQLite says of a disk that is read-only, in the ways that it finds out.
    let fails = |code| {
        move |_: &mut Writing<'_>| {
            let error = rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None);
            Err::<(), _>(StoreError::sqlite("save the project")(error))
        }
    };
    for code in [SQLITE_READONLY_DIRECTORY, SQLITE_IOERR_WRITE, SQLITE_IOERR_FSYNC, SQLITE_CANTOPEN] {
        let error = store.submit(fails(code)).await.expect_err("fails");
        assert!(matches!(error, StoreError::Disk { .. }), "{code}: {error:?}");
        let text = error.to_string();
        assert!(text.starts_with("cannot save the project: ") && text.contains(&path), "{text}");
        assert_eq!((error.is_retryable(), error.retry_after()), (false, Some(Duration::from_secs(30))));
    }
    let full = store.submit(fails(rusqlite::ffi::SQLITE_FULL)).await.expect_err("fails");
    assert!(full.to_string().contains(&path) && full.retry_after() == Some(Duration::from_secs(30)), "{full}");
    // What is no write's own, and a read.
    store.submit(sql("PRAGMA query_only = ON")).await.expect("sets");
    let error = store.record(event("lost")).await.expect_err("nothing is written");
    assert!(matches!(&error, StoreError::Disk { path, .. } if *path == place.path()), "{error:?}");
    let reading = store.read(|_| {
        let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR_READ);
        Err::<(), _>(StoreError::sqlite("read the journal")(rusqlite::Error::SqliteFailure(code, None)))
    });
    assert!(matches!(reading.await, Err(StoreError::Disk { .. })));
    assert_eq!(store.latest_event_id().await.expect("reads go on"), 0);
}

#[tokio::test]
async fn a_database_that_somebody_else_holds_is_worth_another_try() {
    let place = Place::new();
    let store = place.open();
    store.submit(sql("PRAGMA busy_timeout = 0")).await.expect("sets");
    let other = rusqlite::Connection::open(place.path()).expect("opens");
    other.execute_batch("BEGIN IMMEDIATE").expect("holds it");
    let error = store.record(event("not now")).await.expect_err("it is locked");
    assert!(matches!(&error, StoreError::Locked { path, .. } if *path == place.path()), "{error:?}");
    assert_eq!((error.is_retryable(), error.retry_after()), (true, Some(Duration::from_secs(1))));
    assert!(error.to_string().starts_with("cannot begin a commit: another program has "), "{error}");
    assert_eq!(store.latest_event_id().await.expect("reads go on"), 0);
    other.execute_batch("ROLLBACK").expect("gives it back");
    store.record(event("now")).await.expect("is written");
}

#[tokio::test(start_paused = true)]
async fn a_read_that_hangs_is_given_up_and_its_connection_comes_back() {
    let place = Place::new();
    let store = place.open();
    let (release, held) = mpsc::channel::<()>();
    let hanging = store.read(move |_| {
        let _ = held.recv_timeout(Duration::from_secs(20));
        Ok(())
    });
    let (outcome, ()) = tokio::join!(hanging, tokio::time::advance(Duration::from_secs(21)));
    let error = outcome.expect_err("it hangs");
    assert!(matches!(error, StoreError::ReadHangs { .. }) && error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains(&place.path().display().to_string()), "{error}");
    assert_eq!(store.latest_event_id().await.expect("the other connection reads"), 0);
    drop(release);
    // One of these needs it.
    let (one, other) = tokio::join!(store.latest_event_id(), store.latest_event_id());
    assert_eq!((one.expect("reads"), other.expect("reads")), (0, 0));
}
