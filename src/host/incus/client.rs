//! A thin client of Incus's REST API on its unix socket.
//!
//! Three outcomes are never confused: it is not there ([`ApiError::NotFound`]), Incus said no ([`ApiError::Refused`]),
//! and nobody knows ([`ApiError::Unreachable`], [`ApiError::Garbled`], [`ApiError::Lost`]). Texts of errors are for people
//! only. What answers may be anybody: an answer has a deadline and a largest size.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reqwest::Method;
use reqwest::header::HeaderMap;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;

/// What is waited for, and how much is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// For questions that Incus answers from its database. Below the time for a look at an instance, which asks more than
    /// one: so that who waits learns that it is Incus that does not answer.
    pub(crate) look: Duration,
    /// For changes that Incus makes in its database, or by starting an operation.
    pub(crate) answer: Duration,
    /// Bytes of an answer. Incus writes some 4 KiB for each instance of a list.
    pub(crate) largest: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { look: Duration::from_secs(10), answer: Duration::from_secs(20), largest: 128 << 20 }
    }
}

/// Longest single wait for an operation; repeated up to the caller's deadline.
const SLICE: Duration = Duration::from_secs(30);
/// Before the next wait, where one did not last.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Error)]
pub(crate) enum ApiError {
    #[error("no answer from {socket}")]
    Unreachable {
        socket: String,
        #[source]
        source: reqwest::Error,
    },
    #[error("{0}")]
    NotFound(String),
    #[error("{error} (code {code})")]
    Refused { code: u16, error: String },
    /// It was begun, and nobody remembers it: Incus was restarted, say. How it ended shows where it had its effect.
    #[error("the operation that {path} began is gone; how it ended is not known")]
    Lost { path: String },
    #[error("{path} answered with what cannot be understood: {what}")]
    Garbled { path: String, what: String },
    #[error("gave up after {} s waiting for: {waited_for}", .after.as_secs())]
    TimedOut { waited_for: String, after: Duration },
}

/// Status codes of Incus's API that we act on.
pub(crate) mod status {
    pub(crate) const STOPPED: u16 = 102;
    pub(crate) const RUNNING: u16 = 103;
    pub(crate) const PENDING: u16 = 105;
    pub(crate) const STARTING: u16 = 106;
    pub(crate) const STOPPING: u16 = 107;
    pub(crate) const FREEZING: u16 = 109;
    pub(crate) const FROZEN: u16 = 110;
    pub(crate) const THAWED: u16 = 111;
    pub(crate) const READY: u16 = 113;
    pub(crate) const SUCCESS: u16 = 200;
}

#[derive(Debug, Deserialize)]
struct Envelope {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    error_code: u16,
    #[serde(default)]
    error: String,
    #[serde(default)]
    metadata: Value,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Operation {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) description: String,
    pub(crate) status_code: u16,
    #[serde(default)]
    pub(crate) err: String,
    #[serde(default)]
    pub(crate) may_cancel: bool,
    #[serde(default)]
    pub(crate) resources: Option<Value>,
}

impl Operation {
    pub(crate) fn is_underway(&self) -> bool {
        matches!(self.status_code, status::RUNNING | status::PENDING) || self.status_code == 100
    }

    /// Whether it works on the instance of this name.
    pub(crate) fn concerns(&self, instance: &str) -> bool {
        let instances = self.resources.as_ref().and_then(|r| r.get("instances")).and_then(Value::as_array);
        instances.into_iter().flatten().filter_map(Value::as_str).any(|path| instance_of(path) == Some(instance))
    }
}

/// The instance's name in `/1.0/instances/NAME?project=…`.
pub(crate) fn instance_of(path: &str) -> Option<&str> {
    path.strip_prefix("/1.0/instances/")?.split(['/', '?']).next()
}

#[derive(Clone)]
pub(crate) struct Client {
    http: reqwest::Client,
    socket: PathBuf,
    project: String,
    bounds: Bounds,
}

impl Client {
    /// Does not connect yet.
    pub(crate) fn new(socket: &Path, project: &str) -> Result<Self, ApiError> {
        Self::with_bounds(socket, project, Bounds::default())
    }

