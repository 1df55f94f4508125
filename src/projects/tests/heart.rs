//! What keeps builds and caches safe: each test is named after what it makes sure of, and, where it is the answer to a
//! failure seen elsewhere, after its number in the list that docs/failure-modes.md keeps.

use kiln_domain::health::HealthPolicy;
use kiln_domain::settings::{RepoPattern, Rule};
use kiln_domain::{Phase, Tier};

use super::*;

pub(super) fn short_wait(wait: Duration) -> RouteOptions {
    RouteOptions { wait: Some(wait), ..RouteOptions::default() }
}

pub(super) fn resumed(response: &RouteResponse, wait: Duration) -> RouteOptions {
    RouteOptions { resume: Some(token(response)), ..short_wait(wait) }
}

pub(super) fn spec_of(number: usize) -> BuildSpec {
    BuildSpec::new(&format!("github.com/org/repo{number}"), "", "", "amd64").expect("valid")
}

impl Bench {
    pub(super) async fn complete(&self, build: &RouteResponse) -> bool {
        self.projects.complete(&key(), &token(build)).await.expect("asked")
    }

    pub(super) async fn idle_after_a_build(&self) {
        let build = self.route().await;
        assert!(self.complete(&build).await);
        self.projects.stop(&key(), false).await.expect("stopped");
    }

    pub(super) async fn why(&self) -> String {
        let (explanation, events) = self.projects.why(&key()).await.expect("explained");
        let events: Vec<String> = events.into_iter().map(|event| event.text).collect();
        format!("{}\n{}\n{}", explanation.headline, explanation.because.join("\n"), events.join("\n"))
    }
}

// === Leases

#[tokio::test]
async fn f40_a_route_that_does_not_wait_answers_with_a_lease_and_is_finished_by_short_polls() {
    let bench = Bench::new(ModelEffects::gated());
    let first = deliver(bench.projects.route(spec(), short_wait(Duration::ZERO)).await.expect("leased"));
    assert!(!first.ready && first.generation == 0);
    assert_eq!(first.lease_id.as_deref(), Some(token(&first).hash().as_str()));
    assert_eq!(bench.leases().await, 1, "the lease is on disk before the answer");
    bench.until("it is on its way without anybody waiting", async |b| b.phase().await == "provisioning").await;
    let poll = bench.projects.route(spec(), resumed(&first, Duration::from_millis(20))).await.expect("polled");
    let poll = deliver(poll);
    let status = poll.status.expect("where it stands");
    assert_eq!((poll.ready, poll.build_id, status.phase.as_str()), (false, first.build_id.clone(), "provisioning"));
    bench.effects.gate.add_permits(100);
    let last = bench.projects.route(spec(), resumed(&first, Duration::from_secs(10))).await.expect("polled");
    let last = deliver(last);
    assert!(last.ready && last.generation == 1 && last.status.is_none());
    assert_eq!(bench.leases().await, 1, "still the one");
    assert!(bench.complete(&first).await);
    let gone = bench.projects.route(spec(), resumed(&first, Duration::ZERO)).await.map(deliver);
    assert!(matches!(gone, Err(RouteError::Gone)), "{gone:?}");
}

#[tokio::test]
async fn what_somebody_has_to_mend_is_told_at_once_however_short_the_polls() {
    let bench = Bench::new(ModelEffects::default());
    bench.effects.set_mood(Mood::Failing(Step::StartInstance));
    let broken = bench.projects.route(spec(), short_wait(Duration::from_secs(10))).await.map(deliver);
    assert!(matches!(&broken, Err(RouteError::Failed { retryable: false, .. })), "{broken:?}");
    bench.until("its lease is released: nobody knows it", async |b| b.leases().await == 0).await;
}

#[tokio::test]
async fn f2_a_lease_made_ahead_whose_answer_is_lost_is_released() {
    let bench = Bench::new(ModelEffects::gated());
    let routed = bench.projects.route(spec(), short_wait(Duration::ZERO)).await.expect("leased");
    drop(routed);
    bench.until("the lease is released", async |b| b.leases().await == 0).await;
}

#[tokio::test]
async fn a_poll_that_is_dropped_leaves_the_lease_to_its_client() {
    let bench = Bench::new(ModelEffects::default());
    let first = deliver(bench.projects.route(spec(), short_wait(Duration::ZERO)).await.expect("leased"));
    drop(bench.projects.route(spec(), resumed(&first, Duration::from_secs(10))).await.expect("polled"));
    bench.until("it is warm", async |b| b.phase().await == "warm").await;
    assert_eq!(bench.leases().await, 1);
}

