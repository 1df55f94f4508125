//! Answers that may be megabytes: how many of them are in memory at a time.
//!
//! A client that asks and does not read makes us hold its answer until its connection ends, so such an answer has one of a
//! few places. The place goes along with the bytes themselves, and comes back when the last of them is with the kernel, or
//! is dropped with the connection: one on which nothing moves ends a minute after its answer was ready.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answers::JsonError;

/// Each is a few megabytes with thousands of projects.
pub(super) const LARGE: usize = 8;

/// A list that is read takes a fraction of this.
const PATIENCE: Duration = Duration::from_secs(1);

pub(super) const NONE_FREE: &str = "as many large answers as kilnd gives at a time are being read, or are not: try again in a second, and look \
                                    for clients that ask and do not read";

#[derive(Clone)]
pub(super) struct Places(Arc<Semaphore>);

impl Places {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(LARGE)))
    }

    /// `None`: none became free soon.
    pub(super) async fn take(&self) -> Option<Place> {
        let taken = tokio::time::timeout(PATIENCE, self.0.clone().acquire_owned()).await;
        taken.ok()?.ok().map(Place)
    }

    pub(super) async fn take_for_list(&self) -> Result<Place, JsonError> {
        self.take().await.ok_or_else(|| JsonError::later(NONE_FREE))
    }
}

/// To be taken before the answer is put together.
pub(super) struct Place(OwnedSemaphorePermit);

impl Place {
    pub(super) fn json<T: Serialize>(self, answer: &T) -> Result<Response, JsonError> {
        let text = serde_json::to_vec(answer);
        let text = text.map_err(|error| JsonError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
        Ok(self.carry("application/json", text))
    }

    pub(super) fn carry(self, content_type: &'static str, answer: impl Into<Vec<u8>>) -> Response {
        let bytes = Bytes::from_owner(Carried { bytes: answer.into().into_boxed_slice(), _place: self.0 });
        let mut response = Response::new(Body::from(bytes));
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }
}

struct Carried {
    bytes: Box<[u8]>,
    _place: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Carried {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
