//! Effects on this machine, behind narrow traits.
//!
//! * [`Runtime`] runs instances: one per key, each holding one buildkitd. Two kinds: [`incus`] (unprivileged system
//!   containers; the production home) and [`process`] (a child process; the embedded default, no isolation).
//! * [`volumes::VolumeEngine`] keeps caches. Engines: `dir`, `btrfs`, `zfs`.
//! * `fake` and `volumes::fake`, for tests, are models of both in memory. Contract tests (`contract`, `volumes::contract`)
//!   hold models and real ones to the same.
//! * [`pressure`] reads how hard memory is to come by.
//! * [`network`] is the `inet kiln` nftables table that is in force before the first instance.
//!
//! Promises: every method is idempotent, names its objects from the key, has a deadline of its own and says in its
//! error what it waited for. A look that fails is an error and never "absent". Nothing that is not ours is changed.
//!
//! What must not be here: HTTP of our own API, the store, decisions about when to start or stop anything.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::Key;
pub use kiln_domain::{Lane, Limits};
use thiserror::Error;
use tokio::sync::broadcast;

#[cfg(test)]
pub(crate) mod contract;
#[cfg(test)]
pub mod fake;
mod files;
pub mod incus;
mod key_locks;
pub mod network;
mod occupancy;
pub mod pressure;
pub mod process;
mod stack;
pub mod volumes;

/// What an object carries so that the database can be rebuilt from the host (K5): name → value. Names are plain words
/// (`key`, `repo`, `name`, `target`, `arch`); each engine adds its own prefix (`user.kiln.`, `user.kiln.key` xattr, …).
pub type Properties = BTreeMap<String, String>;

/// Everything that an instance is made of; equal specs make equal instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceSpec {
    pub key: Key,
    /// Whose code it runs: what it may reach follows from that.
    pub lane: Lane,
    pub properties: Properties,
    /// Where the daemon listens, static for the project's life.
    pub address: SocketAddrV4,
    /// Host path of the cache, buildkitd's root directory.
    pub volume: PathBuf,
    /// Host path of a directory with `buildkitd.toml`, `ca.pem`, `cert.pem` and `key.pem`; read-only for the daemon.
    pub files: PathBuf,
    pub limits: Limits,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceState {
    Absent,
    /// It exists but differs from its spec in a way that must not be started (a device is missing, say).
    HalfMade {
        why: String,
    },
    /// `outdated`: it may be started as it is; made anew it would be another.
    Stopped {
        outdated: Vec<Change>,
    },
    /// `incarnation` changes with every start, also when somebody else started it. `outdated`: it works; stopped and made
    /// anew it would be another.
    Running {
        incarnation: String,
        outdated: Vec<Change>,
    },
}

/// In what an instance that works is not what its spec and the runtime's configuration ask for now. Sorted, and each at
/// most once, where there are several. What cannot be found out (an image that is not there) is no change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Change {
    Image,
    Program,
    Limits,
    Resolvers,
    Pool,
    /// In something for which it must not be started again. Only of one that runs: one that is down is
    /// [`InstanceState::HalfMade`].
    Make,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "the image",
            Self::Program => "the buildkitd program",
            Self::Limits => "the limits",
            Self::Resolvers => "the name servers",
            Self::Pool => "the storage pool",
            Self::Make => "what it is made of",
        })
    }
}

/// Something where our instances are, ours or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundInstance {
    /// Unique in its runtime; what [`Runtime::destroy_found`] takes.
    pub name: String,
    /// `None` for what does not carry our mark.
    pub key: Option<Key>,
    /// What it carries of [`InstanceSpec::properties`], as far as it can be read. One whose value was empty may be missing.
    pub properties: Properties,
    /// Also of one that is on its way up or down, and of one of which it cannot be told.
    pub running: bool,
}

/// A hint, not a truth: whoever hears it looks for himself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceEvent {
    /// Started, stopped or died.
    Changed(Key),
    /// Events may have been missed: look at everything.
    Missed,
}

