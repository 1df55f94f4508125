//! Which proof counts.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kiln_domain::Lane;
use kiln_domain::access::{AccessToken, Scope, Standing, TokenId};
use thiserror::Error;

use super::challenge::Challenges;
use super::oidc::{ProveError, Refusal, Verified, Verifier};
use super::{AccountError, Caller, Local, SystemAccounts, Tokens};
use crate::clock::SystemClock;
use crate::entropy::SystemEntropy;
use crate::store::Store;

/// Where a request came from, as the kernel says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The unix socket.
    Socket { uid: u32 },
    /// TCP.
    Tcp(IpAddr),
}

/// What a program on this host is that comes over TCP and shows nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loopback {
    /// Builds every repository.
    Builder,
    Nothing,
    /// [`Loopback::Builder`] until the first token is given out.
    UntilTokens,
}

/// Why nothing is known of a caller.
#[derive(Debug, Error)]
pub enum IdentifyError {
    #[error("the Authorization header is not one `Bearer` and a token")]
    Header,
    #[error(
        "this bearer token is none that Kiln knows: `kiln token create` makes one, and docs/identity.md tells of those of forges"
    )]
    Foreign,
    #[error("this token of a challenge is over, or never was one: ask for a new challenge")]
    Challenge,
    #[error(transparent)]
    Forge(#[from] ProveError),
    #[error("this token is not known: it was revoked, or it is not this Kiln's")]
    Token,
    #[error("token {id} is over: make a new one with `kiln token create`")]
    TokenOver { id: TokenId },
    /// Not now.
    #[error(transparent)]
    Account(#[from] AccountError),
}

impl IdentifyError {
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::Forge(error) => error.refusal(),
            Self::Account(_) => Refusal::Unavailable { retry_after: A_MOMENT },
            _ => Refusal::Unproven,
        }
    }
}

pub struct Callers {
    local: Local,
    tokens: Tokens,
    /// `None`: no forge's word counts.
    forges: Option<Verifier>,
    /// `None`: no forge is asked.
    challenges: Option<Challenges>,
    loopback: Loopback,
}

/// For a directory of users that is away.
const A_MOMENT: Duration = Duration::from_secs(1);

impl Callers {
    pub fn new(local: Local, tokens: Tokens, loopback: Loopback) -> Self {
        Self { local, tokens, forges: None, challenges: None, loopback }
    }

    #[must_use]
    pub fn with_forges(self, forges: Option<Verifier>, challenges: Option<Challenges>) -> Self {
        Self { forges, challenges, ..self }
    }

    pub const fn challenges(&self) -> Option<&Challenges> {
        self.challenges.as_ref()
    }

    /// For a Kiln of one user: whoever runs it may do everything, and whatever comes over loopback may build.
    pub fn of_one_user(store: Store) -> Self {
        let own = rustix::process::getuid().as_raw();
        let local = Local::new(Vec::new(), own, Arc::new(SystemAccounts));
        let tokens = Tokens::new(store, Arc::new(SystemClock), Arc::new(SystemEntropy::default()));
        Self::new(local, tokens, Loopback::UntilTokens)
    }

    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// `authorization`: that header's values, in their order.
    pub async fn identify<'a>(
        &self,
        source: Source,
        mut authorization: impl Iterator<Item = &'a [u8]>,
    ) -> Result<Caller, IdentifyError> {
        match (authorization.next(), authorization.next()) {
            (None, _) => self.unproven(source).await,
            (Some(shown), None) => self.bearer(shown).await,
            (Some(_), Some(_)) => Err(IdentifyError::Header),
        }
    }

    async fn unproven(&self, source: Source) -> Result<Caller, IdentifyError> {
        match source {
            Source::Socket { uid } => Ok(self.local.caller(uid).await?),
            Source::Tcp(address) if address.to_canonical().is_loopback() => {
                let builder = Standing::Holder { scope: Scope::everything(), lane: Lane::Trusted };
                let standing = if self.trusts_loopback() { builder } else { Standing::Stranger };
                Ok(Caller { standing, who: Caller::THIS_HOST.to_owned() })
            }
            Source::Tcp(address) => Ok(Caller::stranger(address.to_canonical().to_string())),
        }
    }

    /// Whether a program of this host may build over TCP without showing anything.
    pub fn trusts_loopback(&self) -> bool {
        match self.loopback {
            Loopback::Builder => true,
            Loopback::UntilTokens => !self.tokens.were_given(),
            Loopback::Nothing => false,
        }
    }

    async fn bearer(&self, shown: &[u8]) -> Result<Caller, IdentifyError> {
        let shown = str::from_utf8(shown).map_err(|_| IdentifyError::Header)?;
        let (scheme, token) = shown.split_once(' ').ok_or(IdentifyError::Header)?;
        let token = token.trim();
        if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() {
            return Err(IdentifyError::Header);
        }
        if Challenges::looks_like(token) {
            let verified = self.challenges.as_ref().and_then(|challenges| challenges.prove(token));
            return verified.map(Caller::from).ok_or(IdentifyError::Challenge);
        }
        if AccessToken::looks_like(token) {
            let token: AccessToken = token.parse().map_err(|_| IdentifyError::Token)?;
            return self.tokens.caller(&token);
        }
        match &self.forges {
            Some(forges) => Ok(forges.prove(token).await?.into()),
            None => Err(IdentifyError::Foreign),
        }
    }
}

impl From<Verified> for Caller {
    fn from(verified: Verified) -> Self {
        let again = if verified.is_repeated { ", whose token came before" } else { "" };
        Self { standing: verified.standing, who: verified.who + again }
    }
}
