//! The door that the real workers act through: [`Effects`] on the model host.

use std::time::Duration;

use async_trait::async_trait;
use kiln::host::volumes::{FoundVolume, Fullness, TrashName, Trashed, Usage, VolumeError};
use kiln::host::{FoundInstance, InstanceEvent, Properties, RuntimeError};
use kiln::projects::{EffectError, Effects, Survey};
use kiln_domain::admission::HostLoad;
use kiln_domain::health::Probed;
use kiln_domain::plan::{Done, FilesSeen, InstanceSeen, Observed, VolumeSeen};
use kiln_domain::{Key, ProjectRecord, Settings, Snapshot, SnapshotName, Step, Verdict};
use tokio::sync::broadcast;
use tokio::time::sleep;

use super::host::{Files, limits, marks};
use super::ops::{Op, unavailable};
use super::{Sim, World};
use crate::config::{DEADLINES, SECOND};
use crate::history::Fact;

/// How long a look waits for a daemon that runs, as the real one does.
const LOOK_PATIENCE: u64 = 2 * SECOND;

/// The host as one life of kilnd sees it.
pub(crate) struct ModelHost {
    pub(crate) sim: Sim,
    pub(crate) life: u32,
    pub(crate) events: broadcast::Sender<InstanceEvent>,
}

/// What becomes of a look or of something else that only takes a moment.
enum Moment {
    Fine,
    Fails,
    Hangs,
}

impl ModelHost {
    /// The way there and the way back, and what may go wrong on them.
    pub(super) async fn pass(&self, faults: bool) -> Result<(), EffectError> {
        self.sim.alive(self.life).await;
        let (moment, wait) = {
            let mut world = self.sim.world();
            let (latency, odds) = (world.profile.latency, world.profile.op_faults / 2);
            let moment = if faults && !world.quiet && world.rng.chance(odds) {
                if world.rng.chance(700) { Moment::Fails } else { Moment::Hangs }
            } else {
                Moment::Fine
            };
            let wait = world.rng.about(latency / 4);
            (moment, wait)
        };
        sleep(Duration::from_millis(wait)).await;
        self.sim.alive(self.life).await;
        match moment {
            Moment::Fine => Ok(()),
            Moment::Fails => {
                self.sim.world().fault("look failed");
                let why = "the model does not let itself be looked at now".to_owned();
                Err(RuntimeError::Unavailable { runtime: "model", why, remedy: "wait".to_owned() }.into())
            }
            Moment::Hangs => {
                self.sim.world().fault("look hung");
                // Longer than any deadline, and not for ever: the runtime below has one of its own.
                sleep(Duration::from_secs(30)).await;
                self.sim.alive(self.life).await;
                Err(unavailable(Step::AdoptInstance))
            }
        }
    }

    /// Asks a daemon. `None`: there is no answer; then its processor time is told, if it runs.
    async fn ask(&self, record: &ProjectRecord, for_builds: bool) -> (bool, Option<u32>, Option<Duration>) {
        self.sim.alive(self.life).await;
        let (wait, back, lost) = {
            let mut world = self.sim.world();
            let (latency, odds) = (world.profile.latency, world.profile.ask_faults);
            let lost = !world.quiet && world.rng.chance(odds);
            if lost {
                world.fault("question lost");
            }
            (world.rng.about(latency / 4), world.rng.between(0, 3), lost)
        };
        sleep(Duration::from_millis(wait)).await;
        self.sim.alive(self.life).await;
        let project = self.sim.world().project(&record.key);
        let heard = {
            let mut world = self.sim.world();
            let answers = !lost && world.answers_at(record) == Some(true);
            answers.then(|| world.questioned(project, true, for_builds))
        };
        if let Some((_, builds, _)) = heard {
            sleep(Duration::from_millis(back)).await;
            self.sim.alive(self.life).await;
            return (true, builds, None);
        }
        // One that is not there refuses at once; one that hangs lets the call run out.
        let runs = self.sim.world().daemon(project).is_some();
        if runs && !lost {
            sleep(DEADLINES.ask).await;
            self.sim.alive(self.life).await;
        }
        let (_, _, cpu) = self.sim.world().questioned(project, false, for_builds);
        (false, None, cpu)
    }

    async fn await_serving(&self, record: &ProjectRecord) -> Result<Done, EffectError> {
        let deadline = tokio::time::Instant::now() + DEADLINES.await_serving;
        loop {
            self.sim.alive(self.life).await;
            {
                let mut world = self.sim.world();
                let project = world.project(&record.key);
                match world.answers_at(record) {
                    None => {
                        let log = world.host.last_words.get(&record.key).copied().unwrap_or_default().to_owned();
                        return Err(EffectError::Exited { key: record.key.clone(), log });
                    }
                    Some(true) => {
                        world.questioned(project, true, false);
                        return Ok(Done::Plain);
                    }
                    Some(false) => {}
                }
            }
            if tokio::time::Instant::now() >= deadline {
                let after = DEADLINES.await_serving;
                return Err(EffectError::TimedOut { step: Step::AwaitServing.name(), after });
            }
            self.sim.changed(500).await;
        }
    }
}

