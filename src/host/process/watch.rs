//! Learns of a daemon's death at once, whether it is our child or one that an earlier kilnd started.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kiln_domain::Key;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::broadcast;

use super::log;
use super::proc::Identity;
use super::record::Desk;
use crate::host::InstanceEvent;

#[derive(Debug, Clone)]
pub(super) struct Watcher {
    watched: Arc<Mutex<HashMap<Key, Identity>>>,
    events: broadcast::Sender<InstanceEvent>,
}

impl Watcher {
    pub(super) fn new(events: broadcast::Sender<InstanceEvent>) -> Self {
        Self { watched: Arc::default(), events }
    }

    /// Watches until the daemon's death, which is announced, and reaps it. Again for the same daemon is nothing.
    pub(super) fn watch(&self, key: &Key, daemon: &Identity, desk: Desk) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if watched.get(key) == Some(daemon) {
            return;
        }
        let handle = match daemon.open() {
            Ok(Some(handle)) => until_readable(handle),
            Ok(None) => {
                self.announce(key);
                return;
            }
            Err(error) => Err(error),
        };
        match handle {
            Ok(handle) => {
                watched.insert(key.clone(), daemon.clone());
                let task = self.clone().until_death(key.clone(), daemon.clone(), desk, handle);
                tokio::spawn(task);
            }
            // Without a watch its death is noticed at the next look only.
            Err(error) => tracing::warn!(%key, pid = daemon.pid, %error, "cannot watch a daemon"),
        }
    }

    pub(super) fn announce(&self, key: &Key) {
        // Nobody listening is fine.
        let _ = self.events.send(InstanceEvent::Changed(key.clone()));
    }

    async fn until_death(self, key: Key, daemon: Identity, desk: Desk, handle: AsyncFd<OwnedFd>) {
        if let Err(error) = handle.readable().await {
            tracing::warn!(%key, pid = daemon.pid, %error, "cannot watch a daemon");
        }
        let how = reap(handle.get_ref());
        tracing::info!(%key, pid = daemon.pid, how = how.as_deref().unwrap_or("unknown"), "a daemon ended");
        if let Some(how) = how
            && let Err(error) = log::note(&desk, &how)
        {
            tracing::debug!(%key, %error, "cannot note how a daemon ended");
        }
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if watched.get(&key) == Some(&daemon) {
            watched.remove(&key);
        }
        drop(watched);
        self.announce(&key);
    }
}

/// How it ended, if it was our child. One that was adopted is reaped by whoever adopted it: pid 1.
fn reap(handle: &OwnedFd) -> Option<String> {
    let status = waitid(WaitId::PidFd(handle.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG).ok()??;
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(format!("exited with status {code}")),
        (None, Some(signal)) => Some(format!("killed by signal {signal}")),
        (None, None) => None,
    }
}

/// Whether it ended within `bound`.
pub(super) async fn ended(handle: OwnedFd, bound: Duration) -> std::io::Result<bool> {
    let handle = until_readable(handle)?;
    match tokio::time::timeout(bound, handle.readable()).await {
        Ok(readable) => readable.map(|_| true),
        Err(_) => Ok(false),
    }
}

/// A pidfd is readable once its process has ended.
fn until_readable(handle: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and one and the same descriptor for as long as it lives, and it is moved into the
    // `AsyncFd`. There is no safe constructor for what tokio is told to trust here.
    let registered = unsafe { AsyncFd::register_with_interest(handle, Interest::READABLE) };
    registered.map_err(std::io::Error::from)
}
