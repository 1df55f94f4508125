//! On what a real buildkitd leaves: `KILN_TEST_BUILDKITD`, or the one on the path, with the buildctl that lies beside it.
//! Needs root and runc.

use std::os::unix::fs::FileExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::*;

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|d| d.join(program)).find(|p| p.is_file())
}

/// `None` says why on stderr.
fn buildkit() -> Option<(PathBuf, PathBuf)> {
    let skipped = |why: &str| {
        eprintln!("skipped: {why}");
        None
    };
    if !rustix::process::geteuid().is_root() {
        return skipped("buildkitd needs root");
    }
    if on_path("runc").is_none() && on_path("buildkit-runc").is_none() {
        return skipped("there is no runc");
    }
    let daemon = std::env::var_os("KILN_TEST_BUILDKITD").map(PathBuf::from).or_else(|| on_path("buildkitd"));
    let Some(daemon) = daemon else { return skipped("no buildkitd: set KILN_TEST_BUILDKITD to one") };
    let client = daemon.with_file_name("buildctl");
    if client.is_file() { Some((daemon, client)) } else { skipped("no buildctl beside buildkitd") }
}

struct Daemon {
    child: Child,
    client: PathBuf,
    state: tempfile::TempDir,
}

impl Daemon {
    fn start(programs: &(PathBuf, PathBuf), state: tempfile::TempDir) -> Self {
        let log = File::create(state.path().join("log")).expect("made");
        let child = Command::new(&programs.0)
            .args(["--oci-worker-net", "host", "--root"])
            .arg(state.path().join("root"))
            .arg("--addr")
            .arg(address(&state))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("started");
        Self { child, client: programs.1.clone(), state }
    }

    /// A build of two layers that nobody has built before, still running.
    fn build(&self, number: u8) -> Child {
        let context = self.state.path().join(format!("context-{number}"));
        std::fs::create_dir(&context).expect("made");
        std::fs::write(context.join("Dockerfile"), "FROM scratch\nCOPY data /\nCOPY Dockerfile /\n").expect("written");
        let noise: Vec<u8> = (0..1_u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 ^ number).collect();
        std::fs::write(context.join("data"), noise).expect("written");
        let local = |name: &str| format!("{name}={}", context.display());
        Command::new(&self.client)
            .args(["--wait", "--timeout", "60", "--addr", &address(&self.state)])
            .args(["build", "--frontend", "dockerfile.v0", "--output", "type=oci,dest=/dev/null"])
            .args(["--local", &local("context"), "--local", &local("dockerfile")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("started")
    }

    fn kill(mut self) -> tempfile::TempDir {
        self.child.kill().expect("killed");
        self.child.wait().expect("it ended");
        self.state
    }
}

fn address(state: &tempfile::TempDir) -> String {
    format!("unix://{}", state.path().join("socket").display())
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("cp");
    assert!(copied.success());
}

fn files(directory: &Path) -> Vec<PathBuf> {
    entries(directory).expect("listed").into_iter().map(|entry| entry.path()).collect()
}

#[test]
fn damage_to_what_buildkitd_keeps_is_seen_and_its_work_is_none() {
    let Some(programs) = buildkit() else { return };
    let daemon = Daemon::start(&programs, tempfile::tempdir().expect("a directory"));
    let root = daemon.state.path().join("root");
    let begun = Instant::now();
    let mut looks = 0;
    for number in 0..3 {
        let mut build = daemon.build(number);
        loop {
            assert_eq!(broken_database(&root).expect("looked"), None, "the daemon is at work");
            looks += 1;
            if let Some(status) = build.try_wait().expect("no error") {
                assert!(
                    status.success(),
                    "{}",
                    std::fs::read_to_string(daemon.state.path().join("log")).expect("a log")
                );
                break;
            }
            assert!(begun.elapsed() < Duration::from_mins(2), "three small builds take seconds");
        }
    }
    assert!(looks > 10, "{looks} looks at databases that are written to");
    let state = daemon.kill();
    let good = state.path().join("good");
    copy(&root, &good);
    assert_eq!(broken_database(&root).expect("looked"), None, "killed, and whole");
    let blobs = files(&root.join("runc-overlayfs/content/blobs/sha256"));
    assert!(blobs.len() >= 9, "{blobs:?}");
    assert_eq!(changed_blobs(&root, &good).expect("looked"), None);

    // It goes on where it was, and builds something else.
    let daemon = Daemon::start(&programs, state);
    assert!(daemon.build(3).wait().expect("it ended").success());
    let state = daemon.kill();
    assert_eq!(broken_database(&root).expect("looked"), None);
    assert_eq!(changed_blobs(&root, &good).expect("looked"), None, "what came later is not compared");

    damage_to_databases(&root, &good);
    let blob = blobs.iter().max_by_key(|blob| blob.metadata().expect("there").len()).expect("one");
    let whole = File::options().write(true).open(blob).expect("opened");
    whole.write_all_at(b"poison", 100).expect("written");
    let complaint = changed_blobs(&root, &good).expect("looked").expect("damaged");
    assert!(complaint.contains(&blob.file_name().expect("a name").to_string_lossy()[..]), "{complaint}");
    whole.set_len(100).expect("cut");
    assert!(changed_blobs(&root, &good).expect("looked").is_some());
    drop(state);
}

fn damage_to_databases(root: &Path, good: &Path) {
    for name in [
        "cache.db",
        "history.db",
        "runc-overlayfs/containerdmeta.db",
        "runc-overlayfs/metadata_v2.db",
        "runc-overlayfs/snapshots/metadata.db",
    ] {
        let path = root.join(name);
        let whole = std::fs::read(&path).expect("read");
        let zeroed = |pages: std::ops::Range<usize>| {
            let mut bytes = whole.clone();
            bytes[pages.start * 4096..pages.end * 4096].fill(0);
            bytes
        };
        for damaged in [whole[..4096].to_vec(), whole[..3 * 4096].to_vec(), zeroed(0..2), zeroed(0..4)] {
            std::fs::write(&path, damaged).expect("written");
            let complaint = broken_database(root).expect("looked").expect("damaged");
            assert!(complaint.contains(name), "{complaint}");
        }
        std::fs::write(&path, "").expect("written");
        assert_eq!(broken_database(root).expect("looked"), None, "the daemon makes a new one of it");
        let complaint = emptied_database(root, good).expect("looked").expect("damaged");
        assert!(complaint.contains(name), "{complaint}");
        for alive in [zeroed(0..1), zeroed(1..2), whole.clone()] {
            std::fs::write(&path, alive).expect("written");
            assert_eq!(broken_database(root).expect("looked"), None, "one meta page is enough");
        }
    }
}

#[test]
fn a_thousand_blobs_are_looked_at_within_milliseconds() {
    let directory = tempfile::tempdir().expect("a directory");
    let (cache, good) = (directory.path().join("cache"), directory.path().join("good"));
    let blobs = cache.join("runc-overlayfs/content/blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("made");
    for number in 0..1000 {
        std::fs::write(blobs.join(format!("{number:064x}")), "x").expect("written");
    }
    copy(&cache, &good);
    let fastest = (0..5).map(|_| {
        let begun = Instant::now();
        assert_eq!(changed_blobs(&cache, &good).expect("looked"), None);
        begun.elapsed()
    });
    let fastest = fastest.min().expect("five");
    println!("1000 blobs: {fastest:?}");
    assert!(fastest < Duration::from_millis(100), "{fastest:?}");
}
