use std::net::Ipv4Addr;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::admission::{Refused, WaitsFor};
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
    place: Place,
    room_wanted: bool,
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
            place: Place::Admitted,
            room_wanted: false,
            now: at(0),
        }
    }

    fn waiting(instance: InstanceSeen) -> Self {
        Self { waiters: 1, ..Self::new(instance) }
    }

    fn demand(&self) -> Demand<'_> {
        Demand { waiters: self.waiters, leases: &self.leases, connections: self.connections, stop: self.stop }
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
            place: self.place,
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

#[test]
fn a_first_request_builds_from_the_ground_up() {
    let mut case = Case::waiting(InstanceSeen::Absent);
    case.record.phase = Phase::Absent;
    case.observed.volume = VolumeSeen::Absent;
    case.observed.files = FilesSeen::Stale;
    assert_eq!(case.step(), Some(Step::CreateVolume));
    case.observed.volume = VolumeSeen::Ready;
    assert_eq!(case.step(), Some(Step::WriteFiles));
    case.observed.files = FilesSeen::Current;
    assert_eq!(case.step(), Some(Step::CreateInstance));
    assert_eq!(case.plan().phase, Phase::Provisioning);
    case.observed.instance = InstanceSeen::STOPPED;
    assert_eq!(case.step(), Some(Step::StartInstance));
    case.observed.instance = running(false);
    assert_eq!(case.step(), Some(Step::AwaitServing));
    assert_eq!(case.plan().phase, Phase::Starting, "of one that was absent");
    case.observed.instance = running(true);
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm));
}

#[test]
fn a_half_made_instance_is_made_anew_and_never_started() {
    let case = Case::waiting(InstanceSeen::HalfMade { why: "no cache device".into() });
    assert_eq!(case.step(), Some(Step::DestroyInstance));
}

#[test]
fn somebody_else_s_start_is_a_new_generation() {
    let case = Case::waiting(InstanceSeen::Running { incarnation: "run-2".into(), serving: true, outdated: None });
    assert_eq!(case.step(), Some(Step::AdoptInstance));
}

#[test]
fn a_foreign_volume_is_never_used() {
    let mut case = Case::waiting(InstanceSeen::Absent);
    case.observed.volume = VolumeSeen::Foreign { found: "project p0".into() };
    assert_eq!(case.step(), None);
    assert!(matches!(case.plan().phase, Phase::Failed { reason } if reason.contains("project p0")));
}

#[test]
fn idle_is_stopped_when_its_window_has_passed_and_looked_at_then() {
    let mut case = Case::new(running(true));
    case.now = at(899);
    assert_eq!((case.step(), case.plan().look_again), (None, Some(at(900))));
    case.now = at(900);
    assert_eq!(case.step(), Some(GRACEFUL));
    assert_eq!(case.plan().phase, Phase::Draining);
}

#[test]
fn a_project_s_own_window_goes_before_the_host_s() {
    let mut case = Case::new(running(true));
    case.settings.idle_window = Some(Duration::from_secs(10));
    case.now = at(11);
    assert_eq!(case.step(), Some(GRACEFUL));
}

#[test]
fn a_clock_set_back_does_not_make_a_window_endless() {
    let mut case = Case::new(running(true));
    case.record.last_activity = at(1_000_000);
    assert_eq!(case.plan().look_again, Some(at(900)));
}

#[test]
fn hot_is_never_idle_and_comes_back_but_obeys_an_admin() {
    let mut case = Case::new(running(true));
    case.settings.tier = Some(Tier::Hot);
    case.now = at(1_000_000);
    assert_eq!((case.step(), case.plan().reason), (None, Reason::Hot));
    case.observed.instance = InstanceSeen::STOPPED;
    assert_eq!(case.step(), Some(Step::StartInstance));
    case.stop = Some(StopWish::Stop);
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Idle));
}

