//! A stand-in kilnd on a unix socket, which writes down what it is asked.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post};
use axum::{Json, Router};
use kiln_wire::{
    ApiError, CacheEntry, CacheView, CompleteRequest, Credential, DiskUsage, LeaseView, Origin, ProjectView, Renew,
    RouteRequest, RouteResponse, RouteStatus, Setting, SettingsView, SnapshotView, Storage, Sums, Trashed, UsageView,
    Why,
};

/// What kilnd was asked and buildx was called with, in order.
pub(crate) type Journal = Arc<Mutex<Vec<String>>>;

#[derive(Clone)]
pub(crate) struct Kilnd {
    pub(crate) journal: Journal,
    /// The statuses of the next answers to `/route` and `/complete`; 200 and 204 when there are none left.
    pub(crate) failures: Arc<Mutex<Vec<u16>>>,
    pub(crate) with_credential: bool,
    /// The daemon is ready after so many polls.
    pub(crate) polls: Arc<Mutex<u32>>,
    /// As one that knows neither polls nor renewals nor branches.
    pub(crate) old: bool,
    /// The number of the project's daemon that `/route` chooses; 0 is the first.
    pub(crate) member: u16,
}

pub(crate) fn serve(socket: &Path, kilnd: Kilnd) -> tokio::runtime::Runtime {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let listener = UnixListener::bind(socket).expect("bound");
    listener.set_nonblocking(true).expect("set");
    runtime.spawn(async move {
        let router = Router::new()
            .route("/route", post(route))
            .route("/complete", post(complete))
            .route("/v1/events", get(endless_events))
            .route("/v1/projects", get(|| async { Json(serde_json::json!([])) }))
            .route("/v1/projects/{key}", get(|| async { Json(view()) }).delete(noted))
            .route("/v1/projects/{key}/why", get(why))
            .route("/v1/projects/{key}/settings", patch(set))
            .route("/v1/projects/{key}/stop", post(noted))
            .route("/v1/projects/{key}/cache", get(|| async { Json(cache()) }))
            .route("/v1/projects/{key}/snapshots", post(snapshot))
            .route("/v1/projects/{key}/rollback", post(roll_back))
            .route("/v1/projects/{key}/reset", post(noted))
            .route("/v1/caches", get(|| async { Json(disk_usage()) }))
            .route("/v1/leases/{id}/renew", post(renew))
            .route("/v1/orphans", get(|| async { Json(serde_json::json!([])) }))
            .route("/v1/orphans/adopt", post(taken))
            .route("/v1/orphans/remove", post(noted))
            .route("/v1/trash", get(trash).delete(|| async { Json(serde_json::json!({"removed": 2})) }))
            .route("/v1/trash/{name}", delete(noted))
            .route("/v1/trash/{name}/restore", post(taken))
            .with_state(kilnd);
        let listener = tokio::net::UnixListener::from_std(listener).expect("a listener");
        axum::serve(listener, router).await.expect("served");
    });
    runtime
}

