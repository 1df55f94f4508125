//! Caches: their past, a way back, and where the bytes are.

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use kiln_domain::SnapshotName;
use kiln_domain::cache::ParseSnapshotError;
use kiln_wire::{ApiError, CacheView, DiskUsage, Reset, Rollback, RolledBack, SnapshotView};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Api;
use super::access::Asker;
use super::answers::JsonError;
use super::body::read;
use super::v1::{InPath, parse};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Measuring {
    /// Whether to measure it: some storage is walked through for that.
    #[serde(default = "yes")]
    #[param(default = true)]
    usage: bool,
}

const fn yes() -> bool {
    true
}

/// What there is of a cache to go back to, and where its bytes are.
#[utoipa::path(
    get, path = "/v1/projects/{key}/cache", tag = "caches",
    params(Measuring, ("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 200, description = "Looked up on the host now", body = CacheView),
        (status = 400, description = "Not a key, or malformed", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 500, description = "The host could not be looked at", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn show(
    State(api): State<Api>,
    key: InPath,
    query: Result<Query<Measuring>, QueryRejection>,
) -> Result<Json<CacheView>, JsonError> {
    let key = parse(key)?;
    let Query(Measuring { usage }) = query.map_err(|error| JsonError::bad_request(error.body_text()))?;
    Ok(Json(api.heart.cache(&key, usage).await?))
}

/// Take a snapshot of a cache, unless nothing was written since the newest.
#[utoipa::path(
    post, path = "/v1/projects/{key}/snapshots", tag = "caches",
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 200, description = "Nothing was written since this one, so none was taken", body = SnapshotView),
        (status = 201, description = "It was taken", body = SnapshotView),
        (status = 400, description = "Not a key", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 500, description = "None could be taken", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn snapshot(
    State(api): State<Api>,
    key: InPath,
) -> Result<(StatusCode, Json<SnapshotView>), JsonError> {
    let (newest, is_new) = api.heart.snapshot(&parse(key)?).await?;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(newest)))
}

/// Put a cache back to a snapshot; what it holds now goes to the trash. Refused while a build counts on its daemon.
#[utoipa::path(
    post, path = "/v1/projects/{key}/rollback", tag = "caches", request_body = Rollback,
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 200, description = "It is back there; `GET /v1/trash` lists what it was", body = RolledBack),
        (status = 400, description = "Not a key, malformed, or not the name of a snapshot", body = ApiError),
        (status = 404, description = "No such project, or its cache has no such snapshot", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 409, description = "A build counts on the daemon", body = ApiError),
        (status = 500, description = "It could not be done", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn roll_back(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    key: InPath,
    body: Body,
) -> Result<Json<RolledBack>, JsonError> {
    let Rollback { snapshot, force } = read(body).await?;
    asker.may_force(force)?;
    let key = parse(key)?;
    let named = snapshot.as_deref().map(str::parse::<SnapshotName>).transpose();
    let to = named.map_err(|error: ParseSnapshotError| JsonError::bad_request(error.to_string()))?;
    let back = api.heart.roll_back(&key, to, force).await?;
    Ok(Json(RolledBack { snapshot: back.to_string() }))
}

/// Begin anew with an empty cache; what it holds now goes to the trash. Refused while a build counts on its daemon.
#[utoipa::path(
    post, path = "/v1/projects/{key}/reset", tag = "caches", request_body = Reset,
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 204, description = "It is empty; `GET /v1/trash` lists what it was"),
        (status = 400, description = "Not a key, or malformed", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 409, description = "A build counts on the daemon", body = ApiError),
        (status = 500, description = "It could not be done", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn reset(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    key: InPath,
    body: Body,
) -> Result<StatusCode, JsonError> {
    let Reset { force } = read(body).await?;
    asker.may_force(force)?;
    api.heart.reset(&parse(key)?, force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Where the bytes are: all caches on the host, the trash, and how full their storage is.
#[utoipa::path(
    get, path = "/v1/caches", tag = "caches",
    responses(
        (status = 200, description = "Measured now, the largest first", body = DiskUsage),
        (status = 500, description = "The host could not be looked at", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn list(State(api): State<Api>) -> Result<Response, JsonError> {
    let place = api.lists.take_for_list().await?;
    place.json(&api.heart.disk_usage().await?)
}
