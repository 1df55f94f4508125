//! [`Projects`]: what an admin asks for, and what is shown.

use std::collections::HashMap;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kiln_domain::explain::Explanation;
use kiln_domain::plan::{Stop, StopWish, bounds};
use kiln_domain::settings::SettingsError;
use kiln_domain::{Key, Lease, Phase, ProjectRecord, RepoName, Settings, SnapshotName, Step};
use kiln_wire::units::{show_size, show_span};
use kiln_wire::{LeaseView, Origin, ProjectView, QueuePlace, Setting, SettingsView};
use thiserror::Error;
use tokio::sync::oneshot;

use super::admission::QueueFigures;
use super::effects::EffectError;
use super::handle::{Projects, TRIES};
use super::messages::{Message, SetRefusal, StopRefusal};
use super::registry::WorkerHandle;
use crate::clock::rfc3339;
use crate::metrics::{Count, Level, Metrics};
use crate::store::{Event, Figures, StoreError};

/// Why an admin's verb was not carried out.
#[derive(Debug, Error)]
pub enum VerbError {
    #[error("there is no project {0}")]
    Unknown(Key),
    #[error("{key} is busy: {need}")]
    Busy { key: Key, need: String },
    #[error("{key} has no {what}{rest}", what = no_snapshot(.wanted.as_ref()), rest = there_is(.there))]
    NoSnapshot { key: Key, wanted: Option<SnapshotName>, there: String },
    #[error("{0} has no cache")]
    NoCache(Key),
    #[error(transparent)]
    Bad(#[from] SettingsError),
    /// A disk or a volume is full.
    #[error("{0}")]
    NoRoom(String),
    #[error("{text}")]
    Failed { text: String, retryable: bool },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("gave up after {} s waiting for {key}", .after.as_secs())]
    TimedOut { key: Key, after: Duration },
}

fn no_snapshot(wanted: Option<&SnapshotName>) -> String {
    wanted.map_or_else(|| "good snapshot to go back to".to_owned(), |name| format!("snapshot {name}"))
}

fn there_is(there: &str) -> String {
    if there.is_empty() { "; there is none at all".to_owned() } else { format!("; there are {there}") }
}

impl VerbError {
    pub(super) fn of(key: &Key, refusal: StopRefusal) -> Self {
        match refusal {
            StopRefusal::Busy(need) => Self::Busy { key: key.clone(), need },
            StopRefusal::NoCache => Self::NoCache(key.clone()),
            StopRefusal::NoRoom(text) => Self::NoRoom(text),
            StopRefusal::Failed { text, retryable } => Self::Failed { text, retryable },
        }
    }
}

/// Events of a project that are shown with the answer to "why?".
const EVENTS_SHOWN: u32 = 10;

impl Projects {
    /// Returns when the daemon is down; the cache stays. `force`: also one that is busy or wedged.
    pub async fn stop(&self, key: &Key, force: bool) -> Result<(), VerbError> {
        self.take_down(key, if force { StopWish::Force } else { StopWish::Stop }, force, None).await
    }

    /// Returns when nothing is left of the project but its events, and its cache in the trash.
    pub async fn remove(&self, key: &Key) -> Result<(), VerbError> {
        self.take_down(key, StopWish::Remove, false, None).await
    }

    /// `why`: what the journal says of it when it is done.
    pub(super) async fn take_down(
        &self,
        key: &Key,
        wish: StopWish,
        force: bool,
        why: Option<&str>,
    ) -> Result<(), VerbError> {
        let deadlines = self.shared.deadlines;
        let stop = deadlines.observe + deadlines.of(Step::CountBuilds) + deadlines.of(Step::StopInstance(Stop::Force));
        let removal = deadlines.of(Step::DestroyInstance) + deadlines.of(Step::Discard);
        let after = match wish {
            StopWish::Stop | StopWish::Force => stop,
            StopWish::Evict => stop + removal + deadlines.of(Step::DestroyVolume),
            StopWish::Remove | StopWish::Reset | StopWish::Rollback(_) => stop + removal,
        };
        for _ in 0..TRIES {
            let worker = self.registry.worker(&self.shared, key, None).await?;
            let worker = worker.ok_or_else(|| VerbError::Unknown(key.clone()))?;
            let (reply, answer) = oneshot::channel();
            let message = Message::Stop { wish, force, why: why.map(str::to_owned), reply };
            if worker.mailbox.send(message).await.is_err() {
                continue;
            }
            match tokio::time::timeout(after, answer).await {
                Ok(Ok(Ok(()))) => return Ok(()),
                Ok(Ok(Err(refusal))) => return Err(VerbError::of(key, refusal)),
                Ok(Err(_gone)) => {}
                Err(_elapsed) => return Err(VerbError::TimedOut { key: key.clone(), after }),
            }
        }
        Err(VerbError::TimedOut { key: key.clone(), after })
    }