#[tokio::test]
async fn a_renewed_lease_outlives_its_grace_and_not_its_end() {
    let (grace, end) = (Duration::from_millis(300), Duration::from_millis(900));
    let lease = LeasePolicy { grace, max_build_age: end };
    let bench = Bench::with_policy(ModelEffects::default(), Policy { lease, ..with_window(Duration::ZERO) });
    let build = bench.route().await;
    let began = tokio::time::Instant::now();
    while began.elapsed() < Duration::from_millis(650) {
        let lease = bench.projects.renew(&token(&build)).await.expect("renewed");
        assert!(lease.renewed >= lease.created && lease.renewed <= lease.expires);
        assert_eq!(bench.phase().await, "warm");
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    bench.until("its end has come", async |b| b.leases().await == 0).await;
    assert!(bench.projects.renew(&token(&build)).await.is_err(), "nothing is renewed after its end");
    bench.until("it is stopped", async |b| b.phase().await == "idle").await;
}

#[tokio::test]
async fn c11_past_the_limit_a_new_route_is_refused_and_no_live_lease_is_dropped() {
    let bench = Bench::with_policy(ModelEffects::default(), Policy { max_leases: 3, ..policy() });
    let builds = [bench.route().await, bench.route().await, bench.route().await];
    let refused = bench.try_route().await;
    assert!(matches!(&refused, Err(RouteError::TooManyLeases { live: 3, limit: 3, .. })), "{refused:?}");
    assert_eq!(bench.leases().await, 3);
    for build in &builds {
        assert!(bench.complete(build).await, "each can still be released");
    }
    bench.route().await;
}

#[tokio::test]
async fn f30_l17_a_release_of_what_is_unknown_makes_nothing() {
    let bench = Bench::new(ModelEffects::default());
    let token = "00112233aabbccdd".parse().expect("a token");
    for number in 0..50 {
        assert!(!bench.projects.complete(&Key::of(&spec_of(number)), &token).await.expect("asked"));
    }
    assert_eq!((bench.projects.workers(), bench.projects.list().await.expect("listed").len()), (0, 0));
    assert!(bench.projects.renew(&token).await.is_err());
}

#[tokio::test]
async fn f7_the_nameless_release_takes_the_oldest() {
    let bench = Bench::new(ModelEffects::default());
    let (first, second) = (bench.route().await, bench.route().await);
    assert!(bench.projects.complete_oldest(&key()).await.expect("released"));
    assert!(!bench.complete(&first).await && bench.complete(&second).await);
    assert!(!bench.projects.complete_oldest(&key()).await.expect("none left"));
}

// === Stopping

#[tokio::test]
async fn l5_a_daemon_in_which_a_build_runs_by_another_way_is_not_stopped() {
    let bench = Bench::with_window(ModelEffects::default(), Duration::from_millis(30));
    bench.effects.set_builds(1);
    let build = bench.route().await;
    assert!(bench.complete(&build).await);
    bench.until("it was asked", async |b| b.count(Step::CountBuilds) > 0).await;
    let refused = bench.projects.stop(&key(), false).await;
    assert!(
        matches!(&refused, Err(VerbError::Busy { need, .. }) if need.contains("1 build(s) run in it")),
        "{refused:?}"
    );
    assert_eq!((bench.phase().await.as_str(), bench.count(Step::StopInstance(Stop::Graceful))), ("warm", 0));
    bench.effects.set_builds(0);
    bench.projects.stop(&key(), false).await.expect("stopped");
    assert_eq!(bench.phase().await, "idle");
}

#[tokio::test]
async fn an_admin_s_word_stops_a_busy_daemon_and_nothing_else_does() {
    let bench = Bench::new(ModelEffects::default());
    bench.route().await;
    assert!(matches!(bench.projects.stop(&key(), false).await, Err(VerbError::Busy { .. })));
    bench.projects.stop(&key(), true).await.expect("stopped");
    assert_eq!(bench.count(Step::StopInstance(Stop::Force)), 1);
    bench.until("the lease brings it back", async |b| b.phase().await == "warm").await;
    assert_eq!(bench.leases().await, 1);
}

#[tokio::test]
async fn f8_c2_a_build_that_comes_while_it_is_asked_gets_the_daemon_that_stays() {
    let bench = Bench::new(ModelEffects::gated());
    bench.effects.gate.add_permits(5);
    let build = bench.route().await;
    assert!(bench.complete(&build).await);
    let stopping = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.stop(&key(), false).await }
    });
    bench.until("it drains", async |b| b.phase().await == "draining").await;
    let routed = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.route(spec(), RouteOptions::default()).await.map(deliver) }
    });
    bench.until("the worker has heard of it", async |b| b.projects.store().figures().writes > 0).await;
    tokio::time::timeout(Duration::from_millis(100), std::future::pending::<()>()).await.expect_err("time passes");
    bench.effects.gate.add_permits(1);
    assert_eq!(routed.await.expect("joined").expect("routed").generation, 1, "the drain was called off");
    assert!(matches!(stopping.await.expect("joined"), Err(VerbError::Busy { .. })));
}

