//! What happened, as data: the language that the world speaks and that the checkers read.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

use kiln_domain::{Step, Timestamp};

use crate::checks::Checks;

/// An index into the schedule's projects.
pub(crate) type Project = usize;
pub(crate) type Request = u32;
/// A lease, by the order in which its token was first seen.
pub(crate) type LeaseId = u32;
pub(crate) type Incarnation = u64;
/// A cache, from its making to its end, wherever it lies.
pub(crate) type Lineage = u64;

/// A row of the table of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LeaseRow {
    pub(crate) lease: LeaseId,
    pub(crate) project: Project,
    pub(crate) created: Timestamp,
    pub(crate) renewed: Timestamp,
    pub(crate) expires: Timestamp,
}

/// What somebody asks of kilnd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verb {
    Route,
    /// With so many milliseconds of patience, and the lease in any case.
    RouteOrLease {
        wait: u64,
    },
    Poll {
        wait: u64,
    },
    Untrusted,
    /// `None`: to the newest good snapshot.
    Rollback {
        to: Option<u64>,
        force: bool,
    },
    Reset {
        force: bool,
    },
    Snapshot,
    CacheLog,
    CacheUsage,
    Prewarm,
    Connect,
    Complete,
    CompleteWrong,
    Renew,
    Stop,
    Force,
    Remove,
    Set,
    Why,
    List,
    Orphans,
    Adopt,
    Trash,
    Restore,
    Purge,
    EmptyTrash,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Ending {
    Good,
    /// In words, for people.
    Bad(String),
}

/// How an attempt to change a lease came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Change {
    Begun,
    Done,
    /// There was nothing to change.
    Nothing,
    /// The answer was an error.
    Failed,
}

