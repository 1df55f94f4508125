//! Whether the host has room for one more start.
//!
//! Starting a daemon is the one thing that grows the load of the host, so it is where load is held back: before anything
//! is killed for want of memory, and before a file system is full. What runs already is never touched by these rules.
//!
//! Waiting is for what passes by itself (other starts, a spike of memory pressure, daemons that will be idle), refusing
//! for what does not (a full disk, a host that thrashes, a queue that nobody will live to see the end of).

use std::fmt;

/// Percentages are of 100; see each field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdmissionPolicy {
    /// Cold starts at a time. They compete for the same cores, and ten at once make each ten times as slow.
    pub starts: usize,
    /// Daemons at a time.
    pub running: usize,
    /// Projects that may wait for a start.
    pub queue: usize,
    /// Share of the last 10 s in which some task waited for memory (PSI `some avg10`) from which on starts wait.
    pub pressure_waits: f64,
    /// Share in which all tasks did (PSI `full avg10`) from which on starts are refused.
    pub pressure_refuses: f64,
    /// Memory that must be available for a start.
    pub memory_floor: u64,
    /// Fullness of the volumes' storage from which on no new volume is made.
    pub full_for_new: f64,
    /// And from which on no daemon is started at all: it could not even write its metadata.
    pub full: f64,
}

impl Default for AdmissionPolicy {
    fn default() -> Self {
        Self {
            starts: 4,
            running: 64,
            queue: 1000,
            pressure_waits: 20.0,
            pressure_refuses: 40.0,
            memory_floor: 256 << 20,
            full_for_new: 95.0,
            full: 98.0,
        }
    }
}

/// How the host is. A part that cannot be read is no reason to hold anything back.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HostLoad {
    pub starting: usize,
    /// Daemons that are up, those that start not counted.
    pub running: usize,
    /// Projects that wait for a start.
    pub queued: usize,
    pub memory_some: Option<f64>,
    pub memory_full: Option<f64>,
    pub memory_available: Option<u64>,
    /// Of the volumes' storage, bytes or inodes, whichever is fuller; in percent.
    pub storage: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    Admit,
    Wait(WaitsFor),
    Refuse(Refused),
}

/// What a start in the queue waits for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WaitsFor {
    Starts {
        under_way: usize,
    },
    Daemons {
        running: usize,
    },
    MemoryPressure {
        some: f64,
    },
    Memory {
        available: u64,
        floor: u64,
    },
    /// The host has room, and it is the turn of others.
    Turn,
}

impl WaitsFor {
    /// Whether stopping a daemon that nobody needs would help.
    pub const fn eased_by_a_stop(self) -> bool {
        matches!(self, Self::Daemons { .. } | Self::MemoryPressure { .. } | Self::Memory { .. })
    }

    /// A word for a metric.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starts { .. } => "starts",
            Self::Daemons { .. } => "daemons",
            Self::MemoryPressure { .. } => "memory_pressure",
            Self::Memory { .. } => "memory",
            Self::Turn => "turn",
        }
    }
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starts { under_way } => write!(f, "{under_way} other start(s) are under way"),
            Self::Daemons { running } => write!(f, "{running} daemons are up, and no more may be"),
            Self::MemoryPressure { some } => write!(f, "the host is short of memory (pressure {some:.0} %)"),
            Self::Memory { available, floor } => {
                write!(f, "the host has {} MiB of memory left, and a start needs {} MiB", available >> 20, floor >> 20)
            }
            Self::Turn => f.write_str("others came first"),
        }
    }
}

/// Why a start is not even queued.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Refused {
    Storage { percent: f64 },
    StorageForNew { percent: f64 },
    Thrashing { full: f64 },
    Queue { queued: usize },
}

