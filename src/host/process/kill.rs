//! Ending a daemon by force, and clearing up after one that is gone.
//!
//! The steps of running builds are containers: runc puts them into sessions and process groups of their own, so they outlive
//! the daemon unless they are looked for. They are found by parentage, which is only known while the parents live: first
//! the whole tree is stopped, so that it can not grow, and only then is it killed. A process that left the tree before
//! (a daemon of a build step that detached itself) stays within its container, whose first process is killed.
//!
//! When a daemon dies by itself its steps go on, and write into caches that the next daemon gives to other builds. They are
//! found by what runc notes of each container, before that next daemon starts; the notes and the cgroups, which nobody else
//! would ever remove, go with them.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, getpgid, kill_process_group, pidfd_send_signal};

use serde::Deserialize;

use super::proc::{self, Identity};
use crate::host::files;
use crate::host::occupancy::{self, Occupancy};

/// How long each of what was killed may take to go.
const LEFTOVERS: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Kills a daemon and everything that descends from it; returns handles that become readable when all are gone.
pub(super) fn tree(daemon: &Identity) -> io::Result<Vec<OwnedFd>> {
    let Some(root) = daemon.open()? else { return Ok(Vec::new()) };
    send(&root, Signal::STOP)?;
    let mut known = HashMap::from([(daemon.pid, root)]);
    while stop_children(&mut known, &daemon.boot)? {}
    kill_group(daemon.pid)?;
    for process in known.values() {
        send(process, Signal::KILL)?;
    }
    Ok(known.into_values().collect())
}

/// Stops whatever has a parent among `known` and adds it; false when there was nothing new.
fn stop_children(known: &mut HashMap<i32, OwnedFd>, boot: &str) -> io::Result<bool> {
    let before = known.len();
    for pid in proc::pids()? {
        if known.contains_key(&pid) {
            continue;
        }
        let Some(stat) = proc::stat(pid)?.filter(|stat| known.contains_key(&stat.parent)) else { continue };
        let child = Identity { pid, start: stat.start, boot: boot.to_owned() };
        if let Some(handle) = child.open()? {
            send(&handle, Signal::STOP)?;
            known.insert(pid, handle);
        }
    }
    Ok(known.len() > before)
}

/// What is left of the daemon's own group. Its leader is stopped and not yet reaped, so the number can not be another's.
fn kill_group(leader: i32) -> io::Result<()> {
    let Some(leader) = Pid::from_raw(leader) else { return Ok(()) };
    if getpgid(Some(leader)) != Ok(leader) {
        return Ok(());
    }
    match kill_process_group(leader, Signal::KILL) {
        Err(error) if error != Errno::SRCH => Err(error.into()),
        _ => Ok(()),
    }
}

/// To a process that may be gone by now.
pub(super) fn send(process: &OwnedFd, signal: Signal) -> io::Result<()> {
    match pidfd_send_signal(process, signal) {
        Err(error) if error != Errno::SRCH => Err(error.into()),
        _ => Ok(()),
    }
}

/// Where runc keeps the state of containers, for root and without `XDG_RUNTIME_DIR`, as daemons are started.
const RUNC: &str = "/run/runc";
const CGROUPS: &str = "/sys/fs/cgroup";

/// What we read of runc's `state.json`.
#[derive(Debug, Deserialize)]
struct Container {
    init_process_pid: i32,
    init_process_start: u64,
    /// By controller; all in one under an empty name where there is one hierarchy only.
    #[serde(default)]
    cgroup_paths: HashMap<String, PathBuf>,
    config: ContainerConfig,
}

#[derive(Debug, Deserialize)]
struct ContainerConfig {
    rootfs: PathBuf,
}

/// Kills the build steps that a dead daemon left running on its cache, waits until they are gone, and removes what runc
/// noted of them. They are pid 1 of a pid namespace, so the kernel ends the rest of each with it.
fn end_leftover_steps(runc: &Path, cgroups: &Path, cache: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(runc) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let (mut ended, mut notes) = (Vec::new(), Vec::new());
    for entry in entries {
        let note = entry?.path();
        // Other people's containers come and go, and their runc may write otherwise.
        let Ok(Some(container)) = files::read::<Container>(&note.join("state.json")) else { continue };
        if !container.config.rootfs.starts_with(cache) {
            continue;
        }
        let step =
            Identity { pid: container.init_process_pid, start: container.init_process_start, boot: String::new() };
        if let Some(handle) = step.open()? {
            tracing::info!(pid = step.pid, "ending a build step that outlived its daemon");
            send(&handle, Signal::KILL)?;
            ended.push((step.pid, handle));
        }
        notes.push((note, container.cgroup_paths));
    }
    for (pid, handle) in ended {
        // A pidfd is readable once its process has ended.
        let mut events = [PollFd::new(&handle, PollFlags::IN)];
        if rustix::event::poll(&mut events, Some(&LEFTOVERS))? == 0 {
            return Err(io::Error::other(format!("build step {pid} does not end after SIGKILL")));
        }
    }
    for (note, paths) in notes {
        // What stays costs a name and nothing else: containers get new names.
        if let Err(error) = forget_step(&note, cgroups, paths.values()) {
            tracing::debug!(note = %note.display(), %error, "what is left of a build step stays");
        }
    }
    Ok(())
}

