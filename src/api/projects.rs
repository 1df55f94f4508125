//! The heart as the HTTP layer sees it: which of its errors is which answer.

use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::explain::Explanation;
use kiln_domain::{BuildSpec, Key, LeaseToken, RepoName, Settings, Snapshot, SnapshotName, Timestamp};
use kiln_wire::{
    CacheEntry, CacheView, Check, DiskUsage, LeaseView, Orphan, OrphanKind, ProjectView, Readiness, RouteResponse,
    SnapshotView, Storage, Sums, Trashed, UsageView, Why,
};

use super::events::to_view;
use super::heart::{
    Caller, CompleteError, Heart, RenewError, RouteError, RouteOptions, Routed, SettingsChange, VerbError,
};
use crate::causes::{in_one_line, is_no_room};
use crate::clock::rfc3339;
use crate::host;
use crate::host::volumes::Usage;
use crate::projects::{self, CacheUsage, Projects};
use crate::store::StoreError;

/// For what goes away by itself: long enough to help, short enough not to cost a build.
const SOON: Duration = Duration::from_secs(2);

/// For a disk that somebody has to see to, as the store has it.
const AFTER_A_REPAIR: Duration = Duration::from_secs(30);

impl Routed for projects::Routed {
    fn response(&self) -> RouteResponse {
        projects::Routed::response(self)
    }

    fn delivered(self: Box<Self>) {
        projects::Routed::delivered(*self);
    }
}

/// The store and the host are given this long to show that they work.
const READY_PATIENCE: Duration = Duration::from_secs(3);

#[async_trait]
impl Heart for Projects {
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError> {
        Ok(Box::new(Projects::route(self, spec, options).await?))
    }

    async fn prewarm(&self, spec: BuildSpec, caller: &Caller) -> Result<RouteResponse, RouteError> {
        Ok(Projects::prewarm(self, spec, caller).await?)
    }

    async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, CompleteError> {
        Ok(Projects::complete(self, key, token).await?)
    }

    async fn complete_oldest(&self, key: &Key) -> Result<bool, CompleteError> {
        Ok(Projects::complete_oldest(self, key).await?)
    }

    async fn renew(&self, token: &LeaseToken) -> Result<LeaseView, RenewError> {
        use projects::RenewError as Renew;
        match Projects::renew(self, token).await {
            Ok(lease) => Ok(self.lease_view(&lease)),
            Err(Renew::Unknown) => Err(RenewError::Unknown),
            Err(Renew::Ended) => Err(RenewError::Ended),
            Err(Renew::Store(error)) => Err(error.into()),
        }
    }

    async fn owner(&self, key: &Key) -> Result<Option<RepoName>, VerbError> {
        Ok(Projects::owner(self, key).await?)
    }

    async fn list(&self) -> Result<Vec<ProjectView>, VerbError> {
        Ok(Projects::list(self).await?)
    }

    async fn show(&self, key: &Key) -> Result<ProjectView, VerbError> {
        Projects::show(self, key).await?.ok_or_else(|| VerbError::NoProject(key.clone()))
    }

    async fn why(&self, key: &Key) -> Result<Why, VerbError> {
        let (Explanation { headline, because, next }, events) = Projects::why(self, key).await?;
        let events = events.into_iter().map(to_view).collect();
        Ok(Why { key: key.to_string(), headline, because, next, events })
    }

    async fn set(&self, key: &Key, change: SettingsChange) -> Result<ProjectView, VerbError> {
        Projects::set(self, key, move |own| apply(change, own)).await?;
        Heart::show(self, key).await
    }

    async fn stop(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        Ok(Projects::stop(self, key, force).await?)
    }

    async fn remove(&self, key: &Key) -> Result<(), VerbError> {
        Ok(Projects::remove(self, key).await?)
    }

