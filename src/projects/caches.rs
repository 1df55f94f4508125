//! [`Projects`]: what is asked of caches: their past, a way back, and where the bytes are.

use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use kiln_domain::cache::history::newest_good;
use kiln_domain::plan::{Step, StopWish};
use kiln_domain::{Key, ProjectRecord, Snapshot, SnapshotName};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::admin::VerbError;
use super::effects::EffectError;
use super::handle::{Projects, TRIES};
use super::messages::Message;
use crate::host::volumes::{Fullness, Usage};

/// How many caches are measured at a time: where that goes file by file, they compete for the same disk.
const AT_ONCE: usize = 4;

/// What was not measured until then is left open.
const MEASURED_WITHIN: Duration = Duration::from_mins(1);

/// One cache, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheUsage {
    pub key: Key,
    /// `None`: it is a copy or a remainder of no project in the database.
    pub record: Option<ProjectRecord>,
    /// `None`: it went away while it was measured, or cannot be measured, or not in time.
    pub usage: Option<Usage>,
}

impl Projects {
    /// What there is to go back to, oldest first.
    pub async fn cache_log(&self, key: &Key) -> Result<Vec<Snapshot>, VerbError> {
        self.known_to_the_store(key).await?;
        self.look(self.shared.effects.snapshots(key)).await
    }

    /// Takes a snapshot, unless nothing was written since the newest; the newest is the answer.
    pub async fn snapshot(&self, key: &Key) -> Result<Snapshot, VerbError> {
        let after = self.shared.deadlines.observe + self.shared.deadlines.of(Step::TakeSnapshot);
        for _ in 0..TRIES {
            let worker = self.registry.worker(&self.shared, key, None).await?;
            let worker = worker.ok_or_else(|| VerbError::Unknown(key.clone()))?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Snapshot { reply }).await.is_err() {
                continue;
            }
            match tokio::time::timeout(after, answer).await {
                Ok(Ok(Ok(Some(newest)))) => return Ok(newest),
                Ok(Ok(Ok(None))) => {
                    let text = "its storage tells of no snapshot after it took one".to_owned();
                    return Err(VerbError::Failed { text, retryable: true });
                }
                Ok(Ok(Err(refusal))) => return Err(VerbError::of(key, refusal)),
                Ok(Err(_gone)) => {}
                Err(_elapsed) => return Err(VerbError::TimedOut { key: key.clone(), after }),
            }
        }
        Err(VerbError::TimedOut { key: key.clone(), after })
    }

    /// Puts a cache back to `to`, or to its newest good snapshot; what it held goes to the trash. Refused while a build counts on
    /// the daemon, unless `force` cuts that off.
    pub async fn rollback(&self, key: &Key, to: Option<SnapshotName>, force: bool) -> Result<SnapshotName, VerbError> {
        let log = self.cache_log(key).await?;
        let found = match to {
            Some(name) => log.iter().find(|snapshot| snapshot.name == name),
            None => newest_good(&log),
        };
        let Some(found) = found else {
            let there: Vec<String> = log.iter().map(|snapshot| snapshot.name.to_string()).collect();
            return Err(VerbError::NoSnapshot { key: key.clone(), wanted: to, there: there.join(", ") });
        };
        self.take_down(key, StopWish::Rollback(found.name), force, None).await?;
        Ok(found.name)
    }

    /// Begins anew with an empty cache; what it held goes to the trash.
    pub async fn reset(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        self.take_down(key, StopWish::Reset, force, None).await
    }

    pub async fn cache_usage(&self, key: &Key) -> Result<CacheUsage, VerbError> {
        let record = self.known_to_the_store(key).await?;
        let usage = self.look(self.shared.effects.usage(key)).await?;
        Ok(CacheUsage { key: key.clone(), record: Some(record), usage })
    }

    /// Of every cache on the host; the largest first.
    pub async fn cache_usages(&self) -> Result<Vec<CacheUsage>, VerbError> {
        let volumes = self.look(self.shared.effects.volumes()).await?;
        let until = Instant::now() + MEASURED_WITHIN;
        let keys = volumes.into_iter().filter_map(|volume| volume.key);
        let measured = futures_util::stream::iter(keys.map(|key| self.measured(key, until)));
        let mut usages: Vec<CacheUsage> = measured.buffer_unordered(AT_ONCE).try_collect().await?;
        usages.sort_by_key(|usage| std::cmp::Reverse(usage.usage.map_or(0, |usage| usage.used)));
        Ok(usages)
    }

    /// One that cannot be measured in time does not hide the others.
    async fn measured(&self, key: Key, until: Instant) -> Result<CacheUsage, VerbError> {
        let record = self.shared.store.project(&key).await?;
        let mut usage = None;
        if Instant::now() < until {
            match tokio::time::timeout_at(until, self.look(self.shared.effects.usage(&key))).await {
                Ok(Ok(known)) => usage = known,
                Ok(Err(error)) => tracing::debug!(%key, %error, "a cache could not be measured"),
                Err(_elapsed) => tracing::debug!(%key, "a cache could not be measured in time"),
            }
        }
        Ok(CacheUsage { key, record, usage })
    }

    /// Of the storage that all caches share.
    pub async fn fullness(&self) -> Result<Option<Fullness>, VerbError> {
        self.look(self.shared.effects.fullness()).await
    }

    async fn known_to_the_store(&self, key: &Key) -> Result<ProjectRecord, VerbError> {
        self.shared.store.project(key).await?.ok_or_else(|| VerbError::Unknown(key.clone()))
    }

    async fn look<T>(&self, look: impl Future<Output = Result<T, EffectError>>) -> Result<T, VerbError> {
        let after = self.shared.deadlines.observe;
        let late = EffectError::TimedOut { step: "look at the caches", after };
        tokio::time::timeout(after, look)
            .await
            .unwrap_or(Err(late))
            .map_err(|error| VerbError::Failed { text: error.in_words(), retryable: error.is_retryable() })
    }
}