    pub(crate) fn with_bounds(socket: &Path, project: &str, bounds: Bounds) -> Result<Self, ApiError> {
        // A connection for each request, closed after it. Incus 6.0 reads the first 8 bytes of a new connection before it
        // accepts the next one; a pool opens connections on suspicion and leaves them silent, which shuts out everybody,
        // Incus's own start hooks included, until they give up after 30 s.
        let http = reqwest::Client::builder().unix_socket(socket).no_proxy().pool_max_idle_per_host(0).build();
        let http = http.map_err(|source| ApiError::Unreachable { socket: socket.display().to_string(), source })?;
        Ok(Self { http, socket: socket.to_owned(), project: project.to_owned(), bounds })
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        let envelope = self.request(Method::GET, path, None, self.bounds.look).await?;
        parse(path, envelope.metadata)
    }

    /// A change that Incus makes before it answers.
    pub(crate) async fn change(&self, method: Method, path: &str, body: Option<&Value>) -> Result<(), ApiError> {
        self.request(method, path, body, self.bounds.answer).await.map(drop)
    }

    /// A change that Incus answers with an operation; waits until that is over.
    pub(crate) async fn operate(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        patience: Duration,
    ) -> Result<Operation, ApiError> {
        let envelope = self.request(method, path, body, self.bounds.answer).await?;
        self.finish(path, &envelope, patience).await
    }

    /// Streams a file as the body; for images. The patience covers the upload and, again, the operation.
    pub(crate) async fn upload(
        &self,
        path: &str,
        headers: HeaderMap,
        body: reqwest::Body,
        patience: Duration,
    ) -> Result<Operation, ApiError> {
        let request = self.http.post(self.url(path)).headers(headers).body(body).timeout(patience);
        let envelope = self.envelope(path, request).await?;
        self.finish(path, &envelope, patience).await
    }

    /// A body that is no envelope: a log.
    pub(crate) async fn text(&self, path: &str, at_most: usize) -> Result<String, ApiError> {
        let unreachable = |source| self.unreachable(source);
        let mut response =
            self.http.get(self.url(path)).timeout(self.bounds.answer).send().await.map_err(unreachable)?;
        if !response.status().is_success() {
            return Err(ApiError::Refused { code: response.status().as_u16(), error: path.to_owned() });
        }
        let mut tail = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(unreachable)? {
            tail.extend_from_slice(&chunk);
            let surplus = tail.len().saturating_sub(at_most);
            tail.drain(..surplus);
        }
        Ok(String::from_utf8_lossy(&tail).into_owned())
    }

    /// What is being done to an instance at this moment, by whomever.
    pub(crate) async fn underway(&self, instance: &str) -> Result<Option<Operation>, ApiError> {
        #[derive(Deserialize)]
        struct ByState {
            #[serde(default)]
            running: Vec<Operation>,
        }
        let found: ByState = self.get("/1.0/operations?recursion=1").await?;
        // A console or an exec session is an operation too, and may go on for ever.
        let is_work = |operation: &Operation| operation.concerns(instance) && operation.is_underway();
        let session = |operation: &Operation| {
            operation.description.starts_with("Executing") || operation.description.contains("console")
        };
        Ok(found.running.into_iter().find(|operation| is_work(operation) && !session(operation)))
    }

