//! A way in for runs to which their forge gives no token.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `POST /v1/challenges`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChallengeRequest {
    /// The repository whose pull request is built.
    pub repo: String,
    /// The number of the run, as the forge counts it.
    pub run: u64,
}

/// The answer to it.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct Challenge {
    /// To be printed in the run's log, on a line of their own.
    pub words: String,
    /// To be kept, and shown for the answer.
    pub secret: String,
    /// RFC 3339.
    pub until: String,
}

/// `POST /v1/challenges/answer`.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChallengeAnswer {
    pub secret: String,
}

/// What a challenge was worth.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct ChallengeGrant {
    /// To be sent as `Authorization: Bearer …`.
    pub token: String,
    /// RFC 3339.
    pub until: String,
}
