//! A place of its own for one kilnd.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::http::{self, Answer};

/// Longer than anything here takes; a test that waits so long has failed.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Each stage has a /24 of its own.
static NEXT: AtomicU8 = AtomicU8::new(0);

pub(crate) struct Stage {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) api: SocketAddr,
    pub(crate) gateway: SocketAddr,
    pub(crate) net: u8,
    daemon_port: u16,
    /// More of the configuration: whole sections, or keys of `[buildkit]` at its beginning.
    pub(crate) more: String,
}

/// How a kilnd that does not start ends.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) code: Option<i32>,
    pub(crate) stderr: String,
}

impl Failed {
    /// One line, with all these words in it.
    #[track_caller]
    pub(crate) fn says(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("kilnd: "), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
    }
}

impl Stage {
    /// `more`: keys of `[buildkit]`, then further sections.
    pub(crate) fn new(more: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("kilnd-test-").tempdir().expect("a directory");
        fs::create_dir(dir.path().join("host")).expect("made");
        let net = NEXT.fetch_add(1, Ordering::Relaxed);
        let (api, gateway) = (free(net, 200), free(net, 201));
        let daemon_port = free(net, 1).port();
        Self { dir, api, gateway, net, daemon_port, more: more.to_owned() }
    }

    /// With a script in the place of buildkitd.
    pub(crate) fn with_script(script: &str, more: &str) -> Self {
        let stage = Self::new(more);
        stage.set_buildkitd(script);
        stage
    }

    pub(crate) fn buildkitd(&self) -> PathBuf {
        self.dir.path().join("buildkitd")
    }

    /// Put in place by another process: this one must not have a program open for writing while other tests fork.
    pub(crate) fn set_buildkitd(&self, script: &str) {
        let source = self.dir.path().join("script");
        fs::write(&source, format!("#!/bin/sh\n{script}\n")).expect("written");
        self.install(&source);
    }

    pub(crate) fn install(&self, program: &Path) {
        let aside = self.dir.path().join("buildkitd.new");
        let copied = Command::new("install").args(["-m", "0755"]).args([program, &aside]).status().expect("install");
        assert!(copied.success());
        fs::rename(&aside, self.buildkitd()).expect("renamed");
    }

    /// Where everything is that kilnd makes.
    pub(crate) fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.host().join("state")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.host().join("run/kiln.sock")
    }

    pub(crate) fn database(&self) -> PathBuf {
        self.state().join("kiln.db")
    }

    pub(crate) fn config_text(&self) -> String {
        format!(
            "state_dir = '{}'\nrun_dir = '{}'\n[api]\nlisten = '{}'\nroute_wait = '30s'\n[gateway]\nlisten = '{}'\n\
             [buildkit]\nport = {}\nbuildkitd = '{}'\n{}\n",
            self.state().display(),
            self.host().join("run").display(),
            self.api,
            self.gateway,
            self.daemon_port,
            self.buildkitd().display(),
            self.more,
        ) + &if self.more.contains("[runtime]") {
            String::new()
        } else {
            format!("[runtime]\naddresses = '127.91.{}.0/25'\n", self.net)
        }
    }

    pub(crate) fn command(arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kilnd"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).env_remove("KILN_CONFIG");
        command.env_remove("KILN_LOG");
        command
    }

    pub(crate) fn write_config(&self, text: &str, mode: u32) -> PathBuf {
        let path = self.dir.path().join("kiln.toml");
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
        path
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("kilnd.log")
    }

    pub(crate) fn start(&self) -> Kilnd<'_> {
        self.start_with(&[])
    }

    pub(crate) fn start_with(&self, options: &[&str]) -> Kilnd<'_> {
        let log = File::options().append(true).create(true).open(self.log_path()).expect("opened");
        self.start_logging_to(options, log.into())
    }

    pub(crate) fn start_logging_to(&self, options: &[&str], stderr: Stdio) -> Kilnd<'_> {
        let config = self.write_config(&self.config_text(), 0o600);
        let mut command = Self::command(&["--config", &config.display().to_string()]);
        command.args(options);
        self.run(command.stderr(stderr))
    }

    /// After `ulimit` with these arguments.
    pub(crate) fn start_limited(&self, ulimit: &str) -> Kilnd<'_> {
        let config = self.write_config(&self.config_text(), 0o600);
        let log = File::options().append(true).create(true).open(self.log_path()).expect("opened");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit {ulimit} && exec \"$0\" --config \"$1\"")]);
        command.arg(env!("CARGO_BIN_EXE_kilnd")).arg(config).stdin(Stdio::null()).stdout(Stdio::null());
        self.run(command.env_remove("KILN_LOG").stderr(log))
    }

    fn run(&self, command: &mut Command) -> Kilnd<'_> {
        let (child, log) = (command.spawn().expect("run"), self.log_path());
        let mut kilnd = Kilnd { stage: self, child, log };
        until("kilnd to be ready", || {
            if let Some(status) = kilnd.child.try_wait().expect("waited") {
                panic!("kilnd ended with {status}: {}", kilnd.log());
            }
            http::get(&self.socket(), "/healthz").is_ok_and(|answer| answer.status == 200)
        });
        kilnd
    }

    /// A start that must not succeed, with the stage's own configuration.
    pub(crate) fn fails(&self) -> Failed {
        let config = self.write_config(&self.config_text(), 0o600);
        self.fails_with(&config)
    }

    pub(crate) fn fails_with(&self, config: &Path) -> Failed {
        let mut command = Self::command(&["--config", &config.display().to_string()]);
        // Whatever it leaves behind by mistake is left in the stage.
        let child = command.current_dir(self.dir.path()).stderr(Stdio::piped()).spawn().expect("run");
        let mut child = Ended(child);
        until("kilnd to give up", || child.0.try_wait().expect("waited").is_some());
        let code = child.0.wait().expect("waited").code();
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut child.0.stderr.take().expect("piped"), &mut stderr).expect("read");
        Failed { code, stderr }
    }

    /// Every file below the host's directory, with what would change if anything did.
    pub(crate) fn listing(&self) -> BTreeMap<PathBuf, (u32, u64, Vec<u8>)> {
        let mut found = BTreeMap::new();
        list(&self.host(), &mut found);
        found
    }

    /// All daemons on this stage's volumes.
    pub(crate) fn daemons(&self) -> Vec<i32> {
        let root = format!("--root\0{}", self.host().display());
        let all =
            fs::read_dir("/proc").expect("read").filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let ours = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&root)
        };
        all.filter(ours).collect()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        signal_all(&self.daemons(), Signal::TERM);
        let start = Instant::now();
        while !self.daemons().is_empty() && start.elapsed() < Duration::from_secs(10) {
            pause();
        }
        signal_all(&self.daemons(), Signal::KILL);
    }
}

