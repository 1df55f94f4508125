//! `/v1`: what Kiln shows of itself.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A project, as `GET /v1/projects/{key}` shows it. Instants are RFC 3339.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProjectView {
    pub key: String,
    pub repo: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub target: String,
    pub arch: String,
    /// `absent`, `provisioning`, `starting`, `warm`, `draining`, `idle` or `failed`.
    pub phase: String,
    /// Why it stands where it stands, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    pub generation: u64,
    /// The daemon's own address, `host:port`.
    pub address: String,
    pub server_name: String,
    pub connections: u64,
    pub leases: Vec<LeaseView>,
    pub created: String,
    pub last_activity: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeaseView {
    /// SHA-256 of the token.
    pub id: String,
    pub created: String,
    pub renewed: String,
}

/// One entry of the journal, and one `data:` of `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    pub id: i64,
    pub at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// A word a script can match: `routed`, `completed`, `phase`, `step`, `failed`, …
    pub kind: String,
    pub text: String,
}

/// The body of every error below `/v1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    pub error: String,
}
