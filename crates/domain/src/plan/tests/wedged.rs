//! Rule 3: wedged, slow, or only asked now and then.

use super::*;

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