/// Removes the cgroups of a container that has ended, and what runc noted of it.
fn forget_step<'a>(note: &Path, cgroups: &Path, paths: impl Iterator<Item = &'a PathBuf>) -> io::Result<()> {
    for path in paths {
        // Its own ends in its name. What does not is of something that others live in too.
        let is_own = path.starts_with(cgroups) && path.file_name() == note.file_name();
        if is_own && !path.components().any(|part| part == Component::ParentDir) {
            remove_cgroup(path)?;
        }
    }
    std::fs::remove_dir_all(note)
}

/// The kernel removes a cgroup's files with it, and no cgroup that somebody is in.
fn remove_cgroup(path: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroup(&entry.path())?;
        }
    }
    std::fs::remove_dir(path)
}

/// Ends and unmounts what a dead daemon left on its cache, unless another daemon is in there. False in that case.
pub(super) fn unmount_leftovers(cache: &Path) -> io::Result<bool> {
    let Occupancy::Free(_held) = occupancy::keep_daemon_out(cache)? else { return Ok(false) };
    end_leftover_steps(Path::new(RUNC), Path::new(CGROUPS), cache)?;
    for point in occupancy::mounts_below(cache)? {
        tracing::info!(point = %point.display(), "unmounting what a dead daemon left mounted");
        match unmount(&point, UnmountFlags::NOFOLLOW) {
            // Somebody stands in it; detached, it goes when he does.
            Err(Errno::BUSY) => unmount(&point, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?,
            // Unmounted together with one that it was mounted over.
            Err(Errno::INVAL) => {}
            done => done?,
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_the_steps_of_this_cache_are_ended_and_forgotten() {
        let (home, cache) = (tempfile::tempdir().expect("a directory"), Path::new("/caches/p1/cache"));
        let (runc, cgroups) = (home.path().join("runc"), home.path().join("cgroup"));
        let mut sleepers = Vec::new();
        // The last was recorded for another process that had the number before.
        for (id, rootfs, later) in [
            ("ours", "/caches/p1/cache/executor/ours/rootfs", 0),
            ("other", "/caches/p1/cache2/executor/other/rootfs", 0),
            ("stale", "/caches/p1/cache/executor/stale/rootfs", 1),
        ] {
            let child = Command::new("sleep").arg("60").spawn().expect("started");
            let pid = i32::try_from(child.id()).expect("a pid");
            let start = proc::stat(pid).expect("read").expect("there").start + later;
            let cgroup = cgroups.join("buildkit").join(id);
            std::fs::create_dir_all(cgroup.join("init")).expect("made");
            let state = serde_json::json!({
                "id": id, "init_process_pid": pid, "init_process_start": start, "config": {"rootfs": rootfs, "more": 1},
                "cgroup_paths": {"cpu": cgroup, "memory": cgroups.join("buildkit"), "pids": "/nonexistent/x"},
            });
            std::fs::create_dir_all(runc.join(id)).expect("made");
            std::fs::write(runc.join(id).join("state.json"), state.to_string()).expect("written");
            sleepers.push(child);
        }
        std::fs::create_dir(runc.join("damaged")).expect("made");
        std::fs::write(runc.join("damaged/state.json"), "{").expect("written");
        end_leftover_steps(&runc, &cgroups, cache).expect("ended");
        let ended: Vec<bool> = sleepers.iter_mut().map(|child| child.try_wait().expect("asked").is_some()).collect();
        for mut child in sleepers {
            child.kill().expect("killed");
            child.wait().expect("reaped");
        }
        assert_eq!(ended, [true, false, false]);
        let left = |directory: &Path| {
            let entries = std::fs::read_dir(directory).expect("listed");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(left(&runc), ["damaged", "other"]);
        assert_eq!(left(&cgroups.join("buildkit")), ["other"]);
        assert!(cgroups.join("buildkit/other/init").exists());
        end_leftover_steps(Path::new("/nonexistent"), &cgroups, cache).expect("no runc, no steps");
    }
}
