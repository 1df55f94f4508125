//! What takes long, is given up, and meets others meanwhile.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;
use tokio::sync::Notify;

use super::halves::Half;
use super::*;
use crate::host::volumes::contract::{clock, key};
use crate::host::volumes::dir::Dir;
use crate::host::volumes::medium::Copy;
use crate::host::volumes::search_path;

const PATIENCE: Duration = Duration::from_secs(20);

/// Plain directories that are copied, or removed, only when the test says so.
struct Slow {
    dir: Dir,
    copies: AtomicBool,
    removals: AtomicBool,
    begun: Notify,
    goes_on: Notify,
}

impl Slow {
    async fn wait(&self, slow: &AtomicBool) {
        if slow.load(Ordering::SeqCst) {
            self.begun.notify_one();
            self.goes_on.notified().await;
        }
    }
}

#[async_trait]
impl Medium for Slow {
    fn name(&self) -> &'static str {
        "dir"
    }

    fn copies_are_instant(&self) -> bool {
        false
    }

    async fn make(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        self.dir.make(at, size).await
    }

    async fn copy(&self, from: &Path, to: &Path, use_: Copy) -> Result<(), Failure> {
        self.dir.copy(from, to, use_).await?;
        self.wait(&self.copies).await;
        Ok(())
    }

    async fn carry(&self, from: &Path, to: &Path) -> Result<(), Failure> {
        self.dir.carry(from, to).await
    }

    async fn remove(&self, at: &Path) -> Result<(), Failure> {
        self.wait(&self.removals).await;
        self.dir.remove(at).await
    }

    async fn freed(&self, root: &Path) -> Result<(), Failure> {
        self.dir.freed(root).await
    }

    async fn usage(&self, at: &Path, snapshots: &[PathBuf]) -> Result<Usage, Failure> {
        self.dir.usage(at, snapshots).await
    }

    async fn fill(&self, at: &Path) -> Result<Option<Fill>, Failure> {
        self.dir.fill(at).await
    }

    async fn written_since(&self, at: &Path, snapshot: &Path) -> Result<Option<bool>, Failure> {
        self.dir.written_since(at, snapshot).await
    }

    async fn resize(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        self.dir.resize(at, size).await
    }
}

struct Lab {
    root: TempDir,
    engine: Tree<Slow>,
    volume: Volume,
    snapshot: SnapshotName,
}

impl Lab {
    /// A volume that a daemon has been in, and a snapshot of it.
    async fn new() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let slow = Slow {
            dir: Dir::find(&search_path()).expect("coreutils"),
            copies: AtomicBool::new(false),
            removals: AtomicBool::new(false),
            begun: Notify::new(),
            goes_on: Notify::new(),
        };
        let engine = Tree::open(root.path(), slow, clock(), |_| Ok(())).await.expect("opened");
        let volume = engine.create(&key(), &Properties::new(), None).await.expect("created");
        std::fs::write(volume.path.join("buildkitd.lock"), "").expect("written");
        std::fs::write(volume.path.join("cache.db"), "x").expect("written");
        let snapshot = engine.snapshot(&key()).await.expect("a snapshot").name;
        Self { root, engine, volume, snapshot }
    }

    fn slow_copies(&self, slow: bool) {
        self.engine.medium.copies.store(slow, Ordering::SeqCst);
    }

    fn slow_removals(&self, slow: bool) {
        self.engine.medium.removals.store(slow, Ordering::SeqCst);
    }

    async fn begun(&self) {
        in_time(self.engine.medium.begun.notified()).await;
    }

    fn go_on(&self) {
        self.engine.medium.goes_on.notify_one();
    }

    /// `work` is given up in the middle of a copy or a removal.
    async fn give_up<T: std::fmt::Debug>(&self, work: impl Future<Output = T>) {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            done = &mut work => panic!("it did not wait: {done:?}"),
            () = self.begun() => {}
        }
    }

    fn halves(&self) -> Vec<String> {
        let listed = |at: PathBuf| entries(&at).expect("listed").into_iter().map(|(name, _)| name);
        let root = self.root.path();
        let all = listed(root.join(LIVE)).chain(listed(root.join(TRASH)));
        all.chain(listed(self.engine.home(&key()).join(SNAPSHOTS))).filter(|name| name.starts_with(HALF)).collect()
    }

    async fn no_halves(&self) {
        let gone = async {
            while !self.halves().is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, gone).await.is_ok(), "they stay: {:?}", self.halves());
    }
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("in time")
}

#[tokio::test]
async fn a_copy_that_is_given_up_half_way_leaves_nothing() {
    let lab = Lab::new().await;
    let (engine, snapshot, nothing) = (&lab.engine, lab.snapshot, Properties::new());
    let (fork, trial) = (key().fork(), key().trial());
    lab.slow_copies(true);
    for _ in 0..2 {
        lab.give_up(engine.snapshot(&key())).await;
        assert_eq!(lab.halves().len(), 1);
        lab.no_halves().await;
        lab.give_up(engine.fork(&key(), &fork, &nothing)).await;
        assert_eq!(lab.halves().len(), 1);
        lab.no_halves().await;
        lab.give_up(engine.clone_snapshot(&key(), snapshot, &trial, &nothing)).await;
        lab.no_halves().await;
        lab.give_up(engine.rollback(&key(), snapshot)).await;
        lab.no_halves().await;
    }
    lab.slow_copies(false);
    assert_eq!(engine.get(&key()).await.expect("looked").as_ref(), Some(&lab.volume));
    assert_eq!(engine.snapshots(&key()).await.expect("listed").len(), 1);
    engine.snapshot(&key()).await.expect("a snapshot");
    engine.fork(&key(), &fork, &nothing).await.expect("forked");
    engine.clone_snapshot(&key(), snapshot, &trial, &nothing).await.expect("cloned");
    engine.rollback(&key(), snapshot).await.expect("rolled back");
}

