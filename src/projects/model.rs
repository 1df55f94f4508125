//! [`Effects`] on a model host in memory: for the tests of the worker, and for `kiln bench route`, which measures the
//! way of a warm request and not a host.

mod disk;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use disk::Disk;
use kiln_domain::admission::HostLoad;
use kiln_domain::cache::size::Fill;
use kiln_domain::health::Probed;
use kiln_domain::plan::{Done, FilesSeen, InstanceSeen, Observed, Step, VolumeSeen};
use kiln_domain::{Key, ProjectRecord, Settings, Snapshot, SnapshotName, Timestamp, Verdict};
use tokio::sync::{Semaphore, broadcast};

use super::effects::{EffectError, Effects, Survey};
use crate::host::volumes::{FoundVolume, Fullness, TrashName, Trashed, Usage, VolumeError};
use crate::host::{InstanceEvent, Properties, RuntimeError};

/// What the model should do instead of obeying.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mood {
    #[default]
    Obedient,
    /// The step fails and changes nothing.
    Failing(Step),
    /// The step fails because no room is left on the disk.
    Full(Step),
    /// Untrusted code is found to reach what it must not.
    Leaky,
    /// What trials have left cannot be removed.
    Littered,
    /// The step succeeds and its answer is lost.
    Lossy(Step),
    /// Nothing can be seen.
    Blind,
    /// The step succeeds, and the daemon dies while the answer is on its way; then it obeys again.
    FatalOnce(Step),
}

#[derive(Debug)]
struct Host {
    seen: HashMap<Key, Observed>,
    done: Vec<(Key, Step)>,
    starts: u64,
    mood: Mood,
    /// What each daemon says when it is asked.
    builds: u32,
    /// No daemon answers.
    hangs: bool,
    /// Whether untrusted code is kept apart cannot be told.
    unproven: bool,
    /// Whose steps never end.
    stuck: Option<Key>,
    load: HostLoad,
    /// What a look through the whole host finds.
    found: Survey,
    /// Whether snapshots cost nothing; they do until a test says otherwise.
    cheap: bool,
    snapshots: HashMap<Key, Vec<Snapshot>>,
    disk: Disk,
    /// Whose caches no daemon opens, and what it says.
    damaged: HashMap<Key, String>,
    /// What a trial finds.
    verdict: Verdict,
    pressure: HashMap<Key, f64>,
    /// What each volume holds and may hold; `None`: nothing bounds them.
    fill: Option<Fill>,
    /// What of the trash cannot be freed.
    held: Option<TrashName>,
}

impl Host {
    fn note_past(&mut self, step: Step, key: &Key) {
        match step {
            Step::TakeSnapshot => {
                let all = self.snapshots.entry(key.clone()).or_default();
                let name = SnapshotName::new(all.last().map_or(1, |newest| newest.name.sequence() + 1));
                all.push(Snapshot { name, taken: Timestamp::EPOCH, verdict: Verdict::Unchecked, bytes: None });
            }
            Step::DestroySnapshot(name) => {
                self.snapshots.entry(key.clone()).or_default().retain(|known| known.name != name);
            }
            Step::Rollback(to) => {
                self.snapshots.entry(key.clone()).or_default().retain(|known| known.name <= to);
                self.damaged.remove(key);
            }
            Step::Discard | Step::DiscardCache | Step::DestroyVolume => {
                self.snapshots.remove(key);
                self.disk.free(key);
                self.damaged.remove(key);
            }
            _ => {}
        }
    }

    fn can_be_seen(&self) -> Result<(), EffectError> {
        if self.mood == Mood::Blind {
            let (runtime, why) = ("model", "the model says so".into());
            return Err(RuntimeError::Unavailable { runtime, why, remedy: "tell it otherwise".into() }.into());
        }
        Ok(())
    }
}

/// See the module. Each step takes one permit from `gate`, so that a test can hold a step in flight.
#[derive(Debug)]
pub struct ModelEffects {
    host: Mutex<Host>,
    events: broadcast::Sender<InstanceEvent>,
    pub gate: Semaphore,
    /// One for each look.
    eyes: Semaphore,
}

impl Default for ModelEffects {
    fn default() -> Self {
        let host = Host {
            seen: HashMap::new(),
            done: Vec::new(),
            starts: 0,
            mood: Mood::default(),
            builds: 0,
            hangs: false,
            unproven: false,
            stuck: None,
            load: HostLoad::default(),
            found: Survey::default(),
            cheap: false,
            snapshots: HashMap::new(),
            disk: Disk::default(),
            damaged: HashMap::new(),
            verdict: Verdict::Good,
            pressure: HashMap::new(),
            fill: None,
            held: None,
        };
        Self {
            host: Mutex::new(host),
            events: broadcast::Sender::new(64),
            gate: Semaphore::new(Self::OPEN),
            eyes: Semaphore::new(Self::OPEN),
        }
    }
}

