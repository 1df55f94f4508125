//! The real kilnd: started, killed, and started again at once.

use std::fs::File;
use std::io;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};

use crate::world::World;

/// To its first answer, on a machine that builds.
const START: Duration = Duration::from_secs(60);
const STOP: Duration = Duration::from_secs(60);

/// When it was down: from just before each kill to the first answer afterwards.
#[derive(Default)]
pub(crate) struct Downs(Mutex<Vec<(Instant, Option<Instant>)>>);

/// How long it was down.
#[derive(Debug, Default)]
pub(crate) struct Down {
    pub(crate) kills: usize,
    pub(crate) median: Duration,
    pub(crate) worst: Duration,
}

impl Downs {
    fn begin(&self) {
        let mut downs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A kill while it starts prolongs the time that it is down; it is one more all the same.
        if let Some((_, end @ None)) = downs.last_mut() {
            *end = Some(Instant::now());
        }
        downs.push((Instant::now(), None));
    }

    fn end(&self) {
        let mut downs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, end)) = downs.last_mut() {
            end.get_or_insert_with(Instant::now);
        }
    }

    /// Whether it was down at any time from `start` to `end`.
    pub(crate) fn touch(&self, start: Instant, end: Instant) -> bool {
        let downs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        downs.iter().any(|(down, up)| *down <= end && up.is_none_or(|up| up >= start))
    }

    /// How many kills there were from `start` to now.
    pub(crate) fn since(&self, start: Instant) -> u64 {
        let downs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        downs.iter().filter(|(down, _)| *down >= start).count() as u64
    }

    fn sum(&self) -> Down {
        let downs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut spans: Vec<_> =
            downs.iter().filter_map(|(down, up)| Some(up.as_ref()?.duration_since(*down))).collect();
        spans.sort_unstable();
        let median = spans.get(spans.len() / 2).copied().unwrap_or_default();
        Down { kills: downs.len(), median, worst: spans.last().copied().unwrap_or_default() }
    }
}

pub(crate) struct Kilnd {
    world: Arc<World>,
    child: Child,
    spawned: Instant,
}

impl Kilnd {
    /// Returns when it answers.
    pub(crate) async fn start(world: Arc<World>) -> io::Result<Self> {
        let child = spawn(&world)?;
        let mut kilnd = Self { world, child, spawned: Instant::now() };
        kilnd.await_up().await?;
        Ok(kilnd)
    }

    /// Kills it `wait` after its start, or after its first answer, and starts it again at once.
    pub(crate) async fn kill_after(&mut self, wait: Duration, from_its_start: bool) -> io::Result<()> {
        if from_its_start && !*self.world.up.borrow() {
            tokio::time::sleep_until((self.spawned + wait).into()).await;
        } else {
            self.await_up().await?;
            tokio::time::sleep(wait).await;
        }
        self.still_there()?;
        self.world.downs.begin();
        self.world.up.send_replace(false);
        self.child.kill().await?;
        self.child = spawn(&self.world)?;
        self.spawned = Instant::now();
        Ok(())
    }

    fn still_there(&mut self) -> io::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(io::Error::other(format!("kilnd ended by itself ({status}); its log says why"))),
        }
    }

    /// Until it answers.
    pub(crate) async fn await_up(&mut self) -> io::Result<()> {
        if *self.world.up.borrow() {
            return self.still_there();
        }
        let start = Instant::now();
        while tokio::net::UnixStream::connect(self.world.socket()).await.is_err() {
            self.still_there()?;
            if start.elapsed() > START {
                return Err(io::Error::other(format!("kilnd does not answer after {} s", START.as_secs())));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // It listens before it has taken up its projects, and answers afterwards.
        self.world.up.send_replace(true);
        self.world.get("/healthz").await;
        self.world.downs.end();
        Ok(())
    }

    /// As an admin would.
    pub(crate) async fn stop(mut self) -> io::Result<Down> {
        let pid = self.child.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
        if let Some(pid) = pid {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        }
        match tokio::time::timeout(STOP, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            other => self.world.violation(format!("kilnd does not stop as it should: {other:?}")),
        }
        Ok(self.world.downs.sum())
    }
}

fn spawn(world: &World) -> io::Result<Child> {
    let log = File::options().append(true).create(true).open(world.log("kilnd"))?;
    Command::new(&world.arguments.kilnd)
        .arg("--config")
        .arg(world.arguments.home.join("kiln.toml"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
}
