//! The past of a cache, and copies of it, on a model host.

use kiln_domain::admission::HostLoad;
use kiln_domain::cache::HistoryPolicy;
use kiln_domain::cache::fanout::FanOutPolicy;
use kiln_domain::{ProjectRecord, Snapshot, SnapshotName, Timestamp, Verdict};

use super::super::host_effects::properties;
use super::*;
use crate::host::volumes::TrashName;

const FIRST: SnapshotName = SnapshotName::new(1);

/// On storage with cheap snapshots, one after each build.
pub(super) fn eager() -> Policy {
    let history = HistoryPolicy { every: Duration::from_millis(1), ..HistoryPolicy::default() };
    Policy { history, ..policy() }
}

pub(super) fn bench_with(policy: Policy) -> Bench {
    let effects = ModelEffects::default();
    effects.set_cheap();
    let config = ProjectsConfig { untrusted: Ok(()), ..config(policy) };
    Bench::with_config(effects, config)
}

/// Routed and over.
pub(super) async fn build(bench: &Bench) {
    let build = bench.route().await;
    bench.projects.complete(&key(), &token(&build)).await.expect("released");
}

pub(super) async fn untrusted(bench: &Bench, pull_request: Option<&str>) -> Result<RouteResponse, RouteError> {
    let caller = Caller { untrusted: true, pull_request: pull_request.map(str::to_owned), ..Caller::default() };
    let options = RouteOptions { caller, ..RouteOptions::default() };
    let routed = tokio::time::timeout(PATIENCE, bench.projects.route(spec(), options)).await;
    routed.expect("an answer in time").map(deliver)
}

pub(super) async fn events(bench: &Bench, kind: &str) -> Vec<String> {
    let (_, events) = bench.projects.why(&key()).await.expect("explained");
    events.into_iter().filter(|event| event.kind == kind).map(|event| event.text).collect()
}

#[tokio::test]
async fn after_a_build_a_snapshot_is_taken_and_tried_out() {
    let bench = bench_with(eager());
    build(&bench).await;
    bench
        .until("there is a good one", async |b| {
            b.projects.cache_log(&key()).await.expect("a log").first().is_some_and(|s| s.verdict == Verdict::Good)
        })
        .await;
    bench.until("it is told", async |b| events(b, "snapshot").await == ["kiln-000001 was taken"]).await;
}

#[tokio::test]
async fn one_is_taken_by_hand_whatever_the_cadence() {
    let bench = bench_with(policy());
    assert!(matches!(bench.projects.snapshot(&key()).await, Err(VerbError::Unknown(_))));
    build(&bench).await;
    bench.until("the first is there", async |b| !b.effects.snapshots_of(&key()).is_empty()).await;
    let taken = bench.projects.snapshot(&key()).await.expect("taken");
    assert_eq!(taken.name, SnapshotName::new(2));
    bench.projects.stop(&key(), false).await.expect("stopped");
    bench.until("its worker has gone", async |b| b.projects.workers() == 0).await;
    assert_eq!(bench.projects.snapshot(&key()).await.expect("taken of one that sleeps").name, SnapshotName::new(3));
}

#[tokio::test]
async fn a_project_without_a_cache_has_none_to_take() {
    let bench = bench_with(eager());
    build(&bench).await;
    bench.projects.reset(&key(), false).await.expect("emptied");
    let refused = bench.projects.snapshot(&key()).await;
    assert!(matches!(&refused, Err(VerbError::NoCache(of)) if *of == key()), "{refused:?}");
}

#[tokio::test]
async fn a_snapshot_that_cannot_be_taken_disturbs_nothing() {
    let bench = bench_with(eager());
    bench.effects.set_mood(Mood::Failing(Step::TakeSnapshot));
    build(&bench).await;
    let refused = bench.projects.snapshot(&key()).await;
    assert!(matches!(&refused, Err(VerbError::Failed { text, .. }) if text.contains("take a snapshot")), "{refused:?}");
    assert_eq!(bench.phase().await, "warm");
    assert!(bench.route().await.ready);
}