#[test]
fn what_is_on_its_way_up_is_seen_through_when_the_caller_hung_up() {
    let mut case = Case::new(running(false));
    assert_eq!(case.step(), Some(Step::AwaitServing));
    case.gave_up_on = Some("run-1");
    assert_eq!(case.step(), None);
}

#[test]
fn what_died_in_its_window_with_nobody_there_stays_down() {
    let case = Case::new(InstanceSeen::STOPPED);
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Idle));
}

#[test]
fn what_died_under_a_lease_comes_back() {
    let mut case = Case::new(InstanceSeen::STOPPED);
    case.leases = vec![lease_of(0)];
    assert_eq!(case.step(), Some(Step::StartInstance));
}

#[test]
fn a_crash_loop_under_a_lease_is_slowed_down_and_a_request_is_not() {
    let mut case = Case::new(InstanceSeen::STOPPED);
    case.leases = vec![lease_of(0)];
    case.setbacks = Setbacks::default().and_another(at(0)).and_another(at(1)).and_another(at(2));
    case.now = at(3);
    assert_eq!((case.step(), case.plan().look_again), (None, Some(at(6))));
    case.waiters = 1;
    assert_eq!(case.step(), Some(Step::StartInstance));
}

#[test]
fn an_admin_s_stop_waits_for_nobody_but_a_build() {
    let mut case = Case::new(running(true));
    case.stop = Some(StopWish::Stop);
    assert_eq!(case.step(), Some(GRACEFUL));
    case.leases = vec![lease_of(0)];
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm));
    case.stop = Some(StopWish::Force);
    assert_eq!((case.step(), case.plan().reason), (Some(FORCE), Reason::Forced));
}

#[test]
fn a_daemon_that_did_not_answer_is_restarted_unless_it_is_busy() {
    let mut case = Case::waiting(running(false));
    case.gave_up_on = Some("run-0");
    assert_eq!(case.step(), Some(Step::AwaitServing), "that was another run");
    case.gave_up_on = Some("run-1");
    assert_eq!(case.step(), Some(FORCE));
    case.connections = 1;
    assert_eq!((case.step(), case.plan().reason), (None, Reason::NotAnswering), "it is asked until it is known");
    (case.connections, case.unborn) = (0, false);
    assert_eq!((case.step(), case.plan().reason), (None, Reason::NotAnswering), "nobody watched it from its start");
}

#[test]
fn vectors_of_the_reference() {
    // routing.md 3.8: "hot, never built" and "6 builds in 24 h" have rows of their own below and in `idle`.
    // (last activity ago, lease age, kept up?) with an idle window of 900 s and a maximum build age of 2 h.
    // Kiln's grace makes a difference only for a lease that nobody uses; here the client is connected.
    for (idle, lease_age, up) in [
        (60, None, true),
        (3600, None, false),
        (3600, Some(60), true),
        (3 * 3600, Some(3 * 3600), false),
        (3600, Some(3 * 3600), false),
    ] {
        let mut case = Case::new(running(true));
        case.now = at(100_000);
        case.record.last_activity = at(100_000 - idle);
        case.leases = lease_age.map(|age| lease_of(100_000 - age)).into_iter().collect();
        assert_eq!(case.step().is_none(), up, "idle {idle}, lease {lease_age:?}");
    }
}

// === Asked before it is stopped

#[test]
fn a_daemon_is_asked_for_its_builds_before_it_is_stopped_in_peace() {
    let mut case = Case::new(running(true));
    (case.now, case.builds) = (at(1000), None);
    assert_eq!((case.step(), case.plan().phase), (Some(Step::CountBuilds), Phase::Draining));
    case.builds = Some(0);
    assert_eq!(case.step(), Some(GRACEFUL));
    case.builds = Some(2);
    let plan = case.plan();
    assert_eq!((plan.step, plan.phase, plan.look_again), (None, Phase::Warm, Some(at(1030))));
    assert_eq!(plan.reason, Reason::ActiveBuilds { builds: 2 });
}