// === Hot, settings, rolls

#[tokio::test]
async fn l12_a_hot_project_is_kept_up_and_comes_back_after_a_crash() {
    let bench = Bench::with_window(ModelEffects::default(), Duration::ZERO);
    bench.idle_after_a_build().await;
    bench.projects.set(&key(), |own| own.tier = Some(Tier::Hot)).await.expect("set");
    bench.until("it is up without a request", async |b| b.phase().await == "warm").await;
    bench.effects.kill(&key());
    bench.until("it is back", async |b| b.count(Step::StartInstance) == 3).await;
    let bench = bench.restart().await;
    bench.until("and after a restart of Kiln it still is", async |b| b.projects.workers() == 1).await;
    bench.projects.set(&key(), |own| own.tier = None).await.expect("set");
    bench.projects.stop(&key(), false).await.expect("stopped");
    assert_eq!(bench.phase().await, "idle");
}

#[tokio::test]
async fn c12_l19_settings_of_an_existing_project_change_and_bad_ones_change_nothing() {
    let bench = Bench::new(ModelEffects::default());
    bench.idle_after_a_build().await;
    bench.projects.set(&key(), |own| own.idle_window = Some(Duration::from_secs(7))).await.expect("set");
    let stored = |bench: &Bench| bench.projects.store().clone();
    let settings = async |bench: &Bench| stored(bench).project(&key()).await.expect("read").expect("there").settings;
    assert_eq!(settings(&bench).await.idle_window, Some(Duration::from_secs(7)));
    for bad in [
        bench.projects.set(&key(), |own| own.tier = Some(Tier::Hot)).await,
        bench.projects.set(&key(), |own| own.cpus = Some(0)).await,
    ] {
        assert!(matches!(bad, Err(VerbError::Bad(_))), "{bad:?}");
    }
    assert_eq!(settings(&bench).await, Settings { idle_window: Some(Duration::from_secs(7)), ..Settings::default() });
    let unknown = bench.projects.set(&Key::of(&spec_of(1)), |_| ()).await;
    assert!(matches!(unknown, Err(VerbError::Unknown(_))), "{unknown:?}");
}

#[tokio::test]
async fn a_rule_of_the_configuration_counts_for_the_repositories_it_names() {
    let repo: RepoPattern = "github.com/org/*".parse().expect("a pattern");
    let rule = Rule { repo, settings: Settings { tier: Some(Tier::Hot), ..Settings::default() } };
    let config = ProjectsConfig { rules: Rules(vec![rule]), ..config(with_window(Duration::ZERO)) };
    let bench = Bench::with_config(ModelEffects::default(), config);
    let build = bench.route().await;
    assert!(bench.complete(&build).await);
    bench.until("it is kept up", async |b| b.why().await.contains("the project is hot")).await;
    let view = bench.projects.show(&key()).await.expect("shown").expect("there");
    let tier = view.settings.expect("settings").tier;
    assert_eq!((tier.value.as_deref(), tier.origin), (Some("hot"), kiln_wire::Origin::Rule));
}

