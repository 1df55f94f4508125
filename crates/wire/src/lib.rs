//! The JSON that crosses Kiln's HTTP API, shared by server, client and fuzzer, so that both sides cannot drift apart.
//!
//! `/route`, `/prewarm` and `/complete` keep the field names, limits and order of checks of the reference system;
//! what Kiln adds is optional. [`decode`] is the only way from bytes to a request.
//!
//! What must not be here: I/O, HTTP types, decisions.

mod decode;
mod v1;

pub use decode::{DecodeError, MAX_BODY_BYTES, decode};
use kiln_domain::spec::SpecError;
use kiln_domain::{BuildSpec, Key};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
pub use v1::{ApiError, EventView, LeaseView, ProjectView};

/// `POST /route` and `POST /prewarm`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
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
    /// Answer with a credential that opens this project's daemon until the build's maximum age.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub credential: bool,
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
