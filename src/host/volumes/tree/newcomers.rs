//! Whether somebody came into a cache while it was copied.
//!
//! A copy file by file of what is being written is a copy of nothing. To keep daemons out for as long as it takes would let a
//! copy stand in the way of its project's builds; so they are let in, and the copy is given up. The kernel tells of everything
//! that is written, made or closed after writing where a daemon has its databases, and a daemon that is in has its lock.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fd::OwnedFd;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use super::super::command::Failure;
use super::{blocking, hold_cache};

pub(super) struct Newcomers {
    events: OwnedFd,
    cache: PathBuf,
}

impl Newcomers {
    /// From now on, of a cache in the volume at `home`, which may be moved away.
    pub(super) fn watch(home: &Path, cache: &Path) -> Result<Self, Failure> {
        let written = WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO;
        let watch = || {
            let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
            inotify::add_watch(&events, cache, written | WatchFlags::ONLYDIR)?;
            inotify::add_watch(&events, home, WatchFlags::MOVE_SELF | WatchFlags::DELETE_SELF)?;
            Ok(events)
        };
        // Not as an error of the disk: there may be no room for another watch.
        let fail = |error: Errno| {
            let why = format!("it cannot be watched ({error}): see fs.inotify.max_user_watches and max_user_instances");
            Failure::Io { path: cache.display().to_string(), source: io::Error::other(why) }
        };
        Ok(Self { events: watch().map_err(fail)?, cache: cache.to_owned() })
    }

    /// Carries `copy` out, or gives it up when somebody comes.
    pub(super) async fn keep_away_from(self, copy: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
        let events = AsyncFd::register(self.events).map_err(|e| Failure::io(&self.cache, e))?;
        let copied = tokio::select! {
            biased;
            came = events.readable() => {
                return Err(came.map_or_else(|e| Failure::io(&self.cache, e), |_| busy()));
            }
            copied = copy => copied,
        };
        // What failed may have failed of that.
        let mut event = [0_u8; 512];
        match rustix::io::read(events.get_ref(), &mut event) {
            Err(Errno::AGAIN) => copied?,
            Ok(_) => return Err(busy()),
            Err(error) => return Err(Failure::io(&self.cache, error)),
        }
        blocking(&self.cache, hold_cache).await.map(drop)
    }
}

fn busy() -> Failure {
    Failure::Busy { holder: "its project, which goes before a copy".to_owned() }
}