impl ModelEffects {
    /// Permits that no run uses up.
    const OPEN: usize = 1 << 40;

    /// A model whose steps wait until the test adds permits to `gate`.
    pub fn gated() -> Self {
        Self { gate: Semaphore::new(0), ..Self::default() }
    }

    fn host(&self) -> MutexGuard<'_, Host> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_mood(&self, mood: Mood) {
        self.host().mood = mood;
    }

    /// Looks at the host wait until [`ModelEffects::open_eyes`].
    pub fn close_eyes(&self) {
        self.eyes.forget_permits(usize::MAX);
    }

    pub fn open_eyes(&self) {
        self.eyes.add_permits(Self::OPEN);
    }

    async fn look(&self) {
        if let Ok(permit) = self.eyes.acquire().await {
            permit.forget();
        }
    }

    /// Builds that every daemon tells of from now on.
    pub fn set_builds(&self, builds: u32) {
        self.host().builds = builds;
    }

    /// Whether the daemons leave questions unanswered from now on.
    pub fn set_hanging(&self, hangs: bool) {
        self.host().hangs = hangs;
    }

    /// Whether nobody can tell from now on that untrusted code is kept apart.
    pub fn set_unproven(&self, unproven: bool) {
        self.host().unproven = unproven;
    }

    /// Every step for this project hangs from now on.
    pub fn set_stuck(&self, key: Option<Key>) {
        self.host().stuck = key;
    }

    pub fn set_load(&self, load: HostLoad) {
        self.host().load = load;
    }

    /// A disk of this size, of which so much is used by what is not a cache.
    pub fn set_disk(&self, total: u64, other: u64) {
        let mut host = self.host();
        (host.disk.total, host.disk.other) = (total, other);
    }

    /// So much of the disk is a project's cache.
    pub fn put_on_disk(&self, key: &Key, bytes: u64) {
        self.host().disk.put(key, bytes);
    }

    pub fn throw_away(&self, name: TrashName, since: Timestamp, bytes: u64) {
        self.host().disk.throw_away(name, since, bytes);
    }

    pub fn mark_in_trash(&self, name: &TrashName, properties: Properties) {
        self.host().disk.mark(name, properties);
    }

    /// From now on what is freed shows only when somebody waits for it.
    pub fn set_lazy_disk(&self) {
        self.host().disk.lazy = true;
    }

    pub fn set_snapshots(&self, key: &Key, all: Vec<Snapshot>) {
        self.host().snapshots.insert(key.clone(), all);
    }

    /// How often a cache was measured.
    pub fn measured(&self) -> usize {
        self.host().disk.measured
    }

    /// Whoever measures a cache from now on waits for ever.
    pub fn set_unmeasurable(&self) {
        self.host().disk.unmeasurable = true;
    }

    pub fn set_found(&self, found: Survey) {
        self.host().found = found;
    }

    /// From now on snapshots cost nothing.
    pub fn set_cheap(&self) {
        self.host().cheap = true;
    }

    /// Something in its instance waits for this share of the time, in percent.
    pub fn press(&self, key: &Key, percent: f64) {
        self.host().pressure.insert(key.clone(), percent);
    }

    /// What trials find from now on.
    pub fn set_verdict(&self, verdict: Verdict) {
        self.host().verdict = verdict;
    }

    /// This cannot be freed from now on, and all else can.
    pub fn hold(&self, name: Option<TrashName>) {
        self.host().held = name;
    }

    /// No daemon opens the cache any more, until it goes back or begins anew.
    pub fn damage(&self, key: &Key, says: &str) {
        self.host().damaged.insert(key.clone(), says.to_owned());
    }

    pub fn snapshots_of(&self, key: &Key) -> Vec<Snapshot> {
        self.host().snapshots.get(key).cloned().unwrap_or_default()
    }

    /// What every volume holds and may hold from now on, until it is given more.
    pub fn set_fill(&self, used: u64, size: u64) {
        let available = size.saturating_sub(used);
        self.host().fill = Some(Fill { used, size, available, inodes_available: None });
    }

    /// The instance is not as it would be made today.
    pub fn outdate(&self, key: &Key) {
        if let Some(Observed { instance: InstanceSeen::Running { outdated, .. }, .. }) = self.host().seen.get_mut(key) {
            *outdated = Some("the image".to_owned());
        }
        // Nobody may be listening.
        let _ = self.events.send(InstanceEvent::Changed(key.clone()));
    }

    /// The steps carried out so far, in order.
    pub fn done(&self) -> Vec<(Key, Step)> {
        self.host().done.clone()
    }

    /// An event about the instance, whatever it is.
    pub fn happen(&self, key: &Key) {
        // Nobody may be listening.
        let _ = self.events.send(InstanceEvent::Changed(key.clone()));
    }

    /// The daemon dies by itself.
    pub fn kill(&self, key: &Key) {
        if let Some(seen) = self.host().seen.get_mut(key) {
            seen.instance = InstanceSeen::STOPPED;
        }
        // Nobody may be listening.
        let _ = self.events.send(InstanceEvent::Changed(key.clone()));
    }

    /// Somebody else starts it anew, and nobody is told.
    pub fn start_anew(&self, key: &Key) {
        let mut host = self.host();
        host.starts += 1;
        let incarnation = format!("run-{}", host.starts);
        if let Some(seen) = host.seen.get_mut(key) {
            seen.instance = InstanceSeen::Running { incarnation, serving: true, outdated: None };
        }
    }

    /// It is there already, with its volume and files.
    pub fn seen_as(&self, key: &Key, instance: InstanceSeen) {
        let seen = Observed { volume: VolumeSeen::Ready, files: FilesSeen::Current, instance };
        self.host().seen.insert(key.clone(), seen);
    }

    pub fn instance(&self, key: &Key) -> InstanceSeen {
        self.host().seen.get(key).map_or(InstanceSeen::Absent, |seen| seen.instance.clone())
    }
}

