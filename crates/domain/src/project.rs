//! What is remembered of a project.

use std::fmt;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::builds::BuildTimes;
use crate::key::{Key, Role};
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

/// Whose daemon it is. Equal identities share one, others never (K1, K7).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    pub key: Key,
    pub spec: BuildSpec,
    /// What names the pull request whose fork this is for its forge.
    pub pull_request: Option<String>,
}

/// What names a pull request is not written down as it came.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PullRequestError {
    #[error("the pull request is too long: {bytes} bytes, at most {max} are accepted", max = Identity::MAX_PULL_REQUEST_BYTES)]
    TooLong { bytes: usize },
    #[error("the pull request contains {found:?}: leave out what cannot be printed, and blanks")]
    Odd { found: char },
}

impl Identity {
    /// As for the other parts of an identity.
    pub const MAX_PULL_REQUEST_BYTES: usize = 128;

    /// The project itself.
    pub fn project(spec: BuildSpec) -> Self {
        Self { key: Key::of(&spec), spec, pull_request: None }
    }

    /// The fork for untrusted builds that do not say whose they are.
    pub fn fork(spec: BuildSpec) -> Self {
        Self { key: Key::of(&spec).fork(), spec, pull_request: None }
    }

    /// The fork of one pull request, however its forge names it: a number, or a path of its own.
    pub fn pull_request(spec: BuildSpec, name: &str) -> Result<Self, PullRequestError> {
        let name = name.trim();
        if name.is_empty() {
            return Ok(Self::fork(spec));
        }
        if name.len() > Self::MAX_PULL_REQUEST_BYTES {
            return Err(PullRequestError::TooLong { bytes: name.len() });
        }
        if let Some(found) = name.chars().find(|c| !c.is_ascii_graphic()) {
            return Err(PullRequestError::Odd { found });
        }
        Ok(Self { key: Key::of(&spec).pull_request(name), spec, pull_request: Some(name.to_owned()) })
    }

    /// One more daemon of the project.
    pub fn member(spec: BuildSpec, number: u16) -> Self {
        Self { key: Key::of(&spec).clone_number(number), spec, pull_request: None }
    }

    /// Whether the key is that of the rest.
    pub fn is_consistent(&self) -> bool {
        let project = Key::of(&self.spec);
        match self.key.role() {
            Role::PullRequest => self.pull_request.as_ref().is_some_and(|name| project.pull_request(name) == self.key),
            _ => self.pull_request.is_none() && self.key.project() == project,
        }
    }
}

impl From<&BuildSpec> for Identity {
    /// The project itself.
    fn from(spec: &BuildSpec) -> Self {
        Self::project(spec.clone())
    }
}

impl From<&Self> for Identity {
    fn from(identity: &Self) -> Self {
        identity.clone()
    }
}

/// What is remembered of a cache, beside the cache itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheNotes {
    /// What the volume may hold now, in bytes, where it is not what was set for it at first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// When its newest snapshot was taken, or was found not to be worth it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Timestamp>,
    /// When it was last taken back by Kiln itself, because no daemon could open it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rescued: Option<Timestamp>,
}

/// Everything the store keeps of a project, its leases apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProjectRecord {
    pub key: Key,
    /// Whose key this is. A caller with another identity is refused (K1).
    pub spec: BuildSpec,
    /// As in [`Identity`].
    pub pull_request: Option<String>,
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
    pub cache: CacheNotes,
    pub created: Timestamp,
    /// Last route, prewarm, completion or end of a connection: where the idle window starts.
    pub last_activity: Timestamp,
}

impl ProjectRecord {
    pub fn new(spec: BuildSpec, address: Ipv4Addr, now: Timestamp) -> Self {
        Self::of(Identity::project(spec), address, now)
    }

    pub fn of(identity: Identity, address: Ipv4Addr, now: Timestamp) -> Self {
        let Identity { key, spec, pull_request } = identity;
        Self {
            key,
            spec,
            pull_request,
            address,
            phase: Phase::Absent,
            generation: Generation::NONE,
            incarnation: None,
            settings: Settings::default(),
            builds: BuildTimes::default(),
            cache: CacheNotes::default(),
            created: now,
            last_activity: now,
        }
    }

    /// What is derived from a project has its limits and the size that its volume has grown to (F23, C10). How eagerly it is
    /// kept up is its own.
    pub fn take_after(&mut self, project: &Self) {
        self.settings = project.settings.clone().for_role(self.key.role());
        self.cache.size = project.cache.size;
    }

    pub fn identity(&self) -> Identity {
        Identity { key: self.key.clone(), spec: self.spec.clone(), pull_request: self.pull_request.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_request_has_a_key_of_its_own() {
        let spec = || BuildSpec::new("h/r", "", "", "amd64").expect("valid");
        let of = |name: &str| Identity::pull_request(spec(), name);
        let one = of(" 12 ").expect("a name");
        assert_eq!((one.pull_request.as_deref(), one.key.role()), (Some("12"), Role::PullRequest));
        assert_ne!(one.key, of("13").expect("a name").key);
        assert_eq!(of("").expect("without a name"), Identity::fork(spec()), "whoever says nothing shares the one fork");
        assert!(matches!(of(&"1".repeat(129)), Err(PullRequestError::TooLong { bytes: 129 })));
        for odd in ["1\n2", "a b", "\u{202e}1", "\0"] {
            assert!(matches!(of(odd), Err(PullRequestError::Odd { .. })), "{odd:?}");
        }
        for identity in [one.clone(), Identity::fork(spec()), Identity::member(spec(), 3), Identity::project(spec())] {
            assert!(identity.is_consistent(), "{identity:?}");
        }
        assert!(!Identity { pull_request: Some("13".into()), ..one.clone() }.is_consistent());
        assert!(!Identity { pull_request: None, ..one }.is_consistent());
    }
}
