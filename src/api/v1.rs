//! `/v1`: what Kiln shows of itself, and admin verbs.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use kiln_domain::{Key, ParseKeyError};
use kiln_wire::{ApiError, ProjectView};

use super::Api;
use super::answers::JsonError;
use super::heart::StopError;

/// All projects, by key.
#[utoipa::path(
    get, path = "/v1/projects", tag = "projects",
    responses(
        (status = 200, description = "All projects, by key", body = Vec<ProjectView>),
        (status = 500, description = "The database cannot be read", body = ApiError),
        (status = 503, description = "Not now", body = ApiError),
    )
)]
pub(super) async fn list(State(api): State<Api>) -> Result<Json<Vec<ProjectView>>, JsonError> {
    Ok(Json(api.heart.list().await?))
}

/// One project.
#[utoipa::path(
    get, path = "/v1/projects/{key}", tag = "projects",
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 200, description = "The project", body = ProjectView),
        (status = 400, description = "Not a key", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 500, description = "The database cannot be read", body = ApiError),
        (status = 503, description = "Not now", body = ApiError),
    )
)]
pub(super) async fn show(State(api): State<Api>, key: InPath) -> Result<Json<ProjectView>, JsonError> {
    let key = parse(key)?;
    let found = api.heart.show(&key).await?;
    found.map(Json).ok_or_else(|| StopError::Unknown(key).into())
}

/// Stop the project's daemon; the cache stays. Refused while a build counts on it.
#[utoipa::path(
    post, path = "/v1/projects/{key}/stop", tag = "projects",
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 204, description = "It is down"),
        (status = 400, description = "Not a key", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 409, description = "A build counts on it", body = ApiError),
        (status = 500, description = "It could not be stopped", body = ApiError),
    )
)]
pub(super) async fn stop(State(api): State<Api>, key: InPath) -> Result<StatusCode, JsonError> {
    api.heart.stop(&parse(key)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What stands in a key's place, if it is text at all.
type InPath = Result<Path<String>, PathRejection>;

fn parse(key: InPath) -> Result<Key, JsonError> {
    let key = key.map_or_else(|_| char::REPLACEMENT_CHARACTER.to_string(), |Path(key)| key);
    key.parse().map_err(|error: ParseKeyError| JsonError::new(StatusCode::BAD_REQUEST, error.to_string()))
}