#[async_trait]
impl Effects for ModelEffects {
    async fn observe(&self, record: &ProjectRecord, _settings: &Settings) -> Result<Observed, EffectError> {
        self.look().await;
        let host = self.host();
        host.can_be_seen()?;
        let mut seen = host.seen.get(&record.key).cloned().unwrap_or(Observed::NOTHING);
        if host.unproven && record.key.is_fork() {
            seen.answers(false);
        }
        Ok(seen)
    }

    async fn perform(&self, step: Step, record: &ProjectRecord, _settings: &Settings) -> Result<Done, EffectError> {
        if let Ok(permit) = self.gate.acquire().await {
            permit.forget();
        }
        let stuck = self.host().stuck.as_ref() == Some(&record.key);
        if stuck {
            std::future::pending::<()>().await;
        }
        let outcome = self.carry_out(step, record);
        if self.is_fatal(step) {
            self.kill(&record.key);
            tokio::time::sleep(Self::ON_ITS_WAY).await;
        }
        outcome
    }

    async fn last_words(&self, _record: &ProjectRecord, _settings: &Settings) -> String {
        String::new()
    }

    async fn describe(&self, _record: &ProjectRecord) -> Result<(), EffectError> {
        Ok(())
    }

    fn snapshots_are_cheap(&self) -> bool {
        self.host().cheap
    }

    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, EffectError> {
        Ok(self.snapshots_of(key))
    }

    async fn try_out(
        &self,
        _record: &ProjectRecord,
        _settings: &Settings,
        _snapshot: SnapshotName,
    ) -> Result<Verdict, EffectError> {
        Ok(self.host().verdict)
    }

    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), EffectError> {
        let mut host = self.host();
        let known = host.snapshots.get_mut(key).and_then(|all| all.iter_mut().find(|known| known.name == snapshot));
        if let Some(known) = known {
            known.verdict = verdict;
        }
        Ok(())
    }

    async fn sweep_trials(&self) -> Result<(), EffectError> {
        if self.host().mood == Mood::Littered {
            let (operation, name, holder) = ("purge", "a trial".to_owned(), "somebody".to_owned());
            return Err(VolumeError::Busy { operation, name, holder }.into());
        }
        Ok(())
    }

    async fn usage(&self, key: &Key) -> Result<Option<Usage>, EffectError> {
        let (usage, never) = {
            let mut host = self.host();
            (host.disk.usage(key), host.disk.unmeasurable)
        };
        if never {
            std::future::pending::<()>().await;
        }
        Ok(usage)
    }

    async fn fullness(&self) -> Result<Option<Fullness>, EffectError> {
        let host = self.host();
        host.can_be_seen()?;
        Ok(host.disk.fullness(&host.snapshots))
    }

    fn pressure(&self, key: &Key) -> Option<f64> {
        self.host().pressure.get(key).copied()
    }

    async fn freed(&self) -> Result<(), EffectError> {
        self.host().disk.freed();
        Ok(())
    }

    async fn load(&self) -> HostLoad {
        let host = self.host();
        let disk = host.disk.fullness(&host.snapshots);
        let percent = disk.map(|disk| disk.bytes_used as f64 * 100.0 / disk.bytes_total as f64);
        HostLoad { storage: percent.or(host.load.storage), ..host.load }
    }

    async fn check(&self) -> Result<(), EffectError> {
        Ok(())
    }

    async fn survey(&self) -> Result<Survey, EffectError> {
        self.look().await;
        let host = self.host();
        host.can_be_seen()?;
        Ok(host.found.clone())
    }

    async fn volumes(&self) -> Result<Vec<FoundVolume>, EffectError> {
        let host = self.host();
        Ok(host.found.volumes.iter().cloned().chain(host.disk.volumes()).collect())
    }

    async fn remove_instance(&self, _name: &str) -> Result<(), EffectError> {
        Ok(())
    }

    async fn discard_volume(&self, _key: &Key) -> Result<(), EffectError> {
        Ok(())
    }

    async fn trash(&self) -> Result<Vec<Trashed>, EffectError> {
        Ok(self.host().disk.trash())
    }

    async fn restore(&self, name: &TrashName) -> Result<Properties, EffectError> {
        let mut host = self.host();
        host.seen.entry(name.key().clone()).or_insert(Observed::NOTHING).volume = VolumeSeen::Ready;
        Ok(host.disk.bring_back(name))
    }

    async fn purge(&self, name: &TrashName) -> Result<(), EffectError> {
        let mut host = self.host();
        if host.held.as_ref() == Some(name) {
            let (operation, name, holder) = ("purge", name.to_string(), "a snapshot of somebody's".to_owned());
            return Err(VolumeError::Busy { operation, name, holder }.into());
        }
        host.disk.purge(name);
        Ok(())
    }

    fn events(&self) -> broadcast::Receiver<InstanceEvent> {
        self.events.subscribe()
    }
}

