//! Who may use which endpoint: from a request to a caller, from an endpoint to a verb of the table in `kiln_domain::access`.
//!
//! Closed: what is not in [`ENDPOINTS`] is answered by nobody, and a test compares the list with the OpenAPI document. What an endpoint
//! is asked of stands in its path, and is looked up before the handler runs; three endpoints have it in their body, and decide
//! themselves with the [`Caller`] that they are handed.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use kiln_domain::Key;
use kiln_domain::access::{Denied, Standing, Target, Verb, decide, depends_on_owner};

use super::Api;
use super::answers::{in_the_style_of, method_not_allowed, with_retry_after};
use super::heart::{A_MOMENT, VerbError};
use crate::clock::{Clock as _, SystemClock};
use crate::identity::oidc::Refusal;
use crate::identity::{Caller, IdentifyError, Source};
use crate::store::{NewEvent, Store};

/// What an endpoint is asked of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Host,
    /// The key in its path.
    Key,
    /// The key in its query, or the host.
    KeyOrHost,
    /// What stands in the body: the handler decides.
    Body,
}

pub(super) struct Endpoint {
    method: Method,
    path: &'static str,
    verb: Verb,
    of: Of,
}

const fn endpoint(method: Method, path: &'static str, verb: Verb, of: Of) -> Endpoint {
    Endpoint { method, path, verb, of }
}

/// Whoever presses `force` needs [`Verb::Force`] beside.
pub(super) static ENDPOINTS: [Endpoint; 33] = [
    endpoint(Method::GET, "/healthz", Verb::Greet, Of::Host),
    endpoint(Method::GET, "/v1/openapi.json", Verb::Greet, Of::Host),
    endpoint(Method::GET, "/readyz", Verb::Watch, Of::Host),
    endpoint(Method::GET, "/metrics", Verb::Watch, Of::Host),
    endpoint(Method::POST, "/route", Verb::Route, Of::Body),
    endpoint(Method::POST, "/prewarm", Verb::Prewarm, Of::Body),
    endpoint(Method::POST, "/complete", Verb::Release, Of::Body),
    endpoint(Method::POST, "/v1/leases/{id}/renew", Verb::Renew, Of::Host),
    endpoint(Method::GET, "/v1/projects", Verb::List, Of::Host),
    endpoint(Method::GET, "/v1/projects/{key}", Verb::See, Of::Key),
    endpoint(Method::DELETE, "/v1/projects/{key}", Verb::Remove, Of::Key),
    endpoint(Method::GET, "/v1/projects/{key}/why", Verb::See, Of::Key),
    endpoint(Method::PATCH, "/v1/projects/{key}/settings", Verb::Configure, Of::Key),
    endpoint(Method::POST, "/v1/projects/{key}/stop", Verb::Stop, Of::Key),
    endpoint(Method::GET, "/v1/projects/{key}/cache", Verb::See, Of::Key),
    endpoint(Method::POST, "/v1/projects/{key}/snapshots", Verb::Snapshot, Of::Key),
    endpoint(Method::POST, "/v1/projects/{key}/rollback", Verb::RollBack, Of::Key),
    endpoint(Method::POST, "/v1/projects/{key}/reset", Verb::RollBack, Of::Key),
    endpoint(Method::GET, "/v1/caches", Verb::SeeHost, Of::Host),
    endpoint(Method::GET, "/v1/connections", Verb::SeeHost, Of::Host),
    endpoint(Method::GET, "/v1/events", Verb::Follow, Of::KeyOrHost),
    endpoint(Method::GET, "/v1/orphans", Verb::SeeHost, Of::Host),
    endpoint(Method::POST, "/v1/orphans/adopt", Verb::Mend, Of::Host),
    endpoint(Method::POST, "/v1/orphans/remove", Verb::Mend, Of::Host),
    endpoint(Method::GET, "/v1/trash", Verb::SeeHost, Of::Host),
    endpoint(Method::DELETE, "/v1/trash", Verb::Discard, Of::Host),
    endpoint(Method::DELETE, "/v1/trash/{name}", Verb::Discard, Of::Host),
    endpoint(Method::POST, "/v1/trash/{name}/restore", Verb::Restore, Of::Host),
    endpoint(Method::GET, "/v1/tokens", Verb::Admit, Of::Host),
    endpoint(Method::POST, "/v1/tokens", Verb::Admit, Of::Host),
    endpoint(Method::DELETE, "/v1/tokens/{id}", Verb::Admit, Of::Host),
    endpoint(Method::POST, "/v1/challenges", Verb::Challenge, Of::Host),
    endpoint(Method::POST, "/v1/challenges/answer", Verb::Challenge, Of::Host),
];