#[test]
fn one_that_does_not_say_is_not_stopped_in_peace() {
    let mut case = Case::new(running(true));
    (case.now, case.builds) = (at(1000), None);
    let mut health = Health::default();
    health.note(at(1000), Probed { answered: false, cpu: None }, &policy().health);
    case.health = Some(health);
    let plan = case.plan();
    assert_eq!((plan.step, plan.phase, plan.look_again), (None, Phase::Warm, Some(at(1010))));
    case.now = at(1010);
    assert_eq!(case.step(), Some(Step::CountBuilds));
}

#[test]
fn before_its_first_answer_nobody_can_have_sent_it_a_build() {
    let mut case = Case::new(running(false));
    (case.now, case.builds, case.record.phase) = (at(1000), None, Phase::Starting);
    assert_eq!(case.step(), Some(GRACEFUL));
    (case.record.phase, case.served, case.unborn) = (Phase::Warm, true, false);
    assert_eq!(case.step(), Some(Step::CountBuilds), "it may be slow with a build that came by another way");
}

#[test]
fn a_build_that_comes_while_it_drains_finds_it_up() {
    let mut case = Case::new(running(true));
    (case.now, case.record.phase) = (at(1000), Phase::Draining);
    assert_eq!(case.step(), Some(GRACEFUL));
    case.waiters = 1;
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm));
}

// === Wedged

/// Silent for `span` seconds until now, and without work if `cpu` stands still.
fn silent(now: i64, span: i64, cpu: fn(i64) -> Duration) -> Health {
    let mut health = Health::default();
    for second in (now - span..=now).step_by(10) {
        health.note(at(second), Probed { answered: false, cpu: Some(cpu(second)) }, &policy().health);
    }
    health
}

#[test]
fn wedged_is_rolled_at_once_under_a_lease_too_and_slow_never_is() {
    let mut case = Case::new(running(true));
    case.leases = vec![lease_of(0)];
    case.now = at(100);
    case.health = Some(silent(100, 60, |_| Duration::ZERO));
    assert_eq!((case.step(), case.plan().phase), (Some(FORCE), Phase::Rolling));
    case.connections = 1;
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm), "a connection asks for more evidence");
    case.now = at(400);
    case.health = Some(silent(400, 300, |_| Duration::ZERO));
    assert_eq!(case.step(), Some(FORCE));
    case.health = Some(silent(400, 300, |second| Duration::from_secs(second.unsigned_abs())));
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm), "busy is not broken");
}

#[test]
fn one_that_has_answered_before_is_slow_and_never_started_anew_for_it() {
    let mut case = Case::waiting(running(false));
    (case.served, case.unborn, case.gave_up_on) = (true, false, Some("run-1"));
    let plan = case.plan();
    assert_eq!((plan.step, plan.phase, plan.reason), (None, Phase::Warm, Reason::NotAnswering));
    case.now = at(30);
    case.health = Some(Health::answered(at(0)));
    assert_eq!(case.step(), Some(Step::Probe));
    case.waiters = 0;
    assert_eq!((case.step(), case.plan().phase), (Some(Step::Probe), Phase::Warm), "nor while it lingers");
}

#[test]
fn what_is_down_in_its_window_makes_room_for_nobody() {
    assert_eq!(Case::new(InstanceSeen::STOPPED).plan().reason, Reason::Down);
}

#[test]
fn builds_that_fall_out_of_the_day_close_a_window_early() {
    let mut case = Case::new(running(true));
    case.record.builds.note(at(-86_000));
    case.record.builds.note(at(0));
    assert_eq!(case.plan().look_again, Some(at(400)), "its second build of the day is one until then");
}

#[test]
fn after_a_roll_it_comes_up_again_for_whoever_comes_next() {
    let mut case = Case::new(InstanceSeen::STOPPED);
    case.record.phase = Phase::Rolling;
    assert_eq!((case.step(), case.plan().reason), (Some(Step::StartInstance), Reason::RollGoesOn));
    case.observed.instance = outdated(InstanceSeen::STOPPED);
    assert_eq!((case.step(), case.plan().phase), (Some(Step::DestroyInstance), Phase::Rolling));
    case.observed.instance = InstanceSeen::Absent;
    assert_eq!((case.step(), case.plan().phase), (Some(Step::CreateInstance), Phase::Rolling));
    case.place = Place::Unasked;
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Rolling));
    case.now = at(1000);
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Idle), "unless its window has closed meanwhile");
}

