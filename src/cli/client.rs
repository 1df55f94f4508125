//! HTTP to kilnd. Every call has a deadline; every error says what to do.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kiln_domain::access::TokenId;
use kiln_domain::{Key, LeaseToken};
use kiln_wire::{
    Adopt, ApiError, CacheView, CompleteRequest, ConnectionView, DiskUsage, Emptied, LeaseView, NewToken, Orphan,
    OrphanKind, ProjectView, RemoveOrphan, Renew, Reset, Rollback, RolledBack, RouteRequest, RouteResponse,
    SettingsPatch, SnapshotView, Taken, TokenRequest, TokenView, Trashed, Why,
};
use reqwest::header::{AUTHORIZATION, HeaderValue, RETRY_AFTER};
use reqwest::{RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout_at};

use super::args::Connection;

/// For what kilnd answers from memory and its database.
const QUICK: Duration = Duration::from_secs(10);
/// A stop may drain a daemon first, and freeing caches may take its time: above kilnd's own bounds, which say more.
const STOP: Duration = Duration::from_mins(11);
/// How long a release is tried; the lease ends by itself after that.
const RELEASE: Duration = Duration::from_secs(10);
/// No answer of kilnd comes near this.
const MAX_ANSWER_BYTES: usize = 64 << 20;

#[derive(Debug, Error)]
pub(super) enum ClientError {
    #[error("--url is {url:?}: {why}")]
    BadUrl { url: String, why: &'static str },
    #[error("cannot read the token file {path}")]
    TokenFile { path: PathBuf, source: io::Error },
    #[error("the token in {from} is none that could be sent: it has blanks in it, or what cannot be printed")]
    Token { from: String },
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
    #[error("no daemon within {} s: it is {status}; `kiln why` says more", .after.as_secs())]
    NotReady { after: Duration, status: String },
    #[error("the connection to kilnd at {at} broke while it was to {what}")]
    Broken { at: String, what: &'static str, source: reqwest::Error },
    #[error("kilnd did not {what}: {message} ({status})")]
    Refused { what: &'static str, status: StatusCode, message: String, retry_after: Option<Duration> },
    #[error("what answers at {at} is not this version of kilnd")]
    Answer { at: String, source: serde_json::Error },
    #[error("kilnd's answer is larger than {MAX_ANSWER_BYTES} bytes")]
    TooLarge,
}

impl ClientError {
    /// Whether kilnd, rather than the request, is what is missing.
    pub(super) fn is_unavailable(&self) -> bool {
        match self {
            Self::NotRunning { .. }
            | Self::Forbidden { .. }
            | Self::Broken { .. }
            | Self::TimedOut { .. }
            | Self::NotReady { .. } => true,
            Self::Refused { status, .. } => is_passing(*status),
            _ => false,
        }
    }

    /// Whether the same request may be answered in a moment.
    pub(super) fn is_retryable(&self) -> bool {
        match self {
            Self::Broken { .. } | Self::NotRunning { .. } | Self::TimedOut { .. } => true,
            Self::Refused { status, .. } => is_passing(*status),
            _ => false,
        }
    }

    /// Whether what the request was about has ended.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Refused { status: StatusCode::GONE, .. })
    }

    /// Whether kilnd is too old for a field of the request.
    pub(super) fn knows_no(&self, field: &str) -> bool {
        let Self::Refused { status: StatusCode::BAD_REQUEST, message, .. } = self else { return false };
        message.contains(&format!("unknown field `{field}`"))
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
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
        let builder = match token(connection)? {
            Some(token) => builder.default_headers(std::iter::once((AUTHORIZATION, token)).collect()),
            None => builder,
        };
        let http = builder.connect_timeout(QUICK).build().map_err(ClientError::Setup)?;
        Ok(Self { http, base, at })
    }

    /// One `POST /route` that is to be answered after `poll`, with `ready: false` if need be. A kilnd that does not know
    /// short polls answers when it is done.
    pub(super) async fn route(
        &self,
        request: &RouteRequest,
        poll: Duration,
        patience: Duration,
    ) -> Result<RouteResponse, ClientError> {
        // A preference, unlike a query, is cut to what kilnd's own limit allows.
        let prefer = format!("respond-async, wait={}", poll.as_secs());
        let call = self.http.post(self.url("/route")).header("prefer", prefer).json(request);
        let body = self.call("route", call, patience).await?;
        self.decode(&body)
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

    pub(super) async fn why(&self, key: &Key) -> Result<Why, ClientError> {
        self.get("explain the project", &format!("/v1/projects/{key}/why")).await
    }

    pub(super) async fn set(&self, key: &Key, patch: &SettingsPatch) -> Result<ProjectView, ClientError> {
        let what = "change the settings";
        let call = self.http.patch(self.url(&format!("/v1/projects/{key}/settings"))).json(patch);
        let body = self.call(what, call, QUICK).await?;
        self.decode(&body)
    }

    pub(super) async fn stop(&self, key: &Key, force: bool) -> Result<(), ClientError> {
        // Without a query an older kilnd understands it too.
        let query = if force { "?force=true" } else { "" };
        let call = self.http.post(self.url(&format!("/v1/projects/{key}/stop{query}")));
        self.call("stop the project", call, STOP).await.map(drop)
    }

    pub(super) async fn remove(&self, key: &Key) -> Result<(), ClientError> {
        let call = self.http.delete(self.url(&format!("/v1/projects/{key}")));
        self.call("remove the project", call, STOP).await.map(drop)
    }

    pub(super) async fn renew(&self, token: &LeaseToken) -> Result<LeaseView, ClientError> {
        let path = format!("/v1/leases/{}/renew", token.hash().as_str());
        let request = Renew { build_id: token.reveal().to_owned() };
        let body = self.call("renew the lease", self.http.post(self.url(&path)).json(&request), QUICK).await?;
        self.decode(&body)
    }

    pub(super) async fn cache(&self, key: &Key, measure: bool) -> Result<CacheView, ClientError> {
        let query = if measure { "" } else { "?usage=false" };
        let call = self.http.get(self.url(&format!("/v1/projects/{key}/cache{query}")));
        let body = self.call("look at the cache", call, STOP).await?;
        self.decode(&body)
    }

    /// The newest, and whether it was taken for this.
    pub(super) async fn snapshot(&self, key: &Key) -> Result<(SnapshotView, bool), ClientError> {
        let what = "take a snapshot";
        let call = self.http.post(self.url(&format!("/v1/projects/{key}/snapshots")));
        let response = self.answer(what, call, STOP).await?;
        let is_new = response.status() == StatusCode::CREATED;
        let body = self.body(what, STOP, response).await?;
        Ok((self.decode(&body)?, is_new))
    }

    pub(super) async fn roll_back(&self, key: &Key, request: &Rollback) -> Result<RolledBack, ClientError> {
        let call = self.http.post(self.url(&format!("/v1/projects/{key}/rollback"))).json(request);
        let body = self.call("put the cache back", call, STOP).await?;
        self.decode(&body)
    }

    pub(super) async fn reset(&self, key: &Key, force: bool) -> Result<(), ClientError> {
        let call = self.http.post(self.url(&format!("/v1/projects/{key}/reset"))).json(&Reset { force });
        self.call("empty the cache", call, STOP).await.map(drop)
    }

    pub(super) async fn disk_usage(&self) -> Result<DiskUsage, ClientError> {
        let body = self.call("measure its caches", self.http.get(self.url("/v1/caches")), STOP).await?;
        self.decode(&body)
    }

    pub(super) async fn orphans(&self) -> Result<Vec<Orphan>, ClientError> {
        let body = self.call("look for orphans", self.http.get(self.url("/v1/orphans")), STOP).await?;
        self.decode(&body)
    }

    pub(super) async fn adopt(&self, kind: Option<OrphanKind>, name: &str) -> Result<Taken, ClientError> {
        let request = Adopt { kind, name: name.to_owned() };
        let call = self.http.post(self.url("/v1/orphans/adopt")).json(&request);
        let body = self.call("adopt it", call, STOP).await?;
        self.decode(&body)
    }

    pub(super) async fn remove_orphan(&self, kind: OrphanKind, name: &str) -> Result<(), ClientError> {
        let request = RemoveOrphan { kind, name: name.to_owned() };
        let call = self.http.post(self.url("/v1/orphans/remove")).json(&request);
        self.call("remove it", call, STOP).await.map(drop)
    }

    pub(super) async fn trash(&self) -> Result<Vec<Trashed>, ClientError> {
        let body = self.call("look into its trash", self.http.get(self.url("/v1/trash")), STOP).await?;
        self.decode(&body)
    }

    pub(super) async fn restore(&self, name: &str) -> Result<Taken, ClientError> {
        let call = self.http.post(self.url(&format!("/v1/trash/{}/restore", segment(name))));
        let body = self.call("give it back", call, STOP).await?;
        self.decode(&body)
    }

    pub(super) async fn discard(&self, name: &str) -> Result<(), ClientError> {
        let call = self.http.delete(self.url(&format!("/v1/trash/{}", segment(name))));
        self.call("delete it", call, STOP).await.map(drop)
    }

    pub(super) async fn empty_trash(&self) -> Result<Emptied, ClientError> {
        let body = self.call("empty its trash", self.http.delete(self.url("/v1/trash")), STOP).await?;
        self.decode(&body)
    }

    pub(super) async fn connections(&self) -> Result<Vec<ConnectionView>, ClientError> {
        let call = self.http.get(self.url("/v1/connections"));
        let body = self.call("list its connections", call, QUICK).await?;
        self.decode(&body)
    }

    pub(super) async fn create_token(&self, request: &TokenRequest) -> Result<NewToken, ClientError> {
        let body = self.call("make a token", self.http.post(self.url("/v1/tokens")).json(request), QUICK).await?;
        self.decode(&body)
    }

    pub(super) async fn tokens(&self) -> Result<Vec<TokenView>, ClientError> {
        let body = self.call("list its tokens", self.http.get(self.url("/v1/tokens")), QUICK).await?;
        self.decode(&body)
    }

    pub(super) async fn revoke_token(&self, id: &TokenId) -> Result<(), ClientError> {
        let call = self.http.delete(self.url(&format!("/v1/tokens/{id}")));
        self.call("revoke the token", call, QUICK).await.map(drop)
    }

    /// `GET /v1/events`, as a stream that ends when kilnd ends it.
    pub(super) async fn events(&self, follow: bool, of: Option<&Key>) -> Result<Response, ClientError> {
        let what = "show its events";
        let of = of.map_or_else(String::new, |key| format!("&key={key}"));
        let call = self.http.get(self.url(&format!("/v1/events?follow={follow}{of}")));
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
        let response = self.answer(what, call, wait).await?;
        self.body(what, wait, response).await
    }

    async fn answer(&self, what: &'static str, call: RequestBuilder, wait: Duration) -> Result<Response, ClientError> {
        let response = call.timeout(wait).send().await.map_err(|error| self.failed(what, wait, error))?;
        if !response.status().is_success() {
            return Err(self.refused(what, response).await);
        }
        Ok(response)
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
        let pause = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let retry_after = pause.map(Duration::from_secs);
        let body = self.body(what, QUICK, response).await.unwrap_or_default();
        let message = match serde_json::from_slice::<ApiError>(&body) {
            Ok(said) => said.error,
            Err(_) => String::from_utf8_lossy(&body).trim().chars().take(4000).collect(),
        };
        let message = if message.is_empty() { "it gave no reason".to_owned() } else { message };
        ClientError::Refused { what, status, message, retry_after }
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

/// A name as one segment of a path: what could end the segment, or start a query, is written in hexadecimal. A name that
/// begins with a dot, which could be a way up, has been refused with the command line.
fn segment(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let one = |byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    name.bytes().map(one).collect()
}

/// A token is never an argument, which every user of the host could read.
fn token(connection: &Connection) -> Result<Option<HeaderValue>, ClientError> {
    let (from, text) = match (super::variable("KILN_TOKEN"), &connection.token_file) {
        (Some(text), _) => ("KILN_TOKEN".to_owned(), text.to_string_lossy().into_owned()),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path)
                .map_err(|source| ClientError::TokenFile { path: path.clone(), source })?;
            (path.display().to_string(), text)
        }
        (None, None) => return Ok(None),
    };
    // Files end in a line's end (F48).
    let text = text.trim();
    let is_token = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    let header = is_token.then(|| HeaderValue::try_from(format!("Bearer {text}")).ok()).flatten();
    let mut header = header.ok_or(ClientError::Token { from })?;
    header.set_sensitive(true);
    Ok(Some(header))
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
