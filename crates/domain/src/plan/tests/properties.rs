//! What holds in every situation.

use proptest::prelude::*;

use super::*;

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

    /// A worker that rests may go, and nobody would look after it any more.
    #[test]
    fn what_is_only_a_copy_does_not_rest_before_it_is_gone(case in any_case()) {
        let mut case = case;
        case.record.key = case.record.key.pull_request("12");
        let plan = case.plan();
        let needed = case.demand().need(&case.settings, case.now, &policy()).is_some();
        let rests = plan.step.is_none() && plan.phase.is_quiet() && plan.look_again.is_none() && case.place != Place::Unasked;
        prop_assert!(needed || !rests, "{plan:?}");
    }

    #[test]
    fn every_plan_can_be_explained(case in any_case()) {
        let why = case.why();
        prop_assert!(!why.contains('{') && why.len() > 20, "{why}");
    }
}
