//! `/route`, `/prewarm`, `/complete`: the endpoints of the reference system, wire-compatible.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use kiln_domain::access::{Origin, Target, Verb};
use kiln_domain::lease::ParseTokenError;
use kiln_domain::{BuildSpec, Key, LeaseToken};
use kiln_wire::{CompleteRequest, RouteRequest, RouteResponse, check_branch};
use tokio::time::Instant;

use super::Api;
use super::access::{Asker, Refused};
use super::answers::{PlainError, with_retry_after};
use super::body::read;
use super::delivery::Delivery;
use super::heart::{Caller, RouteError, RouteOptions, Routed};
use super::prefer::{self, APPLIED, Wait, Waiting};
use crate::metrics::{Metrics, Outcome};

/// The reference's limit on a key in `/complete`, in bytes.
const MAX_KEY_BYTES: usize = 64;

/// Between two polls of a route that is not ready.
const POLL: std::time::Duration = std::time::Duration::from_secs(1);

/// Lease the project's daemon for one build.
///
/// Waits until the daemon answers, or with `wait` (or `Prefer: wait=N`, `Prefer: respond-async`) at most so long: then
/// the answer is 202 with `ready: false`, and the same request with its `buildId` goes on.
#[utoipa::path(
    post, path = "/route", tag = "builds", request_body = RouteRequest,
    params(
        Waiting,
        ("Prefer" = Option<String>, Header, description = "RFC 7240: `wait=N` is `?wait=N`, `respond-async` is `?wait=0`; the query wins"),
    ),
    responses(
        (status = 200, description = "The daemon answers; the lease is on disk", body = RouteResponse),
        (status = 202, description = "Not yet; the lease is on disk. Ask again with its buildId after Retry-After", body = RouteResponse),
        (status = 400, description = "Malformed request", body = String, content_type = "text/plain"),
        (status = 401, description = "Nothing that was shown proves who asks", body = String, content_type = "text/plain"),
        (status = 403, description = "Refused", body = String, content_type = "text/plain"),
        (status = 408, description = "The body did not arrive in time", body = String, content_type = "text/plain"),
        (status = 410, description = "There is no lease with this buildId any more", body = String, content_type = "text/plain"),
        (status = 429, description = "Too many requests wait, or builds hold this daemon; see Retry-After", body = String, content_type = "text/plain"),
        (status = 500, description = "The daemon could not be made", body = String, content_type = "text/plain"),
        (status = 503, description = "Not now; see Retry-After", body = String, content_type = "text/plain"),
        (status = 504, description = "The daemon did not answer in time; see Retry-After", body = String, content_type = "text/plain"),
    )
)]
pub(super) async fn route(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    query: Result<Query<Waiting>, QueryRejection>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, PlainError> {
    let request: RouteRequest = read(body).await?;
    let spec = spec_of(&request, &asker, Verb::Route)?;
    let resume = request.build_id.as_deref().map(token).transpose()?;
    let Query(query) = query.map_err(|error| PlainError::bad_request(error.body_text()))?;
    let Wait { span, applied } =
        prefer::read(&query, &headers, api.settings.route_wait).map_err(PlainError::bad_request)?;
    let options =
        RouteOptions { caller: caller_of(&request, &asker)?, credential: request.credential, wait: span, resume };
    let mut watch = Watch::begin(api.metrics.clone());
    let routed = api.heart.route(spec, options).await.inspect_err(|error| watch.end(outcome_of(error)))?;
    let mut answer = answer(routed, &api.metrics, &mut watch);
    if let Some(applied) = applied {
        answer.headers_mut().insert(APPLIED, applied);
    }
    Ok(answer)
}

/// The lease goes along: whoever writes the answer knows whether it arrived.
fn answer(routed: Box<dyn Routed>, metrics: &Arc<Metrics>, watch: &mut Watch) -> Response {
    let response = routed.response();
    let (status, outcome) =
        if response.ready { (StatusCode::OK, Outcome::Ready) } else { (StatusCode::ACCEPTED, Outcome::Waiting) };
    watch.end(outcome);
    let pause = (!response.ready).then_some(POLL);
    let mut answer = with_retry_after((status, Json(response)).into_response(), pause);
    answer.extensions_mut().insert(Delivery::of(routed, metrics.clone()));
    answer
}

/// Counts how a route ended, also when its client goes away in the middle of it.
struct Watch {
    metrics: Arc<Metrics>,
    began: Instant,
    outcome: Outcome,
}

impl Watch {
    fn begin(metrics: Arc<Metrics>) -> Self {
        Self { metrics, began: Instant::now(), outcome: Outcome::Abandoned }
    }

    fn end(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.metrics.routed(self.outcome, self.began.elapsed());
    }
}

const fn outcome_of(error: &RouteError) -> Outcome {
    match error {
        RouteError::Malformed(_) | RouteError::Refused(_) | RouteError::OtherIdentity(_) => Outcome::Refused,
        RouteError::Gone => Outcome::Gone,
        RouteError::Ensure(_) => Outcome::Failed,
        RouteError::Unavailable { .. } | RouteError::Queued { .. } | RouteError::NotAdmitted { .. } => {
            Outcome::Unavailable
        }
        RouteError::NotReady(_) => Outcome::NotReady,
        RouteError::TooManyLeases { .. } | RouteError::TooManyForks(_) | RouteError::Busy => Outcome::TooMany,
    }
}

/// Begin to wake the project's daemon, without a lease and without waiting. `credential` is ignored.
#[utoipa::path(
    post, path = "/prewarm", tag = "builds", request_body = RouteRequest,
    responses(
        (status = 202, description = "On its way, or ready", body = RouteResponse),
        (status = 400, description = "Malformed request", body = String, content_type = "text/plain"),
        (status = 401, description = "Nothing that was shown proves who asks", body = String, content_type = "text/plain"),
        (status = 403, description = "Refused", body = String, content_type = "text/plain"),
        (status = 408, description = "The body did not arrive in time", body = String, content_type = "text/plain"),
        (status = 429, description = "Too many requests wait; see Retry-After", body = String, content_type = "text/plain"),
        (status = 500, description = "The daemon could not be made", body = String, content_type = "text/plain"),
        (status = 503, description = "Not now; see Retry-After", body = String, content_type = "text/plain"),
    )
)]
pub(super) async fn prewarm(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    body: Body,
) -> Result<(StatusCode, Json<RouteResponse>), PlainError> {
    let request: RouteRequest = read(body).await?;
    let spec = spec_of(&request, &asker, Verb::Prewarm)?;
    if request.build_id.is_some() {
        return Err(PlainError::bad_request("buildId is for /route: a prewarm has no lease to go on with"));
    }
    let response = api.heart.prewarm(spec, &caller_of(&request, &asker)?).await?;
    Ok((StatusCode::ACCEPTED, Json(response)))
}