impl Refused {
    /// A word for a metric.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Storage { .. } => "storage",
            Self::StorageForNew { .. } => "storage_for_new",
            Self::Thrashing { .. } => "thrashing",
            Self::Queue { .. } => "queue",
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Storage { percent } => {
                write!(
                    f,
                    "the caches' storage is {percent:.0} % full: `kiln trash empty`, remove projects, or add space"
                )
            }
            Self::StorageForNew { percent } => write!(
                f,
                "the caches' storage is {percent:.0} % full, so no new cache is made: `kiln trash empty`, remove \
                 projects, or add space"
            ),
            Self::Thrashing { full } => {
                write!(f, "the host stands still for want of memory ({full:.0} % of the time); try again when it works")
            }
            Self::Queue { queued } => write!(f, "{queued} projects wait for a start already; try again later"),
        }
    }
}

/// Whether one more start may begin now. `new_volume`: it would make a volume.
pub fn admit(load: &HostLoad, new_volume: bool, policy: &AdmissionPolicy) -> Verdict {
    if let Some(percent) = load.storage {
        if percent >= policy.full {
            return Verdict::Refuse(Refused::Storage { percent });
        }
        if new_volume && percent >= policy.full_for_new {
            return Verdict::Refuse(Refused::StorageForNew { percent });
        }
    }
    if let Some(full) = load.memory_full.filter(|full| *full >= policy.pressure_refuses) {
        return Verdict::Refuse(Refused::Thrashing { full });
    }
    let waits = if let Some(some) = load.memory_some.filter(|some| *some >= policy.pressure_waits) {
        WaitsFor::MemoryPressure { some }
    } else if let Some(available) = load.memory_available.filter(|available| *available < policy.memory_floor) {
        WaitsFor::Memory { available, floor: policy.memory_floor }
    } else if load.running + load.starting >= policy.running {
        WaitsFor::Daemons { running: load.running + load.starting }
    } else if load.starting >= policy.starts {
        WaitsFor::Starts { under_way: load.starting }
    } else {
        return Verdict::Admit;
    };
    if load.queued >= policy.queue {
        Verdict::Refuse(Refused::Queue { queued: load.queued })
    } else {
        Verdict::Wait(waits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(change: impl Fn(&mut HostLoad)) -> Verdict {
        let mut load = HostLoad::default();
        change(&mut load);
        admit(&load, false, &AdmissionPolicy::default())
    }

    #[test]
    fn what_cannot_be_read_holds_nothing_back() {
        assert_eq!(verdict(|_| {}), Verdict::Admit);
    }

    #[test]
    fn what_passes_is_waited_for() {
        assert_eq!(verdict(|load| load.starting = 3), Verdict::Admit);
        assert_eq!(verdict(|load| load.starting = 4), Verdict::Wait(WaitsFor::Starts { under_way: 4 }));
        assert_eq!(verdict(|load| load.running = 64), Verdict::Wait(WaitsFor::Daemons { running: 64 }));
        assert_eq!(
            verdict(|load| load.memory_some = Some(20.0)),
            Verdict::Wait(WaitsFor::MemoryPressure { some: 20.0 })
        );
        assert_eq!(
            verdict(|load| load.memory_available = Some(1)),
            Verdict::Wait(WaitsFor::Memory { available: 1, floor: 256 << 20 })
        );
    }

    #[test]
    fn what_does_not_pass_is_refused() {
        assert_eq!(verdict(|load| load.storage = Some(98.0)), Verdict::Refuse(Refused::Storage { percent: 98.0 }));
        assert_eq!(verdict(|load| load.memory_full = Some(40.0)), Verdict::Refuse(Refused::Thrashing { full: 40.0 }));
        let crowded = |load: &mut HostLoad| (load.starting, load.queued) = (4, 1000);
        assert_eq!(verdict(crowded), Verdict::Refuse(Refused::Queue { queued: 1000 }));
        assert_eq!(verdict(|load| load.queued = 1000), Verdict::Admit, "a long queue is no reason while there is room");
    }

    #[test]
    fn a_cache_that_exists_may_wake_on_a_disk_too_full_for_a_new_one() {
        let load = HostLoad { storage: Some(95.0), ..HostLoad::default() };
        assert_eq!(admit(&load, false, &AdmissionPolicy::default()), Verdict::Admit);
        let refused = Verdict::Refuse(Refused::StorageForNew { percent: 95.0 });
        assert_eq!(admit(&load, true, &AdmissionPolicy::default()), refused);
    }
}
