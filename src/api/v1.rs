//! `/v1`: projects and leases, and an admin's verbs on them.

use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use kiln_domain::access::{Target, Verb};
use kiln_domain::lease::ParseTokenError;
use kiln_domain::{Entitlement, Entitlements, Key, LeaseToken, ParseKeyError, RepoName, Tier};
use kiln_wire::{ApiError, LeaseView, ProjectView, Renew, SettingsPatch, Why, units};
use serde::Deserialize;
use subtle::ConstantTimeEq as _;
use utoipa::IntoParams;

use super::Api;
use super::access::Asker;
use super::answers::JsonError;
use super::body::read;
use super::heart::{RenewError, SettingsChange};

/// All projects, by key.
#[utoipa::path(
    get, path = "/v1/projects", tag = "projects",
    responses(
        (status = 200, description = "All projects, by key", body = Vec<ProjectView>),
        (status = 500, description = "The database cannot be read", body = ApiError),
        (status = 503, description = "Not now", body = ApiError),
    )
)]
pub(super) async fn list(State(api): State<Api>, Extension(asker): Extension<Asker>) -> Result<Response, JsonError> {
    let place = api.lists.take_for_list().await?;
    let mut projects = api.heart.list().await?;
    if asker.may(Verb::See, Target::Nothing).is_err() {
        let is_seen = |repo: RepoName| asker.may(Verb::See, Target::Project(&repo)).is_ok();
        projects.retain(|project| RepoName::parse(&project.repo).is_ok_and(is_seen));
    }
    place.json(&projects)
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
    Ok(Json(api.heart.show(&parse(key)?).await?))
}

/// Why a project stands where it stands, in words.
#[utoipa::path(
    get, path = "/v1/projects/{key}/why", tag = "projects",
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 200, description = "The reasons", body = Why),
        (status = 400, description = "Not a key", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 500, description = "The database cannot be read", body = ApiError),
        (status = 503, description = "Not now", body = ApiError),
    )
)]
pub(super) async fn why(State(api): State<Api>, key: InPath) -> Result<Json<Why>, JsonError> {
    Ok(Json(api.heart.why(&parse(key)?).await?))
}

/// Change what is set for this project alone. What is not named stays; null goes back to the default.
#[utoipa::path(
    patch, path = "/v1/projects/{key}/settings", tag = "projects", request_body = SettingsPatch,
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 200, description = "The project; `pending` lists what waits for a roll", body = ProjectView),
        (status = 400, description = "Not a key, malformed, out of range, or contradicting itself", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 500, description = "It could not be written", body = ApiError),
        (status = 503, description = "Not now", body = ApiError),
    )
)]
pub(super) async fn set(State(api): State<Api>, key: InPath, body: Body) -> Result<Json<ProjectView>, JsonError> {
    let patch: SettingsPatch = read(body).await?;
    let key = parse(key)?;
    let change = well_formed(patch).map_err(JsonError::bad_request)?;
    if change == SettingsChange::default() {
        return Err(JsonError::bad_request("nothing is to be changed: name at least one setting"));
    }
    Ok(Json(api.heart.set(&key, change).await?))
}

fn well_formed(patch: SettingsPatch) -> Result<SettingsChange, String> {
    let SettingsPatch { tier, idle_window, volume, volume_max, memory, cpus, processes, io, entitlements, fan_out } =
        patch;
    Ok(SettingsChange {
        tier: tier.try_map(|text| tier_of(&text))?,
        idle_window: idle_window.try_map(|text| span_of(&text))?,
        volume_bytes: volume.try_map(|text| size_of("volume", &text))?,
        volume_max_bytes: volume_max.try_map(|text| size_of("volumeMax", &text))?,
        memory_bytes: memory.try_map(|text| size_of("memory", &text))?,
        cpus,
        processes,
        io_bytes: io.try_map(|text| size_of("io", &text))?,
        entitlements: entitlements.try_map(|names| entitlements_of(&names))?,
        fan_out,
    })
}

fn entitlements_of(names: &[String]) -> Result<Entitlements, String> {
    let read = |name: &String| {
        let known = name.parse::<Entitlement>();
        known.map_err(|_| format!("entitlements has {}: it is security.insecure or network.host", quoted(name)))
    };
    names.iter().map(read).collect()
}

fn tier_of(text: &str) -> Result<Tier, String> {
    text.parse().map_err(|_| format!("tier is {}: it is warm or hot", quoted(text)))
}

