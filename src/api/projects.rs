//! The heart as the HTTP layer sees it: which of its errors is which answer.

use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::{BuildSpec, Key, LeaseToken};
use kiln_wire::{Check, LeaseView, Orphan, OrphanKind, ProjectView, Readiness, RouteResponse, Trashed, Why};

use super::heart::{CompleteError, Heart, RenewError, RouteError, RouteOptions, Routed, SettingsChange, VerbError};
use crate::causes::in_one_line;
use crate::projects::{self, Projects};
use crate::store::StoreError;

/// For what goes away by itself: long enough to help, short enough not to cost a build.
const SOON: Duration = Duration::from_secs(2);

/// Until the projects can do it.
fn not_yet(what: &str) -> VerbError {
    VerbError::Failed(format!("this kilnd cannot {what} yet: update it"))
}

impl Routed for projects::Routed {
    fn response(&self) -> RouteResponse {
        projects::Routed::response(self)
    }

    fn delivered(self: Box<Self>) {
        projects::Routed::delivered(*self);
    }
}

#[async_trait]
impl Heart for Projects {
    /// Waits as long as a route may, whatever `wait` says: no answer of this one is ever `ready: false`.
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError> {
        let RouteOptions { untrusted, credential, wait: _, resume } = options;
        if resume.is_some() {
            return Err(RouteError::Gone);
        }
        let routed = Projects::route(self, spec, projects::RouteOptions { untrusted, credential }).await?;
        Ok(Box::new(routed))
    }

    async fn prewarm(&self, spec: BuildSpec, untrusted: bool) -> Result<RouteResponse, RouteError> {
        Ok(Projects::prewarm(self, spec, untrusted).await?)
    }

    async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, CompleteError> {
        Projects::complete(self, key, token).await.map_err(|error| {
            let why = in_one_line(&error);
            if error.is_retryable() {
                CompleteError::Unavailable { why, retry_after: SOON }
            } else {
                CompleteError::Failed(why)
            }
        })
    }

    async fn complete_oldest(&self, _key: &Key) -> Result<bool, CompleteError> {
        Err(CompleteError::Failed("this kilnd cannot release the oldest lease yet: name the buildId".to_owned()))
    }

    async fn renew(&self, _token: &LeaseToken) -> Result<LeaseView, RenewError> {
        Err(RenewError::Failed("this kilnd cannot renew yet: update it".to_owned()))
    }

    async fn list(&self) -> Result<Vec<ProjectView>, StoreError> {
        Projects::list(self).await
    }

    async fn show(&self, key: &Key) -> Result<Option<ProjectView>, StoreError> {
        Projects::show(self, key).await
    }

    async fn why(&self, _key: &Key) -> Result<Why, VerbError> {
        Err(not_yet("explain itself"))
    }

    async fn set(&self, _key: &Key, _change: SettingsChange) -> Result<ProjectView, VerbError> {
        Err(not_yet("change settings"))
    }

    async fn stop(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        if force {
            return Err(not_yet("force a stop"));
        }
        Projects::stop(self, key).await.map_err(VerbError::from)
    }

    async fn remove(&self, _key: &Key) -> Result<(), VerbError> {
        Err(not_yet("remove projects"))
    }

    async fn orphans(&self) -> Result<Vec<Orphan>, VerbError> {
        Err(not_yet("look for orphans"))
    }

    async fn adopt(&self, _kind: Option<OrphanKind>, _name: &str) -> Result<Key, VerbError> {
        Err(not_yet("adopt orphans"))
    }

    async fn remove_orphan(&self, _kind: OrphanKind, _name: &str) -> Result<(), VerbError> {
        Err(not_yet("remove orphans"))
    }

    async fn trash(&self) -> Result<Vec<Trashed>, VerbError> {
        Err(not_yet("look into its trash"))
    }

    async fn restore(&self, _name: &str) -> Result<Key, VerbError> {
        Err(not_yet("restore from its trash"))
    }

    async fn discard(&self, _name: &str) -> Result<(), VerbError> {
        Err(not_yet("empty its trash"))
    }

    async fn empty_trash(&self) -> Result<u64, VerbError> {
        Err(not_yet("empty its trash"))
    }

    /// What can be told without the projects' help: whether the database can be read.
    async fn readiness(&self) -> Readiness {
        let check = match self.store().latest_event_id().await {
            Ok(_) => Check::well("store"),
            Err(error) => Check::ill("store", in_one_line(&error)),
        };
        Readiness::of(vec![check])
    }
}

impl From<projects::StopError> for VerbError {
    fn from(error: projects::StopError) -> Self {
        use projects::StopError as Stop;
        match error {
            Stop::Unknown(key) => Self::NoProject(key),
            Stop::Busy { key, need } => Self::Busy { key, need },
            Stop::Store(store) if store.is_retryable() => {
                Self::Unavailable { why: in_one_line(&store), retry_after: SOON }
            }
            Stop::TimedOut { .. } => Self::Unavailable { why: error.to_string(), retry_after: SOON },
            other => Self::Failed(format!("stop the project: {}", in_one_line(&other))),
        }
    }
}

impl From<projects::RouteError> for RouteError {
    fn from(error: projects::RouteError) -> Self {
        use projects::RouteError as Route;
        match error {
            Route::Untrusted(_) => Self::Refused(error.to_string()),
            Route::Store(StoreError::OtherIdentity { .. }) => Self::OtherIdentity(error.to_string()),
            Route::Store(StoreError::WritesWaiting { .. }) => Self::Busy,
            Route::Store(ref store) if store.is_retryable() => {
                Self::Unavailable { why: in_one_line(&error), retry_after: SOON }
            }
            Route::Failed { timed_out: true, text, .. } => Self::NotReady(text),
            Route::Failed { retryable: true, text, .. } => Self::Unavailable { why: text, retry_after: SOON },
            Route::NotReady { .. } => Self::NotReady(error.to_string()),
            Route::Closing => Self::Unavailable { why: error.to_string(), retry_after: SOON },
            Route::Store(_) | Route::Failed { .. } | Route::Credential { .. } | Route::Entropy(_) => {
                Self::Ensure(in_one_line(&error))
            }
        }
    }
}
