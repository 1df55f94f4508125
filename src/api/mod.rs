//! HTTP on a unix socket and on loopback: routes, admin verbs, events.
//!
//! `/route`, `/prewarm` and `/complete` answer the reference system's clients unchanged (docs/api.md says where not);
//! `/v1` is Kiln's own. The OpenAPI document is generated from the handlers and checked in as docs/openapi.json.
//!
//! Promises: handlers decide nothing that the heart decides; a lease whose answer cannot be handed over is released; a
//! client that goes away ends its own wait and nothing else (K6); everything that a client can make us hold is bounded
//! in bytes, number and time; nothing but loopback and the unix socket is listened on (K9).
//!
//! | file | what is in it |
//! |---|---|
//! | `access`, `limits` | who may use which endpoint, and how often |
//! | `heart`, `bounded` | what is asked of the rest of Kiln, and for how long |
//! | `projects` | the heart as it is, and which of its errors is which answer |
//! | `routing`, `prefer` | the three endpoints of the reference, and how long a caller wants to wait |
//! | `v1`, `caches`, `connections`, `upkeep`, `tokens`, `challenges`, `events` | what Kiln shows of itself, and an admin's verbs |
//! | `health` | alive, ready, figures |
//! | `body`, `answers` | from bytes to a request, from errors to answers |
//! | `large` | how many large answers there are at a time |
//! | `delivery` | whether an answer that carries a lease arrived |
//! | `guard` | that no web page speaks over TCP |
//! | `listener`, `serve`, `connection`, `places` | sockets, accept loops, bounds of a connection, and who gets a place |
//!
//! What must not be here: Incus, SQL, rules about leases and phases.

mod access;
mod answers;
mod body;
mod bounded;
mod caches;
mod challenges;
mod connection;
mod connections;
mod delivery;
mod events;
mod guard;
mod health;
mod heart;
mod large;
mod limits;
mod listener;
mod places;
mod prefer;
mod projects;
mod routing;
mod serve;
mod tokens;
mod upkeep;
mod v1;

use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::{any, get};
use axum::{Router, middleware};
use bounded::Bounded;
pub use heart::{CompleteError, Heart, RenewError, RouteError, RouteOptions, Routed, SettingsChange, VerbError};
pub use limits::Rates;
pub use listener::{ListenError, Listener};
pub use serve::{MOST_CONNECTIONS, serve};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::gateway::Gateway;
use crate::identity::Callers;
use crate::metrics::Metrics;
use crate::store::Store;

/// Clients that follow the events at a time: they stay, so they must not take all connections.
const FOLLOWERS: usize = 64;

/// What can be configured of the API itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The longest that `/route` waits; a longer `?wait` is refused.
    pub route_wait: Duration,
    /// Whether `/complete` without a `buildId` releases the project's oldest lease, as the reference does.
    pub nameless_release: bool,
    /// How long a daemon that is stopped may drain: whoever stops one waits longer.
    pub drain: Duration,
    pub rates: Rates,
}

/// What the handlers need.
#[derive(Clone)]
pub struct Api {
    heart: Arc<dyn Heart>,
    callers: Arc<Callers>,
    limits: Arc<limits::Limits>,
    /// `None`: there is nothing to show of it.
    gateway: Option<Arc<Gateway>>,
    /// For the events only.
    journal: Store,
    metrics: Arc<Metrics>,
    settings: Settings,
    followers: Arc<Semaphore>,
    /// One at a time.
    scrapes: Arc<Semaphore>,
    lists: large::Places,
    /// Places of their own: who watches kilnd must not be kept out by who reads lists.
    figures: large::Places,
    shutdown: CancellationToken,
}

impl Api {
    pub fn new(
        heart: Arc<dyn Heart>,
        callers: Arc<Callers>,
        journal: Store,
        metrics: Arc<Metrics>,
        settings: Settings,
    ) -> Self {
        let (followers, scrapes) = (Arc::new(Semaphore::new(FOLLOWERS)), Arc::new(Semaphore::new(1)));
        let heart = Arc::new(Bounded::new(heart, &settings));
        let limits = Arc::new(limits::Limits::new(settings.rates));
        let (lists, figures) = (large::Places::new(), large::Places::new());
        let shutdown = CancellationToken::new();
        Self {
            heart,
            callers,
            limits,
            gateway: None,
            journal,
            metrics,
            settings,
            followers,
            scrapes,
            lists,
            figures,
            shutdown,
        }
    }

    #[must_use]
    pub fn showing(self, gateway: Arc<Gateway>) -> Self {
        Self { gateway: Some(gateway), ..self }
    }

    fn ending_with(self, shutdown: CancellationToken) -> Self {
        Self { shutdown, ..self }
    }

    fn router(self) -> Router {
        let (router, document) = endpoints();
        let document: Arc<str> = to_text(&document).into();
        router
            // Any method, no body: whatever a health checker sends.
            .route("/healthz", any(async || StatusCode::OK))
            .route(
                "/v1/openapi.json",
                get(async move || ([(header::CONTENT_TYPE, "application/json")], document.to_string()).into_response()),
            )
            .fallback(answers::not_found)
            .method_not_allowed_fallback(answers::method_not_allowed)
            .layer(middleware::from_fn_with_state(self.clone(), access::let_through))
            .layer(CatchPanicLayer::new())
            .with_state(self)
    }
}

/// The OpenAPI document, as it is checked in and served.
pub fn openapi() -> String {
    to_text(&endpoints().1)
}

fn to_text(document: &utoipa::openapi::OpenApi) -> String {
    // Plain maps and strings cannot fail to serialise.
    document.to_pretty_json().unwrap_or_default() + "\n"
}

/// One list for what is served and what is documented.
fn endpoints() -> (Router<Api>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(routing::route))
        .routes(routes!(routing::prewarm))
        .routes(routes!(routing::complete))
        .routes(routes!(v1::list))
        .routes(routes!(v1::show, v1::remove))
        .routes(routes!(v1::why))
        .routes(routes!(v1::set))
        .routes(routes!(v1::stop))
        .routes(routes!(v1::renew))
        .routes(routes!(caches::show))
        .routes(routes!(caches::snapshot))
        .routes(routes!(caches::roll_back))
        .routes(routes!(caches::reset))
        .routes(routes!(caches::list))
        .routes(routes!(connections::list))
        .routes(routes!(events::events))
        .routes(routes!(upkeep::orphans))
        .routes(routes!(upkeep::adopt))
        .routes(routes!(upkeep::remove_orphan))
        .routes(routes!(upkeep::trash, upkeep::empty_trash))
        .routes(routes!(upkeep::discard))
        .routes(routes!(upkeep::restore))
        .routes(routes!(tokens::list, tokens::create))
        .routes(routes!(tokens::revoke))
        .routes(routes!(challenges::ask))
        .routes(routes!(challenges::answer))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
        .split_for_parts()
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Kiln", description = "One warm BuildKit daemon per project on one host. See docs/api.md."),
    tags(
        (name = "builds", description = "What a build calls; compatible with buildkit-operator"),
        (name = "projects", description = "What there is"),
        (name = "caches", description = "Their past, a way back, and where the bytes are"),
        (name = "events", description = "What happens"),
        (name = "upkeep", description = "What has lost its other half, and what was deleted"),
        (name = "tokens", description = "Who else may come"),
        (name = "health", description = "For machines that ask often"),
    )
)]
struct Document;

#[cfg(test)]
mod tests;
