//! What writes do, alone and together.

use std::collections::HashSet;
use std::sync::mpsc;
use std::time::Duration;

use futures_util::future::join_all;
use kiln_domain::project::{Settings, Tier};
use kiln_domain::{Generation, Phase};

use super::super::writer::Writing;
use super::super::{Created, StoreError, events};
use super::*;

/// Occupies the writer until the sender is dropped, so that what is submitted meanwhile shares one commit.
fn hold_the_writer(store: &Store) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel::<()>();
    let (started, has_started) = mpsc::channel();
    drop(store.inner.writer.submit(move |_| {
        let _ = started.send(());
        let _ = held.recv_timeout(Duration::from_secs(20));
        Ok(())
    }));
    has_started.recv_timeout(Duration::from_secs(20)).expect("the writer takes the write");
    release
}

fn sql(text: &'static str) -> impl FnOnce(&mut Writing<'_>) -> Result<(), StoreError> + Send + 'static {
    move |writing| writing.connection.execute_batch(text).map_err(StoreError::sqlite("test"))
}

#[tokio::test]
async fn a_project_comes_back_as_it_was_saved() {
    let place = Place::new();
    let store = place.open();
    assert_eq!(store.project(&key(1)).await.expect("reads"), None);
    let Created { mut record, new } = store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    assert!(new);
    assert_eq!((record.address, &record.phase), (POOL.first, &Phase::Absent));
    assert_eq!(store.project(&key(1)).await.expect("reads"), Some(record.clone()));

    record.phase = Phase::Failed { reason: "no room".to_owned() };
    record.generation = Generation::from_stored(7);
    record.incarnation = Some("run 7".to_owned());
    record.settings =
        Settings { tier: Tier::Hot, idle_window: Some(Duration::from_secs(90)), volume_bytes: Some(1 << 40) };
    record.last_activity = NOW.plus(Duration::from_secs(5));
    store.save_project(&record, Some(event("saved"))).await.expect("saves");
    assert_eq!(store.project(&key(1)).await.expect("reads"), Some(record.clone()));

    let again = store.create_project(&spec(1), POOL, NOW.plus(Duration::from_secs(9))).await.expect("finds");
    assert_eq!(again, Created { record, new: false });
    let other = kiln_domain::ProjectRecord::new(spec(2), POOL.last, NOW);
    assert!(
        matches!(store.save_project(&other, None).await, Err(StoreError::UnknownProject { key: k }) if k == key(2))
    );
}

#[tokio::test]
async fn every_phase_is_kept() {
    let place = Place::new();
    let store = place.open();
    let mut record = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    for phase in [
        Phase::Absent,
        Phase::Provisioning,
        Phase::Starting,
        Phase::Warm,
        Phase::Draining,
        Phase::Idle,
        Phase::Failed { reason: String::new() },
    ] {
        record.phase = phase;
        store.save_project(&record, None).await.expect("saves");
        assert_eq!(store.project(&record.key).await.expect("reads").as_ref(), Some(&record));
    }
}

