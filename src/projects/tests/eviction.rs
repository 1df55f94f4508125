//! What goes when the storage, or the memory, of a model host runs short.

use kiln_domain::admission::HostLoad;
use kiln_domain::cache::eviction::EvictionPolicy;
use kiln_domain::{Phase, Snapshot, SnapshotName, Tier, Timestamp, Verdict};

use super::super::eviction::Evictor;
use super::*;
use crate::clock::Clock as _;
use crate::host::volumes::TrashName;
use crate::metrics::Format;

fn named(name: &str) -> BuildSpec {
    BuildSpec::new("github.com/org/repo", name, "", "amd64").expect("valid")
}

fn key_of(name: &str) -> Key {
    Key::of(&named(name))
}

/// Whose caches may go however lately they were used, down from 80 to 75 of 100.
fn bench() -> Bench {
    let eviction = EvictionPolicy { keep_newer: Duration::ZERO, ..EvictionPolicy::default() };
    let bench =
        Bench::with_config(ModelEffects::default(), ProjectsConfig { untrusted: Ok(()), eviction, ..config(policy()) });
    bench.effects.set_disk(1000, 0);
    bench
}

async fn route_of(bench: &Bench, name: &str, caller: Caller) -> Result<RouteResponse, RouteError> {
    let options = RouteOptions { caller, ..RouteOptions::default() };
    tokio::time::timeout(PATIENCE, bench.projects.route(named(name), options)).await.expect("in time").map(deliver)
}

/// A cache of so many bytes that nobody has used for so many hours, and no daemon.
async fn idle(bench: &Bench, name: &str, bytes: u64, hours: u64) {
    let (key, store) = (key_of(name), bench.projects.store());
    let build = route_of(bench, name, Caller::default()).await.expect("routed");
    bench.projects.complete(&key, &token(&build)).await.expect("released");
    bench.projects.stop(&key, false).await.expect("stopped");
    bench.until("its worker has gone", async |b| b.projects.registry.get(&key).is_none()).await;
    let mut record = store.project(&key).await.expect("reads").expect("is there");
    assert_eq!(record.phase, Phase::Idle);
    record.last_activity = ago(hours);
    store.save_project(&record, None).await.expect("written");
    bench.effects.put_on_disk(&key, bytes);
}

fn ago(hours: u64) -> Timestamp {
    SystemClock.now().shifted(-i64::try_from(hours * 3_600_000).expect("small"))
}

/// An evictor of the test's own: Kiln's next look is half a minute away.
async fn evictor(bench: &Bench) -> Evictor {
    let surveyed = std::sync::atomic::Ordering::Acquire;
    bench.until("the host was looked through", async |b| b.projects.shared.surveyed.load(surveyed)).await;
    Evictor::new(bench.projects.clone())
}

async fn told(bench: &Bench, kind: &str) -> Vec<(Option<Key>, String)> {
    // What was told before it is on the disk when this is.
    bench.projects.store().ping().await.expect("writes");
    let events = bench.projects.store().events(0, 1000).await.expect("reads");
    events.into_iter().filter(|event| event.kind == kind).map(|event| (event.key, event.text)).collect()
}

/// The keys that had to go so far, in order: one event each.
async fn gone(bench: &Bench) -> Vec<Key> {
    told(bench, "evicted").await.into_iter().filter_map(|(key, _)| key).collect()
}

fn snapshot(sequence: u64, verdict: Verdict) -> Snapshot {
    Snapshot { name: SnapshotName::new(sequence), taken: ago(9), verdict, bytes: Some(50) }
}