impl World {
    /// What the run that a record speaks of is called from now on.
    pub(crate) fn numbered(&mut self, record: &ProjectRecord) {
        let project = self.project(&record.key);
        let run = record.incarnation.as_deref().and_then(|run| run.strip_prefix("run-")?.parse().ok());
        if let Some(incarnation) = run {
            self.record(Fact::Numbered { project, generation: record.generation.get(), incarnation });
        }
    }

    /// Takes note of a question to a daemon, and answers for it.
    fn questioned(
        &mut self,
        project: usize,
        answered: bool,
        for_builds: bool,
    ) -> (bool, Option<u32>, Option<Duration>) {
        let cpu = self.cpu(project);
        let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation) else {
            return (false, None, None);
        };
        let count = self.builds.values().filter(|build| build.incarnation == incarnation).count() as u32;
        let builds = (answered && for_builds).then_some(count);
        self.record(Fact::Questioned { project, incarnation, answered, builds, cpu });
        (answered, builds, cpu.map(Duration::from_millis))
    }

    fn look(&mut self, record: &ProjectRecord, settings: &Settings) -> Observed {
        let (key, project) = (&record.key, self.project(&record.key));
        let volume = match self.host.volumes.get(key) {
            None => VolumeSeen::Absent,
            Some(volume) if volume.foreign => VolumeSeen::Foreign { found: "somebody else's".to_owned() },
            Some(_) => VolumeSeen::Ready,
        };
        let wanted = Files { volume_bytes: settings.volume_bytes, old: false };
        let files = match self.host.files.get(key) {
            Some(files) if *files == wanted => FilesSeen::Current,
            _ => FilesSeen::Stale,
        };
        let image = self.host.image;
        let instance = match self.host.instances.get(key) {
            None => InstanceSeen::Absent,
            Some(instance) => {
                let image = (instance.image != image).then_some("the image");
                let limits = (instance.limits != limits(settings)).then_some("the limits");
                let is_where = instance.is_where(record);
                let runs_elsewhere = (!is_where && instance.daemon.is_some()).then_some("what it is made of");
                let old: Vec<&str> = image.into_iter().chain(limits).chain(runs_elsewhere).collect();
                let outdated = (!old.is_empty()).then(|| old.join(", "));
                match &instance.daemon {
                    Some(daemon) => {
                        let (incarnation, serving) =
                            (format!("run-{}", daemon.incarnation), daemon.answers() && is_where);
                        InstanceSeen::Running { incarnation, serving, outdated }
                    }
                    None if instance.half_made => InstanceSeen::HalfMade { why: "half of it is missing".to_owned() },
                    None if !is_where => InstanceSeen::HalfMade { why: "its address is another".to_owned() },
                    None => InstanceSeen::Stopped { outdated },
                }
            }
        };
        if let InstanceSeen::Running { serving: true, .. } = instance {
            self.questioned(project, true, false);
        }
        Observed { volume, files, instance }
    }

    fn survey(&self) -> Survey {
        let named = |kind: &str| {
            let prefix = format!("{kind} ");
            self.host.strangers.iter().filter_map(move |name| name.strip_prefix(&prefix).map(str::to_owned))
        };
        let instances = self.host.instances.iter().map(|(key, instance)| FoundInstance {
            name: key.daemon_name(),
            key: Some(key.clone()),
            properties: instance.properties.clone(),
            running: instance.daemon.is_some(),
        });
        let strange = named("instance").map(|name| FoundInstance {
            name,
            key: None,
            properties: Properties::new(),
            running: true,
        });
        let volumes = self.host.volumes.iter().map(|(key, volume)| FoundVolume {
            name: format!("live/{key}"),
            key: (!volume.foreign).then(|| key.clone()),
            properties: volume.properties.clone(),
        });
        let odd = named("volume").map(|name| FoundVolume { name, key: None, properties: Properties::new() });
        Survey { instances: instances.chain(strange).collect(), volumes: volumes.chain(odd).collect() }
    }

    fn bring_back(&mut self, name: &TrashName) -> Result<Properties, EffectError> {
        let (operation, text) = ("restore", name.to_string());
        if self.host.volumes.contains_key(name.key()) {
            return Err(VolumeError::Exists { operation, name: text }.into());
        }
        let Some((_, volume)) = self.host.trash.remove(name) else {
            return Err(VolumeError::Missing { operation, name: text }.into());
        };
        let (project, lineage, properties) = (self.project(name.key()), volume.lineage, volume.properties.clone());
        self.host.volumes.insert(name.key().clone(), volume);
        self.record(Fact::Restored { project, lineage });
        Ok(properties)
    }
}

#[async_trait]
impl Effects for ModelHost {
    async fn observe(&self, record: &ProjectRecord, settings: &Settings) -> Result<Observed, EffectError> {
        let early = self.sim.world().rng.chance(500);
        self.sim.alive(self.life).await;
        let before = early.then(|| self.sim.world().look(record, settings));
        self.pass(true).await?;
        let seen = before.unwrap_or_else(|| self.sim.world().look(record, settings));
        if let InstanceSeen::Running { serving: false, .. } = seen.instance {
            sleep(Duration::from_millis(LOOK_PATIENCE)).await;
            self.sim.alive(self.life).await;
        }
        Ok(seen)
    }

