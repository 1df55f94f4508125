//! A kilnd of a benchmark: the real program, a process of its own, so that memory and CPU time are its alone.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use kiln_domain::Key;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::BenchError;
use super::load::{ask, connect, route_and_complete};
use crate::config::Config;

/// Longer than anything that is measured here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A configuration on disk, and the programs it is run with.
pub(super) struct Place {
    pub(super) config: Config,
    directory: PathBuf,
    kilnd: PathBuf,
}

/// Ends the daemons below a directory when dropped: a measurement that failed half-way leaves none.
pub(super) struct NoDaemons<'a>(pub(super) &'a Path);

impl Drop for NoDaemons<'_> {
    fn drop(&mut self) {
        let below = format!("--root\0{}/", self.0.display());
        let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if let (true, Some(pid)) = (String::from_utf8_lossy(&line).contains(&below), Pid::from_raw(pid)) {
                // Its files go with the directory. It may have ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// One that runs. Killed when dropped.
pub(super) struct Served<'a> {
    place: &'a Place,
    child: Child,
}

/// What a start costs.
pub(super) struct Boot<'a> {
    pub(super) served: Served<'a>,
    /// From the start of the process to the answer of the first `/route`.
    pub(super) first_route: Duration,
    pub(super) key: Key,
}

impl Place {
    /// In `directory`, which is there.
    pub(super) fn new(directory: &Path, mut config: Config, kilnd: &Path) -> Result<Self, BenchError> {
        config.state_dir = directory.join("state");
        config.run_dir = directory.join("run");
        let text = toml::to_string(&config).map_err(|error| BenchError::Unexpected(error.to_string()))?;
        let place = Self { config, directory: directory.to_owned(), kilnd: kilnd.to_owned() };
        fs::write(place.file(), text).map_err(|source| BenchError::Disk { path: place.file(), source })?;
        Ok(place)
    }

    fn file(&self) -> PathBuf {
        self.directory.join("kiln.toml")
    }

    fn log(&self) -> PathBuf {
        self.directory.join("kilnd.log")
    }

    /// What kilnd said last.
    fn said(&self) -> String {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    /// Starts it and asks for a route, `body`, until it answers.
    pub(super) async fn boot(&self, body: &Bytes) -> Result<Boot<'_>, BenchError> {
        let log = File::create(self.log()).map_err(|source| BenchError::Disk { path: self.log(), source })?;
        let start = Instant::now();
        let child = Command::new(&self.kilnd)
            .arg("--config")
            .arg(self.file())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| BenchError::Disk { path: self.kilnd.clone(), source })?;
        let mut served = Served { place: self, child };
        let mut sender = served.connected(start).await?;
        let connected = start.elapsed();
        match route_and_complete(&mut sender, body.clone()).await {
            Ok((key, taken)) => Ok(Boot { served, first_route: connected + taken, key }),
            Err(error) => Err(served.failed(&format!("the first /route: {error}"))),
        }
    }
}

impl Served<'_> {
    async fn connected(&mut self, start: Instant) -> Result<SendRequest<Full<Bytes>>, BenchError> {
        loop {
            if let Ok(sender) = connect(&self.socket()).await {
                return Ok(sender);
            }
            let ended = self.child.try_wait().ok().flatten();
            if ended.is_some() || start.elapsed() > PATIENCE {
                return Err(self.failed("it does not answer"));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn failed(&self, what: &str) -> BenchError {
        let Place { kilnd, .. } = self.place;
        BenchError::Unexpected(format!("{}: {what}; it said:\n{}", kilnd.display(), self.place.said()))
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.place.config.socket()
    }

    fn proc(&self, file: &str) -> Result<String, BenchError> {
        let pid = self.child.id().ok_or_else(|| self.failed("it has ended"))?;
        let path = PathBuf::from(format!("/proc/{pid}/{file}"));
        fs::read_to_string(&path).map_err(|source| BenchError::Disk { path, source })
    }

    /// In bytes: now, and the highest that it was.
    pub(super) fn resident(&self) -> Result<(u64, u64), BenchError> {
        let status = self.proc("status")?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
        };
        let known = field("VmRSS:").zip(field("VmHWM:"));
        let (now, highest) = known.ok_or_else(|| self.failed("/proc does not tell its memory"))?;
        Ok((now * 1024, highest * 1024))
    }

    /// User and system time so far, in steps of the kernel's clock tick.
    pub(super) fn cpu_time(&self) -> Result<Duration, BenchError> {
        let stat = self.proc("stat")?;
        // The program's name may hold anything but the last parenthesis; utime and stime are the 12th and 13th behind it.
        let fields: Vec<u64> = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.split_whitespace().skip(11).take(2).filter_map(|field| field.parse().ok()).collect())
            .unwrap_or_default();
        let [user, system] = fields[..] else { return Err(self.failed("/proc does not tell its CPU time")) };
        let ticks = rustix::param::clock_ticks_per_second();
        Ok(Duration::from_millis((user + system) * 1000 / ticks.max(1)))
    }

    /// Until it has used no CPU time for a second: what follows a start is over.
    pub(super) async fn settle(&self) -> Result<(), BenchError> {
        let start = Instant::now();
        loop {
            let before = self.cpu_time()?;
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.cpu_time()? == before || start.elapsed() > PATIENCE {
                return Ok(());
            }
        }
    }

    /// Stops the daemon of `key`.
    pub(super) async fn stop_daemon(&self, key: &Key) -> Result<(), BenchError> {
        let stopping = async {
            let mut sender = connect(&self.socket()).await?;
            ask(&mut sender, &format!("/v1/projects/{key}/stop"), Bytes::new(), StatusCode::NO_CONTENT).await
        };
        let stopped = tokio::time::timeout(PATIENCE, stopping).await;
        let stopped = stopped.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        stopped.map(drop).map_err(|error| self.failed(&format!("the stop of {key}: {error}")))
    }

    /// As an admin would; a daemon goes on.
    pub(super) async fn terminate(mut self) -> Result<(), BenchError> {
        if let Some(pid) = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
            kill_process(pid, Signal::TERM).map_err(|error| self.failed(&error.to_string()))?;
        }
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(self.failed("it does not end")),
        }
    }
}
