//! The API over real sockets, with a heart that does what a test says.

mod access;
mod bounded;
mod caches;
mod compatible;
mod delivery;
mod events;
mod health;
mod large;
mod mapping;
mod refused;
mod sockets;
mod upkeep;
mod v1;
mod waiting;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::{BuildSpec, Key, LeaseToken, RepoName, SnapshotName, TokenHash};
use kiln_wire::{
    CacheEntry, CacheView, Check, DiskUsage, LeaseView, Orphan, OrphanKind, ProjectView, QueuePlace, Readiness,
    RouteResponse, RouteStatus, SnapshotView, Storage, Sums, Trashed, UsageView, Why,
};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::heart::Caller;
use super::places::{Room, Size};
use super::*;
use crate::identity::Source;

const PATIENCE: Duration = Duration::from_secs(10);
const TOKEN: [u8; 8] = [0xab; 8];
const SETTINGS: Settings = Settings {
    route_wait: Duration::from_secs(180),
    nameless_release: false,
    drain: Duration::from_secs(30),
    rates: Rates::DEFAULT,
};
const BODY: &str = r#"{"repo":"github.com/org/repo","arch":"amd64"}"#;

/// Whoever runs the tests, on the unix socket.
fn own_source() -> Source {
    Source::Socket { uid: rustix::process::getuid().as_raw() }
}

fn own_caller() -> Caller {
    Caller { who: Some(format!("uid {}", rustix::process::getuid().as_raw()).into()), ..Caller::default() }
}

#[derive(Default)]
struct FakeHeart {
    /// The next answer of `route`.
    route_fails: Mutex<Option<RouteError>>,
    /// `route` waits until `go`.
    route_waits: bool,
    /// The next answers of `route` are not ready.
    not_ready: AtomicUsize,
    /// The answer of `route` and the list of projects take this many bytes more than usual.
    padding: usize,
    go: Notify,
    entered: Notify,
    routes: Mutex<Vec<(BuildSpec, RouteOptions)>>,
    completes: Mutex<Vec<(Key, TokenHash)>>,
    oldest_released: AtomicUsize,
    complete_fails: Mutex<Option<CompleteError>>,
    renew_fails: Mutex<Option<RenewError>>,
    /// The next answer of an admin's verb.
    verb_fails: Mutex<Option<VerbError>>,
    /// The verbs that were asked for, with their arguments.
    verbs: Mutex<Vec<String>>,
    ill: Mutex<Option<String>>,
    /// Nothing is answered ever.
    hangs: std::sync::atomic::AtomicBool,
    /// How many calls hang, or did.
    hanging: AtomicUsize,
    delivered: Arc<AtomicUsize>,
    released: Arc<AtomicUsize>,
    changed: Arc<Notify>,
}

struct FakeRouted {
    response: RouteResponse,
    delivered: Arc<AtomicUsize>,
    released: Option<Arc<AtomicUsize>>,
    changed: Arc<Notify>,
}

impl Routed for FakeRouted {
    fn response(&self) -> RouteResponse {
        self.response.clone()
    }

    fn delivered(mut self: Box<Self>) {
        self.released = None;
        self.delivered.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_one();
    }
}

impl Drop for FakeRouted {
    fn drop(&mut self) {
        if let Some(released) = &self.released {
            released.fetch_add(1, Ordering::SeqCst);
            self.changed.notify_one();
        }
    }
}

impl FakeHeart {
    fn response(&self, spec: &BuildSpec, leased: bool) -> RouteResponse {
        let token = LeaseToken::from_random(TOKEN);
        RouteResponse {
            key: Key::of(spec),
            build_id: leased.then(|| token.reveal().to_owned()),
            lease_id: leased.then(|| token.hash().as_str().to_owned()),
            endpoint: "tcp://10.83.0.2:1234".to_owned(),
            namespace: "x".repeat(self.padding),
            ready: leased,
            server_name: Key::of(spec).server_name("kiln.internal"),
            generation: 1,
            credential: None,
            status: None,
        }
    }

    async fn verb<T>(&self, what: String, answer: T) -> Result<T, VerbError> {
        self.may_hang().await;
        self.verbs.lock().expect("no panic").push(what);
        self.verb_fails.lock().expect("no panic").take().map_or(Ok(answer), Err)
    }

