//! Routes that do not wait, or not long, and go on later.

use super::*;

fn seconds(options: &RouteOptions) -> Option<u64> {
    options.wait.map(|wait| wait.as_secs())
}

#[tokio::test]
async fn a_route_that_is_not_ready_goes_on_with_its_lease() {
    let server = Server::with(FakeHeart { not_ready: AtomicUsize::new(2), ..FakeHeart::default() }).await;
    let answer = server.post("/route?wait=0", BODY).await;
    assert_eq!((answer.status, answer.header("retry-after")), (202, Some("1")), "{answer:?}");
    assert_eq!(answer.header("preference-applied"), None);
    let fields: serde_json::Value = answer.json();
    assert_eq!(fields["ready"], false);
    assert_eq!(fields["leaseId"], LeaseToken::from_random(TOKEN).hash().as_str());
    assert_eq!(
        fields["status"],
        serde_json::json!({"phase": "starting", "reason": "the host is busy", "queuePosition": 2, "queueLength": 5})
    );
    let build_id = fields["buildId"].as_str().expect("a token");
    let again = format!(r#"{{"repo":"github.com/org/repo","arch":"amd64","buildId":"{build_id}"}}"#);
    assert_eq!(server.post("/route?wait=10", &again).await.status, 202);
    let answer = server.post("/route?wait=10", &again).await;
    assert_eq!(answer.status, 200);
    let response: RouteResponse = answer.json();
    assert!(response.ready && response.status.is_none(), "{response:?}");
    let resumed = RouteOptions {
        wait: Some(Duration::from_secs(10)),
        resume: Some(LeaseToken::from_random(TOKEN)),
        caller: own_caller(),
        ..RouteOptions::default()
    };
    {
        let routes = server.heart.routes.lock().expect("no panic");
        assert_eq!((seconds(&routes[0].1), routes[0].1.resume.is_none()), (Some(0), true));
        assert_eq!((&routes[1].1, &routes[2].1), (&resumed, &resumed));
    }
    *server.heart.route_fails.lock().expect("no panic") = Some(RouteError::Gone);
    let answer = server.post("/route?wait=10", &again).await;
    assert!(answer.status == 410 && answer.is_plain() && !answer.body.contains(build_id), "{answer:?}");
    // Going on does not need a wait.
    assert_eq!(server.post("/route", &again).await.status, 200);
    let text = server.metrics.text(crate::metrics::Format::Prometheus).expect("text");
    for line in ["{outcome=\"waiting\"} 2", "{outcome=\"ready\"} 2", "{outcome=\"gone\"} 1"] {
        assert!(text.contains(&format!("kiln_routes_total{line}\n")), "{line}: {text}");
    }
}

#[tokio::test]
async fn preferences_are_applied_and_said_so() {
    let server = Server::start().await;
    for (path, prefer, wait, applied) in [
        ("/route", "Prefer: respond-async", Some(0), Some("respond-async")),
        ("/route", "Prefer: wait=7", Some(7), Some("wait=7")),
        ("/route", "Prefer: respond-async, wait=7", Some(7), Some("respond-async, wait=7")),
        ("/route?wait=3", "Prefer: wait=7", Some(3), None),
        ("/route", "Prefer: wait=soon", None, None),
        ("/route", "X-Other: 1", None, None),
        ("/route?wait=180", "X-Other: 1", Some(180), None),
    ] {
        let answer = server.post_with(path, prefer, BODY).await;
        assert_eq!(answer.status, 200, "{path} {prefer}: {answer:?}");
        assert_eq!(answer.header("preference-applied"), applied, "{path} {prefer}");
        let asked = server.heart.routes.lock().expect("no panic").pop().expect("was asked");
        assert_eq!(seconds(&asked.1), wait, "{path} {prefer}");
    }
}

#[tokio::test]
async fn what_is_no_wait_is_refused() {
    let server = Server::start().await;
    let with_id = |id: &str| format!(r#"{{"repo":"github.com/org/repo","arch":"amd64","buildId":{id}}}"#);
    for (path, body, words) in [
        ("/route?wait=181", BODY.to_owned(), "from 0 to 180"),
        ("/route?wait=-1", BODY.to_owned(), "invalid digit"),
        ("/route?wait=1.5", BODY.to_owned(), "invalid digit"),
        ("/route?wait=", BODY.to_owned(), ""),
        ("/route?wait=soon", BODY.to_owned(), "invalid digit"),
        ("/route?wait=1&wait=2", BODY.to_owned(), "duplicate"),
        ("/route?wiat=1", BODY.to_owned(), "unknown field"),
        ("/route", with_id("\"\""), "malformed buildId"),
        ("/route", with_id("\"x\""), "malformed buildId"),
        ("/route?wait=0", with_id("\"ababababababab\""), "malformed buildId"),
        ("/route", with_id("7"), "invalid type"),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path} {body}: {answer:?}");
        assert!(answer.body.contains(words) && answer.is_plain(), "{path} {body}: {answer:?}");
    }
    assert!(server.heart.routes.lock().expect("no panic").is_empty());
    assert_eq!(server.post("/route", &with_id("null")).await.status, 200, "null is none, as in /complete");
}
