//! Every label with its values: nothing else can be a label's value.

use kiln_domain::admission::Refused;
use kiln_domain::cache::eviction::Kind;
use kiln_domain::{Phase, Step};

/// One label of a series: its name and its value.
pub(super) type Pair = [(&'static str, &'static str); 1];

/// A label that is the only one of its metric.
pub(super) trait Label: Copy + 'static {
    const ALL: &'static [Self];

    fn pair(self) -> Pair;
}

macro_rules! label {
    ($(#[$doc:meta])* $name:ident as $key:literal { $($(#[$of:meta])* $value:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$of])* $value,)+
        }

        impl $name {
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }

        impl Label for $name {
            const ALL: &'static [Self] = &[$(Self::$value,)+];

            fn pair(self) -> Pair {
                [($key, self.name())]
            }
        }
    };
}

label! {
    /// How a request of `/route` ended.
    Outcome as "outcome" {
        /// 200.
        Ready = "ready",
        /// 202: the client asked not to wait longer.
        Waiting = "waiting",
        /// 403.
        Refused = "refused",
        /// 410: nothing to go on with.
        Gone = "gone",
        /// 429.
        TooMany = "too_many",
        /// 500.
        Failed = "failed",
        /// 503.
        Unavailable = "unavailable",
        /// 504.
        NotReady = "not_ready",
        /// The client went away while it waited.
        Abandoned = "abandoned",
    }
}

label! {
    /// What a route that is not warm waits for.
    Stage as "stage" {
        /// Its turn.
        Queue = "queue",
        /// Volume, files and instance.
        Create = "create",
        /// The instance to run.
        Start = "start",
        /// The daemon's first answer.
        Serve = "serve",
    }
}

label! {
    /// Where a project stands.
    PhaseLabel as "phase" {
        Absent = "absent",
        Provisioning = "provisioning",
        Starting = "starting",
        Warm = "warm",
        Draining = "draining",
        Rolling = "rolling",
        Idle = "idle",
        Removing = "removing",
        Failed = "failed",
        /// One that this list does not know yet.
        Other = "other",
    }
}

impl From<Step> for StepLabel {
    fn from(step: Step) -> Self {
        match step {
            Step::CreateVolume => Self::CreateVolume,
            Step::CloneVolume => Self::CloneVolume,
            Step::DestroyVolume => Self::DestroyVolume,
            Step::Rollback(_) => Self::Rollback,
            Step::ListSnapshots => Self::ListSnapshots,
            Step::TakeSnapshot => Self::TakeSnapshot,
            Step::DestroySnapshot(_) => Self::DestroySnapshot,
            Step::Measure => Self::Measure,
            Step::Resize(_) => Self::Resize,
            Step::WriteFiles => Self::WriteFiles,
            Step::CreateInstance => Self::CreateInstance,
            Step::DestroyInstance => Self::DestroyInstance,
            Step::StartInstance => Self::StartInstance,
            Step::AdoptInstance => Self::AdoptInstance,
            Step::AwaitServing => Self::AwaitServing,
            Step::Probe => Self::Probe,
            Step::CountBuilds => Self::CountBuilds,
            Step::StopInstance(_) => Self::StopInstance,
            Step::Discard | Step::DiscardCache => Self::Discard,
        }
    }
}

impl Stage {
    /// The stage of a route's wait that a step belongs to.
    pub const fn of(step: Step) -> Option<Self> {
        match step {
            Step::CreateVolume
            | Step::CloneVolume
            | Step::Rollback(_)
            | Step::WriteFiles
            | Step::CreateInstance
            | Step::DestroyInstance => Some(Self::Create),
            Step::StartInstance | Step::AdoptInstance => Some(Self::Start),
            Step::AwaitServing => Some(Self::Serve),
            Step::Probe
            | Step::CountBuilds
            | Step::StopInstance(_)
            | Step::Discard
            | Step::DiscardCache
            | Step::DestroyVolume
            | Step::ListSnapshots
            | Step::TakeSnapshot
            | Step::DestroySnapshot(_)
            | Step::Measure
            | Step::Resize(_) => None,
        }
    }
}

impl From<Refused> for Refusal {
    fn from(why: Refused) -> Self {
        match why {
            Refused::Storage { .. } | Refused::StorageForNew { .. } => Self::Disk,
            Refused::Thrashing { .. } => Self::Memory,
            Refused::Queue { .. } => Self::Queue,
        }
    }
}

impl From<&Phase> for PhaseLabel {
    fn from(phase: &Phase) -> Self {
        let found = Self::ALL.iter().find(|label| label.name() == phase.name());
        found.copied().unwrap_or(Self::Other)
    }
}

label! {
    /// How a lease ended.
    LeaseEnd as "how" {
        /// Its client said so.
        Completed = "completed",
        /// By a client that named none, where that is allowed.
        Nameless = "nameless",
        /// Its client never learnt of it.
        Undelivered = "undelivered",
        /// Its build went to another daemon of its project.
        Moved = "moved",
        /// At the maximum build age.
        Expired = "expired",
        /// With its project, or by an admin's force.
        Forced = "forced",
    }
}

label! {
    /// Why a start, or a new lease, was not admitted.
    Refusal as "reason" {
        /// The host is short of memory.
        Memory = "memory",
        /// The volumes' file system is short of bytes or inodes.
        Disk = "disk",
        /// The queue of starts is full.
        Queue = "queue",
        /// The project has as many leases as it may.
        Leases = "leases",
    }
}

label! {
    /// What is done on the host.
    StepLabel as "step" {
        Observe = "observe",
        CreateVolume = "create_volume",
        CloneVolume = "clone_volume",
        DestroyVolume = "destroy_volume",
        Rollback = "rollback",
        ListSnapshots = "list_snapshots",
        TakeSnapshot = "take_snapshot",
        DestroySnapshot = "destroy_snapshot",
        Measure = "measure",
        Resize = "resize",
        WriteFiles = "write_files",
        CreateInstance = "create_instance",
        StartInstance = "start_instance",
        AdoptInstance = "adopt_instance",
        AwaitServing = "await_serving",
        Probe = "probe",
        CountBuilds = "count_builds",
        StopInstance = "stop_instance",
        DestroyInstance = "destroy_instance",
        Discard = "discard",
    }
}

label! {
    /// What was given up for want of room.
    Evicted as "kind" {
        Trash = "trash",
        /// The cache of a fork, or of a daemon beside a project's own.
        Copy = "copy",
        Snapshots = "snapshots",
        Cache = "cache",
    }
}

impl From<Kind> for Evicted {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Trash => Self::Trash,
            Kind::Copy => Self::Copy,
            Kind::Snapshots => Self::Snapshots,
            Kind::Cache => Self::Cache,
        }
    }
}

label! {
    /// What was found wrong with a daemon.
    Fault as "fault" {
        /// It went away by itself.
        Died = "died",
        /// It runs and does not serve.
        Wedged = "wedged",
        /// It runs untrusted code and could reach what it must not.
        NotIsolated = "not_isolated",
        /// It could not open its cache.
        CacheDamaged = "cache_damaged",
        /// Its instance was not made to the end.
        HalfMade = "half_made",
        /// Under its name is something that is not its own.
        Foreign = "foreign",
    }
}
