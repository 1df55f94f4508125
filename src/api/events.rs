//! `GET /v1/events`: the journal as server-sent events, first what is in it, then what happens.
//!
//! ```text
//!   subscribe ──▶ pages of the journal after `last` ──▶ live events with ids above `last` ──▶ …
//!                        ▲                                  │ lagged: some were missed
//!                        └──────────────────────────────────┘
//! ```
//!
//! Subscribing comes first and ids are compared, so nothing is missed and nothing comes twice.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{Extension, Query, State, rejection::QueryRejection};
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use kiln_domain::access::Verb;
use kiln_domain::{Key, ParseKeyError};
use kiln_wire::{ApiError, EventView};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, broadcast};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::error;
use utoipa::IntoParams;

use super::Api;
use super::access::Asker;
use super::answers::JsonError;
use crate::clock::rfc3339;
use crate::store::{Event, Store, StoreError};

/// Rows read from the journal at once.
const PAGE: u32 = 500;

/// How long somebody reads on whose token has ended, or who was taken out of a list.
const BELIEVED: Duration = Duration::from_secs(5);

/// A comment this often tells a proxy or a client that the silence is meant.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Window {
    /// Only events with ids above this, from 0; one above the newest is of a lost database, and is taken for 0. Without it: those from now on, or with `follow=false` all that are kept.
    #[param(minimum = 0)]
    after: Option<i64>,
    /// Only events of this project.
    key: Option<String>,
    /// Stay and send what happens; `false` ends with the newest event there is.
    #[serde(default = "yes")]
    #[param(default = true)]
    follow: bool,
}

const fn yes() -> bool {
    true
}

/// The journal as server-sent events: `id` is the event's id, `data` an `EventView` in JSON.
#[utoipa::path(
    get, path = "/v1/events", tag = "events",
    params(
        Window,
        ("Last-Event-ID" = Option<i64>, Header, description = "Like `after`, and wins over it: set by a client that reconnects"),
    ),
    responses(
        (status = 200, description = "Events, in order", body = EventView, content_type = "text/event-stream"),
        (status = 400, description = "Malformed request", body = ApiError),
        (status = 500, description = "The database cannot be read", body = ApiError),
        (status = 503, description = "Too many followers, or not now", body = ApiError),
    )
)]
pub(super) async fn events(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    window: Result<Query<Window>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, JsonError> {
    let Query(window) = window.map_err(|error| JsonError::bad_request(error.body_text()))?;
    if window.after.is_some_and(|id| id < 0) {
        return Err(JsonError::bad_request("after is an event's id: 0 is before the first"));
    }
    let of = window.key.as_deref().map(str::parse).transpose();
    let of: Option<Key> = of.map_err(|error: ParseKeyError| JsonError::bad_request(error.to_string()))?;
    let place = api.followers.clone().try_acquire_owned();
    let place = place.map_err(|_| JsonError::later("too many clients follow the events: close one of them"))?;
    let live = api.journal.subscribe();
    let last = match (last_event_id(&headers)?.or(window.after), window.follow) {
        (Some(id), _) => known(id, &api.journal).await?,
        (None, true) => api.journal.latest_event_id().await?,
        (None, false) => 0,
    };
    let mut follower = Follower {
        journal: api.journal.clone(),
        shutdown: api.shutdown.clone(),
        reader: Reader { api, asker, checked: Instant::now() },
        live: window.follow.then_some(live),
        last,
        of,
        ready: VecDeque::new(),
        behind: true,
        _place: place,
    };
    // The first page comes before the status line, so that a database that cannot be read is a proper error.
    follower.turn_page().await?;
    let stream = stream::unfold(follower, |mut follower| async move {
        let event = follower.next().await?;
        Some((Ok(to_sse(event)), follower))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// An id that the journal has not come to is of a database that was lost since: nobody of this one's time has seen it, so
/// all that is kept is news. Taken as it is, it would hide all events until the journal came to it.
async fn known(id: i64, journal: &Store) -> Result<i64, StoreError> {
    Ok(if id > journal.latest_event_id().await? { 0 } else { id })
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<i64>, JsonError> {
    let Some(value) = headers.get("last-event-id") else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| text.parse().ok()).filter(|id| *id >= 0);
    id.map(Some).ok_or_else(|| JsonError::bad_request("Last-Event-ID is not an event's id"))
}

/// Whoever reads, for as long as it may.
struct Reader {
    api: Api,
    asker: Asker,
    checked: Instant,
}

impl Reader {
    /// Until when it is believed that it may.
    fn checked_until(&self) -> Instant {
        self.checked + BELIEVED
    }

    async fn still_may(&mut self, key: Option<&Key>) -> bool {
        self.checked = Instant::now();
        let verb = if key.is_some() { Verb::See } else { Verb::Follow };
        self.asker.still_may(&self.api, verb, key).await
    }
}

struct Follower {
    journal: Store,
    shutdown: CancellationToken,
    reader: Reader,
    /// `None`: ends with the journal.
    live: Option<broadcast::Receiver<Event>>,
    last: i64,
    /// `None`: of all projects, and of Kiln itself.
    of: Option<Key>,
    ready: VecDeque<Event>,
    /// There may be more in the journal.
    behind: bool,
    _place: OwnedSemaphorePermit,
}

impl Follower {
    /// `None` ends the stream.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if Instant::now() >= self.reader.checked_until() && !self.reader.still_may(self.of.as_ref()).await {
                return None;
            }
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.behind {
                // The client comes back with Last-Event-ID and then gets an error that says why.
                self.turn_page().await.inspect_err(|_| error!("a follower of the events was sent away")).ok()?;
                continue;
            }
            let received = tokio::select! {
                () = self.shutdown.cancelled() => return None,
                () = tokio::time::sleep_until(self.reader.checked_until()) => continue,
                received = self.live.as_mut()?.recv() => received,
            };
            match received {
                Ok(event) if event.id > self.last => {
                    self.last = event.id;
                    if self.wants(&event) {
                        return Some(event);
                    }
                }
                Ok(_) => {}
                Err(broadcast::error::RecvError::Lagged(_)) => self.behind = true,
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }

    async fn turn_page(&mut self) -> Result<(), JsonError> {
        let page = match &self.of {
            Some(key) => self.journal.later_events_of(key, self.last, PAGE).await?,
            None => self.journal.events(self.last, PAGE).await?,
        };
        self.behind = page.len() == PAGE as usize;
        self.last = page.last().map_or(self.last, |event| event.id);
        self.ready = page.into();
        Ok(())
    }

    fn wants(&self, event: &Event) -> bool {
        self.of.is_none() || event.key == self.of
    }
}

fn to_sse(event: Event) -> sse::Event {
    let id = event.id.to_string();
    let data = serde_json::to_string(&to_view(event)).unwrap_or_default();
    sse::Event::default().id(id).data(data)
}

pub(super) fn to_view(event: Event) -> EventView {
    let Event { id, at, key, kind, by, rule, text } = event;
    let by = (by != "kiln").then_some(by);
    EventView { id, at: rfc3339(at), key: key.map(String::from), kind, text, by, rule }
}