#[test]
fn a_roll_that_nobody_waits_for_does_not_stand_in_the_queue() {
    let mut case = Case::new(InstanceSeen::STOPPED);
    case.record.phase = Phase::Rolling;
    let queued = Place::Queued { position: 1, length: 1, waits_for: WaitsFor::Turn };
    for place in [queued, Place::Refused(Refused::Queue { queued: 1 })] {
        case.place = place;
        let plan = case.plan();
        assert_eq!((plan.step, plan.phase, plan.look_again), (None, Phase::Idle, None), "{place:?}");
        assert_eq!(plan.reason, Reason::Down);
    }
    case.waiters = 1;
    case.place = queued;
    assert!(matches!(case.plan().reason, Reason::Queued { .. }), "a request does");
}

#[test]
fn a_needed_daemon_is_asked_now_and_then_and_one_that_nobody_needs_only_when_in_doubt() {
    let mut case = Case::new(running(true));
    case.leases = vec![lease_of(0)];
    case.health = Some(Health::answered(at(0)));
    assert_eq!((case.step(), case.plan().look_again), (None, Some(at(30))));
    case.now = at(30);
    assert_eq!((case.step(), case.plan().phase), (Some(Step::Probe), Phase::Warm));
    case.leases.clear();
    assert_eq!(case.step(), None);
    let mut doubted = Health::answered(at(0));
    doubted.suspect();
    case.health = Some(doubted);
    assert_eq!((case.step(), case.plan().phase), (Some(Step::Probe), Phase::Warm));
}

// === Rolling

fn outdated(instance: InstanceSeen) -> InstanceSeen {
    let outdated = Some("the image".to_owned());
    match instance {
        InstanceSeen::Running { incarnation, serving, .. } => InstanceSeen::Running { incarnation, serving, outdated },
        _ => InstanceSeen::Stopped { outdated },
    }
}

#[test]
fn withholding_as_the_reference_has_it() {
    // routing.md 3.9: (a live build, the template changed) -> rolled or held.
    let mut case = Case::new(outdated(running(true)));
    assert_eq!((case.step(), case.plan().phase), (Some(GRACEFUL), Phase::Rolling), "no live build: rolled");
    case.leases = vec![lease_of(0)];
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm), "a build has just started: held");
    assert!(case.plan().look_again.is_some(), "and looked at again");
    case.leases.clear();
    assert_eq!(case.step(), Some(GRACEFUL), "released: rolled");
    // The reference rolls a pod that cannot pull its image under a live build; Kiln keeps what runs, whatever its state,
    // and replaces what does not.
    case.leases = vec![lease_of(0)];
    case.observed.instance = outdated(InstanceSeen::STOPPED);
    assert_eq!(case.step(), Some(Step::DestroyInstance));
}

#[test]
fn a_lease_nobody_uses_holds_a_roll_for_its_hour() {
    let mut case = Case::new(outdated(running(true)));
    case.leases = vec![lease_of(0)];
    case.now = at(899);
    let plan = case.plan();
    assert_eq!((plan.step, plan.look_again), (None, Some(at(900))), "its grace is over, its hour is not");
    case.settings.tier = Some(Tier::Hot);
    case.now = at(3599);
    assert_eq!((case.step(), case.plan().reason), (None, Reason::Hot));
    case.now = at(3600);
    assert_eq!((case.step(), case.plan().phase), (Some(GRACEFUL), Phase::Rolling));
}

#[test]
fn a_connection_holds_a_roll_for_as_long_as_it_lasts() {
    let mut case = Case::new(outdated(running(true)));
    case.connections = 1;
    case.now = at(1_000_000);
    case.health = Some(Health::answered(case.now));
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm));
}

