//! What goes when the caches' storage is nearly full, and which daemons go when the host is short of memory.
//!
//! [`kiln_domain::cache::eviction`] says what goes; this looks how full the storage is, gathers what could go, and has it done
//! by whom it belongs to: caches and copies by their workers, which alone know whether somebody has come for them meanwhile
//! (K2). Whatever refuses is passed over for a while, and the next goes.
//!
//! What a cache would free is measured only when it is about to go, and remembered for as long as nobody uses it: on some
//! storage that is a walk through every file.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Duration;

use kiln_domain::cache::HistoryPolicy;
use kiln_domain::cache::eviction::{self, Candidate, Eviction, Fullness, Kind, Plan, Use};
use kiln_domain::cache::history::surplus;
use kiln_domain::plan::{Step, StopWish};
use kiln_domain::{Key, Phase, ProjectRecord, Role, Tier, Timestamp};
use kiln_wire::units::show_size;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::admin::VerbError;
use super::effects::EffectError;
use super::handle::{Projects, TRIES};
use super::janitor::PURGE_PATIENCE;
use super::messages::Message;
use super::reconcile::ReconcileError;
use crate::host::volumes::{self, TrashName, Trashed};
use crate::store::NewEvent;

/// Storage fills without telling.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// While something has to go.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Some storage frees behind one's back. What it has not freed by then is not waited for.
const FREED_WITHIN: Duration = Duration::from_mins(2);

/// However often starts are refused for want of room.
const PAUSE: Duration = Duration::from_secs(1);

/// What could not go is not asked again for this long.
const PASS_OVER: Duration = Duration::from_mins(5);

/// Caches that are measured before anything goes.
const LOOKS: usize = 32;

/// The snapshots of a cache go one by one.
const THIN_PATIENCE: Duration = Duration::from_mins(5);

/// Which entry of the trash it is, if it is one.
type Item = Option<TrashName>;

type Known = BTreeMap<Key, (ProjectRecord, Use)>;

static NOBODY: Known = BTreeMap::new();

impl Projects {
    pub(super) async fn make_room(&self) {
        let mut evictor = Evictor::new(self.clone());
        loop {
            let short = self.shared.admission.ease().await;
            let again = (evictor.round().await && !evictor.told) || short;
            tokio::time::sleep(PAUSE).await;
            let wait = if again { LOOK_AGAIN } else { LOOK_EVERY };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.shared.admission.refused_for_storage() => {}
            }
        }
    }

    /// Gives up the snapshots of a project that do not have to be kept.
    pub(super) async fn thin(&self, key: &Key, keep: HistoryPolicy) -> Result<(), VerbError> {
        for _ in 0..TRIES {
            let worker = self.registry.worker(&self.shared, key, None).await?;
            let worker = worker.ok_or_else(|| VerbError::Unknown(key.clone()))?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Thin { keep, reply }).await.is_err() {
                continue;
            }
            match tokio::time::timeout(THIN_PATIENCE, answer).await {
                Ok(Ok(answer)) => return answer.map_err(|refusal| VerbError::of(key, refusal)),
                Ok(Err(_gone)) => {}
                Err(_elapsed) => break,
            }
        }
        Err(VerbError::TimedOut { key: key.clone(), after: THIN_PATIENCE })
    }
}

/// What a candidate would free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Estimate {
    Bytes(u64),
    Unknown,
    /// There is nothing to go.
    Nothing,
}

/// The eviction of one host, from one look to the next.
pub(super) struct Evictor {
    projects: Projects,
    under_way: bool,
    /// That nothing may go is said once.
    told: bool,
    /// As of the last activity that goes with it.
    measured: HashMap<(Kind, Key), (Timestamp, Estimate)>,
    passed_over: HashMap<(Kind, Key, Item), Instant>,
}

impl Evictor {
    pub(super) fn new(projects: Projects) -> Self {
        Self { projects, under_way: false, told: false, measured: HashMap::new(), passed_over: HashMap::new() }
    }

    /// One look at the storage, and what follows from it. True: there is more to do.
    pub(super) async fn round(&mut self) -> bool {
        if let Err(error) = self.try_round().await {
            tracing::warn!(%error, "what could make room could not be looked through; trying again");
        }
        self.under_way
    }

    async fn try_round(&mut self) -> Result<(), ReconcileError> {
        if !self.is_due().await? {
            self.told = false;
            self.measured.clear();
            return Ok(());
        }
        // What others have given up lately may be enough.
        self.wait_until_freed().await;
        if !self.is_due().await? {
            return Ok(());
        }
        self.passed_over.retain(|_, since| since.elapsed() < PASS_OVER);
        let Some(Plan { evictions, .. }) = self.plan().await? else { return Ok(()) };
        if evictions.is_empty() {
            self.tell_once(self.fullness().await?);
        } else {
            self.told = false;
        }
        for eviction in evictions {
            if self.carry_out(eviction).await {
                self.wait_until_freed().await;
            }
            // An estimate may have been too low.
            if !self.is_due().await? {
                break;
            }
        }
        Ok(())
    }

