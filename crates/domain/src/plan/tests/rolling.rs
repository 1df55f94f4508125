//! Rule 6: what is out of date is replaced while it is quiet.

use super::*;

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
fn a_copy_whose_roll_does_not_get_a_place_goes() {
    let mut case = Case::new(InstanceSeen::STOPPED);
    (case.record.phase, case.record.key) = (Phase::Rolling, case.record.key.pull_request("12"));
    case.place = Place::Queued { position: 1, length: 1, waits_for: WaitsFor::Turn };
    assert_eq!((case.step(), case.plan().phase), (Some(Step::DestroyInstance), Phase::Removing));
    case.place = Place::Refused(Refused::Queue { queued: 1 });
    assert_eq!(case.step(), Some(Step::DestroyInstance));
    case.place = Place::Admitted;
    assert_eq!(case.step(), Some(Step::StartInstance), "with one it comes up again, as others do");
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
