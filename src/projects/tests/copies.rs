//! What copies of a cache leave behind, how many there may be, and what whoever wants one may expect.

use kiln_domain::cache::HistoryPolicy;
use kiln_domain::cache::fanout::FanOutPolicy;
use kiln_domain::health::HealthPolicy;
use kiln_domain::{Identity, Role};

use tokio::sync::{mpsc, watch};

use super::super::effects::{Effects as _, Survey};
use super::super::host_effects::properties;
use super::super::messages::{Connections, Status, WorkerLoad};
use super::super::registry::Desk;
use super::super::worker::Worker;
use super::past::{bench_with, build, eager, untrusted};
use super::*;
use crate::host::volumes::FoundVolume;

fn of_pull_request(name: &str) -> RouteOptions {
    let caller = Caller { untrusted: true, pull_request: Some(name.to_owned()), ..Caller::default() };
    RouteOptions { caller, ..RouteOptions::default() }
}

#[tokio::test]
async fn forks_that_come_at_once_are_bounded_too() {
    let forks = ForkBounds { per_project: 2, on_host: 3 };
    let config = ProjectsConfig { untrusted: Ok(()), forks, ..config(policy()) };
    let bench = Bench::with_config(ModelEffects::default(), config);
    let names: Vec<String> = (0..8).map(|number| number.to_string()).collect();
    let all = futures_util::future::join_all(names.iter().map(|name| untrusted(&bench, Some(name)))).await;
    assert_eq!(all.iter().filter(|routed| routed.is_ok()).count(), 2);
    assert!(all.iter().all(|routed| matches!(routed, Ok(_) | Err(RouteError::TooManyForks { .. }))), "{all:?}");
}

/// It was done, and nobody was told: what was known of the damaged cache is not about the next.
#[tokio::test]
async fn after_a_reset_that_seemed_to_fail_the_empty_cache_is_not_taken_for_damaged() {
    let bench = bench_with(Policy { history: HistoryPolicy { every: Duration::ZERO, ..eager().history }, ..policy() });
    build(&bench).await;
    bench.projects.set(&key(), |settings| settings.tier = Some(kiln_domain::Tier::Hot)).await.expect("hot");
    bench.until("it is up", async |b| b.phase().await == "warm").await;
    bench.effects.damage(&key(), "invalid database");
    bench.effects.kill(&key());
    bench.until("it is told", async |b| b.phase().await == "failed").await;
    bench.effects.set_mood(Mood::Lossy(Step::DiscardCache));
    bench.projects.reset(&key(), false).await.expect_err("the answer is lost");
    bench.effects.set_mood(Mood::Obedient);
    assert!(bench.route().await.ready);
    assert_eq!((bench.count(Step::DiscardCache), bench.count(Step::CreateVolume)), (1, 2));
}

#[tokio::test]
async fn members_of_two_projects_that_come_at_once_are_bounded_too() {
    let effects = ModelEffects::default();
    effects.set_cheap();
    let fan_out = FanOutPolicy { builds: 1, members: 1, on_host: 1, pressure: None };
    let bench = Bench::with_config(effects, ProjectsConfig { fan_out, ..config(policy()) });
    let other = || BuildSpec::new("github.com/org/other", "", "", "amd64").expect("valid");
    let route = async |spec: BuildSpec| bench.projects.route(spec, RouteOptions::default()).await.map(deliver);
    for spec in [spec(), other()] {
        route(spec).await.expect("routed");
    }
    let (one, two) = tokio::join!(route(spec()), route(other()));
    let keys = [one.expect("routed").key, two.expect("routed").key];
    let members = keys.iter().filter(|key| matches!(key.role(), Role::Member(_))).count();
    assert_eq!(members, 1, "{keys:?}");
}

/// It is written down, and whoever asked does not wait for that any more.
#[tokio::test]
async fn a_fork_whose_client_hangs_up_at_once_leaves_nothing() {
    let bench = bench_with(with_window(Duration::from_millis(50)));
    {
        let mut route = std::pin::pin!(bench.projects.route(spec(), of_pull_request("1")));
        assert!(futures_util::poll!(&mut route).is_pending());
    }
    bench.projects.store().ping().await.expect("everything before is on the disk");
    bench.until("nothing is left of it", async |b| b.projects.list().await.expect("listed").is_empty()).await;
}

