//! The API over real sockets, with a heart that does what a test says.

mod compatible;
mod sockets;
mod v1;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::{BuildSpec, Key, LeaseToken, TokenHash};
use kiln_wire::{ProjectView, RouteResponse};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::*;
use crate::store::StoreError;

const PATIENCE: Duration = Duration::from_secs(10);
const TOKEN: [u8; 8] = [0xab; 8];
const BODY: &str = r#"{"repo":"github.com/org/repo","arch":"amd64"}"#;

#[derive(Default)]
struct FakeHeart {
    /// The next answers of `route`, from the last on; `None` waits until `go`.
    route_fails: Mutex<Option<RouteError>>,
    route_waits: bool,
    /// The answer takes this many bytes more than usual.
    padding: usize,
    go: Notify,
    entered: Notify,
    routes: Mutex<Vec<(BuildSpec, RouteOptions)>>,
    completes: Mutex<Vec<(Key, TokenHash)>>,
    complete_fails: Mutex<Option<CompleteError>>,
    stop_fails: Mutex<Option<StopError>>,
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
    fn deliver(mut self: Box<Self>) -> RouteResponse {
        self.released = None;
        self.delivered.fetch_add(1, Ordering::SeqCst);
        self.response.clone()
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
        RouteResponse {
            key: Key::of(spec),
            build_id: leased.then(|| LeaseToken::from_random(TOKEN).reveal().to_owned()),
            endpoint: "tcp://10.83.0.2:1234".to_owned(),
            namespace: "x".repeat(self.padding),
            ready: leased,
            server_name: Key::of(spec).server_name("kiln.internal"),
            generation: 1,
            credential: None,
        }
    }
}

#[async_trait]
impl Heart for FakeHeart {
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError> {
        let routed = Box::new(FakeRouted {
            response: self.response(&spec, true),
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

    async fn prewarm(&self, spec: BuildSpec, untrusted: bool) -> Result<RouteResponse, RouteError> {
        if untrusted {
            return Err(RouteError::Refused("no isolation".to_owned()));
        }
        Ok(self.response(&spec, false))
    }

    async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, CompleteError> {
        if let Some(error) = self.complete_fails.lock().expect("no panic").take() {
            return Err(error);
        }
        self.completes.lock().expect("no panic").push((key.clone(), token.hash()));
        Ok(*token == LeaseToken::from_random(TOKEN))
    }

    async fn list(&self) -> Result<Vec<ProjectView>, StoreError> {
        Ok(vec![view()])
    }

    async fn show(&self, key: &Key) -> Result<Option<ProjectView>, StoreError> {
        Ok((key.as_str() == view().key).then(view))
    }

    async fn stop(&self, key: &Key) -> Result<(), StopError> {
        assert!(!key.is_fork(), "(this panic is part of a test)");
        self.stop_fails.lock().expect("no panic").take().map_or(Ok(()), Err)
    }
}

fn view() -> ProjectView {
    ProjectView {
        key: "pbcce5b6205652dd7".to_owned(),
        repo: "github.com/org/repo".to_owned(),
        name: String::new(),
        target: "default".to_owned(),
        arch: "amd64".to_owned(),
        phase: "warm".to_owned(),
        reason: String::new(),
        generation: 1,
        address: "10.83.0.2:1234".to_owned(),
        server_name: "buildkitd-pbcce5b6205652dd7.kiln.internal".to_owned(),
        connections: 0,
        leases: Vec::new(),
        created: "2026-11-29T00:00:00Z".to_owned(),
        last_activity: "2026-11-29T00:00:00Z".to_owned(),
    }
}

struct Server {
    directory: TempDir,
    heart: Arc<FakeHeart>,
    store: Store,
    tcp: SocketAddr,
    shutdown: CancellationToken,
    running: JoinHandle<()>,
}

impl Server {
    async fn start() -> Self {
        Self::with(FakeHeart::default()).await
    }

    async fn with(heart: FakeHeart) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let heart = Arc::new(heart);
        let store = Store::open(&directory.path().join("kiln.db")).expect("opens");
        let unix = Listener::unix(&directory.path().join("kiln.sock")).expect("listens");
        let tcp = Listener::tcp("127.0.0.1:0".parse().expect("an address")).await.expect("listens");
        let address = tcp.tcp_address().expect("it is TCP");
        let shutdown = CancellationToken::new();
        let api = Api::new(heart.clone(), store.clone());
        let running = tokio::spawn(serve(vec![unix, tcp], api, shutdown.clone()));
        Self { directory, heart, store, tcp: address, shutdown, running }
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