fn span_of(text: &str) -> Result<Duration, String> {
    units::parse_span(text)
        .ok_or_else(|| format!("idleWindow is {}: write it as \"30s\", \"15m\" or \"1h 30m\"", quoted(text)))
}

fn size_of(name: &str, text: &str) -> Result<u64, String> {
    units::parse_size(text)
        .ok_or_else(|| format!("{name} is {}: write it as \"20GiB\", \"512MiB\" or \"4096B\"", quoted(text)))
}

/// Enough of what a client sent for it to see its mistake.
pub(super) fn quoted(text: &str) -> String {
    format!("{:?}", text.chars().take(64).collect::<String>())
}

#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Stopping {
    /// Also if a build counts on it, or it does not answer.
    #[serde(default)]
    #[param(default = false)]
    force: bool,
}

/// Stop the project's daemon; the cache stays. Refused while a build counts on it, or the hot tier.
#[utoipa::path(
    post, path = "/v1/projects/{key}/stop", tag = "projects",
    params(Stopping, ("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 204, description = "It is down"),
        (status = 400, description = "Not a key", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 409, description = "A build counts on it, or the hot tier", body = ApiError),
        (status = 500, description = "It could not be stopped", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn stop(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    key: InPath,
    query: Result<Query<Stopping>, QueryRejection>,
) -> Result<StatusCode, JsonError> {
    let key = parse(key)?;
    let Query(Stopping { force }) = query.map_err(|error| JsonError::bad_request(error.body_text()))?;
    asker.may_force(force)?;
    api.heart.stop(&key, force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Forget the project; its cache goes to the trash. Refused while a build counts on it.
#[utoipa::path(
    delete, path = "/v1/projects/{key}", tag = "projects",
    params(("key" = String, Path, description = "As /route answers it and `kiln key` prints it")),
    responses(
        (status = 204, description = "It is gone; `GET /v1/trash` lists its cache"),
        (status = 400, description = "Not a key", body = ApiError),
        (status = 404, description = "No such project", body = ApiError),
        (status = 409, description = "A build counts on it", body = ApiError),
        (status = 500, description = "It could not be removed", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn remove(State(api): State<Api>, key: InPath) -> Result<StatusCode, JsonError> {
    api.heart.remove(&parse(key)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Show that a build is still there: its lease's grace begins anew. The end of the lease stays where it is.
#[utoipa::path(
    post, path = "/v1/leases/{id}/renew", tag = "projects", request_body = Renew,
    params(("id" = String, Path, description = "`leaseId` as /route answered it: SHA-256 of the buildId")),
    responses(
        (status = 200, description = "Renewed", body = LeaseView),
        (status = 400, description = "Malformed request", body = ApiError),
        (status = 401, description = "Nothing that was shown proves who asks, and buildId is of no lease", body = ApiError),
        (status = 404, description = "No such lease, or not this buildId's", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 410, description = "It has ended", body = ApiError),
        (status = 500, description = "It could not be written", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn renew(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    id: InPath,
    body: Body,
) -> Result<Json<LeaseView>, JsonError> {
    let Renew { build_id } = read(body).await?;
    let token: LeaseToken =
        build_id.parse().map_err(|error: ParseTokenError| JsonError::bad_request(error.to_string()))?;
    let id = id.map_or_else(|_| String::new(), |Path(id)| id);
    // In constant time, as everything that looks at what a token hashes to.
    let is_its_own = bool::from(id.as_bytes().ct_eq(token.hash().as_str().as_bytes()));
    let renewed = if is_its_own { api.heart.renew(&token).await } else { Err(RenewError::Unknown) };
    match (renewed, asker.unproven(Verb::Renew)) {
        // As of a release: a miss says nothing to who has shown nothing else, nor whether it ever was one (F16).
        (Err(RenewError::Unknown | RenewError::Ended), Some(refused)) => Err(refused.into()),
        (renewed, _) => Ok(Json(renewed?)),
    }
}

/// What stands in a name's place, if it is text at all.
pub(super) type InPath = Result<Path<String>, PathRejection>;

pub(super) fn parse(key: InPath) -> Result<Key, JsonError> {
    let key = key.map_or_else(|_| char::REPLACEMENT_CHARACTER.to_string(), |Path(key)| key);
    key.parse().map_err(|error: ParseKeyError| JsonError::bad_request(error.to_string()))
}
