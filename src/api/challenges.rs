//! A way in for runs to which their forge gives no token (docs/identity.md).

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use kiln_wire::{ApiError, Challenge, ChallengeAnswer, ChallengeGrant, ChallengeRequest};

use super::Api;
use super::answers::{JsonError, with_retry_after};
use super::body::read;
use crate::clock::rfc3339;
use crate::identity::challenge::{Answered, ChallengeError, Challenges};
use crate::identity::oidc::Refusal;

impl From<ChallengeError> for JsonError {
    fn from(error: ChallengeError) -> Self {
        let text = error.to_string();
        match error.refusal() {
            Refusal::Unproven => Self::bad_request(text),
            Refusal::NotListed => Self::new(StatusCode::FORBIDDEN, text),
            Refusal::Unavailable { retry_after } => Self::later(text).after(retry_after),
        }
    }
}

/// Ask for a challenge, for a run of a repository.
#[utoipa::path(
    post, path = "/v1/challenges", tag = "tokens", request_body = ChallengeRequest,
    responses(
        (status = 201, description = "Print the words, keep the secret", body = Challenge),
        (status = 400, description = "Malformed request", body = ApiError),
        (status = 403, description = "No challenge can be asked for this repository", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 503, description = "Too many are under way; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn ask(State(api): State<Api>, body: Body) -> Result<Response, JsonError> {
    let ChallengeRequest { repo, run } = read(body).await?;
    let asked = challenges(&api)?.ask(&repo, run)?;
    let challenge = Challenge { words: asked.words, secret: asked.secret, until: rfc3339(asked.until) };
    Ok(kept_by_nobody((StatusCode::CREATED, Json(challenge)).into_response()))
}

/// Answer a challenge: the run has printed its words.
#[utoipa::path(
    post, path = "/v1/challenges/answer", tag = "tokens", request_body = ChallengeAnswer,
    responses(
        (status = 200, description = "A token for untrusted builds of this pull request", body = ChallengeGrant),
        (status = 202, description = "The forge does not show it yet: ask again after Retry-After"),
        (status = 400, description = "Malformed, or no challenge has this secret", body = ApiError),
        (status = 403, description = "The forge does not say that", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 503, description = "The forge cannot be asked now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn answer(State(api): State<Api>, body: Body) -> Result<Response, JsonError> {
    let ChallengeAnswer { secret } = read(body).await?;
    match challenges(&api)?.answer(&secret).await? {
        Answered::NotYet { retry_after } => {
            Ok(with_retry_after(StatusCode::ACCEPTED.into_response(), Some(retry_after)))
        }
        Answered::Granted { token, until } => {
            let grant = ChallengeGrant { token, until: rfc3339(until) };
            Ok(kept_by_nobody(Json(grant).into_response()))
        }
    }
}

fn challenges(api: &Api) -> Result<&Challenges, JsonError> {
    let none =
        || JsonError::new(StatusCode::FORBIDDEN, "no challenge can be asked here: no forge is configured for it");
    api.callers.challenges().ok_or_else(none)
}

fn kept_by_nobody(mut answer: Response) -> Response {
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
