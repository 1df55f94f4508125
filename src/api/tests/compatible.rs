//! The reference's vectors for `/route`, `/prewarm` and `/complete`.

use std::time::Instant;

use super::*;

#[tokio::test]
async fn a_route_is_answered_in_the_reference_s_words() {
    let server = Server::start().await;
    let answer = server.post("/route", BODY).await;
    assert_eq!(answer.status, 200);
    let fields: serde_json::Value = answer.json();
    assert_eq!(
        fields,
        serde_json::json!({
            "key": "pbcce5b6205652dd7", "buildId": "abababababababab", "endpoint": "tcp://10.83.0.2:1234",
            "leaseId": LeaseToken::from_random(TOKEN).hash(),
            "namespace": "", "ready": true, "serverName": "buildkitd-pbcce5b6205652dd7.kiln.internal", "generation": 1,
        })
    );
    server.settled(1).await;
    assert_eq!(server.heart.released.load(Ordering::SeqCst), 0);
    let all = r#"{"repo":"github.com/org/repo","name":"api","target":"runtime","arch":"arm64","untrusted":true,"credential":true}"#;
    assert_eq!(server.post("/route", all).await.status, 200);
    let routes = server.heart.routes.lock().expect("no panic");
    assert_eq!(routes[0].1, RouteOptions { caller: own_caller(), ..RouteOptions::default() });
    assert_eq!(Key::of(&routes[1].0).as_str(), "paff9e28c0942ab63");
    assert_eq!(
        routes[1].1,
        RouteOptions {
            caller: Caller { untrusted: true, ..own_caller() },
            credential: true,
            ..RouteOptions::default()
        }
    );
}

