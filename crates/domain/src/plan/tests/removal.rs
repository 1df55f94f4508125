//! Rule 1: a removal that began is finished.

use super::*;

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
