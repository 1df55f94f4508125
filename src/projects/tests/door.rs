//! Starts at the door: how many, in what order, and what is refused.

use kiln_domain::Tier;
use kiln_domain::admission::HostLoad;
use kiln_domain::settings::Rule;

use super::heart::{short_wait, spec_of};
use super::past::events;
use super::*;

#[tokio::test]
async fn l20_starts_are_bounded_and_in_order_and_each_says_its_place() {
    let config =
        ProjectsConfig { admission: AdmissionPolicy { starts: 2, ..AdmissionPolicy::default() }, ..config(policy()) };
    let bench = Bench::with_config(ModelEffects::gated(), config);
    let mut routes = JoinSet::new();
    for number in 0..5 {
        let projects = bench.projects.clone();
        routes.spawn(async move { projects.route(spec_of(number), RouteOptions::default()).await.map(deliver) });
        bench
            .until("it has its place", async |b| {
                let queue = b.projects.queue();
                queue.starting + queue.queued == number + 1
            })
            .await;
    }
    assert_eq!((bench.projects.queue().starting, bench.projects.queue().queued), (2, 3));
    let last = bench.projects.show(&Key::of(&spec_of(4))).await.expect("shown").expect("there");
    let place = last.queue.expect("a place");
    assert_eq!((place.position, place.length), (3, 3));
    assert!(last.reason.contains("2 other start(s) are under way"), "{}", last.reason);
    let polled = bench.projects.route(spec_of(4), short_wait(Duration::ZERO)).await.map(deliver).expect("leased");
    assert_eq!(polled.status.expect("standing").queue_position, Some(3));
    bench.effects.gate.add_permits(10_000);
    for answer in routes.join_all().await {
        assert!(answer.expect("routed").ready);
    }
    assert_eq!((bench.projects.queue().starting, bench.projects.queue().queued), (0, 0));
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_gives_its_place_up() {
    let config =
        ProjectsConfig { admission: AdmissionPolicy { starts: 1, ..AdmissionPolicy::default() }, ..config(policy()) };
    let bench = Bench::with_config(ModelEffects::gated(), config);
    let start = |number| {
        let projects = bench.projects.clone();
        tokio::spawn(async move { projects.route(spec_of(number), RouteOptions::default()).await.map(deliver) })
    };
    let _first = start(0);
    bench.until("the first starts", async |b| b.projects.queue().starting == 1).await;
    let second = start(1);
    bench.until("the second waits", async |b| b.projects.queue().queued == 1).await;
    second.abort();
    bench.until("nobody waits", async |b| b.projects.queue().queued == 0).await;
}

#[tokio::test]
async fn a_full_disk_refuses_starts_at_once_and_lets_what_runs_go_on() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    bench.effects.set_load(HostLoad { storage: Some(99.0), ..HostLoad::default() });
    tokio::time::sleep(Duration::from_millis(1100)).await; // A reading of the host is good for a second.
    assert!(bench.route().await.ready, "what is warm stays routable");
    let refused = bench.projects.route(spec_of(1), RouteOptions::default()).await.map(deliver);
    let retryable = matches!(&refused, Err(RouteError::NotAdmitted { text }) if text.contains("99 % full"));
    assert!(retryable, "{refused:?}");
    bench.effects.set_load(HostLoad::default());
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let again = bench.projects.route(spec_of(1), RouteOptions::default()).await.map(deliver);
    assert!(again.expect("routed").ready);
    assert!(bench.complete(&build).await);
}

#[tokio::test]
async fn where_no_more_daemons_may_run_the_one_nobody_needs_makes_room() {
    let admission = AdmissionPolicy { running: 1, ..AdmissionPolicy::default() };
    let bench = Bench::with_config(ModelEffects::default(), ProjectsConfig { admission, ..config(policy()) });
    let build = bench.route().await;
    let projects = bench.projects.clone();
    let other = tokio::spawn(async move { projects.route(spec_of(1), RouteOptions::default()).await.map(deliver) });
    bench.until("the other waits", async |b| b.projects.queue().queued == 1).await;
    assert_eq!(bench.phase().await, "warm", "a build keeps its daemon");
    assert!(bench.complete(&build).await);
    assert!(other.await.expect("joined").expect("routed").ready);
    bench.until("the first made room", async |b| b.phase().await == "idle").await;
}

#[tokio::test]
async fn hot_projects_that_must_queue_at_the_start_all_come_up() {
    let admission = AdmissionPolicy { starts: 1, ..AdmissionPolicy::default() };
    let rule =
        Rule { repo: "*".parse().expect("all"), settings: Settings { tier: Some(Tier::Hot), ..Settings::default() } };
    let config = ProjectsConfig { admission, rules: Rules(vec![rule]), ..config(policy()) };
    let bench = Bench::with_config(ModelEffects::default(), config);
    for number in 0..4 {
        bench.projects.prewarm(spec_of(number), &Caller::default()).await.expect("accepted");
    }
    let up =
        async |bench: &Bench| bench.projects.list().await.expect("listed").iter().filter(|p| p.phase == "warm").count();
    bench.until("all are up", async |b| up(b).await == 4).await;
    let keys: Vec<Key> = (0..4).map(|number| Key::of(&spec_of(number))).collect();
    // As a reboot of the host: all at once, and nobody asks for them.
    for key in &keys {
        bench.effects.kill(key);
    }
    bench.until("all are up again", async |b| b.count(Step::StartInstance) == 8 && up(b).await == 4).await;
}

#[tokio::test]
async fn a_project_of_which_nothing_came_is_not_kept() {
    let bench = Bench::new(ModelEffects::default());
    let known = async |bench: &Bench| bench.projects.store().projects().await.expect("read").len();
    let made_up = LeaseToken::from_random([7; 8]);
    let options = RouteOptions { resume: Some(made_up), ..RouteOptions::default() };
    let gone = bench.projects.route(spec_of(1), options).await.map(deliver);
    assert!(matches!(gone, Err(RouteError::Gone)), "{gone:?}");
    assert_eq!(known(&bench).await, 0, "whoever has no lease makes no project");
    bench.effects.set_load(HostLoad { storage: Some(99.5), ..HostLoad::default() });
    for round in 0..3 {
        let refused = bench.projects.route(spec_of(round), RouteOptions::default()).await.map(deliver);
        assert!(refused.is_err(), "{refused:?}");
    }
    bench.until("nothing is left of the refused", async |bench| known(bench).await == 0).await;
    bench.effects.set_load(HostLoad::default());
    let routed =
        async |bench: &Bench| bench.projects.route(spec_of(1), RouteOptions::default()).await.map(deliver).is_ok();
    bench.until("there is room again", async |bench| routed(bench).await).await;
    assert_eq!(known(&bench).await, 1);
}

#[tokio::test]
async fn a_refused_connection_is_told_of_at_its_project_and_not_again_at_once() {
    let bench = Bench::new(ModelEffects::default());
    let _build = bench.route().await;
    for why in ["its disk is full", "its disk is still full"] {
        bench.projects.turned_away(&key(), why);
    }
    let told = "a connection was refused: its disk is full";
    bench.until("it is told", async |b| events(b, "connection-refused").await == [told]).await;
}