#[test]
fn a_request_is_served_by_the_old_daemon_and_waits_for_no_roll() {
    let mut case = Case::waiting(outdated(running(true)));
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm));
    case.waiters = 0;
    case.builds = Some(1);
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm), "nor is one replaced in which a build runs");
}

#[test]
fn stale_files_are_those_it_runs_with() {
    let mut case = Case::new(running(true));
    case.observed.files = FilesSeen::Stale;
    assert_eq!((case.step(), case.plan().phase), (Some(GRACEFUL), Phase::Rolling));
    case.observed.instance = InstanceSeen::STOPPED;
    case.record.phase = Phase::Rolling;
    assert_eq!(case.step(), Some(Step::WriteFiles));
}

// === Room on the host

#[test]
fn a_start_waits_for_its_place_and_what_runs_needs_none() {
    let mut case = Case::waiting(InstanceSeen::STOPPED);
    case.place = Place::Unasked;
    assert_eq!((case.step(), case.plan().phase, case.plan().reason), (None, Phase::Idle, Reason::NeedsPlace));
    case.place = Place::Queued { position: 3, length: 7, waits_for: WaitsFor::Starts { under_way: 4 } };
    assert_eq!(case.step(), None);
    assert!(
        case.plan().reason.to_string().contains("number 3 of 7, because 4 other start(s)"),
        "{}",
        case.plan().reason
    );
    case.place = Place::Refused(Refused::Storage { percent: 99.0 });
    assert_eq!((case.step(), case.plan().look_again), (None, None), "whoever waits is told so");
    (case.waiters, case.leases) = (0, vec![lease_of(0)]);
    assert_eq!((case.step(), case.plan().look_again), (None, Some(at(10))));
    case.observed.instance = running(false);
    assert_eq!(case.step(), Some(Step::AwaitServing));
    case.observed.instance = InstanceSeen::HalfMade { why: "no cache device".into() };
    assert_eq!(case.step(), None, "nor is anything undone before there is room to make it anew");
}

#[test]
fn what_nobody_needs_makes_room_and_nothing_else_does() {
    let mut case = Case::new(running(true));
    case.room_wanted = true;
    assert_eq!((case.step(), case.plan().reason), (Some(GRACEFUL), Reason::RoomWanted));
    case.leases = vec![lease_of(0)];
    assert_eq!(case.step(), None);
    case.leases.clear();
    case.settings.tier = Some(Tier::Hot);
    assert_eq!(case.step(), None);
}

// === Removal

#[test]
fn a_removal_ends_in_the_trash_and_cannot_be_stopped_half_way() {
    let mut case = Case::new(running(true));
    case.stop = Some(StopWish::Remove);
    assert_eq!((case.step(), case.plan().phase), (Some(GRACEFUL), Phase::Draining));
    case.leases = vec![lease_of(0)];
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm), "a build comes first");
    case.leases.clear();
    case.observed.instance = InstanceSeen::STOPPED;
    assert_eq!((case.step(), case.plan().phase), (Some(Step::DestroyInstance), Phase::Removing));
    case.record.phase = Phase::Removing;
    (case.stop, case.waiters) = (None, 1);
    case.observed.instance = InstanceSeen::Absent;
    assert_eq!(case.step(), Some(Step::Discard));
    case.observed.volume = VolumeSeen::Absent;
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Removing));
    case.observed.volume = VolumeSeen::Foreign { found: "project p0".into() };
    assert_eq!(case.step(), None, "what is not ours is not thrown away");
}

// === In words

