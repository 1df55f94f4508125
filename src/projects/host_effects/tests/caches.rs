//! Caches as a whole: their size, their past, trials, and what of copies has to go.

use super::*;

#[tokio::test]
async fn what_a_cache_has_grown_to_is_what_its_volume_and_its_daemon_have() {
    let mut lab = Lab::running().await;
    let size = async |lab: &Lab| lab.volumes.usage(&lab.record.key).await.expect("measured").size;
    lab.record.cache.size = Some(96 << 30);
    assert_eq!(lab.seen().await.files, FilesSeen::Stale);
    lab.step(Step::WriteFiles).await;
    assert_eq!((size(&lab).await, lab.seen().await.files), (Some(96 << 30), FilesSeen::Current));
    lab.settings.volume_bytes = Some(128 << 30);
    lab.step(Step::WriteFiles).await;
    assert_eq!(size(&lab).await, Some(128 << 30), "a first size that was raised");
}

/// Made smaller than what is in it, a cache is collected down to that.
#[tokio::test]
async fn what_a_cache_has_grown_to_comes_back_with_it() {
    let mut lab = Lab::new();
    let key = lab.record.key.clone();
    lab.step(Step::CreateVolume).await;
    lab.step(Step::Resize(135 << 30)).await;
    lab.effects.discard_volume(&key).await.expect("discarded");
    let trashed = lab.effects.trash().await.expect("listed").remove(0);
    let marks = lab.effects.restore(&trashed.name).await.expect("restored");
    lab.record = crate::projects::reconcile::record_of(&marks, Timestamp::from_millis(BEGIN)).expect("a project");
    lab.step(Step::WriteFiles).await;
    assert_eq!(lab.volumes.usage(&key).await.expect("measured").size, Some(135 << 30));
    let toml = lab.state.path().join("daemons").join(key.as_str()).join(TOML);
    let toml = std::fs::read_to_string(toml).expect("written");
    let kept = Collection::of(135 << 30, &Bounds::new(64 << 30, None, &SizePolicy::default()), &SizePolicy::default());
    assert!(toml.contains(&kept.ceiling.to_string()), "{toml}");
    // As `kiln set` does, at any time later.
    lab.effects.describe(&lab.record).await.expect("written");
    let survey = lab.effects.survey().await.expect("looked through");
    assert_eq!(survey.volumes[0].properties.get(SIZE), Some(&(135_u64 << 30).to_string()));
}

#[tokio::test]
async fn the_trash_gives_back_what_it_was_given() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    lab.effects.discard_volume(&lab.record.key).await.expect("discarded");
    let trashed = lab.effects.trash().await.expect("listed").remove(0);
    assert_eq!(trashed.since, Timestamp::from_millis(BEGIN));
    let properties = lab.effects.restore(&trashed.name).await.expect("restored");
    assert_eq!(properties.get("repo").map(String::as_str), Some("github.com/org/repo"));
    assert_eq!(lab.seen().await.volume, VolumeSeen::Ready);
    let error = lab.effects.restore(&trashed.name).await.expect_err("it is not in there any more");
    assert!(matches!(error, EffectError::Volume(VolumeError::Missing { .. })), "{error}");
    lab.effects.discard_volume(&lab.record.key).await.expect("discarded");
    let trashed = lab.effects.trash().await.expect("listed").remove(0);
    lab.effects.purge(&trashed.name).await.expect("freed");
    lab.effects.purge(&trashed.name).await.expect("freed already");
    assert!(lab.effects.trash().await.expect("listed").is_empty());
}

#[tokio::test]
async fn a_cache_that_was_given_up_has_no_past() {
    let lab = Lab::new();
    let key = &lab.record.key;
    assert_eq!(lab.effects.snapshots(key).await.expect("listed"), []);
    lab.step(Step::CreateVolume).await;
    lab.step(Step::TakeSnapshot).await;
    assert_eq!(lab.effects.snapshots(key).await.expect("listed").len(), 1);
    lab.step(Step::DiscardCache).await;
    assert_eq!(lab.effects.snapshots(key).await.expect("listed"), []);
}

