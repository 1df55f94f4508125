//! A heart that never answers.

use std::collections::BTreeSet;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use tower::ServiceExt as _;

use super::*;

const KEY: &str = "pbcce5b6205652dd7";
const NAMELESS: &str = r#"{"key":"pbcce5b6205652dd7"}"#;
const COMPLETE: &str = r#"{"key":"pbcce5b6205652dd7","buildId":"abababababababab"}"#;
const RENEW: &str = r#"{"buildId":"abababababababab"}"#;
const ORPHAN: &str = r#"{"kind":"volume","name":"x"}"#;

/// Each operation, and the seconds that it may take: over 30 s of `drain` and a `route_wait` of 3 min.
const CALLS: [(&str, &str, &str, u64); 28] = [
    ("POST", "/route", BODY, 210),
    ("POST", "/route?wait=0", BODY, 30),
    ("POST", "/route?wait=170", BODY, 200),
    ("POST", "/prewarm", BODY, 210),
    ("POST", "/complete", COMPLETE, 30),
    ("POST", "/complete", NAMELESS, 30),
    ("GET", "/v1/projects", "", 30),
    ("GET", "/v1/projects/{key}", "", 30),
    ("DELETE", "/v1/projects/{key}", "", 300),
    ("GET", "/v1/projects/{key}/why", "", 30),
    ("PATCH", "/v1/projects/{key}/settings", r#"{"cpus":2}"#, 30),
    ("POST", "/v1/projects/{key}/stop", "", 300),
    ("POST", "/v1/projects/{key}/stop?force=true", "", 300),
    ("POST", "/v1/leases/{id}/renew", RENEW, 30),
    ("GET", "/v1/projects/{key}/cache", "", 30),
    ("POST", "/v1/projects/{key}/snapshots", "", 120),
    ("POST", "/v1/projects/{key}/rollback", "{}", 300),
    ("POST", "/v1/projects/{key}/rollback", r#"{"snapshot":"kiln-000042","force":true}"#, 300),
    ("POST", "/v1/projects/{key}/reset", "{}", 300),
    ("GET", "/v1/caches", "", 600),
    ("GET", "/v1/orphans", "", 30),
    ("POST", "/v1/orphans/adopt", ORPHAN, 30),
    ("POST", "/v1/orphans/remove", ORPHAN, 300),
    ("GET", "/v1/trash", "", 30),
    ("DELETE", "/v1/trash", "", 600),
    ("POST", "/v1/trash/{name}/restore", "", 600),
    ("DELETE", "/v1/trash/{name}", "", 600),
    ("GET", "/readyz", "", 5),
];

fn router() -> Router {
    let heart = FakeHeart { hangs: true.into(), ..FakeHeart::default() };
    let (store, _) = Store::in_memory().expect("opens");
    let settings = Settings { nameless_release: true, ..SETTINGS };
    let callers = Arc::new(Callers::of_one_user(store.clone()));
    Api::new(Arc::new(heart), callers, store, Arc::new(Metrics::new()), settings).router()
}

#[tokio::test(start_paused = true)]
async fn every_call_of_a_heart_that_hangs_is_given_up_and_says_for_what() {
    let router = router();
    let id = LeaseToken::from_random(TOKEN).hash();
    for (method, path, body, seconds) in CALLS {
        let path = path.replace("{key}", KEY).replace("{id}", id.as_str()).replace("{name}", "x");
        let request = Request::builder().method(method).uri(&path).extension(own_source());
        let request = request.body(Body::from(body)).expect("a request");
        let began = tokio::time::Instant::now();
        let answer = tokio::time::timeout(Duration::from_hours(1), router.clone().oneshot(request)).await;
        let answer = answer.unwrap_or_else(|_| panic!("{method} {path} hangs")).expect("infallible");
        assert_eq!((answer.status(), began.elapsed().as_secs()), (StatusCode::SERVICE_UNAVAILABLE, seconds), "{path}");
        assert!(answer.headers().contains_key("retry-after"), "{method} {path}");
        let text = to_bytes(answer.into_body(), 8192).await.expect("a short body");
        let text = String::from_utf8_lossy(&text);
        assert!(text.contains(&format!("{seconds} s")) && text.contains("disk of the host hangs"), "{path}: {text}");
    }
}

#[test]
fn every_operation_is_among_them() {
    let document: serde_json::Value = serde_json::from_str(&openapi()).expect("JSON");
    let paths = document["paths"].as_object().expect("paths");
    let operations = paths.iter().flat_map(|(path, operations)| {
        let methods = operations.as_object().expect("operations").keys();
        methods.map(move |method| (method.to_uppercase(), path.clone()))
    });
    let called: BTreeSet<(String, String)> = CALLS
        .iter()
        .map(|(method, path, ..)| ((*method).to_owned(), path.split('?').next().unwrap_or_default().to_owned()))
        .collect();
    // These do not ask the heart: the store bounds its reads, the gateway knows its connections, a scrape has a bound of its own, and tokens are in memory but for their
    // way to the disk, which is bounded where they are, as a forge's answer is.
    let own = [
        ("GET", "/v1/events"),
        ("GET", "/metrics"),
        ("GET", "/v1/tokens"),
        ("POST", "/v1/tokens"),
        ("DELETE", "/v1/tokens/{id}"),
        ("GET", "/v1/connections"),
        ("POST", "/v1/challenges"),
        ("POST", "/v1/challenges/answer"),
    ];
    let own = own.map(|(method, path)| (method.to_owned(), path.to_owned()));
    let missing: Vec<_> =
        operations.filter(|operation| !called.contains(operation) && !own.contains(operation)).collect();
    assert!(missing.is_empty(), "not tried: {missing:?}");
}

#[tokio::test]
async fn it_lives_though_everything_hangs() {
    let server = Server::with(FakeHeart { hangs: true.into(), ..FakeHeart::default() }).await;
    let mut hanging = Vec::new();
    for _ in 0..100 {
        let mut stream = server.connect().await;
        stream.write_all(request("GET", "/v1/projects/pbcce5b6205652dd7", "").as_bytes()).await.expect("sends");
        hanging.push(stream);
    }
    let all_hang = || server.heart.hanging.load(Ordering::SeqCst) == hanging.len();
    eventually("the hanging", all_hang, &server.heart.changed).await;
    assert_eq!(server.get("/healthz").await.status, 200);
}