/// Whoever came for the fork meanwhile must not be given its project's daemon (K7).
#[tokio::test]
async fn a_fork_that_was_let_go_of_is_taken_back_as_itself() {
    let bench = Bench::on(TempDir::new().expect("a directory"), Arc::new(ModelEffects::default()), config(policy()));
    let (shared, registry) = (bench.projects.shared.clone(), bench.projects.registry.clone());
    let identity = Identity::pull_request(spec(), "12").expect("a name");
    let now = kiln_domain::Timestamp::from_millis(1_800_000_000_000);
    let created = shared.store.create_project(&identity, shared.addresses, now).await.expect("written down");
    let (own_mailbox, mailbox) = mpsc::channel(1);
    let unread = Status { phase: None, reason: String::new(), step: None, queue: None, leases: 0, pending: None };
    let (status, _) = watch::channel(unread);
    let (connections, load) = (Connections::default(), WorkerLoad::default());
    let desk = Desk { mailbox, own_mailbox, status, connections, load };
    let mut worker = Worker::new(shared.clone(), registry, desk, created.record, Vec::new());
    assert!(worker.let_go().await && worker.take_back().await);
    let there = shared.store.projects().await.expect("read").into_iter().map(|record| record.identity());
    assert_eq!(there.collect::<Vec<_>>(), [identity]);
}

/// Kiln was killed before its worker was there.
#[tokio::test]
async fn a_fork_that_was_only_written_down_goes_with_the_next_start() {
    let config = ProjectsConfig { untrusted: Ok(()), ..config(with_window(Duration::from_millis(50))) };
    let bench = Bench::on(TempDir::new().expect("a directory"), Arc::new(ModelEffects::default()), config);
    let (pool, now) = (bench.projects.config.addresses, kiln_domain::Timestamp::from_millis(1_800_000_000_000));
    bench.projects.store().create_project(Identity::fork(spec()), pool, now).await.expect("written down");
    drop(bench.projects.start(bench.running.clone()).await.expect("the store can be read"));
    bench.until("nothing is left of it", async |b| b.projects.list().await.expect("listed").is_empty()).await;
}

/// What Kiln had given up on was done when nothing else of it was left.
#[tokio::test]
async fn a_copy_that_is_nobody_s_any_more_is_removed_and_an_orphan_of_a_project_is_not() {
    let bench = bench_with(policy());
    build(&bench).await;
    let at = "127.88.0.77".parse().expect("an address");
    let fork = Identity::pull_request(spec(), "7").expect("a name");
    let copy = kiln_domain::ProjectRecord::of(fork, at, kiln_domain::Timestamp::EPOCH);
    let other = BuildSpec::new("github.com/org/other", "", "", "amd64").expect("valid");
    let project = kiln_domain::ProjectRecord::new(other, at, kiln_domain::Timestamp::EPOCH);
    bench.effects.perform(Step::CloneVolume, &copy, &Settings::default()).await.expect("done late");
    let found = |record: &kiln_domain::ProjectRecord| FoundVolume {
        name: format!("live/{}", record.key),
        key: Some(record.key.clone()),
        properties: properties(record),
    };
    bench.effects.set_found(Survey { instances: Vec::new(), volumes: vec![found(&copy), found(&project)] });
    let bench = bench.restart().await;
    let removed = (copy.key.clone(), Step::DestroyVolume);
    bench.until("the copy is removed", async |b| b.effects.done().contains(&removed)).await;
    let known = async |b: &Bench, key: &Key| b.projects.store().project(key).await.expect("read").is_some();
    bench.until("and forgotten", async |b| !known(b, &copy.key).await).await;
    assert!(!known(&bench, &project.key).await, "a project's cache is touched only by an explicit verb");
    assert!(bench.effects.done().iter().all(|(key, _)| *key != project.key));
}

