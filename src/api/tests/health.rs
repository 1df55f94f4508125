//! `/healthz`, `/readyz`, `/metrics`.

use super::*;

#[tokio::test]
async fn alive_and_ready_are_two_things() {
    let server = Server::start().await;
    let answer = server.get("/readyz").await;
    assert_eq!(answer.status, 200);
    let readiness: Readiness = answer.json();
    assert!(readiness.ready && readiness.checks.len() == 2, "{readiness:?}");
    *server.heart.ill.lock().expect("no panic") = Some("Incus does not answer: start it".to_owned());
    let answer = server.get("/readyz").await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    let readiness: Readiness = answer.json();
    assert_eq!(readiness.checks[1], Check::ill("host", "Incus does not answer: start it"));
    assert_eq!(server.get("/healthz").await.status, 200, "it lives all the same");
    let answer = server.post("/readyz", "").await;
    assert!(answer.status == 405 && answer.is_plain() && !answer.body.contains("POST only"), "{answer:?}");
}

#[tokio::test(start_paused = true)]
async fn a_check_that_hangs_is_an_answer() {
    let server = Server::start().await;
    server.heart.hangs.store(true, Ordering::SeqCst);
    let readiness: Readiness = server.get("/readyz").await.json();
    assert!(!readiness.ready, "{readiness:?}");
    assert!(readiness.checks[0].why.as_deref().is_some_and(|why| why.contains("within 5 s")), "{readiness:?}");
}

#[tokio::test]
async fn figures_come_in_the_format_that_is_accepted() {
    let server = Server::start().await;
    assert_eq!(server.post("/route", BODY).await.status, 200);
    *server.heart.route_fails.lock().expect("no panic") = Some(RouteError::Busy);
    assert_eq!(server.post("/route", BODY).await.status, 429);
    let plain = server.get("/metrics").await;
    assert_eq!(plain.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    for line in ["kiln_routes_total{outcome=\"ready\"} 1", "kiln_routes_total{outcome=\"too_many\"} 1"] {
        assert!(plain.body.lines().any(|shown| shown == line), "{line}: {}", plain.body);
    }
    let request = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
                   Accept: application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3\r\n\r\n";
    let open = exchange(server.connect().await, request).await;
    assert_eq!(open.header("content-type"), Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert!(open.body.ends_with("# EOF\n"), "{}", open.body);
}

#[tokio::test]
async fn a_scrape_that_hangs_hangs_alone() {
    let server = Server::start().await;
    let (release, hold) = std::sync::mpsc::channel::<()>();
    let hold = Mutex::new(hold);
    let entered = Arc::new(Notify::new());
    let enters = entered.clone();
    server.metrics.read_level(crate::metrics::Level::Leases, move || {
        enters.notify_one();
        hold.lock().expect("no panic").recv().ok().map(|()| 1.0)
    });
    let mut first = server.connect().await;
    first.write_all(request("GET", "/metrics", "").as_bytes()).await.expect("sends");
    entered.notified().await;
    let second = server.get("/metrics").await;
    assert_eq!((second.status, second.header("retry-after")), (503, Some("1")), "{second:?}");
    assert_eq!(server.get("/healthz").await.status, 200);
    drop(release);
    let mut text = String::new();
    tokio::time::timeout(PATIENCE, first.read_to_string(&mut text)).await.expect("in time").expect("reads");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}
