//! What can be done.

use std::time::Duration;

use crate::cache::size::Fill;
use crate::cache::{Snapshot, SnapshotName};
use crate::health::Probed;

/// One effect on the host. Each is idempotent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    CreateVolume,
    /// A copy of the project's cache, for what is derived from it.
    CloneVolume,
    /// Write certificates and configuration.
    WriteFiles,
    /// One request with everything in it; leaves the instance stopped.
    CreateInstance,
    /// Undo an instance that is half-made, out of date, or of a project that is removed. Never touches the volume.
    DestroyInstance,
    /// The generation goes up with this step.
    StartInstance,
    /// Somebody else started it: take note of the new incarnation. The generation goes up.
    AdoptInstance,
    /// Wait until the daemon answers a real call.
    AwaitServing,
    /// Ask it whether it is well. Changes nothing, and builds are routed meanwhile.
    Probe,
    /// Ask it how many builds run in it.
    CountBuilds,
    StopInstance(Stop),
    /// Move the volume to the trash, and forget the certificates.
    Discard,
    /// Free a volume that is a copy, or that has to make room for others. There is no way back.
    DestroyVolume,
    /// Put the cache back to a snapshot; what it held goes to the trash.
    Rollback(SnapshotName),
    /// Move the volume to the trash; the next start makes an empty one.
    DiscardCache,
    /// Ask the storage what moments of the cache there are.
    ListSnapshots,
    /// Unless nothing was written since the newest.
    TakeSnapshot,
    DestroySnapshot(SnapshotName),
    /// Ask the storage how full the volume is.
    Measure,
    /// To so many bytes.
    Resize(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stop {
    /// SIGTERM, which BuildKit takes as a drain, and force after a bound.
    Graceful,
    Force,
}

impl Step {
    pub const fn name(self) -> &'static str {
        match self {
            Self::CreateVolume => "create volume",
            Self::CloneVolume => "clone the project's cache",
            Self::WriteFiles => "write certificates and configuration",
            Self::CreateInstance => "create instance",
            Self::DestroyInstance => "destroy instance",
            Self::StartInstance => "start instance",
            Self::AdoptInstance => "adopt instance",
            Self::AwaitServing => "wait for the daemon to answer",
            Self::Probe => "ask the daemon whether it is well",
            Self::CountBuilds => "ask the daemon which builds run",
            Self::StopInstance(Stop::Graceful) => "stop instance",
            Self::StopInstance(Stop::Force) => "force instance to stop",
            Self::Discard | Self::DiscardCache => "move the cache to the trash",
            Self::DestroyVolume => "free the cache",
            Self::Rollback(_) => "go back to a snapshot",
            Self::ListSnapshots => "list the snapshots",
            Self::TakeSnapshot => "take a snapshot",
            Self::DestroySnapshot(_) => "destroy a snapshot",
            Self::Measure => "measure the cache",
            Self::Resize(_) => "resize the volume",
        }
    }

    /// Whether it is on the way to a daemon that answers, and so needs a place among the starts.
    pub const fn brings_up(self) -> bool {
        matches!(
            self,
            Self::CreateVolume
                | Self::CloneVolume
                | Self::Rollback(_)
                | Self::WriteFiles
                | Self::CreateInstance
                | Self::DestroyInstance
                | Self::StartInstance
                | Self::AdoptInstance
                | Self::AwaitServing
        )
    }

    /// Whether it only asks: then it is no event worth keeping, and its failure is no setback.
    pub const fn only_asks(self) -> bool {
        matches!(self, Self::Probe | Self::CountBuilds)
    }

    /// Whether it is about the cache and not about the daemon: nobody waits for it, builds are routed meanwhile, and its
    /// failure is no setback.
    pub const fn is_upkeep(self) -> bool {
        matches!(
            self,
            Self::ListSnapshots | Self::TakeSnapshot | Self::DestroySnapshot(_) | Self::Measure | Self::Resize(_)
        )
    }

    /// Whether it puts the cache out of its place, from under whatever runs on it.
    pub const fn takes_the_cache(self) -> bool {
        matches!(self, Self::Discard | Self::DestroyVolume | Self::Rollback(_) | Self::DiscardCache)
    }

    /// Whether somebody asked for just this, and is told when it fails.
    pub const fn is_a_wish(self) -> bool {
        matches!(self, Self::Rollback(_) | Self::DiscardCache | Self::DestroyVolume)
    }
}

/// What a step that succeeded has to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    Plain,
    /// Of [`Step::StartInstance`].
    Started {
        incarnation: String,
    },
    /// Of [`Step::CloneVolume`]: of what, in words.
    Cloned {
        from: String,
    },
    /// Of [`Step::ListSnapshots`] and [`Step::TakeSnapshot`]: all there are now, oldest first, and whether the last of them is new.
    Snapshots {
        all: Vec<Snapshot>,
        taken: bool,
    },
    /// Of [`Step::Measure`]; `None`: nothing bounds the volume.
    Measured(Option<Fill>),
    /// Of [`Step::Probe`].
    Probed(Probed),
    /// Of [`Step::CountBuilds`]. `None`: the daemon did not answer; `cpu` as in [`Probed`].
    Builds {
        count: Option<u32>,
        cpu: Option<Duration>,
    },
}