#[tokio::test]
async fn a_cache_goes_back_and_the_daemon_is_drained_first() {
    let bench = bench_with(policy());
    let busy = bench.route().await;
    bench.projects.snapshot(&key()).await.expect("taken");
    let refused = bench.projects.rollback(&key(), Some(FIRST), false).await;
    assert!(matches!(&refused, Err(VerbError::Busy { .. })), "{refused:?}");
    bench.projects.complete(&key(), &token(&busy)).await.expect("released");
    let missing = bench.projects.rollback(&key(), Some(SnapshotName::new(77)), false).await;
    assert!(
        matches!(&missing, Err(VerbError::NoSnapshot { there, .. }) if there.contains("kiln-000001")),
        "{missing:?}"
    );
    assert_eq!(bench.count(Step::StopInstance(Stop::Graceful)), 0, "nothing was stopped for what does not exist");
    assert_eq!(bench.projects.rollback(&key(), Some(FIRST), false).await.expect("back"), FIRST);
    let tail: Vec<Step> = bench.steps().into_iter().filter(|step| !step.is_upkeep()).collect();
    assert_eq!(tail[tail.len() - 2..], [Step::StopInstance(Stop::Graceful), Step::Rollback(FIRST)]);
    bench
        .until("it is told", async |b| events(b, "rollback").await.concat().contains("gone back to kiln-000001"))
        .await;
    assert!(bench.route().await.ready);
}

#[tokio::test]
async fn by_force_it_goes_back_under_a_build_and_comes_up_again() {
    let bench = bench_with(policy());
    let _busy = bench.route().await;
    bench.projects.snapshot(&key()).await.expect("taken");
    bench.projects.rollback(&key(), Some(FIRST), true).await.expect("back");
    let steps = bench.steps();
    let at = |step| steps.iter().position(|done| *done == step).expect("done");
    assert!(at(Step::StopInstance(Stop::Force)) < at(Step::Rollback(FIRST)));
    bench.until("the lease has its daemon again", async |b| b.phase().await == "warm").await;
    assert_eq!(bench.count(Step::StartInstance), 2);
}

/// As one does that was given up on, and lands late.
#[tokio::test]
async fn a_cache_does_not_go_back_under_a_daemon_that_came_up_since_the_last_look() {
    let bench = bench_with(policy());
    build(&bench).await;
    bench.projects.snapshot(&key()).await.expect("taken");
    bench.effects.close_eyes();
    let projects = bench.projects.clone();
    let back = tokio::spawn(async move { projects.rollback(&key(), Some(FIRST), false).await });
    let stop = Step::StopInstance(Stop::Graceful);
    bench.until("it is stopped", async |b| b.count(stop) == 1).await;
    bench.effects.start_anew(&key());
    bench.effects.open_eyes();
    assert_eq!(back.await.expect("no panic").expect("back"), FIRST);
    assert_eq!(bench.count(stop), 2, "the other, too");
    assert_eq!(bench.steps().into_iter().rfind(|step| !step.is_upkeep()), Some(Step::Rollback(FIRST)));
}

/// The greater wish goes before, and the way back has nothing left to lead to.
#[tokio::test]
async fn a_way_back_that_a_removal_overtakes_is_not_said_to_be_done() {
    let bench = bench_with(policy());
    build(&bench).await;
    bench.projects.snapshot(&key()).await.expect("taken");
    bench.effects.gate.forget_permits(usize::MAX);
    let asked = async |count: usize| {
        bench.until("it was heard", async |b| events(b, "asked").await.len() == count).await;
    };
    let projects = bench.projects.clone();
    let back = tokio::spawn(async move { projects.rollback(&key(), Some(FIRST), false).await });
    asked(1).await;
    let projects = bench.projects.clone();
    let removal = tokio::spawn(async move { projects.remove(&key()).await });
    asked(2).await;
    bench.effects.gate.add_permits(100);
    removal.await.expect("no panic").expect("removed");
    let back = back.await.expect("no panic");
    assert!(matches!(&back, Err(VerbError::NoCache(of)) if *of == key()), "{back:?}");
    assert_eq!(bench.count(Step::Rollback(FIRST)), 0);
}

#[tokio::test]
async fn an_empty_cache_is_had_for_the_asking() {
    let bench = bench_with(policy());
    build(&bench).await;
    bench.projects.reset(&key(), false).await.expect("emptied");
    assert_eq!(bench.count(Step::DiscardCache), 1);
    bench.projects.reset(&key(), false).await.expect("empty already");
    assert_eq!(bench.count(Step::DiscardCache), 1);
    assert!(bench.route().await.ready);
    assert_eq!(bench.count(Step::CreateVolume), 2);
}