#[tokio::test]
async fn f9_an_outdated_daemon_is_rolled_when_quiet_and_held_while_a_build_counts_on_it() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    bench.effects.outdate(&key());
    bench.until("it is known", async |b| b.why().await.contains("out of date (the image)")).await;
    let view = bench.projects.show(&key()).await.expect("shown").expect("there");
    assert_eq!((view.phase.as_str(), view.pending.as_slice()), ("warm", ["the image".to_owned()].as_slice()));
    assert_eq!(bench.route().await.generation, 1, "others still go there");
    assert!(bench.projects.complete_oldest(&key()).await.expect("released"));
    assert!(bench.projects.complete_oldest(&key()).await.expect("released"));
    assert!(!bench.complete(&build).await);
    bench.until("it is rolled and up again", async |b| b.count(Step::AwaitServing) == 2).await;
    let made_anew =
        [Step::StopInstance(Stop::Graceful), Step::DestroyInstance, Step::CreateInstance, Step::StartInstance];
    let steps: Vec<Step> = bench.steps().into_iter().filter(|step| !step.only_asks()).collect();
    assert!(steps.windows(4).any(|window| window == made_anew), "{steps:?}");
    assert_eq!(bench.count(Step::CreateVolume), 1, "on its old cache");
    assert_eq!(bench.route().await.generation, 2);
}

#[tokio::test]
async fn f10_c3_a_silent_daemon_that_does_no_work_is_replaced_under_its_lease() {
    let health = HealthPolicy {
        probe_every: Duration::from_millis(20),
        ask_again: Duration::from_millis(20),
        wedged_after: Duration::from_millis(200),
        ..Policy::default().health
    };
    let bench = Bench::with_policy(ModelEffects::default(), Policy { health, ..policy() });
    bench.route().await;
    bench.effects.set_hanging(true);
    bench.until("it is called wedged", async |b| b.count(Step::StopInstance(Stop::Force)) == 1).await;
    bench.effects.set_hanging(false);
    bench.until("it is back", async |b| b.count(Step::AwaitServing) == 2).await;
    assert_eq!((bench.route().await.generation, bench.leases().await), (2, 2));
    assert!(bench.why().await.contains("it is wedged"), "{}", bench.why().await);
}

// === The door

// === Removal

#[tokio::test]
async fn a_removed_project_is_forgotten_and_a_new_one_begins_anew() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    assert!(matches!(bench.projects.remove(&key()).await, Err(VerbError::Busy { .. })));
    assert!(bench.complete(&build).await);
    bench.projects.remove(&key()).await.expect("removed");
    assert_eq!((bench.phase().await.as_str(), bench.count(Step::Discard)), ("none", 1));
    bench.until("its worker has gone", async |b| b.projects.workers() == 0).await;
    assert_eq!((bench.route().await.generation, bench.count(Step::CreateVolume)), (1, 2));
}

#[tokio::test]
async fn l2_a_removal_that_failed_half_way_goes_on_after_a_restart() {
    let bench = Bench::new(ModelEffects::default());
    bench.idle_after_a_build().await;
    bench.effects.set_mood(Mood::Failing(Step::Discard));
    assert!(matches!(bench.projects.remove(&key()).await, Err(VerbError::Failed { .. })));
    let stored = bench.projects.store().project(&key()).await.expect("read").expect("there");
    assert_eq!(stored.phase, Phase::Removing);
    assert!(bench.try_route().await.is_err(), "nothing is routed to what goes");
    bench.effects.set_mood(Mood::Obedient);
    let bench = bench.restart().await;
    bench.until("it is gone", async |b| b.phase().await == "none").await;
}

// === What the host does to us

#[tokio::test]
async fn a_full_disk_is_told_as_such_to_a_route_and_to_an_admin() {
    let bench = Bench::new(ModelEffects::default());
    bench.effects.set_mood(Mood::Full(Step::CreateVolume));
    let refused = bench.try_route().await;
    assert!(matches!(&refused, Err(RouteError::NoRoom { text }) if text.contains("no space left")), "{refused:?}");
    // Who polls with a lease is told, too: somebody has to make room first.
    let patient = RouteOptions { wait: Some(Duration::from_secs(9)), ..RouteOptions::default() };
    let refused = bench.projects.route(spec(), patient).await.map(deliver);
    assert!(matches!(&refused, Err(RouteError::NoRoom { .. })), "{refused:?}");
    bench.effects.set_mood(Mood::Obedient);
    bench.idle_after_a_build().await;
    bench.effects.set_mood(Mood::Full(Step::Discard));
    let refused = bench.projects.remove(&key()).await;
    assert!(matches!(&refused, Err(VerbError::NoRoom(text)) if text.contains("no space left")), "{refused:?}");
    bench.effects.set_mood(Mood::Obedient);
    bench.projects.remove(&key()).await.expect("removed");
}

