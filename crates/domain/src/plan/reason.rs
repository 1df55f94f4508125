//! Why something is done or left alone.

use std::fmt;
use std::time::Duration;

use crate::admission::{Refused, WaitsFor};
use crate::cache::SnapshotName;
use crate::health::Evidence;
use crate::time::{Timestamp, span};

/// Its `Display` is what people read; [`Reason::rule`] is what scripts match.
#[derive(Debug, Clone, PartialEq)]
pub enum Reason {
    Connected {
        connections: usize,
    },
    Leased {
        leases: usize,
    },
    Requested,
    Hot,
    IdleWindowOpen {
        closes: Timestamp,
        window: Duration,
    },
    IdleWindowPassed {
        window: Duration,
    },
    /// It is down, and within its window nobody has come for it.
    Down,
    StopRequested,
    RemovalRequested,
    Removing,
    /// A copy goes when nobody needs it.
    Reaped,
    RollbackRequested {
        to: SnapshotName,
    },
    ResetRequested,
    EvictionRequested,
    /// No daemon can open the cache, so Kiln itself goes back to where one could.
    Rescue {
        to: SnapshotName,
        damage: String,
    },
    /// And there is nothing to go back to, or it was tried already.
    Damaged {
        damage: String,
        tried: bool,
    },
    Forced,
    /// Its volume has no room for a daemon to start in, and cannot get more.
    Full,
    /// A build runs in the daemon that no lease and no connection tells of.
    ActiveBuilds {
        builds: u32,
    },
    NotAnswering,
    NotServing,
    Wedged(Evidence),
    /// Untrusted code could reach what it must not (K7).
    NotIsolated {
        reached: String,
    },
    HalfMade {
        why: String,
    },
    Outdated {
        what: String,
    },
    /// It was stopped for a roll and comes up again.
    RollGoesOn,
    RoomWanted,
    /// The worker has to ask for a place among the starts.
    NeedsPlace,
    Queued {
        position: usize,
        length: usize,
        waits_for: WaitsFor,
    },
    Refused(Refused),
    BackingOff {
        until: Timestamp,
    },
    Foreign {
        found: String,
    },
}

impl Reason {
    /// A word for a rule of the plan.
    pub const fn rule(&self) -> &'static str {
        match self {
            Self::Connected { .. } => "connected",
            Self::Leased { .. } => "leased",
            Self::Requested => "requested",
            Self::Hot => "hot",
            Self::IdleWindowOpen { .. } => "idle-window-open",
            Self::IdleWindowPassed { .. } => "idle-window-passed",
            Self::Down => "down",
            Self::StopRequested => "stop-requested",
            Self::RemovalRequested => "removal-requested",
            Self::Removing => "removing",
            Self::Reaped => "reaped",
            Self::RollbackRequested { .. } => "rollback-requested",
            Self::ResetRequested => "reset-requested",
            Self::EvictionRequested => "eviction-requested",
            Self::Rescue { .. } => "rescue",
            Self::Damaged { .. } => "damaged",
            Self::Forced => "forced",
            Self::Full => "full",
            Self::ActiveBuilds { .. } => "active-builds",
            Self::NotAnswering => "not-answering",
            Self::NotServing => "not-serving",
            Self::Wedged(_) => "wedged",
            Self::NotIsolated { .. } => "not-isolated",
            Self::HalfMade { .. } => "half-made",
            Self::Outdated { .. } => "outdated",
            Self::RollGoesOn => "roll-goes-on",
            Self::RoomWanted => "room-wanted",
            Self::NeedsPlace => "needs-place",
            Self::Queued { .. } => "queued",
            Self::Refused(_) => "refused",
            Self::BackingOff { .. } => "backing-off",
            Self::Foreign { .. } => "foreign",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { connections } => write!(f, "{connections} open connection(s)"),
            Self::Leased { leases } => write!(f, "{leases} live lease(s)"),
            Self::Requested => f.write_str("a request waits for it"),
            Self::Hot => f.write_str("the project is hot"),
            Self::IdleWindowOpen { window, .. } => write!(f, "its idle window of {} is open", span(*window)),
            Self::IdleWindowPassed { window } => write!(f, "its idle window of {} has passed", span(*window)),
            Self::Down => f.write_str("it is down, and nobody needs it"),
            Self::StopRequested => f.write_str("an admin asked for it"),
            Self::RemovalRequested => f.write_str("an admin asked for its removal"),
            Self::Removing => f.write_str("it is being removed"),
            Self::Reaped => f.write_str("nobody needs it any more, and its cache is a copy"),
            Self::RollbackRequested { to } => write!(f, "an admin wants its cache back at {to}"),
            Self::ResetRequested => f.write_str("an admin wants it to begin with an empty cache"),
            Self::EvictionRequested => f.write_str("the storage is full, and nobody needs its cache now"),
            Self::Rescue { to, damage } => {
                write!(f, "no daemon can open its cache ({damage}); it goes back to {to}, and the damaged one to the trash")
            }
            Self::Damaged { damage, tried } => {
                let why = if *tried { "going back did not help" } else { "it has no good snapshot to go back to" };
                write!(
                    f,
                    "no daemon can open its cache ({damage}), and {why}: `kiln cache log` shows what there is, `kiln cache \
                     rollback` goes back, `kiln cache reset` begins anew"
                )
            }
            Self::Forced => f.write_str("an admin forced it"),
            Self::Full => f.write_str(
                "its volume is full, so that no daemon can start: give it more (`kiln set --volume-max`), or begin anew \
                 (`kiln cache reset`)",
            ),
            Self::ActiveBuilds { builds } => write!(f, "{builds} build(s) run in it, by its own account"),
            Self::NotAnswering => f.write_str("it does not answer, and a build may run in it"),
            Self::NotServing => f.write_str("it runs but did not answer in time"),
            Self::Wedged(Evidence { probes, silent_for }) => {
                write!(f, "it is wedged: {probes} calls unanswered in {}, and it does no work", span(*silent_for))
            }
            Self::NotIsolated { reached } => write!(f, "it is not kept apart: {reached}"),
            Self::HalfMade { why } => write!(f, "the instance is incomplete: {why}"),
            Self::Outdated { what } => write!(f, "it is out of date: {what}"),
            Self::RollGoesOn => f.write_str("it was stopped to be brought up to date"),
            Self::RoomWanted => f.write_str("nobody needs it now, and the host wants its room or its memory for others"),
            Self::NeedsPlace => f.write_str("it asks for its turn to start"),
            Self::Queued { position, length, waits_for } => {
                write!(f, "it waits for its turn to start, number {position} of {length}, because {waits_for}")
            }
            Self::Refused(why) => write!(f, "the host takes no more starts: {why}"),
            Self::BackingOff { .. } => f.write_str("it failed a moment ago; waiting before the next try"),
            Self::Foreign { found } => write!(f, "the volume's name is taken by {found}"),
        }
    }
}
