//! The worker against a model host and a real store.

mod ageing;
mod copies;
mod door;
mod eviction;
mod fanout;
mod heart;
mod leaps;
mod past;
mod rebuild;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use kiln_domain::admission::AdmissionPolicy;
use kiln_domain::cache::{EvictionPolicy, ForkBounds};
use kiln_domain::idle::IdlePolicy;
use kiln_domain::lease::LeasePolicy;
use kiln_domain::plan::{InstanceSeen, Step, Stop};
use kiln_domain::{AddressPool, BuildSpec, Key, LeaseToken, Policy, Rules, Settings};
use kiln_wire::RouteResponse;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::model::{ModelEffects, Mood};
use super::{
    Addressing, Caller, Foundations, Projects, ProjectsConfig, RouteError, RouteOptions, Routed, StepDeadlines,
    VerbError,
};
use crate::clock::SystemClock;
use crate::entropy::SystemEntropy;
use crate::gateway::{Directory, NoDoor};
use crate::pki::Pki;
use crate::store::Store;

const PATIENCE: Duration = Duration::from_secs(20);

struct Bench {
    dir: TempDir,
    effects: Arc<ModelEffects>,
    projects: Projects,
    running: CancellationToken,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.running.cancel();
    }
}

impl Bench {
    fn new(effects: ModelEffects) -> Self {
        Self::with_policy(effects, policy())
    }

    fn with_window(effects: ModelEffects, idle_window: Duration) -> Self {
        Self::with_policy(effects, with_window(idle_window))
    }

    fn with_policy(effects: ModelEffects, policy: Policy) -> Self {
        Self::with_config(effects, config(policy))
    }

    fn with_config(effects: ModelEffects, config: ProjectsConfig) -> Self {
        let bench = Self::on(TempDir::new().expect("a directory"), Arc::new(effects), config);
        tokio::spawn({
            let (projects, running) = (bench.projects.clone(), bench.running.clone());
            async move { projects.start(running).await.expect("the store can be read").await }
        });
        bench
    }

    fn on(dir: TempDir, effects: Arc<ModelEffects>, config: ProjectsConfig) -> Self {
        let store = Store::open(&dir.path().join("kiln.db")).expect("a database");
        Self::over(store, dir, effects, config)
    }

    /// With no thread of a store, for tests on a paused clock.
    fn in_memory(effects: Arc<ModelEffects>, config: ProjectsConfig) -> Self {
        let (store, disk) = Store::in_memory().expect("a database");
        tokio::spawn(async move {
            loop {
                disk.some_waiting().await;
                disk.commit_now();
            }
        });
        Self::over(store, TempDir::new().expect("a directory"), effects, config)
    }

    fn over(store: Store, dir: TempDir, effects: Arc<ModelEffects>, config: ProjectsConfig) -> Self {
        let foundations = Foundations {
            store,
            effects: effects.clone(),
            pki: Pki::new(dir.path()).expect("certificates"),
            clock: Arc::new(SystemClock),
            entropy: Arc::new(SystemEntropy::default()),
        };
        let projects = Projects::new(config, foundations);
        Self { dir, effects, projects, running: CancellationToken::new() }
    }

    /// As after `kill -9`: nothing of the process is left but its files, and the host is as it was.
    async fn restart(self) -> Self {
        self.running.cancel();
        let Self { dir, effects, .. } = &self;
        // A second directory with the same files: the first process's database is still open, and stays so.
        let copy = TempDir::new().expect("a directory");
        for file in ["kiln.db", "kiln.db-wal"] {
            tokio::fs::copy(dir.path().join(file), copy.path().join(file)).await.expect("copied");
        }
        let bench = Self::on(copy, effects.clone(), config(policy()));
        drop(bench.projects.start(bench.running.clone()).await.expect("the store can be read"));
        bench
    }

    async fn route(&self) -> RouteResponse {
        self.try_route().await.expect("routed")
    }

    async fn try_route(&self) -> Result<RouteResponse, RouteError> {
        let routed = self.projects.route(spec(), RouteOptions::default());
        tokio::time::timeout(PATIENCE, routed).await.expect("an answer in time").map(deliver)
    }

    async fn leases(&self) -> usize {
        self.projects.store().leases(&key()).await.expect("leases").len()
    }

