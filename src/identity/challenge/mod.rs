//! A way in for runs to which their forge gives no token: pull requests from forks of public repositories.
//!
//! ```text
//!   a job of the run ── ask(repository, run) ──▶ words, and a secret that goes with them
//!       prints the words in its log, and ends
//!   a later job of it ── answer(secret) ───────▶ Kiln asks the forge: is there such a run, of a pull request from a fork, that goes
//!                                                on, and has one of its jobs printed these words since?
//!                     ◀── a token for the fork of that pull request, good for some minutes
//! ```
//!
//! The log is public, so the words alone are worth nothing; and whoever has the secret but not the run cannot make it print. A
//! forge shows the log of a job only when the job has ended, so it takes two of them.
//!
//! Promises: what is proven is never more than untrusted code of one pull request, which its forge names; off until a forge is
//! configured; a stranger costs the forge no question before he has the secret of a challenge, and then few; everything is bounded
//! and in memory, and a restart forgets it.
//!
//! | module | what is in it |
//! |---|---|
//! | `book` | challenges and tokens, as data with bounds |
//! | `forge` | what is asked of a forge |
//! | `github` | how GitHub is asked |
//!
//! What must not be here: HTTP of ours, the store.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kiln_domain::access::{Proven, Standing, Trust};
use kiln_domain::repo::RepoError;
use kiln_domain::settings::RepoPattern;
use kiln_domain::{RepoName, Timestamp};
use thiserror::Error;
use tokio::sync::Semaphore;

use super::oidc::{Refusal, RootsError, Verified};
use crate::clock::Clock;
use crate::config::identity::Forge as Config;
use crate::entropy::{Entropy, NoEntropy};

mod book;
mod forge;
mod github;
#[cfg(test)]
mod tests;

use book::{Book, Grant, Turn};
use forge::{Forge, ForgeError, Look};
use github::GitHub;

/// Looks at one forge at a time.
const LOOKS: usize = 4;

