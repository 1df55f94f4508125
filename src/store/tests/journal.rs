//! What the journal keeps, and for how long.

use super::super::{Event, Retention, rows};
use super::writing::sql;
use super::*;

const HOUR: Duration = Duration::from_hours(1);

async fn kept(store: &Store) -> Vec<Event> {
    store.events(0, u32::MAX).await.expect("reads")
}

async fn retain(store: &Store, rows: u64, bytes: u64, age: Duration) {
    store.retain(Retention { age, rows, bytes }).await.expect("is taken");
}

/// `count` events at `at`, in as few commits as may be.
async fn record(store: &Store, count: usize, at: Timestamp, text: &str) {
    for _ in 0..count.div_ceil(1000) {
        let writes: Vec<_> = (0..count.min(1000)).map(|_| store.record(NewEvent { at, ..event(text) })).collect();
        for write in writes {
            write.await.expect("is written");
        }
    }
}

#[tokio::test]
async fn its_rows_are_bounded_and_its_ids_go_on() {
    let place = Place::new();
    let store = place.open();
    retain(&store, 1000, u64::MAX, HOUR).await;
    for written in [500, 1000, 3000] {
        record(&store, if written == 500 { 500 } else { 1000 }, NOW, "x").await;
        assert!(kept(&store).await.len() <= 1000, "after {written}");
    }
    record(&store, 999, NOW, "x").await;
    store.record(event("the last drop")).await.expect("is written");
    let kept = kept(&store).await;
    assert!((900..=1000).contains(&kept.len()), "{}", kept.len());
    assert!(kept.windows(2).all(|pair| pair[0].id + 1 == pair[1].id), "only the oldest go");
    assert_eq!((kept[kept.len() - 1].id, kept[kept.len() - 1].text.as_str()), (3500, "the last drop"));
}

#[tokio::test]
async fn its_bytes_are_bounded_and_the_newest_stays_though_it_is_too_big() {
    let place = Place::new();
    let store = place.open();
    retain(&store, u64::MAX, 100_000, HOUR).await;
    let text = "x".repeat(1000);
    record(&store, 300, NOW, &text).await;
    let bytes: usize = kept(&store).await.iter().map(|event| event.text.len()).sum();
    assert!((80_000..=100_000).contains(&bytes), "{bytes}");

    retain(&store, u64::MAX, 1, HOUR).await;
    for _ in 0..4 {
        store.record(event("short")).await.expect("is written");
    }
    let kept = kept(&store).await;
    assert_eq!((kept.len(), kept[0].id), (1, 304));
}

#[tokio::test]
async fn what_is_too_old_goes_in_small_steps() {
    let place = Place::new();
    let store = place.open();
    retain(&store, u64::MAX, u64::MAX, HOUR).await;
    record(&store, 640, NOW, "old").await;
    let later = NOW.plus(HOUR + Duration::from_millis(1));
    let mut before = 640;
    for _ in 0..20 {
        record(&store, 64, later, "new").await;
        let old = kept(&store).await.iter().filter(|event| event.text == "old").count();
        assert!(before - old <= 64, "one write must not have much to do: {before} to {old}");
        before = old;
    }
    assert_eq!(before, 0);
    assert_eq!(kept(&store).await.len(), 20 * 64);
}

#[tokio::test]
async fn a_clock_that_jumps_does_not_empty_it() {
    let place = Place::new();
    let store = place.open();
    record(&store, 640, NOW, "before").await;
    record(&store, 64, NOW.plus(Duration::from_hours(24 * 365)), "ahead").await;
    record(&store, 640, NOW, "after").await;
    let kept = kept(&store).await;
    let count = |text: &str| kept.iter().filter(|event| event.text == text).count();
    assert_eq!((count("before"), count("ahead"), count("after")), (576, 64, 640));
}

