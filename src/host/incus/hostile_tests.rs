//! Who listens on the socket may be no Incus, or one in trouble: whatever it says, nobody hangs, nothing is taken for absent,
//! and the error says what is wrong. The network policy is a real one: needs root and nft.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::client::{ApiError, Bounds, Client};
use super::{IncusConfig, IncusRuntime, prepare};
use crate::host::network::{Network, NetworkConfig};
use crate::host::{InstanceSpec, InstanceState, Lane, Limits, Properties, Runtime, RuntimeError, StopBound, contract};

const BOUNDS: Bounds =
    Bounds { look: Duration::from_millis(400), answer: Duration::from_millis(400), largest: 1 << 20 };
/// Far above what those bounds add up to, and far below the real ones.
const SOON: Duration = Duration::from_secs(20);

/// What the stand-in says to one request.
#[derive(Debug, Clone)]
enum Answer {
    Json(Value),
    /// A body that is no JSON, with its status.
    Text(u16, String),
    /// A body that is announced longer than it is.
    Half,
    /// The connection is closed without a word.
    Nothing,
    /// Headers, and then nothing for ever.
    Silence,
    /// A body without an end.
    Endless,
}

type Rules = Arc<Mutex<BTreeMap<(String, String), Answer>>>;

/// An Incus that has one stopped instance, and says otherwise what it is told to.
struct Stub {
    directory: tempfile::TempDir,
    rules: Rules,
    asked: Arc<Mutex<Vec<String>>>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn sync(metadata: &Value) -> Answer {
    Answer::Json(json!({"type": "sync", "status_code": 200, "metadata": metadata}))
}

fn error(code: u16, text: &str) -> Answer {
    Answer::Json(json!({"type": "error", "error_code": code, "error": text}))
}

fn begun() -> Answer {
    let operation = json!({"id": "lost", "description": "Working", "status_code": 103});
    Answer::Json(json!({"type": "async", "operation": "/1.0/operations/lost", "metadata": operation}))
}

impl Stub {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(directory.path().join("unix.socket")).expect("bound");
        let (rules, asked) = (Rules::default(), Arc::<Mutex<Vec<String>>>::default());
        let (for_server, log) = (Arc::clone(&rules), Arc::clone(&asked));
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&for_server), Arc::clone(&log)));
            }
        });
        let stub = Self { directory, rules, asked, server };
        stub.says("GET", "/1.0", sync(&json!({"api_extensions": prepare::EXTENSIONS, "auth": "trusted"})));
        stub.says("GET", "/1.0/projects/kiln", sync(&json!({"config": {"features.images": "true"}})));
        stub.says("GET", "/1.0/storage-pools/kiln", sync(&json!({})));
        stub.says("GET", "/1.0/images/aliases/kiln", sync(&json!({"target": "2f1c"})));
        stub.says("GET", "/1.0/instances", sync(&json!([])));
        stub.says("GET", "/1.0/operations", sync(&json!({})));
        stub
    }

    /// From now on, to this method on this path.
    fn says(&self, method: &str, path: &str, answer: Answer) {
        let mut rules = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        rules.insert((method.to_owned(), path.to_owned()), answer);
    }

    fn asked(&self, what: &str) -> usize {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).iter().filter(|line| line.contains(what)).count()
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("unix.socket")
    }

    fn client(&self) -> Client {
        Client::with_bounds(&self.socket(), "kiln", BOUNDS).expect("a client")
    }
}