    async fn cache(&self, key: &Key, measure: bool) -> Result<CacheView, VerbError> {
        let measured = async { if measure { self.cache_usage(key).await.map(|cache| cache.usage) } else { Ok(None) } };
        let (log, usage) = tokio::join!(self.cache_log(key), measured);
        let snapshots = log?.iter().map(snapshot_view).collect();
        let (usage, unmeasured) = match usage {
            Ok(usage) => (usage.as_ref().map(usage_view), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Ok(CacheView { key: key.to_string(), snapshots, usage, unmeasured })
    }

    async fn snapshot(&self, key: &Key) -> Result<(SnapshotView, bool), VerbError> {
        has_a_past(self, key).await?;
        let before = self.cache_log(key).await?;
        let newest = Projects::snapshot(self, key).await?;
        let is_new = before.iter().all(|one| one.name != newest.name);
        Ok((snapshot_view(&newest), is_new))
    }

    async fn roll_back(&self, key: &Key, to: Option<SnapshotName>, force: bool) -> Result<SnapshotName, VerbError> {
        has_a_past(self, key).await?;
        self.rollback(key, to, force).await.map_err(|error| in_use(error, "rollback"))
    }

    async fn reset(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        Projects::reset(self, key, force).await.map_err(|error| in_use(error, "reset"))
    }

    async fn disk_usage(&self) -> Result<DiskUsage, VerbError> {
        let caches: Vec<_> = self.cache_usages().await?.iter().map(cache_entry).collect();
        // The caches are worth telling without it.
        let storage = self.fullness().await.unwrap_or_else(|error| {
            tracing::debug!(%error, "the storage of the caches could not be measured");
            None
        });
        let storage = storage.map(|full| Storage { used: full.bytes_used, total: full.bytes_total });
        Ok(DiskUsage { sums: Sums::of(&caches), caches, trash: Heart::trash(self).await?, storage })
    }

    async fn orphans(&self) -> Result<Vec<Orphan>, VerbError> {
        Ok(Projects::orphans(self).await?)
    }

    async fn adopt(&self, kind: Option<OrphanKind>, name: &str) -> Result<Key, VerbError> {
        Ok(Projects::adopt(self, kind, name).await?)
    }

    async fn remove_orphan(&self, kind: OrphanKind, name: &str) -> Result<(), VerbError> {
        Ok(Projects::remove_orphan(self, kind, name).await?)
    }

    async fn trash(&self) -> Result<Vec<Trashed>, VerbError> {
        let view = |(entry, expires): (host::volumes::Trashed, Timestamp)| Trashed {
            name: entry.name.to_string(),
            key: Some(entry.name.key().to_string()),
            repo: entry.properties.get("repo").cloned(),
            since: rfc3339(entry.since),
            expires: rfc3339(expires),
        };
        Ok(Projects::trash(self).await?.into_iter().map(view).collect())
    }

    async fn restore(&self, name: &str) -> Result<Key, VerbError> {
        Ok(Projects::restore(self, name).await?)
    }

    async fn discard(&self, name: &str) -> Result<(), VerbError> {
        if Projects::purge(self, name).await? {
            return Ok(());
        }
        Err(VerbError::NotThere {
            what: "entry of the trash",
            name: name.to_owned(),
            remedy: "`kiln trash ls` lists them",
        })
    }

    async fn empty_trash(&self) -> Result<u64, VerbError> {
        Ok(Projects::empty_trash(self).await?)
    }

    async fn readiness(&self) -> Readiness {
        let store = tokio::time::timeout(READY_PATIENCE, self.store().ping()).await;
        let store = match store {
            Ok(Ok(())) => Check::well("store"),
            Ok(Err(error)) => Check::ill("store", in_one_line(&error)),
            Err(_) => Check::ill("store", format!("no answer within {} s", READY_PATIENCE.as_secs())),
        };
        let host = match self.check_host(READY_PATIENCE).await {
            Ok(()) => Check::well("host"),
            Err(error) => Check::ill("host", in_one_line(&error)),
        };
        Readiness::of(vec![store, host])
    }
}

fn snapshot_view(snapshot: &Snapshot) -> SnapshotView {
    let Snapshot { name, taken, verdict, bytes } = *snapshot;
    SnapshotView { name: name.to_string(), taken: rfc3339(taken), verdict: verdict.name().to_owned(), bytes }
}

fn usage_view(usage: &Usage) -> UsageView {
    let Usage { used, shared, snapshots, size, available, inodes_available } = *usage;
    UsageView { used, shared, snapshots, size, available, inodes_available }
}

fn cache_entry(cache: &CacheUsage) -> CacheEntry {
    let CacheUsage { key, record, usage } = cache;
    let role = key.role();
    CacheEntry {
        key: key.to_string(),
        role: role.name().to_owned(),
        project: role.is_derived().then(|| key.project().to_string()),
        repo: record.as_ref().map(|record| record.spec.repo.to_string()),
        pull_request: record.as_ref().and_then(|record| record.pull_request.clone()),
        last_activity: record.as_ref().map(|record| rfc3339(record.last_activity)),
        usage: usage.as_ref().map(usage_view),
    }
}

/// A copy has none: it goes with its daemon.
async fn has_a_past(projects: &Projects, key: &Key) -> Result<(), VerbError> {
    if !key.role().is_derived() {
        return Ok(());
    }
    Heart::show(projects, key).await?;
    let project = key.project();
    Err(VerbError::Impossible(format!(
        "{key} has no snapshots: its cache is a copy of that of {project}, and goes with it; `kiln cache log {project}` shows what \
         that can go back to"
    )))
}

/// What stops a daemon by force does not free its cache.
fn in_use(error: projects::VerbError, verb: &'static str) -> VerbError {
    match error {
        projects::VerbError::Busy { key, need } => VerbError::InUse { key, need, verb },
        error => error.into(),
    }
}

fn apply(change: SettingsChange, own: &mut Settings) {
    let SettingsChange {
        tier,
        idle_window,
        volume_bytes,
        volume_max_bytes,
        memory_bytes,
        cpus,
        processes,
        io_bytes,
        entitlements,
        fan_out,
    } = change;
    tier.apply(&mut own.tier);
    idle_window.apply(&mut own.idle_window);
    volume_bytes.apply(&mut own.volume_bytes);
    volume_max_bytes.apply(&mut own.volume_max_bytes);
    memory_bytes.apply(&mut own.memory_bytes);
    cpus.apply(&mut own.cpus);
    processes.apply(&mut own.processes);
    io_bytes.apply(&mut own.io_bytes);
    entitlements.apply(&mut own.entitlements);
    fan_out.apply(&mut own.fan_out);
}

impl From<StoreError> for CompleteError {
    fn from(error: StoreError) -> Self {
        match (in_one_line(&error), error.retry_after()) {
            (why, Some(retry_after)) => Self::Unavailable { why, retry_after },
            (why, None) => Self::Failed(why),
        }
    }
}

impl From<StoreError> for RenewError {
    fn from(error: StoreError) -> Self {
        match (in_one_line(&error), error.retry_after()) {
            (why, Some(retry_after)) => Self::Unavailable { why, retry_after },
            (why, None) => Self::Failed(why),
        }
    }
}

impl From<StoreError> for VerbError {
    fn from(error: StoreError) -> Self {
        match (in_one_line(&error), error.retry_after()) {
            (why, Some(retry_after)) => Self::Unavailable { why, retry_after },
            (why, None) => Self::Failed(why),
        }
    }
}

impl From<StoreError> for RouteError {
    fn from(error: StoreError) -> Self {
        let why = in_one_line(&error);
        match (&error, error.retry_after()) {
            (StoreError::OtherIdentity { .. }, _) => Self::OtherIdentity(why),
            (StoreError::WritesWaiting { .. }, _) => Self::Busy,
            (_, Some(retry_after)) => Self::Unavailable { why, retry_after },
            (_, None) => Self::Ensure(why),
        }
    }
}

impl From<projects::VerbError> for VerbError {
    fn from(error: projects::VerbError) -> Self {
        use projects::VerbError as Verb;
        match error {
            Verb::Unknown(key) => Self::NoProject(key),
            Verb::Busy { key, need } => Self::Busy { key, need },
            Verb::Bad(error) => Self::Impossible(error.to_string()),
            Verb::NoSnapshot { ref key, ref there, .. } => {
                let remedy = match there.as_str() {
                    "" => format!(
                        "`kiln cache snapshot {key}` takes one, `kiln cache reset {key}` begins with an empty cache"
                    ),
                    _ => {
                        format!("`kiln cache log {key}` shows them, `kiln cache rollback {key} @NAME` goes back to one")
                    }
                };
                Self::NoSnapshot { why: error.to_string(), remedy }
            }
            Verb::NoCache(_) => {
                Self::NoSnapshot { why: error.to_string(), remedy: "it gets one with its next build".to_owned() }
            }
            Verb::NoRoom(why) => Self::Unavailable { why, retry_after: AFTER_A_REPAIR },
            Verb::Failed { text, retryable: true } => Self::Unavailable { why: text, retry_after: SOON },
            Verb::Failed { text, retryable: false } => Self::Failed(text),
            Verb::TimedOut { .. } => Self::Unavailable { why: error.to_string(), retry_after: SOON },
            Verb::Store(error) => error.into(),
        }
    }
}

impl From<projects::ReconcileError> for VerbError {
    fn from(error: projects::ReconcileError) -> Self {
        use projects::ReconcileError as Reconcile;
        match error {
            Reconcile::NotThere { name } => {
                Self::NotThere { what: "orphan", name, remedy: "`kiln orphans` lists them" }
            }
            Reconcile::NotInTrash { name } => {
                Self::NotThere { what: "entry of the trash", name, remedy: "`kiln trash ls` lists them" }
            }
            Reconcile::Impossible(why) => Self::Impossible(why),
            Reconcile::Taken(why) => Self::Taken(why),
            Reconcile::Host(error) => error.into(),
            Reconcile::TimedOut { .. } => Self::Unavailable { why: error.to_string(), retry_after: SOON },
            Reconcile::Store(error) => error.into(),
        }
    }
}

impl From<projects::EffectError> for VerbError {
    fn from(error: projects::EffectError) -> Self {
        match (error.in_words(), error.is_no_room(), error.is_retryable()) {
            (why, true, _) => Self::Unavailable { why, retry_after: AFTER_A_REPAIR },
            (why, false, true) => Self::Unavailable { why, retry_after: SOON },
            (why, false, false) => Self::Failed(why),
        }
    }
}

impl From<projects::RouteError> for RouteError {
    fn from(error: projects::RouteError) -> Self {
        use projects::RouteError as Route;
        match error {
            Route::Untrusted(_) => Self::Refused(error.to_string()),
            Route::PullRequest(_) => Self::Malformed(error.to_string()),
            Route::TooManyForks { text } => Self::TooManyForks(text),
            Route::OtherIdentity { text } => Self::OtherIdentity(text),
            Route::Store(error) => error.into(),
            Route::TooManyLeases { key, live, limit } => Self::TooManyLeases { key, live, limit },
            Route::NoRoom { text } => Self::Unavailable { why: text, retry_after: AFTER_A_REPAIR },
            Route::Credential { .. } if is_no_room(&error) => Self::Unavailable {
                why: format!("{}; free some space on that file system", in_one_line(&error)),
                retry_after: AFTER_A_REPAIR,
            },
            Route::NotAdmitted { text } => Self::NotAdmitted { why: text, retry_after: SOON },
            Route::Gone => Self::Gone,
            Route::Failed { timed_out: true, text, .. } => Self::NotReady(text),
            Route::Failed { retryable: true, text, .. } => Self::Unavailable { why: text, retry_after: SOON },
            Route::NotReady { queue: Some((position, length)), reason, .. } => {
                Self::Queued { position: position as u64, length: length as u64, why: reason }
            }
            Route::NotReady { .. } => Self::NotReady(error.to_string()),
            Route::Closing => Self::Unavailable { why: error.to_string(), retry_after: SOON },
            Route::Failed { .. } | Route::Credential { .. } | Route::Entropy(_) => Self::Ensure(in_one_line(&error)),
        }
    }
}
