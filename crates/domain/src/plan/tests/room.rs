//! Places among the starts, and what makes room.

use super::*;

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
