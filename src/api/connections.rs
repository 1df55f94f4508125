//! What the gateway has open now.

use axum::extract::State;
use axum::response::Response;
use kiln_wire::{ApiError, ConnectionView};

use super::Api;
use super::answers::JsonError;
use crate::gateway::Connection;

/// The connections that are open at the gateway, the oldest first.
#[utoipa::path(
    get, path = "/v1/connections", tag = "projects",
    responses(
        (status = 200, description = "The connections, in whatever state", body = Vec<ConnectionView>),
        (status = 401, description = "Nothing that was shown proves who asks", body = ApiError),
        (status = 403, description = "Only an operator sees them", body = ApiError),
        (status = 503, description = "Not now", body = ApiError),
    )
)]
pub(super) async fn list(State(api): State<Api>) -> Result<Response, JsonError> {
    let place = api.lists.take_for_list().await?;
    let open = api.gateway.as_ref().map(|gateway| gateway.connections()).unwrap_or_default();
    place.json(&open.iter().map(view).collect::<Vec<_>>())
}

fn view(connection: &Connection) -> ConnectionView {
    let Connection { key, from, age, to_daemon, to_client, state } = connection;
    ConnectionView {
        key: key.as_ref().map(ToString::to_string),
        from: from.to_string(),
        state: state.as_str().to_owned(),
        age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        to_daemon: *to_daemon,
        to_client: *to_client,
    }
}