    async fn phase(&self) -> String {
        self.projects.show(&key()).await.expect("shown").map_or_else(|| "none".to_owned(), |view| view.phase)
    }

    async fn until(&self, what: &str, mut holds: impl AsyncFnMut(&Self) -> bool) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !holds(self).await {
            assert!(tokio::time::Instant::now() < deadline, "gave up waiting until {what}; steps: {:?}", self.steps());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn steps(&self) -> Vec<Step> {
        self.effects.done().into_iter().map(|(_, step)| step).collect()
    }

    fn count(&self, step: Step) -> usize {
        self.steps().into_iter().filter(|done| *done == step).count()
    }
}

/// As the HTTP layer does when the answer has left.
fn deliver(routed: Routed) -> RouteResponse {
    let response = routed.response();
    routed.delivered();
    response
}

fn policy() -> Policy {
    with_window(Duration::from_secs(900))
}

fn with_window(window: Duration) -> Policy {
    Policy {
        lease: LeasePolicy { grace: Duration::from_secs(600), max_build_age: Duration::from_secs(7200) },
        idle: IdlePolicy { window, longest: Duration::ZERO, fork_window: window },
        ..Policy::default()
    }
}

fn config(policy: Policy) -> ProjectsConfig {
    ProjectsConfig {
        forks: ForkBounds::default(),
        fan_out: kiln_domain::cache::fanout::FanOutPolicy { members: 0, ..Default::default() },
        policy,
        admission: AdmissionPolicy::default(),
        eviction: EvictionPolicy::default(),
        defaults: Settings::default(),
        rules: Rules::default(),
        host_size: kiln_domain::settings::HostSize::default(),
        trash_kept: Duration::from_secs(3600),
        deadlines: StepDeadlines::default(),
        addresses: AddressPool { first: Ipv4Addr::new(127, 88, 0, 1), last: Ipv4Addr::new(127, 88, 3, 250) },
        addressing: Addressing {
            domain: "kiln.internal".into(),
            gateway_address: Some("127.0.0.1:1234".into()),
            gateway_port: 1234,
            namespace: "kiln".into(),
        },
        daemon_port: 8372,
        route_wait: Duration::from_secs(10),
        connect_wait: Duration::from_secs(10),
        untrusted: Err("the model isolates nothing".into()),
    }
}

fn spec() -> BuildSpec {
    BuildSpec::new("github.com/org/repo", "", "", "amd64").expect("valid")
}

fn key() -> Key {
    Key::of(&spec())
}

fn token(response: &RouteResponse) -> LeaseToken {
    response.build_id.as_deref().expect("a token").parse().expect("well-formed")
}

#[tokio::test]
async fn many_first_requests_start_one_daemon_and_each_gets_a_lease_on_disk() {
    let bench = Bench::new(ModelEffects::default());
    let mut routes = JoinSet::new();
    for _ in 0..100 {
        let projects = bench.projects.clone();
        routes
            .spawn(async move { projects.route(spec(), RouteOptions::default()).await.map(deliver).expect("routed") });
    }
    let answers = routes.join_all().await;
    let tokens: std::collections::HashSet<_> = answers.iter().map(|a| a.build_id.clone()).collect();
    assert_eq!(tokens.len(), 100);
    assert!(answers.iter().all(|a| a.ready && a.generation == 1), "{answers:?}");
    assert_eq!(bench.leases().await, 100);
    let once = [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance, Step::StartInstance, Step::AwaitServing];
    assert_eq!(bench.steps(), once);
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_only_its_own_wait() {
    let bench = Bench::new(ModelEffects::gated());
    let gone = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.route(spec(), RouteOptions::default()).await.map(deliver) }
    });
    bench.until("the first step is under way", async |b| b.phase().await == "provisioning").await;
    let stays = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.route(spec(), RouteOptions::default()).await.map(deliver) }
    });
    gone.abort();
    bench.effects.gate.add_permits(100);
    assert!(stays.await.expect("joined").expect("routed").ready);
    assert_eq!(bench.leases().await, 1, "only for the one that stayed");
}

