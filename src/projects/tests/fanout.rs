//! Members that cannot be had.

use kiln_domain::cache::fanout::FanOutPolicy;
use kiln_domain::{Identity, Role};

use super::*;

/// A host with a place for one daemon.
fn full(builds: usize, members: u16) -> Bench {
    let effects = ModelEffects::default();
    effects.set_cheap();
    let fan_out = FanOutPolicy { builds, members, on_host: 8, pressure: None };
    let admission = AdmissionPolicy { running: 1, ..AdmissionPolicy::default() };
    Bench::with_config(effects, ProjectsConfig { admission, fan_out, ..config(policy()) })
}

fn member() -> Key {
    key().clone_number(1)
}

/// A build whose lease is for the first member, which waits for its place.
async fn on_a_queued_member(bench: &Bench) -> RouteResponse {
    bench.effects.close_eyes();
    let options = RouteOptions { wait: Some(Duration::ZERO), ..RouteOptions::default() };
    let waiting = bench.projects.route(spec(), options).await.map(deliver).expect("a lease");
    assert_eq!((&waiting.key, waiting.ready), (&member(), false));
    bench.effects.open_eyes();
    bench.until("it waits for its place", async |b| b.projects.queue().queued == 1).await;
    waiting
}

#[tokio::test]
async fn nobody_waits_for_a_member_that_has_no_place() {
    let bench = full(1, 2);
    assert_eq!(bench.route().await.key, key());
    let began = tokio::time::Instant::now();
    assert_eq!(bench.route().await.key, key(), "it is busy, and it is there");
    // As `kiln build` asks.
    let options = RouteOptions { wait: Some(PATIENCE), ..RouteOptions::default() };
    let ready = bench.projects.route(spec(), options).await.map(deliver).expect("routed");
    assert_eq!((ready.key, ready.ready), (key(), true));
    assert!(began.elapsed() < bench.projects.config.route_wait / 4, "{:?}", began.elapsed());
    assert_eq!(bench.leases().await, 3);
    for member in [member(), key().clone_number(2)] {
        let none = async |b: &Bench| b.projects.store().leases(&member).await.expect("leases").is_empty();
        bench.until("no lease is left behind", none).await;
    }
}

#[tokio::test]
async fn a_member_that_waits_for_its_place_is_given_no_builds() {
    let bench = full(2, 1);
    let _builds = [bench.route().await, bench.route().await];
    let _waiting = on_a_queued_member(&bench).await;
    let (placed, _asking) = bench.projects.place(Identity::project(spec()), None);
    assert!(placed.key.role() == Role::Project, "{placed:?}");
}

#[tokio::test]
async fn a_build_moves_on_from_a_member_that_cannot_be_had() {
    let bench = full(1, 2);
    let first = bench.route().await;
    let waiting = on_a_queued_member(&bench).await;
    let resume = |response: &RouteResponse| {
        let resume = Some(token(response));
        bench.projects.route(spec(), RouteOptions { resume, wait: Some(PATIENCE), ..RouteOptions::default() })
    };
    let on = async |key: &Key| bench.projects.store().leases(key).await.expect("leases").len();

    drop(resume(&waiting).await.expect("it can go on"));
    bench.until("its client did not learn of it", async |_| on(&key()).await == 1).await;
    assert_eq!(on(&member()).await, 1, "so it has the lease that it knows");

    let moved = resume(&waiting).await.map(deliver).expect("it can go on");
    assert_eq!((&moved.key, moved.ready), (&key(), true));
    bench.until("the lease of before has ended", async |_| on(&member()).await == 0).await;
    assert_eq!(on(&key()).await, 2);
    let again = resume(&moved).await.map(deliver).expect("resumed");
    assert_eq!((&again.key, &again.build_id), (&moved.key, &moved.build_id));
    for build in [first, moved] {
        assert!(bench.projects.complete(&build.key, &token(&build)).await.expect("released"));
    }
}
