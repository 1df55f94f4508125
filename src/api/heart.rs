//! What the HTTP layer asks of the rest of Kiln, and nothing more.

use std::time::Duration;

use async_trait::async_trait;
use axum::http::StatusCode;
use kiln_domain::{BuildSpec, Entitlements, Key, LeaseToken, RepoName, SnapshotName, Tier};
use kiln_wire::{
    CacheView, Change, DiskUsage, LeaseView, Orphan, OrphanKind, ProjectView, Readiness, RouteResponse, SnapshotView,
    Trashed, Why,
};
use thiserror::Error;

pub(super) use crate::projects::Caller;
pub use crate::projects::RouteOptions;

/// An answer on its way to the client. Dropped without [`Routed::delivered`], it releases the lease that was made for
/// it: nobody will ever know the token (C1, F2 of the reference's failure modes). A lease that was resumed stays, because
/// its client knows the token already.
pub trait Routed: Send {
    /// The answer, token included. `ready: false` comes with a `status`.
    fn response(&self) -> RouteResponse;

    /// The answer is with the client, as far as the kernel can tell.
    fn delivered(self: Box<Self>);
}

/// The projects. The API gives up on each method after a bound (`bounded`, K10), which is longer than the deadlines behind
/// it; one whose future is dropped goes on with what others share and gives up only its own wait (K6).
#[async_trait]
pub trait Heart: Send + Sync + 'static {
    /// Leases the project's daemon for a build, waking it or making it first.
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError>;

    /// Begins to wake or make the daemon and does not wait for it; no lease.
    async fn prewarm(&self, spec: BuildSpec, caller: &Caller) -> Result<RouteResponse, RouteError>;

    /// Releases one lease. False: the project has none with this token.
    async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, CompleteError>;

    /// Releases the project's oldest lease, as the reference does for a client that names none. False: it has none.
    /// Only asked where the configuration allows it.
    async fn complete_oldest(&self, key: &Key) -> Result<bool, CompleteError>;

    /// The client is still there: the lease's grace begins anew. Its end does not move.
    async fn renew(&self, token: &LeaseToken) -> Result<LeaseView, RenewError>;

    /// The repository of the project that a key belongs to, also of one that is derived from it; `None` if there is no such
    /// project.
    async fn owner(&self, key: &Key) -> Result<Option<RepoName>, VerbError>;

    async fn list(&self) -> Result<Vec<ProjectView>, VerbError>;

    /// [`VerbError::NoProject`] if there is none.
    async fn show(&self, key: &Key) -> Result<ProjectView, VerbError>;

    async fn why(&self, key: &Key) -> Result<Why, VerbError>;

    /// What is set for this project alone. Durable when it returns; what needs a roll is in the view's `pending`.
    async fn set(&self, key: &Key, change: SettingsChange) -> Result<ProjectView, VerbError>;

    /// Returns when the daemon is down. The cache stays. `force`: an admin's word, also over one that is busy, hot or
    /// wedged; what still needs it brings it up again.
    async fn stop(&self, key: &Key, force: bool) -> Result<(), VerbError>;

    /// Forgets the project; its cache goes to the trash. [`VerbError::Busy`] while a build counts on it.
    async fn remove(&self, key: &Key) -> Result<(), VerbError>;

    /// Looks at the host. `measure`: also where its bytes are, which may take long; a cache that cannot be measured has a past
    /// all the same.
    async fn cache(&self, key: &Key, measure: bool) -> Result<CacheView, VerbError>;

    /// The newest snapshot, and whether it was taken for this: none is of what did not change.
    async fn snapshot(&self, key: &Key) -> Result<(SnapshotView, bool), VerbError>;

    /// Puts the cache back to `to`, or to its newest good snapshot, and says to which. What it held goes to the trash.
    /// [`VerbError::InUse`] while a build counts on the daemon, unless `force` cuts that off.
    async fn roll_back(&self, key: &Key, to: Option<SnapshotName>, force: bool) -> Result<SnapshotName, VerbError>;

    /// Begins anew with an empty cache; otherwise as [`Heart::roll_back`].
    async fn reset(&self, key: &Key, force: bool) -> Result<(), VerbError>;

    /// Measures every cache on the host.
    async fn disk_usage(&self) -> Result<DiskUsage, VerbError>;

    /// What has lost its other half. Looks at the host.
    async fn orphans(&self) -> Result<Vec<Orphan>, VerbError>;

    /// Makes a project of it again. [`VerbError::Impossible`] where it carries no identity, or where `name` alone stands
    /// for more than one.
    async fn adopt(&self, kind: Option<OrphanKind>, name: &str) -> Result<Key, VerbError>;

    /// A volume goes to the trash.
    async fn remove_orphan(&self, kind: OrphanKind, name: &str) -> Result<(), VerbError>;

    async fn trash(&self) -> Result<Vec<Trashed>, VerbError>;

    /// Gives a cache back to its project, which is made again if it is gone. [`VerbError::Taken`] where it has another.
    async fn restore(&self, name: &str) -> Result<Key, VerbError>;

    /// For good.
    async fn discard(&self, name: &str) -> Result<(), VerbError>;

    /// All of it, for good; how many there were.
    async fn empty_trash(&self) -> Result<u64, VerbError>;

    /// Whether the parts that a route needs can do their work now.
    async fn readiness(&self) -> Readiness;
}