#[tokio::test]
async fn when_all_clients_go_away_what_was_begun_is_whole_and_the_next_is_served() {
    let bench = Bench::new(ModelEffects::gated());
    for permits in 0..6 {
        let gone = tokio::spawn({
            let projects = bench.projects.clone();
            // It never gets to see an answer, also if one is there before it goes.
            async move {
                let _undelivered = projects.route(spec(), RouteOptions::default()).await;
                std::future::pending::<()>().await;
            }
        });
        let before = bench.steps().len();
        bench.effects.gate.add_permits(usize::from(permits > 0));
        bench.until("it got a step further", async |b| permits == 0 || b.steps().len() > before || before == 5).await;
        gone.abort();
    }
    bench.effects.gate.add_permits(100);
    assert!(bench.route().await.ready);
    assert_eq!(bench.count(Step::CreateInstance), 1);
    bench.until("only the last lease is left", async |b| b.leases().await == 1).await;
}

#[tokio::test]
async fn an_answer_that_was_not_delivered_releases_its_lease() {
    let bench = Bench::new(ModelEffects::default());
    let routed = bench.projects.route(spec(), RouteOptions::default()).await.expect("routed");
    assert_eq!(bench.leases().await, 1);
    drop(routed);
    bench.until("the lease is released", async |b| b.leases().await == 0).await;
}

#[tokio::test]
async fn completing_releases_the_one_build_and_nothing_else() {
    let bench = Bench::new(ModelEffects::default());
    let (first, second) = (bench.route().await, bench.route().await);
    assert!(bench.projects.complete(&key(), &token(&second)).await.expect("released"));
    assert!(!bench.projects.complete(&key(), &token(&second)).await.expect("known no more"));
    let left = bench.projects.store().leases(&key()).await.expect("leases");
    assert_eq!(left.iter().map(|l| l.token.clone()).collect::<Vec<_>>(), [token(&first).hash()]);
    let unknown = "pdeadbeefdeadbeef".parse().expect("a key");
    assert!(!bench.projects.complete(&unknown, &token(&first)).await.expect("no such project"));
}

#[tokio::test]
async fn a_stop_waits_for_no_build_and_takes_none_away() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    let refused = bench.projects.stop(&key(), false).await;
    assert!(matches!(&refused, Err(VerbError::Busy { need, .. }) if need.contains("1 live lease")), "{refused:?}");
    bench.projects.complete(&key(), &token(&build)).await.expect("released");
    bench.projects.stop(&key(), false).await.expect("stopped");
    assert_eq!(bench.phase().await, "idle");
    assert_eq!(bench.effects.instance(&key()), InstanceSeen::STOPPED);
    let again = bench.route().await;
    assert_eq!((again.generation, bench.count(Step::CreateVolume)), (2, 1));
    assert!(matches!(
        bench.projects.stop(&"pdeadbeefdeadbeef".parse().expect("a key"), false).await,
        Err(VerbError::Unknown(_))
    ));
}

#[tokio::test]
async fn an_open_connection_makes_a_project_busy_until_it_ends() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    bench.projects.complete(&key(), &token(&build)).await.expect("released");
    bench.projects.stop(&key(), false).await.expect("stopped");
    let door = bench.projects.open(&key()).await.expect("woken");
    assert_eq!(door.address.to_string(), "127.88.0.1:8372");
    assert!(matches!(bench.projects.stop(&key(), false).await, Err(VerbError::Busy { .. })));
    drop(door);
    bench.until("it can be stopped", async |b| b.projects.stop(&key(), false).await.is_ok()).await;
}

#[tokio::test]
async fn the_gateway_wakes_no_project_that_nobody_made() {
    let bench = Bench::new(ModelEffects::default());
    assert_eq!(bench.projects.open(&key()).await.err(), Some(NoDoor::Unknown));
    assert_eq!(bench.steps(), []);
}

#[tokio::test]
async fn idle_is_stopped_after_its_window_and_its_worker_goes() {
    let bench = Bench::with_window(ModelEffects::default(), Duration::from_millis(50));
    let build = bench.route().await;
    bench.projects.complete(&key(), &token(&build)).await.expect("released");
    bench.until("it is stopped", async |b| b.phase().await == "idle").await;
    assert_eq!(bench.count(Step::StopInstance(Stop::Graceful)), 1);
    bench.until("its worker has gone", async |b| b.projects.workers() == 0).await;
    assert_eq!(bench.route().await.generation, 2);
}