#[tokio::test]
async fn what_it_holds_is_known_after_a_failure_and_after_a_restart() {
    let place = Place::new();
    let store = place.open();
    retain(&store, 100, u64::MAX, HOUR).await;
    record(&store, 90, NOW, "x").await;
    // Were these counted, half of the others would go.
    for _ in 0..5 {
        let failing = store.submit(|writing| {
            (0..10).try_for_each(|_| super::super::events::record(writing, event("half")).map(drop))?;
            sql("INSERT INTO nowhere VALUES (1)")(writing)
        });
        assert!(failing.await.is_err());
    }
    record(&store, 10, NOW, "x").await;
    assert_eq!(kept(&store).await.len(), 100);
    drop(store);
    let store = place.open();
    retain(&store, 100, u64::MAX, HOUR).await;
    record(&store, 1, NOW, "x").await;
    assert!(kept(&store).await.len() <= 100);
}

#[tokio::test]
async fn a_text_without_end_is_cut() {
    let place = Place::new();
    let store = place.open();
    store.record(event(&"\u{e9}".repeat(40_000))).await.expect("is written");
    store.record(event(&format!("x{}", "\u{e9}".repeat(40_000)))).await.expect("is written");
    let lengths: Vec<_> = kept(&store).await.iter().map(|event| event.text.len()).collect();
    assert_eq!(lengths, [65_536, 65_535], "at the end of a character");
}

#[test]
fn what_it_holds_and_what_was_lost_is_counted() {
    let (store, disk) = Store::in_memory().expect("opens");
    let (rows, dropped) =
        (|store: &Store| store.figures().journal_rows, |store: &Store| store.figures().events_dropped);
    drop(store.record(event("kept")));
    drop(store.rebuilt(Some(event("kept, too"))));
    disk.commit_now();
    assert_eq!((rows(&store), dropped(&store)), (2, 0));
    disk.set_full(true);
    drop(store.record(event("lost")));
    drop(store.rebuilt(Some(event("lost, too"))));
    drop(store.ping());
    disk.commit_now();
    assert_eq!((rows(&store), dropped(&store)), (2, 2), "what tells of nothing loses nothing");
    disk.set_full(false);
    drop(store.remove_lease(&lease(1).token, NOW, Some(event("of nothing"))));
    drop(store.add_lease(&key(7), &lease(1), &BuildTimes::default(), Some(event("of no project"))));
    disk.commit_now();
    assert_eq!((rows(&store), dropped(&store)), (2, 2), "what did not happen is not told of");
    for _ in 0..2049 {
        drop(store.record(event("x")));
    }
    disk.commit_now();
    assert_eq!((rows(&store), dropped(&store)), (2050, 3), "one was not even taken");
}

#[tokio::test]
async fn the_events_of_a_project_are_found_without_walking_the_journal() {
    let place = Place::new();
    let store = place.open();
    for number in 0..30 {
        let of = key(number % 3);
        store.record(NewEvent { key: (number % 5 > 0).then_some(of), ..event("x") }).await.expect("is written");
    }
    let ids = |events: Vec<Event>| events.into_iter().map(|event| event.id).collect::<Vec<_>>();
    assert_eq!(ids(store.later_events_of(&key(1), 5, 3).await.expect("reads")), [8, 14, 17]);
    assert_eq!(ids(store.later_events_of(&key(1), 23, 9).await.expect("reads")), [29]);
    assert_eq!(ids(store.events_of(&key(1), 2).await.expect("reads")), [23, 29]);
    // Not only while there are few, and nobody has counted them.
    let connection = rusqlite::Connection::open(place.path()).expect("opens");
    for (sql, found) in [
        (rows::later_of(), "SEARCH events USING INDEX events_of_project (key=? AND rowid>?)"),
        (rows::latest_of(), "SEARCH events USING INDEX events_of_project (key=?)"),
    ] {
        let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).expect("is SQL");
        let plan = statement
            .query_map(rusqlite::params_from_iter(["p1", "0"].iter().take(sql.matches('?').count())), |row| row.get(3));
        let plan: Vec<String> = plan.expect("is planned").collect::<Result<_, _>>().expect("reads");
        assert_eq!(plan, [found], "{sql}");
    }
}