/// The worker stays for a lease whose daemon has no place, and has seen that there is no cache.
#[tokio::test]
async fn a_cache_that_comes_back_from_the_trash_is_not_taken_for_gone() {
    let bench = bench_with(policy());
    let _held = bench.route().await;
    bench.effects.set_load(HostLoad { storage: Some(99.0), ..HostLoad::default() });
    tokio::time::sleep(Duration::from_millis(1100)).await; // A reading of the host is good for a second.
    bench.projects.reset(&key(), true).await.expect("emptied");
    let name = TrashName::new(key(), 7);
    bench.effects.throw_away(name.clone(), Timestamp::EPOCH, 1);
    let record = ProjectRecord::new(spec(), Ipv4Addr::LOCALHOST, Timestamp::EPOCH);
    bench.effects.mark_in_trash(&name, properties(&record));
    bench.projects.restore(&name.to_string()).await.expect("restored");
    bench.projects.reset(&key(), true).await.expect("emptied again");
    assert_eq!(bench.count(Step::DiscardCache), 2, "also of what came back");
}

/// It was done, and nobody was told: those that were newer are not there any more, and what is left is the newest.
#[tokio::test]
async fn after_a_way_back_that_seemed_to_fail_the_one_it_went_to_is_not_given_up() {
    let by_hand = HistoryPolicy { every: Duration::ZERO, keep_for: Duration::MAX, ..eager().history };
    let bench = bench_with(Policy { history: by_hand, ..policy() });
    build(&bench).await;
    for number in 1..=3 {
        assert_eq!(bench.projects.snapshot(&key()).await.expect("taken").name, SnapshotName::new(number));
    }
    bench.effects.set_mood(Mood::Lossy(Step::Rollback(FIRST)));
    let lost = bench.projects.rollback(&key(), Some(FIRST), false).await;
    assert!(matches!(&lost, Err(VerbError::Failed { .. })), "{lost:?}");
    bench.effects.set_mood(Mood::Obedient);
    bench.projects.thin(&key(), HistoryPolicy::LEAST).await.expect("looked through");
    let left: Vec<SnapshotName> = bench.effects.snapshots_of(&key()).iter().map(|snapshot| snapshot.name).collect();
    assert!(left.contains(&FIRST), "{left:?}");
}

#[tokio::test]
async fn a_damaged_cache_goes_back_by_itself_and_whoever_waits_gets_the_daemon() {
    let bench = bench_with(eager());
    build(&bench).await;
    bench
        .until("there is a good one", async |b| {
            b.effects.snapshots_of(&key()).first().is_some_and(|s| s.verdict == Verdict::Good)
        })
        .await;
    bench.projects.stop(&key(), false).await.expect("stopped");
    bench.effects.damage(&key(), "panic: page 3 already freed");
    assert!(bench.route().await.ready, "the request that found the damage is served");
    assert_eq!(bench.steps().iter().filter(|step| matches!(step, Step::Rollback(_))).count(), 1);
    let told = "was damaged (panic: page 3 already freed)";
    bench.until("it is told", async |b| events(b, "rollback").await.concat().contains(told)).await;
}

/// A cache at rest that no daemon can open, with a good snapshot to go back to.
async fn damaged_since_it_was_good() -> Bench {
    let bench = bench_with(Policy { history: HistoryPolicy { every: Duration::ZERO, ..eager().history }, ..policy() });
    build(&bench).await;
    let good = Snapshot { name: FIRST, taken: Timestamp::EPOCH, verdict: Verdict::Good, bytes: None };
    bench.effects.set_snapshots(&key(), vec![good]);
    bench.projects.stop(&key(), false).await.expect("stopped");
    bench.effects.damage(&key(), "invalid database");
    bench
}

