//! The store of a simulation: on one thread, under a clock that stands still, and in the hands of its disk.

use std::task::Poll;
use std::time::Instant;

use futures_util::poll;

use super::super::{MemoryDisk, StoreError};
use super::*;

fn open() -> (Store, MemoryDisk) {
    Store::in_memory().expect("opens")
}

#[tokio::test(start_paused = true)]
async fn nothing_is_committed_before_the_disk_says_so() {
    let (store, disk) = open();
    let mut heard = store.subscribe();
    let mut created = store.create_project(&spec(1), POOL, NOW);
    let mut routed = add_lease(&store, 1, &lease(1), Some(event("routed")));
    assert!(poll!(&mut created).is_pending() && poll!(&mut routed).is_pending());
    assert_eq!((disk.waiting(), store.project(&key(1)).await.expect("reads")), (2, None));
    assert!(heard.try_recv().is_err());

    assert_eq!((disk.commit_now(), disk.commit_now()), (2, 0));
    assert_eq!(store.figures().commits, 1, "together");
    let Poll::Ready(Ok(created)) = poll!(&mut created) else { panic!("is committed") };
    assert!(matches!(poll!(&mut routed), Poll::Ready(Ok(()))));
    assert_eq!(store.project(&key(1)).await.expect("reads"), Some(created.record));
    assert_eq!(store.lease(&lease(1).token).await.expect("reads"), Some((key(1), lease(1))));
    assert_eq!(heard.try_recv().expect("is announced").text, "routed");
}

#[tokio::test(start_paused = true)]
async fn a_crash_keeps_what_was_committed_and_nothing_else() {
    let (store, disk) = open();
    drop(store.create_project(&spec(1), POOL, NOW));
    drop(add_lease(&store, 1, &lease(1), Some(event("kept"))));
    let mut lost = add_lease(&store, 1, &lease(2), Some(event("lost")));
    assert_eq!(disk.commit_first(2), 2);
    let before = store.take_up().await.expect("reads");
    let saved = disk.crash().expect("it lived");
    assert!(matches!(poll!(&mut lost), Poll::Ready(Err(StoreError::Closed))));
    assert!(matches!(store.record(event("too late")).await, Err(StoreError::Closed)));
    assert!(matches!(store.projects().await, Err(StoreError::Closed)));
    assert!(disk.crash().is_none(), "one dies once");
    assert_eq!((disk.commit_now(), disk.waiting()), (0, 0));

    let (store, disk) = saved.open().expect("opens");
    assert_eq!(store.take_up().await.expect("reads"), before);
    assert_eq!(store.leases(&key(1)).await.expect("reads"), [lease(1)]);
    let next = store.record(event("next"));
    disk.commit_now();
    assert_eq!(next.await.expect("is written"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_fails_commits_and_not_reads() {
    let (store, disk) = open();
    let created = store.create_project(&spec(1), POOL, NOW);
    disk.commit_now();
    let record = created.await.expect("creates").record;
    disk.set_full(true);
    let (refused, unknown) = (store.record(event("refused")), add_lease(&store, 2, &lease(1), None));
    disk.commit_now();
    let error = refused.await.expect_err("there is no room");
    assert_eq!(error.to_string(), "the disk is full: free some space on the file system of :memory:");
    assert!(matches!(unknown.await, Err(StoreError::UnknownProject { .. })), "its own error says more");
    assert_eq!(store.project(&key(1)).await.expect("reads go on"), Some(record));
    disk.set_full(false);
    let written = store.record(event("room again"));
    disk.commit_now();
    assert_eq!(written.await.expect("writes go on"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_task_can_be_the_disk() {
    let (store, disk) = open();
    let flushing = tokio::spawn(async move {
        loop {
            disk.some_waiting().await;
            tokio::time::sleep(Duration::from_millis(2)).await;
            disk.commit_now();
        }
    });
    let started = tokio::time::Instant::now();
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    for number in 0..10 {
        add_lease(&store, 1, &lease(number), None).await.expect("adds");
    }
    assert!(started.elapsed() >= Duration::from_millis(22), "eleven commits of two milliseconds");
    flushing.abort();
}

#[tokio::test(start_paused = true)]
async fn a_queue_is_full_where_the_writing_threads_is() {
    let (store, disk) = open();
    (0..2048).for_each(|_| drop(store.record(event("waits"))));
    assert!(matches!(store.record(event("one too many")).await, Err(StoreError::WritesWaiting { waiting: 2048 })));
    assert_eq!((disk.commit_now(), store.figures().commits), (2048, 8));
    assert_eq!(store.latest_event_id().await.expect("reads"), 2048);
}

#[tokio::test(start_paused = true)]
async fn one_past_has_many_futures() {
    let (store, disk) = open();
    drop(store.create_project(&spec(1), POOL, NOW));
    disk.commit_now();
    let past = disk.crash().expect("lived");
    for number in 1..=2 {
        let (store, disk) = past.copy().expect("copies").open().expect("opens");
        drop(add_lease(&store, 1, &lease(number), None));
        let of_nothing = add_lease(&store, 2, &lease(9), None);
        disk.commit_now();
        assert!(matches!(of_nothing.await, Err(StoreError::UnknownProject { .. })));
        assert_eq!(store.leases(&key(1)).await.expect("reads"), [lease(number)]);
    }
    let (store, _) = past.open().expect("opens");
    assert_eq!(store.leases(&key(1)).await.expect("reads"), []);
}

/// A figure and not a test of one: shown by `--nocapture`.
#[tokio::test(start_paused = true)]
async fn a_thousand_short_lives() {
    let beginning = open().1.crash().expect("lived");
    let started = Instant::now();
    for _ in 0..1000 {
        let (store, disk) = beginning.copy().expect("copies").open().expect("opens");
        drop(store.create_project(&spec(1), POOL, NOW));
        disk.commit_now();
        let (store, disk) = disk.crash().expect("lived").open().expect("opens");
        drop(add_lease(&store, 1, &lease(1), Some(event("routed"))));
        disk.commit_now();
        assert_eq!(store.take_up().await.expect("reads").leases.len(), 1);
    }
    eprintln!("a store in memory, with two commits, a crash and a read: {:.1?}", started.elapsed() / 1000);
}