    fn tell_once(&mut self, fullness: Fullness) {
        if std::mem::replace(&mut self.told, true) {
            return;
        }
        let percent = fullness.percent();
        let text = format!(
            "the caches' storage is {percent:.0} % full, and nothing may go: whatever is left is used, or was lately"
        );
        tracing::warn!("{text}");
        self.projects.note("storage-full", text);
    }

    async fn is_due(&mut self) -> Result<bool, EffectError> {
        let fullness = self.fullness().await?;
        self.under_way = eviction::is_due(&fullness, self.under_way, &self.projects.config.eviction);
        Ok(self.under_way)
    }

    /// Nothing is given up twice over because the first time does not show yet.
    async fn wait_until_freed(&self) {
        let freed = tokio::time::timeout(FREED_WITHIN, self.projects.shared.effects.freed()).await;
        let late = EffectError::TimedOut { step: "wait until the storage has freed it", after: FREED_WITHIN };
        if let Err(error) = freed.unwrap_or(Err(late)) {
            tracing::info!(error = error.in_words(), "the storage may be less full than it says");
        }
    }

    /// What cannot be told is not full.
    async fn fullness(&self) -> Result<Fullness, EffectError> {
        let seen = self.look("look how full the storage is", self.projects.shared.effects.fullness()).await?;
        Ok(seen.map_or_else(
            Fullness::default,
            |volumes::Fullness { bytes_used, bytes_total, inodes_used, inodes_total }| {
                let inodes = (inodes_total > 0).then(|| inodes_used as f64 * 100.0 / inodes_total as f64);
                Fullness { used: bytes_used, total: bytes_total, other_percent: inodes }
            },
        ))
    }

    async fn look<T>(
        &self,
        step: &'static str,
        look: impl Future<Output = Result<T, EffectError>>,
    ) -> Result<T, EffectError> {
        let after = self.projects.shared.deadlines.observe;
        tokio::time::timeout(after, look).await.unwrap_or(Err(EffectError::TimedOut { step, after }))
    }

    /// Measures what would be the next to go, and plans again, until that is known. `None`: not everything is known yet.
    async fn plan(&mut self) -> Result<Option<Plan<Item>>, ReconcileError> {
        let (now, policy) = (self.projects.shared.clock.now(), self.projects.config.eviction);
        let fullness = self.fullness().await?;
        let trash = self.look("look into the trash", self.projects.shared.effects.trash()).await?;
        let known = self.records().await?;
        let records = known.as_ref().unwrap_or(&NOBODY);
        for _ in 0..LOOKS {
            let candidates = self.candidates(&trash, records);
            let plan = eviction::plan(&fullness, candidates, true, now, &policy);
            let Some(Eviction { kind, key, bytes: None, .. }) = plan.evictions.first() else {
                return Ok(Some(plan).filter(|plan| known.is_some() || !plan.evictions.is_empty()));
            };
            let record = records.get(key).map(|(record, _)| record).filter(|record| {
                // What is in the trash cannot be measured.
                *kind != Kind::Trash && self.estimate(*kind, record).is_none()
            });
            let Some(record) = record else { return Ok(Some(plan)) };
            let estimate = self.measure(*kind, record).await;
            self.measured.insert((*kind, key.clone()), (record.last_activity, estimate));
        }
        Ok(None)
    }

    fn estimate(&self, kind: Kind, record: &ProjectRecord) -> Option<Estimate> {
        let (at, estimate) = self.measured.get(&(kind, record.key.clone()))?;
        (*at == record.last_activity).then_some(*estimate)
    }

    /// Those that have a volume, and who uses each. `None`: what runs is not known yet.
    async fn records(&self) -> Result<Option<Known>, ReconcileError> {
        let shared = &self.projects.shared;
        if !shared.surveyed.load(Ordering::Acquire) || shared.rebuilding().is_some() {
            return Ok(None);
        }
        let now = shared.clock.now();
        let volumes = self.look("list the caches", shared.effects.volumes()).await?;
        let mut records: HashMap<Key, ProjectRecord> =
            shared.store.projects().await?.into_iter().map(|record| (record.key.clone(), record)).collect();
        let mut leases: HashMap<Key, usize> = HashMap::new();
        for (key, lease) in shared.store.all_leases().await? {
            *leases.entry(key).or_default() += usize::from(!lease.is_expired(now));
        }
        let with_volume = volumes.into_iter().filter_map(|volume| volume.key).filter_map(|key| records.remove(&key));
        let known = with_volume.map(|record| {
            let by = self.who_uses(&record, leases.get(&record.key).copied().unwrap_or(0));
            (record.key.clone(), (record, by))
        });
        Ok(Some(known.collect()))
    }

    fn who_uses(&self, record: &ProjectRecord, leases: usize) -> Use {
        let worker = self.projects.registry.get(&record.key);
        let phase = worker.as_ref().map_or(Some(record.phase.clone()), |worker| worker.status.borrow().phase.clone());
        // Of one that failed, its worker knows whether something runs.
        let rests = matches!(phase, Some(Phase::Absent | Phase::Idle | Phase::Failed { .. }));
        Use {
            hot: self.projects.shared.settings(record).tier == Some(Tier::Hot),
            leases,
            connections: worker.as_ref().map_or(0, |worker| worker.connections.count()),
            running: !rests,
        }
    }

