//! Rule 5, and what every stop in peace has before it.

use super::*;

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