/// It was done, and nobody was told: what it is now is not taken for damaged, and goes back no second time within the hour.
#[tokio::test]
async fn a_rescue_that_seemed_to_fail_is_not_done_again_and_counts() {
    let bench = damaged_since_it_was_good().await;
    bench.effects.set_mood(Mood::Lossy(Step::Rollback(FIRST)));
    bench.try_route().await.expect_err("the answer is lost");
    bench.effects.set_mood(Mood::Obedient);
    build(&bench).await;
    assert_eq!(bench.count(Step::Rollback(FIRST)), 1, "a daemon opens it");
    bench.until("it is told", async |b| events(b, "rollback").await.concat().contains("(invalid database)")).await;
    bench.projects.stop(&key(), false).await.expect("stopped");
    bench.effects.damage(&key(), "invalid database");
    let error = bench.try_route().await.expect_err("refused").to_string();
    assert!(error.contains("going back did not help"), "{error}");
    assert_eq!(bench.count(Step::Rollback(FIRST)), 1);
}

/// It was not done: the next start says so again, and whoever waits for it is served.
#[tokio::test]
async fn a_rescue_that_failed_is_tried_again_when_a_daemon_says_so_again() {
    let bench = damaged_since_it_was_good().await;
    bench.effects.set_mood(Mood::Failing(Step::Rollback(FIRST)));
    bench.try_route().await.expect_err("it fails");
    bench.effects.set_mood(Mood::Obedient);
    assert!(bench.route().await.ready);
    assert_eq!(bench.count(Step::Rollback(FIRST)), 1, "done once, and tried twice");
}

/// What an admin does by hand is not what Kiln does by itself at most once an hour.
#[tokio::test]
async fn a_way_back_by_hand_does_not_count_as_a_rescue() {
    let bench = bench_with(Policy { history: HistoryPolicy { every: Duration::ZERO, ..eager().history }, ..policy() });
    let _held = bench.route().await;
    let snapshot = |verdict| Snapshot { name: FIRST, taken: Timestamp::EPOCH, verdict, bytes: None };
    bench.effects.set_snapshots(&key(), vec![snapshot(Verdict::Unchecked)]);
    bench.effects.damage(&key(), "invalid database");
    bench.effects.kill(&key());
    bench.until("nothing is good enough to go back to", async |b| b.phase().await == "failed").await;
    bench.projects.rollback(&key(), Some(FIRST), true).await.expect("back by hand");
    bench.until("the lease has its daemon again", async |b| b.phase().await == "warm").await;
    bench.effects.set_snapshots(&key(), vec![snapshot(Verdict::Good)]);
    bench.effects.damage(&key(), "invalid database");
    bench.effects.kill(&key());
    bench.until("it is taken back", async |b| b.count(Step::Rollback(FIRST)) == 2).await;
    assert!(bench.route().await.ready);
}

#[tokio::test]
async fn without_a_good_snapshot_damage_is_told_with_its_remedies() {
    let bench = bench_with(Policy { history: HistoryPolicy { every: Duration::ZERO, ..eager().history }, ..policy() });
    build(&bench).await;
    bench.projects.stop(&key(), false).await.expect("stopped");
    bench.effects.damage(&key(), "invalid database");
    let error = bench.try_route().await.expect_err("refused").to_string();
    assert!(error.contains("invalid database") && error.contains("kiln cache reset"), "{error}");
    bench.projects.reset(&key(), false).await.expect("emptied");
    assert!(bench.route().await.ready);
}

/// The look that follows finds a configuration that is current, and the reserve is of no use to a daemon that met the end.
#[tokio::test]
async fn a_daemon_whose_full_volume_was_lent_the_reserve_is_started_anew() {
    const GIB: u64 = 1 << 30;
    let defaults = Settings { volume_bytes: Some(10 * GIB), volume_max_bytes: Some(10 * GIB), ..Settings::default() };
    let bench = Bench::with_config(ModelEffects::default(), ProjectsConfig { defaults, ..config(policy()) });
    bench.effects.set_fill(10 * GIB, 10 * GIB);
    let busy = bench.route().await;
    bench.until("the reserve is lent", async |b| b.count(Step::Resize(11 * GIB)) == 1).await;
    bench.effects.happen(&key());
    let pending = async |b: &Bench| b.projects.show(&key()).await.expect("shown").expect("there").pending.concat();
    bench.until("it is told", async |b| pending(b).await.contains("which was full")).await;
    assert_eq!(bench.count(Step::StopInstance(Stop::Graceful)), 0, "not under a build");
    bench.projects.complete(&key(), &token(&busy)).await.expect("released");
    bench.until("it is started anew", async |b| b.count(Step::AwaitServing) == 2).await;
    bench.until("it is told no more", async |b| pending(b).await.is_empty()).await;
    assert_eq!(bench.count(Step::StopInstance(Stop::Graceful)), 1);
}