/// Why a request is not let through.
#[derive(Debug)]
pub(super) enum Refused {
    /// What it showed does not count, or nobody can say whether it does.
    Identity(Arc<IdentifyError>),
    Denied(Denied),
    /// What it is asked of could not be looked up: that is never read as "it is not there" (F18).
    Lookup(VerbError),
}

impl Refused {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Identity(error) => match error.refusal() {
                Refusal::Unproven => StatusCode::UNAUTHORIZED,
                Refusal::NotListed => StatusCode::FORBIDDEN,
                Refusal::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            },
            Self::Denied(Denied::Unproven { .. }) => StatusCode::UNAUTHORIZED,
            Self::Denied(_) => StatusCode::FORBIDDEN,
            Self::Lookup(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    pub(super) fn text(&self) -> String {
        match self {
            Self::Identity(error) => error.to_string(),
            Self::Denied(denied) => denied.to_string(),
            Self::Lookup(error) => format!("cannot verify whose project it is: {error}"),
        }
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Lookup(error) => Some(error.retry_after().unwrap_or(A_MOMENT)),
            Self::Identity(error) => match error.refusal() {
                Refusal::Unavailable { retry_after } => Some(retry_after),
                _ => None,
            },
            Self::Denied(_) => None,
        }
    }

    fn answer(&self, uri: &Uri) -> Response {
        let status = self.status();
        let mut answer = in_the_style_of(uri, status, &self.text());
        if status == StatusCode::UNAUTHORIZED {
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        with_retry_after(answer, self.retry_after())
    }
}

impl From<Denied> for Refused {
    fn from(denied: Denied) -> Self {
        Self::Denied(denied)
    }
}

/// Whoever asks, as far as it was proven; and what it showed that does not count. Handed to the handlers.
#[derive(Debug, Clone)]
pub(super) struct Asker {
    pub(super) caller: Caller,
    source: Source,
    shown: Vec<HeaderValue>,
    /// It showed something, and that was refused: to whom a lease's token is enough, this says why nothing else is.
    pub(super) refused: Option<Arc<IdentifyError>>,
}

impl Asker {
    pub(super) fn may(&self, verb: Verb, target: Target<'_>) -> Result<(), Denied> {
        decide(&self.caller.standing, verb, target)
    }

    /// Whoever presses `force` cuts off others.
    pub(super) fn may_force(&self, force: bool) -> Result<(), Denied> {
        if force { self.may(Verb::Force, Target::Host) } else { Ok(()) }
    }

    /// Whether the same request would be let through now: a token ends, and is revoked, while its holder reads on.
    pub(super) async fn still_may(&self, api: &Api, verb: Verb, key: Option<&Key>) -> bool {
        let asker = identify(api, self.source, &self.shown).await;
        match key {
            None => asker.may(verb, Target::Host).is_ok(),
            Some(key) => of_key(api, verb, key.as_str(), &asker).await.is_ok_and(|decided| decided.is_ok()),
        }
    }

