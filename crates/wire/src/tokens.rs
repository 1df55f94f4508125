//! Tokens that an admin gives out.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct TokenRequest {
    /// What it is for; at most 128 bytes.
    pub name: String,
    /// `builder`, `untrusted-builder`, `watcher`, `operator` or `admin`.
    pub grade: String,
    /// For builders: which repositories, as patterns; `*` is all. An operator may build these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<String>,
    /// For how long it counts: `90d`, `12h`; `never` ends it never.
    pub lasts: String,
}

/// A token, without what makes it worth anything.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TokenView {
    /// The digits after `kiln_`.
    pub id: String,
    pub name: String,
    pub grade: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<String>,
    /// Who made it.
    pub made_by: String,
    /// RFC 3339, here and below.
    pub created: String,
    /// Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    /// To within a minute. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used: Option<String>,
}

/// The answer to `POST /v1/tokens`.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewToken {
    /// To be sent as `Authorization: Bearer …`. It is shown this once, and kept nowhere.
    pub token: String,
    #[serde(flatten)]
    pub view: TokenView,
}

impl std::fmt::Debug for NewToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewToken").field("view", &self.view).finish_non_exhaustive()
    }
}