fn signal_all(pids: &[i32], signal: Signal) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        // It may have ended meanwhile.
        let _ = kill_process(pid, signal);
    }
}

/// Killed, whatever becomes of the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that runs. Killed when dropped.
pub(crate) struct Kilnd<'a> {
    stage: &'a Stage,
    child: Child,
    log: PathBuf,
}

impl Kilnd<'_> {
    pub(crate) fn get(&self, path: &str) -> Answer {
        http::get(&self.stage.socket(), path).unwrap_or_else(|error| panic!("GET {path}: {error}; {}", self.log()))
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        let answer = http::post(&self.stage.socket(), path, body.as_bytes());
        answer.unwrap_or_else(|error| panic!("POST {path}: {error}; {}", self.log()))
    }

    pub(crate) fn route(&self, repo: &str) -> Answer {
        self.post("/route", &format!(r#"{{"repo":{repo:?},"arch":"amd64"}}"#))
    }

    /// The project of `repo`, as /v1 shows it.
    pub(crate) fn project(&self, repo: &str) -> serde_json::Value {
        let all = self.get("/v1/projects").json();
        let found = all.as_array().and_then(|all| all.iter().find(|one| one["repo"] == repo));
        found.cloned().unwrap_or_else(|| panic!("no {repo} in {all}"))
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("fits")
    }

    #[track_caller]
    pub(crate) fn is_well(&self) {
        assert_eq!(self.get("/healthz").status, 200);
    }

    /// Children that have ended and that nobody has asked about.
    pub(crate) fn zombies(&self) -> Vec<String> {
        let all = fs::read_dir("/proc").expect("read").filter_map(Result::ok);
        let stats = all.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
        let is_ours = |stat: &String| {
            let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect::<Vec<_>>());
            fields.is_some_and(|fields| fields[0] == "Z" && fields[1] == self.pid().to_string())
        };
        stats.filter(is_ours).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_all(&[self.pid()], signal);
    }

    /// SIGTERM; how long it took and the exit code.
    pub(crate) fn terminate(mut self) -> (Duration, Option<i32>) {
        signal_all(&[self.pid()], Signal::TERM);
        let start = Instant::now();
        until("kilnd to end", || self.child.try_wait().expect("waited").is_some());
        (start.elapsed(), self.child.wait().expect("waited").code())
    }

    /// SIGKILL.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Kilnd<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("kilnd's log:\n{}", self.log());
        }
    }
}

#[track_caller]
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        pause();
    }
}

pub(crate) fn pause() {
    std::thread::park_timeout(Duration::from_millis(10));
}

/// Says so where there is none.
pub(crate) fn real_buildkitd(what: &str) -> Option<PathBuf> {
    if !is_root(what) {
        return None;
    }
    let program = std::env::var_os("KILN_TEST_BUILDKITD").map(PathBuf::from);
    if program.is_none() {
        eprintln!("skipped: {what}: KILN_TEST_BUILDKITD does not name a buildkitd");
    }
    program
}

/// Says so where it is not.
pub(crate) fn is_root(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: {what}: it needs root");
    }
    root
}

/// An address with a port that is free on it.
fn free(net: u8, host: u8) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::new(127, 91, net, host), 0)).expect("a free port");
    listener.local_addr().expect("bound")
}

fn list(directory: &Path, into: &mut BTreeMap<PathBuf, (u32, u64, Vec<u8>)>) {
    for entry in fs::read_dir(directory).expect("read") {
        let path = entry.expect("an entry").path();
        let metadata = fs::symlink_metadata(&path).expect("looked at");
        let content = if metadata.is_file() { fs::read(&path).expect("read") } else { Vec::new() };
        if metadata.is_dir() {
            list(&path, into);
        }
        into.insert(path, (metadata.mode(), metadata.ino(), content));
    }
}
