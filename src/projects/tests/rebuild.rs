//! What the host tells and the database does not know.

use kiln_domain::{Identity, ProjectRecord};
use kiln_wire::OrphanKind;

use super::super::ReconcileError;
use super::super::effects::Survey;
use super::super::host_effects::properties;
use super::heart::spec_of;
use super::*;
use crate::host::FoundInstance;
use crate::host::volumes::FoundVolume;
use crate::store::StoreError;

#[tokio::test(start_paused = true)]
async fn a_rebuild_while_the_runtime_is_away_is_whole_when_it_is_back() {
    let marks = |spec: &BuildSpec, settings: &str| {
        let address = "127.88.0.9".parse().expect("an address");
        let record = ProjectRecord::new(spec.clone(), address, kiln_domain::Timestamp::EPOCH);
        let mut marks = properties(&record);
        marks.insert("settings".to_owned(), settings.to_owned());
        marks
    };
    let (with_cache, without, new) = (spec_of(1), spec_of(2), spec_of(3));
    let effects = Arc::new(ModelEffects::default());
    let volume = (Key::of(&with_cache), marks(&with_cache, r#"{"tier":"hot"}"#));
    let instance = (Key::of(&without), marks(&without, ""));
    let (of_a_fork, at) = (Identity::fork(with_cache.clone()), "127.88.0.10".parse().expect("an address"));
    let fork = ProjectRecord::of(of_a_fork, at, kiln_domain::Timestamp::EPOCH);
    let stopped = |name: &str, key: &Key, properties| FoundInstance {
        name: name.into(),
        key: Some(key.clone()),
        properties,
        running: false,
    };
    effects.set_found(Survey {
        volumes: vec![FoundVolume { name: "a volume".into(), key: Some(volume.0), properties: volume.1 }],
        instances: vec![
            stopped("a fork's", &fork.key, properties(&fork)),
            stopped("an instance", &instance.0, instance.1),
        ],
    });
    effects.set_mood(Mood::Blind);
    let bench = Bench::in_memory(effects.clone(), config(policy()));
    let attending = bench.projects.start(bench.running.clone()).await.expect("the store can be read");
    let count = async || bench.projects.store().projects().await.expect("read").len();
    assert_eq!(count().await, 1, "the caches wait for no runtime");
    let refused = bench.projects.route(new.clone(), RouteOptions::default()).await.map(deliver);
    assert!(matches!(refused, Err(RouteError::Store(StoreError::Rebuilding { .. }))), "{refused:?}");
    effects.set_mood(Mood::Obedient);
    let knows = async |key: &Key| bench.projects.store().project(key).await.expect("read").is_some();
    bench.until("the instances are in", async |_| knows(&instance.0).await).await;
    bench.until("and what is only a copy has gone", async |_| !knows(&fork.key).await).await;
    bench.projects.route(new, RouteOptions::default()).await.map(deliver).expect("a new project is taken again");
    bench.until("the hot one is up", async |bench| bench.count(Step::StartInstance) == 2).await;
    assert!(!bench.projects.store().needs_rebuild().await.expect("read"));
    drop(attending);
}

#[tokio::test]
async fn a_number_that_could_not_be_written_is_no_daemon_s() {
    let bench = Bench::new(ModelEffects::default());
    let build = bench.route().await;
    let jam = rusqlite::Connection::open(bench.dir.path().join("kiln.db")).expect("opened");
    jam.execute_batch(
        "CREATE TRIGGER jam BEFORE UPDATE ON projects WHEN NEW.generation <> OLD.generation
         BEGIN SELECT RAISE(ABORT, 'jammed'); END",
    )
    .expect("jammed");
    bench.effects.start_anew(&key());
    bench.effects.happen(&key());
    let refused = async |b: &Bench| b.try_route().await.map_or(true, |again| again.generation != build.generation);
    bench.until("it is seen", refused).await;
    for _ in 0..3 {
        let again = bench.try_route().await;
        assert!(again.is_err(), "{again:?} although no start was recorded");
    }
    jam.execute_batch("DROP TRIGGER jam").expect("free again");
    assert!(bench.route().await.generation > build.generation);
}

#[tokio::test]
async fn an_orphan_that_runs_is_not_removed_under_its_builds() {
    let effects = ModelEffects::default();
    let orphan = FoundInstance {
        name: "an instance".into(),
        key: Some(Key::of(&spec_of(2))),
        properties: crate::host::Properties::new(),
        running: true,
    };
    effects.set_found(Survey { instances: vec![orphan], volumes: Vec::new() });
    let bench = Bench::new(effects);
    let refused = bench.projects.remove_orphan(OrphanKind::Instance, "an instance").await;
    assert!(matches!(&refused, Err(ReconcileError::Taken(why)) if why.contains("is running")), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn an_old_mark_takes_no_running_daemon_s_address() {
    let found = |spec: &BuildSpec, last: u8| {
        let at = std::net::Ipv4Addr::new(127, 88, 0, last);
        ProjectRecord::new(spec.clone(), at, kiln_domain::Timestamp::EPOCH)
    };
    // The first got its address again when its cache came back from the trash, or so its mark says.
    let (of_before, runs, sleeps) = (found(&spec_of(1), 2), found(&spec_of(2), 2), found(&spec_of(3), 1));
    let volume = |record: &ProjectRecord| FoundVolume {
        name: format!("live/{}", record.key),
        key: Some(record.key.clone()),
        properties: properties(record),
    };
    let instance = FoundInstance {
        name: runs.key.daemon_name(),
        key: Some(runs.key.clone()),
        properties: properties(&runs),
        running: true,
    };
    let effects = Arc::new(ModelEffects::default());
    let volumes = [&of_before, &runs, &sleeps].map(volume).to_vec();
    effects.set_found(Survey { volumes, instances: vec![instance] });
    let bench = Bench::in_memory(effects, config(policy()));
    let attending = bench.projects.start(bench.running.clone()).await.expect("the store can be read");
    let address = async |of: &ProjectRecord| {
        bench.projects.store().project(&of.key).await.expect("read").expect("is there").address
    };
    assert_eq!(address(&runs).await, runs.address, "it runs there");
    assert_eq!(address(&sleeps).await, sleeps.address, "and whoever gets another takes nobody's");
    assert!(![runs.address, sleeps.address].contains(&address(&of_before).await));
    drop(attending);
}