#[tokio::test]
async fn each_pull_request_has_a_copy_of_its_own_that_goes_with_it() {
    let bench = bench_with(with_window(Duration::from_millis(50)));
    build(&bench).await;
    let (one, other) =
        (untrusted(&bench, Some("1")).await.expect("routed"), untrusted(&bench, Some("2")).await.expect("routed"));
    let nameless = untrusted(&bench, None).await.expect("routed");
    assert_eq!(nameless.key, key().fork());
    assert!(one.key != other.key && one.key.project() == key() && one.server_name.contains(one.key.as_str()));
    let again = untrusted(&bench, Some("1")).await.expect("routed");
    assert_eq!(again.key, one.key);
    assert_eq!(bench.count(Step::CloneVolume), 3);
    assert_eq!(bench.count(Step::CreateVolume), 1);
    let fork = one.key.clone();
    for build in [one, again, other, nameless] {
        bench.projects.complete(&build.key, &token(&build)).await.expect("released");
    }
    bench.until("nothing is left of them", async |b| b.projects.list().await.expect("listed").len() == 1).await;
    assert_eq!(bench.count(Step::DestroyVolume), 3);
    assert_eq!(bench.count(Step::Discard), 0, "a copy does not go through the trash");
    let journal = bench.projects.store().events_of(&fork, 20).await.expect("read");
    let removed: Vec<_> =
        journal.iter().filter(|event| event.kind == "removed").map(|event| event.text.as_str()).collect();
    assert_eq!(removed, ["nobody needs it any more; its copy of the cache was freed"]);
}

#[tokio::test]
async fn forks_are_bounded_for_each_project() {
    let effects = ModelEffects::default();
    let forks = ForkBounds { per_project: 2, on_host: 3 };
    let bench = Bench::with_config(effects, ProjectsConfig { untrusted: Ok(()), forks, ..config(policy()) });
    for number in ["1", "2"] {
        untrusted(&bench, Some(number)).await.expect("routed");
    }
    let refused = untrusted(&bench, Some("3")).await;
    assert!(
        matches!(&refused, Err(RouteError::TooManyForks { text }) if text.contains("2 forks of this project")),
        "{refused:?}"
    );
    untrusted(&bench, Some("2")).await.expect("one that is there goes on");
    assert_eq!(bench.projects.list().await.expect("listed").len(), 2, "the refused one leaves nothing");
    let mut crowd = JoinSet::new();
    for number in 10..200 {
        let projects = bench.projects.clone();
        let other = BuildSpec::new("github.com/other/repo", "", "", "amd64").expect("valid");
        let caller = Caller { pull_request: Some(number.to_string()), ..Caller::untrusted() };
        let options = RouteOptions { caller, ..RouteOptions::default() };
        crowd.spawn(async move { projects.route(other, options).await.map(deliver).is_ok() });
    }
    let let_in = crowd.join_all().await.into_iter().filter(|routed| *routed).count();
    assert_eq!(let_in, 1, "all at once are counted as they come");
    for bad in ["a b", "1\n2", &"1".repeat(200)] {
        assert!(matches!(untrusted(&bench, Some(bad)).await, Err(RouteError::PullRequest(_))), "{bad:?}");
    }
}

fn spread(builds: usize, members: u16) -> Bench {
    let effects = ModelEffects::default();
    effects.set_cheap();
    let fan_out = FanOutPolicy { builds, members, on_host: 8, pressure: None };
    let window = Duration::from_millis(50);
    Bench::with_config(effects, ProjectsConfig { fan_out, ..config(with_window(window)) })
}

#[tokio::test]
async fn a_burst_is_spread_over_as_many_daemons_as_there_may_be_and_they_go_again() {
    let bench = spread(2, 2);
    let first = bench.route().await;
    let mut routes = JoinSet::new();
    for _ in 0..7 {
        let projects = bench.projects.clone();
        routes
            .spawn(async move { projects.route(spec(), RouteOptions::default()).await.map(deliver).expect("routed") });
    }
    let mut answers = routes.join_all().await;
    answers.push(first);
    let on = |key: &Key| answers.iter().filter(|answer| answer.key == *key).count();
    let (one, two) = (key().clone_number(1), key().clone_number(2));
    assert!(on(&key()) >= 2 && on(&one) >= 2 && on(&two) >= 2, "{answers:?}");
    assert_eq!(on(&key()) + on(&one) + on(&two), 8, "and no more");
    assert!(answers.iter().all(|answer| answer.server_name.contains(answer.key.as_str())));
    for answer in &answers {
        assert!(bench.projects.complete(&answer.key, &token(answer)).await.expect("released"));
    }
    bench.until("the members are gone", async |b| b.projects.list().await.expect("listed").len() == 1).await;
    assert_eq!(bench.count(Step::DestroyVolume), 2, "what they learnt goes with them");
    assert_eq!(bench.projects.list().await.expect("listed")[0].key, key().as_str());
}

