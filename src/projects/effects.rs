//! What a worker may do to the host, and nothing else.

use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::admission::HostLoad;
use kiln_domain::plan::{Done, Observed, Step};
use kiln_domain::{Key, ProjectRecord, Settings, Snapshot, SnapshotName, Verdict};
use thiserror::Error;
use tokio::sync::broadcast;

use crate::buildkit::{ConfigError, ProbeError};
use crate::causes;
use crate::host::volumes::{FoundVolume, Fullness, TrashName, Trashed, Usage, VolumeError};
use crate::host::{FoundInstance, InstanceEvent, Properties, RuntimeError};
use crate::pki::PkiError;

/// The effects of [`kiln_domain::plan::Step`]s. Execution is dull: no decision is taken behind this trait.
///
/// `settings` are the project's effective ones.
#[async_trait]
pub trait Effects: Send + Sync + 'static {
    /// Looks at volume, files and instance. A look that fails is an error and never "absent".
    async fn observe(&self, record: &ProjectRecord, settings: &Settings) -> Result<Observed, EffectError>;

    async fn perform(&self, step: Step, record: &ProjectRecord, settings: &Settings) -> Result<Done, EffectError>;

    /// The daemon's last log lines; empty when there are none.
    async fn last_words(&self, record: &ProjectRecord, settings: &Settings) -> String;

    /// Writes the project's own settings beside its cache, so that they outlive the database (K5).
    async fn describe(&self, record: &ProjectRecord) -> Result<(), EffectError>;

    fn events(&self) -> broadcast::Receiver<InstanceEvent>;

    /// Whether a snapshot costs next to nothing and can be taken while a daemon runs.
    fn snapshots_are_cheap(&self) -> bool;

    /// What moments of a cache there are, oldest first.
    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, EffectError>;

    /// Has a daemon open a clone of a snapshot, and takes all of it away again. An error is no verdict.
    async fn try_out(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
        snapshot: SnapshotName,
    ) -> Result<Verdict, EffectError>;

    /// Writes down what was found of a snapshot.
    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), EffectError>;

    /// Removes what a trial that was cut off has left.
    async fn sweep_trials(&self) -> Result<(), EffectError>;

    /// Where the bytes of a cache are; `None`: it has none.
    async fn usage(&self, key: &Key) -> Result<Option<Usage>, EffectError>;

    /// How full the storage of all caches is; `None`: there is none.
    async fn fullness(&self) -> Result<Option<Fullness>, EffectError> {
        Ok(None)
    }

    /// As [`crate::host::Runtime::pressure`].
    fn pressure(&self, _key: &Key) -> Option<f64> {
        None
    }

    /// Returns when what was destroyed before is counted in [`Effects::fullness`].
    async fn freed(&self) -> Result<(), EffectError> {
        Ok(())
    }

    /// How the host is; what cannot be read is left open. The counts of starts and daemons are not the host's.
    async fn load(&self) -> HostLoad;

    /// Whether the runtime and the volumes' storage answer.
    async fn check(&self) -> Result<(), EffectError>;

    /// Everything on the host that is ours, or stands where ours should stand.
    async fn survey(&self) -> Result<Survey, EffectError>;

    /// The volumes of [`Effects::survey`], for which no runtime has to answer.
    async fn volumes(&self) -> Result<Vec<FoundVolume>, EffectError> {
        Ok(self.survey().await?.volumes)
    }

    /// The last of a removal: what a project has besides instance and volume, its certificates. Gone already is success.
    async fn forget(&self, _key: &Key) -> Result<(), EffectError> {
        Ok(())
    }

    /// Removes an instance that is no project's, by its name in [`Survey`]. One that runs is refused.
    async fn remove_instance(&self, name: &str) -> Result<(), EffectError>;

    /// Moves a volume that is no project's to the trash.
    async fn discard_volume(&self, key: &Key) -> Result<(), EffectError>;

    async fn trash(&self) -> Result<Vec<Trashed>, EffectError>;

    /// Brings a volume back, and tells whose it is.
    async fn restore(&self, name: &TrashName) -> Result<Properties, EffectError>;

    /// Frees it for good.
    async fn purge(&self, name: &TrashName) -> Result<(), EffectError>;
}

/// What [`Effects::survey`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Survey {
    pub instances: Vec<FoundInstance>,
    pub volumes: Vec<FoundVolume>,
}

