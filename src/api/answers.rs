//! Errors as answers: plain text at the three endpoints of the reference, JSON below `/v1`.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use kiln_domain::access::Denied;
use kiln_wire::ApiError;

use super::access::Refused;
use super::heart::{CompleteError, RenewError, RouteError, VerbError};
use crate::store::StoreError;

/// For a database that has too much to do.
const A_MOMENT: Duration = Duration::from_secs(1);

/// An error of `/route`, `/prewarm` or `/complete`.
#[derive(Debug)]
pub(super) struct PlainError {
    status: StatusCode,
    text: String,
    retry_after: Option<Duration>,
}

impl PlainError {
    pub(super) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), retry_after: None }
    }

    pub(super) fn bad_request(text: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, text)
    }
}

impl From<RouteError> for PlainError {
    fn from(error: RouteError) -> Self {
        Self { status: error.status(), retry_after: error.retry_after(), text: error.to_string() }
    }
}

impl From<Refused> for PlainError {
    fn from(refused: Refused) -> Self {
        Self { retry_after: refused.retry_after(), ..Self::new(refused.status(), refused.text()) }
    }
}

impl From<Denied> for PlainError {
    fn from(denied: Denied) -> Self {
        Refused::from(denied).into()
    }
}

impl From<Refused> for JsonError {
    fn from(refused: Refused) -> Self {
        Self { retry_after: refused.retry_after(), ..Self::new(refused.status(), refused.text()) }
    }
}

impl From<Denied> for JsonError {
    fn from(denied: Denied) -> Self {
        Refused::from(denied).into()
    }
}

impl From<CompleteError> for PlainError {
    fn from(error: CompleteError) -> Self {
        Self { status: error.status(), retry_after: error.retry_after(), text: error.to_string() }
    }
}

impl IntoResponse for PlainError {
    fn into_response(self) -> Response {
        let response = (self.status, self.text + "\n").into_response();
        with_retry_after(response, self.retry_after)
    }
}

/// An error below `/v1`.
#[derive(Debug)]
pub(super) struct JsonError {
    status: StatusCode,
    error: String,
    retry_after: Option<Duration>,
}

impl JsonError {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self { status, error: error.into(), retry_after: None }
    }

    pub(super) fn bad_request(error: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error)
    }

    pub(super) fn after(self, pause: Duration) -> Self {
        Self { retry_after: Some(pause), ..self }
    }

    /// Not now: in a moment.
    pub(super) fn later(error: impl Into<String>) -> Self {
        Self { retry_after: Some(A_MOMENT), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, error) }
    }
}

impl From<StoreError> for JsonError {
    fn from(failure: StoreError) -> Self {
        VerbError::from(failure).into()
    }
}

impl From<RenewError> for JsonError {
    fn from(error: RenewError) -> Self {
        Self { status: error.status(), retry_after: error.retry_after(), error: error.to_string() }
    }
}

impl From<VerbError> for JsonError {
    fn from(error: VerbError) -> Self {
        Self { status: error.status(), retry_after: error.retry_after(), error: error.to_string() }
    }
}

impl IntoResponse for JsonError {
    fn into_response(self) -> Response {
        let response = (self.status, Json(ApiError { error: self.error })).into_response();
        with_retry_after(response, self.retry_after)
    }
}

/// Whole seconds, rounded up, and never "at once".
pub(super) fn with_retry_after(mut response: Response, pause: Option<Duration>) -> Response {
    if let Some(pause) = pause {
        let seconds = pause.as_secs() + u64::from(pause.subsec_nanos() > 0);
        response.headers_mut().insert(header::RETRY_AFTER, seconds.max(1).into());
    }
    response
}

pub(super) async fn not_found(uri: Uri) -> Response {
    in_the_style_of(&uri, StatusCode::NOT_FOUND, "there is nothing here: GET /v1/openapi.json lists what there is")
}

/// The three endpoints of the reference take POST only, and answer so in its words.
pub(super) async fn method_not_allowed(uri: Uri) -> Response {
    if is_of_the_reference(&uri) {
        let mut response = PlainError::new(StatusCode::METHOD_NOT_ALLOWED, "POST only").into_response();
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
        return response;
    }
    in_the_style_of(&uri, StatusCode::METHOD_NOT_ALLOWED, "this endpoint does not take this method")
}

pub(super) fn in_the_style_of(uri: &Uri, status: StatusCode, words: &str) -> Response {
    if is_v1(uri) {
        JsonError::new(status, words).into_response()
    } else {
        PlainError::new(status, words).into_response()
    }
}

/// In the reserve of connections there is time for short requests only.
pub(super) fn too_many(uri: &Uri) -> Response {
    let words = "kilnd has as many requests under way as it takes, and this one could not be answered beside them: try again in \
                 a second";
    with_retry_after(in_the_style_of(uri, StatusCode::SERVICE_UNAVAILABLE, words), Some(A_MOMENT))
}

fn is_of_the_reference(uri: &Uri) -> bool {
    matches!(uri.path(), "/route" | "/prewarm" | "/complete")
}

fn is_v1(uri: &Uri) -> bool {
    uri.path() == "/v1" || uri.path().starts_with("/v1/")
}
