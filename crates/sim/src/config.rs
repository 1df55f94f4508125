//! The rules of a simulated Kiln: the real ones with shorter spans, so that hours of a host's life fit in a schedule.

use std::net::Ipv4Addr;
use std::time::Duration;

use kiln::projects::{Addressing, ProjectsConfig, StepDeadlines};
use kiln_domain::admission::AdmissionPolicy;
use kiln_domain::cache::{EvictionPolicy, HistoryPolicy, SizePolicy};
use kiln_domain::health::HealthPolicy;
use kiln_domain::idle::IdlePolicy;
use kiln_domain::lease::LeasePolicy;
use kiln_domain::{AddressPool, Policy};

use crate::profile::Profile;

pub(crate) const SECOND: u64 = 1000;
pub(crate) const MINUTE: u64 = 60 * SECOND;

/// How long `/route` waits for a daemon.
pub(crate) const ROUTE_WAIT: Duration = Duration::from_secs(60);
pub(crate) const CONNECT_WAIT: Duration = Duration::from_secs(16);
pub(crate) const TRASH_KEPT: Duration = Duration::from_mins(20);
/// Of the disk of the database, in milliseconds.
pub(crate) const LONGEST_STALL: u64 = 8 * SECOND;
pub(crate) const FULL_FOR_NEW: f64 = 95.0;

pub(crate) const DEADLINES: StepDeadlines = StepDeadlines {
    observe: Duration::from_secs(10),
    create_volume: Duration::from_secs(20),
    copy_volume: Duration::from_secs(20),
    destroy_volume: Duration::from_secs(60),
    write_files: Duration::from_secs(10),
    create_instance: Duration::from_secs(30),
    start_instance: Duration::from_secs(20),
    await_serving: Duration::from_secs(20),
    ask: Duration::from_secs(3),
    drain: Duration::from_secs(10),
};

/// Of a profile that takes none by itself.
const HISTORY: HistoryPolicy = HistoryPolicy { every: Duration::ZERO, keep: 3, keep_for: Duration::from_hours(2) };

pub(crate) const EVICTION: EvictionPolicy = EvictionPolicy {
    begin_percent: 80.0,
    end_percent: 75.0,
    keep_newer: Duration::from_mins(3),
    urgent_percent: 95.0,
    at_once: 16,
};

/// A cache is taken back by Kiln itself at most so often.
pub(crate) const RESCUE_AGAIN: u64 = 60 * MINUTE;

pub(crate) const POLICY: Policy = Policy {
    lease: LeasePolicy { grace: Duration::from_mins(2), max_build_age: Duration::from_mins(10) },
    idle: IdlePolicy {
        window: Duration::from_secs(60),
        longest: Duration::from_mins(3),
        fork_window: Duration::from_secs(30),
    },
    health: HealthPolicy {
        probe_every: Duration::from_secs(30),
        ask_again: Duration::from_secs(5),
        wedged_after: Duration::from_secs(30),
        wedged_after_connected: Duration::from_secs(90),
        silent_at_most: Duration::from_mins(10),
    },
    roll_held: Duration::from_mins(5),
    max_leases: 10_000,
    history: HISTORY,
    size: SizePolicy { threshold_percent: 0.0, factor: 1.0, max: 0, reserve: 0 },
};

pub(crate) fn admission(starts: usize, running: usize, queue: usize) -> AdmissionPolicy {
    AdmissionPolicy { starts, running, queue, full_for_new: FULL_FOR_NEW, ..AdmissionPolicy::default() }
}

pub(crate) fn projects(profile: &Profile) -> ProjectsConfig {
    let addresses = AddressPool { first: Ipv4Addr::new(10, 88, 0, 1), last: Ipv4Addr::new(10, 88, 3, 250) };
    let addressing = Addressing {
        domain: "kiln.internal".to_owned(),
        gateway_address: None,
        gateway_port: 8372,
        namespace: "kiln".to_owned(),
    };
    let kept_apart = if profile.isolates { Ok(()) } else { Err("nothing keeps them apart here".to_owned()) };
    let history = HistoryPolicy { every: profile.snapshot_every, ..HISTORY };
    ProjectsConfig {
        policy: Policy { max_leases: profile.max_leases, history, ..POLICY },
        admission: profile.admission,
        eviction: EVICTION,
        deadlines: DEADLINES,
        route_wait: ROUTE_WAIT,
        connect_wait: CONNECT_WAIT,
        trash_kept: TRASH_KEPT,
        forks: profile.forks,
        fan_out: profile.fan_out,
        untrusted: kept_apart,
        ..ProjectsConfig::with_defaults(addresses, addressing)
    }
}
