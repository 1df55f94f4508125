//! What is on disk of an instance: `<run_dir>/<key>/{spec.json, run.json, log, log.1}`.

use std::io;
use std::net::SocketAddrV4;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use kiln_domain::Key;
use serde::{Deserialize, Serialize};

use super::proc::Identity;
use crate::host::{InstanceSpec, Limits, Properties};

/// An [`InstanceSpec`] as it is written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SpecFile {
    key: Key,
    properties: Properties,
    address: SocketAddrV4,
    volume: PathBuf,
    files: PathBuf,
    memory_bytes: Option<u64>,
    cpus: Option<u32>,
    processes: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    io_bytes: Option<u64>,
}

impl From<&InstanceSpec> for SpecFile {
    fn from(spec: &InstanceSpec) -> Self {
        let Limits { memory_bytes, cpus, processes, io_bytes } = spec.limits;
        Self {
            key: spec.key.clone(),
            properties: spec.properties.clone(),
            address: spec.address,
            volume: spec.volume.clone(),
            files: spec.files.clone(),
            memory_bytes,
            cpus,
            processes,
            io_bytes,
        }
    }
}

impl SpecFile {
    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    pub(super) fn into_properties(self) -> Properties {
        self.properties
    }

    pub(super) fn has_limits_of(&self, wanted: &Self) -> bool {
        let limits = |spec: &Self| (spec.memory_bytes, spec.cpus, spec.processes, spec.io_bytes);
        limits(self) == limits(wanted)
    }

    /// The first thing in which it differs from what is wanted, limits aside.
    pub(super) fn difference(&self, wanted: &Self) -> Option<String> {
        let differs = |what: &str, is: &dyn std::fmt::Debug, want: &dyn std::fmt::Debug| {
            let (is, want) = (format!("{is:?}"), format!("{want:?}"));
            (is != want).then(|| format!("its {what} is {is} and should be {want}"))
        };
        differs("key", &self.key, &wanted.key)
            .or_else(|| differs("address", &self.address, &wanted.address))
            .or_else(|| differs("volume", &self.volume, &wanted.volume))
            .or_else(|| differs("directory of files", &self.files, &wanted.files))
            .or_else(|| differs("properties", &self.properties, &wanted.properties))
    }
}

/// The daemon of an instance, from before it is started until it is known to be down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunFile {
    pub program: PathBuf,
    /// The program's file as it was then; `None` when that could not be read, or was not yet recorded.
    #[serde(default)]
    pub file: Option<ProgramFile>,
    pub volume: PathBuf,
    /// `None` is the intent: it may or may not have been started, and has to be looked for.
    pub daemon: Option<Identity>,
    /// The drain has begun. A second SIGTERM would cut it short.
    pub asked_to_stop: bool,
}

/// Tells a program's file from one that was put in its place, or written over it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgramFile {
    device: u64,
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds since the epoch.
    modified: (i64, i64),
}

impl ProgramFile {
    /// Of what the path leads to now, links followed.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let found = std::fs::metadata(path)?;
        Ok(Self {
            device: found.dev(),
            inode: found.ino(),
            size: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
        })
    }
}

/// Paths of one instance.
#[derive(Debug, Clone)]
pub(super) struct Desk(PathBuf);

impl Desk {
    pub(super) fn new(run_dir: &Path, key: &Key) -> Self {
        Self(run_dir.join(key.as_str()))
    }

    pub(super) fn directory(&self) -> &Path {
        &self.0
    }

    pub(super) fn spec(&self) -> PathBuf {
        self.0.join("spec.json")
    }

    pub(super) fn run(&self) -> PathBuf {
        self.0.join("run.json")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    pub(super) fn old_log(&self) -> PathBuf {
        self.0.join("log.1")
    }
}