    pub(crate) async fn wait(&self, id: &str, waited_for: &str, patience: Duration) -> Result<Operation, ApiError> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let seconds = left.min(SLICE).as_secs().max(1);
            let path = format!("/1.0/operations/{id}/wait?timeout={seconds}");
            let asked = Instant::now();
            let envelope =
                self.request(Method::GET, &path, None, self.bounds.answer + Duration::from_secs(seconds)).await?;
            let operation: Operation = parse(&path, envelope.metadata)?;
            if operation.status_code == status::SUCCESS {
                return Ok(operation);
            }
            if !operation.is_underway() {
                let error = if operation.err.is_empty() { "it was cancelled" } else { &operation.err };
                let error = presentable(error);
                return Err(ApiError::Refused { code: operation.status_code, error });
            }
            if Instant::now() >= deadline {
                if operation.may_cancel {
                    // Best effort: who waited no longer wants it.
                    let _ = self.change(Method::DELETE, &format!("/1.0/operations/{id}"), None).await;
                }
                return Err(ApiError::TimedOut { waited_for: waited_for.to_owned(), after: patience });
            }
            if asked.elapsed() < PAUSE {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    async fn finish(&self, path: &str, envelope: &Envelope, patience: Duration) -> Result<Operation, ApiError> {
        if envelope.kind != "async" {
            let what = format!("an answer of type {:?} in place of an operation", envelope.kind);
            return Err(ApiError::Garbled { path: path.to_owned(), what });
        }
        let started: Operation = parse(path, envelope.metadata.clone())?;
        let what = presentable(&format!("Incus's operation {} ({})", started.description, envelope.operation));
        match self.wait(&started.id, &what, patience).await {
            Err(ApiError::NotFound(_)) => Err(ApiError::Lost { path: path.to_owned() }),
            finished => finished,
        }
    }

    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        timeout: Duration,
    ) -> Result<Envelope, ApiError> {
        let mut request = self.http.request(method, self.url(path)).timeout(timeout);
        if let Some(body) = body {
            request = request.json(body);
        }
        self.envelope(path, request).await
    }

    async fn envelope(&self, path: &str, request: reqwest::RequestBuilder) -> Result<Envelope, ApiError> {
        let garbled = |what: String| ApiError::Garbled { path: path.to_owned(), what: presentable(&what) };
        let mut response = request.send().await.map_err(|source| self.unreachable(source))?;
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|source| self.unreachable(source))? {
            if bytes.len() + chunk.len() > self.bounds.largest {
                return Err(garbled(format!("more than {} bytes", self.bounds.largest)));
            }
            bytes.extend_from_slice(&chunk);
        }
        let envelope: Envelope = serde_json::from_slice(&bytes).map_err(|error| garbled(error.to_string()))?;
        match (envelope.kind.as_str(), envelope.error_code) {
            ("error", 0) => Err(garbled(format!("an error without a code: {}", envelope.error))),
            ("error", 404) => Err(ApiError::NotFound(presentable(&envelope.error))),
            ("error", code) => Err(ApiError::Refused { code, error: presentable(&envelope.error) }),
            _ => Ok(envelope),
        }
    }

    /// The host of the URL is for show: the client always dials the socket.
    fn url(&self, path: &str) -> String {
        let separator = if path.contains('?') { '&' } else { '?' };
        format!("http://incus{path}{separator}project={}", self.project)
    }

    fn unreachable(&self, source: reqwest::Error) -> ApiError {
        ApiError::Unreachable { socket: self.socket.display().to_string(), source }
    }
}

fn parse<T: DeserializeOwned>(path: &str, value: Value) -> Result<T, ApiError> {
    serde_json::from_value(value)
        .map_err(|error| ApiError::Garbled { path: path.to_owned(), what: presentable(&error.to_string()) })
}

/// A text of whoever answered, as part of a line of ours: on one line, and not too long for it.
pub(super) fn presentable(text: &str) -> String {
    const LONGEST: usize = 500;
    let mut short = String::new();
    for character in text.chars().take(LONGEST) {
        if character.is_control() {
            short.extend(character.escape_default());
        } else {
            short.push(character);
        }
    }
    if text.chars().nth(LONGEST).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_found_in_a_path_by_its_whole_name() {
        assert_eq!(instance_of("/1.0/instances/buildkitd-a?project=kiln"), Some("buildkitd-a"));
        assert_eq!(instance_of("/1.0/instances/buildkitd-a/state"), Some("buildkitd-a"));
        assert_eq!(instance_of("/1.0/images/x"), None);
        let operation: Operation = serde_json::from_value(serde_json::json!({
            "id": "1", "status_code": 103, "resources": {"instances": ["/1.0/instances/buildkitd-ab?project=kiln"]},
        }))
        .expect("an operation");
        assert!(operation.concerns("buildkitd-ab") && !operation.concerns("buildkitd-a"));
    }

    #[tokio::test]
    async fn nobody_at_the_socket_is_not_absence() {
        let client = Client::new(Path::new("/nonexistent/unix.socket"), "kiln").expect("a client");
        let error = client.get::<Value>("/1.0").await.expect_err("nobody is there");
        assert!(matches!(error, ApiError::Unreachable { .. }), "{error:?}");
    }
}
