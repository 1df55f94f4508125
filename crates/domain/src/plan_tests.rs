use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::lease::LeaseToken;
use crate::spec::BuildSpec;

const POLICY: Policy = Policy {
    lease: LeasePolicy { grace: Duration::from_secs(600), max_build_age: Duration::from_secs(7200) },
    idle_window: Duration::from_secs(900),
};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_millis(seconds * 1000)
}

fn lease_of(seconds: i64) -> Lease {
    Lease::new(LeaseToken::from_random([1; 8]).hash(), at(seconds), &POLICY.lease)
}

fn record() -> ProjectRecord {
    let spec = BuildSpec::new("h/r", "", "", "amd64").expect("valid");
    let mut record = ProjectRecord::new(spec, Ipv4Addr::LOCALHOST, at(0));
    record.incarnation = Some("run-1".into());
    record
}

fn running(serving: bool) -> InstanceSeen {
    InstanceSeen::Running { incarnation: "run-1".into(), serving }
}

fn seen(instance: InstanceSeen) -> Observed {
    Observed { volume: VolumeSeen::Ready, files: FilesSeen::Current, instance }
}

#[derive(Debug)]
struct Case {
    record: ProjectRecord,
    observed: Observed,
    leases: Vec<Lease>,
    waiters: usize,
    connections: usize,
    stop_requested: bool,
    setbacks: Setbacks,
    gave_up_on: Option<&'static str>,
    now: Timestamp,
}

impl Case {
    fn new(instance: InstanceSeen) -> Self {
        Self {
            record: record(),
            observed: seen(instance),
            leases: Vec::new(),
            waiters: 0,
            connections: 0,
            stop_requested: false,
            setbacks: Setbacks::default(),
            gave_up_on: None,
            now: at(0),
        }
    }

    fn waiting(instance: InstanceSeen) -> Self {
        Self { waiters: 1, ..Self::new(instance) }
    }

    fn plan(&self) -> Plan {
        plan(&Situation {
            record: &self.record,
            observed: &self.observed,
            demand: Demand {
                waiters: self.waiters,
                leases: &self.leases,
                connections: self.connections,
                stop_requested: self.stop_requested,
            },
            setbacks: self.setbacks,
            gave_up_on: self.gave_up_on,
            now: self.now,
            policy: &POLICY,
        })
    }

    fn step(&self) -> Option<Step> {
        self.plan().step
    }
}

#[test]
fn a_first_request_builds_from_the_ground_up() {
    let mut case = Case::waiting(InstanceSeen::Absent);
    case.observed.volume = VolumeSeen::Absent;
    case.observed.files = FilesSeen::Stale;
    assert_eq!(case.step(), Some(Step::CreateVolume));
    case.observed.volume = VolumeSeen::Ready;
    assert_eq!(case.step(), Some(Step::WriteFiles));
    case.observed.files = FilesSeen::Current;
    assert_eq!(case.step(), Some(Step::CreateInstance));
    assert_eq!(case.plan().phase, Phase::Provisioning);
    case.observed.instance = InstanceSeen::Stopped;
    assert_eq!(case.step(), Some(Step::StartInstance));
    case.observed.instance = running(false);
    assert_eq!(case.step(), Some(Step::AwaitServing));
    assert_eq!(case.plan().phase, Phase::Starting);
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
    let case = Case::waiting(InstanceSeen::Running { incarnation: "run-2".into(), serving: true });
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
    assert_eq!(case.step(), Some(Step::StopInstance(Stop::Graceful)));
    assert_eq!(case.plan().phase, Phase::Draining);
}

#[test]
fn a_project_s_own_window_goes_before_the_host_s() {
    let mut case = Case::new(running(true));
    case.record.settings.idle_window = Some(Duration::from_secs(10));
    case.now = at(11);
    assert_eq!(case.step(), Some(Step::StopInstance(Stop::Graceful)));
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
    case.record.settings.tier = Some(Tier::Hot);
    case.now = at(1_000_000);
    assert_eq!((case.step(), case.plan().reason), (None, Reason::Hot));
    case.observed.instance = InstanceSeen::Stopped;
    assert_eq!(case.step(), Some(Step::StartInstance));
    case.stop_requested = true;
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
    let case = Case::new(InstanceSeen::Stopped);
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Idle));
}

