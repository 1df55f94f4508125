//! A place of its own for one `kiln`, its kilnd and its buildx.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::kilnd::{Journal, Kilnd, serve};

/// Longer than anything here takes; a test that waits so long has failed.
const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) const COMPLETE: &str = "complete pbcce5b6205652dd7 00112233aabbccdd";

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) struct Stage {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) kilnd: Kilnd,
    pub(crate) buildx: PathBuf,
    _server: tokio::runtime::Runtime,
}

impl Stage {
    /// `script` is what buildx does for `build`, after it has written down its arguments.
    pub(crate) fn new(script: &str) -> Self {
        Self::with(script, |_| {})
    }

    pub(crate) fn with(script: &str, change: impl FnOnce(&mut Kilnd)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("tmp")).expect("made");
        fs::create_dir(dir.path().join("context")).expect("made");
        let buildx = dir.path().join("buildx");
        let log = dir.path().join("buildx.log");
        let body = format!(
            "#!/bin/sh\n{{ printf '%s' \"$1\"; shift; printf '|%s' \"$@\"; echo; }} >>{log}\n\
             [ \"$(tail -n 1 {log} | cut -d'|' -f1)\" = create ] && {{\n\
               stat -c '%a %n' {tmp}/* {tmp}/*/*.pem | sed 's/ .*tmp/ /' >>{log}.modes; exit 0; }}\n:\n{script}\n",
            log = log.display(),
            tmp = dir.path().join("tmp").display(),
        );
        fs::write(&buildx, body).expect("written");
        fs::set_permissions(&buildx, fs::Permissions::from_mode(0o755)).expect("set");
        let mut kilnd = Kilnd {
            journal: Journal::default(),
            failures: Arc::default(),
            with_credential: true,
            polls: Arc::default(),
            old: false,
            member: 0,
        };
        change(&mut kilnd);
        let server = serve(&dir.path().join("kiln.sock"), kilnd.clone());
        Self { dir, kilnd, buildx, _server: server }
    }

    pub(crate) fn kiln(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command
            .args(arguments)
            .current_dir(self.dir.path().join("context"))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.dir.path())
            .env("TMPDIR", self.dir.path().join("tmp"))
            .env("KILN_SOCKET", self.dir.path().join("kiln.sock"))
            .env("KILN_BUILDX", &self.buildx)
            .env("KILN_REPO", "https://github.com/Org/Repo.git")
            .env("KILN_ARCH", "amd64");
        command
    }

    pub(crate) fn build(&self, arguments: &[&str]) -> Output {
        let words: Vec<&str> = ["build"].iter().chain(arguments).copied().collect();
        self.kiln(&words).output().expect("run")
    }

    pub(crate) fn start(&self, arguments: &[&str]) -> Child {
        let words: Vec<&str> = ["build"].iter().chain(arguments).copied().collect();
        self.kiln(&words).stderr(Stdio::piped()).spawn().expect("run")
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        self.kilnd.journal.lock().expect("whole").clone()
    }

    /// One line a call, words apart by `|`.
    pub(crate) fn called(&self) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("buildx.log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    pub(crate) fn left_behind(&self) -> Vec<PathBuf> {
        fs::read_dir(self.dir.path().join("tmp")).expect("read").map(|entry| entry.expect("entry").path()).collect()
    }

    pub(crate) fn await_file(&self, name: &str) {
        let (path, start) = (self.dir.path().join(name), Instant::now());
        until(start, || path.exists(), &format!("{name} to appear"));
    }
}

pub(crate) fn until(start: Instant, condition: impl Fn() -> bool, what: &str) {
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}