#[tokio::test]
async fn a_build_that_comes_while_stopping_is_served_by_the_next_start() {
    let bench = Bench::new(ModelEffects::gated());
    bench.effects.gate.add_permits(5);
    let build = bench.route().await;
    bench.projects.complete(&key(), &token(&build)).await.expect("released");
    let stopping = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.stop(&key(), false).await }
    });
    bench.until("it drains", async |b| b.phase().await == "draining").await;
    bench.effects.gate.add_permits(1);
    bench.until("it said that no build runs", async |b| b.count(Step::CountBuilds) == 1).await;
    let routed = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.route(spec(), RouteOptions::default()).await.map(deliver) }
    });
    bench.effects.gate.add_permits(100);
    stopping.await.expect("joined").expect("stopped");
    assert_eq!(routed.await.expect("joined").expect("routed").generation, 2);
}

#[tokio::test]
async fn a_failed_step_is_answered_with_its_reason_and_tried_again_by_the_next_request() {
    let bench = Bench::new(ModelEffects::default());
    bench.effects.set_mood(Mood::Failing(Step::StartInstance));
    let error = bench.try_route().await.expect_err("cannot start").to_string();
    assert!(error.contains("start instance") && error.contains("the model says so"), "{error}");
    assert_eq!((bench.phase().await.as_str(), bench.leases().await), ("failed", 0));
    bench.effects.set_mood(Mood::Obedient);
    assert!(bench.route().await.ready);
}

#[tokio::test]
async fn a_step_that_succeeded_and_reported_failure_is_not_done_twice() {
    let bench = Bench::new(ModelEffects::default());
    for step in [Step::CreateVolume, Step::CreateInstance, Step::StartInstance] {
        bench.effects.set_mood(Mood::Lossy(step));
        bench.try_route().await.expect_err("its answer was lost");
        bench.effects.set_mood(Mood::Obedient);
    }
    assert!(bench.route().await.ready);
    for step in [Step::CreateVolume, Step::CreateInstance, Step::StartInstance] {
        assert_eq!(bench.count(step), 1, "{step:?} in {:?}", bench.steps());
    }
}

#[tokio::test]
async fn a_daemon_that_dies_under_a_lease_comes_back_as_a_new_generation() {
    let bench = Bench::new(ModelEffects::default());
    bench.route().await;
    bench.effects.kill(&key());
    bench.until("it is back", async |b| b.count(Step::AwaitServing) == 2).await;
    assert_eq!(bench.route().await.generation, 2);
}

#[tokio::test]
async fn a_daemon_that_dies_with_nobody_there_stays_down() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    bench.projects.complete(&key(), &token(&build)).await.expect("released");
    bench.effects.kill(&key());
    bench.until("it is seen", async |b| b.phase().await == "idle").await;
    assert_eq!(bench.count(Step::StartInstance), 1);
}

#[tokio::test]
async fn after_a_crash_of_kiln_lease_phase_and_generation_are_as_before() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    let before = bench.projects.store().project(&key()).await.expect("read").expect("there");
    let steps = bench.steps();
    let bench = bench.restart().await;
    // Also to whoever asks before the worker has looked.
    bench.until("its worker is there", async |b| b.phase().await != "warm" || b.projects.workers() == 1).await;
    assert_eq!(bench.phase().await, "warm");
    let after = bench.projects.store().project(&key()).await.expect("read").expect("there");
    assert_eq!((before.phase, before.generation, before.address), (after.phase, after.generation, after.address));
    assert_eq!(bench.route().await.generation, 1);
    assert_eq!(bench.steps(), steps, "nothing was done to the host");
    assert!(bench.projects.complete(&key(), &token(&build)).await.expect("the lease of before is known"));
}

#[tokio::test]
async fn a_release_that_is_the_first_thing_after_a_restart_is_one() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    let bench = bench.restart().await;
    assert!(bench.projects.complete(&key(), &token(&build)).await.expect("released"));
    assert_eq!(bench.leases().await, 0);
}

