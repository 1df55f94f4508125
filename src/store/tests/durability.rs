//! What was acknowledged is there: after `kill -9`, and beside a disk that is full or read-only.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use super::super::{OpenError, StoreError};
use super::*;

const PLACE: &str = "KILN_TEST_STORE_TO_BE_KILLED";

/// Not a test but the victim of the next one: writes and says what was acknowledged, until it is killed.
#[tokio::test]
async fn victim() {
    let Some(path) = std::env::var_os(PLACE) else { return };
    let store = Store::open(Path::new(&path)).expect("opens");
    store.create_project(&spec(1), POOL, NOW).await.expect("creates");
    for number in 0.. {
        add_lease(&store, 1, &lease(number), Some(event("routed"))).await.expect("adds");
        let mut out = std::io::stdout().lock();
        writeln!(out, "acknowledged {number}").and_then(|()| out.flush()).expect("the parent listens");
    }
}

#[tokio::test]
async fn kill_9_loses_nothing_that_was_acknowledged() {
    let place = Place::new();
    let me = std::env::current_exe().expect("a test has a file");
    // Enough to pass a checkpoint in the third round.
    for rounds in [1, 30, 400] {
        let _ = std::fs::remove_file(place.path());
        let mut child = Command::new(&me)
            .args(["store::tests::durability::victim", "--exact", "--nocapture"])
            .env(PLACE, place.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let lines = BufReader::new(child.stdout.take().expect("is piped")).lines();
        let acknowledged = lines
            .map_while(Result::ok)
            .filter_map(|line| line.split_once("acknowledged ").and_then(|(_, n)| n.parse::<u64>().ok()))
            .nth(rounds)
            .expect("the victim writes");
        child.kill().expect("kills");
        child.wait().expect("dies");
        let store = place.open();
        let leases = store.leases(&key(1)).await.expect("reads");
        let latest = store.latest_event_id().await.expect("reads");
        for number in 0..=acknowledged {
            assert!(leases.contains(&lease(number)), "lease {number} of {acknowledged} is lost");
        }
        assert_eq!(usize::try_from(latest), Ok(leases.len()), "lease and event are one");
    }
}

/// A file system of its own, unmounted in the end. `None` where only root could mount it.
pub(super) struct Disk {
    pub(super) place: Place,
}

impl Disk {
    pub(super) fn mount(options: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: mounting a tmpfs needs root");
            return None;
        }
        let place = Place::new();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "kiln-test"])
            .arg(place.directory.path())
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            eprintln!("skipped: no tmpfs can be mounted here");
            return None;
        }
        Some(Self { place })
    }

    pub(super) fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        let done = Command::new("mount").args(["-o", &options]).arg(self.place.directory.path()).status();
        assert!(done.expect("mount runs").success(), "{options}");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.place.directory.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_is_an_error_and_not_the_end() {
    let Some(disk) = Disk::mount("size=10m") else { return };
    let store = disk.place.open();
    let record = store.create_project(&spec(1), POOL, NOW).await.expect("creates").record;
    // The log's region takes 8 of the 10 MiB; then the log or the database must grow.
    let long = "x".repeat(60_000);
    let mut kept = 0;
    let error = loop {
        match store.record(event(&long)).await {
            Ok(id) => kept = id,
            Err(error) => break error,
        }
        assert!(kept < 1000, "the disk is too big");
    };
    let text = crate::causes::in_one_line(&error);
    let place = disk.place.path();
    assert_eq!(text, format!("the disk is full: free some space on the file system of {}", place.display()));
    assert_eq!(store.latest_event_id().await.expect("reads"), kept, "what was acknowledged, and no more");
    assert_eq!(store.project(&record.key).await.expect("reads go on"), Some(record));
    disk.remount("size=64m");
    assert_eq!(store.record(event("room again")).await.expect("writes go on"), kept + 1);
}

#[test]
fn a_disk_that_is_full_already_opens_all_the_same() {
    let Some(disk) = Disk::mount("size=1m") else { return };
    disk.place.open();
}

#[test]
fn a_read_only_directory_is_refused() {
    let Some(disk) = Disk::mount("size=1m,ro") else { return };
    let error = Store::open(&disk.place.path()).err().expect("is refused");
    assert!(matches!(error, OpenError::Io { doing: "open the lock file", .. }), "{error:?}");
}

#[tokio::test]
async fn what_would_go_into_a_file_that_no_start_finds_is_refused() {
    for name in ["kiln.db", "kiln.db-wal"] {
        let place = Place::new();
        let store = place.open();
        store.create_project(&spec(1), POOL, NOW).await.expect("written");
        std::fs::remove_file(place.directory.path().join(name)).expect("removed");
        let refused = store.ping().await;
        assert!(matches!(refused, Err(StoreError::Gone { .. })), "without {name}: {refused:?}");
        assert!(store.projects().await.is_ok(), "what is known can be read");
    }
}

#[tokio::test]
async fn only_what_never_came_to_anything_is_forgotten() {
    let place = Place::new();
    let store = place.open();
    for number in 1..=4 {
        store.create_project(&spec(number), POOL, NOW).await.expect("written");
    }
    store.add_lease(&key(1), &lease(1), &BuildTimes::default(), None).await.expect("written");
    let mut record = store.project(&key(2)).await.expect("read").expect("there");
    record.settings.cpus = Some(2);
    store.save_project(&record, None).await.expect("written");
    let mut record = store.project(&key(3)).await.expect("read").expect("there");
    record.generation = record.generation.next();
    store.save_project(&record, None).await.expect("written");
    for number in 1..=4 {
        assert_eq!(store.forget_unborn(&key(number)).await.expect("written"), number == 4, "{number}");
    }
    assert_eq!(store.projects().await.expect("read").len(), 3);
    assert!(store.project(&key(4)).await.expect("read").is_none());
}