#[tokio::test]
async fn whoever_wants_a_copy_that_does_not_get_away_is_told_in_time() {
    let policy = with_window(Duration::from_millis(20));
    let route_wait = Duration::from_secs(2);
    let config = ProjectsConfig { untrusted: Ok(()), route_wait, ..config(policy) };
    let bench = Bench::with_config(ModelEffects::default(), config);
    let first = untrusted(&bench, Some("1")).await.expect("routed");
    bench.effects.set_mood(Mood::Failing(Step::DestroyVolume));
    assert!(bench.projects.complete(&first.key, &token(&first)).await.expect("asked"));
    bench
        .until("it is leaving", async |b| {
            b.projects.show(&first.key).await.expect("shown").is_some_and(|view| view.phase == "removing")
        })
        .await;
    let asked = tokio::time::Instant::now();
    let refused = untrusted(&bench, Some("1")).await;
    assert!(matches!(refused, Err(RouteError::Failed { retryable: true, .. })), "{refused:?}");
    assert!(asked.elapsed() < 2 * route_wait, "{:?}", asked.elapsed());
}

/// Asked how it is all the time.
fn watched(window: Duration) -> Policy {
    let soon = Duration::from_millis(10);
    let policy = with_window(window);
    Policy { health: HealthPolicy { probe_every: soon, ask_again: soon, ..policy.health }, ..policy }
}

async fn asked_for(bench: &Bench, name: &str, wait: Duration) -> RouteResponse {
    let options = RouteOptions { wait: Some(wait), ..of_pull_request(name) };
    deliver(bench.projects.route(spec(), options).await.expect("leased"))
}

async fn told(bench: &Bench, key: &Key, kind: &str) -> bool {
    let (_, events) = bench.projects.why(key).await.expect("explained");
    events.iter().any(|event| event.kind == kind)
}

#[tokio::test]
async fn k7_a_fork_whose_isolation_nobody_can_tell_serves_nobody() {
    let bench = bench_with(policy());
    build(&bench).await;
    bench.effects.set_unproven(true);
    let refused = untrusted(&bench, Some("1")).await;
    assert!(matches!(refused, Err(RouteError::Failed { .. })), "{refused:?}");
    assert!(bench.route().await.ready, "of the project's own daemon nothing is asked");
    bench.effects.set_unproven(false);
    assert!(untrusted(&bench, Some("1")).await.expect("routed").ready);
}

#[tokio::test]
async fn k7_a_fork_whose_proof_cannot_be_renewed_gets_no_more_builds_though_the_host_cannot_be_looked_at() {
    let mut policy = watched(Duration::from_secs(900));
    policy.health.ask_again = Duration::from_secs(1);
    let bench = bench_with(policy);
    let fork = untrusted(&bench, Some("1")).await.expect("routed").key;
    bench.effects.set_mood(Mood::Blind);
    bench.effects.set_unproven(true);
    bench.until("it was asked in vain", async |b| told(b, &fork, "doubt").await).await;
    assert!(!asked_for(&bench, "1", Duration::from_millis(300)).await.ready);
    assert_eq!(bench.count(Step::StopInstance(Stop::Force)), 0, "nothing says that it leaks");
    bench.effects.set_unproven(false);
    bench.effects.set_mood(Mood::Obedient);
    assert!(untrusted(&bench, Some("1")).await.expect("routed").ready);
}

#[tokio::test]
async fn k7_a_fork_that_says_what_it_builds_has_proven_nothing() {
    let bench = bench_with(watched(Duration::from_millis(50)));
    bench.effects.set_builds(1);
    let build = untrusted(&bench, Some("1")).await.expect("routed");
    bench.effects.set_unproven(true);
    bench.effects.happen(&build.key);
    bench.projects.complete(&build.key, &token(&build)).await.expect("released");
    bench.until("it is asked before it is stopped", async |b| b.count(Step::CountBuilds) > 0).await;
    bench
        .until("a build runs in it", async |b| {
            b.projects
                .show(&build.key)
                .await
                .expect("shown")
                .is_some_and(|view| view.reason.contains("by its own account"))
        })
        .await;
    assert!(!asked_for(&bench, "1", Duration::ZERO).await.ready);
    bench.effects.set_unproven(false);
    assert!(untrusted(&bench, Some("1")).await.expect("routed").ready);
}