    /// Of a stranger, for whom a lease's token was no proof either.
    pub(super) fn unproven(&self, verb: Verb) -> Option<Refused> {
        let refused = self.refused.clone().map(Refused::Identity);
        let is_stranger = self.caller.standing == Standing::Stranger;
        refused.or_else(|| is_stranger.then_some(Refused::Denied(Denied::Unproven { verb })))
    }
}

/// The layer around every endpoint.
pub(super) async fn let_through(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    let Some(path) = request.extensions().get::<MatchedPath>().cloned() else {
        return next.run(request).await;
    };
    let uri = request.uri().clone();
    let Some(endpoint) = endpoint_of(request.method(), path.as_str()) else {
        return method_not_allowed(uri).await;
    };
    let (source, shown) = (source_of(&request), bearers(request.headers()));
    // A lease's token is a proof, too, and whatever a build showed for its route may be over by then (F15).
    let by_lease = endpoint.takes_a_lease_s_token();
    let asker = match admit(&api, source, &shown, by_lease, by_lease || endpoint.verb == Verb::Greet).await {
        Ok(asker) => asker,
        Err(pause) => return too_often(&uri, pause),
    };
    let key = key_in(&uri, path.as_str(), endpoint.of);
    if let Err(refused) = check(&api, endpoint, key.as_deref(), &asker).await {
        return refused.answer(&uri);
    }
    let audit = endpoint.is_audited().then(|| Audit::begin(&api, endpoint.verb, key.as_deref(), &asker.caller.who));
    request.extensions_mut().insert(asker);
    let answer = next.run(request).await;
    if let Some(audit) = audit {
        audit.end(answer.status());
    }
    answer
}

/// Known, and within its measure. The error: when to come again.
async fn admit(
    api: &Api,
    source: Source,
    shown: &[HeaderValue],
    by_lease: bool,
    is_free: bool,
) -> Result<Asker, Duration> {
    if by_lease || !shown.is_empty() {
        api.limits.may_prove(source)?;
    }
    let asker = identify(api, source, shown).await;
    // Who showed something that does not count is told why, and was counted for it.
    if !is_free && asker.refused.is_none() {
        api.limits.may_ask(&asker.caller, source)?;
    }
    Ok(asker)
}

fn too_often(uri: &Uri, pause: Duration) -> Response {
    let words = "rate limited: requests come faster than they may; see Retry-After";
    with_retry_after(in_the_style_of(uri, StatusCode::TOO_MANY_REQUESTS, words), Some(pause))
}

fn endpoint_of(method: &Method, path: &str) -> Option<&'static Endpoint> {
    let method = if method == Method::HEAD { &Method::GET } else { method };
    // Health checkers send whatever they like.
    ENDPOINTS.iter().find(|one| one.path == path && (one.method == *method || path == "/healthz"))
}

impl Endpoint {
    #[cfg(test)]
    pub(super) const fn method(&self) -> &Method {
        &self.method
    }

    #[cfg(test)]
    pub(super) const fn path(&self) -> &'static str {
        self.path
    }

    fn takes_a_lease_s_token(&self) -> bool {
        matches!(self.verb, Verb::Release | Verb::Renew)
    }

    /// What changes something and is told of by nobody else: what builds do is in the journal anyway.
    fn is_audited(&self) -> bool {
        let is_a_build_s =
            matches!(self.verb, Verb::Route | Verb::Prewarm | Verb::Release | Verb::Renew | Verb::Challenge);
        self.method != Method::GET && !is_a_build_s
    }
}

/// One who shows something that does not count is refused, but where nothing has to be shown.
async fn identify(api: &Api, source: Source, shown: &[HeaderValue]) -> Asker {
    match api.callers.identify(source, shown.iter().map(HeaderValue::as_bytes)).await {
        Ok(caller) => Asker { caller, source, shown: shown.to_vec(), refused: None },
        Err(error) => {
            let caller = Caller::stranger("nobody who could be told");
            Asker { caller, source, shown: shown.to_vec(), refused: Some(Arc::new(error)) }
        }
    }
}

/// Nobody is served without one; a stranger is the safe side.
fn source_of(request: &Request) -> Source {
    request.extensions().get::<Source>().copied().unwrap_or(Source::Tcp(Ipv4Addr::UNSPECIFIED.into()))
}

/// None but in the rarest case is more than one.
fn bearers(headers: &HeaderMap) -> Vec<HeaderValue> {
    headers.get_all(header::AUTHORIZATION).iter().take(2).cloned().collect()
}

async fn check(api: &Api, endpoint: &Endpoint, key: Option<&str>, asker: &Asker) -> Result<(), Refused> {
    let verb = match endpoint.of {
        // The handler knows more; but for a stranger there is nothing that it could know.
        Of::Body if asker.caller.standing == Standing::Stranger => endpoint.verb,
        Of::Body => return Ok(()),
        Of::KeyOrHost if key.is_some() => Verb::See,
        _ => endpoint.verb,
    };
    let decided = match key {
        None => asker.may(verb, Target::Host),
        Some(key) => of_key(api, verb, key, asker).await?,
    };
    match (decided, &asker.refused) {
        (Ok(()), _) => Ok(()),
        // Said with the reason of its own.
        (Err(Denied::Unproven { .. }), Some(why)) => Err(Refused::Identity(why.clone())),
        (Err(denied), _) => Err(denied.into()),
    }
}

