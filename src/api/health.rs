//! Whether Kiln lives, whether it can work, and its figures. These are for machines that ask often: each answer is
//! bounded in time, and what looks at the host is asked by one at a time.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use kiln_wire::{Check, Readiness};

use super::Api;
use super::answers::{PlainError, with_retry_after};
use super::large::NONE_FREE;
use crate::metrics::Format;

/// Prometheus gives up after 10 s unless told otherwise.
const SCRAPE_TIME: Duration = Duration::from_secs(8);

const A_MOMENT: Duration = Duration::from_secs(1);

/// Whether routes can be answered now, and if not, why.
#[utoipa::path(
    get, path = "/readyz", tag = "health",
    responses(
        (status = 200, description = "All is well", body = Readiness),
        (status = 503, description = "Something is not; see `checks`", body = Readiness),
    )
)]
pub(super) async fn readyz(State(api): State<Api>) -> Response {
    let readiness = if api.shutdown.is_cancelled() {
        Readiness::of(vec![Check::ill("kilnd", "it is shutting down")])
    } else {
        api.heart.readiness().await
    };
    if readiness.ready {
        return Json(readiness).into_response();
    }
    with_retry_after((StatusCode::SERVICE_UNAVAILABLE, Json(readiness)).into_response(), Some(A_MOMENT))
}

/// Figures of this kilnd, for Prometheus: `OpenMetrics` for whoever accepts it, else the older text format.
#[utoipa::path(
    get, path = "/metrics", tag = "health",
    responses(
        (status = 200, description = "As docs/metrics.md lists them", body = String, content_type = "text/plain"),
        (status = 503, description = "A scrape is under way or hangs; see Retry-After", body = String, content_type = "text/plain"),
    )
)]
pub(super) async fn metrics(State(api): State<Api>, headers: HeaderMap) -> Result<Response, Response> {
    let later = |words: &str| {
        let answer = PlainError::new(StatusCode::SERVICE_UNAVAILABLE, words).into_response();
        with_retry_after(answer, Some(A_MOMENT))
    };
    let room = api.figures.take().await.ok_or_else(|| later(NONE_FREE))?;
    // A reading of the host may hang; the next scrape must not hang beside it.
    let place = api.scrapes.clone().try_acquire_owned();
    let place = place.map_err(|_| later("another scrape is under way, or hangs: look at kilnd's disks"))?;
    let format = format_for(&headers);
    let figures = api.metrics.clone();
    let scrape = tokio::task::spawn_blocking(move || {
        let text = figures.text(format);
        drop(place);
        text
    });
    let text = tokio::time::timeout(SCRAPE_TIME, scrape).await;
    let text = text.map_err(|_| later("the figures could not be read in time: look at kilnd's disks"))?;
    match text {
        Ok(Ok(text)) => Ok(room.carry(format.content_type(), text)),
        // Writing to memory does not fail; a reading that panics has said so in the log.
        Ok(Err(_)) | Err(_) => Err(StatusCode::INTERNAL_SERVER_ERROR.into_response()),
    }
}

fn format_for(headers: &HeaderMap) -> Format {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut kinds = accepted.flat_map(|value| value.split(','));
    let is_open = kinds.any(|kind| kind.split(';').next().is_some_and(|k| k.trim() == "application/openmetrics-text"));
    if is_open { Format::OpenMetrics } else { Format::Prometheus }
}
