//! The section `[identity]`: who says what a build is, and what that makes of it.
//!
//! Nothing in it is a secret. The files that it names are opened by [`crate::identity`], not here.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kiln_domain::lane::Lane as DomainLane;
use kiln_domain::settings::{RepoPattern, SettingsError};
use kiln_token::Algorithm;
use serde::{Deserialize, Serialize};

use super::units;

mod check;
mod forge;
mod place;
#[cfg(test)]
mod tests;

pub use forge::{Forge, ForgeKind};
pub use place::Place;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Identity {
    /// Those that may build, as in `[[rules]]`. Absent: all that an issuer vouches for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repositories: Option<Vec<String>>,
    pub replay: Replay,
    pub issuers: Vec<Issuer>,
    /// Forges that are asked about runs that have no token.
    pub challenges: Vec<Forge>,
}

/// What it means that a token is shown again. A job shows its own several times: it asks, waits, and asks again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Replay {
    /// It is said in the audit.
    #[default]
    Note,
    /// It is refused, and so is a token that cannot be told from others.
    Refuse,
}

/// Whose tokens count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Issuer {
    pub kind: IssuerKind,
    /// As it stands in its tokens, to the letter.
    pub issuer: String,
    /// Whom tokens must be for: this Kiln, by a name that no other service has.
    pub audience: String,
    /// What stands before the name of a repository. `None`: `github.com` for GitHub's own issuer, else the issuer's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// PEM: the authorities that may have signed its certificate, instead of the host's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// Where its keys may be, if not where it is itself: `host` or `host:port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jwks_host: Option<String>,
    #[serde(default = "default_algorithms")]
    pub algorithms: Vec<Algorithm>,
    /// By how much clocks may differ.
    #[serde(default = "default_leeway", with = "units::duration")]
    pub leeway: Duration,
    /// For `generic`: the claim that names the repository, or the names that lead to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo_claim: Option<ClaimName>,
    /// For `generic`: `host` stands in that claim already.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repo_claim_has_host: bool,
    /// For `generic`: the claim that names the pull request of an untrusted build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_request_claim: Option<String>,
    /// Of builds that no rule is for. `None`: by what their forge says of them. `generic` needs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<Lane>,
    /// Claims that rules may be about, besides those that are known of this kind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<String>,
    /// Builds that are untrusted, whatever `trusted` says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub untrusted: Vec<ClaimRule>,
    /// Builds that are trusted, whatever their kind makes of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trusted: Vec<ClaimRule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IssuerKind {
    /// GitHub Actions on github.com.
    Github,
    /// GitHub Enterprise Server, or GitHub under a name of its own.
    Ghes,
    Gitlab,
    Forgejo,
    Gitea,
    /// Anybody else, by a mapping of claims.
    Generic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    Trusted,
    Untrusted,
}

/// Claims with what they must say, all of them. `*` stands for anything, and what is not in a token is the empty text.
pub type ClaimRule = BTreeMap<String, String>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ClaimName {
    One(String),
    /// Of an object in an object.
    Path(Vec<String>),
}

fn default_algorithms() -> Vec<Algorithm> {
    vec![Algorithm::RS256]
}

const fn default_leeway() -> Duration {
    Duration::from_secs(10)
}

impl Identity {
    /// Whether anybody can prove anything by what a forge says.
    pub fn proves_anything(&self) -> bool {
        self.has_issuers() || !self.challenges.is_empty()
    }

    /// Whether anybody can prove anything by a token of a forge.
    pub fn has_issuers(&self) -> bool {
        !self.issuers.is_empty()
    }

    /// `repositories`, read. `None`: all.
    pub fn patterns(&self) -> Result<Option<Vec<RepoPattern>>, SettingsError> {
        let read = |list: &Vec<String>| list.iter().map(|text| text.parse()).collect();
        self.repositories.as_ref().map(read).transpose()
    }
}

impl Issuer {
    /// Where it is, read. [`super::Config::load`] has read it once already.
    pub fn place(&self) -> Result<Place, &'static str> {
        Place::parse(&self.issuer)
    }

    /// What stands before the names of its repositories; `None` if nothing says.
    pub fn repo_host(&self) -> Option<String> {
        let own = || {
            let host = self.place().ok()?.host;
            match self.kind {
                IssuerKind::Github => (host == GITHUB_ISSUER_HOST).then(|| "github.com".to_owned()),
                IssuerKind::Generic => None,
                // Of an enterprise with a name of its own on ghe.com, as on github.com.
                IssuerKind::Ghes => Some(host.strip_prefix("token.actions.").map(str::to_owned).unwrap_or(host)),
                _ => Some(host),
            }
        };
        self.host.clone().or_else(own)
    }

    /// The names that lead to the claim with the repository.
    pub fn repo_claim(&self) -> Vec<String> {
        let name = match (&self.repo_claim, self.kind) {
            (Some(ClaimName::Path(names)), _) => return names.clone(),
            (Some(ClaimName::One(name)), _) => name,
            (None, IssuerKind::Gitlab) => "project_path",
            (None, _) => "repository",
        };
        vec![name.to_owned()]
    }
}

/// Tokens for repositories on github.com come from here, or from a path below it.
const GITHUB_ISSUER_HOST: &str = "token.actions.githubusercontent.com";

impl From<Lane> for DomainLane {
    fn from(lane: Lane) -> Self {
        match lane {
            Lane::Trusted => Self::Trusted,
            Lane::Untrusted => Self::Untrusted,
        }
    }
}