    async fn may_hang(&self) {
        if self.hangs.load(Ordering::SeqCst) {
            self.hanging.fetch_add(1, Ordering::SeqCst);
            self.changed.notify_one();
            std::future::pending::<()>().await;
        }
    }

    fn settled(&self) -> usize {
        self.delivered.load(Ordering::SeqCst) + self.released.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Heart for FakeHeart {
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError> {
        self.may_hang().await;
        let mut response = self.response(&spec, true);
        let due = |left: usize| left.checked_sub(1);
        if self.not_ready.fetch_update(Ordering::SeqCst, Ordering::SeqCst, due).is_ok() {
            response.ready = false;
            response.status = Some(RouteStatus {
                phase: "starting".to_owned(),
                reason: "the host is busy".to_owned(),
                queue_position: Some(2),
                queue_length: Some(5),
            });
        }
        let routed = Box::new(FakeRouted {
            response,
            delivered: self.delivered.clone(),
            released: Some(self.released.clone()),
            changed: self.changed.clone(),
        });
        self.routes.lock().expect("no panic").push((spec, options));
        self.entered.notify_one();
        if self.route_waits {
            self.go.notified().await;
        }
        match self.route_fails.lock().expect("no panic").take() {
            Some(error) => Err(error),
            None => Ok(routed),
        }
    }

    async fn prewarm(&self, spec: BuildSpec, caller: &Caller) -> Result<RouteResponse, RouteError> {
        self.may_hang().await;
        if caller.untrusted {
            return Err(RouteError::Refused("no isolation".to_owned()));
        }
        Ok(self.response(&spec, false))
    }

    async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, CompleteError> {
        self.may_hang().await;
        if let Some(error) = self.complete_fails.lock().expect("no panic").take() {
            return Err(error);
        }
        self.completes.lock().expect("no panic").push((key.clone(), token.hash()));
        Ok(*token == LeaseToken::from_random(TOKEN))
    }

    async fn complete_oldest(&self, _key: &Key) -> Result<bool, CompleteError> {
        self.may_hang().await;
        self.oldest_released.fetch_add(1, Ordering::SeqCst);
        Ok(true)
    }

    async fn renew(&self, token: &LeaseToken) -> Result<LeaseView, RenewError> {
        self.may_hang().await;
        if let Some(error) = self.renew_fails.lock().expect("no panic").take() {
            return Err(error);
        }
        Ok(LeaseView { id: token.hash().as_str().to_owned(), ..LeaseView::default() })
    }

    async fn owner(&self, key: &Key) -> Result<Option<RepoName>, VerbError> {
        let known = BuildSpec::new("github.com/org/repo", "", "", "amd64").expect("valid");
        self.verb(format!("owner {key}"), (Key::of(&known) == *key).then_some(known.repo)).await
    }

    async fn list(&self) -> Result<Vec<ProjectView>, VerbError> {
        self.may_hang().await;
        Ok(vec![ProjectView { repo: view().repo + &"x".repeat(self.padding), ..view() }])
    }

    async fn show(&self, key: &Key) -> Result<ProjectView, VerbError> {
        self.may_hang().await;
        if key.as_str() == view().key { Ok(view()) } else { Err(VerbError::NoProject(key.clone())) }
    }

    async fn why(&self, key: &Key) -> Result<Why, VerbError> {
        let why = Why { key: key.to_string(), headline: "It is warm.".to_owned(), ..Why::default() };
        self.verb(format!("why {key}"), why).await
    }

    async fn set(&self, key: &Key, change: SettingsChange) -> Result<ProjectView, VerbError> {
        self.verb(format!("set {key} {change:?}"), view()).await
    }

    async fn stop(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        assert!(!key.is_fork(), "(this panic is part of a test)");
        self.verb(format!("stop {key} {force}"), ()).await
    }

    async fn remove(&self, key: &Key) -> Result<(), VerbError> {
        self.verb(format!("remove {key}"), ()).await
    }

    async fn cache(&self, key: &Key, measure: bool) -> Result<CacheView, VerbError> {
        let usage = cache().usage.filter(|_| measure);
        self.verb(format!("cache {key}"), CacheView { usage, ..cache() }).await
    }

    async fn snapshot(&self, key: &Key) -> Result<(SnapshotView, bool), VerbError> {
        let already = self.verbs.lock().expect("no panic").iter().any(|verb| verb.starts_with("snapshot "));
        self.verb(format!("snapshot {key}"), (cache().snapshots.remove(1), !already)).await
    }

    async fn roll_back(&self, key: &Key, to: Option<SnapshotName>, force: bool) -> Result<SnapshotName, VerbError> {
        self.verb(format!("rollback {key} {to:?} {force}"), to.unwrap_or(SnapshotName::new(41))).await
    }

    async fn reset(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        self.verb(format!("reset {key} {force}"), ()).await
    }

    async fn disk_usage(&self) -> Result<DiskUsage, VerbError> {
        self.verb("disk usage".to_owned(), disk_usage()).await
    }

    async fn orphans(&self) -> Result<Vec<Orphan>, VerbError> {
        self.verb("orphans".to_owned(), vec![orphan()]).await
    }

    async fn adopt(&self, kind: Option<OrphanKind>, name: &str) -> Result<Key, VerbError> {
        self.verb(format!("adopt {kind:?} {name}"), view().key.parse().expect("a key")).await
    }

    async fn remove_orphan(&self, kind: OrphanKind, name: &str) -> Result<(), VerbError> {
        self.verb(format!("remove orphan {kind} {name}"), ()).await
    }

    async fn trash(&self) -> Result<Vec<Trashed>, VerbError> {
        self.verb("trash".to_owned(), vec![trashed()]).await
    }

    async fn restore(&self, name: &str) -> Result<Key, VerbError> {
        self.verb(format!("restore {name}"), view().key.parse().expect("a key")).await
    }

    async fn discard(&self, name: &str) -> Result<(), VerbError> {
        self.verb(format!("discard {name}"), ()).await
    }

    async fn empty_trash(&self) -> Result<u64, VerbError> {
        self.verb("empty".to_owned(), 3).await
    }

    async fn readiness(&self) -> Readiness {
        self.may_hang().await;
        let ill = self.ill.lock().expect("no panic").clone();
        Readiness::of(vec![
            Check::well("store"),
            ill.map_or_else(|| Check::well("host"), |why| Check::ill("host", why)),
        ])
    }
}

fn view() -> ProjectView {
    ProjectView {
        key: "pbcce5b6205652dd7".to_owned(),
        repo: "github.com/org/repo".to_owned(),
        target: "default".to_owned(),
        arch: "amd64".to_owned(),
        role: "project".to_owned(),
        phase: "warm".to_owned(),
        generation: 1,
        address: "10.83.0.2:1234".to_owned(),
        server_name: "buildkitd-pbcce5b6205652dd7.kiln.internal".to_owned(),
        created: "2026-11-29T00:00:00Z".to_owned(),
        last_activity: "2026-11-29T00:00:00Z".to_owned(),
        pending: vec!["memory".to_owned()],
        queue: Some(QueuePlace { position: 1, length: 2 }),
        cache_size: Some(40 << 30),
        last_snapshot: Some("2026-11-29T00:00:00Z".to_owned()),
        ..ProjectView::default()
    }
}

fn cache() -> CacheView {
    let snapshot = |name: &str, verdict: &str, bytes| SnapshotView {
        name: name.to_owned(),
        taken: "2026-11-29T00:00:00Z".to_owned(),
        verdict: verdict.to_owned(),
        bytes,
    };
    let snapshots = vec![snapshot("kiln-000041", "good", Some(4096)), snapshot("kiln-000042", "unchecked", None)];
    CacheView { key: view().key, snapshots, usage: Some(usage()), unmeasured: None }
}

fn usage() -> UsageView {
    let (shared, snapshots) = (Some(2 << 30), Some(4096));
    UsageView { used: 1 << 30, shared, snapshots, size: Some(20 << 30), available: 17 << 30, inodes_available: None }
}

fn disk_usage() -> DiskUsage {
    let whole = CacheEntry {
        key: view().key,
        role: "project".to_owned(),
        repo: Some(view().repo),
        last_activity: Some(view().last_activity),
        usage: Some(usage()),
        ..CacheEntry::default()
    };
    let remainder = CacheEntry {
        key: "c1pbcce5b6205652dd7".to_owned(),
        role: "member".to_owned(),
        project: Some(view().key),
        ..CacheEntry::default()
    };
    let caches = vec![whole, remainder];
    let storage = Some(Storage { used: 60 << 30, total: 100 << 30 });
    DiskUsage { sums: Sums::of(&caches), caches, trash: vec![trashed()], storage }
}

fn orphan() -> Orphan {
    Orphan {
        kind: OrphanKind::Volume,
        name: "pbcce5b6205652dd7".to_owned(),
        key: Some(view().key),
        why: "no project knows it".to_owned(),
        adoptable: true,
    }
}

fn trashed() -> Trashed {
    Trashed {
        name: "pbcce5b6205652dd7-1700000000".to_owned(),
        key: Some(view().key),
        repo: Some(view().repo),
        since: "2026-11-29T00:00:00Z".to_owned(),
        expires: "2026-12-06T00:00:00Z".to_owned(),
    }
}

struct Server {
    directory: TempDir,
    heart: Arc<FakeHeart>,
    store: Store,
    metrics: Arc<Metrics>,
    tcp: SocketAddr,
    shutdown: CancellationToken,
    running: JoinHandle<()>,
}

impl Server {
    async fn start() -> Self {
        Self::with(FakeHeart::default()).await
    }

    async fn with(heart: FakeHeart) -> Self {
        Self::with_settings(heart, SETTINGS).await
    }

    async fn with_settings(heart: FakeHeart, settings: Settings) -> Self {
        Self::with_size(heart, settings, Size { places: 1024, reserve: 64 }).await
    }

    async fn with_size(heart: FakeHeart, settings: Settings, size: Size) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let heart = Arc::new(heart);
        let store = Store::open(&directory.path().join("kiln.db")).expect("opens");
        let unix = Listener::unix(&directory.path().join("kiln.sock")).expect("listens");
        let tcp = Listener::tcp("127.0.0.1:0".parse().expect("an address")).await.expect("listens");
        let address = tcp.tcp_address().expect("it is TCP");
        let shutdown = CancellationToken::new();
        let metrics = Arc::new(Metrics::new());
        let callers = Arc::new(Callers::of_one_user(store.clone()));
        let api = Api::new(heart.clone(), callers.clone(), store.clone(), metrics.clone(), settings);
        let running = tokio::spawn(serve::serve_in(size, vec![unix, tcp], api, shutdown.clone()));
        Self { directory, heart, store, metrics, tcp: address, shutdown, running }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("kiln.sock")
    }

    async fn connect(&self) -> UnixStream {
        UnixStream::connect(self.socket()).await.expect("connects")
    }

    async fn post(&self, path: &str, body: &str) -> Answer {
        exchange(self.connect().await, &request("POST", path, body)).await
    }

    async fn get(&self, path: &str) -> Answer {
        exchange(self.connect().await, &request("GET", path, "")).await
    }

    async fn send(&self, method: &str, path: &str, body: &str) -> Answer {
        exchange(self.connect().await, &request(method, path, body)).await
    }

    /// With a header of the test's own.
    async fn post_with(&self, path: &str, header: &str, body: &str) -> Answer {
        let plain = request("POST", path, body);
        let with = plain.replacen("Connection: close\r\n", &format!("Connection: close\r\n{header}\r\n"), 1);
        exchange(self.connect().await, &with).await
    }

    /// All answers of `route` have been told apart into delivered and lost.
    async fn settled(&self, count: usize) {
        eventually("the outcome of an answer", || self.heart.settled() >= count, &self.heart.changed).await;
    }

    async fn over_tcp(&self, request: &str) -> Answer {
        exchange(TcpStream::connect(self.tcp).await.expect("connects"), request).await
    }
}

fn request(method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn of(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        Self { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    fn is_plain(&self) -> bool {
        self.head.contains("content-type: text/plain; charset=utf-8")
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    fn json<T: serde::de::DeserializeOwned>(&self) -> T {
        assert!(self.head.contains("content-type: application/json"), "{self:?}");
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

/// Sends, and reads until the server closes. A server that answers before it has read all may break the writing.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> Answer {
    let all = async {
        let _ = stream.write_all(request.as_bytes()).await;
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes).await;
        Answer::of(&String::from_utf8_lossy(&bytes))
    };
    tokio::time::timeout(PATIENCE, all).await.expect("the server answers")
}

async fn eventually(what: &str, condition: impl Fn() -> bool, changed: &Notify) {
    let wait = async {
        while !condition() {
            changed.notified().await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "{what} did not happen");
}
