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
//! | `heart` | what is asked of the rest of Kiln |
//! | `routing` | the three endpoints of the reference |
//! | `v1`, `events` | what Kiln shows of itself |
//! | `answers` | errors as answers |
//! | `guard` | who may speak over TCP |
//! | `listener`, `serve`, `connection` | sockets, accept loops, bounds of a connection |
//!
//! What must not be here: Incus, SQL, rules about leases and phases.

mod answers;
mod connection;
mod events;
mod guard;
mod heart;
mod listener;
mod projects;
mod routing;
mod serve;
mod v1;

use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::{any, get};
pub use heart::{CompleteError, Heart, RouteError, RouteOptions, Routed, StopError};
pub use listener::{ListenError, Listener};
pub use serve::serve;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::store::Store;

/// Clients that follow the events at a time: they stay, so they must not take all connections.
const FOLLOWERS: usize = 64;

/// What the handlers need.
#[derive(Clone)]
pub struct Api {
    heart: Arc<dyn Heart>,
    /// For the events only.
    journal: Store,
    followers: Arc<Semaphore>,
    shutdown: CancellationToken,
}

impl Api {
    pub fn new(heart: Arc<dyn Heart>, journal: Store) -> Self {
        let followers = Arc::new(Semaphore::new(FOLLOWERS));
        Self { heart, journal, followers, shutdown: CancellationToken::new() }
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
        .routes(routes!(v1::show))
        .routes(routes!(v1::stop))
        .routes(routes!(events::events))
        .split_for_parts()
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Kiln", description = "One warm BuildKit daemon per project on one host. See docs/api.md."),
    tags(
        (name = "builds", description = "What a build calls; compatible with buildkit-operator"),
        (name = "projects", description = "What there is"),
        (name = "events", description = "What happens"),
    )
)]
struct Document;

#[cfg(test)]
mod tests;