/// Why a daemon is not there any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    /// kilnd asked for it.
    Stopped,
    Crashed,
    Rebooted,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Fact {
    // === kilnd
    /// `removing`: whose removal had begun, by what is on the disk.
    KilndStarted {
        life: u32,
        leases: Vec<LeaseRow>,
        removing: Vec<Project>,
    },
    /// It has taken up what there was.
    KilndReady {
        projects: Vec<Project>,
    },
    KilndDied,
    DatabaseLost,
    ClockJumped {
        by: i64,
    },
    /// Something of which only the kind matters.
    Fault(&'static str),
    FaultsEnd,
    /// Its row is not on the disk any more, after everything else of it had gone.
    Forgotten {
        project: Project,
    },

    // === Requests
    Asked {
        request: Request,
        verb: Verb,
        project: Project,
    },
    HungUp {
        request: Request,
    },
    Ended {
        request: Request,
        ending: Ending,
    },
    /// An answer arrived. `row`: what was on the disk then; `ready`: the generation it named.
    Leased {
        request: Request,
        lease: LeaseId,
        project: Project,
        ready: Option<u64>,
        row: Option<LeaseRow>,
    },
    Undelivered {
        request: Request,
        lease: LeaseId,
    },
    Released {
        lease: LeaseId,
        change: Change,
    },
    Renewed {
        lease: LeaseId,
        change: Change,
        row: Option<LeaseRow>,
    },
    Opened {
        connection: u32,
        project: Project,
    },
    Closed {
        connection: u32,
        project: Project,
    },
    BuildBegan {
        build: u32,
        project: Project,
        incarnation: Incarnation,
        lease: Option<LeaseId>,
        connection: Option<u32>,
    },
    BuildEnded {
        build: u32,
        cut: bool,
    },

    // === The host
    Op {
        project: Project,
        step: Step,
        fate: &'static str,
    },
    VolumeMade {
        project: Project,
        lineage: Lineage,
    },
    /// To the trash.
    Discarded {
        project: Project,
        lineage: Lineage,
    },
    /// A volume of its own, with what another held.
    Cloned {
        project: Project,
        lineage: Lineage,
        from: Lineage,
    },
    SnapshotTaken {
        project: Project,
        lineage: Lineage,
        sequence: u64,
        version: u64,
        damaged: bool,
    },
    SnapshotGone {
        project: Project,
        sequence: u64,
    },
    /// A daemon was let open a clone of it.
    TriedOut {
        project: Project,
        sequence: u64,
        opened: bool,
    },
    Judged {
        project: Project,
        sequence: u64,
        good: bool,
    },
    /// What it was went to the trash as `from`; `damaged`: no daemon could have opened that.
    WentBack {
        project: Project,
        lineage: Lineage,
        from: Lineage,
        to: u64,
        version: u64,
        damaged: bool,
    },
    /// An admin who asked for a way back is told where it led, or which snapshot was taken.
    Told {
        request: Request,
        sequence: u64,
    },
    /// No daemon opens the cache any more.
    Damaged {
        project: Project,
    },
    /// kilnd wants it gone for good.
    FreeBegan {
        project: Project,
    },
    /// It is gone, and not to come back.
    Freed {
        project: Project,
        lineage: Lineage,
    },
    Restored {
        project: Project,
        lineage: Lineage,
    },
    /// `age` by kilnd's clock, in milliseconds.
    Purged {
        project: Project,
        lineage: Lineage,
        age: i64,
    },
    /// It went to the trash.
    Trashed {
        project: Project,
        lineage: Lineage,
    },
    /// kilnd asked how full the storage is, and was told, in thousandths.
    Fullness {
        permille: u32,
    },
    /// An admin has wanted it to be always up.
    MadeHot {
        project: Project,
    },
    InstanceMade {
        project: Project,
    },
    InstanceDestroyed {
        project: Project,
    },
    /// `version`: of what it found in its cache.
    Started {
        project: Project,
        incarnation: Incarnation,
        lineage: Lineage,
        version: u64,
        address: String,
    },
    Serving {
        project: Project,
        incarnation: Incarnation,
    },
    /// It does not answer any more. `works`: what runs in it goes on.
    Hung {
        project: Project,
        incarnation: Incarnation,
        works: bool,
    },
    Recovered {
        project: Project,
        incarnation: Incarnation,
    },
    Gone {
        project: Project,
        incarnation: Incarnation,
        cause: Cause,
        announced: bool,
    },
    Numbered {
        project: Project,
        generation: u64,
        incarnation: Incarnation,
    },
    /// kilnd asked a daemon and heard (or did not hear) it. `builds`: if it was asked for them; `cpu` in milliseconds.
    Questioned {
        project: Project,
        incarnation: Incarnation,
        answered: bool,
        builds: Option<u32>,
        cpu: Option<u64>,
    },
    /// kilnd asked for it; the host may take its time.
    StopBegan {
        project: Project,
        incarnation: Incarnation,
        force: bool,
        phase: &'static str,
    },
    /// The point of no return of a stop.
    Terminated {
        project: Project,
        incarnation: Incarnation,
        force: bool,
        phase: &'static str,
    },
    /// Something was done that must not be: in words.
    Wrong {
        invariant: &'static str,
        why: String,
    },

    // === The end
    /// Some time after the last fault: what kilnd knows.
    Rested {
        projects: Vec<Project>,
    },
    Settled {
        after: u64,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Milliseconds since the schedule began, by a clock that never jumps.
    pub(crate) at: u64,
    /// kilnd's clock.
    pub(crate) wall: Timestamp,
    pub(crate) fact: Fact,
}

/// The first broken invariant of a schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub invariant: &'static str,
    pub why: String,
    /// Milliseconds of virtual time.
    pub at: u64,
}

/// Every entry is hashed and shown to the checkers as it comes.
pub(crate) struct History {
    entries: Vec<Entry>,
    hash: Fnv,
    checks: Checks,
    failure: Option<Failure>,
    pub(crate) trace: bool,
}

impl History {
    pub(crate) fn new(checks: Checks, trace: bool) -> Self {
        Self { entries: Vec::new(), hash: Fnv::default(), checks, failure: None, trace }
    }

    pub(crate) fn add(&mut self, entry: Entry) {
        (entry.at, entry.wall, &entry.fact).hash(&mut self.hash);
        if self.trace {
            eprintln!("{:>11.3}  {:?}", entry.at as f64 / 1000.0, entry.fact);
        }
        if self.failure.is_none()
            && let Err((invariant, why)) = self.checks.see(&entry)
        {
            if self.trace {
                eprintln!("             !!! {invariant}: {why}");
            }
            self.failure = Some(Failure { invariant, why, at: entry.at });
        }
        self.entries.push(entry);
    }

    pub(crate) const fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash.finish()
    }
}

