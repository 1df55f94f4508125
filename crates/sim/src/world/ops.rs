//! Operations on the host, and everything that can become of one: it fails, lies, hangs, or outlives the kilnd that
//! asked for it.

use std::time::Duration;

use kiln::host::RuntimeError;
use kiln::host::volumes::VolumeError;
use kiln::projects::EffectError;
use kiln_domain::plan::{Done, Stop};
use kiln_domain::{Key, ProjectRecord, Role, Settings, Step, Tier};
use tokio::time::sleep;

use super::host::{Files, Instance, limits, marks};
use super::{Due, Sim, World};
use crate::config::SECOND;
use crate::history::{Fact, Incarnation};

/// An operation that was asked for.
#[derive(Debug, Clone)]
pub(crate) struct Op {
    pub(crate) step: Step,
    pub(crate) record: ProjectRecord,
    pub(crate) settings: Settings,
    /// A daemon ran as it was asked for.
    pub(crate) ran: bool,
}

/// One that ends after nobody waits for it any more.
pub(crate) struct Late(Op);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Works,
    Slow,
    Fails,
    /// It is done, and reported as failed.
    Lies,
    Hangs,
    /// The daemon dies as soon as it was started.
    DiesAfter,
    CrashBefore,
    CrashAfter,
}

impl Fate {
    const fn name(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::Slow => "operation slow",
            Self::Fails => "operation failed",
            Self::Lies => "operation done and reported as failed",
            Self::Hangs => "operation hung",
            Self::DiesAfter => "daemon died after its start",
            Self::CrashBefore => "kilnd died before an operation",
            Self::CrashAfter => "kilnd died after an operation",
        }
    }
}

/// Dropped before its operation was carried out, fate decides what becomes of it.
struct Flight {
    sim: Sim,
    key: Key,
    op: Option<Op>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        {
            let mut world = self.sim.world();
            let (key, op) = (self.key.clone(), self.op.take());
            if world.alive {
                world.land(&key, op);
            } else {
                world.left_behind.insert(key, op);
            }
        }
        self.sim.tell();
    }
}

impl Sim {
    /// Something on the host changed, or `at_most` milliseconds have passed.
    pub(super) async fn changed(&self, at_most: u64) {
        let _ = tokio::time::timeout(Duration::from_millis(at_most), self.0.changed.notified()).await;
    }

    /// What is asked for by a kilnd that has died meanwhile never gets an answer.
    pub(super) async fn alive(&self, life: u32) {
        if !self.lives(life) {
            std::future::pending::<()>().await;
        }
    }

    /// Dies here and now.
    pub(super) async fn crash(&self) {
        self.kill();
        std::future::pending::<()>().await;
    }

    async fn take_turn(&self, key: &Key) {
        loop {
            if self.world().host.busy.insert(key.clone()) {
                return;
            }
            self.changed(10 * SECOND).await;
        }
    }

    pub(super) async fn carry_out(&self, life: u32, op: Op) -> Result<Done, EffectError> {
        self.alive(life).await;
        let (key, step) = (op.record.key.clone(), op.step);
        if step == Step::DestroyVolume {
            let mut world = self.world();
            let project = world.project(&key);
            world.record(Fact::FreeBegan { project });
        }
        // What kilnd decides it has decided now, however long the host lets it wait for its turn. Also if kilnd dies meanwhile: what
        // it has asked for may be done without it.
        let meant = self.world().stop_begins(&op, None);
        self.take_turn(&key).await;
        let mut flight = Flight { sim: self.clone(), key: key.clone(), op: Some(op) };
        let (fate, before, after) = self.world().fate_of(&key, step);
        if let Some(op) = &flight.op {
            self.world().stop_begins(op, meant);
        }
        if fate == Fate::CrashBefore {
            self.crash().await;
        }
        sleep(Duration::from_millis(before)).await;
        self.alive(life).await;
        match fate {
            Fate::Fails => {
                flight.op = None;
                return Err(unavailable(step));
            }
            Fate::Hangs => std::future::pending::<()>().await,
            _ => {}
        }
        let Some(op) = flight.op.take() else { return Err(unavailable(step)) };
        let done = self.world().apply(&op);
        self.tell();
        if fate == Fate::CrashAfter {
            self.crash().await;
        }
        if let (Step::StopInstance(_), Ok(_)) = (step, &done) {
            self.until_down(&key).await;
        }
        if fate == Fate::DiesAfter {
            self.world().dies(&key);
            self.tell();
        }
        sleep(Duration::from_millis(after)).await;
        self.alive(life).await;
        if fate == Fate::Lies { Err(unavailable(step)) } else { done }
    }

