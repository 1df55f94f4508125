//! `/v1`: projects, events, and the document that describes all of it.

use kiln_domain::Timestamp;
use kiln_wire::{ApiError, EventView};

use super::*;
use crate::store::NewEvent;

#[tokio::test]
async fn projects_are_listed_shown_and_stopped() {
    let server = Server::start().await;
    let known = format!("/v1/projects/{}", view().key);
    assert_eq!(server.get("/v1/projects").await.json::<Vec<ProjectView>>(), [view()]);
    assert_eq!(server.get(&known).await.json::<ProjectView>(), view());
    assert_eq!(server.post(&format!("{known}/stop"), "").await.status, 204);
    for (path, status, words) in [
        ("/v1/projects/p0123456789abcdef", 404, "there is no project p0123456789abcdef"),
        ("/v1/projects/nonsense", 400, "is not a key"),
        ("/v1/nothing", 404, "openapi"),
    ] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, status, "{path}");
        assert!(answer.json::<ApiError>().error.contains(words), "{answer:?}");
    }
    let answer = server.post("/v1/projects", "").await;
    assert_eq!(answer.status, 405);
    answer.json::<ApiError>();
    for (error, status) in [
        (StopError::Unknown(view().key.parse().expect("a key")), 404),
        (StopError::Busy("1 live lease(s)".to_owned()), 409),
        (StopError::Failed("it hangs".to_owned()), 500),
    ] {
        *server.heart.stop_fails.lock().expect("no panic") = Some(error);
        let answer = server.post(&format!("{known}/stop"), "").await;
        assert_eq!(answer.status, status);
        answer.json::<ApiError>();
    }
    let fault = server.post("/v1/projects/forkpbcce5b6205652dd7/stop", "").await;
    assert_eq!(fault.status, 500, "a fault in one request ends that request");
    assert_eq!(server.get("/nothing").await.status, 404);
}

async fn record(server: &Server, text: &str) -> i64 {
    let key: Option<kiln_domain::Key> = view().key.parse().ok();
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
        drop(server.store.record(NewEvent::new(Timestamp::EPOCH, None, "many", number.to_string())));
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
    };
    assert_eq!(events.last(), Some(&last));
    assert!(answer.body.contains("id: 1201"));
    assert_eq!(parse(&server.get("/v1/events?follow=false&after=1199").await.body).len(), 2);
    assert_eq!(parse(&server.get("/v1/events?follow=false&after=9999").await.body).len(), 0);
    for query in ["after=x", "follow=perhaps", "unknown=1"] {
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

/// `KILN_BLESS=1 cargo test openapi` writes it anew.
#[tokio::test]
async fn the_openapi_document_is_the_one_that_is_checked_in() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/openapi.json");
    if std::env::var_os("KILN_BLESS").is_some() {
        std::fs::write(path, openapi()).expect("writes");
    }
    let checked_in = std::fs::read_to_string(path).expect("docs/openapi.json is there");
    assert!(
        checked_in == openapi(),
        "docs/openapi.json is stale: KILN_BLESS=1 cargo test openapi, and look at the diff"
    );
    let server = Server::start().await;
    let document = server.get("/v1/openapi.json").await.json::<serde_json::Value>();
    assert_eq!(document, serde_json::from_str::<serde_json::Value>(&checked_in).expect("JSON"));
    for path in ["/route", "/prewarm", "/complete", "/v1/projects", "/v1/projects/{key}", "/v1/events"] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
}