/// FNV-1a: the hash of the standard library differs from run to run.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl History {
    /// What is worth knowing of how it came to a failure: the last entries about what it speaks of.
    pub(crate) fn story(&self, failure: &Failure, length: usize) -> Vec<String> {
        let about = failure.why.split(|c: char| !c.is_ascii_digit()).find_map(|digits| digits.parse::<Project>().ok());
        let mut leases = BTreeSet::new();
        for entry in &self.entries {
            if let Fact::Leased { lease, project, .. } = entry.fact
                && about.is_none_or(|about| about == project)
            {
                leases.insert(lease);
            }
        }
        let concerns = |entry: &&Entry| {
            let of_it = match entry.fact {
                Fact::Released { lease, .. } | Fact::Renewed { lease, .. } => leases.contains(&lease),
                _ => entry.fact.concerns(about),
            };
            entry.at <= failure.at && of_it
        };
        let mut lines: Vec<String> = self
            .entries
            .iter()
            .filter(concerns)
            .rev()
            .take(length)
            .map(|entry| format!("{:>11.3}  {:?}", entry.at as f64 / 1000.0, entry.fact))
            .collect();
        lines.reverse();
        lines
    }
}

impl Fact {
    /// Whom it is about, if it is about one.
    pub(crate) fn project(&self) -> Option<Project> {
        match self {
            Self::Asked { project, .. }
            | Self::Leased { project, .. }
            | Self::Opened { project, .. }
            | Self::Closed { project, .. }
            | Self::BuildBegan { project, .. }
            | Self::Op { project, .. }
            | Self::VolumeMade { project, .. }
            | Self::Discarded { project, .. }
            | Self::Restored { project, .. }
            | Self::Purged { project, .. }
            | Self::Trashed { project, .. }
            | Self::MadeHot { project }
            | Self::Cloned { project, .. }
            | Self::SnapshotTaken { project, .. }
            | Self::SnapshotGone { project, .. }
            | Self::TriedOut { project, .. }
            | Self::Judged { project, .. }
            | Self::WentBack { project, .. }
            | Self::Damaged { project }
            | Self::FreeBegan { project }
            | Self::Freed { project, .. }
            | Self::InstanceMade { project }
            | Self::InstanceDestroyed { project }
            | Self::Started { project, .. }
            | Self::Serving { project, .. }
            | Self::Hung { project, .. }
            | Self::Recovered { project, .. }
            | Self::Gone { project, .. }
            | Self::Numbered { project, .. }
            | Self::Forgotten { project }
            | Self::Questioned { project, .. }
            | Self::StopBegan { project, .. }
            | Self::Terminated { project, .. } => Some(*project),
            _ => None,
        }
    }

    /// Whether it is about a project, or about all of them.
    fn concerns(&self, about: Option<Project>) -> bool {
        let of_no_interest = matches!(
            self,
            Self::Fault(_)
                | Self::Fullness { .. }
                | Self::HungUp { .. }
                | Self::Ended { .. }
                | Self::BuildEnded { cut: false, .. }
        );
        match self.project() {
            Some(of) => about.is_none_or(|about| about == of),
            None => !of_no_interest,
        }
    }
}
