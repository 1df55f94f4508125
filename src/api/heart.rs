//! What the HTTP layer asks of the rest of Kiln, and nothing more.

use std::time::Duration;

use async_trait::async_trait;
use axum::http::StatusCode;
use kiln_domain::{BuildSpec, Key, LeaseToken};
use kiln_wire::{ProjectView, RouteResponse};
use thiserror::Error;

pub use crate::projects::RouteOptions;
use crate::store::StoreError;

/// An answer that waits to be handed over. Dropped without that, it releases the lease that was made for it: nobody
/// will ever know the token (C1, F2 of the reference's failure modes).
pub trait Routed: Send {
    /// Called at the last moment in which the answer can still be taken back.
    fn deliver(self: Box<Self>) -> RouteResponse;
}

/// The projects. Every method has a deadline of its own (K10); one whose future is dropped goes on with what others
/// share and gives up only its own wait (K6).
#[async_trait]
pub trait Heart: Send + Sync + 'static {
    /// Leases the project's daemon for a build, waking it or making it first.
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError>;

    /// Begins to wake or make the daemon and does not wait for it; no lease.
    async fn prewarm(&self, spec: BuildSpec, untrusted: bool) -> Result<RouteResponse, RouteError>;

    /// Releases one lease. False: the project has none with this token.
    async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, CompleteError>;

    async fn list(&self) -> Result<Vec<ProjectView>, StoreError>;

    async fn show(&self, key: &Key) -> Result<Option<ProjectView>, StoreError>;

    /// Returns when the daemon is down. The cache stays.
    async fn stop(&self, key: &Key) -> Result<(), StopError>;
}

/// Why a build gets no daemon. The texts go to the client, so they say nothing that only the host may know.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RouteError {
    /// Not this build, now or later.
    #[error("{0}")]
    Refused(String),
    /// K1: the key belongs to somebody else.
    #[error("{0}")]
    OtherIdentity(String),
    #[error("ensure project: {0}")]
    Ensure(String),
    /// Not now; the same request may succeed after a while.
    #[error("{why}")]
    Unavailable { why: String, retry_after: Duration },
    #[error("daemon not ready: {0}")]
    NotReady(String),
    #[error("too many requests are waiting: try again in a second")]
    Busy,
}

impl RouteError {
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Refused(_) | Self::OtherIdentity(_) => StatusCode::FORBIDDEN,
            Self::Ensure(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::NotReady(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    /// When to try again, where that is worth saying.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. } => Some(*retry_after),
            Self::Busy => Some(Duration::from_secs(1)),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CompleteError {
    /// Not now; the same request may succeed after a while.
    #[error("{why}")]
    Unavailable { why: String, retry_after: Duration },
    #[error("release the lease: {0}")]
    Failed(String),
}

impl CompleteError {
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. } => Some(*retry_after),
            Self::Failed(_) => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StopError {
    #[error("there is no project {0}: `kiln ps` lists them")]
    Unknown(Key),
    /// K2: nothing takes a daemon away from a running build.
    #[error("it is busy: {0}")]
    Busy(String),
    #[error("stop the project: {0}")]
    Failed(String),
}

impl StopError {
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Unknown(_) => StatusCode::NOT_FOUND,
            Self::Busy(_) => StatusCode::CONFLICT,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}
