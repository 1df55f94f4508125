//! Ending a daemon by force, and clearing up after one that is gone.
//!
//! The steps of running builds are containers: runc puts them into sessions and process groups of their own, so they outlive
//! the daemon unless they are looked for. They are found by parentage, which is only known while the parents live: first
//! the whole tree is stopped, so that it can not grow, and only then is it killed. A process that left the tree before
//! (a daemon of a build step that detached itself) stays within its container, whose first process is killed.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, getpgid, kill_process_group, pidfd_send_signal};

use super::proc::{self, Identity};
use crate::host::occupancy::{self, Occupancy};

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

/// Unmounts what a dead daemon left mounted below its cache, unless another daemon is in there. False in that case.
pub(super) fn unmount_leftovers(cache: &Path) -> io::Result<bool> {
    let Occupancy::Free(_held) = occupancy::keep_daemon_out(cache)? else { return Ok(false) };
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