    fn candidates(&self, trash: &[Trashed], records: &Known) -> Vec<Candidate<Item>> {
        let mut candidates: Vec<Candidate<Item>> = trash
            .iter()
            .filter(|entry| self.may_be_asked(Kind::Trash, entry.name.key(), Some(&entry.name)))
            .map(|entry| Candidate::trash(Some(entry.name.clone()), entry.name.key().clone(), entry.since, None))
            .collect();
        for (record, by) in records.values() {
            let kinds: &[Kind] =
                if record.key.role() == Role::Project { &[Kind::Snapshots, Kind::Cache] } else { &[Kind::Copy] };
            for kind in kinds {
                candidates.extend(self.candidate(*kind, record, by));
            }
        }
        candidates
    }

    fn candidate(&self, kind: Kind, record: &ProjectRecord, by: &Use) -> Option<Candidate<Item>> {
        let ProjectRecord { key, last_activity, .. } = record;
        let bytes = match self.estimate(kind, record) {
            Some(Estimate::Nothing) => return None,
            Some(Estimate::Bytes(bytes)) => Some(bytes),
            Some(Estimate::Unknown) | None => None,
        };
        let make = match kind {
            Kind::Copy => Candidate::copy,
            Kind::Snapshots => Candidate::snapshots,
            Kind::Cache => Candidate::cache,
            Kind::Trash => return None,
        };
        make(None, key.clone(), by, *last_activity, bytes).filter(|_| self.may_be_asked(kind, key, None))
    }

    fn may_be_asked(&self, kind: Kind, key: &Key, item: Option<&TrashName>) -> bool {
        !self.passed_over.contains_key(&(kind, key.clone(), item.cloned()))
    }

    async fn measure(&self, kind: Kind, record: &ProjectRecord) -> Estimate {
        let effects = &self.projects.shared.effects;
        let measured = match kind {
            Kind::Snapshots => self.look("list the snapshots", effects.snapshots(&record.key)).await.map(|all| {
                // What two of them have in common is freed with both, and no sum tells of it.
                let gone = surplus(&all, self.projects.shared.clock.now(), &HistoryPolicy::LEAST);
                if gone.is_empty() { Estimate::Nothing } else { Estimate::Unknown }
            }),
            _ => self.look("measure a cache", effects.usage(&record.key)).await.map(|usage| match usage {
                // What it shares with a cache that stays is not freed with a copy.
                Some(usage) if kind == Kind::Copy => Estimate::Bytes(usage.used),
                Some(usage) => Estimate::Bytes(usage.used + usage.shared.unwrap_or(0) + usage.snapshots.unwrap_or(0)),
                None => Estimate::Nothing,
            }),
        };
        measured.unwrap_or_else(|error| {
            tracing::debug!(key = %record.key, %error, "could not tell what a cache would free");
            Estimate::Unknown
        })
    }

    /// True: it has gone.
    async fn carry_out(&mut self, eviction: Eviction<Item>) -> bool {
        let Eviction { what, kind, key, bytes, reason } = eviction;
        let about = bytes.map(|bytes| format!(" (about {})", show_size(bytes))).unwrap_or_default();
        let went = match (&what, kind) {
            (Some(name), _) => format!("{name} was freed for good"),
            (None, Kind::Snapshots) => "its older snapshots were given up".to_owned(),
            (None, _) => "its cache was given up".to_owned(),
        };
        let text = format!("{went}{about}: {reason}");
        let done = match &what {
            Some(name) => self.purge(name).await,
            None if kind == Kind::Snapshots => {
                self.projects.thin(&key, HistoryPolicy::LEAST).await.map_err(|error| error.to_string())
            }
            None => {
                let evicted = self.projects.take_down(&key, StopWish::Evict, false, Some(&text)).await;
                evicted.map_err(|error| error.to_string())
            }
        };
        self.measured.remove(&(kind, key.clone()));
        if let Err(why) = done {
            tracing::info!(%key, kind = kind.name(), why, "it was to make room and stays");
            self.passed_over.insert((kind, key, what), Instant::now());
            return false;
        }
        let shared = &self.projects.shared;
        shared.metrics.evicted(kind.into());
        tracing::info!(%key, "{text}");
        // Whoever gave up a cache has told of it in the same write.
        let event = match kind {
            Kind::Trash => "purged",
            Kind::Snapshots => "evicted",
            Kind::Copy | Kind::Cache => return true,
        };
        drop(shared.store.record(NewEvent::new(shared.clock.now(), Some(&key), event, text)));
        true
    }

    async fn purge(&self, name: &TrashName) -> Result<(), String> {
        let purged = tokio::time::timeout(PURGE_PATIENCE, self.projects.shared.effects.purge(name)).await;
        let late = EffectError::TimedOut { step: Step::DestroyVolume.name(), after: PURGE_PATIENCE };
        purged.unwrap_or(Err(late)).map_err(|error| error.in_words())
    }
}
