//! Trials on the model host: a daemon opens a clone of a snapshot, and everything is taken away again. As the real ones do
//! it, step by step, so that each of them can be cut off.

use std::net::Ipv4Addr;
use std::time::Duration;

use kiln::projects::{EffectError, Effects as _};
use kiln_domain::plan::Stop;
use kiln_domain::{Key, ProjectRecord, Role, Settings, SnapshotName, Step, Verdict};
use tokio::time::timeout;

use super::ModelHost;
use super::ops::unavailable;
use crate::config::DEADLINES;
use crate::history::Fact;

/// One for all trials: there is one at a time.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 3, 254);

/// A daemon that opens a large cache for the first time reads through it.
const PATIENCE: Duration = Duration::from_mins(2);

impl ModelHost {
    pub(super) async fn try_snapshot(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
        snapshot: SnapshotName,
    ) -> Result<Verdict, EffectError> {
        let trial = ProjectRecord { key: record.key.trial(), address: ADDRESS, ..record.clone() };
        self.clear_trial(&trial, settings).await?;
        self.pass(true).await?;
        if self.another_runs(&trial.key) {
            return Err(unavailable(Step::StartInstance));
        }
        self.sim.world().clone_snapshot(&record.key, snapshot, &trial)?;
        let tried = timeout(PATIENCE, self.open_clone(&trial, settings)).await;
        let opened = match &tried {
            Ok(Ok(())) => Some(true),
            Ok(Err(error)) if error.damage().is_some() => Some(false),
            _ => None,
        };
        if let Some(opened) = opened {
            let mut world = self.sim.world();
            let project = world.project(&record.key);
            world.record(Fact::TriedOut { project, sequence: snapshot.sequence(), opened });
        }
        let cleared = self.clear_trial(&trial, settings).await;
        let verdict = match tried {
            Ok(Ok(())) => Verdict::Good,
            Ok(Err(error)) if error.damage().is_some() => Verdict::Bad,
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(EffectError::TimedOut { step: "try a snapshot out", after: PATIENCE }),
        };
        cleared.map(|()| verdict)
    }

    /// All trials have one address.
    fn another_runs(&self, trial: &Key) -> bool {
        let world = self.sim.world();
        let mut others = world.host.instances.iter().filter(|(key, _)| key.role() == Role::Trial && *key != trial);
        others.any(|(_, instance)| instance.daemon.is_some())
    }

    async fn open_clone(&self, trial: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        for step in [Step::WriteFiles, Step::CreateInstance, Step::StartInstance, Step::AwaitServing] {
            self.within_bounds(step, trial, settings).await?;
        }
        Ok(())
    }

    async fn clear_trial(&self, trial: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        for step in [Step::StopInstance(Stop::Force), Step::DestroyInstance, Step::DestroyVolume] {
            self.within_bounds(step, trial, settings).await?;
        }
        self.forget(&trial.key).await
    }

    /// A runtime and a storage give up by themselves.
    async fn within_bounds(&self, step: Step, trial: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        let after = DEADLINES.of(step);
        let late = EffectError::TimedOut { step: step.name(), after };
        timeout(after, self.perform(step, trial, settings)).await.unwrap_or(Err(late)).map(drop)
    }

    pub(super) async fn sweep(&self) -> Result<(), EffectError> {
        self.pass(true).await?;
        for trial in self.left_of_trials(|world| world.host.instances.keys().cloned().collect()) {
            self.clear_trial(&trial, &Settings::default()).await?;
        }
        self.pass(true).await?;
        for trial in self.left_of_trials(|world| {
            let trash = world.host.trash.keys().map(|name| name.key().clone());
            world.host.volumes.keys().cloned().chain(trash).collect()
        }) {
            self.within_bounds(Step::DestroyVolume, &trial, &Settings::default()).await?;
            self.forget(&trial.key).await?;
        }
        Ok(())
    }

    fn left_of_trials(&self, keys: impl FnOnce(&super::World) -> Vec<Key>) -> Vec<ProjectRecord> {
        let world = self.sim.world();
        let trials = keys(&world).into_iter().filter(|key| key.role() == Role::Trial);
        trials
            .map(|key| {
                let spec = world.spec(world.project(&key));
                ProjectRecord { key, ..ProjectRecord::new(spec, ADDRESS, world.wall()) }
            })
            .collect()
    }
}
