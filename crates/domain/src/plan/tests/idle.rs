//! Rules 7 and 8: the idle window, and what keeps nothing up.

use super::*;

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
fn what_died_in_its_window_with_nobody_there_stays_down() {
    let case = Case::new(InstanceSeen::STOPPED);
    assert_eq!((case.step(), case.plan().phase), (None, Phase::Idle));
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