/// Whose project it is, is looked up only where that decides: a stranger costs no look at the database.
async fn of_key(api: &Api, verb: Verb, key: &str, asker: &Asker) -> Result<Result<(), Denied>, Refused> {
    if !depends_on_owner(&asker.caller.standing, verb) {
        return Ok(asker.may(verb, Target::Nothing));
    }
    let owner = match key.parse::<Key>() {
        Ok(key) => api.heart.owner(&key).await.map_err(Refused::Lookup)?,
        Err(_) => None,
    };
    Ok(asker.may(verb, owner.as_ref().map_or(Target::Nothing, Target::Project)))
}

/// As it stands in the request; what is no key is nobody's.
fn key_in(uri: &Uri, matched: &str, of: Of) -> Option<String> {
    match of {
        Of::Host | Of::Body => None,
        Of::Key => {
            let at = matched.split('/').position(|piece| piece == "{key}");
            let piece = at.and_then(|at| uri.path().split('/').nth(at));
            Some(piece.unwrap_or_default().to_owned())
        }
        Of::KeyOrHost => {
            let pairs = uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
            pairs.filter(|(name, _)| *name == "key").map(|(_, key)| key.to_owned()).next_back()
        }
    }
}

/// Who asked for what: in the journal and in the log when it is dropped, so also of one who hung up before the answer, for whom it
/// is carried out all the same.
struct Audit {
    journal: Store,
    verb: Verb,
    key: Option<Key>,
    who: String,
    /// `None`: nobody waited for it.
    status: Option<StatusCode>,
}

impl Audit {
    fn begin(api: &Api, verb: Verb, key: Option<&str>, who: &str) -> Self {
        let key = key.and_then(|key| key.parse().ok());
        Self { journal: api.journal.clone(), verb, key, who: who.to_owned(), status: None }
    }

    fn end(mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        let came = match self.status {
            // What was refused changed nothing; what failed may have.
            Some(status) if status.is_client_error() => return,
            Some(status) if status.is_success() => "done".to_owned(),
            Some(status) => format!("answered {}", status.as_u16()),
            None => "hung up before it was answered".to_owned(),
        };
        let (who, verb, key) = (&self.who, self.verb, self.key.as_ref());
        tracing::info!(who, verb = verb.name(), key = key.map(Key::as_str), came, "asked");
        let text = format!("{who} asked to {verb}: {came}");
        drop(self.journal.record(NewEvent::new(SystemClock.now(), key, "audit", text).by(who.clone())));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The list is the whole API: what is served without being in it would be answered by nobody, and what is in it and not served
    /// would be a lie.
    #[test]
    fn every_endpoint_is_in_the_list() {
        let document: serde_json::Value = serde_json::from_str(&super::super::openapi()).expect("JSON");
        let paths = document["paths"].as_object().expect("paths");
        let served = paths.iter().flat_map(|(path, methods)| {
            let methods = methods.as_object().expect("methods").keys();
            methods.map(|method| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
        });
        let mut served: BTreeSet<_> = served.collect();
        for beside in ["/healthz", "/v1/openapi.json"] {
            served.insert(("GET".to_owned(), beside.to_owned()));
        }
        let listed: BTreeSet<_> = ENDPOINTS.iter().map(|one| (one.method.to_string(), one.path.to_owned())).collect();
        assert_eq!(served, listed);
        assert_eq!(listed.len(), ENDPOINTS.len(), "none is there twice");
    }

    #[test]
    fn a_key_is_taken_from_where_it_stands() {
        let of = |uri: &str, matched: &str, of| key_in(&uri.parse().expect("a URI"), matched, of);
        assert_eq!(of("/v1/projects/pabc/why", "/v1/projects/{key}/why", Of::Key).as_deref(), Some("pabc"));
        assert_eq!(of("/v1/projects/%70/why", "/v1/projects/{key}/why", Of::Key).as_deref(), Some("%70"));
        assert_eq!(of("/v1/events?key=pabc", "/v1/events", Of::KeyOrHost).as_deref(), Some("pabc"));
        assert_eq!(of("/v1/events?after=3", "/v1/events", Of::KeyOrHost), None);
    }
}