#[tokio::test]
async fn a_release_that_cannot_be_written_can_be_tried_again() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    let jam = rusqlite::Connection::open(bench.dir.path().join("kiln.db")).expect("opened");
    jam.execute_batch("CREATE TRIGGER jam BEFORE DELETE ON leases BEGIN SELECT RAISE(ABORT, 'jammed'); END")
        .expect("jammed");
    for _ in 0..2 {
        let told = bench.projects.complete(&key(), &token(&build)).await;
        assert!(told.is_err(), "{told:?} although the lease is on disk");
    }
    jam.execute_batch("DROP TRIGGER jam").expect("free again");
    assert!(bench.projects.complete(&key(), &token(&build)).await.expect("released"));
    assert_eq!(bench.leases().await, 0);
}

#[tokio::test]
async fn a_wake_that_its_client_did_not_wait_for_is_seen_through() {
    let bench = Bench::with_window(ModelEffects::gated(), Duration::from_secs(1));
    // Five steps up, one question, and the stop.
    bench.effects.gate.add_permits(7);
    let build = bench.route().await;
    bench.projects.complete(&key(), &token(&build)).await.expect("released");
    bench.until("its window has passed and it is stopped", async |b| b.phase().await == "idle").await;
    let waking = tokio::spawn({
        let projects = bench.projects.clone();
        async move { projects.open(&key()).await.map(|_| ()) }
    });
    bench.until("it starts", async |b| b.phase().await == "starting").await;
    waking.abort();
    bench.effects.gate.add_permits(2);
    bench.until("it is warm for the next try", async |b| b.phase().await == "warm").await;
    assert_eq!(bench.count(Step::StopInstance(Stop::Graceful)), 1);
}

#[tokio::test]
async fn untrusted_builds_are_refused_where_nothing_keeps_them_apart() {
    let bench = Bench::new(ModelEffects::default());
    let options = RouteOptions { caller: Caller::untrusted(), ..RouteOptions::default() };
    let refused = bench.projects.route(spec(), options).await.map(|_| ()).expect_err("refused");
    assert!(refused.to_string().contains("untrusted builds are refused"), "{refused}");
    assert!(bench.projects.prewarm(spec(), &Caller::untrusted()).await.is_err());
    assert_eq!(bench.phase().await, "none");
}

#[tokio::test]
async fn prewarm_starts_it_without_a_lease() {
    let bench = Bench::new(ModelEffects::default());
    let cold = bench.projects.prewarm(spec(), &Caller::default()).await.expect("accepted");
    assert!(!cold.ready && cold.build_id.is_none());
    bench.until("it is warm", async |b| b.phase().await == "warm").await;
    assert!(bench.projects.prewarm(spec(), &Caller::default()).await.expect("accepted").ready);
    assert_eq!(bench.leases().await, 0);
}

#[tokio::test]
async fn what_was_prewarmed_for_nobody_is_stopped_after_its_window() {
    let bench = Bench::with_window(ModelEffects::default(), Duration::from_millis(50));
    bench.projects.prewarm(spec(), &Caller::default()).await.expect("accepted");
    bench.until("it was started", async |b| b.count(Step::AwaitServing) == 1).await;
    bench.until("its worker has gone", async |b| b.projects.workers() == 0).await;
    assert_eq!(bench.phase().await, "idle");
}

#[tokio::test]
async fn a_client_that_is_killed_before_it_connects_holds_a_daemon_for_the_grace_and_no_longer() {
    let (short, long) = (Duration::from_millis(50), Duration::from_millis(400));
    let lease = LeasePolicy { grace: short, max_build_age: long };
    let bench = Bench::with_policy(ModelEffects::default(), Policy { lease, ..with_window(short) });
    bench.route().await;
    bench.until("it is stopped", async |b| b.phase().await == "idle").await;
    bench.until("its lease is forgotten", async |b| b.leases().await == 0).await;
    bench.until("its worker has gone", async |b| b.projects.workers() == 0).await;
}

#[tokio::test]
async fn a_death_while_a_step_is_under_way_is_not_missed() {
    let bench = Bench::new(ModelEffects::default());
    bench.effects.set_mood(Mood::FatalOnce(Step::AwaitServing));
    bench.route().await;
    bench.until("it is back", async |b| b.count(Step::AwaitServing) == 2).await;
    assert_eq!(bench.route().await.generation, 2);
}
