//! Whether somebody came into a cache while it was copied.
//!
//! A copy file by file of what is being written is a copy of nothing. To keep daemons out for as long as it takes would let a
//! copy stand in the way of its project's builds; so they are let in, and the copy is given up. The kernel tells of everything
//! that is written, made or closed after writing where a daemon has its databases, and a daemon that is in has its lock.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;

use super::super::command::Failure;
use super::{blocking, hold_cache};

/// A copy goes on for so long at most when somebody has come: what it reads is in the newcomer's way.
const LOOK_EVERY: Duration = Duration::from_secs(1);

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
        let copied = tokio::select! {
            biased;
            seen = self.came() => return Err(seen),
            copied = copy => copied,
        };
        // What failed may have failed of that.
        self.look().and(copied)?;
        blocking(&self.cache, hold_cache).await.map(drop)
    }

    /// Says who is in the way, as soon as somebody is.
    async fn came(&self) -> Failure {
        loop {
            if let Err(seen) = self.look() {
                return seen;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn look(&self) -> Result<(), Failure> {
        let mut event = [0_u8; 512];
        match rustix::io::read(&self.events, &mut event) {
            Err(Errno::AGAIN) => Ok(()),
            Ok(_) => Err(Failure::Busy { holder: "its project, which goes before a copy".to_owned() }),
            Err(error) => Err(Failure::io(&self.cache, error)),
        }
    }
}