#[test]
fn why_in_ten_situations() {
    let connected = Case { connections: 1, leases: vec![lease_of(0)], now: at(100), ..Case::new(running(true)) };
    let leased = Case { leases: vec![lease_of(0)], now: at(100), ..Case::new(running(true)) };
    let mut hot = Case::new(running(true));
    hot.settings.tier = Some(Tier::Hot);
    let lingering = Case { now: at(300), ..Case::new(running(true)) };
    let mut idle = Case { now: at(5000), ..Case::new(InstanceSeen::STOPPED) };
    idle.record.phase = Phase::Idle;
    let mut queued = Case::waiting(InstanceSeen::STOPPED);
    queued.record.phase = Phase::Idle;
    queued.place = Place::Queued { position: 2, length: 5, waits_for: WaitsFor::Starts { under_way: 4 } };
    let held = Case { leases: vec![lease_of(0)], now: at(700), ..Case::new(outdated(running(true))) };
    let mut failed = Case { leases: vec![lease_of(0)], now: at(3), ..Case::new(InstanceSeen::STOPPED) };
    failed.record.phase = Phase::Failed { reason: "could not start instance: no space".into() };
    failed.setbacks = Setbacks::default().and_another(at(0)).and_another(at(1)).and_another(at(2));
    let building = Case { now: at(5000), builds: Some(1), ..Case::new(running(true)) };
    let mut wedged = Case { now: at(100), ..Case::new(running(true)) };
    wedged.health = Some(silent(100, 60, |_| Duration::ZERO));
    for (case, words) in [
        (connected, &["warm, because 1 open connection", "until 1 h 58 min from now", "1 connection(s)"][..]),
        (leased, &["warm, because 1 live lease", "counts for another 8 min 20 s unless it is renewed"]),
        (hot, &["warm, because the project is hot", "comes up again when it died"]),
        (lingering, &["idle window of 15 min is open", "stopped in 10 min; its cache stays", "0 build(s) in a day"]),
        (idle, &["idle, because its idle window of 15 min has passed", "last activity 1 h 23 min ago"]),
        (queued, &["number 2 of 5", "4 other start(s) are under way", "1 request(s) wait"]),
        (held, &["out of date (the image)", "holds that back for another 48 min 20 s", "keeps nothing up"]),
        (failed, &["failed: could not start instance: no space", "3 setback(s)", "tried again in 3 s, or at once"]),
        (building, &["1 build(s) run in it, by its own account", "asked again in 30 s"]),
        (wedged, &["about to force instance to stop", "it is wedged: 7 calls unanswered in 1 min"]),
    ] {
        let why = case.why();
        for wanted in words {
            assert!(why.contains(wanted), "wanted {wanted:?} in:\n{why}");
        }
    }
}

fn any_instance() -> impl Strategy<Value = InstanceSeen> {
    prop_oneof![
        Just(InstanceSeen::Absent),
        any::<bool>().prop_map(|old| if old { outdated(InstanceSeen::STOPPED) } else { InstanceSeen::STOPPED }),
        Just(InstanceSeen::HalfMade { why: "x".into() }),
        (any::<bool>(), "run-[12]", any::<bool>()).prop_map(|(serving, incarnation, old)| {
            let instance = InstanceSeen::Running { incarnation, serving, outdated: None };
            if old { outdated(instance) } else { instance }
        }),
    ]
}

fn any_phase() -> impl Strategy<Value = Phase> {
    prop_oneof![
        Just(Phase::Absent),
        Just(Phase::Provisioning),
        Just(Phase::Starting),
        Just(Phase::Warm),
        Just(Phase::Draining),
        Just(Phase::Rolling),
        Just(Phase::Idle),
        Just(Phase::Removing),
        Just(Phase::Failed { reason: "x".into() }),
    ]
}

fn any_place() -> impl Strategy<Value = Place> {
    prop_oneof![
        Just(Place::Unasked),
        Just(Place::Admitted),
        Just(Place::Queued { position: 1, length: 1, waits_for: WaitsFor::Turn }),
        Just(Place::Refused(Refused::Thrashing { full: 50.0 })),
    ]
}

