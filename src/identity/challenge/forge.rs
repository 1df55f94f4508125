//! What is asked of a forge.

use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::Timestamp;

/// One that can be asked what a run is and what it printed.
#[async_trait]
pub(super) trait Forge: Send + Sync + 'static {
    /// Whether this run of `path` (as `owner/name`) printed the words on a line of their own, in a job that ended after `since`.
    async fn look(&self, path: &str, run: u64, words: &str, since: Timestamp) -> Result<Look, ForgeError>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Look {
    NotYet,
    /// `fork` names its pull request, by the forge's word.
    Printed {
        fork: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ForgeError {
    /// The run is none that a challenge is for. For the caller.
    Refused(&'static str),
    /// For the log.
    Unavailable { why: String, retry_after: Duration },
}
