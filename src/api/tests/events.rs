//! `/v1/events`: the journal, and what happens.

use kiln_domain::Timestamp;
use kiln_wire::{ApiError, EventView};

use super::*;
use crate::store::NewEvent;

async fn record(server: &Server, text: &str) -> i64 {
    let key = view().key.parse().ok();
    let event = NewEvent::new(Timestamp::from_millis(1_700_000_000_123), key.as_ref(), "test", text);
    server.store.record(event).await.expect("is written")
}

/// The events in a stream so far.
fn parse(text: &str) -> Vec<EventView> {
    text.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|d| serde_json::from_str(d).expect("JSON"))
        .collect()
}

#[tokio::test]
async fn the_journal_is_read_to_its_end() {
    let server = Server::start().await;
    for number in 1..=1200 {
        drop(server.store.record(NewEvent::new(Timestamp::EPOCH, None, "many", format!("{number}"))));
    }
    record(&server, "the last").await;
    let answer = server.get("/v1/events?follow=false").await;
    assert!(answer.head.contains("content-type: text/event-stream"), "{}", answer.head);
    let events = parse(&answer.body);
    assert!(events.iter().map(|e| e.id).eq(1..=1201), "all of them, in order, over several pages");
    let last = EventView {
        id: 1201,
        at: "2023-11-14T22:13:20.123Z".to_owned(),
        key: Some(view().key),
        kind: "test".to_owned(),
        text: "the last".to_owned(),
        ..EventView::default()
    };
    assert_eq!(events.last(), Some(&last));
    assert!(answer.body.contains("id: 1201"));
    assert_eq!(parse(&server.get("/v1/events?follow=false&after=1199").await.body).len(), 2);
    assert_eq!(parse(&server.get("/v1/events?follow=false&after=1201").await.body).len(), 0);
    for query in
        ["after=x", "after=-1", "follow=perhaps", "unknown=1", "key=nonsense", "key=", "after=9999999999999999999"]
    {
        let answer = server.get(&format!("/v1/events?{query}")).await;
        assert_eq!(answer.status, 400, "{query}");
        answer.json::<ApiError>();
    }
}

#[tokio::test]
async fn a_follower_gets_what_it_missed_and_what_comes() {
    let server = Server::start().await;
    for text in ["one", "two", "three"] {
        record(&server, text).await;
    }
    let mut stream = server.connect().await;
    let request = "GET /v1/events?after=0 HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 1\r\n\r\n";
    stream.write_all(request.as_bytes()).await.expect("sends");
    let mut seen = String::new();
    let mut until = async |text: &str, seen: &mut String| {
        let reading = async {
            while !seen.contains(text) {
                let mut part = [0; 4096];
                let read = stream.read(&mut part).await.expect("reads");
                assert!(read > 0, "closed after {seen}");
                seen.push_str(&String::from_utf8_lossy(&part[..read]));
            }
        };
        tokio::time::timeout(PATIENCE, reading).await.expect("it comes in time");
    };
    until("\"three\"", &mut seen).await;
    // More than the broadcast holds, at once: the follower lags and reads the journal.
    for number in 4..=3000 {
        let event = NewEvent::new(Timestamp::EPOCH, None, "burst", format!("<{number}>"));
        while server.store.record(event.clone()).await.is_err() {}
    }
    until("<3000>", &mut seen).await;
    let ids: Vec<i64> = seen.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok()).collect();
    assert!(ids.iter().copied().eq(2..=3000), "each once and in order, from the one after Last-Event-ID");
    server.shutdown.cancel();
    tokio::time::timeout(PATIENCE, server.running).await.expect("followers do not delay the end").expect("no panic");
}

/// The database was lost since, and ids begin at 1 again.
#[tokio::test]
async fn a_follower_from_before_the_journal_begins_anew_with_it() {
    let server = Server::start().await;
    record(&server, "the first").await;
    let after = "GET /v1/events?after=53 HTTP/1.1\r\nHost: x\r\n\r\n";
    let again = "GET /v1/events HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 53\r\n\r\n";
    for (request, next) in [(after, "<2>"), (again, "<3>")] {
        let mut stream = server.connect().await;
        stream.write_all(request.as_bytes()).await.expect("sends");
        let mut seen = String::new();
        let reading = async |until: &str, seen: &mut String, stream: &mut UnixStream| {
            while !seen.contains(until) {
                let mut part = [0; 4096];
                let read = stream.read(&mut part).await.expect("reads");
                assert!(read > 0, "closed after {seen}");
                seen.push_str(&String::from_utf8_lossy(&part[..read]));
            }
        };
        let first = reading("the first", &mut seen, &mut stream);
        tokio::time::timeout(PATIENCE, first).await.expect("what it cannot have seen");
        record(&server, next).await;
        let then = reading(next, &mut seen, &mut stream);
        tokio::time::timeout(PATIENCE, then).await.expect("and what follows");
    }
    assert_eq!(parse(&server.get("/v1/events?follow=false&after=53").await.body).len(), 3);
}

#[tokio::test]
async fn followers_do_not_take_all_connections() {
    let server = Server::start().await;
    let mut followers = Vec::new();
    for _ in 0..FOLLOWERS {
        let mut stream = server.connect().await;
        stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("sends");
        stream.read_exact(&mut [0; 15]).await.expect("is answered");
        followers.push(stream);
    }
    assert_eq!(server.get("/v1/events").await.status, 503);
    assert_eq!(server.get("/healthz").await.status, 200);
}

#[tokio::test]
async fn a_project_s_own_events() {
    let server = Server::start().await;
    let key = |text: &str| text.parse::<Key>().expect("a key");
    let (ours, other) = (key("pbcce5b6205652dd7"), key("p1141ac10afcdcc14"));
    for number in 0..1200 {
        let of = if number % 2 == 0 { Some(other.clone()) } else { None };
        drop(server.store.record(NewEvent::new(Timestamp::EPOCH, of.as_ref(), "many", "")));
    }
    let id = record(&server, "the only one").await;
    let query = format!("follow=false&key={ours}");
    let events = parse(&server.get(&format!("/v1/events?{query}")).await.body);
    assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), [id], "over pages with nothing of it");
    let of_other = parse(&server.get(&format!("/v1/events?follow=false&key={other}")).await.body);
    assert_eq!(of_other.len(), 600);
    assert_eq!(parse(&server.get(&format!("/v1/events?{query}&after={id}")).await.body).len(), 0);

    let mut stream = server.connect().await;
    let request = format!("GET /v1/events?key={ours} HTTP/1.1\r\nHost: x\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sends");
    stream.read_exact(&mut [0; 15]).await.expect("is answered");
    drop(server.store.record(NewEvent::new(Timestamp::EPOCH, Some(&other), "no", "")));
    record(&server, "live").await;
    let mut seen = String::new();
    let reading = async {
        while !seen.contains("live") {
            let mut part = [0; 4096];
            let read = stream.read(&mut part).await.expect("reads");
            assert!(read > 0, "closed after {seen}");
            seen.push_str(&String::from_utf8_lossy(&part[..read]));
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect("it comes in time");
    assert!(!seen.contains("\"no\""), "{seen}");
}
