//! Who a build is, by the word of its forge: tokens of OpenID Connect (docs/identity.md).
//!
//! [`Verifier::prove`] takes a token and says what was proven: a [`Standing`] for the table in `kiln_domain::access`, or why nothing
//! was, which is one of three things to a caller ([`Refusal`]). In this order, the cheap before the dear:
//!
//! ```text
//! shape and size (kiln-token) → issuer, to the letter → algorithm, dates, audience → the key by its name
//!   → signature → repository → on the list? → seen before? → lane
//! ```
//!
//! So nobody is asked because of a token that could not count anyway, and nothing of a token is believed, said or remembered but
//! its short and printable quotes, before its signature was good.
//!
//! | module | what is in it |
//! |---|---|
//! | `prove` | the checks of one token |
//! | `lanes`, `glob` | whose code it is: the rules, and the name of the fork |
//! | `repository` | the claim that names the repository, to its normal form |
//! | `signature` | keys and signatures; the one file that knows `jsonwebtoken` |
//! | `keeper` | one issuer's keys: one task, one attempt at a time, bounded waits |
//! | `discovery`, `fetch` | the issuer's two documents, over TLS, without redirects |
//! | `replay` | tokens seen before |
//! | `roots` | whose certificates count |
//!
//! What must not be here: HTTP of ours, the store, what a standing may do.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kiln_domain::access::Standing;
use kiln_domain::settings::RepoPattern;
use kiln_domain::{RepoName, Timestamp};
use kiln_token::{Algorithm, TokenError};
use thiserror::Error;

use crate::clock::Clock;
use crate::config;
use crate::config::identity::Replay;

mod discovery;
pub(super) mod fetch;
mod glob;
mod keeper;
mod lanes;
mod prove;
mod replay;
mod repository;
pub(super) mod roots;
mod signature;
#[cfg(test)]
pub(crate) mod tests;

pub use keeper::IssuerState;
pub use roots::RootsError;

use discovery::Source;
use fetch::{Fetch, Web};
use keeper::Keeper;
use prove::Issuer;

/// Knows the issuers of the configuration, and keeps their keys.
pub struct Verifier {
    issuers: HashMap<String, Issuer>,
    repositories: Option<Vec<RepoPattern>>,
    replay: Replay,
    clock: Arc<dyn Clock>,
}

/// What a token proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Always a build.
    pub standing: Standing,
    /// For the audit: who asked. As of a [`Caller`](super::Caller).
    pub who: String,
    /// When the token ends. What follows from it may last longer.
    pub expires: Timestamp,
    /// The same token came before. A job may well show its own twice.
    pub is_repeated: bool,
}

/// What is amiss with the section `[identity]` that only this host can tell.
#[derive(Debug, Error)]
pub enum SetupError {
    #[error("identity.issuers: {issuer}: {why}")]
    Issuer { issuer: String, why: String },
    #[error("identity.issuers: {issuer}")]
    Roots {
        issuer: String,
        #[source]
        source: RootsError,
    },
}

