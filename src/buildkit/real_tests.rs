//! Against a real buildkitd: `KILN_TEST_BUILDKITD`, or the one on the path. Needs root and runc.

use std::fs::File;
use std::net::{IpAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kiln_domain::{Key, Timestamp};
use tokio::time::Instant;

use super::*;
use crate::clock::{Clock as _, SystemClock};
use crate::pki::{Credential, DaemonNames, Pki};

const SIZE: u64 = 8 << 30;
const DEADLINE: Duration = Duration::from_secs(20);

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|d| d.join(program)).find(|p| p.is_file())
}

/// `None` says why on stderr.
fn buildkitd() -> Option<PathBuf> {
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
    match std::env::var_os("KILN_TEST_BUILDKITD").map(PathBuf::from).or_else(|| on_path("buildkitd")) {
        Some(program) => Some(program),
        None => skipped("no buildkitd: set KILN_TEST_BUILDKITD to one"),
    }
}

struct Daemon {
    child: Child,
    state: tempfile::TempDir,
    pki: Pki,
    key: Key,
    address: SocketAddrV4,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // SIGTERM, so that it lets go of its mounts; it runs no build that it could wait for.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

impl Daemon {
    fn start(program: &Path, now: Timestamp) -> Self {
        let state = tempfile::tempdir().expect("a directory");
        let pki = Pki::new(state.path()).expect("pki");
        let key: Key = "pbcce5b6205652dd7".parse().expect("a key");
        let address = free_address();
        let names = DaemonNames {
            server_names: vec![key.server_name("kiln.test")],
            addresses: vec![IpAddr::V4(*address.ip())],
        };
        pki.write_daemon_files(&key, &names, now).expect("written");
        let config = DaemonConfig {
            root: state.path().join("root"),
            address,
            files: pki.daemon_directory(&key),
            run: state.path().to_owned(),
            capacity: Capacity::Own(SIZE),
            resolvers: Vec::new(),
            max_parallelism: None,
            debug: false,
        };
        pki.write_daemon_file(&key, "buildkitd.toml", &config.render().expect("rendered")).expect("written");
        let log = File::create(state.path().join("log")).expect("made");
        let child = Command::new(program)
            .arg("--config")
            .arg(pki.daemon_directory(&key).join("buildkitd.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .expect("started");
        Self { child, state, pki, key, address }
    }

    fn target(&self, credential: &Credential) -> DaemonTarget {
        let tls = ClientTls::new(&credential.ca, &credential.cert, &credential.key).expect("usable");
        DaemonTarget { address: self.address, server_name: self.key.server_name("kiln.test"), tls }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.state.path().join("log")).unwrap_or_default()
    }
}

fn free_address() -> SocketAddrV4 {
    let listener = std::net::TcpListener::bind("127.88.0.1:0").expect("bound");
    SocketAddrV4::new("127.88.0.1".parse().expect("an address"), listener.local_addr().expect("bound").port())
}

#[tokio::test]
async fn a_real_daemon_takes_our_configuration_and_only_our_clients() {
    let Some(program) = buildkitd() else { return };
    let now = SystemClock.now();
    let daemon = Daemon::start(&program, now);
    let hour = Duration::from_hours(1);
    let mine = daemon.pki.issue_credential(&daemon.key, now, now.plus(hour)).expect("issued");
    let target = daemon.target(&mine);
    let start = Instant::now();
    if let Err(error) = await_serving(&GrpcProbe, &target, DEADLINE).await {
        panic!("{error:?}\n{}", daemon.log());
    }

    eprintln!("first ListWorkers {} ms after the start", start.elapsed().as_millis());

    let deadline = Instant::now() + DEADLINE;
    let mut control = Control::connect(&target, deadline).await.expect("connected");
    let workers = control.workers(deadline).await.expect("workers");
    assert_eq!(workers.len(), 1, "{workers:?}");
    for worker in &workers {
        assert!(!worker.id.is_empty() && worker.snapshotter.is_some(), "{worker:?}");
        assert_eq!(worker.ceiling(), Some(SIZE / 4 * 3), "{worker:?}");
        assert_eq!(worker.gc.len(), 5, "{worker:?}");
        assert!(worker.gc.iter().all(|rule| rule.max_used > 0 && rule.min_free > 0), "{worker:?}");
        assert_eq!(worker.gc[1].keep, Duration::from_hours(7 * 24));
    }
    assert_eq!(control.disk_usage(deadline).await.expect("usage"), control::DiskUsage::default());
    let version = control.version(deadline).await.expect("a version");
    assert!(version.starts_with('v'), "{version:?}");

    // Another project's credential, with this project's CA to trust the daemon by.
    let other = "p9f75a8e0cb6e0600".parse().expect("a key");
    let theirs = daemon.pki.issue_credential(&other, now, now.plus(hour)).expect("issued");
    let stranger = daemon.target(&Credential { ca: mine.ca.clone(), ..theirs.clone() });
    assert_refused(&stranger, "a stranger").await;
    // An hour ago it was valid for a minute.
    let then = Timestamp::from_millis(now.as_millis() - 3_600_000);
    let late = daemon.pki.issue_credential(&daemon.key, then, then.plus(Duration::from_mins(1))).expect("issued");
    assert_refused(&daemon.target(&late), "expired").await;
    // And we do not take this daemon for another's.
    assert_refused(&daemon.target(&Credential { ca: theirs.ca, ..mine }), "the wrong daemon").await;
}

async fn assert_refused(target: &DaemonTarget, who: &str) {
    let start = Instant::now();
    let outcome = await_serving(&GrpcProbe, target, DEADLINE).await;
    assert!(matches!(outcome, Err(ProbeError::Control(ControlError::TlsRefused { .. }))), "{who}: {outcome:?}");
    assert!(start.elapsed() < DEADLINE / 2, "{who}: waited for what cannot change");
}
