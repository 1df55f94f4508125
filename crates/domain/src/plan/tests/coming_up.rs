//! Rule 4: what is needed is brought up, one step at a time.

use super::*;

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
fn what_is_on_its_way_up_is_seen_through_when_the_caller_hung_up() {
    let mut case = Case::new(running(false));
    assert_eq!(case.step(), Some(Step::AwaitServing));
    case.gave_up_on = Some("run-1");
    assert_eq!(case.step(), None);
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