    async fn until_down(&self, key: &Key) {
        loop {
            let runs = {
                let world = self.world();
                let project = world.project(key);
                world.daemon(project).is_some_and(|daemon| daemon.draining)
            };
            if !runs {
                return;
            }
            self.changed(SECOND).await;
        }
    }
}

pub(super) fn unavailable(step: Step) -> EffectError {
    let why = format!("the model cannot {} now", step.name());
    RuntimeError::Unavailable { runtime: "model", why, remedy: "wait".to_owned() }.into()
}

fn refused(step: Step, key: &Key, why: &str) -> EffectError {
    let instance = key.daemon_name();
    RuntimeError::Refused { operation: step.name(), instance, why: why.to_owned() }.into()
}

impl World {
    /// What becomes of it, and how long it takes before and after it is done.
    fn fate_of(&mut self, key: &Key, step: Step) -> (Fate, u64, u64) {
        let (latency, faults) = (self.profile.latency, self.profile.op_faults);
        let mut fate = Fate::Works;
        if !self.quiet && self.rng.chance(faults) {
            let dies = if step == Step::StartInstance { 4 } else { 0 };
            let kinds = [(4, Fate::Fails), (4, Fate::Lies), (3, Fate::Hangs), (2, Fate::Slow), (dies, Fate::DiesAfter)];
            fate = self.rng.weighted(&kinds).unwrap_or(Fate::Works);
        }
        if self.may_crash_inside() {
            fate = if self.rng.chance(400) { Fate::CrashBefore } else { Fate::CrashAfter };
        }
        let (mut before, mut after) = (self.rng.about(latency), self.rng.about(latency / 4));
        if fate == Fate::Slow {
            (before, after) = (self.rng.between(1, 12) * SECOND, self.rng.between(0, 6) * SECOND);
        }
        if fate != Fate::Works {
            self.fault(fate.name());
        }
        let project = self.project(key);
        self.record(Fact::Op { project, step, fate: fate.name() });
        (fate, before, after)
    }

    pub(crate) fn may_crash_inside(&mut self) -> bool {
        let chance = self.profile.crash_inside;
        let may = !self.quiet && self.profile.crashes > 0 && self.rng.chance(chance);
        if may {
            self.profile.crashes -= 1;
        }
        may
    }

    /// What a dead kilnd had under way, once all its tasks are gone: a runtime drops them in an order that follows from how
    /// many tasks the whole process has seen, and so not from the seed.
    pub(crate) fn settle_left_behind(&mut self) {
        for (key, op) in std::mem::take(&mut self.left_behind) {
            self.land(&key, op);
        }
    }

    /// `None`: it was carried out.
    fn land(&mut self, key: &Key, op: Option<Op>) {
        match op {
            Some(op) => self.abandon(op),
            None => drop(self.host.busy.remove(key)),
        }
    }