#[test]
fn what_died_under_a_lease_comes_back() {
    let mut case = Case::new(InstanceSeen::Stopped);
    case.leases = vec![lease_of(0)];
    assert_eq!(case.step(), Some(Step::StartInstance));
}

#[test]
fn a_crash_loop_under_a_lease_is_slowed_down_and_a_request_is_not() {
    let mut case = Case::new(InstanceSeen::Stopped);
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
    case.stop_requested = true;
    assert_eq!(case.step(), Some(Step::StopInstance(Stop::Graceful)));
    case.leases = vec![lease_of(0)];
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Warm));
}

#[test]
fn a_daemon_that_did_not_answer_is_restarted_unless_it_is_busy() {
    let mut case = Case::waiting(running(false));
    case.gave_up_on = Some("run-0");
    assert_eq!(case.step(), Some(Step::AwaitServing), "that was another run");
    case.gave_up_on = Some("run-1");
    assert_eq!(case.step(), Some(Step::StopInstance(Stop::Force)));
    case.connections = 1;
    assert_eq!(case.step(), Some(Step::AwaitServing));
}

#[test]
fn vectors_of_the_reference() {
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

fn any_instance() -> impl Strategy<Value = InstanceSeen> {
    prop_oneof![
        Just(InstanceSeen::Absent),
        Just(InstanceSeen::Stopped),
        Just(InstanceSeen::HalfMade { why: "x".into() }),
        (any::<bool>(), "run-[12]").prop_map(|(serving, incarnation)| InstanceSeen::Running { incarnation, serving }),
    ]
}

fn any_case() -> impl Strategy<Value = Case> {
    let volume =
        prop_oneof![Just(VolumeSeen::Absent), Just(VolumeSeen::Ready), Just(VolumeSeen::Foreign { found: "x".into() })];
    let files = prop_oneof![Just(FilesSeen::Current), Just(FilesSeen::Stale)];
    let demand = (0..3usize, 0..3usize, any::<bool>(), proptest::collection::vec(-9000i64..9000, 0..3));
    (any_instance(), volume, files, demand, 0..4u32, 0i64..9000, (any::<bool>(), any::<bool>())).prop_map(
        |(instance, volume, files, (waiters, connections, stop_requested, leases), setbacks, now, (hot, gave_up))| {
            let mut case = Case::new(instance);
            case.observed.volume = volume;
            case.observed.files = files;
            case.record.settings.tier = Some(if hot { Tier::Hot } else { Tier::Warm });
            case.gave_up_on = gave_up.then_some("run-1");
            (0..setbacks).for_each(|n| case.setbacks = case.setbacks.and_another(at(i64::from(n))));
            Case {
                waiters,
                connections,
                stop_requested,
                leases: leases.into_iter().map(lease_of).collect(),
                now: at(now),
                ..case
            }
        },
    )
}

proptest! {
    #[test]
    fn nothing_takes_a_daemon_away_from_a_running_build(case in any_case()) {
        let demand = Demand { waiters: case.waiters, leases: &case.leases, connections: case.connections, stop_requested: case.stop_requested };
        if demand.is_busy(case.now, &POLICY) {
            prop_assert!(!matches!(case.step(), Some(Step::StopInstance(_))), "{:?}", case.plan());
        }
    }

    #[test]
    fn only_what_answers_is_warm(case in any_case()) {
        if case.plan().phase == Phase::Warm {
            prop_assert_eq!(&case.observed.instance, &running(true));
        }
    }

    #[test]
    fn nothing_is_made_beside_a_foreign_volume(case in any_case()) {
        if matches!(case.observed.volume, VolumeSeen::Foreign { .. }) {
            let harmless = !matches!(case.step(), Some(Step::CreateVolume | Step::CreateInstance | Step::StartInstance));
            prop_assert!(harmless, "{:?}", case.plan());
        }
    }

    #[test]
    fn a_plan_without_a_step_looks_again_later_and_not_before(case in any_case()) {
        if let Some(at) = case.plan().look_again {
            prop_assert!(at > case.now);
        }
    }
}
