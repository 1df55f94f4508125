//! What kind of bad luck a schedule has.

use std::time::Duration;

use kiln_domain::admission::AdmissionPolicy;
use kiln_domain::cache::FanOutPolicy;
use kiln_domain::cache::ForkBounds;

use crate::config;
use crate::rng::Rng;

/// Chances are of a thousand.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    pub(crate) name: &'static str,
    pub(crate) projects: usize,
    /// Things that happen from outside; what they lead to is not counted.
    pub(crate) actions: u32,
    /// Mean time between two of them, in milliseconds.
    pub(crate) gap: u64,
    /// Mean time that an operation takes.
    pub(crate) latency: u64,
    /// Of an operation or a look: that it fails, hangs, or lies.
    pub(crate) op_faults: u32,
    /// Of a question to a daemon: that it gets lost.
    pub(crate) ask_faults: u32,
    /// Of an event: that it is doubled or late.
    pub(crate) event_faults: u32,
    /// Of an event: that it never comes.
    pub(crate) lost_events: u32,
    /// Of an operation or a commit: that kilnd dies in it.
    pub(crate) crash_inside: u32,
    /// kilnd dies at most so often.
    pub(crate) crashes: u32,
    /// How often each kind of action comes up, relative to the others.
    pub(crate) weights: Weights,
    pub(crate) admission: AdmissionPolicy,
    pub(crate) max_leases: usize,
    /// Untrusted builds are kept apart, and get forks; elsewhere they are refused.
    pub(crate) isolates: bool,
    pub(crate) forks: ForkBounds,
    pub(crate) fan_out: FanOutPolicy,
    /// A snapshot or a clone costs next to nothing, and can be taken of a cache that is in use.
    pub(crate) cheap: bool,
    pub(crate) storage: Storage,
    /// Zero: none is taken but by hand.
    pub(crate) snapshot_every: Duration,
    /// Nothing goes wrong but clients: then every request that is not hung up has to end well (K6).
    pub(crate) calm: bool,
    /// Requests in one burst. The queue of writes has to hold it: what is too much for that is refused, and rightly.
    pub(crate) crowd: u64,
}

/// That of the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    Endless,
    Fills,
}