#[tokio::test]
async fn a_rollback_that_is_given_up_before_its_exchange_leaves_nothing_and_after_it_everything() {
    let lab = Lab::new().await;
    let engine = &lab.engine;
    let prepared = async || {
        let (_, record) = engine.require("roll back", &key()).await.expect("there");
        let name = engine.next_in_trash(&key()).await.expect("a name");
        engine.prepare(&key(), &name, lab.snapshot, &record).await.expect("prepared");
        (Half::new(&engine.halves, What::Prepared, engine.trashed(&name)), name, record)
    };
    let (half, name, _) = prepared().await;
    drop(half);
    while engine.trashed(&name).exists() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    lab.no_halves().await;
    let (half, name, record) = prepared().await;
    engine.exchange(&key(), half, record).await.expect("exchanged");
    // Whoever gave up a moment too late.
    engine.halves.remove(What::Prepared, &engine.trashed(&name)).await.expect("nothing to remove");
    let trashed = std::fs::read_to_string(engine.trashed(&name).join(CACHE).join("cache.db"));
    assert_eq!(trashed.expect("what the volume was"), "x");
}

#[tokio::test]
async fn what_is_on_its_way_out_goes_though_nobody_waits() {
    let lab = Lab::new().await;
    let trashed = lab.engine.rollback(&key(), lab.snapshot).await.expect("rolled back");
    lab.slow_removals(true);
    lab.give_up(lab.engine.purge(&trashed)).await;
    lab.give_up(lab.engine.destroy_snapshot(&key(), lab.snapshot)).await;
    assert_eq!(lab.halves().len(), 2);
    assert!(lab.engine.trash().await.expect("trash").is_empty());
    let mut freed = pin!(lab.engine.freed());
    assert!(futures_util::poll!(&mut freed).is_pending(), "its bytes are still there");
    lab.slow_removals(false);
    lab.engine.medium.goes_on.notify_waiters();
    in_time(freed).await.expect("freed");
    assert!(lab.halves().is_empty());
}

#[tokio::test]
async fn a_purge_keeps_nobody_from_the_next_volume() {
    let lab = Lab::new().await;
    let trashed = lab.engine.discard(&key()).await.expect("discarded");
    lab.slow_removals(true);
    let mut purge = pin!(lab.engine.purge(&trashed));
    tokio::select! {
        biased;
        done = &mut purge => panic!("it did not wait: {done:?}"),
        () = lab.begun() => {}
    }
    let next = in_time(lab.engine.create(&key(), &Properties::new(), None)).await.expect("created");
    assert!(entries(&next.path).expect("listed").is_empty());
    lab.slow_removals(false);
    lab.go_on();
    in_time(purge).await.expect("purged");
    lab.no_halves().await;
}

#[tokio::test]
async fn a_project_goes_before_a_copy_of_it() {
    let lab = Lab::new().await;
    let (engine, project, copy, nothing) = (&lab.engine, key(), key().fork(), Properties::new());
    lab.slow_copies(true);
    // Its daemon is let in at once, and then writes.
    for writes in [true, false] {
        let mut fork = pin!(engine.fork(&project, &copy, &nothing));
        tokio::select! {
            biased;
            done = &mut fork => panic!("it did not wait: {done:?}"),
            () = lab.begun() => {}
        }
        in_time(engine.set_properties(&key(), &nothing)).await.expect("it is locked for nobody");
        let daemon = hold_cache(&lab.volume.path).expect("nothing keeps it out").expect("a lock");
        if writes {
            std::fs::write(lab.volume.path.join("cache.db"), "y").expect("written");
        } else {
            lab.go_on();
        }
        let given_up = in_time(fork).await;
        assert!(matches!(given_up, Err(VolumeError::Busy { .. })), "{given_up:?}");
        assert_eq!(engine.get(&key().fork()).await.expect("looked"), None);
        lab.no_halves().await;
        drop(daemon);
    }
    // Nor does what is done to it wait.
    let mut fork = pin!(engine.fork(&project, &copy, &nothing));
    tokio::select! {
        biased;
        done = &mut fork => panic!("it did not wait: {done:?}"),
        () = lab.begun() => {}
    }
    in_time(engine.discard(&key())).await.expect("discarded");
    let given_up = in_time(fork).await;
    assert!(matches!(given_up, Err(VolumeError::Busy { .. })), "{given_up:?}");
}

#[tokio::test]
async fn a_snapshot_that_goes_while_it_is_copied_is_no_copy() {
    let lab = Lab::new().await;
    let (engine, project, trial) = (&lab.engine, key(), key().trial());
    lab.slow_copies(true);
    let nothing = Properties::new();
    let mut clone = pin!(engine.clone_snapshot(&project, lab.snapshot, &trial, &nothing));
    tokio::select! {
        biased;
        done = &mut clone => panic!("it did not wait: {done:?}"),
        () = lab.begun() => {}
    }
    in_time(engine.destroy_snapshot(&key(), lab.snapshot)).await.expect("destroyed");
    lab.go_on();
    in_time(clone).await.expect_err("part of it may be missing");
    assert_eq!(engine.get(&trial).await.expect("looked"), None);
    lab.no_halves().await;
}
