//! `/v1`: projects, leases, events.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::settings::SettingsView;

/// A project, as `GET /v1/projects/{key}` shows it. Instants are RFC 3339.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProjectView {
    pub key: String,
    pub repo: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub target: String,
    pub arch: String,
    /// `project`; or what is derived from one: `fork` (of untrusted builds that do not say whose they are), `pull-request` (the fork
    /// of one), `member` (one more daemon of a project that one is not enough for). Empty in the answer of an older kilnd.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub role: String,
    /// The project that it is derived from; absent where it is one itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Whose fork it is, as its forge names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_request: Option<String>,
    /// `absent`, `provisioning`, `starting`, `warm`, `draining`, `rolling`, `idle`, `removing` or `failed`.
    pub phase: String,
    /// The phase is the one that the database had when kilnd started: it has not looked at the host since. Left out as soon as it
    /// has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unconfirmed: bool,
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
    /// What counts for it. Absent in the answer of an older kilnd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<SettingsView>,
    /// What waits for a roll of the daemon, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<String>,
    /// Its place, while its start waits for its turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueuePlace>,
    /// What the cache may hold now, in bytes, where that is not what is set for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_size: Option<u64>,
    /// When its newest snapshot was taken, or nothing was found to have changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_snapshot: Option<String>,
}

/// A place in the queue of starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueuePlace {
    /// From 1.
    pub position: u64,
    /// How many wait, this one included.
    pub length: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeaseView {
    /// SHA-256 of the token.
    pub id: String,
    pub created: String,
    pub renewed: String,
    /// The end of it, whatever its client does. Absent in the answer of an older kilnd, as the next.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub expires: String,
    /// How long it counts if its client does not show itself again. An open connection keeps it until `expires`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub alive_until: String,
}

/// `POST /v1/leases/{id}/renew`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Renew {
    /// The lease's token, as `/route` answered it.
    pub build_id: String,
}

impl fmt::Debug for Renew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Renew(..)")
    }
}

/// Why a project stands where it stands, in words for people.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct Why {
    pub key: String,
    /// One sentence.
    pub headline: String,
    /// What the headline follows from, the weightiest first.
    pub because: Vec<String>,
    /// What happens next if nothing else does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// The latest of the journal that led here, the oldest first.
    pub events: Vec<EventView>,
}

/// One entry of the journal, and one `data:` of `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    pub id: i64,
    pub at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// A word a script can match: `routed`, `completed`, `phase`, `step`, `failed`, …
    pub kind: String,
    pub text: String,
    /// Who wanted it; absent: Kiln itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// The rule it follows from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
}

/// The body of every error below `/v1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    pub error: String,
}