/// What is to change of a project's own settings. Well-formed; whether it is in range is the heart's to say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SettingsChange {
    pub tier: Change<Tier>,
    pub idle_window: Change<Duration>,
    pub volume_bytes: Change<u64>,
    pub volume_max_bytes: Change<u64>,
    pub memory_bytes: Change<u64>,
    pub cpus: Change<u32>,
    pub processes: Change<u32>,
    pub io_bytes: Change<u64>,
    pub entitlements: Change<Entitlements>,
    pub fan_out: Change<u16>,
}

/// For what goes away by itself within a moment.
pub(super) const A_MOMENT: Duration = Duration::from_secs(1);

/// A start takes seconds, and one that did not get there in a whole wait will not be there in one.
const A_START: Duration = Duration::from_secs(5);

/// Why a build gets no daemon. The texts go to the client as they are, with paths of the host and the daemon's last log
/// lines: as long as nobody is told apart, whoever may ask at all may read those (K9).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RouteError {
    /// Nothing that can be asked for.
    #[error("{0}")]
    Malformed(String),
    /// Not this build, now or later.
    #[error("{0}")]
    Refused(String),
    /// A project may have so many at a time, and so may the host.
    #[error("{0}")]
    TooManyForks(String),
    /// K1: the key belongs to somebody else.
    #[error("{0}")]
    OtherIdentity(String),
    /// Resumed with a token that stands for nothing any more.
    #[error("there is no lease with this buildId any more: it ended or was released; route again without buildId")]
    Gone,
    #[error("ensure project: {0}")]
    Ensure(String),
    /// Not now; the same request may succeed after a while.
    #[error("{why}")]
    Unavailable { why: String, retry_after: Duration },
    /// The wait ended before the start's turn came.
    #[error("still waiting for a turn to start, place {position} of {length}: {why}")]
    Queued { position: u64, length: u64, why: String },
    /// The host has no room for another daemon.
    #[error("not started: {why}")]
    NotAdmitted { why: String, retry_after: Duration },
    #[error("daemon not ready: {0}")]
    NotReady(String),
    /// None is dropped silently to make room (C11).
    #[error("{live} builds hold {key} already, and {limit} may: complete some of them, or wait for their end")]
    TooManyLeases { key: Key, live: usize, limit: usize },
    #[error("too many requests are waiting: try again in a second")]
    Busy,
}

impl RouteError {
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Refused(_) | Self::OtherIdentity(_) => StatusCode::FORBIDDEN,
            Self::Gone => StatusCode::GONE,
            Self::Ensure(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable { .. } | Self::Queued { .. } | Self::NotAdmitted { .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::NotReady(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::TooManyLeases { .. } | Self::TooManyForks(_) | Self::Busy => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    /// When to try again: every answer with 429, 503 or 504 says it.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. } | Self::NotAdmitted { retry_after, .. } => Some(*retry_after),
            Self::Busy | Self::Queued { .. } => Some(A_MOMENT),
            Self::NotReady(_) | Self::TooManyLeases { .. } | Self::TooManyForks(_) => Some(A_START),
            Self::Malformed(_) | Self::Refused(_) | Self::OtherIdentity(_) | Self::Gone | Self::Ensure(_) => None,
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
pub enum RenewError {
    #[error("there is no such lease")]
    Unknown,
    /// Its end does not move, and what ended stays so.
    #[error("this lease has ended: route again")]
    Ended,
    #[error("{why}")]
    Unavailable { why: String, retry_after: Duration },
    #[error("renew the lease: {0}")]
    Failed(String),
}

impl RenewError {
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Unknown => StatusCode::NOT_FOUND,
            Self::Ended => StatusCode::GONE,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. } => Some(*retry_after),
            Self::Unknown | Self::Ended | Self::Failed(_) => None,
        }
    }
}

/// Why an admin's verb was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VerbError {
    #[error("there is no project {0}: `kiln ps` lists them")]
    NoProject(Key),
    /// Of an orphan or of something in the trash.
    #[error("there is no {what} {name:?}: {remedy}")]
    NotThere { what: &'static str, name: String, remedy: &'static str },
    /// A cache that cannot go back to where it should.
    #[error("{why}; {remedy}")]
    NoSnapshot { why: String, remedy: String },
    /// Asked for what cannot be, now or later: out of range, or contradicting what else there is.
    #[error("{0}")]
    Impossible(String),
    /// Something else has the place, until somebody sees to it.
    #[error("{0}")]
    Taken(String),
    /// K2: nothing takes a daemon away from a running build; nor from the hot tier, which would bring it up again.
    #[error(
        "{key} is busy: {need}; `kiln show {key}` lists what counts on it, `kiln stop --force {key}` takes its daemon down all the same"
    )]
    Busy { key: Key, need: String },
    /// As [`VerbError::Busy`], of a cache that is to be another. To stop its daemon by force would not help: what needs it brings
    /// it up again.
    #[error(
        "{key} is busy: {need}; `kiln show {key}` lists what counts on it, `kiln cache {verb} --force {key}` cuts that off"
    )]
    InUse { key: Key, need: String, verb: &'static str },
    /// Not now; the same request may succeed after a while.
    #[error("{why}")]
    Unavailable { why: String, retry_after: Duration },
    #[error("{0}")]
    Failed(String),
}

impl VerbError {
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::NoProject(_) | Self::NotThere { .. } | Self::NoSnapshot { .. } => StatusCode::NOT_FOUND,
            Self::Impossible(_) => StatusCode::BAD_REQUEST,
            Self::Busy { .. } | Self::InUse { .. } | Self::Taken(_) => StatusCode::CONFLICT,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unavailable { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }
}
