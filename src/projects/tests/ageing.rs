//! What grows old while nobody builds, on a clock that goes with the runtime's.

use kiln_domain::{Phase, Snapshot, SnapshotName, Timestamp, Verdict};
use tokio::time::Instant;

use super::*;
use crate::clock::Clock;

const BEGIN: Timestamp = Timestamp::from_millis(1_800_000_000_000);

struct Paced(Instant);

impl Clock for Paced {
    fn now(&self) -> Timestamp {
        BEGIN.plus(self.0.elapsed())
    }
}

fn taken(sequence: u64, days_ago: i64, verdict: Verdict) -> Snapshot {
    let taken = BEGIN.shifted(-days_ago * 86_400_000);
    Snapshot { name: SnapshotName::new(sequence), taken, verdict, bytes: None }
}

#[tokio::test(start_paused = true)]
async fn old_snapshots_of_a_project_that_nobody_builds_go() {
    let (store, disk) = Store::in_memory().expect("a database");
    tokio::spawn(async move {
        loop {
            disk.some_waiting().await;
            disk.commit_now();
        }
    });
    let (dir, effects) = (TempDir::new().expect("a directory"), Arc::new(ModelEffects::default()));
    let foundations = Foundations {
        store: store.clone(),
        effects: effects.clone(),
        pki: Pki::new(dir.path()).expect("certificates"),
        clock: Arc::new(Paced(Instant::now())),
        entropy: Arc::new(SystemEntropy::default()),
    };
    let config = config(policy());
    let mut record = store.create_project(&spec(), config.addresses, BEGIN).await.expect("written").record;
    record.phase = Phase::Idle;
    store.save_project(&record, None).await.expect("written");
    effects.put_on_disk(&key(), 10);
    effects.seen_as(&key(), InstanceSeen::STOPPED);
    // The first is too old, and one day later so is the second.
    let (good, newest) = (taken(3, 30, Verdict::Good), taken(4, 1, Verdict::Unchecked));
    let all = vec![taken(1, 15, Verdict::Good), taken(2, 13, Verdict::Unchecked), good, newest];
    effects.set_snapshots(&key(), all.clone());

    let projects = Projects::new(config, foundations);
    let running = CancellationToken::new();
    drop(projects.start(running.clone()).await.expect("the store can be read"));
    tokio::time::sleep(Duration::from_mins(50)).await;
    assert_eq!((effects.snapshots_of(&key()), effects.done().len()), (all.clone(), 0), "the clock may have leapt");
    tokio::time::sleep(Duration::from_mins(30)).await;
    assert_eq!(effects.snapshots_of(&key()), all[1..]);
    assert_eq!(projects.workers(), 0, "it is idle, as before");
    let done = effects.done().len();
    tokio::time::sleep(Duration::from_hours(12)).await;
    assert_eq!(effects.done().len(), done, "once a day");
    tokio::time::sleep(Duration::from_hours(36)).await;
    assert_eq!(effects.snapshots_of(&key()), [good, newest], "what one would go back to stays");
    running.cancel();
}