    async fn perform(&self, step: Step, record: &ProjectRecord, settings: &Settings) -> Result<Done, EffectError> {
        match step {
            Step::AdoptInstance => {
                // Nothing is done to the host, so nothing can fail.
                self.sim.world().numbered(record);
                self.pass(false).await?;
                Ok(Done::Plain)
            }
            Step::AwaitServing => self.await_serving(record).await,
            Step::Probe => {
                let (answered, _, cpu) = self.ask(record, false).await;
                Ok(Done::Probed(Probed { answered, cpu }))
            }
            Step::CountBuilds => {
                let (_, count, cpu) = self.ask(record, true).await;
                Ok(Done::Builds { count, cpu })
            }
            _ => {
                let ran = self.sim.world().runs_on(&record.key);
                let op = Op { step, record: record.clone(), settings: settings.clone(), ran };
                self.sim.carry_out(self.life, op).await
            }
        }
    }

    async fn last_words(&self, _record: &ProjectRecord, _settings: &Settings) -> String {
        String::new()
    }

    async fn describe(&self, record: &ProjectRecord) -> Result<(), EffectError> {
        self.pass(true).await?;
        if let Some(volume) = self.sim.world().host.volumes.get_mut(&record.key).filter(|volume| !volume.foreign) {
            volume.properties = marks(record);
        }
        Ok(())
    }

    fn events(&self) -> broadcast::Receiver<InstanceEvent> {
        self.events.subscribe()
    }

    fn snapshots_are_cheap(&self) -> bool {
        self.sim.world().profile.cheap
    }

    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, EffectError> {
        self.pass(true).await?;
        Ok(self.sim.world().list_snapshots(key)?)
    }

    async fn try_out(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
        snapshot: SnapshotName,
    ) -> Result<Verdict, EffectError> {
        self.try_snapshot(record, settings, snapshot).await
    }

    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), EffectError> {
        self.pass(true).await?;
        Ok(self.sim.world().judge(key, snapshot, verdict)?)
    }

    async fn sweep_trials(&self) -> Result<(), EffectError> {
        self.sweep().await
    }

    async fn usage(&self, key: &Key) -> Result<Option<Usage>, EffectError> {
        self.pass(true).await?;
        Ok(self.sim.world().usage(key))
    }

    async fn fullness(&self) -> Result<Option<Fullness>, EffectError> {
        if self.sim.world().profile.storage.fills() {
            self.pass(true).await?;
        }
        Ok(self.sim.world().fullness())
    }

    async fn forget(&self, key: &Key) -> Result<(), EffectError> {
        self.pass(true).await?;
        let mut world = self.sim.world();
        world.host.files.remove(key);
        world.clear_out(key);
        Ok(())
    }

    async fn load(&self) -> HostLoad {
        let world = self.sim.world();
        let load = world.host.load;
        let storage = [load.storage, world.percent_full()].into_iter().flatten().max_by(f64::total_cmp);
        HostLoad { storage, ..load }
    }

    async fn check(&self) -> Result<(), EffectError> {
        Ok(())
    }

    async fn survey(&self) -> Result<Survey, EffectError> {
        self.pass(true).await?;
        Ok(self.sim.world().survey())
    }

    async fn remove_instance(&self, name: &str) -> Result<(), EffectError> {
        self.pass(true).await?;
        let mut world = self.sim.world();
        let found = world.host.instances.iter().find(|(key, _)| key.daemon_name() == name);
        match found.map(|(key, instance)| (key.clone(), instance.daemon.is_some())) {
            Some((_, true)) => Err(unavailable(Step::DestroyInstance)),
            Some((key, false)) => {
                world.host.instances.remove(&key);
                let project = world.project(&key);
                world.record(Fact::InstanceDestroyed { project });
                Ok(())
            }
            None => {
                let why = format!("{name}, which is not ours, was removed");
                world.record(Fact::Wrong { invariant: "K5", why });
                Ok(())
            }
        }
    }

    async fn discard_volume(&self, key: &Key) -> Result<(), EffectError> {
        self.pass(true).await?;
        let ran = self.sim.world().runs_on(key);
        Ok(self.sim.world().discard(key, true, ran)?)
    }

    async fn trash(&self) -> Result<Vec<Trashed>, EffectError> {
        self.pass(true).await?;
        let world = self.sim.world();
        let trashed = world.host.trash.iter().map(|(name, (since, volume))| Trashed {
            name: name.clone(),
            since: *since,
            properties: volume.properties.clone(),
        });
        Ok(trashed.collect())
    }

    async fn restore(&self, name: &TrashName) -> Result<Properties, EffectError> {
        self.pass(true).await?;
        self.sim.world().bring_back(name)
    }

    async fn purge(&self, name: &TrashName) -> Result<(), EffectError> {
        self.pass(true).await?;
        self.sim.world().purge(name);
        Ok(())
    }
}