#[tokio::test]
async fn what_is_worth_least_goes_first_and_nothing_that_is_used() {
    let bench = bench();
    idle(&bench, "a", 100, 9).await;
    idle(&bench, "b", 100, 8).await;
    bench.effects.set_snapshots(
        &key_of("b"),
        vec![snapshot(1, Verdict::Good), snapshot(2, Verdict::Unchecked), snapshot(3, Verdict::Unchecked)],
    );
    let _leased = route_of(&bench, "leased", Caller::default()).await.expect("routed");
    bench.effects.put_on_disk(&key_of("leased"), 100);
    idle(&bench, "hot", 100, 99).await;
    bench.projects.set(&key_of("hot"), |own| own.tier = Some(Tier::Hot)).await.expect("set");
    let fork = route_of(&bench, "b", Caller::untrusted()).await.expect("routed");
    bench.projects.complete(&fork.key, &token(&fork)).await.expect("released");
    bench.effects.put_on_disk(&fork.key, 50);
    bench.effects.throw_away(TrashName::new(key_of("a"), 7), ago(1), 100);
    let mut evictor = evictor(&bench).await;

    // 800: no more than it takes.
    bench.effects.set_disk(1000, 100);
    assert!(!evictor.round().await, "the trash was enough");
    let words = "00007 was freed for good: the caches' storage is 80 % full";
    bench.until("it is told", async |b| told(b, "purged").await.concat_texts().contains(words)).await;
    assert_eq!(gone(&bench).await, []);

    bench.effects.set_disk(1000, 260);
    assert!(evictor.round().await, "it was the copy, and that is not enough");
    assert_eq!(gone(&bench).await, std::slice::from_ref(&fork.key));
    bench.until("the copy has gone", async |b| b.projects.show(&fork.key).await.expect("shown").is_none()).await;

    assert!(evictor.round().await, "then the snapshots");
    assert_eq!(gone(&bench).await.last(), Some(&key_of("b")));
    let left: Vec<_> =
        bench.effects.snapshots_of(&key_of("b")).iter().map(|snapshot| snapshot.name.sequence()).collect();
    assert_eq!(left, [1, 3], "one can go back to a good one, and to the newest");

    assert!(!evictor.round().await, "then the cache that nobody has used for longest");
    assert_eq!(gone(&bench).await.last(), Some(&key_of("a")));
    let text = told(&bench, "evicted").await.concat_texts();
    assert!(text.contains("its cache was given up (about 100B): the caches' storage is 76 % full"), "{text}");
    assert!(text.contains("nobody has used this cache for 9 h"), "{text}");

    bench.effects.set_disk(1000, 900);
    assert!(evictor.round().await);
    assert_eq!(gone(&bench).await.last(), Some(&key_of("b")));
    for _ in 0..2 {
        assert!(evictor.round().await, "what is left is used");
    }
    assert_eq!(told(&bench, "storage-full").await.len(), 1, "which is said once");
    assert_eq!(bench.count(Step::DestroyVolume), 3);
    let metrics = bench.projects.metrics().text(Format::Prometheus).expect("text");
    for (kind, count) in [("trash", 1), ("copy", 1), ("snapshots", 1), ("cache", 2)] {
        let line = format!("kiln_evictions_total{{kind=\"{kind}\"}} {count}");
        assert!(metrics.contains(&line), "{line}");
    }

    bench.effects.set_disk(1000, 0);
    let made = bench.count(Step::CreateVolume);
    bench.until("it begins anew", async |b| route_of(b, "a", Caller::default()).await.is_ok()).await;
    assert_eq!(bench.count(Step::CreateVolume), made + 1);
}

trait Texts {
    fn concat_texts(&self) -> String;
}

impl Texts for Vec<(Option<Key>, String)> {
    fn concat_texts(&self) -> String {
        self.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n")
    }
}

#[tokio::test]
async fn what_cannot_go_is_passed_over_and_the_next_goes() {
    let bench = bench();
    idle(&bench, "a", 100, 9).await;
    idle(&bench, "b", 100, 8).await;
    let mut evictor = evictor(&bench).await;
    bench.effects.set_disk(1000, 600);
    bench.effects.set_mood(Mood::Failing(Step::DestroyVolume));
    assert!(evictor.round().await);
    assert_eq!(gone(&bench).await, []);
    bench.effects.set_mood(Mood::Obedient);
    assert!(!evictor.round().await);
    assert_eq!(gone(&bench).await, [key_of("b")]);
}

