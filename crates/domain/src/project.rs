//! What is remembered of a project.

use std::fmt;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::builds::BuildTimes;
use crate::key::Key;
use crate::settings::Settings;
use crate::spec::BuildSpec;
use crate::time::Timestamp;

/// Counts the starts of a project's daemon, so that no answer can carry the address of a daemon on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(u64);

impl Generation {
    pub const NONE: Self = Self(0);

    pub const fn from_stored(count: u64) -> Self {
        Self(count)
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Where a project stands. Only `Warm` is routable. The diagram is at the top of [`crate::plan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "lowercase")]
pub enum Phase {
    /// Nothing of it exists on the host.
    Absent,
    /// Volume, certificates or instance are being made.
    Provisioning,
    /// The instance is on its way up and does not answer yet.
    Starting,
    /// The daemon is up: it has answered since its start, and whoever comes is sent there unless it is silent just now.
    Warm,
    /// Nobody needs the daemon: it is asked whether a build runs in it, and if none does, stopped. A build that comes now
    /// calls that off, or waits for the next start.
    Draining,
    /// As `Draining`, to be replaced by one of the current image, settings or certificates; or stopped by force because it is
    /// wedged or never answered. It comes up again.
    Rolling,
    /// Stopped. The cache is there and costs only disk.
    Idle,
    /// An admin asked for its removal: instance and certificates go, the cache goes to the trash. There is no way back
    /// but `kiln trash restore`.
    Removing,
    /// The last step failed. The next request tries again.
    Failed { reason: String },
}

impl Phase {
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Provisioning => "provisioning",
            Self::Starting => "starting",
            Self::Warm => "warm",
            Self::Draining => "draining",
            Self::Rolling => "rolling",
            Self::Idle => "idle",
            Self::Removing => "removing",
            Self::Failed { .. } => "failed",
        }
    }

    /// Whether nothing runs and nothing was under way, so that no worker need look at it after a restart of Kiln.
    pub const fn is_quiet(&self) -> bool {
        matches!(self, Self::Absent | Self::Idle)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { reason } => write!(f, "failed: {reason}"),
            other => f.write_str(other.name()),
        }
    }
}

/// Everything the store keeps of a project, its leases apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProjectRecord {
    pub key: Key,
    /// Whose key this is. A caller with another identity is refused (K1).
    pub spec: BuildSpec,
    /// The daemon's own address: unique, and the project's for life.
    pub address: Ipv4Addr,
    pub phase: Phase,
    pub generation: Generation,
    /// Which run of the instance the generation stands for, in the runtime's own words.
    pub incarnation: Option<String>,
    /// What was set for this project alone.
    pub settings: Settings,
    /// When its latest builds began.
    pub builds: BuildTimes,
    pub created: Timestamp,
    /// Last route, prewarm, completion or end of a connection: where the idle window starts.
    pub last_activity: Timestamp,
}

impl ProjectRecord {
    pub fn new(spec: BuildSpec, address: Ipv4Addr, now: Timestamp) -> Self {
        Self {
            key: Key::of(&spec),
            spec,
            address,
            phase: Phase::Absent,
            generation: Generation::NONE,
            incarnation: None,
            settings: Settings::default(),
            builds: BuildTimes::default(),
            created: now,
            last_activity: now,
        }
    }
}