/// Whatever was damaged before it was taken, all later snapshots have as well.
#[tokio::test]
async fn a_snapshot_of_what_was_damaged_while_its_daemon_ran_is_not_good() {
    const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    let lab = Lab::new();
    let root = lab.state.path().join("volumes");
    std::fs::create_dir(&root).expect("made");
    let volumes = Arc::new(DirEngine::at(&root, &search_path(), lab.clock.clone()).await.expect("opened"));
    let effects = lab.with_volumes(volumes.clone());
    let (key, step) = (&lab.record.key, |step| effects.perform(step, &lab.record, &lab.settings));
    step(Step::CreateVolume).await.expect("made");
    let blobs = volumes.get(key).await.expect("found").expect("there").path.join("runc-overlayfs/content/blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("made");
    for (text, verdict) in [("hello", Verdict::Good), ("hell", Verdict::Bad), ("hello", Verdict::Good)] {
        std::fs::write(blobs.join(HELLO), text).expect("written");
        let taken = step(Step::TakeSnapshot).await.expect("taken");
        let Done::Snapshots { all, .. } = taken else { panic!("no snapshots: {taken:?}") };
        let newest = all.last().expect("one").name;
        let found = effects.try_out(&lab.record, &lab.settings, newest).await.expect("tried");
        assert_eq!(found, verdict, "{text}");
        effects.judge(key, newest, found).await.expect("written down");
    }
    assert_eq!(effects.survey().await.expect("looked through").volumes.len(), 1, "nothing is left of the trials");
}

/// Killed between the two halves of a copy's end, Kiln plans no other: there is no volume any more.
#[tokio::test]
async fn a_copy_that_got_no_further_than_the_trash_goes_with_the_last_of_it() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    let (project, fork) = (lab.record.key.clone(), lab.record.key.fork());
    let trial = project.trial();
    for copy in [&fork, &trial] {
        lab.volumes.fork(&project, copy, &Properties::new()).await.expect("a copy");
        lab.volumes.discard(copy).await.expect("on its way");
    }
    lab.volumes.discard(&project).await.expect("an admin's");
    let left = async || lab.effects.trash().await.expect("listed").into_iter().map(|entry| entry.name.key().clone());
    lab.effects.forget(&fork).await.expect("forgotten");
    assert_eq!(left().await.collect::<Vec<_>>(), [project.clone(), trial]);
    lab.effects.sweep_trials().await.expect("swept");
    lab.effects.forget(&project).await.expect("forgotten");
    assert_eq!(left().await.collect::<Vec<_>>(), [project], "a project's own stays");
}

#[tokio::test]
async fn no_snapshot_is_tried_out_where_another_trial_still_runs() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    let taken = lab.step(Step::TakeSnapshot).await;
    let Done::Snapshots { all, .. } = taken else { panic!("no snapshots: {taken:?}") };
    let spec = BuildSpec::new("github.com/org/other", "", "", "amd64").expect("valid");
    let left = ProjectRecord { key: Key::of(&spec).trial(), spec, ..lab.record.clone() };
    lab.volumes.fork(&lab.record.key, &left.key, &described(&left)).await.expect("a copy");
    for step in [Step::WriteFiles, Step::CreateInstance, Step::StartInstance] {
        lab.effects.perform(step, &left, &lab.settings).await.expect("done");
    }
    let refused = lab.effects.try_out(&lab.record, &lab.settings, all[0].name).await.expect_err("its address is taken");
    assert!(refused.in_words().contains("an earlier trial has left"), "{refused:?}");
    lab.effects.sweep_trials().await.expect("swept");
    assert_eq!(lab.effects.try_out(&lab.record, &lab.settings, all[0].name).await.expect("tried"), Verdict::Good);
}

/// A snapshot of a tool's own on it, as it may be: nobody waits for that, and it goes when it can.
#[tokio::test]
async fn a_copy_that_cannot_be_freed_keeps_nobody_waiting() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    let project = lab.record.key.clone();
    let fork = ProjectRecord { key: project.fork(), ..lab.record.clone() };
    let other: Key = "p1111111111111111".parse().expect("a key");
    let trials = [project.trial(), other.trial()];
    for copy in [&fork.key, &trials[0], &trials[1]] {
        lab.volumes.fork(&project, copy, &described(&fork)).await.expect("a copy");
    }
    lab.volumes.set_held(&fork.key, true);
    lab.volumes.set_held(&trials[0], true);
    lab.effects.perform(Step::DestroyVolume, &fork, &lab.settings).await.expect("out of sight");
    lab.effects.forget(&fork.key).await.expect("forgotten");
    lab.effects.sweep_trials().await.expect("swept");
    let left = async || {
        let trash = lab.effects.trash().await.expect("listed");
        trash.into_iter().map(|entry| entry.name.key().clone()).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(left().await, [fork.key.clone(), trials[0].clone()].into());
    assert_eq!(lab.effects.volumes().await.expect("found").len(), 1, "the project's own");
    lab.volumes.set_held(&fork.key, false);
    tokio::time::pause();
    while left().await.contains(&fork.key) {
        tokio::time::sleep(Duration::from_mins(1)).await;
    }
    assert_eq!(left().await, [trials[0].clone()].into());
}
