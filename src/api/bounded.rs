//! A [`Heart`] whose every answer comes in time (K10).
//!
//! What is behind it has deadlines of its own, and they say more: they know what was waited for. These are for what has
//! none, and for what none reaches, like a flush that hangs in the kernel; so they are generous. A call that is given up
//! is dropped, as if its client had gone.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::{BuildSpec, Key, LeaseToken, RepoName, SnapshotName};
use kiln_wire::{
    CacheView, Check, DiskUsage, LeaseView, Orphan, OrphanKind, ProjectView, Readiness, RouteResponse, SnapshotView,
    Trashed, Why,
};
use thiserror::Error;
use tracing::warn;

use super::Settings;
use super::answers::JsonError;
use super::heart::{
    Caller, CompleteError, Heart, RenewError, RouteError, RouteOptions, Routed, SettingsChange, VerbError,
};

/// What looks at the database or the host, or writes a row.
pub(super) const A_LOOK: Duration = Duration::from_secs(30);

/// Beyond the wait of a route: for its lease's way to the disk, and its credential.
const ROUTE_MARGIN: Duration = Duration::from_secs(30);

/// What takes a daemon or an instance down, beside the drains: one of the daemon, and one of what is left of it.
const TAKING_DOWN: Duration = Duration::from_mins(4);

/// Caches are moved, freed or measured, file by file where the storage cannot do better.
const FREEING: Duration = Duration::from_mins(10);

/// A step of the host, and looks before and after.
const COPYING: Duration = Duration::from_mins(2);

/// Health checkers wait a few seconds before they take silence for an answer.
const READINESS: Duration = Duration::from_secs(5);

/// What hangs for so long does not come back in a moment.
const AGAIN: Duration = Duration::from_secs(30);

/// A call that did not end.
#[derive(Debug, Error)]
#[error("gave up after {} s waiting for {what}; it may come about all the same: look whether a disk of the host hangs", .after.as_secs())]
pub(super) struct Overdue {
    what: &'static str,
    after: Duration,
}

impl From<Overdue> for RouteError {
    fn from(overdue: Overdue) -> Self {
        Self::Unavailable { why: overdue.to_string(), retry_after: AGAIN }
    }
}

impl From<Overdue> for CompleteError {
    fn from(overdue: Overdue) -> Self {
        Self::Unavailable { why: overdue.to_string(), retry_after: AGAIN }
    }
}

impl From<Overdue> for RenewError {
    fn from(overdue: Overdue) -> Self {
        Self::Unavailable { why: overdue.to_string(), retry_after: AGAIN }
    }
}

impl From<Overdue> for JsonError {
    fn from(overdue: Overdue) -> Self {
        VerbError::from(overdue).into()
    }
}

impl From<Overdue> for VerbError {
    fn from(overdue: Overdue) -> Self {
        Self::Unavailable { why: overdue.to_string(), retry_after: AGAIN }
    }
}

/// A call that is bounded by nobody else.
pub(super) async fn within<T, E: From<Overdue>>(
    after: Duration,
    what: &'static str,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    tokio::time::timeout(after, call).await.unwrap_or_else(|_| {
        warn!(what, seconds = after.as_secs(), "a request was given up: something hangs");
        Err(Overdue { what, after }.into())
    })
}

pub(super) struct Bounded {
    heart: Arc<dyn Heart>,
    route_wait: Duration,
    taking_down: Duration,
}

impl Bounded {
    pub(super) fn new(heart: Arc<dyn Heart>, settings: &Settings) -> Self {
        Self { heart, route_wait: settings.route_wait, taking_down: TAKING_DOWN + settings.drain * 2 }
    }
}

#[async_trait]
impl Heart for Bounded {
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError> {
        let after = options.wait.unwrap_or(self.route_wait) + ROUTE_MARGIN;
        within(after, "the project to answer, and its lease to be written", self.heart.route(spec, options)).await
    }

    async fn prewarm(&self, spec: BuildSpec, caller: &Caller) -> Result<RouteResponse, RouteError> {
        let after = self.route_wait + ROUTE_MARGIN;
        within(after, "the project to answer", self.heart.prewarm(spec, caller)).await
    }

