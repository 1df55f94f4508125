//! A request's body: bounded in bytes and time, strict.

use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use http_body_util::BodyExt as _;
use kiln_wire::{DecodeError, MAX_BODY_BYTES, decode};
use serde::de::DeserializeOwned;

use super::answers::{JsonError, PlainError};

/// The reference's limit.
const BODY_TIME: Duration = Duration::from_secs(15);

/// Of a body that is too large this much is read and thrown away: a client that writes all before it reads then gets its
/// answer, where closing under it would only show it a broken connection.
const DISCARDED_BYTES: usize = 16 << 20;

/// What is wrong with a body, for an error in either style.
#[derive(Debug)]
pub(super) struct BadBody {
    status: StatusCode,
    text: String,
}

impl BadBody {
    fn malformed(text: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, text: text.into() }
    }
}

impl From<BadBody> for PlainError {
    fn from(bad: BadBody) -> Self {
        Self::new(bad.status, bad.text)
    }
}

impl From<BadBody> for JsonError {
    fn from(bad: BadBody) -> Self {
        Self::new(bad.status, bad.text)
    }
}

pub(super) async fn read<T: DeserializeOwned>(body: Body) -> Result<T, BadBody> {
    let bytes = tokio::time::timeout(BODY_TIME, collect(body)).await.map_err(|_| BadBody {
        status: StatusCode::REQUEST_TIMEOUT,
        text: format!("the request's body did not arrive within {} s", BODY_TIME.as_secs()),
    })??;
    decode(&bytes).map_err(|error| BadBody::malformed(error.to_string()))
}

/// Keeps nothing beyond the limit: memory does not grow with what a client sends.
async fn collect(mut body: Body) -> Result<Vec<u8>, BadBody> {
    let mut bytes = Vec::new();
    let mut seen = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| BadBody::malformed(format!("the request's body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        seen += data.len();
        if seen <= MAX_BODY_BYTES {
            bytes.extend_from_slice(&data);
        } else if seen > DISCARDED_BYTES {
            break;
        }
    }
    if seen > MAX_BODY_BYTES {
        return Err(BadBody::malformed(DecodeError::TooLarge(seen).to_string()));
    }
    Ok(bytes)
}
