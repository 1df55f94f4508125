//! What runs untrusted code: shown to be kept apart before anybody is sent there, and bounded.

use super::*;

#[tokio::test]
async fn untrusted_code_is_served_to_nobody_before_its_isolation_is_proven() {
    let mut lab = Lab::running().await;
    lab.step(Step::AwaitServing).await;
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), 0, "trusted code needs none");

    lab.record.key = lab.record.key.fork();
    for step in [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance, Step::StartInstance] {
        lab.step(step).await;
    }
    let violated = |outcome: Result<Done, EffectError>| {
        let error = outcome.expect_err("it leaks");
        assert!(matches!(error, EffectError::NotIsolated { .. }) && !error.is_retryable(), "{error:?}");
        assert!(error.in_words().contains("the metadata service"), "{}", error.in_words());
    };
    let key = lab.record.key.clone();
    lab.runtime.set_leak(&key, Some("from inside it reached the metadata service"));
    violated(lab.try_step(Step::AwaitServing).await);
    violated(lab.try_step(Step::Probe).await);
    lab.runtime.set_leak(&key, None);
    lab.runtime.set_fault(Operation::Prove, Some(Fault::Fail));
    let unknown = lab.try_step(Step::AwaitServing).await.expect_err("nobody knows");
    assert!(unknown.is_retryable(), "{unknown}");
    lab.runtime.set_fault(Operation::Prove, None);
    lab.step(Step::AwaitServing).await;
    lab.record.incarnation = Some(lab.incarnation().await);

    let proofs = lab.runtime.proofs();
    lab.runtime.set_leak(&key, Some("the metadata service"));
    lab.clock.0.fetch_add(299_000, Ordering::SeqCst);
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), proofs, "a proof counts for five minutes");
    lab.clock.0.fetch_add(1_000, Ordering::SeqCst);
    violated(lab.try_step(Step::Probe).await);
    lab.runtime.set_leak(&key, None);
    lab.step(Step::Probe).await;
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), proofs + 2);
    // A clock that was set back makes no proof newer.
    lab.clock.0.fetch_sub(3_600_000, Ordering::SeqCst);
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), proofs + 3);
}

#[tokio::test]
async fn untrusted_code_that_answers_is_not_seen_to_serve_without_a_proof_of_this_run() {
    let serves = async |lab: &Lab, effects: &HostEffects| {
        let seen = effects.observe(&lab.record, &lab.settings).await.expect("observed");
        matches!(seen.instance, InstanceSeen::Running { serving: true, .. })
    };
    let mut lab = Lab::running().await;
    assert!(serves(&lab, &lab.effects).await, "of trusted code nothing is asked");
    lab.record.key = lab.record.key.fork();
    for step in [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance, Step::StartInstance] {
        lab.step(step).await;
    }
    // One whose proof fails without a leak.
    lab.runtime.set_fault(Operation::Prove, Some(Fault::Fail));
    lab.try_step(Step::AwaitServing).await.expect_err("nobody knows");
    assert!(!serves(&lab, &lab.effects).await);
    lab.runtime.set_fault(Operation::Prove, None);
    lab.step(Step::AwaitServing).await;
    assert!(serves(&lab, &lab.effects).await);
    lab.record.incarnation = Some(lab.incarnation().await);
    lab.step(Step::Probe).await;

    // One whose proof cannot be renewed.
    lab.clock.0.fetch_add(300_000, Ordering::SeqCst);
    lab.runtime.set_fault(Operation::Prove, Some(Fault::Fail));
    lab.try_step(Step::Probe).await.expect_err("nobody knows");
    assert!(!serves(&lab, &lab.effects).await);
    lab.runtime.set_fault(Operation::Prove, None);
    lab.step(Step::Probe).await;
    assert!(serves(&lab, &lab.effects).await);

    // One that was running when Kiln began.
    let again = lab.restarted();
    assert!(!serves(&lab, &again).await);
    again.perform(Step::AwaitServing, &lab.record, &lab.settings).await.expect("proven");
    assert!(serves(&lab, &again).await);

    // One that somebody else has started anew.
    assert!(lab.runtime.kill(&lab.record.key));
    lab.step(Step::StartInstance).await;
    assert!(!serves(&lab, &lab.effects).await);
    let proofs = lab.runtime.proofs();
    lab.record.incarnation = Some(lab.incarnation().await);
    lab.step(Step::Probe).await;
    assert_eq!((lab.runtime.proofs(), serves(&lab, &lab.effects).await), (proofs + 1, true));
}

#[tokio::test]
async fn a_fork_has_its_parent_s_limits_at_most_and_none_of_its_entitlements() {
    let mut lab = Lab::new();
    lab.settings.entitlements = Some([Entitlement::SecurityInsecure].into());
    lab.settings.memory_bytes = Some(20 << 30);
    let toml = |lab: &Lab| lab.effects.toml(&lab.record, &lab.settings, "/v".into()).expect("rendered");
    let spec = |lab: &Lab| lab.effects.spec(&lab.record, &lab.settings, "/v".into());
    let parent = spec(&lab);
    assert!(toml(&lab).contains("insecure-entitlements = [\"security.insecure\"]"), "{}", toml(&lab));
    assert_eq!((parent.lane, parent.limits.memory_bytes, parent.limits.cpus), (Lane::Trusted, Some(20 << 30), None));
    lab.record.key = lab.record.key.fork();
    let fork = spec(&lab);
    assert!(toml(&lab).contains("insecure-entitlements = []"), "{}", toml(&lab));
    assert_eq!((fork.lane, fork.limits.memory_bytes, fork.limits.cpus), (Lane::Untrusted, Some(8 << 30), Some(4)));
    assert_eq!(fork.limits.processes, Some(4096));
}
