//! Tokens that an admin gives out: make, list, revoke.

use axum::body::Body;
use axum::extract::{Extension, Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::{Json, extract::rejection::PathRejection};
use kiln_domain::access::{Grade, ParseTokenIdError, Scope, TokenId};
use kiln_domain::settings::{RepoPattern, SettingsError};
use kiln_wire::{ApiError, NewToken, TokenRequest, TokenView, units};

use super::Api;
use super::access::Asker;
use super::answers::JsonError;
use super::body::read;
use super::bounded::{A_LOOK, within};
use crate::clock::rfc3339;
use crate::identity::{Issued, TokenError, Wanted};
use crate::store::{StoreError, TokenRecord};

const NEVER: &str = "never";

impl From<TokenError> for JsonError {
    fn from(error: TokenError) -> Self {
        match error {
            TokenError::Wanted(why) => Self::bad_request(why),
            TokenError::Unknown(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            TokenError::Entropy(_) => Self::later(error.to_string()),
            TokenError::Store(error @ StoreError::TooManyTokens { .. }) => {
                Self::new(StatusCode::CONFLICT, error.to_string())
            }
            TokenError::Store(error) => error.into(),
        }
    }
}

/// Make a token.
#[utoipa::path(
    post, path = "/v1/tokens", tag = "tokens", request_body = TokenRequest,
    responses(
        (status = 201, description = "Made; the token is in this answer and nowhere else", body = NewToken),
        (status = 400, description = "Malformed, or nothing that a token could be", body = ApiError),
        (status = 401, description = "Nothing that was shown proves who asks", body = ApiError),
        (status = 403, description = "Only an admin lets others in", body = ApiError),
        (status = 408, description = "The body did not arrive in time", body = ApiError),
        (status = 409, description = "There are as many as may be", body = ApiError),
        (status = 500, description = "It could not be written", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn create(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    body: Body,
) -> Result<Response, JsonError> {
    let wanted = wanted(read(body).await?)?;
    let Issued { token, record } = to_the_disk(api.callers.tokens().issue(wanted, &asker.caller)).await?;
    let answer = NewToken { token: token.reveal().to_owned(), view: view(&record) };
    let mut answer = (StatusCode::CREATED, Json(answer)).into_response();
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(answer)
}

/// The tokens there are, the oldest first.
#[utoipa::path(
    get, path = "/v1/tokens", tag = "tokens",
    responses(
        (status = 200, description = "The tokens, also those that are over", body = Vec<TokenView>),
        (status = 401, description = "Nothing that was shown proves who asks", body = ApiError),
        (status = 403, description = "Only an admin sees them", body = ApiError),
        (status = 503, description = "Not now", body = ApiError),
    )
)]
pub(super) async fn list(State(api): State<Api>) -> Result<Response, JsonError> {
    let place = api.lists.take_for_list().await?;
    place.json(&api.callers.tokens().list().iter().map(view).collect::<Vec<_>>())
}

/// Revoke a token: it counts for nothing from now on.
#[utoipa::path(
    delete, path = "/v1/tokens/{id}", tag = "tokens",
    params(("id" = String, Path, description = "As the list shows it: the digits after `kiln_`")),
    responses(
        (status = 204, description = "It is gone"),
        (status = 400, description = "Not an id", body = ApiError),
        (status = 401, description = "Nothing that was shown proves who asks", body = ApiError),
        (status = 403, description = "Only an admin may", body = ApiError),
        (status = 404, description = "No such token", body = ApiError),
        (status = 500, description = "It could not be written, and counts as before", body = ApiError),
        (status = 503, description = "Not now; see Retry-After", body = ApiError),
    )
)]
pub(super) async fn revoke(
    State(api): State<Api>,
    Extension(asker): Extension<Asker>,
    id: Result<Path<String>, PathRejection>,
) -> Result<StatusCode, JsonError> {
    let id = id.map_or_else(|_| String::new(), |Path(id)| id);
    let id: TokenId = id.parse().map_err(|error: ParseTokenIdError| JsonError::bad_request(error.to_string()))?;
    to_the_disk(api.callers.tokens().revoke(&id, &asker.caller)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn to_the_disk<T>(call: impl Future<Output = Result<T, TokenError>>) -> Result<T, JsonError> {
    within(A_LOOK, "the database", async { call.await.map_err(JsonError::from) }).await
}

fn wanted(request: TokenRequest) -> Result<Wanted, JsonError> {
    let TokenRequest { name, grade, repositories, lasts } = request;
    let grade = Grade::named(&grade).ok_or_else(|| {
        let grades = Grade::ALL.map(Grade::name).join(", ");
        JsonError::bad_request(format!("there is no such grade: one of {grades}"))
    })?;
    let patterns = repositories.iter().map(|text| text.parse::<RepoPattern>());
    let patterns: Result<_, SettingsError> = patterns.collect();
    let scope = Scope::new(patterns.map_err(|error| JsonError::bad_request(error.to_string()))?);
    let lasts = match lasts.as_str() {
        NEVER => None,
        span => Some(
            units::parse_span(span)
                .ok_or_else(|| JsonError::bad_request("lasts is a span, such as 90d or 12h, or \"never\""))?,
        ),
    };
    Ok(Wanted { name, grade, scope, lasts })
}

fn view(record: &TokenRecord) -> TokenView {
    TokenView {
        id: record.id.to_string(),
        name: record.name.clone(),
        grade: record.grade.name().to_owned(),
        repositories: record.scope.patterns().iter().map(ToString::to_string).collect(),
        made_by: record.made_by.clone(),
        created: rfc3339(record.created),
        expires: record.expires.map(rfc3339),
        last_used: record.last_used.map(rfc3339),
    }
}