fn any_case() -> impl Strategy<Value = Case> {
    let volume =
        prop_oneof![Just(VolumeSeen::Absent), Just(VolumeSeen::Ready), Just(VolumeSeen::Foreign { found: "x".into() })];
    let files = prop_oneof![Just(FilesSeen::Current), Just(FilesSeen::Stale)];
    let stop = prop_oneof![Just(None), Just(Some(StopWish::Stop)), Just(Some(StopWish::Remove))];
    let demand = (0..3usize, 0..3usize, stop, proptest::collection::vec(-9000i64..9000, 0..3));
    let world = (any_instance(), volume, files, any_phase());
    let history = (0..4u32, proptest::option::of(0..3u32), 0i64..400, any::<bool>(), any_place());
    (world, demand, history, 0i64..9000, (any::<bool>(), any::<bool>(), any::<bool>())).prop_map(
        |((instance, volume, files, phase), (waiters, connections, stop, leases), history, now, flags)| {
            let ((setbacks, builds, silence, works, place), (hot, gave_up, room_wanted)) = (history, flags);
            let mut case = Case::new(instance);
            case.served |= works;
            case.unborn = !case.served && hot;
            (case.observed.volume, case.observed.files, case.record.phase) = (volume, files, phase);
            case.settings.tier = Some(if hot { Tier::Hot } else { Tier::Warm });
            case.gave_up_on = gave_up.then_some("run-1");
            (0..setbacks).for_each(|n| case.setbacks = case.setbacks.and_another(at(i64::from(n))));
            if silence > 0 {
                let working = |second: i64| Duration::from_secs(second.unsigned_abs());
                case.health = Some(silent(now, silence, if works { working } else { |_| Duration::ZERO }));
            }
            let leases = leases.into_iter().map(lease_of).collect();
            Case { waiters, connections, stop, builds, place, room_wanted, leases, now: at(now), ..case }
        },
    )
}

proptest! {
    #[test]
    fn nothing_takes_a_daemon_away_from_a_running_build(case in any_case()) {
        let is_busy = case.demand().is_busy(case.now, &policy());
        if let (true, Some(Step::StopInstance(_))) = (is_busy, case.step()) {
            let evidence = matches!(case.plan().reason, Reason::Wedged(_) | Reason::Removing);
            prop_assert!(evidence, "{:?}", case.plan());
        }
    }

    #[test]
    fn nothing_that_may_build_is_stopped_in_peace_without_having_been_asked(case in any_case()) {
        if case.step() == Some(GRACEFUL) && case.plan().phase != Phase::Removing {
            prop_assert!(case.builds == Some(0) || case.unborn, "{:?}", case.plan());
        }
    }

    #[test]
    fn only_what_runs_and_is_ours_is_warm(case in any_case()) {
        if case.plan().phase == Phase::Warm {
            let ours = matches!(&case.observed.instance, InstanceSeen::Running { incarnation, .. } if incarnation == "run-1");
            prop_assert!(ours, "{:?}", case.plan());
        }
    }

    #[test]
    fn nothing_is_made_beside_a_foreign_volume_and_it_is_not_thrown_away(case in any_case()) {
        if matches!(case.observed.volume, VolumeSeen::Foreign { .. }) {
            let harmful = [Step::CreateVolume, Step::CreateInstance, Step::StartInstance, Step::Discard];
            prop_assert!(case.step().is_none_or(|step| !harmful.contains(&step)), "{:?}", case.plan());
        }
    }

    #[test]
    fn a_cache_is_thrown_away_only_when_an_admin_said_so(case in any_case()) {
        if case.step() == Some(Step::Discard) {
            prop_assert!(case.record.phase == Phase::Removing || case.stop == Some(StopWish::Remove), "{:?}", case.plan());
        }
    }

    #[test]
    fn a_plan_without_a_step_looks_again_later_and_not_before(case in any_case()) {
        if let Some(at) = case.plan().look_again {
            prop_assert!(at > case.now, "{:?}", case.plan());
        }
    }

    #[test]
    fn every_plan_can_be_explained(case in any_case()) {
        let why = case.why();
        prop_assert!(!why.contains('{') && why.len() > 20, "{why}");
    }
}