impl ModelEffects {
    /// Long enough for an event to be heard first.
    const ON_ITS_WAY: Duration = Duration::from_millis(20);

    fn is_fatal(&self, step: Step) -> bool {
        let mut host = self.host();
        let fatal = host.mood == Mood::FatalOnce(step);
        if fatal {
            host.mood = Mood::Obedient;
        }
        fatal
    }

    fn carry_out(&self, step: Step, record: &ProjectRecord) -> Result<Done, EffectError> {
        let mut host = self.host();
        let failed = || {
            let instance = record.key.daemon_name();
            Err(RuntimeError::Refused { operation: step.name(), instance, why: "the model says so".into() }.into())
        };
        if host.mood == Mood::Failing(step) {
            return failed();
        }
        if host.mood == Mood::Full(step) {
            return Err(VolumeError::Full { operation: step.name(), name: record.key.to_string() }.into());
        }
        if host.mood == Mood::Leaky && step == Step::AwaitServing && record.key.is_fork() {
            let (instance, reached) = (record.key.daemon_name(), "the metadata service".to_owned());
            let source = RuntimeError::NotIsolated { instance, reached };
            return Err(EffectError::NotIsolated { key: record.key.clone(), source });
        }
        if host.unproven && record.key.is_fork() && matches!(step, Step::AwaitServing | Step::Probe) {
            return failed();
        }
        if let (Step::StartInstance, Some(what)) = (step, host.damaged.get(&record.key)) {
            return Err(EffectError::Damaged { key: record.key.clone(), what: what.clone() });
        }
        host.done.push((record.key.clone(), step));
        host.note_past(step, &record.key);
        let done = match step {
            Step::StartInstance => {
                host.starts += 1;
                Done::Started { incarnation: format!("run-{}", host.starts) }
            }
            Step::Measure if host.fill.is_some() => Done::Measured(host.fill),
            Step::Resize(to) => {
                if let Some(fill) = &mut host.fill {
                    (fill.size, fill.available) = (to, to.saturating_sub(fill.used));
                }
                Done::Plain
            }
            Step::Probe => Done::Probed(Probed { answered: !host.hangs, cpu: Some(Duration::ZERO) }),
            Step::CountBuilds if host.hangs => Done::Builds { count: None, cpu: Some(Duration::ZERO) },
            Step::CountBuilds => Done::Builds { count: Some(host.builds), cpu: None },
            Step::CloneVolume => Done::Cloned { from: format!("what {} holds now", record.key.project()) },
            Step::ListSnapshots | Step::TakeSnapshot => Done::Snapshots {
                all: host.snapshots.get(&record.key).cloned().unwrap_or_default(),
                taken: step == Step::TakeSnapshot,
            },
            _ => Done::Plain,
        };
        host.seen.entry(record.key.clone()).or_insert(Observed::NOTHING).apply(step, &done);
        if host.mood == Mood::Lossy(step) { failed() } else { Ok(done) }
    }
}
