//! What is done to one instance, file system and `/proc` only. Blocking: the front door calls it off the runtime's threads.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Component, Path};
use std::process::{Command, Stdio};
use std::time::Duration;

use kiln_domain::Key;
use rustix::io::Errno;
use rustix::process::Signal;

use super::proc::{self, Identity};
use super::record::{Desk, ProgramFile, RunFile, SpecFile};
use super::{NAME, ProcessConfig, kill, log};
use crate::host::{Change, FoundInstance, InstanceSpec, InstanceState, RuntimeError, files, occupancy};

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

/// An instance on disk beside its spec.
enum Comparison {
    Same,
    OtherLimits,
    /// In a way that must not be started.
    Differs(String),
}

impl Instances {
    pub(super) fn desk(&self, key: &Key) -> Desk {
        Desk::new(&self.config.run_dir, key)
    }

    /// The names of everything in our directory.
    fn entries(&self) -> Result<Vec<std::fs::DirEntry>, RuntimeError> {
        let directory = &self.config.run_dir;
        let entries = std::fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        entries.map_err(|source| RuntimeError::Io {
            operation: "list",
            instance: "all instances".to_owned(),
            path: directory.display().to_string(),
            source,
        })
    }

    pub(super) fn keys(&self) -> Result<Vec<Key>, RuntimeError> {
        let entries = self.entries()?;
        Ok(entries.iter().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }

    pub(super) fn found(&self) -> Result<Vec<FoundInstance>, RuntimeError> {
        let mut all = Vec::new();
        for entry in self.entries()? {
            let name = entry.file_name().to_string_lossy().into_owned();
            // Nobody else writes here, so the name is our mark, unless what is in there belongs to another name.
            let key = name.parse::<Key>().ok().filter(|_| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            let spec = key.as_ref().map(|key| files::read::<SpecFile>(&self.desk(key).spec()));
            // A damaged one is ours all the same; looking at it says what is wrong.
            let spec = spec.and_then(Result::ok).flatten();
            let key = key.filter(|key| spec.as_ref().is_none_or(|spec| spec.key() == key));
            let running = match &key {
                // One that cannot be looked at must not hide the others, and is not to be removed.
                Some(key) => self.daemon("look at", key).map_or(true, |daemon| daemon.is_some()),
                None => false,
            };
            let properties = spec.map(SpecFile::into_properties).unwrap_or_default();
            all.push(FoundInstance { name, key, properties, running });
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub(super) fn look(&self, spec: &InstanceSpec) -> Result<(InstanceState, Option<Identity>), RuntimeError> {
        const OPERATION: &str = "look at";
        let (key, desk) = (&spec.key, self.desk(&spec.key));
        if !desk.directory().try_exists().map_err(|e| error(OPERATION, key, desk.directory(), e))? {
            return Ok((InstanceState::Absent, None));
        }
        // A running daemon counts as running, whatever its files say: builds may be in it.
        if let Some((daemon, run)) = self.running(OPERATION, key)? {
            if let Err(error) = log::bound(&desk) {
                tracing::debug!(%key, %error, "cannot bound a daemon's log");
            }
            let outdated = self.outdated(spec, &run);
            return Ok((InstanceState::Running { incarnation: daemon.incarnation(), outdated }, Some(daemon)));
        }
        let state = match self.compare(OPERATION, spec)? {
            Comparison::Same => InstanceState::Stopped { outdated: Vec::new() },
            Comparison::OtherLimits => InstanceState::Stopped { outdated: vec![Change::Limits] },
            Comparison::Differs(why) => InstanceState::HalfMade { why },
        };
        Ok((state, None))
    }

    /// In what a daemon that runs is older than what would be started now.
    fn outdated(&self, spec: &InstanceSpec, run: &RunFile) -> Vec<Change> {
        let mut outdated = Vec::new();
        // What cannot be read now is not newer.
        let replaced = || Some(ProgramFile::at(&self.config.buildkitd).ok()? != *run.file.as_ref()?);
        if run.program != self.config.buildkitd || replaced().unwrap_or(false) {
            outdated.push(Change::Program);
        }
        match self.compare("look at", spec) {
            Ok(Comparison::Same) => {}
            Ok(Comparison::OtherLimits) => outdated.push(Change::Limits),
            Ok(Comparison::Differs(_)) => outdated.push(Change::Make),
            Err(error) => tracing::debug!(key = %spec.key, %error, "what a daemon was made from cannot be read"),
        }
        outdated
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
        let difference = match self.compare(OPERATION, spec)? {
            Comparison::Same => return Ok(()),
            Comparison::OtherLimits => "its limits are others".to_owned(),
            Comparison::Differs(difference) => difference,
        };
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
        // Limits are not enforced here, so those of another making are no reason not to start.
        if let Comparison::Differs(difference) = self.compare(OPERATION, spec)? {
            return Err(refused(OPERATION, key, format!("{difference}; create it again")));
        }
        Self::check(spec)?;
        let intent = RunFile {
            program: self.config.buildkitd.clone(),
            // Before it is started: one that is replaced in between is taken for an older one, never for the newest.
            file: ProgramFile::at(&self.config.buildkitd).ok(),
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

    /// Something in our directory by its name, whether it is an instance or not.
    pub(super) fn destroy_found(&self, name: &str) -> Result<(), RuntimeError> {
        const OPERATION: &str = "destroy";
        let path = self.config.run_dir.join(name);
        let is_directory = path.symlink_metadata().is_ok_and(|found| found.is_dir());
        if let (Ok(key), true) = (name.parse::<Key>(), is_directory) {
            return self.destroy(&key);
        }
        let refused = |why: String| RuntimeError::Refused { operation: OPERATION, instance: format!("{name:?}"), why };
        let mut parts = Path::new(name).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name) {
            return Err(refused("it is no name in a directory".to_owned()));
        }
        let io = |source| RuntimeError::Io {
            operation: OPERATION,
            instance: format!("{name:?}"),
            path: path.display().to_string(),
            source,
        };
        if let Some(point) = occupancy::mounts_within(&path).map_err(io)?.first() {
            return Err(refused(format!("{} is mounted in there; unmount it first", point.display())));
        }
        match if is_directory { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) } {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io(e)),
            _ => Ok(()),
        }
    }

    pub(super) fn cpu_time(&self, key: &Key) -> Result<Option<Duration>, RuntimeError> {
        const OPERATION: &str = "measure";
        let Some(daemon) = self.daemon(OPERATION, key)? else { return Ok(None) };
        let used = proc::cpu_time_of_tree(daemon.pid).map_err(|e| error(OPERATION, key, Path::new("/proc"), e))?;
        // If it has ended meanwhile, the sum is of nothing, or of another.
        Ok(daemon.lives(&self.boot).map_err(|e| error(OPERATION, key, Path::new("/proc"), e))?.then_some(used))
    }

    /// The living daemon of an instance. One that was started but not recorded is searched for and recorded.
    pub(super) fn daemon(&self, operation: &'static str, key: &Key) -> Result<Option<Identity>, RuntimeError> {
        Ok(self.running(operation, key)?.map(|(daemon, _)| daemon))
    }

    /// As [`Instances::daemon`], and from what it was started.
    fn running(&self, operation: &'static str, key: &Key) -> Result<Option<(Identity, RunFile)>, RuntimeError> {
        let Some(run) = self.read_run(operation, key)? else { return Ok(None) };
        let io = |e| error(operation, key, Path::new("/proc"), e);
        if let Some(daemon) = run.daemon.clone() {
            let lives = daemon.lives(&self.boot).map_err(io)?
                && proc::is_daemon(daemon.pid, &run.program, &run.volume).map_err(io)?;
            return Ok(lives.then_some((daemon, run)));
        }
        let Some(daemon) = self.search(&run.program, &run.volume).map_err(io)? else { return Ok(None) };
        let (desk, run) = (self.desk(key), RunFile { daemon: Some(daemon.clone()), ..run });
        tracing::info!(%key, pid = daemon.pid, "found a daemon that was started and not recorded");
        files::write(&desk.run(), &run).map_err(|e| error(operation, key, &desk.run(), e))?;
        Ok(Some((daemon, run)))
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

    /// Whether the instance on disk is the one wanted.
    fn compare(&self, operation: &'static str, spec: &InstanceSpec) -> Result<Comparison, RuntimeError> {
        let (path, wanted) = (self.desk(&spec.key).spec(), SpecFile::from(spec));
        let found = match files::read::<SpecFile>(&path) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Comparison::Differs(format!("there is no {}", path.display()))),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                return Ok(Comparison::Differs(format!("{} is damaged ({e})", path.display())));
            }
            Err(e) => return Err(error(operation, &spec.key, &path, e)),
        };
        Ok(match found.difference(&wanted) {
            Some(difference) => Comparison::Differs(difference),
            None if found.has_limits_of(&wanted) => Comparison::Same,
            None => Comparison::OtherLimits,
        })
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
