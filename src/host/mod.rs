//! Effects on this machine, behind narrow traits.
//!
//! * [`Runtime`] runs instances: one per key, each holding one buildkitd. Two kinds: [`incus`] (unprivileged system
//!   containers; the production home) and [`process`] (a child process; the embedded default, no isolation).
//! * [`volumes::VolumeEngine`] keeps caches. Engines: `dir`, `btrfs`.
//! * `fake` and `volumes::fake`, for tests, are models of both in memory. Contract tests (`contract`, `volumes::contract`)
//!   hold models and real ones to the same.
//! * [`network`] is the `inet kiln` nftables table that is in force before the first instance.
//!
//! Promises: every method is idempotent, names its objects from the key, has a deadline of its own and says in its
//! error what it waited for. A look that fails is an error and never "absent". Nothing that is not ours is changed.
//!
//! What must not be here: HTTP of our own API, the store, decisions about when to start or stop anything.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::Key;
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
    pub properties: Properties,
    /// Where the daemon listens, static for the project's life.
    pub address: SocketAddrV4,
    /// Host path of the cache, buildkitd's root directory.
    pub volume: PathBuf,
    /// Host path of a directory with `buildkitd.toml`, `ca.pem`, `cert.pem` and `key.pem`; read-only for the daemon.
    pub files: PathBuf,
    pub limits: Limits,
}

/// `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub cpus: Option<u32>,
    pub processes: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceState {
    Absent,
    /// It exists but differs from its spec in a way that must not be started (a device is missing, say).
    HalfMade {
        why: String,
    },
    Stopped,
    /// `incarnation` changes with every start, also when somebody else started it.
    Running {
        incarnation: String,
    },
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

    /// Keys of all instances that carry our mark.
    async fn list(&self) -> Result<Vec<Key>, RuntimeError>;

    /// Makes it in one request, complete and stopped. An equal one that exists already is success.
    async fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError>;

    /// Starts it and returns its incarnation; running already is success. Does not wait for the daemon to answer.
    async fn start(&self, spec: &InstanceSpec) -> Result<String, RuntimeError>;

    /// Returns when it is down; not running already is success.
    async fn stop(&self, spec: &InstanceSpec, bound: StopBound) -> Result<(), RuntimeError>;

    /// Removes the instance, never the volume. Absent already is success.
    async fn destroy(&self, spec: &InstanceSpec) -> Result<(), RuntimeError>;

    /// The daemon's last log lines, for error messages; empty when there are none.
    async fn last_words(&self, spec: &InstanceSpec) -> String;

    fn events(&self) -> broadcast::Receiver<InstanceEvent>;
}
