//! Against a real buildkitd: `KILN_TEST_BUILDKITD`, or the one on the path; builds by `KILN_TEST_BUILDX`, or the one on the
//! path. Needs root and runc.

use std::fs::File;
use std::net::{IpAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kiln_domain::cache::size::{Bounds, Collection, SizePolicy};
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

/// As of a volume that does not grow.
fn collection() -> Collection {
    let policy = SizePolicy::default();
    Collection::of(SIZE, &Bounds::new(SIZE, Some(SIZE), &policy), &policy)
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
            capacity: Capacity::Own(collection()),
            resolvers: Vec::new(),
            max_parallelism: None,
            entitlements: kiln_domain::Entitlements::new(),
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

/// A client with a configuration of its own.
struct Buildx {
    program: PathBuf,
    home: tempfile::TempDir,
}

impl Buildx {
    /// `None` says why on stderr.
    fn find() -> Option<PathBuf> {
        let program = std::env::var_os("KILN_TEST_BUILDX").map(PathBuf::from).or_else(|| on_path("buildx"));
        if program.is_none() {
            eprintln!("skipped: no buildx: set KILN_TEST_BUILDX to one");
        }
        program
    }

    fn new(program: PathBuf, daemon: &Daemon, mine: &Credential) -> Self {
        let buildx = Self { program, home: tempfile::tempdir().expect("a directory") };
        let at = |name: &str| buildx.home.path().join(name);
        for (name, text) in [("ca", &mine.ca), ("cert", &mine.cert), ("key", &mine.key)] {
            std::fs::write(at(name), text).expect("written");
        }
        let (ca, cert, key) = (at("ca"), at("cert"), at("key"));
        let name = daemon.key.server_name("kiln.test");
        let tls = format!("cacert={},cert={},key={},servername={name}", ca.display(), cert.display(), key.display());
        let address = format!("tcp://{}", daemon.address);
        let made = buildx
            .command(&["create", "--name=kiln", "--driver=remote", "--driver-opt", &tls, &address])
            .output()
            .expect("buildx");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        buildx
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("BUILDX_CONFIG", self.home.path());
        command
    }

    /// A build that goes on until its client is ended: its context is a tar that has begun and does not end.
    fn begin(&self) -> Client {
        use std::io::Write as _;
        let log = File::create(self.home.path().join("log")).expect("made");
        let mut command = self.command(&["build", "--builder=kiln", "--progress=plain", "-"]);
        let mut child = command.stdin(Stdio::piped()).stderr(log).stdout(Stdio::null()).spawn().expect("buildx");
        let mut block = tar_header("Dockerfile", DOCKERFILE.len()).to_vec();
        block.extend_from_slice(DOCKERFILE.as_bytes());
        // buildx takes two blocks for a look before it begins. What would come after them ends an archive.
        block.resize(2 * 512, 0);
        child.stdin.as_mut().expect("piped").write_all(&block).expect("written");
        Client(child)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }
}

const DOCKERFILE: &str = "FROM scratch\nCOPY Dockerfile /\n";

/// Ended with the test.
struct Client(Child);

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The 512 bytes before a file's contents in a POSIX archive.
fn tar_header(name: &str, size: usize) -> [u8; 512] {
    let mut header = [0; 512];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{size:011o}\0"));
    put(136, "00000000000\0");
    // The sum counts its own field as blanks.
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
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

#[tokio::test]
async fn a_real_daemon_says_how_many_builds_are_going_on() {
    let Some(program) = buildkitd() else { return };
    let Some(buildx) = Buildx::find() else { return };
    let now = SystemClock.now();
    let daemon = Daemon::start(&program, now);
    let mine = daemon.pki.issue_credential(&daemon.key, now, now.plus(Duration::from_hours(1))).expect("issued");
    let target = daemon.target(&mine);
    await_serving(&GrpcProbe, &target, DEADLINE).await.expect("it serves");
    let going_on = async || {
        let answer = GrpcProbe.builds(&target, Instant::now() + DEADLINE).await;
        answer.unwrap_or_else(|error| panic!("{error:?}\n{}", daemon.log()))
    };
    let start = Instant::now();
    assert_eq!(going_on().await, 0);
    eprintln!("asked how many builds there are in {:?}", start.elapsed());

    let buildx = Buildx::new(buildx, &daemon, &mine);
    let until = async |wanted: u32| {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let found = going_on().await;
            if found == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "{found} builds and not {wanted}\n{}\n{}", buildx.log(), daemon.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let first = buildx.begin();
    until(1).await;
    let second = buildx.begin();
    until(2).await;
    drop(first);
    until(1).await;
    drop(second);
    until(0).await;
}

async fn assert_refused(target: &DaemonTarget, who: &str) {
    let start = Instant::now();
    let outcome = await_serving(&GrpcProbe, target, DEADLINE).await;
    assert!(matches!(outcome, Err(ProbeError::Control(ControlError::TlsRefused { .. }))), "{who}: {outcome:?}");
    assert!(start.elapsed() < DEADLINE / 2, "{who}: waited for what cannot change");
}
