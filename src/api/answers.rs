//! Errors as answers: plain text at the three endpoints of the reference, JSON below `/v1`.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use kiln_wire::ApiError;
use tracing::error;

use super::heart::{CompleteError, RouteError, StopError};
use crate::store::StoreError;

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

impl From<CompleteError> for PlainError {
    fn from(error: CompleteError) -> Self {
        Self { status: error.status(), retry_after: error.retry_after(), text: error.to_string() }
    }
}

impl IntoResponse for PlainError {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.text + "\n").into_response();
        if let Some(pause) = self.retry_after {
            // Whole seconds, and never "at once".
            response.headers_mut().insert(header::RETRY_AFTER, pause.as_secs().max(1).into());
        }
        response
    }
}

/// An error below `/v1`.
#[derive(Debug)]
pub(super) struct JsonError {
    status: StatusCode,
    error: String,
}

impl JsonError {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self { status, error: error.into() }
    }
}

impl From<StoreError> for JsonError {
    fn from(failure: StoreError) -> Self {
        if failure.is_retryable() {
            return Self::new(StatusCode::SERVICE_UNAVAILABLE, failure.to_string());
        }
        error!(error = &failure as &dyn std::error::Error, "a read for the API failed");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, failure.to_string())
    }
}

impl From<StopError> for JsonError {
    fn from(error: StopError) -> Self {
        Self::new(error.status(), error.to_string())
    }
}

impl IntoResponse for JsonError {
    fn into_response(self) -> Response {
        (self.status, Json(ApiError { error: self.error })).into_response()
    }
}

pub(super) async fn not_found(uri: Uri) -> Response {
    in_the_style_of(&uri, StatusCode::NOT_FOUND, "there is nothing here: GET /v1/openapi.json lists what there is")
}

/// The three endpoints of the reference take POST only, and answer so in its words.
pub(super) async fn method_not_allowed(uri: Uri) -> Response {
    let words = if is_v1(&uri) { "this endpoint does not take this method" } else { "POST only" };
    let mut response = in_the_style_of(&uri, StatusCode::METHOD_NOT_ALLOWED, words);
    if !is_v1(&uri) {
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
    }
    response
}

pub(super) fn in_the_style_of(uri: &Uri, status: StatusCode, words: &str) -> Response {
    if is_v1(uri) {
        JsonError::new(status, words).into_response()
    } else {
        PlainError::new(status, words).into_response()
    }
}

fn is_v1(uri: &Uri) -> bool {
    uri.path() == "/v1" || uri.path().starts_with("/v1/")
}