/// Whatever it is: written down, and done.
async fn noted(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> StatusCode {
    noted_as(&kilnd, request).await;
    StatusCode::NO_CONTENT
}

async fn noted_as(kilnd: &Kilnd, request: axum::extract::Request) {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let body = axum::body::to_bytes(request.into_body(), 8192).await.expect("a body");
    let line = format!("{method} {uri} {}", String::from_utf8_lossy(&body));
    kilnd.journal.lock().expect("whole").push(line.trim().to_owned());
}

async fn taken(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> Response {
    noted_as(&kilnd, request).await;
    Json(serde_json::json!({"key": "pbcce5b6205652dd7"})).into_response()
}

async fn set(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> Response {
    noted_as(&kilnd, request).await;
    Json(view()).into_response()
}

fn cache() -> CacheView {
    let snapshot = |name: &str, verdict: &str, bytes| SnapshotView {
        name: name.into(),
        taken: "2020-01-01T00:00:00Z".into(),
        verdict: verdict.into(),
        bytes,
    };
    let usage = UsageView { used: 3 << 30, shared: Some(1 << 30), available: 16 << 30, ..UsageView::default() };
    let snapshots = vec![snapshot("kiln-000041", "good", Some(2048)), snapshot("kiln-000042", "unchecked", None)];
    CacheView { key: "pbcce5b6205652dd7".into(), snapshots, usage: Some(usage), unmeasured: None }
}

fn disk_usage() -> DiskUsage {
    let of = |key: &str, role: &str, repo: Option<&str>| CacheEntry {
        key: key.into(),
        role: role.into(),
        repo: repo.map(str::to_owned),
        usage: cache().usage,
        ..CacheEntry::default()
    };
    let caches =
        vec![of("pbcce5b6205652dd7", "project", Some("h/r\u{1b}[2J")), of("c2pbcce5b6205652dd7", "member", None)];
    let storage = Some(Storage { used: 9 << 30, total: 10 << 30 });
    DiskUsage { sums: Sums::of(&caches), caches, trash: vec![trashed()], storage }
}

/// The first is taken, and nothing is written after it.
async fn snapshot(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> Response {
    let already = kilnd.journal.lock().expect("whole").iter().any(|line| line.ends_with("/snapshots"));
    noted_as(&kilnd, request).await;
    let status = if already { StatusCode::OK } else { StatusCode::CREATED };
    (status, Json(cache().snapshots.remove(1))).into_response()
}

async fn roll_back(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> Response {
    noted_as(&kilnd, request).await;
    Json(serde_json::json!({"snapshot": "kiln-000041"})).into_response()
}

async fn trash() -> Response {
    Json([trashed()]).into_response()
}

fn trashed() -> Trashed {
    Trashed {
        name: "p1-old".into(),
        key: Some("p1".into()),
        repo: Some("h/r\u{1b}[2J".into()),
        since: "2020-01-01T00:00:00Z".into(),
        expires: "2030-01-01T00:00:00Z".into(),
    }
}

async fn why() -> Response {
    let because = vec!["a lease is alive".to_owned()];
    Json(Why { key: "p1".into(), headline: "It is warm.".into(), because, ..Why::default() }).into_response()
}

fn view() -> ProjectView {
    let setting = |value: Option<&str>, origin| Setting { value: value.map(str::to_owned), origin };
    ProjectView {
        key: "pbcce5b6205652dd7".into(),
        phase: "warm".into(),
        settings: Some(SettingsView {
            tier: setting(Some("hot"), Origin::Project),
            idle_window: setting(Some("15m"), Origin::Default),
            volume: setting(Some("20GiB"), Origin::Rule),
            volume_max: setting(Some("40GiB"), Origin::Default),
            memory: setting(None, Origin::Default),
            cpus: setting(Some("4"), Origin::Project),
            processes: setting(None, Origin::Default),
            io: setting(None, Origin::Default),
            entitlements: setting(Some("none"), Origin::Default),
            fan_out: setting(Some("2"), Origin::Default),
        }),
        pending: vec!["cpus: 2 now".into()],
        ..ProjectView::default()
    }
}

async fn renew(
    State(kilnd): State<Kilnd>,
    axum::extract::Path(id): axum::extract::Path<String>,
    Json(request): Json<Renew>,
) -> Response {
    let token: kiln_domain::LeaseToken = request.build_id.parse().expect("a token");
    assert_eq!(token.hash().as_str(), id);
    if kilnd.old {
        return (StatusCode::NOT_FOUND, Json(ApiError { error: "nothing here".into() })).into_response();
    }
    let lease = LeaseView {
        id,
        created: "2026-11-29T00:00:00Z".into(),
        renewed: "2026-11-29T00:00:00Z".into(),
        expires: "2026-11-29T02:00:00Z".into(),
        alive_until: "2026-11-29T00:00:15Z".into(),
    };
    kilnd.note("renew".into()).unwrap_or_else(|| Json(lease).into_response())
}

/// One event, and then nothing for ever.
async fn endless_events() -> Response {
    let event = "data: {\"id\":1,\"at\":\"t\",\"kind\":\"phase\",\"text\":\"warm\"}\n\n";
    let first = futures_util::stream::once(async move { Ok::<_, std::io::Error>(event) });
    let stream = futures_util::StreamExt::chain(first, futures_util::stream::pending());
    axum::body::Body::from_stream(stream).into_response()
}

impl Kilnd {
    fn note(&self, line: String) -> Option<Response> {
        self.journal.lock().expect("whole").push(line);
        let failure = self.failures.lock().expect("whole").pop()?;
        let status = StatusCode::from_u16(failure).expect("a status");
        Some((status, "not now").into_response())
    }
}

async fn route(State(kilnd): State<Kilnd>, headers: HeaderMap, Json(request): Json<RouteRequest>) -> Response {
    if kilnd.old && request.branch.is_some() {
        return (StatusCode::BAD_REQUEST, "unknown field `branch`, expected `repo`\n").into_response();
    }
    let project = kiln_domain::Key::of(&request.spec().expect("a spec"));
    let key = if kilnd.member == 0 { project } else { project.clone_number(kilnd.member) };
    let again = if request.build_id.is_some() { " again" } else { "" };
    let of = |what: &str, name: Option<String>| name.map(|name| format!(" {what} {name}")).unwrap_or_default();
    let of = of("pull request", request.pull_request) + &of("branch", request.branch);
    let line = format!("route {} {} {}{of}{again}", request.repo, request.target, request.untrusted);
    if let Some(failure) = kilnd.note(line) {
        return failure;
    }
    let polled = headers.get("prefer").is_some_and(|value| value.as_bytes().starts_with(b"respond-async, wait="));
    let ready = {
        let mut polls = kilnd.polls.lock().expect("whole");
        let ready = *polls == 0 || !polled;
        *polls = polls.saturating_sub(1);
        ready
    };
    let credential = (ready && kilnd.with_credential).then(|| Credential {
        ca: "CA".into(),
        cert: "CERT".into(),
        key: "KEY".into(),
        expires: "2030-01-01T00:00:00Z".into(),
    });
    let token: kiln_domain::LeaseToken = "00112233aabbccdd".parse().expect("a token");
    let status = RouteStatus {
        phase: "starting".into(),
        reason: "two others start".into(),
        queue_position: Some(2),
        queue_length: Some(3),
    };
    let response = RouteResponse {
        key,
        build_id: Some("00112233aabbccdd".into()),
        endpoint: "tcp://127.0.0.1:1234".into(),
        namespace: "kiln".into(),
        ready,
        server_name: "buildkitd-x.kiln".into(),
        generation: 1,
        credential,
        lease_id: (!kilnd.old).then(|| token.hash().as_str().to_owned()),
        status: (!ready).then_some(status),
    };
    (if ready { StatusCode::OK } else { StatusCode::ACCEPTED }, Json(response)).into_response()
}

async fn complete(State(kilnd): State<Kilnd>, Json(request): Json<CompleteRequest>) -> Response {
    let line = format!("complete {} {}", request.key, request.build_id.unwrap_or_default());
    kilnd.note(line).unwrap_or_else(|| StatusCode::NO_CONTENT.into_response())
}