#[tokio::test]
async fn a_rule_that_keeps_projects_up_keeps_no_fork_of_theirs() {
    let settings = Settings { tier: Some(kiln_domain::Tier::Hot), ..Settings::default() };
    let rule = kiln_domain::settings::Rule { repo: "github.com/*".parse().expect("a pattern"), settings };
    let rules = Rules(vec![rule]);
    let bench = Bench::with_config(
        ModelEffects::default(),
        ProjectsConfig { untrusted: Ok(()), rules, ..config(with_window(Duration::from_millis(50))) },
    );
    let fork = untrusted(&bench, Some("1")).await.expect("routed");
    let hot = bench.projects.set(&fork.key, |settings| settings.tier = Some(kiln_domain::Tier::Hot)).await;
    assert!(matches!(&hot, Err(VerbError::Bad(error)) if error.to_string().contains("a copy of its cache")), "{hot:?}");
    assert!(bench.projects.complete(&fork.key, &token(&fork)).await.expect("released"));
    bench.until("nothing is left of it", async |b| b.projects.list().await.expect("listed").is_empty()).await;
}

#[tokio::test]
async fn a_copy_has_the_time_that_it_takes() {
    let slow = Bench::new(ModelEffects::default()).projects.shared.deadlines;
    let instant = bench_with(policy()).projects.shared.deadlines;
    for step in [Step::CloneVolume, Step::TakeSnapshot, Step::Rollback(kiln_domain::SnapshotName::new(1))] {
        assert!(slow.of(step) > Duration::from_mins(30), "{step:?}: longer than the storage gives itself");
        assert_eq!(instant.of(step), slow.of(Step::CreateVolume), "{step:?}");
    }
}

/// Whatever a trial has left: what stands in its way may be there for good.
#[tokio::test]
async fn snapshots_are_tried_out_though_something_of_a_trial_stays() {
    let bench = bench_with(eager());
    bench.effects.set_mood(Mood::Littered);
    build(&bench).await;
    bench
        .until("there is a good one", async |b| {
            let log = b.projects.cache_log(&key()).await.expect("a log");
            log.first().is_some_and(|snapshot| snapshot.verdict == kiln_domain::Verdict::Good)
        })
        .await;
}

#[tokio::test]
async fn what_cannot_be_freed_keeps_nothing_else_in_the_trash() {
    let bench = Bench::new(ModelEffects::default());
    let name = |number| crate::host::volumes::TrashName::new(key(), number);
    for number in 1..4 {
        bench.effects.throw_away(name(number), kiln_domain::Timestamp::EPOCH, 1);
    }
    bench.effects.hold(Some(name(1)));
    let error = bench.projects.empty_trash().await.expect_err("one stays");
    let told = error.to_string();
    assert!(told.contains("2 freed, and 1 not") && told.contains(&name(1).to_string()), "{told}");
    let left = bench.projects.trash().await.expect("listed");
    assert_eq!(left.into_iter().map(|(entry, _)| entry.name).collect::<Vec<_>>(), [name(1)]);
    bench.effects.hold(None);
    assert_eq!(bench.projects.empty_trash().await.expect("emptied"), 1);
}

#[tokio::test(start_paused = true)]
async fn measuring_all_caches_ends_however_many_cannot_be_measured() {
    let effects = Arc::new(ModelEffects::default());
    for number in 0..40 {
        let spec = BuildSpec::new(&format!("github.com/org/repo{number}"), "", "", "amd64").expect("valid");
        effects.put_on_disk(&Key::of(&spec), 1);
    }
    effects.set_unmeasurable();
    let bench = Bench::in_memory(effects, config(policy()));
    let began = tokio::time::Instant::now();
    let usages = bench.projects.cache_usages().await.expect("listed");
    assert!(began.elapsed() < Duration::from_secs(61), "{:?}", began.elapsed());
    assert_eq!(usages.len(), 40, "each is told of");
    assert!(usages.iter().all(|usage| usage.usage.is_none()));
    assert!(bench.effects.measured() <= 12, "few at a time");
}