#[tokio::test]
async fn l24_a_host_operation_that_hangs_is_cut_and_no_other_project_notices() {
    let deadlines = StepDeadlines { create_volume: Duration::from_millis(200), ..StepDeadlines::default() };
    let bench = Bench::with_config(ModelEffects::default(), ProjectsConfig { deadlines, ..config(policy()) });
    bench.effects.set_stuck(Some(key()));
    let stuck = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.route(spec(), RouteOptions::default()).await.map(deliver) }
    });
    for number in 0..20 {
        let other = bench.projects.route(spec_of(number), RouteOptions::default()).await.map(deliver);
        assert!(other.expect("routed").ready);
    }
    let error = stuck.await.expect("joined").expect_err("cut");
    let told = matches!(&error, RouteError::Failed { timed_out: true, text, .. } if text.contains("create volume"));
    assert!(told, "{error:?}");
    assert_eq!(bench.phase().await, "failed", "it is marked");
    bench.effects.set_stuck(None);
    assert!(bench.route().await.ready);
}

#[tokio::test]
async fn f18_l22_a_look_that_fails_is_not_an_absence() {
    let bench = Bench::new(ModelEffects::default());
    bench.idle_after_a_build().await;
    bench.until("its worker has gone", async |b| b.projects.workers() == 0).await;
    let steps = bench.steps();
    bench.effects.set_mood(Mood::Blind);
    let refused = bench.try_route().await;
    assert!(matches!(&refused, Err(RouteError::Failed { retryable: true, .. })), "{refused:?}");
    assert_eq!(bench.steps(), steps, "nothing was made or undone in the dark");
    bench.effects.set_mood(Mood::Obedient);
    assert_eq!((bench.route().await.generation, bench.count(Step::CreateVolume)), (2, 1));
}

#[tokio::test]
async fn what_nobody_has_looked_at_since_the_start_is_shown_as_such() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    let shown = async |b: &Bench| {
        let listed = b.projects.list().await.expect("listed").remove(0);
        assert_eq!(listed.unconfirmed, listed.reason.contains("has not been looked at since"), "{listed:?}");
        (listed.phase, listed.unconfirmed)
    };
    assert_eq!(shown(&bench).await, ("warm".to_owned(), false));
    assert!(bench.complete(&build).await);
    bench.effects.close_eyes();
    let bench = bench.restart().await;
    assert_eq!(shown(&bench).await, ("warm".to_owned(), true));
    assert!(bench.projects.show(&key()).await.expect("shown").is_some_and(|view| view.unconfirmed));
    bench.effects.open_eyes();
    bench.until("somebody has looked", async |b| shown(b).await == ("warm".to_owned(), false)).await;
    // What sleeps has no worker: the look through the host tells.
    bench.projects.stop(&key(), false).await.expect("stopped");
    bench.effects.close_eyes();
    let bench = bench.restart().await;
    assert_eq!(shown(&bench).await, ("idle".to_owned(), true));
    bench.effects.open_eyes();
    bench.until("somebody has looked", async |b| shown(b).await == ("idle".to_owned(), false)).await;
    assert_eq!(bench.projects.workers(), 0);
}

#[tokio::test]
async fn f25_what_fails_quietly_is_in_the_journal_and_in_the_metrics() {
    let bench = Bench::new(ModelEffects::default());
    bench.effects.set_mood(Mood::Failing(Step::WriteFiles));
    bench.try_route().await.expect_err("failed");
    let events = bench.projects.store().events_of(&key(), 10).await.expect("read");
    assert!(
        events.iter().any(|event| event.kind == "failed" && event.text.contains("write certificates")),
        "{events:?}"
    );
    let metrics = bench.projects.metrics().text(crate::metrics::Format::Prometheus).expect("rendered");
    assert!(metrics.contains("kiln_step_failures_total{step=\"write_files\"} 1"), "{metrics}");
    assert!(metrics.contains("kiln_projects{phase=\"failed\"} 1"), "{metrics}");
}

#[tokio::test]
async fn c13_a_prewarm_calls_a_drain_off() {
    let bench = Bench::new(ModelEffects::gated());
    bench.effects.gate.add_permits(5);
    let build = bench.route().await;
    assert!(bench.complete(&build).await);
    let stopping = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.stop(&key(), false).await }
    });
    bench.until("it drains", async |b| b.phase().await == "draining").await;
    bench.projects.prewarm(spec(), &Caller::default()).await.expect("accepted");
    bench.effects.gate.add_permits(100);
    assert!(stopping.await.expect("joined").is_err());
    bench.until("it stays up", async |b| b.phase().await == "warm").await;
    assert_eq!(bench.count(Step::StopInstance(Stop::Graceful)), 0);
}

