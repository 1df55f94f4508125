//! The JSON that crosses Kiln's HTTP API, shared by server, client and fuzzer, so that both sides cannot drift apart.
//!
//! `/route`, `/prewarm` and `/complete` keep the field names, limits and order of checks of the reference system;
//! what Kiln adds is optional. [`decode`] is the only way from bytes to a request.
//!
//! | module | what is in it |
//! |---|---|
//! | here | the three endpoints of the reference |
//! | `v1` | projects, leases, events |
//! | `settings` | what can be set for a project, as it is asked for and as it is shown |
//! | `upkeep` | orphans, trash, readiness |
//! | `tokens` | tokens that an admin gives out |
//! | `gateway` | what is relayed now |
//! | `challenges` | a way in for runs to which their forge gives no token |
//! | `caches` | the past of a cache, a way back, and where the bytes are |
//! | [`units`] | spans and sizes as people write them |
//!
//! What must not be here: I/O, HTTP types, decisions.

mod caches;
mod challenges;
mod decode;
mod gateway;
mod settings;
mod tokens;
pub mod units;
mod upkeep;
mod v1;

pub use caches::{
    CacheEntry, CacheView, DiskUsage, Reset, Rollback, RolledBack, SnapshotView, Storage, Sums, UsageView,
};
pub use challenges::{Challenge, ChallengeAnswer, ChallengeGrant, ChallengeRequest};
pub use decode::{DecodeError, MAX_BODY_BYTES, decode};
pub use gateway::ConnectionView;
use kiln_domain::spec::SpecError;
use kiln_domain::{BuildSpec, Key};
use serde::{Deserialize, Serialize};
pub use settings::{Change, Origin, Setting, SettingsPatch, SettingsView};
pub use tokens::{NewToken, TokenRequest, TokenView};
pub use upkeep::{
    Adopt, Check, Emptied, Orphan, OrphanKind, Readiness, RemoveOrphan, Taken, Trashed, is_name, is_orphan_name,
};
use utoipa::ToSchema;
pub use v1::{ApiError, EventView, LeaseView, ProjectView, QueuePlace, Renew, Why};

/// `POST /route` and `POST /prewarm`.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RouteRequest {
    /// Any spelling of the repository; at most 512 bytes.
    #[serde(default)]
    pub repo: String,
    /// A component of a monorepo; at most 128 bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The Dockerfile target; at most 128 bytes, `default` when empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub target: String,
    /// `amd64` or `arm64`, or the kernel's names for them. Required.
    #[serde(default)]
    pub arch: String,
    /// The build runs code that nobody has reviewed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub untrusted: bool,
    /// With `untrusted`: what names the pull request for its forge, such as its number; at most 128 bytes. Each pull request of a
    /// project has a daemon and a copy of the cache of its own; those without a name share one.
    #[serde(default, rename = "pullRequest", skip_serializing_if = "Option::is_none")]
    pub pull_request: Option<String>,
    /// Where a project has several daemons, builds of one branch go to the same one where possible; at most 256 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// Answer with a credential that opens this project's daemon until the build's maximum age.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub credential: bool,
    /// `/route` only: goes on with a route that was answered with `ready: false`. Needs the same fields again.
    #[serde(default, rename = "buildId", skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
}

impl std::fmt::Debug for RouteRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { repo, name, target, arch, untrusted, pull_request, branch, credential, build_id } = self;
        f.debug_struct("RouteRequest")
            .field("repo", repo)
            .field("name", name)
            .field("target", target)
            .field("arch", arch)
            .field("untrusted", untrusted)
            .field("pull_request", pull_request)
            .field("branch", branch)
            .field("credential", credential)
            .field("build_id", &build_id.as_ref().map(|_| ".."))
            .finish()
    }
}

/// git itself makes no longer ones, and none with what cannot be printed.
const MAX_BRANCH_BYTES: usize = 256;

/// What is wrong with the name of a branch.
pub fn check_branch(branch: &str) -> Result<(), String> {
    if branch.len() > MAX_BRANCH_BYTES {
        return Err(format!("branch is too long: {} bytes, at most {MAX_BRANCH_BYTES} are accepted", branch.len()));
    }
    match branch.chars().find(|c| c.is_control()) {
        Some(found) => Err(format!("branch contains {found:?}: leave out what cannot be printed")),
        None => Ok(()),
    }
}

impl RouteRequest {
    pub fn spec(&self) -> Result<BuildSpec, SpecError> {
        BuildSpec::new(&self.repo, &self.name, &self.target, &self.arch)
    }
}

/// The answer of `/route` and `/prewarm`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteResponse {
    #[schema(value_type = String, example = "pbcce5b6205652dd7")]
    pub key: Key,
    /// The lease's token: give it back to `/complete`. Shown this once. Absent in the answer of `/prewarm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// Names the lease and opens nothing: SHA-256 of the token, as lists and logs show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_id: Option<String>,
    /// `tcp://host:port` to dial.
    pub endpoint: String,
    /// Kept for clients of the reference system; names the host's Kiln.
    pub namespace: String,
    pub ready: bool,
    /// The name to ask for in TLS, where it differs from the endpoint's host.
    pub server_name: String,
    /// Counts the daemon's starts.
    pub generation: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<Credential>,
    /// What a route that is not ready waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<RouteStatus>,
}

/// Where a project stands whose daemon is not ready yet.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteStatus {
    /// As in `ProjectView`.
    pub phase: String,
    /// In words.
    pub reason: String,
    /// From 1, while the start waits for its turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_position: Option<u64>,
    /// How many wait, this one included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_length: Option<u64>,
}

/// Opens one project's daemon, until `expires`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Credential {
    /// PEM; the project's certificate authority, to check the daemon with.
    pub ca: String,
    /// PEM.
    pub cert: String,
    /// PEM, PKCS #8. A secret.
    pub key: String,
    /// RFC 3339.
    pub expires: String,
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credential").field("expires", &self.expires).finish_non_exhaustive()
    }
}

/// `POST /complete`.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CompleteRequest {
    /// At most 64 bytes, not blank.
    #[serde(default)]
    pub key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
}