#[tokio::test]
async fn a_daemon_under_pressure_is_saturated_with_one_build() {
    let effects = ModelEffects::default();
    effects.set_cheap();
    effects.press(&key(), 60.0);
    let fan_out = FanOutPolicy { builds: 4, members: 1, on_host: 8, pressure: Some(60.0) };
    let bench = Bench::with_config(effects, ProjectsConfig { fan_out, ..config(policy()) });
    assert_eq!(bench.route().await.key, key(), "with no build it is not asked");
    assert_eq!(bench.route().await.key, key().clone_number(1));
    bench.effects.press(&key(), 59.9);
    bench.effects.press(&key().clone_number(1), 60.0);
    assert_eq!(bench.route().await.key, key());
}

#[tokio::test]
async fn a_branch_goes_where_it_went_before() {
    let bench = spread(2, 2);
    let on = async |branch: &str| {
        let caller = Caller { branch: Some(branch.to_owned()), ..Caller::default() };
        let options = RouteOptions { caller, ..RouteOptions::default() };
        bench.projects.route(spec(), options).await.map(deliver).expect("routed")
    };
    let builds = [on("main").await, on("main").await, on("feature").await];
    assert_eq!(builds[2].key, key().clone_number(1));
    bench.projects.complete(&key(), &token(&builds[0])).await.expect("released");
    assert_eq!(on("feature").await.key, key().clone_number(1), "although the primary has room");
    assert_eq!(on("other").await.key, key());
}

#[tokio::test]
async fn a_member_that_cannot_be_had_is_done_without() {
    let bench = spread(1, 2);
    let first = bench.route().await;
    bench.effects.set_mood(Mood::Failing(Step::CloneVolume));
    let second = bench.route().await;
    assert_eq!((first.key, second.key), (key(), key()));
    assert!(second.ready);
}

#[tokio::test]
async fn a_route_that_waits_on_a_member_is_resumed_there() {
    let bench = spread(1, 2);
    let _first = bench.route().await;
    let options = || RouteOptions { wait: Some(Duration::ZERO), ..RouteOptions::default() };
    let waiting = bench.projects.route(spec(), options()).await.map(deliver).expect("a lease");
    assert_eq!(waiting.key, key().clone_number(1));
    let resume = Some(token(&waiting));
    let options = RouteOptions { resume, wait: Some(PATIENCE), ..RouteOptions::default() };
    let ready = bench.projects.route(spec(), options).await.map(deliver).expect("resumed");
    assert_eq!((ready.key.clone(), ready.ready), (key().clone_number(1), true));
    let stranger = BuildSpec::new("github.com/other/repo", "", "", "amd64").expect("valid");
    let options = RouteOptions { resume: Some(token(&ready)), ..RouteOptions::default() };
    assert!(matches!(bench.projects.route(stranger, options).await.err(), Some(RouteError::Gone)));
}

#[tokio::test]
async fn a_fork_that_is_not_kept_apart_serves_nobody_and_is_stopped_by_force() {
    let bench = bench_with(policy());
    build(&bench).await;
    bench.effects.set_mood(Mood::Leaky);
    let refused = untrusted(&bench, Some("1")).await;
    assert!(
        matches!(&refused, Err(RouteError::Failed { text, retryable: false, .. }) if text.contains("metadata")),
        "{refused:?}"
    );
    bench.until("nothing is left of it", async |b| b.projects.list().await.expect("listed").len() == 1).await;
    assert_eq!(bench.count(Step::StopInstance(Stop::Force)), 1);
    bench.effects.set_mood(Mood::Obedient);
    assert!(untrusted(&bench, Some("1")).await.expect("routed").ready);
}