#[tokio::test]
async fn what_is_not_a_route_is_refused() {
    let server = Server::start().await;
    let long = |field: &str, bytes: usize| {
        let text = "a".repeat(bytes);
        match field {
            "repo" => format!(r#"{{"repo":"{text}","arch":"amd64"}}"#),
            _ => format!(r#"{{"repo":"github.com/o/r","{field}":"{text}","arch":"amd64"}}"#),
        }
    };
    let arch = |arch: &str| format!(r#"{{"repo":"github.com/o/r"{arch}}}"#);
    for (body, words) in [
        (r#"{"arch":"amd64"}"#.to_owned(), "repo is required"),
        (r#"{"repo":" / ","arch":"amd64"}"#.to_owned(), "repo is required"),
        (long("repo", 513), "repo is too long"),
        (long("name", 129), "name is too long"),
        (long("target", 129), "target is too long"),
        (arch(r#","arch":"riscv""#), "unsupported arch"),
        (arch(r#","arch":"x""#), "unsupported arch"),
        (arch(""), "unsupported arch"),
        (arch(r#","arch":"amd64","extra":true"#), "unknown field `extra`"),
        (BODY.to_owned() + BODY, "trailing characters"),
        ("not JSON".to_owned(), "not what this endpoint takes"),
        (String::new(), "not what this endpoint takes"),
        (BODY.to_owned() + &" ".repeat(8193), "too large"),
    ] {
        for path in ["/route", "/prewarm"] {
            let answer = server.post(path, &body).await;
            let beginning = &body[..body.len().min(60)];
            assert_eq!(answer.status, 400, "{beginning}: {answer:?}");
            assert!(answer.body.contains(words) && answer.is_plain(), "{beginning}: {answer:?}");
        }
    }
    for body in [long("repo", 512), long("name", 128), long("target", 128), arch(r#","arch":"arm64""#)] {
        assert_eq!(server.post("/route", &body).await.status, 200, "{body}");
    }
    let padded = BODY.to_owned() + &" ".repeat(8192 - BODY.len());
    assert_eq!(server.post("/route", &padded).await.status, 200, "8192 bytes are accepted");
}

#[tokio::test]
async fn the_method_comes_before_the_body() {
    let server = Server::start().await;
    for path in ["/route", "/prewarm", "/complete"] {
        for method in ["GET", "PUT", "DELETE"] {
            let answer = exchange(server.connect().await, &request(method, path, "not JSON")).await;
            assert_eq!((answer.status, answer.body.trim()), (405, "POST only"), "{method} {path}");
            assert!(answer.is_plain() && answer.head.contains("allow: post"), "{answer:?}");
        }
    }
    for method in ["GET", "POST", "DELETE", "PATCH"] {
        let answer = exchange(server.connect().await, &request(method, "/healthz", "")).await;
        assert_eq!((answer.status, answer.body.as_str()), (200, ""), "{method}");
    }
    assert!(server.heart.routes.lock().expect("no panic").is_empty());
}

#[tokio::test]
async fn each_failure_has_its_status() {
    let server = Server::start().await;
    let later = |why: &str| RouteError::Unavailable { why: why.to_owned(), retry_after: Duration::from_millis(7500) };
    let queued = RouteError::Queued { position: 3, length: 7, why: "two daemons start already".to_owned() };
    let full =
        RouteError::NotAdmitted { why: "3% of the disk is free".to_owned(), retry_after: Duration::from_mins(1) };
    let many = RouteError::TooManyLeases { key: view().key.parse().expect("a key"), live: 64, limit: 64 };
    for (error, status, words) in [
        (RouteError::Refused("fork".to_owned()), 403, "fork"),
        (RouteError::OtherIdentity("another build".to_owned()), 403, "another build"),
        (RouteError::Malformed("the pull request contains ' '".to_owned()), 400, "the pull request contains"),
        (RouteError::TooManyForks("16 forks are at work".to_owned()), 429, "16 forks are at work"),
        (RouteError::Gone, 410, "route again without buildId"),
        (RouteError::Ensure("no room".to_owned()), 500, "ensure project: no room"),
        (later("Incus is away"), 503, "Incus is away"),
        (RouteError::NotReady("it exited".to_owned()), 504, "daemon not ready: it exited"),
        (RouteError::Busy, 429, "try again"),
        (queued, 503, "place 3 of 7: two daemons start already"),
        (full, 503, "not started: 3% of the disk is free"),
        (many, 429, "64 builds hold pbcce5b6205652dd7 already, and 64 may"),
    ] {
        *server.heart.route_fails.lock().expect("no panic") = Some(error);
        let answer = server.post("/route", BODY).await;
        assert_eq!(answer.status, status);
        assert!(answer.body.contains(words) && answer.is_plain(), "{answer:?}");
        let says_when = answer.header("retry-after").is_some_and(|text| text.parse::<u64>().is_ok_and(|n| n > 0));
        assert_eq!(says_when, matches!(status, 429 | 503 | 504), "{answer:?}");
        if answer.body.contains("Incus") {
            assert_eq!(answer.header("retry-after"), Some("8"), "rounded up");
        }
    }
}

#[tokio::test]
async fn a_build_says_whose_it_is_and_of_which_branch() {
    let server = Server::start().await;
    let with = |rest: &str| format!(r#"{{"repo":"github.com/org/repo","arch":"amd64",{rest}}}"#);
    let branch = |length: usize| format!(r#""branch":"{}""#, "b".repeat(length));
    let caller = |pull_request: Option<&str>, branch: Option<&str>| Caller {
        untrusted: pull_request.is_some(),
        pull_request: pull_request.map(str::to_owned),
        branch: branch.map(str::to_owned),
        ..own_caller()
    };
    for (rest, expected) in [
        (r#""untrusted":true,"pullRequest":"12","branch":"feature/x""#, caller(Some("12"), Some("feature/x"))),
        (r#""untrusted":true,"pullRequest":null"#, Caller { untrusted: true, ..own_caller() }),
        (r#""pullRequest":null,"branch":null"#, own_caller()),
        (r#""branch":"""#, own_caller()),
        (&branch(256), caller(None, Some(&"b".repeat(256)))),
    ] {
        assert_eq!(server.post("/route", &with(rest)).await.status, 200, "{rest}");
        let asked = server.heart.routes.lock().expect("no panic").pop().expect("asked");
        assert_eq!(asked.1.caller, expected, "{rest}");
    }
    for (rest, words) in [
        (r#""pullRequest":"12""#, "send untrusted: true with it"),
        (r#""untrusted":false,"pullRequest":"""#, "send untrusted: true with it"),
        (r#""untrusted":true,"pullRequest":12"#, "invalid type"),
        (r#""untrusted":true,"pullRequest":["12"]"#, "invalid type"),
        (r#""untrusted":true,"pull_request":"12""#, "unknown field `pull_request`"),
        (r#""branch":7"#, "invalid type"),
        (&branch(257), "branch is too long: 257 bytes, at most 256"),
        (r#""branch":"a\nb""#, "branch contains"),
    ] {
        for path in ["/route", "/prewarm"] {
            let answer = server.post(path, &with(rest)).await;
            assert!(answer.status == 400 && answer.is_plain(), "{path} {rest}: {answer:?}");
            assert!(answer.body.contains(words), "{path} {rest}: {answer:?}");
        }
    }
    assert!(server.heart.routes.lock().expect("no panic").is_empty(), "what is malformed is not asked for");
}

#[tokio::test]
async fn a_prewarm_has_no_lease() {
    let server = Server::start().await;
    let answer = server.post("/prewarm", BODY).await;
    assert_eq!(answer.status, 202);
    let response: RouteResponse = answer.json();
    assert_eq!((response.build_id, response.ready), (None, false));
    let untrusted = r#"{"repo":"github.com/org/repo","arch":"amd64","untrusted":true}"#;
    assert_eq!(server.post("/prewarm", untrusted).await.status, 403);
    let resumed = r#"{"repo":"github.com/org/repo","arch":"amd64","buildId":"abababababababab"}"#;
    let answer = server.post("/prewarm", resumed).await;
    assert!(answer.status == 400 && answer.body.contains("buildId is for /route"), "{answer:?}");
}

#[tokio::test]
async fn a_completion_names_its_build() {
    let server = Server::start().await;
    let named = |key: &str, id: &str| format!(r#"{{"key":"{key}","buildId":"{id}"}}"#);
    let (key, id) = ("pbcce5b6205652dd7", "abababababababab");
    for (body, words) in [
        ("{}".to_owned(), "key is required"),
        (named("", id), "key is required"),
        (named("   ", id), "key is required"),
        (named(&"k".repeat(65), id), "key is too long"),
        (format!(r#"{{"key":"{key}"}}"#), "buildId is required"),
        (named(key, ""), "buildId is required"),
        (named(key, "ababababababab"), "malformed buildId"),
        (named(key, "abababababababab1"), "malformed buildId"),
        (named(key, "abababababababag"), "malformed buildId"),
        (format!(r#"{{"key":"{key}","buildId":"{id}","extra":1}}"#), "unknown field"),
        (named(key, id) + "{}", "trailing"),
    ] {
        let answer = server.post("/complete", &body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(answer.body.contains(words) && answer.is_plain(), "{body}: {answer:?}");
    }
    for (key, id) in [("pdeadbeef", id), (&"k".repeat(64), id), (key, id), (key, "0123456789ABCDEF")] {
        let answer = server.post("/complete", &named(key, id)).await;
        assert_eq!((answer.status, answer.body.as_str()), (204, ""), "{key} {id}");
    }
    assert_eq!(server.heart.completes.lock().expect("no panic").len(), 2, "what is no key is not asked for");
    let later = CompleteError::Unavailable { why: "full".to_owned(), retry_after: Duration::ZERO };
    *server.heart.complete_fails.lock().expect("no panic") = Some(later);
    let answer = server.post("/complete", &named(key, id)).await;
    assert_eq!(answer.status, 503);
    assert!(answer.head.contains("retry-after: 1"), "{answer:?}");
}

#[tokio::test]
async fn a_nameless_completion_is_for_the_switch_to_allow() {
    let settings = Settings { nameless_release: true, ..SETTINGS };
    let server = Server::with_settings(FakeHeart::default(), settings).await;
    for body in
        [r#"{"key":"pbcce5b6205652dd7"}"#, r#"{"key":"pbcce5b6205652dd7","buildId":""}"#, r#"{"key":"nonsense"}"#]
    {
        assert_eq!(server.post("/complete", body).await.status, 204, "{body}");
    }
    assert_eq!(server.heart.oldest_released.load(Ordering::SeqCst), 2, "what is no key is not asked for");
    let named = r#"{"key":"pbcce5b6205652dd7","buildId":"abababababababab"}"#;
    assert_eq!(server.post("/complete", named).await.status, 204);
    assert_eq!(server.heart.oldest_released.load(Ordering::SeqCst), 2, "a name is a name");
    for body in [r#"{"key":""}"#, r#"{"key":"pbcce5b6205652dd7","buildId":"x"}"#] {
        assert_eq!(server.post("/complete", body).await.status, 400, "{body}");
    }
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_no_lease() {
    let server = Server::with(FakeHeart { route_waits: true, ..FakeHeart::default() }).await;
    let mut stream = server.connect().await;
    stream.write_all(request("POST", "/route", BODY).as_bytes()).await.expect("sends");
    server.heart.entered.notified().await;
    drop(stream);
    let released = || server.heart.released.load(Ordering::SeqCst) == 1;
    eventually("the release", released, &server.heart.changed).await;
    assert_eq!(server.heart.delivered.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_shutdown_lets_requests_end_and_cuts_off_those_that_do_not() {
    let server = Server::with(FakeHeart { route_waits: true, ..FakeHeart::default() }).await;
    let ends = tokio::spawn(exchange(server.connect().await, request("POST", "/route", BODY).leak()));
    server.heart.entered.notified().await;
    let mut stays = server.connect().await;
    stays.write_all(request("POST", "/route", BODY).as_bytes()).await.expect("sends");
    server.heart.entered.notified().await;
    let begin = Instant::now();
    server.shutdown.cancel();
    server.heart.go.notify_one();
    assert_eq!(ends.await.expect("runs").status, 200);
    tokio::time::timeout(PATIENCE, server.running).await.expect("it ends").expect("without a panic");
    assert!(begin.elapsed() >= Duration::from_secs(4), "the other one had its grace");
    assert_eq!(server.heart.released.load(Ordering::SeqCst), 1);
    assert!(!server.directory.path().join("kiln.sock").exists(), "the socket is gone");
}