/// Release one lease. 204 also when there is none with this token: the build is over either way.
#[utoipa::path(
    post, path = "/complete", tag = "builds", request_body = CompleteRequest,
    responses(
        (status = 204, description = "Released, or there was nothing to release"),
        (status = 400, description = "Malformed request", body = String, content_type = "text/plain"),
        (status = 401, description = "Nothing that was shown proves who asks, and buildId is of no lease", body = String, content_type = "text/plain"),
        (status = 403, description = "Without buildId: not the caller's project", body = String, content_type = "text/plain"),
        (status = 408, description = "The body did not arrive in time", body = String, content_type = "text/plain"),
        (status = 500, description = "The release could not be written", body = String, content_type = "text/plain"),
        (status = 503, description = "Not now; see Retry-After", body = String, content_type = "text/plain"),
    )
)]
pub(super) async fn complete(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    body: Body,
) -> Result<StatusCode, PlainError> {
    let request: CompleteRequest = read(body).await?;
    if request.key.trim().is_empty() {
        return Err(PlainError::bad_request("key is required: it is the one that /route answered"));
    }
    if request.key.len() > MAX_KEY_BYTES {
        return Err(PlainError::bad_request(format!("key is too long: at most {MAX_KEY_BYTES} bytes are accepted")));
    }
    let token = request.build_id.as_deref().filter(|text| !text.is_empty()).map(token).transpose()?;
    if token.is_none() && !api.settings.nameless_release {
        return Err(PlainError::bad_request("buildId is required: it is the one that /route answered"));
    }
    // What is no key names no project, so there is nothing to release; and nothing is remembered of it (L17).
    let released = match (request.key.parse::<Key>(), token) {
        (Err(_), _) => false,
        (Ok(key), Some(token)) => api.heart.complete(&key, &token).await?,
        (Ok(key), None) => {
            may_release_oldest(&api, &asker, &key).await?;
            api.heart.complete_oldest(&key).await?
        }
    };
    // The token of a live lease is proof enough (F15). To one that has shown nothing else, a miss says nothing (F16).
    match asker.unproven(Verb::Release) {
        Some(refused) if !released => Err(refused.into()),
        _ => Ok(StatusCode::NO_CONTENT),
    }
}

/// No token is shown, so it takes the project.
async fn may_release_oldest(api: &Api, asker: &Asker, key: &Key) -> Result<(), PlainError> {
    let verb = Verb::ReleaseOldest;
    if asker.may(verb, Target::Nothing).is_ok() {
        return Ok(());
    }
    if let Some(refused) = asker.unproven(verb) {
        return Err(refused.into());
    }
    let owner = api.heart.owner(key).await.map_err(Refused::Lookup)?;
    Ok(asker.may(verb, owner.as_ref().map_or(Target::Nothing, Target::Project))?)
}

/// The repository that was proven goes before the one in the body, which then need not be there (K7).
fn spec_of(request: &RouteRequest, asker: &Asker, verb: Verb) -> Result<BuildSpec, PlainError> {
    let proven = asker.caller.standing.repo().map(|repo| RouteRequest { repo: repo.to_string(), ..request.clone() });
    let spec = proven.as_ref().unwrap_or(request).spec().map_err(|error| PlainError::bad_request(error.to_string()))?;
    asker.may(verb, Target::Project(&spec.repo))?;
    Ok(spec)
}

/// A pull request of a trusted build would be ignored, and whoever sends one believes the contrary.
fn caller_of(request: &RouteRequest, asker: &Asker) -> Result<Caller, PlainError> {
    let RouteRequest { untrusted, pull_request, branch, .. } = request;
    let claimed = Origin { untrusted: *untrusted, pull_request: pull_request.clone() };
    let Origin { untrusted, pull_request } = asker.caller.standing.origin(claimed);
    if pull_request.is_some() && !untrusted {
        return Err(PlainError::bad_request("pullRequest is for untrusted builds: send untrusted: true with it"));
    }
    let branch = branch.as_ref().filter(|branch| !branch.is_empty());
    branch.map(|branch| check_branch(branch)).transpose().map_err(PlainError::bad_request)?;
    Ok(Caller { untrusted, pull_request, branch: branch.cloned(), who: Some(asker.caller.who.as_str().into()) })
}

fn token(text: &str) -> Result<LeaseToken, PlainError> {
    text.parse().map_err(|error: ParseTokenError| PlainError::bad_request(error.to_string()))
}