    /// Nobody waits for it any more: kilnd gave up on it, or died.
    fn abandon(&mut self, op: Op) {
        let key = op.record.key.clone();
        let late = self.rng.between(0, 15) * SECOND;
        if op.step == Step::WriteFiles {
            self.late_files.insert(key.clone());
        }
        match (self.rng.below(3), op.step) {
            (0, _) | (2, Step::StopInstance(_)) => drop(self.host.busy.remove(&key)),
            (1, _) => {
                self.fault("operation half-done");
                self.apply_half(&op);
                self.host.busy.remove(&key);
            }
            _ => {
                self.fault("operation done late");
                self.later(late, Due::Late(Box::new(Late(op))));
            }
        }
    }

    pub(super) fn finish_late(&mut self, Late(op): Late) {
        self.host.busy.remove(&op.record.key);
        // Nobody is there to hear how it came out.
        drop(self.apply(&op));
    }

    fn dies(&mut self, key: &Key) {
        let project = self.project(key);
        if let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation) {
            self.gone(project, incarnation, crate::history::Cause::Crashed);
        }
    }

    /// Of the daemon that runs, unless it is the one that was `meant` before. It tells which that is.
    fn stop_begins(&mut self, op: &Op, meant: Option<Incarnation>) -> Option<Incarnation> {
        let Step::StopInstance(how) = op.step else { return None };
        let project = self.project(&op.record.key);
        let incarnation = self.daemon(project)?.incarnation;
        if meant != Some(incarnation) {
            let (force, phase) = (how == Stop::Force, op.record.phase.name());
            self.record(Fact::StopBegan { project, incarnation, force, phase });
        }
        Some(incarnation)
    }

    fn apply_half(&mut self, op: &Op) {
        let key = &op.record.key;
        match op.step {
            Step::CreateInstance if !self.host.instances.contains_key(key) => {
                let mut instance = Instance::new(&op.record, &op.settings, self.host.image);
                instance.half_made = true;
                self.host.instances.insert(key.clone(), instance);
            }
            Step::DestroyInstance => {
                if let Some(instance) = self.host.instances.get_mut(key).filter(|instance| instance.daemon.is_none()) {
                    instance.half_made = true;
                }
            }
            Step::StartInstance if self.apply(op).is_ok() => self.dies(key),
            Step::WriteFiles => drop(self.host.files.remove(key)),
            Step::DestroyVolume => drop(self.free(key, true, op.ran)),
            // All of it, or nothing: and nobody was told which.
            Step::StopInstance(_) | Step::Rollback(_) | Step::TakeSnapshot => drop(self.apply(op)),
            _ => {}
        }
    }

    /// Carries it out. Whatever a host would refuse is refused, and what must never be asked of one is recorded.
    fn apply(&mut self, op: &Op) -> Result<Done, EffectError> {
        let Op { step, record, settings, ran } = op;
        let key = &record.key;
        let project = self.project(key);
        match *step {
            Step::CreateVolume => self.apply_create_volume(record)?,
            Step::WriteFiles => {
                let files = Files { volume_bytes: settings.volume_bytes, old: false };
                self.host.files.insert(key.clone(), files);
            }
            Step::CreateInstance => self.apply_create_instance(record, settings)?,
            Step::DestroyInstance => match self.host.instances.get(key) {
                Some(instance) if instance.daemon.is_some() => return Err(refused(*step, key, "it is running")),
                Some(_) => {
                    self.host.instances.remove(key);
                    self.record(Fact::InstanceDestroyed { project });
                }
                None => {}
            },
            Step::StartInstance => return self.apply_start(record),
            Step::StopInstance(how) => self.terminate(project, how == Stop::Force, record.phase.name()),
            Step::Discard if !self.host.volumes.contains_key(key) => {
                return Err(VolumeError::Missing { operation: "discard", name: key.to_string() }.into());
            }
            Step::Discard => self.discard(key, true, *ran)?,
            Step::DiscardCache => self.discard(key, false, *ran)?,
            Step::CloneVolume => return Ok(self.clone_volume(record)?),
            Step::DestroyVolume => {
                self.must_not_be_hot(key, settings);
                self.free(key, false, *ran)?;
            }
            Step::Rollback(to) => self.roll_back(record, to, *ran)?,
            Step::TakeSnapshot => return Ok(self.take_snapshot(key)?),
            Step::ListSnapshots => return Ok(Done::Snapshots { all: self.list_snapshots(key)?, taken: false }),
            Step::DestroySnapshot(name) => self.destroy_snapshot(key, name),
            // Nothing bounds a volume here.
            Step::Measure => return Ok(Done::Measured(None)),
            Step::Resize(_) | Step::AdoptInstance | Step::AwaitServing | Step::Probe | Step::CountBuilds => {}
        }
        Ok(Done::Plain)
    }

    /// What is kept up keeps its cache.
    fn must_not_be_hot(&mut self, key: &Key, settings: &Settings) {
        if key.role() == Role::Project && settings.tier == Some(Tier::Hot) {
            let why = format!("the cache of {}, which is hot, was to be freed", self.project(key));
            self.record(Fact::Wrong { invariant: "K3", why });
        }
    }

    fn apply_create_volume(&mut self, record: &ProjectRecord) -> Result<(), EffectError> {
        let key = &record.key;
        match self.host.volumes.get(key) {
            Some(volume) if volume.foreign => {
                let found = "somebody else".to_owned();
                Err(VolumeError::Foreign { operation: "create", key: key.clone(), found }.into())
            }
            Some(_) => Ok(()),
            None => {
                self.make_volume(record);
                Ok(())
            }
        }
    }

    fn apply_create_instance(&mut self, record: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        let (key, step) = (&record.key, Step::CreateInstance);
        if !self.host.volumes.contains_key(key) {
            return Err(refused(step, key, "its volume is missing"));
        }
        if let Some(instance) = self.host.instances.get(key) {
            let whole = !instance.half_made && instance.is_where(record);
            let equal = whole && instance.limits == limits(settings) && instance.image == self.host.image;
            return if equal { Ok(()) } else { Err(refused(step, key, "another one of that name is there")) };
        }
        let instance = Instance::new(record, settings, self.host.image);
        self.host.instances.insert(key.clone(), instance);
        let project = self.project(key);
        self.record(Fact::InstanceMade { project });
        Ok(())
    }

    fn apply_start(&mut self, record: &ProjectRecord) -> Result<Done, EffectError> {
        let (key, step) = (&record.key, Step::StartInstance);
        let project = self.project(key);
        let Some(instance) = self.host.instances.get(key) else { return Err(refused(step, key, "there is none")) };
        let incarnation = match &instance.daemon {
            Some(daemon) => daemon.incarnation,
            None if instance.half_made => {
                let why = format!("{project}'s instance was started half-made");
                self.record(Fact::Wrong { invariant: "K4", why });
                return Err(refused(step, key, "it is half-made"));
            }
            None if !instance.is_where(record) => return Err(refused(step, key, "its address is another")),
            None => match self.host.volumes.get_mut(key) {
                None => return Err(refused(step, key, "its volume is missing")),
                Some(volume) if volume.foreign || volume.properties.get("key") != marks(record).get("key") => {
                    let why = format!("{project}'s daemon was started on somebody else's volume");
                    self.record(Fact::Wrong { invariant: "K1", why });
                    return Err(refused(step, key, "its volume is somebody else's"));
                }
                // It is looked at before; what that does not see, the daemon falls over.
                Some(volume) if volume.contents.damaged && self.rng.chance(500) => {
                    let what = "a blob of it has changed".to_owned();
                    return Err(EffectError::Damaged { key: key.clone(), what });
                }
                Some(volume) => {
                    volume.properties = marks(record);
                    self.start_daemon(key)
                }
            },
        };
        let generation = record.generation.get();
        if key.role() != Role::Trial {
            self.record(Fact::Numbered { project, generation, incarnation });
        }
        Ok(Done::Started { incarnation: format!("run-{incarnation}") })
    }
}
