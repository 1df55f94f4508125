//! Snapshots, going back to them, copies and what becomes of them.

use super::*;
use crate::cache::size::Fill;
use crate::key::Role;
use crate::plan::Reason;

fn snapshot(sequence: u64, verdict: Verdict) -> Snapshot {
    let taken = at(i64::try_from(sequence).expect("small"));
    Snapshot { name: SnapshotName::new(sequence), taken, verdict, bytes: None }
}

/// Of a daemon that was used a moment ago, on storage with cheap snapshots.
fn used(instance: InstanceSeen) -> Case {
    let mut case = Case { cheap: true, now: at(100), ..Case::new(instance) };
    case.record.generation = case.record.generation.next();
    case.record.last_activity = at(99);
    case
}

#[test]
fn a_snapshot_is_taken_when_nothing_else_is_to_be_done() {
    assert_eq!(used(running(true)).step(), Some(Step::TakeSnapshot));
    assert_eq!(used(InstanceSeen::STOPPED).step(), Some(Step::TakeSnapshot));
    assert_eq!(Case { cheap: false, ..used(running(true)) }.step(), None, "where it is a copy, only by hand");
    assert_eq!(Case { cheap: false, wants_snapshot: true, ..used(running(true)) }.step(), Some(Step::TakeSnapshot));
    assert_eq!(Case { waiters: 1, ..used(running(true)) }.step(), None, "whoever waits is answered first");
    let plan = used(running(true)).plan();
    assert_eq!((plan.phase, plan.reason.rule()), (Phase::Warm, "idle-window-open"), "it changes nothing of the daemon");
}

#[test]
fn the_next_snapshot_has_its_time() {
    let mut case = used(running(true));
    case.record.cache.snapshot = Some(at(50));
    let plan = case.plan();
    assert_eq!((plan.step, plan.look_again), (None, Some(at(999))), "the window closes first");
    case.record.cache.snapshot = Some(at(99));
    assert_eq!(case.step(), None, "nothing was used since");
    case.record.last_activity = at(5000);
    case.now = at(5001);
    assert_eq!(case.step(), Some(Step::TakeSnapshot));
    case.leases = vec![lease_of(4990)];
    case.record.cache.snapshot = Some(at(3000));
    assert_eq!(case.step(), None, "not in the middle of a build");
    case.record.cache.snapshot = Some(at(1000));
    assert_eq!(case.step(), Some(Step::TakeSnapshot), "unless there is no pause for too long");
    case.paused_until = Some(at(6000));
    assert_eq!(case.step(), None, "and not at once after it failed");
}

#[test]
fn what_is_too_much_goes() {
    let many = (1..=7).map(|n| snapshot(n, Verdict::Good)).collect();
    let mut case = Case { snapshots: Some(many), ..used(running(true)) };
    case.record.cache.snapshot = Some(at(99));
    assert_eq!(case.step(), Some(Step::DestroySnapshot(SnapshotName::new(1))));
    case.on_trial = Some(SnapshotName::new(1));
    assert_eq!(case.step(), None, "not the one that is being tried out");
}

#[test]
fn what_nobody_would_go_back_to_makes_room() {
    let thin = |snapshots| Case { thin: Some(HistoryPolicy::LEAST), snapshots, ..Case::new(InstanceSeen::STOPPED) };
    assert_eq!(thin(None).step(), Some(Step::ListSnapshots));
    let three = vec![snapshot(1, Verdict::Good), snapshot(2, Verdict::Unchecked), snapshot(3, Verdict::Unchecked)];
    assert_eq!(thin(Some(three.clone())).step(), Some(Step::DestroySnapshot(SnapshotName::new(2))));
    assert_eq!(thin(Some(vec![three[0], three[2]])).step(), None);
    assert_eq!(Case { thin: None, ..thin(Some(three)) }.step(), None);
}