/// How long a stop may drain before it is forced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopBound {
    Graceful(Duration),
    Force,
}

#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The runtime itself cannot be used now; trying again later may help.
    #[error("{runtime} is not available: {why}; {remedy}")]
    Unavailable { runtime: &'static str, why: String, remedy: String },
    /// The runtime looked at it and said no; trying again will not help.
    #[error("cannot {operation} {instance}: {why}")]
    Refused { operation: &'static str, instance: String, why: String },
    #[error("cannot {operation} {instance}: gave up after {} s waiting for {waited_for}", .after.as_secs())]
    TimedOut { operation: &'static str, instance: String, waited_for: String, after: Duration },
    /// The daemon came up and went away again; `log` holds its last lines.
    #[error("{instance} exited ({status}) right after its start; its last words:\n{log}")]
    Exited { instance: String, status: String, log: String },
    /// What must be closed to it is open.
    #[error(
        "{instance} is not isolated: {reached}; see what stands before Kiln's table in `nft list ruleset`, and which devices \
         the instance has"
    )]
    NotIsolated { instance: String, reached: String },
    #[error("cannot {operation} {instance}: {path}")]
    Io {
        operation: &'static str,
        instance: String,
        path: String,
        #[source]
        source: std::io::Error,
    },
}

impl RuntimeError {
    /// Whether the same request may succeed later without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::TimedOut { .. })
    }
}

/// Runs instances. See the module's promises.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// Whether untrusted code in one instance is kept from the host and from other instances.
    fn isolates(&self) -> bool;

    /// Compares what is there with `spec`.
    async fn look(&self, spec: &InstanceSpec) -> Result<InstanceState, RuntimeError>;

    /// Everything that is where our instances are, sorted by name. Nothing is changed by it.
    async fn found(&self) -> Result<Vec<FoundInstance>, RuntimeError>;

    /// Makes it in one request, complete and stopped. An equal one that exists already is success; one that is outdated
    /// may be refused until it is destroyed.
    async fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError>;

    /// Starts it and returns its incarnation; running already is success. Does not wait for the daemon to answer.
    async fn start(&self, spec: &InstanceSpec) -> Result<String, RuntimeError>;

    /// Returns when it is down; not running already is success.
    async fn stop(&self, spec: &InstanceSpec, bound: StopBound) -> Result<(), RuntimeError>;

    /// Removes the instance, never the volume. Absent already is success.
    async fn destroy(&self, spec: &InstanceSpec) -> Result<(), RuntimeError>;

    /// Removes by its name what [`Runtime::found`] listed, ours or not, never a volume. One that runs is
    /// [`RuntimeError::Refused`]; absent already is success.
    async fn destroy_found(&self, name: &str) -> Result<(), RuntimeError>;

    /// CPU time that everything in the instance has used since its start, build steps included. `None` when it does not
    /// run, or nobody knows.
    ///
    /// For telling a daemon that is busy from one that hangs. Nearly monotonic: what ended without anybody waiting for it
    /// may drop out of the sum, so a difference in either direction is a sign of life.
    async fn cpu_time(&self, spec: &InstanceSpec) -> Result<Option<Duration>, RuntimeError>;

    /// Share of the last 10 s in which something in the instance waited for a processor or memory, in percent. `None` when it
    /// does not run, or nobody knows. Microseconds: it is asked while a build waits to be sent somewhere.
    fn pressure(&self, _key: &Key) -> Option<f64> {
        None
    }

    /// Tries from inside the instance that runs whether it is kept from the host, other instances, and private networks:
    /// [`RuntimeError::NotIsolated`] names what it reached. Within two seconds, and where all is well in a fraction of one;
    /// it need not have come up further than to be started. Of a runtime that does not isolate it is an error.
    async fn prove_isolation(&self, spec: &InstanceSpec) -> Result<(), RuntimeError>;

    /// The daemon's last log lines, for error messages; empty when there are none.
    async fn last_words(&self, spec: &InstanceSpec) -> String;

    fn events(&self) -> broadcast::Receiver<InstanceEvent>;
}
