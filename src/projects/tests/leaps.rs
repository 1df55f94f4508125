//! A wall clock that leaps: while the disk takes its time, and between two builds.

use std::sync::atomic::{AtomicI64, Ordering};

use kiln_domain::Timestamp;

use super::*;
use crate::clock::Clock;
use crate::store::MemoryDisk;

/// The host's clock, and by how many milliseconds it was set ahead.
#[derive(Default)]
struct Leaping(AtomicI64);

impl Clock for Leaping {
    fn now(&self) -> Timestamp {
        SystemClock.now().shifted(self.0.load(Ordering::Relaxed))
    }
}

/// Longer than any lease counts.
const LEAP: i64 = 3 * 3_600_000;

/// Carries out what waits for the disk until the route is answered.
async fn commit_until<T>(disk: &MemoryDisk, work: impl Future<Output = T>) -> T {
    let commits = async {
        loop {
            disk.some_waiting().await;
            disk.commit_now();
        }
    };
    tokio::select! {
        done = work => done,
        () = commits => unreachable!("it goes on for ever"),
    }
}

fn projects_with(
    store: Store,
    effects: Arc<ModelEffects>,
    clock: Arc<Leaping>,
    dir: &TempDir,
    policy: Policy,
) -> Projects {
    let pki = Pki::new(dir.path()).expect("certificates");
    let foundations = Foundations { store, effects, pki, clock, entropy: Arc::new(SystemEntropy::default()) };
    Projects::new(config(policy), foundations)
}

/// A build waits for a daemon that answers; as that is written down, the clock leaps. Its lease is released at the end.
async fn leap_while_it_is_written_down(by_millis: i64) {
    let (store, disk) = Store::in_memory().expect("a database");
    let (effects, clock) = (Arc::new(ModelEffects::gated()), Arc::new(Leaping::default()));
    let dir = TempDir::new().expect("a directory");
    let projects = projects_with(store, effects.clone(), clock.clone(), &dir, policy());
    let route = tokio::spawn({
        let projects = projects.clone();
        async move { projects.route(spec(), RouteOptions::default()).await.map(deliver) }
    });
    let before = [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance, Step::StartInstance];
    effects.gate.add_permits(before.len());
    commit_until(&disk, async {
        while effects.done().len() < before.len() || disk.waiting() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    effects.gate.add_permits(1);
    disk.some_waiting().await;
    clock.0.store(by_millis, Ordering::Relaxed);
    let build = commit_until(&disk, route).await.expect("it goes on").expect("routed");
    let released = async {
        // Something else is told first, and the worker looks at its leases.
        projects.why(&key()).await.expect("explained");
        projects.complete(&key(), &token(&build)).await.expect("asked")
    };
    assert!(commit_until(&disk, released).await, "a lease was forgotten when the clock leapt by {by_millis} ms");
}

#[tokio::test]
async fn a_lease_that_is_given_as_the_clock_leaps_counts_from_then() {
    for by_millis in [-LEAP, LEAP] {
        leap_while_it_is_written_down(by_millis).await;
    }
}

/// What was in the future would put the next snapshot off by as much.
#[tokio::test]
async fn a_clock_that_goes_back_puts_no_snapshot_off() {
    for restarted in [false, true] {
        let (effects, clock) = (Arc::new(ModelEffects::default()), Arc::new(Leaping::default()));
        effects.set_cheap();
        let dir = TempDir::new().expect("a directory");
        let store = Store::open(&dir.path().join("kiln.db")).expect("a database");
        let mut projects = projects_with(store.clone(), effects.clone(), clock.clone(), &dir, super::past::eager());
        let noted = async || store.project(&key()).await.expect("read").and_then(|record| record.cache.snapshot);
        for count in 1..=2 {
            let before = noted().await;
            // A build in the very millisecond of a snapshot counts as what is in it.
            tokio::time::sleep(Duration::from_millis(10)).await;
            let build = projects.route(spec(), RouteOptions::default()).await.map(deliver).expect("routed");
            assert!(projects.complete(&key(), &token(&build)).await.expect("asked"));
            let taken = async {
                // And written down: the clock is not to leap in the middle of that.
                while effects.done().iter().filter(|(_, step)| *step == Step::TakeSnapshot).count() < count
                    || noted().await == before
                {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            let taken = tokio::time::timeout(PATIENCE, taken).await;
            assert!(taken.is_ok(), "snapshot {count} was not taken (restarted: {restarted})");
            clock.0.fetch_sub(LEAP, Ordering::Relaxed);
            if restarted {
                projects.stop(&key(), false).await.expect("stopped");
                projects = projects_with(store.clone(), effects.clone(), clock.clone(), &dir, super::past::eager());
            }
        }
    }
}
