//! From bytes to a request: bounded, strict, exactly one value.

use serde::de::DeserializeOwned;
use thiserror::Error;

/// Longest accepted body (the reference's limit).
pub const MAX_BODY_BYTES: usize = 8192;

#[derive(Debug, Error)]
pub enum DecodeError {
    #[error("request body is too large: {0} bytes, at most {MAX_BODY_BYTES} are accepted")]
    TooLarge(usize),
    #[error("request body is not what this endpoint takes: {0}")]
    Json(#[from] serde_json::Error),
}

/// Refuses what is too large, not JSON, of another shape, with unknown fields, or followed by anything.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, DecodeError> {
    if body.len() > MAX_BODY_BYTES {
        return Err(DecodeError::TooLarge(body.len()));
    }
    Ok(serde_json::from_slice(body)?)
}
