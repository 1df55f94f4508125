//! The verbs that have two ways into ZFS: the `zfs` command always, `libzfs_core` where this was built with it.

use async_trait::async_trait;

use super::fault::Fault;

/// A property of a dataset that comes into being, or of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    pub name: &'static str,
    pub value: Value,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Text(String),
    Number(u64),
    /// One of a list: as it is written, and as the kernel counts it.
    Word(&'static str, u64),
}

impl Setting {
    pub(super) fn text(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: Value::Text(value.into()) }
    }

    pub(super) const fn number(name: &'static str, value: u64) -> Self {
        Self { name, value: Value::Number(value) }
    }

    pub(super) const fn word(name: &'static str, word: &'static str, index: u64) -> Self {
        Self { name, value: Value::Word(word, index) }
    }

    /// As an argument of `zfs`.
    pub(super) fn argument(&self) -> String {
        match &self.value {
            Value::Text(text) => format!("{}={text}", self.name),
            Value::Number(number) => format!("{}={number}", self.name),
            Value::Word(word, _) => format!("{}={word}", self.name),
        }
    }
}

#[async_trait]
pub(super) trait Verbs: Send + Sync + 'static {
    /// For people, and for the log.
    fn name(&self) -> &'static str;

    /// With `settings`, which are user properties, in the same instant.
    async fn snapshot(&self, snapshot: &str, settings: &[Setting]) -> Result<(), Fault>;

    /// Of one dataset. Those that clones or holds still need go with the last of them. Absent already is success.
    async fn destroy_snapshots(&self, dataset: &str, names: &[String]) -> Result<(), Fault>;

    /// Mounts nothing, as long as `canmount` is `noauto`.
    async fn clone_snapshot(&self, snapshot: &str, target: &str, settings: &[Setting]) -> Result<(), Fault>;

    /// A clone changes places with what it was cloned from: the snapshot, and those before it, become its own.
    async fn promote(&self, clone: &str) -> Result<(), Fault>;
}