/// Forges that can be asked, and who has asked them.
pub struct Challenges {
    doors: Vec<Door>,
    book: Mutex<Book>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

struct Door {
    host: String,
    repositories: Vec<RepoPattern>,
    forge: Box<dyn Forge>,
    places: Semaphore,
}

/// For the job.
#[derive(Clone, PartialEq, Eq)]
pub struct Asked {
    /// To be printed, on a line of their own.
    pub words: String,
    /// To be kept, and shown for the answer.
    pub secret: String,
    pub until: Timestamp,
}

#[derive(Clone, PartialEq, Eq)]
pub enum Answered {
    /// The forge does not show it yet.
    NotYet { retry_after: Duration },
    /// To be shown as a bearer's token.
    Granted { token: String, until: Timestamp },
}

#[derive(Debug, Error)]
pub enum ChallengeError {
    #[error(transparent)]
    Repository(#[from] RepoError),
    #[error(
        "{repo} is not among the repositories for which a challenge can be asked: whoever runs this Kiln can add it"
    )]
    NotListed { repo: RepoName },
    #[error("too many challenges are under way")]
    Crowded { retry_after: Duration },
    #[error("no challenge has this secret: it has ended, or was answered, or never was. Ask for a new one")]
    Unknown,
    #[error("the forge does not say that: {why}")]
    Refused { why: &'static str },
    #[error("the forge cannot be asked now")]
    Unavailable { retry_after: Duration },
    #[error(transparent)]
    Entropy(#[from] NoEntropy),
}

/// What is amiss with the configuration that only this host can tell.
#[derive(Debug, Error)]
pub enum SetupError {
    #[error("identity.challenges: cannot read credentials_file {path}")]
    Read {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("identity.challenges: credentials_file {path} {why}")]
    Credentials { path: std::path::PathBuf, why: &'static str },
    #[error("identity.challenges: {0}")]
    Value(String),
    #[error("identity.challenges")]
    Roots(#[from] RootsError),
}

impl Challenges {
    /// Of the configured forges. None: nothing is listed, so every question is refused.
    pub fn new(config: &[Config], clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Result<Self, SetupError> {
        let mut roots = super::oidc::roots::Roots::default();
        let mut doors = Vec::new();
        for forge in config {
            doors.push(Door {
                host: forge.repo_host().ok_or_else(|| SetupError::Value(format!("{} has no host", forge.api)))?,
                repositories: forge.patterns().map_err(|error| SetupError::Value(error.to_string()))?,
                forge: Box::new(GitHub::new(forge, &mut roots)?),
                places: Semaphore::new(LOOKS),
            });
        }
        Ok(Self { doors, book: Mutex::default(), clock, entropy })
    }

    /// A challenge for a run of a repository. Asks nobody.
    pub fn ask(&self, repo: &str, run: u64) -> Result<Asked, ChallengeError> {
        let repo = RepoName::parse(repo)?;
        if self.door(&repo).is_none_or(|door| !is_of_a_forge(&repo, &door.host)) {
            return Err(ChallengeError::NotListed { repo });
        }
        let words = format!("kiln-challenge-{}", &self.random()?[..32]);
        let secret = self.random()?;
        let until = self.book().ask(&secret, repo, run, words.clone(), self.clock.now());
        let until = until.map_err(|retry_after| ChallengeError::Crowded { retry_after })?;
        Ok(Asked { words, secret, until })
    }

    /// Whether the run has printed its words. Asks the forge, but not each time.
    pub async fn answer(&self, secret: &str) -> Result<Answered, ChallengeError> {
        let turn = self.book().turn(secret, self.clock.now());
        let asked = match turn {
            Turn::Look(asked) => asked,
            Turn::Later(retry_after) => return Ok(Answered::NotYet { retry_after }),
            Turn::Unknown => return Err(ChallengeError::Unknown),
        };
        let door = self.door(&asked.repo).ok_or(ChallengeError::Unknown)?;
        let busy = |_| ChallengeError::Unavailable { retry_after: book::BETWEEN_LOOKS };
        let _place = door.places.try_acquire().map_err(busy)?;
        let path = asked.repo.as_str().strip_prefix(&door.host).and_then(|rest| rest.strip_prefix('/'));
        match door.forge.look(path.unwrap_or_default(), asked.run, &asked.words, asked.at).await {
            Ok(Look::NotYet) => Ok(Answered::NotYet { retry_after: book::BETWEEN_LOOKS }),
            Ok(Look::Printed { fork }) => {
                let token = format!("{TOKEN_PREFIX}{}", self.random()?);
                let grant = Grant { repo: asked.repo, run: asked.run, fork };
                let until = self.book().grant(secret, &token, grant, self.clock.now());
                until.map(|until| Answered::Granted { token, until }).ok_or(ChallengeError::Unknown)
            }
            Err(ForgeError::Refused(why)) => {
                self.book().forget(secret);
                Err(ChallengeError::Refused { why })
            }
            Err(ForgeError::Unavailable { why, retry_after }) => {
                tracing::warn!(repo = %asked.repo, why, "a forge cannot be asked for a challenge");
                Err(ChallengeError::Unavailable { retry_after })
            }
        }
    }

    /// Whether a token has the shape of one of these.
    pub fn looks_like(token: &str) -> bool {
        token.starts_with(TOKEN_PREFIX)
    }

    /// What a token proves; `None` if it is none that counts.
    pub fn prove(&self, token: &str) -> Option<Verified> {
        let (Grant { repo, run, fork }, expires) = self.book().granted(token, self.clock.now())?;
        let who = format!("a build of {repo}, run {run}, pull request {fork}, by a challenge");
        let who = kiln_token::shown_within(&who, super::LONGEST_WHO - 3);
        let standing = Standing::Build(Proven { repo, trust: Trust::Untrusted { fork } });
        Some(Verified { standing, who, expires, is_repeated: false })
    }

    fn door(&self, repo: &RepoName) -> Option<&Door> {
        self.doors.iter().find(|door| {
            let is_here = repo.as_str().strip_prefix(&door.host).is_some_and(|rest| rest.starts_with('/'));
            is_here && door.repositories.iter().any(|pattern| pattern.matches(repo))
        })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// 64 hexadecimal digits.
    fn random(&self) -> Result<String, NoEntropy> {
        let mut digits = String::new();
        for _ in 0..4 {
            for byte in self.entropy.token()? {
                // Writing to a string does not fail.
                let _ = write!(digits, "{byte:02x}");
            }
        }
        Ok(digits)
    }
}

impl ChallengeError {
    /// What it is to a caller.
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::Repository(_) | Self::Unknown => Refusal::Unproven,
            Self::NotListed { .. } | Self::Refused { .. } => Refusal::NotListed,
            Self::Crowded { retry_after } | Self::Unavailable { retry_after } => {
                Refusal::Unavailable { retry_after: *retry_after }
            }
            Self::Entropy(_) => Refusal::Unavailable { retry_after: Duration::from_secs(1) },
        }
    }
}

/// `host/owner/name`, and nothing that only looks like it.
fn is_of_a_forge(repo: &RepoName, host: &str) -> bool {
    let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let is_part = |part: &str| !part.is_empty() && part != "." && part != ".." && part.bytes().all(is_name);
    let path = repo.as_str().strip_prefix(host).and_then(|rest| rest.strip_prefix('/'));
    path.and_then(|path| path.split_once('/')).is_some_and(|(owner, name)| is_part(owner) && is_part(name))
}

/// Unlike that of tokens that an admin gives out.
const TOKEN_PREFIX: &str = "kilnrun_";

impl std::fmt::Debug for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asked").field("words", &self.words).field("until", &self.until).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Answered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotYet { retry_after } => f.debug_struct("NotYet").field("retry_after", retry_after).finish(),
            Self::Granted { until, .. } => f.debug_struct("Granted").field("until", until).finish_non_exhaustive(),
        }
    }
}
