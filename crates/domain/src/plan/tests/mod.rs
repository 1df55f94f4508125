//! One situation after another, and what is planned in it; each file is about one rule or one question.

mod coming_up;
mod idle;
mod past;
mod properties;
mod removal;
mod rolling;
mod room;
mod stopping;
mod wedged;
mod words;

use std::net::Ipv4Addr;
use std::time::Duration;

use super::*;
use crate::admission::{Refused, WaitsFor};
use crate::cache::{HistoryPolicy, Snapshot, SnapshotName, Verdict};
use crate::explain::explain;
use crate::health::{Health, Probed};
use crate::idle::IdlePolicy;
use crate::lease::{Lease, LeasePolicy, LeaseToken};
use crate::project::{Phase, ProjectRecord};
use crate::settings::{Settings, Tier};
use crate::spec::BuildSpec;
use crate::time::Timestamp;

fn policy() -> Policy {
    Policy {
        lease: LeasePolicy { grace: Duration::from_secs(600), max_build_age: Duration::from_secs(7200) },
        idle: IdlePolicy {
            window: Duration::from_secs(900),
            longest: Duration::from_secs(21_600),
            fork_window: Duration::from_secs(300),
        },
        ..Policy::default()
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_millis(seconds * 1000)
}

fn lease_of(seconds: i64) -> Lease {
    Lease::new(LeaseToken::from_random([1; 8]).hash(), at(seconds), &policy().lease)
}

/// Of a daemon that was warm.
fn record() -> ProjectRecord {
    let spec = BuildSpec::new("h/r", "", "", "amd64").expect("valid");
    let mut record = ProjectRecord::new(spec, Ipv4Addr::LOCALHOST, at(0));
    record.incarnation = Some("run-1".into());
    record.phase = Phase::Warm;
    record
}

fn running(serving: bool) -> InstanceSeen {
    InstanceSeen::Running { incarnation: "run-1".into(), serving, outdated: None }
}

const GRACEFUL: Step = Step::StopInstance(Stop::Graceful);
const FORCE: Step = Step::StopInstance(Stop::Force);

/// A project as a test wants it; by itself a warm one whose daemon was asked for its builds a moment ago.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a question of its own that a rule asks")]
struct Case {
    record: ProjectRecord,
    settings: Settings,
    observed: Observed,
    leases: Vec<Lease>,
    waiters: usize,
    connections: usize,
    stop: Option<StopWish>,
    setbacks: Setbacks,
    health: Option<Health>,
    /// Builds that it told of, this instant; `None`: it was not asked.
    builds: Option<u32>,
    served: bool,
    unborn: bool,
    gave_up_on: Option<&'static str>,
    leaks: Option<&'static str>,
    place: Place,
    room_wanted: bool,
    snapshots: Option<Vec<Snapshot>>,
    damage: Option<&'static str>,
    unclear: bool,
    cheap: bool,
    on_trial: Option<SnapshotName>,
    thin: Option<HistoryPolicy>,
    wants_snapshot: bool,
    room: Room,
    paused_until: Option<Timestamp>,
    now: Timestamp,
}

impl Case {
    fn new(instance: InstanceSeen) -> Self {
        let served = matches!(instance, InstanceSeen::Running { serving: true, .. });
        Self {
            record: record(),
            settings: Settings::default(),
            observed: Observed { volume: VolumeSeen::Ready, files: FilesSeen::Current, instance },
            leases: Vec::new(),
            waiters: 0,
            connections: 0,
            stop: None,
            setbacks: Setbacks::default(),
            health: None,
            builds: Some(0),
            served,
            unborn: !served,
            gave_up_on: None,
            leaks: None,
            place: Place::Admitted,
            room_wanted: false,
            snapshots: None,
            damage: None,
            unclear: false,
            cheap: false,
            on_trial: None,
            thin: None,
            wants_snapshot: false,
            room: Room::default(),
            paused_until: None,
            now: at(0),
        }
    }

    fn waiting(instance: InstanceSeen) -> Self {
        Self { waiters: 1, ..Self::new(instance) }
    }

    fn demand(&self) -> Demand<'_> {
        Demand {
            waiters: self.waiters,
            leases: &self.leases,
            connections: self.connections,
            stop: self.stop,
            snapshot: self.wants_snapshot,
        }
    }

    fn with<T>(&self, work: impl FnOnce(&Situation<'_>) -> T) -> T {
        work(&Situation {
            record: &self.record,
            settings: &self.settings,
            observed: &self.observed,
            demand: self.demand(),
            setbacks: self.setbacks,
            health: self.health.unwrap_or(Health::answered(self.now)),
            counted: self.builds.map(|builds| Counted { builds, at: self.now }),
            served: self.served,
            unborn: self.unborn,
            gave_up_on: self.gave_up_on,
            leaks: self.leaks,
            place: self.place,
            past: Past {
                snapshots: self.snapshots.as_deref(),
                damage: self.damage,
                unclear: self.unclear,
                cheap: self.cheap,
                thin: self.thin,
                on_trial: self.on_trial,
                paused_until: self.paused_until,
            },
            room: self.room,
            room_wanted: self.room_wanted,
            now: self.now,
            policy: &policy(),
        })
    }

    fn plan(&self) -> Plan {
        self.with(plan)
    }

    fn step(&self) -> Option<Step> {
        self.plan().step
    }

    fn why(&self) -> String {
        self.with(|situation| {
            let explained = explain(situation, &plan(situation));
            format!("{}\n{}\n{}", explained.headline, explained.because.join("\n"), explained.next.unwrap_or_default())
        })
    }
}

/// Silent for `span` seconds until now, and without work if `cpu` stands still.
fn silent(now: i64, span: i64, cpu: fn(i64) -> Duration) -> Health {
    let mut health = Health::default();
    for second in (now - span..=now).step_by(10) {
        health.note(at(second), Probed { answered: false, cpu: Some(cpu(second)) }, &policy().health);
    }
    health
}

fn outdated(instance: InstanceSeen) -> InstanceSeen {
    let outdated = Some("the image".to_owned());
    match instance {
        InstanceSeen::Running { incarnation, serving, .. } => InstanceSeen::Running { incarnation, serving, outdated },
        _ => InstanceSeen::Stopped { outdated },
    }
}
