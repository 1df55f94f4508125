//! The heart as the HTTP layer sees it: which of its errors is which answer.

use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::{BuildSpec, Key, LeaseToken};
use kiln_wire::{ProjectView, RouteResponse};

use super::heart::{CompleteError, Heart, RouteError, RouteOptions, Routed, StopError};
use crate::causes::in_one_line;
use crate::projects::{self, Projects};
use crate::store::StoreError;

/// For what goes away by itself: long enough to help, short enough not to cost a build.
const SOON: Duration = Duration::from_secs(2);

impl Routed for projects::Routed {
    fn deliver(self: Box<Self>) -> RouteResponse {
        { let r = self.response(); projects::Routed::delivered(*self); r }
    }
}

#[async_trait]
impl Heart for Projects {
    async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Box<dyn Routed>, RouteError> {
        let routed = Projects::route(self, spec, options).await?;
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

    async fn list(&self) -> Result<Vec<ProjectView>, StoreError> {
        Projects::list(self).await
    }

    async fn show(&self, key: &Key) -> Result<Option<ProjectView>, StoreError> {
        Projects::show(self, key).await
    }

    async fn stop(&self, key: &Key) -> Result<(), StopError> {
        use projects::VerbError as Stop;
        Projects::stop(self, key, false).await.map_err(|error| match error {
            Stop::Unknown(key) => StopError::Unknown(key),
            Stop::Busy { need, .. } => StopError::Busy(need),
            other => StopError::Failed(in_one_line(&other)),
        })
    }
}

impl From<projects::RouteError> for RouteError {
    fn from(error: projects::RouteError) -> Self {
        use projects::RouteError as Route;
        match error {
            Route::Untrusted(_) => Self::Refused(error.to_string()),
            Route::Store(StoreError::OtherIdentity { .. }) => Self::OtherIdentity(error.to_string()),
            Route::Store(StoreError::WritesWaiting { .. }) => Self::Busy,
            Route::Failed { timed_out: true, text, .. } => Self::NotReady(text),
            Route::Failed { retryable: true, text, .. } => Self::Unavailable { why: text, retry_after: SOON },
            Route::NotReady { .. } => Self::NotReady(error.to_string()),
            Route::TooManyLeases { text } => Self::Unavailable { why: text, retry_after: SOON },
            Route::OtherIdentity { text } => Self::OtherIdentity(text),
            Route::Gone => Self::Refused(error.to_string()),
            Route::Closing => Self::Unavailable { why: error.to_string(), retry_after: SOON },
            Route::Store(_) | Route::Failed { .. } | Route::Credential { .. } | Route::Entropy(_) => {
                Self::Ensure(in_one_line(&error))
            }
        }
    }
}