    /// Changes what is set for this project alone. Durable when it returns.
    pub async fn set(&self, key: &Key, change: impl FnOnce(&mut Settings) + Send + 'static) -> Result<(), VerbError> {
        let worker = self.registry.worker(&self.shared, key, None).await?;
        let worker = worker.ok_or_else(|| VerbError::Unknown(key.clone()))?;
        let (reply, answer) = oneshot::channel();
        let gone =
            || VerbError::Failed { text: "the project was busy going to sleep; try again".into(), retryable: true };
        worker.mailbox.send(Message::Set { change: Box::new(change), reply }).await.map_err(|_| gone())?;
        match answer.await.map_err(|_| gone())? {
            Ok(()) => Ok(()),
            Err(SetRefusal::Bad(error)) => Err(error.into()),
            Err(SetRefusal::Store(error)) => Err(error.into()),
        }
    }

    /// Why a project is as it is, and what happened to it lately, the newest last.
    pub async fn why(&self, key: &Key) -> Result<(Explanation, Vec<Event>), VerbError> {
        // Longer than the look that it may have to wait for.
        let after = self.shared.deadlines.observe + Duration::from_secs(5);
        for _ in 0..TRIES {
            let worker = self.registry.worker(&self.shared, key, None).await?;
            let worker = worker.ok_or_else(|| VerbError::Unknown(key.clone()))?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Why { reply }).await.is_err() {
                continue;
            }
            match tokio::time::timeout(after, answer).await {
                Ok(Ok(explanation)) => {
                    let events = self.shared.store.events_of(key, EVENTS_SHOWN).await?;
                    return Ok((explanation, events));
                }
                Ok(Err(_gone)) => {}
                Err(_elapsed) => break,
            }
        }
        Err(VerbError::TimedOut { key: key.clone(), after })
    }

    /// What counts for a project.
    pub fn settings(&self, record: &ProjectRecord) -> Settings {
        self.shared.settings(record)
    }

    /// Whether the host answers within `patience`.
    pub async fn check_host(&self, patience: Duration) -> Result<(), EffectError> {
        let late = EffectError::TimedOut { step: "ask the host whether it is there", after: patience };
        tokio::time::timeout(patience, self.shared.effects.check()).await.unwrap_or(Err(late))
    }

    pub fn metrics(&self) -> Arc<Metrics> {
        self.shared.metrics.clone()
    }

    /// What is read of the projects when somebody looks at the metrics.
    pub(super) fn register_levels(&self) {
        let metrics = &self.shared.metrics;
        let over_workers = |pick: fn(&WorkerHandle) -> usize| {
            let registry = self.registry.clone();
            move || Some(registry.all().iter().map(pick).sum::<usize>() as f64)
        };
        metrics.read_level(Level::Leases, over_workers(|worker| worker.status.borrow().leases));
        metrics.read_level(Level::Connections, over_workers(|worker| worker.connections.count()));
        let held = |worker: &WorkerHandle| usize::from(worker.status.borrow().pending.is_some());
        metrics.read_level(Level::RollsHeld, over_workers(held));
        let queue = |pick: fn(QueueFigures) -> usize| {
            let admission = self.shared.admission.clone();
            move || Some(pick(admission.figures()) as f64)
        };
        metrics.read_level(Level::QueueLength, queue(|figures| figures.queued));
        metrics.read_level(Level::StartsUnderWay, queue(|figures| figures.starting));
        let figures = |pick: fn(Figures) -> u64| {
            let store = self.shared.store.clone();
            move || pick(store.figures())
        };
        metrics.read_count(Count::StoreCommits, figures(|figures| figures.commits));
        metrics.read_count(Count::StoreWrites, figures(|figures| figures.writes));
        metrics.read_count(Count::EventsDropped, figures(|figures| figures.events_dropped));
        let store = self.shared.store.clone();
        metrics.read_level(Level::JournalRows, move || Some(store.figures().journal_rows as f64));
    }

    pub async fn list(&self) -> Result<Vec<ProjectView>, StoreError> {
        let records = self.shared.store.projects().await?;
        let mut leases: HashMap<Key, Vec<Lease>> = HashMap::new();
        for (key, lease) in self.shared.store.all_leases().await? {
            leases.entry(key).or_default().push(lease);
        }
        Ok(records.iter().map(|r| self.view(r, leases.get(&r.key).map_or(&[], Vec::as_slice))).collect())
    }

    /// The repository of the project that has `key`, or that it is derived from.
    pub async fn owner(&self, key: &Key) -> Result<Option<RepoName>, StoreError> {
        let own = self.shared.store.project(key).await?;
        let record = match own {
            None if key.role().is_derived() => self.shared.store.project(&key.project()).await?,
            own => own,
        };
        Ok(record.map(|record| record.spec.repo))
    }

    pub async fn show(&self, key: &Key) -> Result<Option<ProjectView>, StoreError> {
        let Some(record) = self.shared.store.project(key).await? else { return Ok(None) };
        let leases = self.shared.store.leases(key).await?;
        Ok(Some(self.view(&record, &leases)))
    }

    fn view(&self, record: &ProjectRecord, leases: &[Lease]) -> ProjectView {
        let worker = self.registry.get(&record.key);
        let status = worker.as_ref().map(|worker| worker.status.borrow().clone());
        let looked_at = status.as_ref().and_then(|status| status.phase.as_ref());
        let phase = looked_at.unwrap_or(&record.phase);
        let unconfirmed = looked_at.is_none() && !self.rests(record, worker.is_some());
        let reason = if unconfirmed {
            "it was so when kilnd last ran; the host has not been looked at since".to_owned()
        } else {
            status.as_ref().map_or_else(String::new, |status| status.reason.clone())
        };
        let connections = worker.as_ref().map_or(0, |worker| worker.connections.count());
        let place =
            |(position, length): (usize, usize)| QueuePlace { position: position as u64, length: length as u64 };
        ProjectView {
            key: record.key.to_string(),
            repo: record.spec.repo.to_string(),
            name: record.spec.name.clone(),
            target: record.spec.target.clone(),
            arch: record.spec.arch.to_string(),
            role: record.key.role().name().to_owned(),
            project: record.key.role().is_derived().then(|| record.key.project().to_string()),
            pull_request: record.pull_request.clone(),
            phase: phase.name().to_owned(),
            unconfirmed,
            reason,
            generation: record.generation.get(),
            address: SocketAddrV4::new(record.address, self.config.daemon_port).to_string(),
            server_name: record.key.server_name(&self.config.addressing.domain),
            connections: connections as u64,
            leases: leases.iter().map(|lease| self.lease_view(lease)).collect(),
            created: rfc3339(record.created),
            last_activity: rfc3339(record.last_activity),
            settings: Some(self.settings_view(record)),
            queue: status.as_ref().and_then(|status| status.queue).map(place),
            pending: status.and_then(|status| status.pending).into_iter().collect(),
            cache_size: record.cache.size,
            last_snapshot: record.cache.snapshot.map(rfc3339),
        }
    }

    /// Whether a project at which nobody has looked since the start is known to be as it is in the database: whatever runs was
    /// found by the survey of the start, and whoever is not quiet has a worker until it is.
    fn rests(&self, record: &ProjectRecord, has_worker: bool) -> bool {
        let quiet = record.phase.is_quiet() || matches!(record.phase, Phase::Failed { .. });
        self.shared.surveyed.load(Ordering::Acquire) && (quiet || !has_worker)
    }

    pub(crate) fn lease_view(&self, lease: &Lease) -> LeaseView {
        LeaseView {
            id: lease.token.as_str().to_owned(),
            created: rfc3339(lease.created),
            renewed: rfc3339(lease.renewed),
            expires: rfc3339(lease.expires),
            alive_until: rfc3339(lease.renewed.plus(self.config.policy.lease.grace).min(lease.expires)),
        }
    }

    fn settings_view(&self, record: &ProjectRecord) -> SettingsView {
        let none = Settings::default();
        let rule = self.config.rules.first(&record.spec.repo).map_or(none, |rule| rule.settings.clone());
        let rule = rule.for_role(record.key.role());
        let effective = self.shared.settings(record);
        let window = kiln_domain::idle::window(record, &effective, self.shared.clock.now(), &self.config.policy.idle);
        let number = |count: Option<u32>| count.map(|count| count.to_string());
        let max = bounds(&effective, &self.config.policy.size).map(|bounds| bounds.max());
        let setting = |value: Option<String>, set: fn(&Settings) -> bool| {
            let origin = match (set(&record.settings), set(&rule)) {
                (true, _) => Origin::Project,
                (false, true) => Origin::Rule,
                (false, false) => Origin::Default,
            };
            Setting { value, origin }
        };
        SettingsView {
            tier: setting(effective.tier.map(|tier| tier.name().to_owned()), |s| s.tier.is_some()),
            idle_window: setting(Some(show_span(window)), |s| s.idle_window.is_some()),
            volume: setting(effective.volume_bytes.map(show_size), |s| s.volume_bytes.is_some()),
            volume_max: setting(max.map(show_size), |s| s.volume_max_bytes.is_some()),
            memory: setting(effective.memory_bytes.map(show_size), |s| s.memory_bytes.is_some()),
            cpus: setting(number(effective.cpus), |s| s.cpus.is_some()),
            processes: setting(number(effective.processes), |s| s.processes.is_some()),
            io: setting(effective.io_bytes.map(show_size), |s| s.io_bytes.is_some()),
            entitlements: setting(Some(show_names(&effective)), |s| s.entitlements.is_some()),
            fan_out: setting(effective.fan_out.map(|count| count.to_string()), |s| s.fan_out.is_some()),
        }
    }
}

/// The entitlements, or that there are none.
fn show_names(settings: &Settings) -> String {
    let names: Vec<_> = settings.entitlements.iter().flatten().map(|entitlement| entitlement.name()).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
