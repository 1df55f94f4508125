//! HTTP to kilnd. Every call has a deadline; every error says what to do.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use kiln_domain::Key;
use kiln_wire::{ApiError, CompleteRequest, ProjectView, RouteRequest, RouteResponse};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout_at};

use super::args::Connection;

/// For what kilnd answers from memory and its database.
const QUICK: Duration = Duration::from_secs(10);
/// A stop may drain a daemon first.
const STOP: Duration = Duration::from_mins(2);
/// How long a release is tried; the lease ends by itself after that.
const RELEASE: Duration = Duration::from_secs(10);
/// How long nobody at the socket is taken for kilnd's restart.
const RESTART: Duration = Duration::from_secs(3);
/// Between two tries of a route.
const PAUSE: Duration = Duration::from_millis(500);
/// No answer of kilnd comes near this.
const MAX_ANSWER_BYTES: usize = 64 << 20;

#[derive(Debug, Error)]
pub(super) enum ClientError {
    #[error("--url is {url:?}: {why}")]
    BadUrl { url: String, why: &'static str },
    #[error("cannot set up an HTTP client")]
    Setup(#[source] reqwest::Error),
    #[error(
        "kilnd is not running: nothing answers at {at}; start it (`kilnd`, or `systemctl start kilnd` where it is a \
         service), or say where it is with --socket or --url"
    )]
    NotRunning { at: String, source: io::Error },
    #[error("kilnd's socket {at} is not open to this user; run as root, or join the socket's group")]
    Forbidden { at: String, source: io::Error },
    #[error("kilnd did not {what} within {} s; `kiln ps` and kilnd's log say what it waits for", .after.as_secs())]
    TimedOut { what: &'static str, after: Duration },
    #[error("the connection to kilnd at {at} broke while it was to {what}")]
    Broken { at: String, what: &'static str, source: reqwest::Error },
    #[error("kilnd did not {what}: {message} ({status})")]
    Refused { what: &'static str, status: StatusCode, message: String },
    #[error("what answers at {at} is not this version of kilnd")]
    Answer { at: String, source: serde_json::Error },
    #[error("kilnd's answer is larger than {MAX_ANSWER_BYTES} bytes")]
    TooLarge,
}

impl ClientError {
    /// Whether kilnd, rather than the request, is what is missing.
    pub(super) fn is_unavailable(&self) -> bool {
        match self {
            Self::NotRunning { .. } | Self::Forbidden { .. } | Self::TimedOut { .. } | Self::Broken { .. } => true,
            Self::Refused { status, .. } => is_passing(*status),
            _ => false,
        }
    }

    /// Whether the same request may be answered in a moment.
    fn is_retryable(&self) -> bool {
        match self {
            Self::Broken { .. } | Self::NotRunning { .. } => true,
            Self::Refused { status, .. } => is_passing(*status),
            _ => false,
        }
    }
}

/// Nobody at the socket is a restart for a moment, and then no kilnd.
fn may_return(error: &ClientError, start: Instant) -> bool {
    !matches!(error, ClientError::NotRunning { .. }) || start.elapsed() < RESTART
}

fn is_passing(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}

/// A connection to one kilnd; cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Client {
    http: reqwest::Client,
    base: String,
    /// Where kilnd is, for messages.
    at: String,
}

impl Client {
    pub(super) fn new(connection: &Connection) -> Result<Self, ClientError> {
        // A proxy from the environment is for the world outside, not for this machine's kilnd.
        let builder = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none());
        let (builder, base, at) = match connection.url.as_deref().filter(|url| !url.is_empty()) {
            Some(url) => (builder, checked(url)?, url.to_owned()),
            None => (
                builder.unix_socket(connection.socket.as_path()),
                "http://kiln".to_owned(),
                connection.socket.display().to_string(),
            ),
        };
        let http = builder.connect_timeout(QUICK).build().map_err(ClientError::Setup)?;
        Ok(Self { http, base, at })
    }

    /// `POST /route`, tried again until `wait` is over while kilnd says that it may work later. An answer that got lost
    /// left a lease behind that nobody uses; it ends with its grace period.
    pub(super) async fn route(&self, request: &RouteRequest, wait: Duration) -> Result<RouteResponse, ClientError> {
        let start = Instant::now();
        let mut last = ClientError::TimedOut { what: "route", after: wait };
        while let Some(left) = wait.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            let call = self.http.post(self.url("/route")).json(request);
            match self.call("route", call, left).await.and_then(|body| self.decode(&body)) {
                Err(error) if error.is_retryable() && may_return(&error, start) => last = error,
                other => return other,
            }
            sleep(PAUSE.min(wait.saturating_sub(start.elapsed()))).await;
        }
        Err(last)
    }