#[tokio::test]
async fn a_lease_lives_until_it_is_released_or_forgotten() {
    let place = Place::new();
    let store = place.open();
    assert!(matches!(store.add_lease(&key(1), &lease(1), None).await, Err(StoreError::UnknownProject { .. })));
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    let mut late = lease(1);
    late.created = NOW.plus(Duration::from_mins(1));
    late.renewed = late.created;
    store.add_lease(&key(1), &late, Some(event("routed"))).await.expect("adds");
    store.add_lease(&key(1), &lease(2), None).await.expect("adds");
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
async fn active_are_those_that_are_not_quiet_or_hot_or_leased() {
    let place = Place::new();
    let store = place.open();
    for number in 0..5 {
        let mut record = store.create_project(&spec(number), POOL, NOW).await.expect("creates").record;
        record.phase = if number == 1 { Phase::Warm } else { Phase::Idle };
        record.settings.tier = if number == 2 { Tier::Hot } else { Tier::Warm };
        store.save_project(&record, None).await.expect("saves");
    }
    store.add_lease(&key(3), &lease(1), None).await.expect("adds");
    let keys = |records: Vec<kiln_domain::ProjectRecord>| records.into_iter().map(|r| r.key).collect::<Vec<_>>();
    let mut expected = vec![key(1), key(2), key(3)];
    expected.sort();
    assert_eq!(keys(store.active_projects().await.expect("reads")), expected);
    assert_eq!(store.projects().await.expect("reads").len(), 5);
}

#[tokio::test]
async fn one_key_with_two_identities_is_refused() {
    let place = Place::new();
    let store = place.open();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    // A collision of two 64-bit keys, the cheap way.
    store.inner.writer.submit(sql("UPDATE projects SET repo = 'github.com/victim/repo'")).await.expect("writes");
    let error = store.create_project(&spec(1), POOL, NOW).await.expect_err("is refused");
    assert!(matches!(&error, StoreError::OtherIdentity { key: k, stored }
        if *k == key(1) && stored.repo.as_str() == "github.com/victim/repo"));
    assert!(error.to_string().contains("must not share its cache"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_at_once_get_two_hundred_addresses() {
    let place = Place::new();
    let store = place.open();
    let twice = (0..400).map(|i| {
        let store = store.clone();
        tokio::spawn(async move { store.create_project(&spec(i % 200), POOL, NOW).await.expect("creates") })
    });
    let created: Vec<Created> = join_all(twice).await.into_iter().map(|c| c.expect("runs")).collect();
    assert_eq!(created.iter().filter(|c| c.new).count(), 200);
    let addresses: HashSet<_> = created.iter().map(|c| c.record.address).collect();
    assert_eq!(addresses.len(), 200);
    assert!(addresses.iter().all(|a| POOL.contains(*a) && a.to_bits() < POOL.first.to_bits() + 200), "no holes");
}

#[tokio::test]
async fn the_lowest_free_address_is_given_until_there_is_none() {
    let place = Place::new();
    let store = place.open();
    let pool = AddressPool { first: Ipv4Addr::new(10, 0, 0, 254), last: Ipv4Addr::new(10, 0, 1, 2) };
    let address = async |number| store.create_project(&spec(number), pool, NOW).await.map(|c| c.record.address);
    for number in 0..5 {
        address(number).await.expect("there is room");
    }
    assert!(matches!(address(5).await, Err(StoreError::NoAddress { pool: p }) if p == pool));
    for (freed, text) in [
        (pool.first, "DELETE FROM projects WHERE address = 0x0a0000fe"),
        (Ipv4Addr::new(10, 0, 1, 0), "DELETE FROM projects WHERE address = 0x0a000100"),
        (pool.last, "DELETE FROM projects WHERE address = 0x0a000102"),
    ] {
        store.inner.writer.submit(sql(text)).await.expect("deletes");
        assert_eq!(address(100 + freed.to_bits() as usize).await.expect("one is free"), freed);
    }
    let empty = AddressPool { first: pool.last, last: pool.first };
    assert!(matches!(store.create_project(&spec(77), empty, NOW).await, Err(StoreError::NoAddress { .. })));
}

#[tokio::test]
async fn what_gathers_shares_a_commit() {
    let place = Place::new();
    let store = place.open();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    let release = hold_the_writer(&store);
    let before = store.figures();
    let waiting: Vec<_> = (0..500).map(|i| store.add_lease(&key(1), &lease(i), None)).collect();
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
    let first = store.add_lease(&key(1), &lease(1), Some(event("first")));
    let same_token = store.add_lease(&key(1), &lease(1), Some(event("same token")));
    let panics = store.inner.writer.submit::<(), _>(|writing| {
        events::record(writing, event("half"))?;
        panic!("a fault in a write (this panic is part of a test)");
    });
    let last = store.add_lease(&key(1), &lease(2), Some(event("last")));
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
        "PRAGMA defer_foreign_keys = ON; INSERT INTO leases VALUES ('t', 'nobody', 0, 0)",
        // In the middle, as a full disk does: the transaction is gone when the statement returns.
        "ROLLBACK; SELECT * FROM nowhere",
    ];
    for way in ways_to_fail {
        let release = hold_the_writer(&store);
        let before = store.record(event("before"));
        let culprit = store.inner.writer.submit(sql(way));
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
async fn the_journal_is_bounded_and_its_ids_go_on() {
    let place = Place::new();
    let store = place.open();
    let many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100999)
        INSERT INTO events (id, at, kind, text) SELECT i, 0, 'x', '' FROM n";
    store.inner.writer.submit(sql(many)).await.expect("fills");
    assert_eq!(store.record(event("the last drop")).await.expect("is written"), 101_000);
    let kept = store.events(0, u32::MAX).await.expect("reads");
    assert_eq!(i64::try_from(kept.len()), Ok(events::KEPT));
    assert_eq!((kept[0].id, kept[kept.len() - 1].text.as_str()), (1001, "the last drop"));
    assert_eq!(store.events(100_998, 1).await.expect("reads")[0].id, 100_999);
}