    async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, CompleteError> {
        within(A_LOOK, "the release to be written", self.heart.complete(key, token)).await
    }

    async fn complete_oldest(&self, key: &Key) -> Result<bool, CompleteError> {
        within(A_LOOK, "the release to be written", self.heart.complete_oldest(key)).await
    }

    async fn renew(&self, token: &LeaseToken) -> Result<LeaseView, RenewError> {
        within(A_LOOK, "the renewal to be written", self.heart.renew(token)).await
    }

    async fn owner(&self, key: &Key) -> Result<Option<RepoName>, VerbError> {
        within(A_LOOK, "whose project it is", self.heart.owner(key)).await
    }

    async fn list(&self) -> Result<Vec<ProjectView>, VerbError> {
        within(A_LOOK, "the database to be read", self.heart.list()).await
    }

    async fn show(&self, key: &Key) -> Result<ProjectView, VerbError> {
        within(A_LOOK, "the database to be read", self.heart.show(key)).await
    }

    async fn why(&self, key: &Key) -> Result<Why, VerbError> {
        within(A_LOOK, "the project to answer", self.heart.why(key)).await
    }

    async fn set(&self, key: &Key, change: SettingsChange) -> Result<ProjectView, VerbError> {
        within(A_LOOK, "the setting to be written", self.heart.set(key, change)).await
    }

    async fn stop(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        within(self.taking_down, "the daemon to be stopped", self.heart.stop(key, force)).await
    }

    async fn remove(&self, key: &Key) -> Result<(), VerbError> {
        within(self.taking_down, "the project to be removed", self.heart.remove(key)).await
    }

    async fn cache(&self, key: &Key, measure: bool) -> Result<CacheView, VerbError> {
        within(A_LOOK, "the cache to be looked at", self.heart.cache(key, measure)).await
    }

    async fn snapshot(&self, key: &Key) -> Result<(SnapshotView, bool), VerbError> {
        within(COPYING, "the snapshot to be taken", self.heart.snapshot(key)).await
    }

    async fn roll_back(&self, key: &Key, to: Option<SnapshotName>, force: bool) -> Result<SnapshotName, VerbError> {
        within(self.taking_down, "the cache to be put back", self.heart.roll_back(key, to, force)).await
    }

    async fn reset(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        within(self.taking_down, "the cache to be emptied", self.heart.reset(key, force)).await
    }

    async fn disk_usage(&self) -> Result<DiskUsage, VerbError> {
        within(FREEING, "the caches to be measured", self.heart.disk_usage()).await
    }

    async fn orphans(&self) -> Result<Vec<Orphan>, VerbError> {
        within(A_LOOK, "the host to be looked through", self.heart.orphans()).await
    }

    async fn adopt(&self, kind: Option<OrphanKind>, name: &str) -> Result<Key, VerbError> {
        within(A_LOOK, "the orphan to be adopted", self.heart.adopt(kind, name)).await
    }

    async fn remove_orphan(&self, kind: OrphanKind, name: &str) -> Result<(), VerbError> {
        within(self.taking_down, "the orphan to be removed", self.heart.remove_orphan(kind, name)).await
    }

    async fn trash(&self) -> Result<Vec<Trashed>, VerbError> {
        within(A_LOOK, "the trash to be listed", self.heart.trash()).await
    }

    async fn restore(&self, name: &str) -> Result<Key, VerbError> {
        within(FREEING, "the cache to be given back", self.heart.restore(name)).await
    }

    async fn discard(&self, name: &str) -> Result<(), VerbError> {
        within(FREEING, "the cache to be freed", self.heart.discard(name)).await
    }

    async fn empty_trash(&self) -> Result<u64, VerbError> {
        within(FREEING, "the trash to be freed", self.heart.empty_trash()).await
    }

    async fn readiness(&self) -> Readiness {
        let late = |_| {
            let why = format!("no answer within {} s: look whether a disk of the host hangs", READINESS.as_secs());
            Readiness::of(vec![Check::ill("kilnd", why)])
        };
        tokio::time::timeout(READINESS, self.heart.readiness()).await.unwrap_or_else(late)
    }
}