#[derive(Debug, Error)]
pub enum EffectError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error("cannot render the daemon's configuration")]
    Toml(#[from] ConfigError),
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error("{what} was interrupted: kilnd is shutting down")]
    Interrupted { what: &'static str },
    #[error("the daemon of {key} runs and does not serve: {source}; its last words:\n{log}")]
    NotServing { key: Key, log: String, source: ProbeError },
    #[error("the daemon of {key} went away while it was starting; its last words:\n{log}")]
    Exited { key: Key, log: String },
    #[error("the cache of {key} is damaged: {what}")]
    Damaged { key: Key, what: String },
    /// What runs can reach what it must not: it has to be stopped by force, at once.
    #[error("the daemon of {key} must not go on: {source}")]
    NotIsolated { key: Key, source: RuntimeError },
    #[error("gave up after {} s: {step}", .after.as_secs())]
    TimedOut { step: &'static str, after: Duration },
}

impl EffectError {
    /// Whether the same request may succeed later without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Runtime(error) => error.is_retryable(),
            Self::Volume(VolumeError::Busy { .. }) | Self::TimedOut { .. } | Self::NotServing { .. } => true,
            _ => false,
        }
    }

    /// Whether a disk or a volume is full: somebody has to make room first.
    pub fn is_no_room(&self) -> bool {
        matches!(self, Self::Volume(VolumeError::Full { .. })) || causes::is_no_room(self)
    }

    /// With its causes, and what to do where no room is left.
    pub fn in_words(&self) -> String {
        let words = causes::in_one_line(self);
        match self {
            // It says so itself.
            Self::Volume(VolumeError::Full { .. }) => words,
            _ if self.is_no_room() => format!("{words}; free some space on that file system"),
            _ => words,
        }
    }

    /// Whether a daemon ended for want of room on its volume.
    pub fn is_full_volume(&self) -> bool {
        // As of ENOSPC and EDQUOT: a quota says the second.
        const WORDS: [&str; 2] = ["disk quota exceeded", "no space left on device"];
        match self {
            Self::Exited { log, .. } | Self::Runtime(RuntimeError::Exited { log, .. }) => {
                let log = log.to_ascii_lowercase();
                WORDS.iter().any(|words| log.contains(words))
            }
            _ => false,
        }
    }

    /// What says that the cache is damaged: no daemon will ever open it.
    pub fn damage(&self) -> Option<String> {
        match self {
            Self::Damaged { what, .. } => Some(what.clone()),
            Self::Exited { log, .. }
            | Self::NotServing { log, .. }
            | Self::Runtime(RuntimeError::Exited { log, .. }) => crate::buildkit::cache_damage(log),
            _ => None,
        }
    }

    pub fn timed_out(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::NotServing { .. } | Self::Runtime(RuntimeError::TimedOut { .. }))
    }
}

/// How long each step may take before it is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepDeadlines {
    pub observe: Duration,
    pub create_volume: Duration,
    /// A copy of a whole cache, on storage where that is no instant.
    pub copy_volume: Duration,
    /// Freeing walks through what is freed, on storage that has no better way.
    pub destroy_volume: Duration,
    pub write_files: Duration,
    pub create_instance: Duration,
    pub start_instance: Duration,
    /// From the start of the wait to the daemon's first answer.
    pub await_serving: Duration,
    /// One question to a daemon that answered before.
    pub ask: Duration,
    /// How long a graceful stop may drain before it is forced.
    pub drain: Duration,
}

impl StepDeadlines {
    /// For what a stop needs beyond its drain: the force, and the runtime's own bookkeeping.
    const STOP_MARGIN: Duration = Duration::from_secs(30);
    /// What measuring a cache before a stop may take.
    pub(super) const SETTLE: Duration = Duration::from_secs(10);
    /// For the runtime's side of a question.
    const ASK_MARGIN: Duration = Duration::from_secs(5);

    /// Where a copy is an instant, one that takes long hangs.
    #[must_use]
    pub(super) fn where_copies_are_instant(self, instant: bool) -> Self {
        if instant { Self { copy_volume: self.create_volume, ..self } } else { self }
    }

    pub fn of(&self, step: Step) -> Duration {
        match step {
            Step::CreateVolume
            | Step::Discard
            | Step::DiscardCache
            | Step::ListSnapshots
            | Step::DestroySnapshot(_)
            | Step::Measure
            | Step::Resize(_) => self.create_volume,
            Step::CloneVolume | Step::TakeSnapshot | Step::Rollback(_) => self.copy_volume,
            Step::DestroyVolume => self.destroy_volume,
            Step::WriteFiles => self.write_files,
            Step::CreateInstance => self.create_instance,
            Step::StartInstance => self.start_instance,
            Step::AdoptInstance => self.observe,
            Step::AwaitServing => self.await_serving + Self::ASK_MARGIN,
            Step::Probe => self.ask + Self::ASK_MARGIN,
            // It is asked twice, and measures its cache in between.
            Step::CountBuilds => self.ask * 2 + Self::SETTLE + Self::ASK_MARGIN,
            Step::StopInstance(_) | Step::DestroyInstance => self.drain + Self::STOP_MARGIN,
        }
    }
}

impl Default for StepDeadlines {
    fn default() -> Self {
        Self {
            // Above what a runtime gives itself for an answer: it can say what it waited for.
            observe: Duration::from_secs(20),
            create_volume: Duration::from_secs(60),
            // Above what the storage gives itself for a walk through a cache.
            copy_volume: Duration::from_mins(32),
            destroy_volume: Duration::from_mins(10),
            write_files: Duration::from_secs(60),
            create_instance: Duration::from_secs(120),
            start_instance: Duration::from_secs(60),
            await_serving: Duration::from_secs(60),
            ask: Duration::from_secs(5),
            drain: Duration::from_secs(30),
        }
    }
}