impl Storage {
    pub(crate) fn fills(self) -> bool {
        self == Self::Fills
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weights {
    pub(crate) clients: u32,
    pub(crate) admin: u32,
    pub(crate) daemons: u32,
    pub(crate) host: u32,
    pub(crate) outsiders: u32,
    pub(crate) disk: u32,
    pub(crate) load: u32,
    pub(crate) clock: u32,
    pub(crate) crash: u32,
    pub(crate) database: u32,
    pub(crate) crowd: u32,
    /// Untrusted builds.
    pub(crate) forks: u32,
    /// What is asked of caches.
    pub(crate) past: u32,
    pub(crate) damage: u32,
    /// What else uses the caches' storage changes.
    pub(crate) storage: u32,
}

impl Profile {
    #[expect(clippy::too_many_lines, reason = "a table of profiles")]
    pub(crate) fn of(rng: &mut Rng) -> Self {
        let base = Self {
            name: "calm",
            projects: rng.between(1, 5) as usize,
            actions: rng.between(200, 260) as u32,
            gap: rng.pick(&[200, 800, 3000, 8000]).unwrap_or(800),
            latency: rng.pick(&[5, 50, 400]).unwrap_or(50),
            op_faults: 0,
            ask_faults: 0,
            event_faults: 0,
            lost_events: 0,
            crash_inside: 0,
            crashes: 0,
            weights: Weights { clients: 100, forks: 15, ..Weights::default() },
            admission: config::admission(4, 64, 1000),
            max_leases: config::POLICY.max_leases,
            isolates: rng.chance(700),
            forks: ForkBounds { per_project: rng.between(1, 4) as usize, on_host: rng.between(3, 9) as usize },
            fan_out: FanOutPolicy {
                builds: rng.between(1, 3) as usize,
                members: rng.pick(&[0, 0, 1, 2]).unwrap_or(0),
                on_host: rng.between(1, 4) as usize,
                pressure: None,
            },
            cheap: true,
            storage: Storage::Endless,
            snapshot_every: Duration::from_secs(rng.pick(&[0, 60, 240]).unwrap_or(0)),
            calm: true,
            crowd: 0,
        };
        let faulty = Self { calm: false, cheap: rng.chance(700), ..base.clone() };
        let host = Self {
            name: "host",
            op_faults: rng.pick(&[10, 60, 200]).unwrap_or(60),
            ask_faults: rng.pick(&[0, 30, 150]).unwrap_or(30),
            event_faults: 200,
            weights: Weights {
                clients: 100,
                admin: 15,
                daemons: 15,
                host: 4,
                outsiders: 5,
                forks: 20,
                past: 8,
                damage: 2,
                ..Weights::default()
            },
            ..faulty.clone()
        };
        let mut profile = match rng.below(100) {
            0..=9 => base,
            10..=12 => Self {
                name: "crowd",
                crowd: rng.pick(&[100, 100, 400, 800]).unwrap_or(100),
                weights: Weights { clients: 100, crowd: 1, ..Weights::default() },
                ..base
            },
            13..=24 => host,
            25..=39 => Self {
                name: "crashes",
                crash_inside: rng.pick(&[0, 5, 25]).unwrap_or(5),
                crashes: rng.between(1, 12) as u32,
                weights: Weights {
                    clients: 100,
                    crash: 6,
                    daemons: 4,
                    admin: 8,
                    disk: 2,
                    forks: 15,
                    past: 5,
                    ..Weights::default()
                },
                ..faulty
            },
            40..=48 => Self {
                name: "admin",
                weights: Weights {
                    clients: 70,
                    admin: 50,
                    daemons: 5,
                    outsiders: 3,
                    forks: 15,
                    past: 10,
                    ..Weights::default()
                },
                ..faulty
            },
            49..=55 => Self {
                name: "clock",
                weights: Weights { clients: 100, clock: 8, daemons: 10, admin: 5, ..Weights::default() },
                ask_faults: 20,
                ..faulty
            },
            56..=63 => {
                let projects = rng.between(6, 16) as usize;
                let admission = config::admission(
                    rng.between(1, 3) as usize,
                    rng.between(2, 5) as usize,
                    rng.between(3, 10) as usize,
                );
                let weights = Weights { clients: 100, load: 8, admin: 8, daemons: 6, disk: 2, ..Weights::default() };
                Self { name: "crush", projects, admission, weights, op_faults: 20, max_leases: 8, ..faulty }
            }
            64..=71 => Self {
                name: "forks",
                isolates: true,
                weights: Weights { clients: 40, forks: 100, admin: 5, daemons: 5, past: 4, ..Weights::default() },
                op_faults: rng.pick(&[0, 0, 20]).unwrap_or(0),
                crashes: rng.between(0, 3) as u32,
                crash_inside: rng.pick(&[0, 3]).unwrap_or(0),
                ..faulty
            },
            72..=79 => Self {
                name: "past",
                snapshot_every: Duration::from_secs(rng.pick(&[20, 60, 240]).unwrap_or(60)),
                weights: Weights { clients: 70, past: 40, damage: 5, forks: 10, admin: 4, ..Weights::default() },
                op_faults: rng.pick(&[0, 0, 20]).unwrap_or(0),
                crashes: rng.between(0, 3) as u32,
                crash_inside: rng.pick(&[0, 3]).unwrap_or(0),
                ..faulty
            },
            95..=99 => Self {
                name: "full",
                projects: rng.between(4, 10) as usize,
                gap: rng.pick(&[2000, 5000, 12_000]).unwrap_or(5000),
                storage: Storage::Fills,
                weights: Weights { clients: 100, forks: 15, admin: 8, past: 8, storage: 8, ..Weights::default() },
                op_faults: rng.pick(&[0, 0, 20]).unwrap_or(0),
                crashes: rng.between(0, 2) as u32,
                crash_inside: rng.pick(&[0, 3]).unwrap_or(0),
                ..faulty
            },
            _ => Self {
                name: "everything",
                lost_events: rng.pick(&[0, 30]).unwrap_or(0),
                crash_inside: rng.pick(&[0, 3, 10]).unwrap_or(3),
                crashes: rng.between(1, 8) as u32,
                weights: Weights {
                    clients: 120,
                    admin: 20,
                    daemons: 12,
                    host: 3,
                    outsiders: 6,
                    disk: 4,
                    load: 4,
                    clock: 3,
                    crash: 4,
                    database: 1,
                    crowd: 0,
                    forks: 25,
                    past: 12,
                    damage: 2,
                    storage: 0,
                },
                admission: config::admission(2, 4, 8),
                ..host
            },
        };
        if profile.name == "everything" && rng.chance(300) {
            profile.storage = Storage::Fills;
            profile.weights.storage = 5;
        }
        profile
    }
}
