//! `/v1/orphans` and `/v1/trash`: what has lost its other half, and what was deleted.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use kiln_wire::{Adopt, ApiError, Emptied, Orphan, RemoveOrphan, Taken, Trashed, is_name, is_orphan_name};

use super::Api;
use super::answers::JsonError;
use super::body::read;
use super::v1::{InPath, quoted};

/// What has lost its other half: instances and volumes that no project knows, and projects whose cache is gone.
#[utoipa::path(
    get, path = "/v1/orphans", tag = "upkeep",
    responses(
        (status = 200, description = "Looked up on the host now", body = Vec<Orphan>),
        (status = 500, description = "The host could not be looked at", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn orphans(State(api): State<Api>) -> Result<Response, JsonError> {
    let place = api.lists.take_for_list().await?;
    place.json(&api.heart.orphans().await?)
}

/// Make a project of an orphan again.
#[utoipa::path(
    post, path = "/v1/orphans/adopt", tag = "upkeep", request_body = Adopt,
    responses(
        (status = 200, description = "The project that has it now", body = Taken),
        (status = 400, description = "Malformed, without an identity, or more than one of this name", body = ApiError),
        (status = 404, description = "No such orphan", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 500, description = "It could not be done", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn adopt(State(api): State<Api>, body: Body) -> Result<Json<Taken>, JsonError> {
    let Adopt { kind, name } = read(body).await?;
    let key = api.heart.adopt(kind, orphan(&name)?).await?;
    Ok(Json(Taken { key: key.into() }))
}

/// Remove an orphan; a volume goes to the trash.
#[utoipa::path(
    post, path = "/v1/orphans/remove", tag = "upkeep", request_body = RemoveOrphan,
    responses(
        (status = 204, description = "It is gone"),
        (status = 400, description = "Malformed request", body = ApiError),
        (status = 404, description = "No such orphan", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 409, description = "It is an instance that runs", body = ApiError),
        (status = 500, description = "It could not be done", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn remove_orphan(State(api): State<Api>, body: Body) -> Result<StatusCode, JsonError> {
    let RemoveOrphan { kind, name } = read(body).await?;
    api.heart.remove_orphan(kind, orphan(&name)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Deleted caches that are still there.
#[utoipa::path(
    get, path = "/v1/trash", tag = "upkeep",
    responses(
        (status = 200, description = "The oldest first", body = Vec<Trashed>),
        (status = 500, description = "The host could not be looked at", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn trash(State(api): State<Api>) -> Result<Response, JsonError> {
    let place = api.lists.take_for_list().await?;
    place.json(&api.heart.trash().await?)
}

/// Give a deleted cache back to its project.
#[utoipa::path(
    post, path = "/v1/trash/{name}/restore", tag = "upkeep",
    params(("name" = String, Path, description = "As the list has it")),
    responses(
        (status = 200, description = "The project that has it now", body = Taken),
        (status = 400, description = "Not a name, or without an identity", body = ApiError),
        (status = 404, description = "Nothing of this name is in the trash", body = ApiError),
        (status = 409, description = "Its project is busy, or has another cache", body = ApiError),
        (status = 500, description = "It could not be done", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn restore(State(api): State<Api>, name: InPath) -> Result<Json<Taken>, JsonError> {
    let key = api.heart.restore(trashed(&in_path(name))?).await?;
    Ok(Json(Taken { key: key.into() }))
}

/// Delete a cache in the trash for good.
#[utoipa::path(
    delete, path = "/v1/trash/{name}", tag = "upkeep",
    params(("name" = String, Path, description = "As the list has it")),
    responses(
        (status = 204, description = "It is gone"),
        (status = 400, description = "Not a name", body = ApiError),
        (status = 404, description = "Nothing of this name is in the trash", body = ApiError),
        (status = 500, description = "It could not be done", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn discard(State(api): State<Api>, name: InPath) -> Result<StatusCode, JsonError> {
    api.heart.discard(trashed(&in_path(name))?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Delete everything in the trash for good.
#[utoipa::path(
    delete, path = "/v1/trash", tag = "upkeep",
    responses(
        (status = 200, description = "How many there were", body = Emptied),
        (status = 500, description = "It could not be done", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn empty_trash(State(api): State<Api>) -> Result<Json<Emptied>, JsonError> {
    Ok(Json(Emptied { removed: api.heart.empty_trash().await? }))
}

fn in_path(name: InPath) -> String {
    name.map_or_else(|_| String::new(), |Path(name)| name)
}

fn orphan(name: &str) -> Result<&str, JsonError> {
    if is_orphan_name(name) { Ok(name) } else { Err(no_name(name)) }
}

fn trashed(name: &str) -> Result<&str, JsonError> {
    if is_name(name) { Ok(name) } else { Err(no_name(name)) }
}

fn no_name(text: &str) -> JsonError {
    JsonError::bad_request(format!("{} is not a name: it is one that the list has", quoted(text)))
}
