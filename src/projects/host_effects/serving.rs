//! Whether a daemon answers, and whether what runs untrusted code is kept apart: nobody is sent to one before both.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use kiln_domain::health::Probed;
use kiln_domain::plan::Done;
use kiln_domain::{Key, ProjectRecord, Settings, Timestamp};
use tokio::sync::broadcast;

use super::super::effects::EffectError;
use super::{HostEffects, lane_of};
use crate::buildkit::{ProbeError, await_serving};
use crate::host::{InstanceEvent, InstanceSpec, InstanceState, Lane, RuntimeError};

/// How long a look waits for a daemon that runs; a loaded one is looked at again by the wait for its first answer.
pub(super) const LOOK_PATIENCE: Duration = Duration::from_secs(2);

/// How long a proof of isolation counts for a daemon that goes on running.
const PROOF_RENEWED: Duration = Duration::from_secs(300);

/// That a run of an instance is kept apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proof {
    incarnation: String,
    at: Timestamp,
}

impl HostEffects {
    /// One that answers is not served to anybody before its isolation is proven. Both take their time at once.
    pub(super) async fn await_isolated_and_serving(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
    ) -> Result<(), EffectError> {
        tokio::try_join!(self.await_serving(record, settings), self.prove_isolation(record, settings))?;
        Ok(())
    }

    /// For one that runs untrusted code; of others nothing is asked.
    pub(super) async fn prove_isolation(&self, record: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        if lane_of(record) == Lane::Trusted {
            return Ok(());
        }
        self.proven().remove(&record.key);
        let spec = self.spec_on_host(record, settings).await?;
        // Before the proof: should another run follow meanwhile, it is the other that is not proven.
        let InstanceState::Running { incarnation, .. } = self.parts.runtime.look(&spec).await? else {
            let log = self.parts.runtime.last_words(&spec).await;
            return Err(EffectError::Exited { key: record.key.clone(), log });
        };
        self.parts.runtime.prove_isolation(&spec).await.map_err(|error| match error {
            source @ RuntimeError::NotIsolated { .. } => EffectError::NotIsolated { key: record.key.clone(), source },
            error => error.into(),
        })?;
        self.proven().insert(record.key.clone(), Proof { incarnation, at: self.parts.clock.now() });
        Ok(())
    }

    /// Whether builds may be sent to this run, as far as isolation goes. How old the proof is, the probes see to.
    pub(super) fn may_serve(&self, record: &ProjectRecord, incarnation: &str) -> bool {
        lane_of(record) == Lane::Trusted
            || self.proven().get(&record.key).is_some_and(|proof| proof.incarnation == incarnation)
    }

    /// As [`Self::prove_isolation`], where the last proof is old.
    pub(super) async fn prove_isolation_again(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
    ) -> Result<(), EffectError> {
        let now = self.parts.clock.now();
        let is_new = |proof: &Proof| {
            let of_this_run = record.incarnation.as_ref() == Some(&proof.incarnation);
            of_this_run && now >= proof.at && now.since(proof.at) < PROOF_RENEWED
        };
        if self.proven().get(&record.key).is_some_and(is_new) {
            return Ok(());
        }
        self.prove_isolation(record, settings).await
    }

    pub(super) fn proven(&self) -> MutexGuard<'_, HashMap<Key, Proof>> {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until the daemon answers, or its instance goes away, whichever is first.
    pub(super) async fn await_serving(&self, record: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        let target = self.target(record).await?;
        let spec = self.spec_on_host(record, settings).await?;
        let patience = self.config.deadlines.await_serving;
        let mut events = self.parts.runtime.events();
        let serving = await_serving(&*self.parts.probe, &target, patience);
        tokio::pin!(serving);
        // A daemon that died before the subscription sends no event any more.
        self.check_alive(record, &spec).await?;
        loop {
            tokio::select! {
                outcome = &mut serving => match outcome {
                    Ok(()) => return Ok(()),
                    Err(source) => return Err(self.not_serving(record, &spec, source, &mut events).await),
                },
                event = events.recv() => match event {
                    Ok(InstanceEvent::Changed(key)) if key != record.key => {}
                    _ => self.check_alive(record, &spec).await?,
                },
            }
        }
    }

    /// Why a daemon does not serve. What answers with a certificate of its own may be somebody else on the same address;
    /// then ours is about to say in its log that the address is taken, and to go.
    pub(super) async fn not_serving(
        &self,
        record: &ProjectRecord,
        spec: &InstanceSpec,
        source: ProbeError,
        events: &mut broadcast::Receiver<InstanceEvent>,
    ) -> EffectError {
        // One that gave up has been watched all the time.
        let gave_up = matches!(source, ProbeError::GaveUp { .. });
        let deadline = tokio::time::Instant::now() + if gave_up { Duration::ZERO } else { LOOK_PATIENCE };
        loop {
            if let Err(gone) = self.check_alive(record, spec).await {
                return gone;
            }
            if tokio::time::timeout_at(deadline, events.recv()).await.is_err() {
                break;
            }
        }
        let log = self.parts.runtime.last_words(spec).await;
        EffectError::NotServing { key: record.key.clone(), log, source }
    }

    pub(super) async fn check_alive(&self, record: &ProjectRecord, spec: &InstanceSpec) -> Result<(), EffectError> {
        if let InstanceState::Running { .. } = self.parts.runtime.look(spec).await? {
            return Ok(());
        }
        let log = self.parts.runtime.last_words(spec).await;
        Err(EffectError::Exited { key: record.key.clone(), log })
    }

    /// Whether a daemon that runs answers now. Why not is the business of the wait for it.
    pub(super) async fn is_serving(&self, record: &ProjectRecord) -> Result<bool, EffectError> {
        let target = self.target(record).await?;
        let deadline = tokio::time::Instant::now() + LOOK_PATIENCE;
        Ok(self.parts.probe.serving(&target, deadline).await.is_ok())
    }

    pub(super) async fn probe(&self, record: &ProjectRecord, settings: &Settings) -> Result<Done, EffectError> {
        self.prove_isolation_again(record, settings).await?;
        let target = self.target(record).await?;
        let deadline = tokio::time::Instant::now() + self.config.deadlines.ask;
        let answered = self.parts.probe.serving(&target, deadline).await.is_ok();
        let cpu = if answered { None } else { self.cpu_time(record, settings).await };
        Ok(Done::Probed(Probed { answered, cpu }))
    }

    /// The last question before a stop in peace, so what may take its time is done before it is asked for the last time.
    pub(super) async fn count_builds(&self, record: &ProjectRecord, settings: &Settings) -> Result<Done, EffectError> {
        let target = self.target(record).await?;
        let ask = async || {
            let deadline = tokio::time::Instant::now() + self.config.deadlines.ask;
            self.parts.probe.builds(&target, deadline).await
        };
        let mut counted = ask().await;
        if let Ok(0) = counted {
            self.settle(record).await;
            counted = ask().await;
        }
        match counted {
            Ok(count) => Ok(Done::Builds { count: Some(count), cpu: None }),
            Err(error) => {
                tracing::debug!(key = %record.key, %error, "it did not say which builds run");
                Ok(Done::Builds { count: None, cpu: self.cpu_time(record, settings).await })
            }
        }
    }

    /// `None` where it cannot be told.
    pub(super) async fn cpu_time(&self, record: &ProjectRecord, settings: &Settings) -> Option<Duration> {
        let spec = self.spec_on_host(record, settings).await.ok()?;
        self.parts.runtime.cpu_time(&spec).await.ok().flatten()
    }
}