/// Why nothing was proven. Each text goes to the caller, and none has the token in it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ProveError {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("{issuer:?} is not an issuer that this Kiln knows{hint}")]
    UnknownIssuer { issuer: String, hint: &'static str },
    #[error("the token is signed with {algorithm}, which is not taken from {issuer}")]
    Algorithm { issuer: String, algorithm: Algorithm },
    #[error("the token has no {0:?}: a date is wanted")]
    NoDate(&'static str),
    #[error("the token ended {0} s ago: ask for one just before it is shown")]
    Expired(u64),
    #[error("the token is not valid yet by {0} s ({1:?}): keep the clocks of both hosts right")]
    Early(u64, &'static str),
    #[error("the token is for {theirs:?}: ask for one whose audience is {ours:?}")]
    Audience { ours: String, theirs: String },
    #[error("{issuer} has no key of the token's name that signs with {algorithm}: the key was replaced, or never was")]
    UnknownKey { issuer: String, algorithm: Algorithm },
    #[error("the token's signature is not {issuer}'s")]
    Signature { issuer: String },
    #[error("the token names no repository: its {claim:?} is missing, or no text")]
    NoRepository { claim: String },
    #[error("the token's {claim:?} is no repository's name: {says:?}")]
    OddRepository { claim: String, says: String },
    #[error("the token was shown before, and counts once here: ask for a new one each time")]
    Replayed,
    #[error("the token has no name (\"jti\"), so nobody can tell whether it was shown before")]
    Nameless,
    #[error("{repo} is not among the repositories that may build here: ask whoever runs this Kiln to add it")]
    NotListed { repo: RepoName },
    #[error("{issuer} cannot be asked for its keys now: {why}")]
    Unavailable { issuer: String, why: &'static str, retry_after: Duration },
    #[error("too many tokens of {issuer} are under way to tell whether this one came before")]
    Crowded { issuer: String, retry_after: Duration },
}

/// What an error is to a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The token proves nothing: 401.
    Unproven,
    /// It proves who asks, and that one may not: 403.
    NotListed,
    /// Nobody can tell now: 503.
    Unavailable { retry_after: Duration },
}

impl Verifier {
    /// Begins to ask the issuers; does not wait for them. Within a runtime of tokio.
    pub fn start(config: &config::Identity, clock: Arc<dyn Clock>) -> Result<Self, SetupError> {
        let mut roots = roots::Roots::default();
        Self::with(config, clock, |issuer| {
            let tls = roots.for_issuer(issuer);
            let tls = tls.map_err(|source| SetupError::Roots { issuer: issuer.issuer.clone(), source })?;
            Ok(Box::new(Web::new(tls)))
        })
    }

    fn with(
        config: &config::Identity,
        clock: Arc<dyn Clock>,
        mut fetch: impl FnMut(&config::identity::Issuer) -> Result<Box<dyn Fetch>, SetupError>,
    ) -> Result<Self, SetupError> {
        let mut issuers = HashMap::new();
        for issuer in &config.issuers {
            let wrong = |why: String| SetupError::Issuer { issuer: issuer.issuer.clone(), why };
            let place = issuer.place().map_err(|why| wrong(why.to_owned()))?;
            let host = issuer.repo_host().ok_or_else(|| wrong("has no host".to_owned()))?;
            let source = Source::new(issuer, &place, fetch(issuer)?);
            let keeper = Keeper::start(issuer.issuer.clone(), source);
            issuers.insert(issuer.issuer.clone(), Issuer::new(issuer.clone(), host, keeper));
        }
        let repositories = config.patterns();
        let repositories = repositories
            .map_err(|error| SetupError::Issuer { issuer: "repositories".to_owned(), why: error.to_string() })?;
        Ok(Self { issuers, repositories, replay: config.replay, clock })
    }

    /// What the token proves. Waits for its issuer some seconds at most, and for no other.
    pub async fn prove(&self, token: &str) -> Result<Verified, ProveError> {
        let token = kiln_token::parse(token)?;
        let issuer = self.issuers.get(&token.issuer).ok_or_else(|| self.unknown(&token.issuer))?;
        let proven = issuer.prove(&token, self.clock.now()).await?;
        if let Some(patterns) = &self.repositories
            && !patterns.iter().any(|pattern| pattern.matches(&proven.repo))
        {
            return Err(ProveError::NotListed { repo: proven.repo });
        }
        issuer.verified(&token, proven, self.replay, self.clock.now())
    }

    /// How each issuer is, by its name.
    pub fn issuers(&self) -> Vec<IssuerState> {
        let mut states: Vec<_> = self.issuers.values().map(Issuer::state).collect();
        states.sort_by(|a, b| a.issuer.cmp(&b.issuer));
        states
    }

    fn unknown(&self, issuer: &str) -> ProveError {
        let bare = |text: &str| text.trim_end_matches('/').to_ascii_lowercase();
        let is_near = self.issuers.keys().any(|known| bare(known) == bare(issuer));
        let hint = if is_near { ": one that it knows differs in a slash at its end, or in capitals" } else { "" };
        ProveError::UnknownIssuer { issuer: kiln_token::shown(issuer), hint }
    }
}

impl ProveError {
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::NotListed { .. } => Refusal::NotListed,
            Self::Unavailable { retry_after, .. } | Self::Crowded { retry_after, .. } => {
                Refusal::Unavailable { retry_after: *retry_after }
            }
            _ => Refusal::Unproven,
        }
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("issuers", &self.issuers.keys()).finish_non_exhaustive()
    }
}
