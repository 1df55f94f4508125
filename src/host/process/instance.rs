//! What is done to one instance, file system and `/proc` only. Blocking: the front door calls it off the runtime's threads.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use kiln_domain::Key;
use rustix::io::Errno;
use rustix::process::Signal;

use super::proc::{self, Identity};
use super::record::{Desk, RunFile, SpecFile};
use super::{NAME, ProcessConfig, kill, log};
use crate::host::{InstanceSpec, InstanceState, RuntimeError, files};

/// The instances below one directory.
#[derive(Debug)]
pub(super) struct Instances {
    pub config: ProcessConfig,
    pub boot: String,
}

/// What a start came to.
pub(super) struct Started {
    pub daemon: Identity,
    pub anew: bool,
}

impl Instances {
    pub(super) fn desk(&self, key: &Key) -> Desk {
        Desk::new(&self.config.run_dir, key)
    }

    pub(super) fn list(&self) -> Result<Vec<Key>, RuntimeError> {
        let directory = &self.config.run_dir;
        let mut keys = Vec::new();
        let entries = std::fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        for entry in entries.map_err(|source| RuntimeError::Io {
            operation: "list",
            instance: "all instances".to_owned(),
            path: directory.display().to_string(),
            source,
        })? {
            keys.extend(entry.file_name().to_str().and_then(|name| name.parse::<Key>().ok()));
        }
        keys.sort();
        Ok(keys)
    }

    pub(super) fn look(&self, spec: &InstanceSpec) -> Result<(InstanceState, Option<Identity>), RuntimeError> {
        const OPERATION: &str = "look at";
        let (key, desk) = (&spec.key, self.desk(&spec.key));
        if !desk.directory().try_exists().map_err(|e| error(OPERATION, key, desk.directory(), e))? {
            return Ok((InstanceState::Absent, None));
        }
        // A running daemon counts as running, whatever its files say: builds may be in it.
        if let Some(daemon) = self.daemon(OPERATION, key)? {
            if let Err(error) = log::bound(&desk) {
                tracing::debug!(%key, %error, "cannot bound a daemon's log");
            }
            return Ok((InstanceState::Running { incarnation: daemon.incarnation() }, Some(daemon)));
        }
        let difference = self.difference(OPERATION, spec)?;
        let state = difference.map_or(InstanceState::Stopped, |why| InstanceState::HalfMade { why });
        Ok((state, None))
    }