async fn serve(stream: UnixStream, rules: Rules, log: Arc<Mutex<Vec<String>>>) {
    let mut stream = BufReader::new(stream);
    let (mut request, mut length) = (String::new(), 0);
    if stream.read_line(&mut request).await.is_err() {
        return;
    }
    loop {
        let mut line = String::new();
        match stream.read_line(&mut line).await {
            Ok(2) => break,
            Ok(n) if n > 2 => {}
            _ => return,
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    let mut body = vec![0; length];
    let _ = stream.read_exact(&mut body).await;
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split('?').next().unwrap_or_default();
    log.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{method} {path}"));
    let rule = rules.lock().unwrap_or_else(PoisonError::into_inner).get(&(method.to_owned(), path.to_owned())).cloned();
    // The sender may be gone, which is its right.
    let _ = answer(stream.into_inner(), rule.unwrap_or_else(|| error(404, "Not Found"))).await;
}

async fn answer(mut stream: UnixStream, answer: Answer) -> std::io::Result<()> {
    let head = |status: u16, length: usize| {
        format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n")
    };
    let body = match answer {
        Answer::Json(value) => {
            let (status, text) = (value["error_code"].as_u64().unwrap_or(200), value.to_string());
            head(u16::try_from(status).unwrap_or(500).clamp(200, 599), text.len()) + &text
        }
        Answer::Text(status, text) => head(status, text.len()) + &text,
        Answer::Half => head(200, 1000) + "{\"type\": \"sync\", \"metadata\": {\"na",
        Answer::Nothing => return Ok(()),
        Answer::Silence => {
            stream.write_all(head(200, 1000).as_bytes()).await?;
            return std::future::pending().await;
        }
        Answer::Endless => {
            stream.write_all(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n").await?;
            loop {
                stream.write_all(format!("1000\r\n{}\r\n", " ".repeat(4096)).as_bytes()).await?;
            }
        }
    };
    stream.write_all(body.as_bytes()).await
}

/// All that must not be believed, as the answer to a question.
fn nonsense() -> Vec<(&'static str, Answer)> {
    let text = |text: &str| Answer::Text(200, text.to_owned());
    vec![
        ("not JSON", text("<html>404 page not found</html>")),
        ("another server's 404", Answer::Text(404, "404 page not found\n".to_owned())),
        ("an empty body", text("")),
        ("JSON of another shape", text("[1, 2]")),
        ("JSON in pieces", text("{\"type\": \"sync\", \"metadata\": {")),
        ("deep JSON", text(&"[".repeat(100_000))),
        ("numbers out of range", sync(&json!({"name": name(), "status_code": 70_000, "last_used_at": "x"}))),
        ("a negative state", sync(&json!({"name": name(), "status_code": -1, "last_used_at": "x"}))),
        ("a state that nobody knows", sync(&json!({"name": name(), "status_code": 199, "last_used_at": "x"}))),
        ("another instance", sync(&json!({"name": "web", "status_code": 102, "last_used_at": "x"}))),
        ("one that runs and was never started", sync(&json!({"name": name(), "status_code": 103}))),
        ("a list of nothing", sync(&Value::Null)),
        ("a lie in lines of its own", error(500, "no\n2026-01-01 INFO all is well\u{1b}[2J")),
        ("a long lie", sync(&Value::String("x\n".repeat(100_000)))),
        ("an error without a code", Answer::Json(json!({"type": "error"}))),
        ("its own failure", error(500, "database is locked")),
        ("that it is starting", error(503, "Daemon is starting up")),
        ("half a body", Answer::Half),
        ("nothing", Answer::Nothing),
        ("silence", Answer::Silence),
        ("a body without an end", Answer::Endless),
    ]
}

fn name() -> String {
    contract::key().daemon_name()
}

fn spec() -> InstanceSpec {
    InstanceSpec {
        key: contract::key(),
        lane: Lane::Trusted,
        properties: Properties::new(),
        address: "10.81.0.1:8372".parse().expect("an address"),
        volume: "/nowhere".into(),
        files: "/nowhere".into(),
        limits: Limits::default(),
    }
}

/// The one instance, as it was made, in this state.
fn instance(status_code: u16) -> Answer {
    let config = IncusConfig::new(PathBuf::new(), "kiln".to_owned());
    let mut made = super::wanted::creation(&spec(), &config);
    made["status_code"] = json!(status_code);
    made["last_used_at"] = json!("2026-01-01T00:00:00Z");
    sync(&made)
}

/// A runtime on a stub, with a table of its own; `None` says why on stderr.
async fn lab(test: &str) -> Option<(Stub, IncusRuntime, Arc<Network>)> {
    let mut firewall = NetworkConfig::new("10.81.0.0/16".parse().expect("a range"), Vec::new());
    firewall.table = format!("kiln-hostile-{test}");
    let network = Arc::new(Network::new(firewall));
    if let Err(error) = network.ensure().await {
        eprintln!("skipped: {test}: no network policy: {error}");
        return None;
    }
    let stub = Stub::new();
    let config = IncusConfig::new(stub.socket(), "kiln".to_owned());
    let runtime = IncusRuntime::with_bounds(config, Arc::clone(&network), BOUNDS).expect("a runtime");
    runtime.prepared().await.expect("prepared by a stub in its right mind");
    Some((stub, runtime, network))
}

/// Before the deadline, and an error of a kind that says that nobody knows, or why not.
async fn clear<T: std::fmt::Debug>(what: &str, outcome: impl Future<Output = Result<T, RuntimeError>>) -> RuntimeError {
    let outcome = tokio::time::timeout(SOON, outcome).await.unwrap_or_else(|_| panic!("{what}: it hangs"));
    let error = outcome.expect_err(what);
    assert!(
        matches!(
            error,
            RuntimeError::Unavailable { .. } | RuntimeError::TimedOut { .. } | RuntimeError::Refused { .. }
        ),
        "{what}: {error:?}"
    );
    let said = error.to_string();
    assert!(said.len() < 2000 && !said.contains(char::is_control), "{what}: {said:?}");
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_is_never_taken_for_a_state() {
    let Some((stub, runtime, network)) = lab("states").await else { return };
    let (spec, path) = (spec(), format!("/1.0/instances/{}", name()));
    for (what, answer) in nonsense() {
        stub.says("GET", &path, answer);
        clear(what, runtime.look(&spec)).await;
        clear(what, runtime.start(&spec)).await;
        // These are not down, as far as can be told, and to stop one takes no more than that.
        if !matches!(what, "a state that nobody knows" | "one that runs and was never started") {
            clear(what, runtime.stop(&spec, StopBound::Force)).await;
        }
    }
    assert_eq!(stub.asked("PUT"), 0, "something was started or stopped on somebody's nonsense");
    // Control: the answers of one in its right mind are believed.
    stub.says("GET", &path, instance(102));
    assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED);
    stub.says("GET", &path, error(404, "Instance not found"));
    assert_eq!(runtime.look(&spec).await.expect("looked"), InstanceState::Absent);
    network.remove().await.expect("removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_is_no_list_and_no_measure() {
    let Some((stub, runtime, network)) = lab("lists").await else { return };
    let (spec, path) = (spec(), format!("/1.0/instances/{}/state", name()));
    for (what, answer) in nonsense() {
        // These are in order, as lists and measures go.
        let is_measure = matches!(&answer, Answer::Json(value) if value["metadata"]["status_code"].as_u64().is_some_and(|c| c < 65_536));
        stub.says("GET", "/1.0/instances", answer.clone());
        clear(what, runtime.found()).await;
        stub.says("GET", &path, answer);
        if !is_measure {
            clear(what, runtime.cpu_time(&spec)).await;
        }
    }
    let measured = |usage: i64| sync(&json!({"status_code": 103, "cpu": {"usage": usage}}));
    for (usage, expected) in [(5_000, Some(Duration::from_micros(5))), (0, None), (-1, None), (i64::MIN, None)] {
        stub.says("GET", &path, measured(usage));
        assert_eq!(runtime.cpu_time(&spec).await.expect("measured"), expected);
    }
    network.remove().await.expect("removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_that_vanishes_is_neither_done_nor_refused() {
    let Some((stub, runtime, network)) = lab("operations").await else { return };
    let (spec, path) = (spec(), format!("/1.0/instances/{}", name()));
    for method in [("POST", "/1.0/instances"), ("DELETE", &path), ("PUT", &format!("{path}/state"))] {
        stub.says(method.0, method.1, begun());
    }
    let lost = |error: RuntimeError| assert!(error.is_retryable(), "nobody knows: {error}");
    lost(clear("created", runtime.create(&spec)).await);
    stub.says("GET", &path, instance(102));
    runtime.create(&spec).await.expect("it was made after all");
    lost(clear("started", runtime.start(&spec)).await);
    lost(clear("destroyed", runtime.destroy(&spec)).await);
    lost(clear("destroyed by its name", runtime.destroy_found(&name())).await);
    stub.says("GET", &path, instance(103));
    runtime.start(&spec).await.expect("it was started after all");
    let drain = StopBound::Graceful(Duration::from_millis(10));
    let (stopped, drained) = tokio::join!(
        clear("stopped", runtime.stop(&spec, StopBound::Force)),
        clear("drained", runtime.stop(&spec, drain))
    );
    lost(stopped);
    lost(drained);
    network.remove().await.expect("removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_somebody_waits_for_asks_no_more_than_it_must() {
    let Some((stub, runtime, network)) = lab("start").await else { return };
    let (spec, path) = (spec(), format!("/1.0/instances/{}", name()));
    stub.says("PUT", &format!("{path}/state"), begun());
    let asked = |what: &str| stub.asked(&format!("{what} {path}"));
    for (used, forgotten) in [("", 0), ("2026-11-30T09:00:00Z", 1)] {
        let Answer::Json(mut stopped) = instance(102) else { panic!("no JSON") };
        stopped["metadata"]["last_used_at"] = json!(used);
        stub.says("GET", &path, Answer::Json(stopped));
        let (looks, changes) = (asked("GET"), asked("PUT"));
        clear("started", runtime.start(&spec)).await;
        assert_eq!((asked("GET") - looks, asked("PUT") - changes), (3, 1), "before, why it failed, and after");
        assert_eq!(asked("DELETE"), forgotten, "one that never ran has no console");
    }
    network.remove().await.expect("removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_to_a_change_that_cannot_be_read_is_no_success() {
    let Some((stub, runtime, network)) = lab("changes").await else { return };
    let (spec, path) = (spec(), format!("/1.0/instances/{}", name()));
    stub.says("GET", &path, instance(102));
    for (what, answer) in nonsense() {
        stub.says("DELETE", &path, answer.clone());
        clear(what, runtime.destroy(&spec)).await;
        stub.says("PUT", &format!("{path}/state"), answer);
        clear(what, runtime.start(&spec)).await;
    }
    stub.says("GET", &path, error(404, "Instance not found"));
    for (what, answer) in nonsense() {
        stub.says("POST", "/1.0/instances", answer);
        clear(what, runtime.create(&spec)).await;
    }
    network.remove().await.expect("removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_cannot_be_asked_for_makes_nothing_older_and_nobody_wait() {
    let Some((stub, runtime, network)) = lab("image").await else { return };
    let (spec, path) = (spec(), format!("/1.0/instances/{}", name()));
    stub.says("GET", &path, instance(102));
    for (what, answer) in nonsense() {
        stub.says("GET", "/1.0/images/aliases/kiln", answer);
        runtime.image.forget();
        let began = Instant::now();
        assert_eq!(runtime.look(&spec).await.expect(what), contract::STOPPED, "{what}");
        assert!(began.elapsed() < Duration::from_secs(5), "{what}: {:?}", began.elapsed());
    }
    let before = stub.asked("aliases");
    for _ in 0..20 {
        runtime.look(&spec).await.expect("looked");
    }
    assert_eq!(stub.asked("aliases"), before, "it is not asked for with each look");
    network.remove().await.expect("removed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incus_that_is_none_is_named_as_such_at_the_start() {
    let stub = Stub::new();
    for (what, answer) in nonsense() {
        stub.says("GET", "/1.0", answer);
        let config = IncusConfig::new(stub.socket(), "kiln".to_owned());
        let client = stub.client();
        let error = clear(what, prepare::prepare(&client, &config)).await;
        assert!(error.is_retryable(), "{what}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_that_never_ends_is_asked_for_in_peace() {
    let stub = Stub::new();
    let Answer::Json(mut running) = begun() else { return };
    running["type"] = json!("sync");
    stub.says("GET", "/1.0/operations/lost/wait", Answer::Json(running));
    let waited = stub.client().wait("lost", "something", Duration::from_millis(500)).await;
    assert!(matches!(waited, Err(ApiError::TimedOut { .. })), "{waited:?}");
    assert!(stub.asked("wait") < 20, "asked {} times in half a second", stub.asked("wait"));
    // An answer that is no operation at all.
    stub.says("POST", "/1.0/x", sync(&json!({})));
    let outcome = stub.client().operate(Method::POST, "/1.0/x", None, SOON).await;
    assert!(matches!(outcome, Err(ApiError::Garbled { .. })), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_without_an_end_is_not_read_until_time_is_up() {
    let stub = Stub::new();
    stub.says("GET", "/1.0/instances", Answer::Endless);
    let bounds = Bounds { look: SOON, ..BOUNDS };
    let client = Client::with_bounds(&stub.socket(), "kiln", bounds).expect("a client");
    let outcome = client.get::<Value>("/1.0/instances").await;
    assert!(matches!(&outcome, Err(ApiError::Garbled { what, .. }) if what.contains("more than")), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn last_words_that_never_end_are_cut() {
    let Some((stub, runtime, network)) = lab("words").await else { return };
    let console = format!("/1.0/instances/{}/console", name());
    for answer in [Answer::Endless, Answer::Silence, Answer::Half, Answer::Nothing] {
        stub.says("GET", &console, answer);
        let words = tokio::time::timeout(SOON, runtime.last_words(&spec())).await.expect("it hangs");
        assert!(words.len() < 64 << 10, "{} bytes", words.len());
    }
    network.remove().await.expect("removed");
}