#[tokio::test]
async fn f15_a_release_needs_the_token_and_nothing_else() {
    let bench = Bench::new(ModelEffects::default());
    let (first, other) = (bench.route().await, bench.route().await);
    let elsewhere = Key::of(&spec_of(1));
    bench.projects.route(spec_of(1), RouteOptions::default()).await.map(deliver).expect("routed");
    assert!(!bench.projects.complete(&elsewhere, &token(&first)).await.expect("asked"), "not at another project");
    assert!(bench.complete(&first).await && bench.complete(&other).await);
}

// === What reading it as a stranger brought up

#[tokio::test]
async fn a_plain_stop_of_a_hot_project_is_refused_with_the_remedy_and_force_starts_it_anew() {
    let bench = Bench::new(ModelEffects::default());
    bench.idle_after_a_build().await;
    bench.projects.set(&key(), |own| own.tier = Some(Tier::Hot)).await.expect("set");
    bench.until("it is up", async |b| b.phase().await == "warm").await;
    let refused = bench.projects.stop(&key(), false).await;
    assert!(matches!(&refused, Err(VerbError::Busy { need, .. }) if need.contains("--tier warm")), "{refused:?}");
    bench.projects.stop(&key(), true).await.expect("stopped");
    bench.until("and up again", async |b| b.count(Step::StartInstance) == 3).await;
}

#[tokio::test]
async fn a_look_that_fails_takes_no_warm_daemon_away() {
    let bench = Bench::new(ModelEffects::default());
    bench.route().await;
    bench.effects.set_mood(Mood::Blind);
    bench.effects.happen(&key());
    bench
        .until("the look failed", async |b| {
            let events = b.projects.store().events_of(&key(), 5).await.expect("read");
            events.iter().any(|event| event.kind == "doubt")
        })
        .await;
    assert_eq!((bench.route().await.generation, bench.phase().await.as_str()), (1, "warm"));
    bench.projects.open(&key()).await.expect("the gateway finds it, too");
    bench.effects.set_mood(Mood::Obedient);
    bench.effects.kill(&key());
    bench.until("what is seen then counts", async |b| b.count(Step::StartInstance) == 2).await;
}

#[tokio::test]
async fn a_removal_that_its_admin_gave_up_on_is_not_done_behind_their_back() {
    let bench = Bench::new(ModelEffects::gated());
    bench.effects.gate.add_permits(5);
    let build = bench.route().await;
    let removing = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.remove(&key()).await }
    });
    assert!(matches!(removing.await.expect("joined"), Err(VerbError::Busy { .. })), "a build comes first");
    assert!(bench.complete(&build).await);
    let removing = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.remove(&key()).await }
    });
    bench.until("it is asked for its builds", async |b| b.phase().await == "draining").await;
    removing.abort();
    bench.until("the admin is gone", async |_| removing.is_finished()).await;
    bench.effects.gate.add_permits(100);
    bench.until("it stays", async |b| b.phase().await == "warm").await;
    assert_eq!((bench.count(Step::DestroyInstance), bench.count(Step::Discard)), (0, 0));
}

#[tokio::test]
async fn a_setting_that_cannot_be_written_does_not_count() {
    let bench = Bench::new(ModelEffects::default());
    bench.idle_after_a_build().await;
    let jam = rusqlite::Connection::open(bench.dir.path().join("kiln.db")).expect("opened");
    jam.execute_batch("CREATE TRIGGER jam BEFORE UPDATE ON projects BEGIN SELECT RAISE(ABORT, 'jammed'); END")
        .expect("jammed");
    assert!(bench.projects.set(&key(), |own| own.tier = Some(Tier::Hot)).await.is_err());
    jam.execute_batch("DROP TRIGGER jam").expect("free again");
    bench.until("it is not hot", async |b| b.why().await.starts_with("idle")).await;
    assert!(!bench.why().await.contains("hot"), "{}", bench.why().await);
}

#[tokio::test]
async fn leases_that_nobody_uses_keep_no_newcomer_out() {
    let lease = LeasePolicy { grace: Duration::from_millis(50), max_build_age: Duration::from_secs(7200) };
    let bench = Bench::with_policy(ModelEffects::default(), Policy { lease, max_leases: 2, ..policy() });
    let builds = [bench.route().await, bench.route().await];
    bench.until("their grace is over", async |b| b.try_route().await.is_ok()).await;
    assert!(bench.complete(&builds[0]).await, "and they are still known");
}
