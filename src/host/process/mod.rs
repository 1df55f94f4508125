//! buildkitd as a plain process: the embedded default, without isolation.
//!
//! ```text
//! <run_dir>/<key>/spec.json   what it was made from
//! <run_dir>/<key>/run.json    the intent to start a daemon, then which process it is
//! <run_dir>/<key>/log         output of this run; log.1 that of the run before
//! ```
//!
//! A daemon has a process group of its own, is no kilnd's to take along when it ends, and is found again: by its number, its
//! start time, the boot, its program and its `--root`, all of which must agree. The intent is on disk before the process is
//! started. So after a crash between the two the daemon is searched for by program and `--root`, and is neither lost nor started
//! twice; buildkitd's own lock on its root stands behind that.
//!
//! Limits are recorded and not enforced, and untrusted code is not held back: [`Runtime::isolates`] is false.
//!
//! kilnd's service must be `KillMode=process`, or the service manager ends the daemons with it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::Key;
use rustix::fs::{Mode, OFlags};
use tokio::sync::broadcast;

use self::instance::{Instances, error, refused};
use self::proc::Identity;
use self::watch::Watcher;
use super::key_locks::KeyLocks;
use super::occupancy::Held;
use super::{FoundInstance, InstanceEvent, InstanceSpec, InstanceState, Lane, Runtime, RuntimeError, StopBound, files};

mod instance;
mod kill;
mod log;
mod proc;
#[cfg(test)]
mod real_tests;
mod record;
#[cfg(test)]
mod tests;
mod watch;

const NAME: &str = "process";
/// For everything that touches only files and `/proc`. Milliseconds, but a disk may be slow.
const QUICK: Duration = Duration::from_secs(30);
/// From SIGKILL to the end. Longer than that is a process that hangs in the kernel.
const KILL: Duration = Duration::from_secs(10);
/// Events are hints, and who lags behind is told [`broadcast::error::RecvError::Lagged`].
const EVENTS: usize = 256;

#[derive(Debug, Clone)]
pub struct ProcessConfig {
    /// Absolute path of the program. Whether it is there is seen at each start.
    pub buildkitd: PathBuf,
    /// Absolute path; made if it is missing, with mode 0700.
    pub run_dir: PathBuf,
    /// The daemon's `PATH`: where it finds runc.
    pub path: OsString,
}

/// See the module.
pub struct ProcessRuntime {
    instances: Arc<Instances>,
    locks: KeyLocks,
    watcher: Watcher,
    events: broadcast::Sender<InstanceEvent>,
    _held: Option<Held>,
}

impl ProcessRuntime {
    /// Finds the daemons that are running already and watches them. Must be called within a tokio runtime.
    ///
    /// It is the only one on its run directory for as long as it lives: a second kilnd there would take the daemons of
    /// the first for its own, and stop them.
    pub async fn new(config: ProcessConfig) -> Result<Self, RuntimeError> {
        Self::make(config, true).await
    }