#[test]
fn what_has_grown_old_unseen_goes() {
    let history = HistoryPolicy { keep_for: Duration::from_secs(60), ..HistoryPolicy::default() };
    let old = |snapshots| Case { thin: Some(history), snapshots, now: at(63), ..Case::new(InstanceSeen::STOPPED) };
    assert_eq!(old(None).step(), Some(Step::ListSnapshots));
    let four: Vec<_> = (1..=4).map(|n| snapshot(n, Verdict::Good)).collect();
    assert_eq!(old(Some(four.clone())).step(), Some(Step::DestroySnapshot(SnapshotName::new(1))));
    assert_eq!(old(Some(four[2..].to_vec())).step(), None, "the third is a minute old, and no more");
}

#[test]
fn a_cache_that_no_daemon_opens_goes_back_once() {
    let damaged =
        |snapshots| Case { damage: Some("invalid database"), snapshots, ..Case::waiting(InstanceSeen::STOPPED) };
    assert_eq!(damaged(None).step(), Some(Step::ListSnapshots));
    let good = Some(vec![snapshot(1, Verdict::Good), snapshot(2, Verdict::Good), snapshot(3, Verdict::Unchecked)]);
    let mut case = damaged(good);
    assert_eq!(case.step(), Some(Step::Rollback(SnapshotName::new(2))));
    assert!(case.why().contains("goes back to kiln-000002"), "{}", case.why());
    case.record.cache.rescued = Some(at(-10));
    let plan = case.plan();
    assert_eq!(plan.step, None);
    assert!(matches!(plan.reason, Reason::Damaged { tried: true, .. }), "{:?}", plan.reason);
    assert!(matches!(plan.phase, Phase::Failed { .. }));
    case.now = at(3700);
    assert_eq!(case.step(), Some(Step::Rollback(SnapshotName::new(2))), "another time is another damage");
    let nothing = damaged(Some(vec![snapshot(3, Verdict::Unchecked)])).plan();
    assert!(matches!(nothing.reason, Reason::Damaged { tried: false, .. }), "{:?}", nothing.reason);
    let unclear = Case { unclear: true, ..damaged(Some(vec![snapshot(1, Verdict::Good)])) };
    assert_eq!(unclear.step(), Some(Step::StartInstance), "it may have gone back already");
    let mut gone = damaged(Some(Vec::new()));
    gone.observed.volume = VolumeSeen::Absent;
    assert_eq!(gone.step(), Some(Step::CreateVolume), "what was damaged is not there any more");
}

#[test]
fn a_cache_is_replaced_while_nothing_runs_on_it() {
    let to = SnapshotName::new(4);
    for (wish, step) in [(StopWish::Rollback(to), Step::Rollback(to)), (StopWish::Reset, Step::DiscardCache)] {
        assert_eq!(Case { stop: Some(wish), ..Case::new(running(true)) }.step(), Some(GRACEFUL), "drained first");
        assert_eq!(Case { stop: Some(wish), ..Case::new(InstanceSeen::STOPPED) }.step(), Some(step));
        let wanted = Case { stop: Some(wish), ..Case::waiting(InstanceSeen::STOPPED) };
        assert_eq!(wanted.step(), Some(step), "whoever waits gets the cache that was asked for");
        let leased = Case { stop: Some(wish), leases: vec![lease_of(0)], ..Case::new(running(true)) };
        assert_eq!(leased.step(), None, "never under a build (K2)");
    }
}

#[test]
fn room_is_made_of_what_nobody_needs() {
    let case = |instance| Case { stop: Some(StopWish::Evict), ..Case::new(instance) };
    assert_eq!(case(running(true)).step(), Some(GRACEFUL));
    assert_eq!(case(InstanceSeen::STOPPED).step(), Some(Step::DestroyInstance));
    assert_eq!(case(InstanceSeen::Absent).step(), Some(Step::DestroyVolume));
    let leased = Case { leases: vec![lease_of(0)], ..case(running(true)) };
    assert_eq!(leased.step(), None);
    let waiting = Case { waiters: 1, ..case(InstanceSeen::STOPPED) };
    assert_eq!(waiting.step(), Some(Step::StartInstance));
}