    pub(super) fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        const OPERATION: &str = "create";
        let (key, desk) = (&spec.key, self.desk(&spec.key));
        match files::make_private_directory(desk.directory()) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error(OPERATION, key, desk.directory(), e));
            }
            _ => {}
        }
        let Some(difference) = self.difference(OPERATION, spec)? else { return Ok(()) };
        if self.daemon(OPERATION, key)?.is_some() {
            return Err(refused(OPERATION, key, format!("it runs as something else ({difference}); stop it first")));
        }
        files::write(&desk.spec(), &SpecFile::from(spec)).map_err(|e| error(OPERATION, key, &desk.spec(), e))?;
        files::sync_directory(&self.config.run_dir).map_err(|e| error(OPERATION, key, &self.config.run_dir, e))
    }

    /// Starts it, unless it runs already.
    pub(super) fn start(&self, spec: &InstanceSpec) -> Result<Started, RuntimeError> {
        const OPERATION: &str = "start";
        let (key, desk) = (&spec.key, self.desk(&spec.key));
        if let Some(daemon) = self.daemon(OPERATION, key)? {
            return Ok(Started { daemon, anew: false });
        }
        if let Some(difference) = self.difference(OPERATION, spec)? {
            return Err(refused(OPERATION, key, format!("{difference}; create it again")));
        }
        Self::check(spec)?;
        let intent = RunFile {
            program: self.config.buildkitd.clone(),
            volume: spec.volume.clone(),
            daemon: None,
            asked_to_stop: false,
        };
        files::write(&desk.run(), &intent).map_err(|e| error(OPERATION, key, &desk.run(), e))?;
        let daemon = self.spawn(spec, &desk).inspect_err(|_| forget(&desk))?;
        let run = RunFile { daemon: Some(daemon.clone()), ..intent };
        if let Err(error) = files::write(&desk.run(), &run) {
            // The intent is on disk, and by it the daemon will be found.
            tracing::warn!(%key, %error, "cannot record a daemon that was started");
        }
        Ok(Started { daemon, anew: true })
    }

    /// Sends the signal to drain, once per daemon.
    pub(super) fn ask_to_stop(&self, key: &Key, daemon: &Identity) -> Result<(), RuntimeError> {
        const OPERATION: &str = "stop";
        let desk = self.desk(key);
        let run = self.read_run(OPERATION, key)?.filter(|run| run.daemon.as_ref() == Some(daemon));
        let Some(run) = run.filter(|run| !run.asked_to_stop) else { return Ok(()) };
        if let Some(handle) = daemon.open().map_err(|e| error(OPERATION, key, Path::new("/proc"), e))? {
            kill::send(&handle, Signal::TERM).map_err(|e| error(OPERATION, key, Path::new("/proc"), e))?;
        }
        // After the signal: a crash in between sends it twice, which costs the wait for telemetry. The other way round a
        // crash would leave a daemon that nobody has asked.
        let run = RunFile { asked_to_stop: true, ..run };
        files::write(&desk.run(), &run).map_err(|e| error(OPERATION, key, &desk.run(), e))
    }

    /// After the daemon's end: nothing of it is mounted, and nothing is recorded. Not if it has been started again.
    pub(super) fn tidy(&self, key: &Key) -> Result<(), RuntimeError> {
        const OPERATION: &str = "clear up after";
        if self.daemon(OPERATION, key)?.is_some() {
            return Ok(());
        }
        let desk = self.desk(key);
        if let Some(run) = self.read_run(OPERATION, key)? {
            kill::unmount_leftovers(&run.volume).map_err(|e| error(OPERATION, key, &run.volume, e))?;
            forget(&desk);
        }
        Ok(())
    }

    pub(super) fn destroy(&self, key: &Key) -> Result<(), RuntimeError> {
        const OPERATION: &str = "destroy";
        if self.daemon(OPERATION, key)?.is_some() {
            return Err(refused(OPERATION, key, "it is running; stop it first".to_owned()));
        }
        self.tidy(key)?;
        let desk = self.desk(key);
        match std::fs::remove_dir_all(desk.directory()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(error(OPERATION, key, desk.directory(), e)),
            _ => Ok(()),
        }
    }

    /// The living daemon of an instance. One that was started but not recorded is searched for and recorded.
    pub(super) fn daemon(&self, operation: &'static str, key: &Key) -> Result<Option<Identity>, RuntimeError> {
        let Some(run) = self.read_run(operation, key)? else { return Ok(None) };
        let io = |e| error(operation, key, Path::new("/proc"), e);
        if let Some(daemon) = run.daemon {
            let lives = daemon.lives(&self.boot).map_err(io)?
                && proc::is_daemon(daemon.pid, &run.program, &run.volume).map_err(io)?;
            return Ok(lives.then_some(daemon));
        }
        let found = self.search(&run.program, &run.volume).map_err(io)?;
        if let Some(daemon) = &found {
            let (desk, run) = (self.desk(key), RunFile { daemon: Some(daemon.clone()), ..run });
            tracing::info!(%key, pid = daemon.pid, "found a daemon that was started and not recorded");
            files::write(&desk.run(), &run).map_err(|e| error(operation, key, &desk.run(), e))?;
        }
        Ok(found)
    }

    /// Not a child of another one: until it becomes another program, a daemon's child has its command line.
    fn search(&self, program: &Path, volume: &Path) -> io::Result<Option<Identity>> {
        let mut alike = Vec::new();
        for pid in proc::pids()? {
            if proc::is_daemon(pid, program, volume)? {
                alike.extend(proc::stat(pid)?.map(|stat| (pid, stat.parent)));
            }
        }
        let daemon = alike.iter().find(|(_, parent)| alike.iter().all(|(pid, _)| pid != parent));
        daemon.map_or(Ok(None), |(pid, _)| Identity::of(*pid, &self.boot))
    }

    fn read_run(&self, operation: &'static str, key: &Key) -> Result<Option<RunFile>, RuntimeError> {
        let path = self.desk(key).run();
        match files::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                let why = format!(
                    "{} is damaged ({e}); see with ps whether its buildkitd runs, then remove it",
                    path.display()
                );
                Err(refused(operation, key, why))
            }
            read => read.map_err(|e| error(operation, key, &path, e)),
        }
    }

    /// In what the instance on disk is not the one wanted.
    fn difference(&self, operation: &'static str, spec: &InstanceSpec) -> Result<Option<String>, RuntimeError> {
        let path = self.desk(&spec.key).spec();
        match files::read::<SpecFile>(&path) {
            Ok(Some(found)) => Ok(found.difference(&SpecFile::from(spec))),
            Ok(None) => Ok(Some(format!("there is no {}", path.display()))),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                Ok(Some(format!("{} is damaged ({e})", path.display())))
            }
            Err(e) => Err(error(operation, &spec.key, &path, e)),
        }
    }

    /// All that a start needs and that can be said better now than by a daemon that fails.
    fn check(spec: &InstanceSpec) -> Result<(), RuntimeError> {
        const OPERATION: &str = "start";
        let key = &spec.key;
        if !spec.volume.is_dir() {
            let why =
                format!("its volume {} is missing; an empty cache in its place would be worse", spec.volume.display());
            return Err(refused(OPERATION, key, why));
        }
        let config = spec.files.join(CONFIG);
        if !config.is_file() {
            return Err(refused(
                OPERATION,
                key,
                format!("{} is missing; it is written before a start", config.display()),
            ));
        }
        if kill::unmount_leftovers(&spec.volume).map_err(|e| error(OPERATION, key, &spec.volume, e))? {
            return Ok(());
        }
        let why = format!("a buildkitd that Kiln did not start uses {}; stop that one", spec.volume.display());
        Err(refused(OPERATION, key, why))
    }

    #[allow(
        clippy::zombie_processes,
        reason = "the watcher reaps it by its pidfd, as it does those of an earlier kilnd"
    )]
    fn spawn(&self, spec: &InstanceSpec, desk: &Desk) -> Result<Identity, RuntimeError> {
        const OPERATION: &str = "start";
        let (key, program) = (&spec.key, &self.config.buildkitd);
        let output = log::begin(desk).map_err(|e| error(OPERATION, key, &desk.log(), e))?;
        let errors = output.try_clone().map_err(|e| error(OPERATION, key, &desk.log(), e))?;
        let spawned = Command::new(program)
            .arg("--config")
            .arg(spec.files.join(CONFIG))
            .arg("--root")
            .arg(&spec.volume)
            // Nothing of ours is inherited: secrets come to daemons as environment all too easily.
            .env_clear()
            .env("PATH", &self.config.path)
            .env("HOME", desk.directory())
            .current_dir("/")
            // A group of its own, so that a Ctrl-C in kilnd's terminal is not for it.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn();
        let child = spawned.map_err(|e| self.not_spawned(key, e))?;
        let proc = Path::new("/proc");
        let pid = i32::try_from(child.id()).map_err(|e| error(OPERATION, key, proc, io::Error::other(e)))?;
        // Not reaped yet, so it is there even if it has ended already.
        let stat = proc::stat(pid).and_then(|stat| stat.ok_or_else(|| io::Error::other(format!("no process {pid}"))));
        let stat = stat.map_err(|e| error(OPERATION, key, proc, e))?;
        Ok(Identity { pid, start: stat.start, boot: self.boot.clone() })
    }

    fn not_spawned(&self, key: &Key, source: io::Error) -> RuntimeError {
        const REMEDY: &str = "install kiln-buildkit, or name another buildkitd in the configuration";
        let program = self.config.buildkitd.display();
        let later = |why: String| RuntimeError::Unavailable { runtime: NAME, why, remedy: "try again".to_owned() };
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOENT | Errno::NOTDIR) => {
                refused("start", key, format!("there is no program {program}; {REMEDY}"))
            }
            Some(Errno::ACCESS | Errno::PERM) => {
                refused("start", key, format!("{program} may not be executed; chmod 0755 it, or {REMEDY}"))
            }
            Some(Errno::NOEXEC) => refused("start", key, format!("{program} is no program for this machine; {REMEDY}")),
            Some(Errno::AGAIN | Errno::NOMEM) => later(format!("no process can be started now ({source})")),
            Some(Errno::TXTBSY) => later(format!("{program} is being replaced")),
            _ => error("start", key, &self.config.buildkitd, source),
        }
    }
}

const CONFIG: &str = "buildkitd.toml";

fn forget(desk: &Desk) {
    match std::fs::remove_file(desk.run()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            // What it says is checked whenever it is read, so it does no harm.
            tracing::debug!(path = %desk.run().display(), %error, "cannot remove the record of a dead daemon");
        }
        _ => {}
    }
}

pub(super) fn refused(operation: &'static str, key: &Key, why: String) -> RuntimeError {
    RuntimeError::Refused { operation, instance: key.daemon_name(), why }
}

pub(super) fn error(operation: &'static str, key: &Key, path: &Path, source: io::Error) -> RuntimeError {
    RuntimeError::Io { operation, instance: key.daemon_name(), path: path.display().to_string(), source }
}