    /// `alone`: refuse where there is another. Tests play two kilnds, one after the other, without an end of the first.
    async fn make(config: ProcessConfig, alone: bool) -> Result<Self, RuntimeError> {
        let unavailable =
            |why: String, remedy: &str| RuntimeError::Unavailable { runtime: NAME, why, remedy: remedy.to_owned() };
        for (name, path) in [("buildkitd", &config.buildkitd), ("run_dir", &config.run_dir)] {
            if !path.is_absolute() {
                return Err(unavailable(
                    format!("{name} is {}, which is not absolute", path.display()),
                    "write it from / on",
                ));
            }
        }
        match files::make_private_directory(&config.run_dir) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists || !config.run_dir.is_dir() => {
                let why = format!("{} cannot be made: {e}", config.run_dir.display());
                return Err(unavailable(why, "make its parent directory, writable for the user that kilnd runs as"));
            }
            _ => {}
        }
        let held = if alone { Some(hold(&config.run_dir)?) } else { None };
        let boot = proc::boot_id().map_err(|e| unavailable(format!("there is no boot id: {e}"), "mount /proc"))?;
        let (events, _) = broadcast::channel(EVENTS);
        let runtime = Self {
            instances: Arc::new(Instances { config, boot }),
            locks: KeyLocks::default(),
            watcher: Watcher::new(events.clone()),
            events,
            _held: held,
        };
        runtime.adopt().await?;
        Ok(runtime)
    }

    async fn adopt(&self) -> Result<(), RuntimeError> {
        for key in self.work("list", "all instances", Instances::keys).await? {
            // One that cannot be looked at must not keep the others from being watched; its own look will say why.
            match self.daemon("adopt", &key).await {
                Ok(Some(daemon)) => tracing::info!(%key, pid = daemon.pid, "adopted a running daemon"),
                Ok(None) => {}
                Err(error) => tracing::warn!(%key, %error, "cannot adopt"),
            }
        }
        Ok(())
    }

    /// The living daemon, watched from now on.
    async fn daemon(&self, operation: &'static str, key: &Key) -> Result<Option<Identity>, RuntimeError> {
        let wanted = key.clone();
        let daemon = self.quick(operation, key, move |instances| instances.daemon(operation, &wanted)).await?;
        if let Some(daemon) = &daemon {
            self.watcher.watch(key, daemon, self.instances.desk(key));
        }
        Ok(daemon)
    }

    async fn quick<T, F>(&self, operation: &'static str, key: &Key, work: F) -> Result<T, RuntimeError>
    where
        T: Send + 'static,
        F: FnOnce(&Instances) -> Result<T, RuntimeError> + Send + 'static,
    {
        self.work(operation, &key.daemon_name(), work).await
    }

    /// Runs what blocks on a thread of its own, under a deadline.
    async fn work<T, F>(&self, operation: &'static str, instance: &str, work: F) -> Result<T, RuntimeError>
    where
        T: Send + 'static,
        F: FnOnce(&Instances) -> Result<T, RuntimeError> + Send + 'static,
    {
        let (instances, directory) = (Arc::clone(&self.instances), &self.instances.config.run_dir);
        match tokio::time::timeout(QUICK, tokio::task::spawn_blocking(move || work(&instances))).await {
            Ok(Ok(result)) => result,
            Ok(Err(failed)) => Err(RuntimeError::Io {
                operation,
                instance: instance.to_owned(),
                path: directory.display().to_string(),
                source: std::io::Error::other(failed),
            }),
            Err(_) => Err(RuntimeError::TimedOut {
                operation,
                instance: instance.to_owned(),
                waited_for: format!("the file system of {}", directory.display()),
                after: QUICK,
            }),
        }
    }

    /// As [`ProcessRuntime::quick`], and one after the other for each key. The lock goes along: whoever gives up waiting
    /// leaves a thread behind that is still at work, and the next change comes after it.
    async fn locked<T, F>(&self, operation: &'static str, key: &Key, work: F) -> Result<T, RuntimeError>
    where
        T: Send + 'static,
        F: FnOnce(&Instances) -> Result<T, RuntimeError> + Send + 'static,
    {
        let lock = self.locks.lock(key).await;
        self.quick(operation, key, move |instances| {
            let _lock = lock;
            work(instances)
        })
        .await
    }

    /// Code that nobody has vouched for would have the host (K7).
    fn check_lane(&self, operation: &'static str, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        if self.isolates() || spec.lane == Lane::Trusted {
            return Ok(());
        }
        let why = "it is for untrusted code, which the process runtime cannot keep apart from the host".to_owned();
        Err(refused(operation, &spec.key, why))
    }

    /// True when it drained in time.
    async fn drain(&self, key: &Key, daemon: &Identity, bound: Duration) -> Result<bool, RuntimeError> {
        let io = |e| error("stop", key, std::path::Path::new("/proc"), e);
        let Some(handle) = daemon.open().map_err(io)? else { return Ok(true) };
        let (wanted, asked) = (key.clone(), daemon.clone());
        self.locked("stop", key, move |instances| instances.ask_to_stop(&wanted, &asked)).await?;
        // Not locked: a stop that is to be forced need not wait for one that drains.
        watch::ended(handle, bound).await.map_err(io)
    }

    async fn kill(&self, key: &Key, daemon: &Identity) -> Result<(), RuntimeError> {
        let proc = std::path::Path::new("/proc");
        let (wanted, target) = (key.clone(), daemon.clone());
        let work = move |_: &Instances| kill::tree(&target).map_err(|e| error("stop", &wanted, proc, e));
        let handles = self.quick("stop", key, work).await?;
        for handle in handles {
            if !watch::ended(handle, KILL).await.map_err(|e| error("stop", key, proc, e))? {
                let waited_for = format!("process {} or one of its children to end after SIGKILL", daemon.pid);
                return Err(RuntimeError::TimedOut {
                    operation: "stop",
                    instance: key.daemon_name(),
                    waited_for,
                    after: KILL,
                });
            }
        }
        Ok(())
    }
}

/// A lock on the directory itself: the kernel releases it however we end.
fn hold(run_dir: &Path) -> Result<Held, RuntimeError> {
    let unavailable =
        |why: String, remedy: &str| RuntimeError::Unavailable { runtime: NAME, why, remedy: remedy.into() };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let locked = rustix::fs::open(run_dir, flags, Mode::empty()).map_err(Into::into).and_then(Held::try_lock);
    let locked = locked
        .map_err(|e| unavailable(format!("{} cannot be locked: {e}", run_dir.display()), "name another run_dir"))?;
    locked.ok_or_else(|| {
        let why = format!("another kilnd uses {}", run_dir.display());
        unavailable(why, "stop that one, or give this one a run_dir of its own")
    })
}

#[async_trait]
impl Runtime for ProcessRuntime {
    fn name(&self) -> &'static str {
        NAME
    }

    fn isolates(&self) -> bool {
        false
    }

    async fn look(&self, spec: &InstanceSpec) -> Result<InstanceState, RuntimeError> {
        let wanted = spec.clone();
        let (state, daemon) = self.quick("look at", &spec.key, move |instances| instances.look(&wanted)).await?;
        if let Some(daemon) = daemon {
            self.watcher.watch(&spec.key, &daemon, self.instances.desk(&spec.key));
        }
        Ok(state)
    }

    async fn found(&self) -> Result<Vec<FoundInstance>, RuntimeError> {
        self.work("list", "all instances", Instances::found).await
    }

    async fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        self.check_lane("create", spec)?;
        let wanted = spec.clone();
        self.locked("create", &spec.key, move |instances| instances.create(&wanted)).await
    }

    async fn start(&self, spec: &InstanceSpec) -> Result<String, RuntimeError> {
        self.check_lane("start", spec)?;
        let (key, wanted) = (&spec.key, spec.clone());
        let started = self.locked("start", key, move |instances| instances.start(&wanted)).await?;
        self.watcher.watch(key, &started.daemon, self.instances.desk(key));
        if started.anew {
            self.watcher.announce(key);
        }
        Ok(started.daemon.incarnation())
    }

    async fn stop(&self, spec: &InstanceSpec, bound: StopBound) -> Result<(), RuntimeError> {
        let key = &spec.key;
        if let Some(daemon) = self.daemon("stop", key).await? {
            let drained = match bound {
                StopBound::Graceful(bound) => self.drain(key, &daemon, bound).await?,
                StopBound::Force => false,
            };
            if !drained {
                self.kill(key, &daemon).await?;
            }
        }
        let wanted = key.clone();
        self.locked("stop", key, move |instances| instances.tidy(&wanted)).await
    }

    async fn destroy(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        let wanted = spec.key.clone();
        self.locked("destroy", &spec.key, move |instances| instances.destroy(&wanted)).await
    }

    async fn destroy_found(&self, name: &str) -> Result<(), RuntimeError> {
        let lock = match name.parse::<Key>() {
            Ok(key) => Some(self.locks.lock(&key).await),
            Err(_) => None,
        };
        let wanted = name.to_owned();
        self.work("destroy", name, move |instances| {
            let _lock = lock;
            instances.destroy_found(&wanted)
        })
        .await
    }

    async fn cpu_time(&self, spec: &InstanceSpec) -> Result<Option<Duration>, RuntimeError> {
        let wanted = spec.key.clone();
        self.quick("measure", &spec.key, move |instances| instances.cpu_time(&wanted)).await
    }

    async fn prove_isolation(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        let why = "the process runtime keeps nothing apart from the host; use runtime incus".to_owned();
        Err(refused("prove the isolation of", &spec.key, why))
    }

    async fn last_words(&self, spec: &InstanceSpec) -> String {
        let wanted = spec.key.clone();
        let words = self.quick("read the log of", &spec.key, move |instances| {
            let desk = instances.desk(&wanted);
            log::last_words(&desk).map_err(|e| refused("read the log of", &wanted, e.to_string()))
        });
        words.await.unwrap_or_else(|error| format!("(no log: {error})"))
    }

    fn events(&self) -> broadcast::Receiver<InstanceEvent> {
        self.events.subscribe()
    }
}
