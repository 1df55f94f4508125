//! What is half made, and what is half gone.
//!
//! Whoever wants a copy may give it up at any moment: its step took too long, or Kiln is told to stop. Then what is under way is
//! dropped where it stands, so nothing here relies on coming to its end: a [`Half`] that is dropped before it is whole goes
//! by a task of its own, and so does what is on its way out, whoever waits for it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

use super::super::command::Failure;
use super::super::listing::{CACHE, SNAPSHOTS, entries};
use super::super::medium::Medium;
use super::{blocking, rollback};
use crate::host::key_locks::KeyLocks;

/// What kind of thing has to be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// A directory that is no volume, whatever part of one is in it.
    Home,
    /// One directory of cache.
    Copy,
    /// A volume in the trash that was to change places with a live one, and did not.
    Prepared,
}

/// Removes things, each of them once at a time.
pub(super) struct Halves<M> {
    medium: Arc<M>,
    removing: KeyLocks<PathBuf>,
    under_way: watch::Sender<usize>,
}

impl<M: Medium> Halves<M> {
    pub(super) fn new(medium: Arc<M>) -> Self {
        Self { medium, removing: KeyLocks::default(), under_way: watch::Sender::new(0) }
    }

    /// As a task of its own: it goes on when nobody waits for it any more. Absent already is success.
    pub(super) async fn remove(self: &Arc<Self>, what: What, path: &Path) -> Result<(), Failure> {
        let (halves, at) = (Arc::clone(self), path.to_owned());
        self.under_way.send_modify(|count| *count += 1);
        let removed = tokio::spawn(async move {
            let removed = halves.remove_now(what, &at).await;
            if let Err(failure) = &removed {
                tracing::warn!(path = %at.display(), ?failure, "what is half-made or half gone stays until the next start");
            }
            halves.under_way.send_modify(|count| *count -= 1);
            removed
        });
        removed.await.unwrap_or_else(|error| Err(Failure::io(path, io::Error::other(error))))
    }

    /// Returns when nothing is on its way out.
    pub(super) async fn gone(&self) {
        // It ends with the last sender only, which is ours.
        let _ = self.under_way.subscribe().wait_for(|count| *count == 0).await;
    }

    async fn remove_now(&self, what: What, path: &Path) -> Result<(), Failure> {
        let _alone = self.removing.lock(&path.to_owned()).await;
        match what {
            What::Home => self.remove_home(path).await,
            What::Copy => self.medium.remove(path).await,
            What::Prepared => self.remove_home(&rollback::call_off(path).await?).await,
        }
    }

    async fn remove_home(&self, home: &Path) -> Result<(), Failure> {
        let copies = blocking(home, |home| {
            let snapshots = entries(&home.join(SNAPSHOTS))?;
            Ok(snapshots.into_iter().map(|(_, path)| path).chain([home.join(CACHE)]).collect::<Vec<_>>())
        });
        for copy in copies.await? {
            self.medium.remove(&copy).await?;
        }
        blocking(home, |home| match std::fs::remove_dir_all(home) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::io(home, error)),
            _ => Ok(()),
        })
        .await
    }
}

/// Something that is being made under a name of its own; it goes unless it becomes whole.
pub(super) struct Half<M: Medium> {
    path: PathBuf,
    /// `None`: it is whole, or gone.
    what: Option<What>,
    halves: Arc<Halves<M>>,
}

impl<M: Medium> Half<M> {
    pub(super) fn new(halves: &Arc<Halves<M>>, what: What, path: PathBuf) -> Self {
        Self { path, what: Some(what), halves: Arc::clone(halves) }
    }

    /// It is in its place.
    pub(super) fn whole(mut self) {
        self.what = None;
    }

    /// Work that blocks. A call that has begun comes to its end although it is given up; only then is what it worked on removed.
    pub(super) async fn blocking(
        self,
        work: impl FnOnce(&Path) -> Result<(), Failure> + Send + 'static,
    ) -> Result<Self, Failure> {
        let path = self.path.clone();
        let (half, outcome) = blocking(&path, move |path| {
            let outcome = work(path);
            Ok((self, outcome))
        })
        .await?;
        half.after(outcome).await
    }

    /// Goes on after `outcome`; or it is gone before whoever makes it is told why.
    pub(super) async fn after(mut self, outcome: Result<(), Failure>) -> Result<Self, Failure> {
        if let Err(failure) = outcome {
            if let Some(what) = self.what.take() {
                // It says itself what stays.
                let _ = self.halves.remove(what, &self.path).await;
            }
            return Err(failure);
        }
        Ok(self)
    }
}

impl<M: Medium> Drop for Half<M> {
    fn drop(&mut self) {
        let Some(what) = self.what.take() else { return };
        // Without a runtime the process is ending, and the next start sweeps.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (halves, path) = (Arc::clone(&self.halves), std::mem::take(&mut self.path));
            runtime.spawn(async move {
                tracing::debug!(path = %path.display(), "removing what was given up half-made");
                let _ = halves.remove(what, &path).await;
            });
        }
    }
}
