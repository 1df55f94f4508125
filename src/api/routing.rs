//! `/route`, `/prewarm`, `/complete`: the endpoints of the reference system, wire-compatible.

use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use http_body_util::BodyExt as _;
use kiln_domain::lease::ParseTokenError;
use kiln_domain::{Key, LeaseToken};
use kiln_wire::{CompleteRequest, DecodeError, MAX_BODY_BYTES, RouteRequest, RouteResponse, decode};
use serde::de::DeserializeOwned;

use super::Api;
use super::answers::PlainError;
use super::heart::RouteOptions;

/// The reference's limits: time for a request's body, and the bytes of a key in `/complete`.
const BODY_TIME: Duration = Duration::from_secs(15);
const MAX_KEY_BYTES: usize = 64;

/// Lease the project's daemon for one build. Waits until the daemon answers.
#[utoipa::path(
    post, path = "/route", tag = "builds", request_body = RouteRequest,
    responses(
        (status = 200, description = "The daemon answers; the lease is on disk", body = RouteResponse),
        (status = 400, description = "Malformed request", body = String, content_type = "text/plain"),
        (status = 408, description = "The body did not arrive in time", body = String, content_type = "text/plain"),
        (status = 403, description = "Refused", body = String, content_type = "text/plain"),
        (status = 429, description = "Too many requests wait", body = String, content_type = "text/plain"),
        (status = 500, description = "The daemon could not be made", body = String, content_type = "text/plain"),
        (status = 503, description = "Not now; see Retry-After", body = String, content_type = "text/plain"),
        (status = 504, description = "The daemon did not answer in time", body = String, content_type = "text/plain"),
    )
)]
pub(super) async fn route(State(api): State<Api>, body: Body) -> Result<Json<RouteResponse>, PlainError> {
    let request: RouteRequest = read(body).await?;
    let spec = request.spec().map_err(|error| PlainError::bad_request(error.to_string()))?;
    let options = RouteOptions { untrusted: request.untrusted, credential: request.credential, ..RouteOptions::default() };
    let routed = api.heart.route(spec, options).await?;
    // From here to the socket nothing waits: whoever went away before this line has dropped `routed`, which releases
    // the lease; an answer lost after it costs the lease's grace period.
    Ok(Json(routed.deliver()))
}

/// Begin to wake the project's daemon, without a lease and without waiting. `credential` is ignored.
#[utoipa::path(
    post, path = "/prewarm", tag = "builds", request_body = RouteRequest,
    responses(
        (status = 202, description = "On its way, or ready", body = RouteResponse),
        (status = 400, description = "Malformed request", body = String, content_type = "text/plain"),
        (status = 408, description = "The body did not arrive in time", body = String, content_type = "text/plain"),
        (status = 403, description = "Refused", body = String, content_type = "text/plain"),
        (status = 429, description = "Too many requests wait", body = String, content_type = "text/plain"),
        (status = 500, description = "The daemon could not be made", body = String, content_type = "text/plain"),
        (status = 503, description = "Not now; see Retry-After", body = String, content_type = "text/plain"),
    )
)]
pub(super) async fn prewarm(
    State(api): State<Api>,
    body: Body,
) -> Result<(StatusCode, Json<RouteResponse>), PlainError> {
    let request: RouteRequest = read(body).await?;
    let spec = request.spec().map_err(|error| PlainError::bad_request(error.to_string()))?;
    let response = api.heart.prewarm(spec, request.untrusted).await?;
    Ok((StatusCode::ACCEPTED, Json(response)))
}

/// Release one lease. 204 also when there is none with this token: the build is over either way.
#[utoipa::path(
    post, path = "/complete", tag = "builds", request_body = CompleteRequest,
    responses(
        (status = 204, description = "Released, or there was nothing to release"),
        (status = 400, description = "Malformed request", body = String, content_type = "text/plain"),
        (status = 408, description = "The body did not arrive in time", body = String, content_type = "text/plain"),
        (status = 500, description = "The release could not be written", body = String, content_type = "text/plain"),
        (status = 503, description = "Not now; see Retry-After", body = String, content_type = "text/plain"),
    )
)]
pub(super) async fn complete(State(api): State<Api>, body: Body) -> Result<StatusCode, PlainError> {
    let request: CompleteRequest = read(body).await?;
    if request.key.trim().is_empty() {
        return Err(PlainError::bad_request("key is required: it is the one that /route answered"));
    }
    if request.key.len() > MAX_KEY_BYTES {
        return Err(PlainError::bad_request(format!("key is too long: at most {MAX_KEY_BYTES} bytes are accepted")));
    }
    let token: LeaseToken = match request.build_id.as_deref() {
        None | Some("") => {
            return Err(PlainError::bad_request("buildId is required: it is the one that /route answered"));
        }
        Some(text) => text.parse().map_err(|error: ParseTokenError| PlainError::bad_request(error.to_string()))?,
    };
    // What is no key names no project, so there is nothing to release; and nothing is remembered of it (L17).
    if let Ok(key) = request.key.parse::<Key>() {
        api.heart.complete(&key, &token).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

async fn read<T: DeserializeOwned>(body: Body) -> Result<T, PlainError> {
    let bytes = tokio::time::timeout(BODY_TIME, collect(body)).await.map_err(|_| {
        let text = format!("the request's body did not arrive within {} s", BODY_TIME.as_secs());
        PlainError::new(StatusCode::REQUEST_TIMEOUT, text)
    })??;
    decode(&bytes).map_err(|error| PlainError::bad_request(error.to_string()))
}

/// Of a body that is too large this much is read and thrown away: a client that writes all before it reads then gets its
/// answer, where closing under it would only show it a broken connection.
const DISCARDED_BYTES: usize = 16 << 20;

/// Keeps nothing beyond the limit: memory does not grow with what a client sends.
async fn collect(mut body: Body) -> Result<Vec<u8>, PlainError> {
    let mut bytes = Vec::new();
    let mut seen = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| PlainError::bad_request(format!("the request's body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        seen += data.len();
        if seen <= MAX_BODY_BYTES {
            bytes.extend_from_slice(&data);
        } else if seen > DISCARDED_BYTES {
            break;
        }
    }
    if seen > MAX_BODY_BYTES {
        return Err(PlainError::bad_request(DecodeError::TooLarge(seen).to_string()));
    }
    Ok(bytes)
}