    /// `POST /complete`, tried for a few seconds: kilnd may just restart.
    pub(super) async fn complete(&self, key: &Key, build_id: Option<&str>) -> Result<(), ClientError> {
        let request = CompleteRequest { key: key.to_string(), build_id: build_id.map(str::to_owned) };
        let end = Instant::now() + RELEASE;
        let mut pause = Duration::from_millis(200);
        loop {
            let call = self.http.post(self.url("/complete")).json(&request);
            let left = end.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
            match self.call("release the build", call, left).await {
                Err(error) if error.is_retryable() && Instant::now() + pause < end => sleep(pause).await,
                other => return other.map(drop),
            }
            pause *= 2;
        }
    }

    pub(super) async fn projects(&self) -> Result<Vec<ProjectView>, ClientError> {
        self.get("list its projects", "/v1/projects").await
    }

    pub(super) async fn project(&self, key: &Key) -> Result<ProjectView, ClientError> {
        self.get("show the project", &format!("/v1/projects/{key}")).await
    }

    pub(super) async fn stop(&self, key: &Key) -> Result<(), ClientError> {
        let call = self.http.request(Method::POST, self.url(&format!("/v1/projects/{key}/stop")));
        self.call("stop the project", call, STOP).await.map(drop)
    }

    /// `GET /v1/events`, as a stream that ends when kilnd ends it.
    pub(super) async fn events(&self, follow: bool) -> Result<Response, ClientError> {
        let what = "show its events";
        let call = self.http.get(self.url(&format!("/v1/events?follow={follow}")));
        let sent = timeout_at(Instant::now() + QUICK, call.send());
        let response = sent
            .await
            .map_err(|_| ClientError::TimedOut { what, after: QUICK })?
            .map_err(|e| self.failed(what, QUICK, e))?;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(self.refused(what, response).await)
    }

    /// What a stream that broke off means.
    pub(super) fn broken_stream(&self, error: reqwest::Error) -> ClientError {
        self.failed("show its events", QUICK, error)
    }

    async fn get<T: DeserializeOwned>(&self, what: &'static str, path: &str) -> Result<T, ClientError> {
        let body = self.call(what, self.http.get(self.url(path)), QUICK).await?;
        self.decode(&body)
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn decode<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, ClientError> {
        serde_json::from_slice(body).map_err(|source| ClientError::Answer { at: self.at.clone(), source })
    }

    async fn call(&self, what: &'static str, call: RequestBuilder, wait: Duration) -> Result<Vec<u8>, ClientError> {
        let response = call.timeout(wait).send().await.map_err(|error| self.failed(what, wait, error))?;
        if !response.status().is_success() {
            return Err(self.refused(what, response).await);
        }
        self.body(what, wait, response).await
    }

    async fn body(&self, what: &'static str, wait: Duration, mut response: Response) -> Result<Vec<u8>, ClientError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.failed(what, wait, error))? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_ANSWER_BYTES {
                return Err(ClientError::TooLarge);
            }
        }
        Ok(body)
    }

    /// The server's words: a JSON object's `error`, or plain text as the reference's endpoints have it.
    async fn refused(&self, what: &'static str, response: Response) -> ClientError {
        let status = response.status();
        let body = self.body(what, QUICK, response).await.unwrap_or_default();
        let message = match serde_json::from_slice::<ApiError>(&body) {
            Ok(said) => said.error,
            Err(_) => String::from_utf8_lossy(&body).trim().chars().take(4000).collect(),
        };
        let message = if message.is_empty() { "it gave no reason".to_owned() } else { message };
        ClientError::Refused { what, status, message }
    }

    fn failed(&self, what: &'static str, after: Duration, error: reqwest::Error) -> ClientError {
        let at = self.at.clone();
        if error.is_timeout() {
            return ClientError::TimedOut { what, after };
        }
        match connect_error(&error) {
            Some(source) if source.kind() == io::ErrorKind::PermissionDenied => ClientError::Forbidden { at, source },
            Some(source) => ClientError::NotRunning { at, source },
            None => ClientError::Broken { at, what, source: error.without_url() },
        }
    }
}

/// The system's own word for why no connection came to be.
fn connect_error(error: &reqwest::Error) -> Option<io::Error> {
    if !error.is_connect() {
        return None;
    }
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref::<io::Error>() {
            return Some(match found.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::new(found.kind(), found.to_string()),
            });
        }
        cause = error.source();
    }
    Some(io::Error::other(error.to_string()))
}

fn checked(url: &str) -> Result<String, ClientError> {
    let refuse = |why| ClientError::BadUrl { url: url.to_owned(), why };
    let parsed = reqwest::Url::parse(url).map_err(|_| refuse("write it as http://HOST:PORT"))?;
    match parsed.scheme() {
        "http" if parsed.has_host() => Ok(url.trim_end_matches('/').to_owned()),
        "https" => Err(refuse("kilnd speaks plain HTTP on loopback only; tunnel to it, and write http://HOST:PORT")),
        _ => Err(refuse("write it as http://HOST:PORT")),
    }
}