fn derived(instance: InstanceSeen, volume: VolumeSeen) -> Case {
    let mut case = Case::new(instance);
    case.record.key = case.record.key.pull_request("12");
    assert_eq!(case.record.key.role(), Role::PullRequest);
    case.observed.volume = volume;
    case.now = at(301);
    case
}

#[test]
fn a_copy_is_cloned_and_goes_when_nobody_needs_it() {
    let born = Case { waiters: 1, ..derived(InstanceSeen::Absent, VolumeSeen::Absent) };
    assert_eq!(born.step(), Some(Step::CloneVolume));
    assert_eq!(derived(running(true), VolumeSeen::Ready).step(), Some(GRACEFUL), "its own window has passed");
    let leased = Case { leases: vec![lease_of(0)], ..derived(running(true), VolumeSeen::Ready) };
    assert_eq!(leased.step(), None, "leased at birth");
    for (instance, volume, step) in [
        (InstanceSeen::STOPPED, VolumeSeen::Ready, Some(Step::DestroyInstance)),
        (InstanceSeen::Absent, VolumeSeen::Ready, Some(Step::DestroyVolume)),
        (InstanceSeen::Absent, VolumeSeen::Absent, None),
    ] {
        let plan = derived(instance, volume).plan();
        assert_eq!((plan.phase, plan.step), (Phase::Removing, step), "{:?}", plan.reason);
    }
    let busy = Case { cheap: true, connections: 1, ..derived(running(true), VolumeSeen::Ready) };
    assert_eq!(busy.step(), None, "it has no history of its own");
}

#[test]
fn what_is_not_kept_apart_is_stopped_at_once() {
    let leaks = Some("from inside it reached 169.254.169.254:80");
    let case = Case { leaks, connections: 1, leases: vec![lease_of(0)], ..derived(running(true), VolumeSeen::Ready) };
    let plan = case.plan();
    assert_eq!((plan.step, plan.reason.rule()), (Some(FORCE), "not-isolated"));
}

fn fill(used: u64, size: u64) -> (Timestamp, Option<Fill>) {
    let fill = Fill { used: used << 30, size: size << 30, available: (size - used) << 30, inodes_available: None };
    (at(0), Some(fill))
}

fn sized(instance: InstanceSeen) -> Case {
    let settings = Settings { volume_bytes: Some(10 << 30), volume_max_bytes: Some(20 << 30), ..Settings::default() };
    Case { settings, ..Case::new(instance) }
}

#[test]
fn a_volume_grows_while_its_daemon_runs() {
    assert_eq!(sized(running(true)).step(), Some(Step::Measure));
    assert_eq!(sized(InstanceSeen::STOPPED).step(), None, "nobody writes to it");
    let measured = |measured| Case { room: Room { measured, full: false }, ..sized(running(true)) };
    assert_eq!(measured(Some(fill(9, 10))).step(), Some(Step::Resize(15 << 30)));
    assert_eq!(measured(Some((at(0), None))).step(), None, "nothing bounds it");
    let calm = measured(Some(fill(5, 10))).plan();
    assert_eq!((calm.step, calm.look_again), (None, Some(at(60))));
    let busy = Case { now: at(61), leases: vec![lease_of(0)], ..measured(Some(fill(5, 10))) };
    assert_eq!(busy.step(), Some(Step::Measure));
    assert_eq!(Case::new(running(true)).step(), None, "it has no size of its own");
}

#[test]
fn what_is_full_gets_room_before_it_is_started_again() {
    let full = |measured| Case { room: Room { measured, full: true }, waiters: 1, ..sized(InstanceSeen::STOPPED) };
    assert_eq!(full(None).step(), Some(Step::Measure));
    assert_eq!(full(Some(fill(10, 10))).step(), Some(Step::Resize(15 << 30)));
    assert_eq!(full(Some(fill(20, 20))).step(), Some(Step::Resize(21 << 30)), "the reserve is lent");
    let brick = full(Some(fill(21, 21))).plan();
    assert_eq!((brick.step, brick.reason.rule()), (None, "full"));
    assert!(matches!(brick.phase, Phase::Failed { .. }));
}