#[tokio::test]
async fn what_the_storage_frees_behind_one_s_back_is_not_given_up_twice_over() {
    let bench = bench();
    idle(&bench, "a", 100, 9).await;
    idle(&bench, "b", 100, 8).await;
    bench.effects.throw_away(TrashName::new(key_of("c"), 7), ago(1), 20);
    let mut evictor = evictor(&bench).await;
    bench.effects.set_lazy_disk();
    bench.effects.set_disk(1000, 620);
    assert!(evictor.round().await, "that was the trash");
    for _ in 0..2 {
        assert!(!evictor.round().await, "one of them was enough");
        assert_eq!(gone(&bench).await, [key_of("a")]);
    }
}

#[tokio::test]
async fn a_cache_is_measured_when_it_is_about_to_go_and_once() {
    let bench = bench();
    for (name, hours) in [("a", 9), ("b", 8), ("c", 7)] {
        idle(&bench, name, 100, hours).await;
    }
    let mut evictor = evictor(&bench).await;
    assert!(!evictor.round().await);
    assert_eq!(bench.effects.measured(), 0, "there is room");
    bench.effects.set_disk(1000, 500);
    assert!(!evictor.round().await);
    assert_eq!((gone(&bench).await, bench.effects.measured()), (vec![key_of("a")], 1));
}

#[tokio::test]
async fn nothing_goes_that_is_not_known_to_rest() {
    let bench = bench();
    idle(&bench, "a", 100, 9).await;
    let mut evictor = evictor(&bench).await;
    bench.effects.set_disk(1000, 800);
    bench.projects.shared.surveyed.store(false, std::sync::atomic::Ordering::Release);
    assert!(evictor.round().await, "what runs may not be known yet");
    bench.projects.shared.surveyed.store(true, std::sync::atomic::Ordering::Release);
    bench.effects.set_mood(Mood::Blind);
    assert!(evictor.round().await, "nor how full it is");
    assert_eq!(gone(&bench).await, []);
}

#[tokio::test]
async fn a_start_that_is_refused_for_want_of_room_makes_some() {
    let bench = bench();
    idle(&bench, "a", 500, 9).await;
    evictor(&bench).await;
    bench.effects.set_disk(1000, 490);
    // What was read of the host a moment ago is good for a second.
    bench.effects.set_load(HostLoad { memory_some: Some(30.0), ..HostLoad::default() });
    bench.until("it is read again", async |b| b.projects.shared.admission.ease().await).await;
    bench.effects.set_load(HostLoad::default());
    let mut refused = 0;
    bench
        .until("there is room", async |b| match route_of(b, "b", Caller::default()).await {
            Ok(_) => true,
            Err(RouteError::NotAdmitted { .. }) => {
                refused += 1;
                false
            }
            Err(error) => panic!("{error}"),
        })
        .await;
    assert!(refused > 0);
    assert_eq!(gone(&bench).await, [key_of("a")]);
}

#[tokio::test]
async fn a_host_that_is_short_of_memory_lets_one_daemon_go_at_a_time() {
    let bench = bench();
    for name in ["a", "b"] {
        let build = route_of(&bench, name, Caller::default()).await.expect("routed");
        bench.projects.complete(&key_of(name), &token(&build)).await.expect("released");
    }
    let busy = route_of(&bench, "busy", Caller::default()).await.expect("routed");
    assert!(!bench.projects.shared.admission.ease().await);
    bench.effects.set_load(HostLoad { memory_some: Some(30.0), ..HostLoad::default() });
    bench
        .until("one goes", async |b| {
            b.projects.shared.admission.ease().await && b.count(Step::StopInstance(Stop::Graceful)) == 1
        })
        .await;
    for _ in 0..3 {
        assert!(bench.projects.shared.admission.ease().await, "what a stop gives back shows only later");
    }
    assert_eq!(bench.count(Step::StopInstance(Stop::Graceful)), 1);
    let phase = bench.projects.show(&busy.key).await.expect("shown").map(|view| view.phase);
    assert_eq!(phase.as_deref(), Some("warm"));
}
