//! The database and the host, held against each other.
//!
//! At the start of Kiln every project that is not quiet gets its worker, which looks for itself. What this adds is the
//! other direction: what is on the host and what the database does not know (K5). A daemon that runs and whose project
//! is thought to sleep gets a worker. What carries our mark and no project is an *orphan*: it is told of, and touched
//! only by an explicit verb. What is only a copy and nobody's any more is *leaked*, and goes: something that was given up on
//! may be done after everything else of it is gone. A database that was lost is filled again from the marks of volumes and
//! instances.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use kiln_domain::project::ProjectRecord;
use kiln_domain::{Arch, BuildSpec, Generation, Identity, Key, Phase, Role, Settings};
use kiln_wire::{Orphan, OrphanKind};
use thiserror::Error;
use tokio::sync::{Notify, broadcast};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::claims::{Claim, claims};
use super::effects::{EffectError, Survey};
use super::handle::Projects;
use super::host_effects::{PULL_REQUEST, SIZE};
use super::registry::WorkerHandle;
use crate::causes::in_one_line;
use crate::host::{InstanceEvent, Properties};
use crate::metrics::PhaseLabel;
use crate::store::{NewEvent, StoreError, TakenUp};

/// How long the start of Kiln waits for the host.
const FIRST_TRY: Duration = Duration::from_secs(5);

/// And of that for a runtime: nobody is answered before.
const RUNTIME_PATIENCE: Duration = Duration::from_secs(2);

/// Between two tries to survey a host that does not answer.
const SURVEY_AGAIN: Duration = Duration::from_secs(10);

/// Of a volume that is made late nobody tells.
const SURVEY_EVERY: Duration = Duration::from_mins(10);

#[derive(Debug, Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Host(#[from] EffectError),
    #[error("gave up after {} s looking at the host", .after.as_secs())]
    TimedOut { after: Duration },
    #[error("there is no orphan {name:?}")]
    NotThere { name: String },
    #[error("there is nothing called {name:?} in the trash")]
    NotInTrash { name: String },
    #[error("{0}")]
    Impossible(String),
    /// Its place is taken by what somebody has to see to first.
    #[error("{0}")]
    Taken(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rebuild {
    /// An admin's wish, before the start.
    Asked,
    /// In the start, while everybody waits.
    First,
    /// Beside everything else.
    Later,
}

impl Projects {
    /// Takes up what was going on when Kiln last ran, and listens to the runtime until `shutdown` in a task of its own.
    ///
    /// To be awaited before the first request is answered: it may be the end of a build whose lease was made before.
    pub async fn start(&self, shutdown: CancellationToken) -> Result<JoinHandle<()>, StoreError> {
        // Before the first look, so that nothing that happens after it goes unheard.
        let events = self.shared.effects.events();
        if self.shared.store.needs_rebuild().await? {
            // Nobody is answered before this returns; a host that takes its time is looked through later.
            if tokio::time::timeout(FIRST_TRY, self.try_to_rebuild(Rebuild::First)).await.is_err() {
                self.shared.set_rebuilding(Some(format!("no answer within {} s", FIRST_TRY.as_secs())));
            }
        }
        let TakenUp { projects, leases, damaged } = self.shared.store.take_up().await?;
        for row in damaged {
            tracing::error!(key = row.key, "a row of the database is damaged and left alone: {}", row.why);
            self.note("damaged", format!("the row of {} is left alone: {}", row.key, row.why));
        }
        let leased: BTreeSet<Key> = leases.into_iter().map(|(key, _)| key).collect();
        for record in &projects {
            self.shared.metrics.phase_changed(None, Some(PhaseLabel::from(&record.phase)));
            let hot = self.shared.settings(record).tier == Some(kiln_domain::Tier::Hot);
            // What is only a copy goes, and somebody has to see to that.
            let derived = record.key.role().is_derived();
            if !record.phase.is_quiet() || hot || derived || leased.contains(&record.key) {
                self.registry.spawn(&self.shared, &record.key);
            }
        }
        let projects = self.clone();
        Ok(tokio::spawn(async move {
            shutdown.run_until_cancelled(projects.attend(events)).await;
        }))
    }

    async fn attend(&self, events: broadcast::Receiver<InstanceEvent>) {
        let missed = Notify::new();
        tokio::join!(
            self.listen(events, &missed),
            self.survey_when(&missed),
            self.empty_trash_by_age(),
            self.thin_by_age(),
            self.make_room(),
            self.try_snapshots_out(),
        );
    }

    async fn listen(&self, mut events: broadcast::Receiver<InstanceEvent>, missed: &Notify) {
        loop {
            let workers = match events.recv().await {
                Ok(InstanceEvent::Changed(key)) => self.worker_of(&key).await.into_iter().collect(),
                Ok(InstanceEvent::Missed) | Err(broadcast::error::RecvError::Lagged(_)) => {
                    missed.notify_one();
                    self.registry.all()
                }
                Err(broadcast::error::RecvError::Closed) => return,
            };
            for worker in workers {
                worker.look_again();
            }
        }
    }

    /// Also of a project that sleeps: somebody else may have started its daemon.
    async fn worker_of(&self, key: &Key) -> Option<WorkerHandle> {
        self.registry.worker(&self.shared, key, None).await.ok().flatten()
    }

    /// At the start, whenever events were missed, as what happened then may be about a project that sleeps, and now and then.
    async fn survey_when(&self, missed: &Notify) {
        let mut told = BTreeSet::new();
        loop {
            self.survey_until_done(&mut told).await;
            // Either is a reason to look.
            let _ = tokio::time::timeout(SURVEY_EVERY, missed.notified()).await;
        }
    }

    /// Once the host answers: daemons that run get a worker, and orphans are told of, each once.
    async fn survey_until_done(&self, told: &mut BTreeSet<(OrphanKind, String)>) {
        loop {
            if self.shared.rebuilding().is_some() {
                self.try_to_rebuild(Rebuild::Later).await;
                if self.shared.rebuilding().is_some() {
                    tokio::time::sleep(SURVEY_AGAIN).await;
                }
                continue;
            }
            match self.look_around().await {
                Ok(orphans) => {
                    self.shared.surveyed.store(true, Ordering::Release);
                    for Orphan { kind, name, why, .. } in orphans {
                        if !told.insert((kind, name.clone())) {
                            continue;
                        }
                        tracing::warn!(%kind, name, "an orphan is on the host: {why}");
                        self.note("orphan", format!("{kind} {name}: {why}"));
                    }
                    return;
                }
                Err(error) => tracing::warn!(%error, "the host could not be looked through; trying again"),
            }
            tokio::time::sleep(SURVEY_AGAIN).await;
        }
    }

    async fn look_around(&self) -> Result<Vec<Orphan>, ReconcileError> {
        let survey = self.survey().await?;
        let known = self.known().await?;
        for found in &survey.instances {
            if let Some(key) = found.key.as_ref().filter(|key| found.running && known.contains_key(*key)) {
                self.registry.spawn(&self.shared, key);
            }
        }
        let (leaked, orphans) = orphans_of(&survey, &known).into_iter().partition(is_leaked);
        // What was found is found, whatever becomes of these.
        if let Err(error) = self.take_in_leaked(leaked).await {
            tracing::warn!(%error, "a copy that is nobody's any more could not be taken in; trying again later");
        }
        Ok(orphans)
    }

    /// They get workers, which take them away once they have seen that nobody builds there.
    async fn take_in_leaked(&self, leaked: Vec<Orphan>) -> Result<(), ReconcileError> {
        if leaked.is_empty() {
            return Ok(());
        }
        // One that was just going was there when the host was looked at, and known no more when the database was.
        let survey = self.survey().await?;
        let still = orphans_of(&survey, &self.known().await?);
        for Orphan { kind, name, .. } in leaked.into_iter().filter(|orphan| still.contains(orphan)) {
            let Some(properties) = properties_of(&survey, kind, &name) else { continue };
            tracing::warn!(%kind, name, "a copy that is nobody's any more is on the host; it is removed");
            self.note("leaked", format!("{kind} {name} is a copy that is nobody's any more; it is removed"));
            self.adopt_from(properties, "kiln").await?;
        }
        Ok(())
    }

    async fn survey(&self) -> Result<Survey, ReconcileError> {
        let after = self.shared.deadlines.observe;
        let survey = tokio::time::timeout(after, self.shared.effects.survey()).await;
        Ok(survey.map_err(|_| ReconcileError::TimedOut { after })??)
    }

    async fn known(&self) -> Result<BTreeMap<Key, ProjectRecord>, StoreError> {
        let records = self.shared.store.projects().await?;
        Ok(records.into_iter().map(|record| (record.key.clone(), record)).collect())
    }

    /// What has lost its other half.
    pub async fn orphans(&self) -> Result<Vec<Orphan>, ReconcileError> {
        let survey = self.survey().await?;
        Ok(orphans_of(&survey, &self.known().await?))
    }

    /// Makes a project of it again.
    pub async fn adopt(&self, kind: Option<OrphanKind>, name: &str) -> Result<Key, ReconcileError> {
        let survey = self.survey().await?;
        let orphans = orphans_of(&survey, &self.known().await?);
        let found: Vec<&Orphan> =
            orphans.iter().filter(|o| o.name == name && kind.is_none_or(|kind| o.kind == kind)).collect();
        let Some(orphan) = found.first() else { return Err(ReconcileError::NotThere { name: name.to_owned() }) };
        if found.iter().any(|other| other.key != orphan.key) {
            let why = format!("{name} is the name of more than one orphan: say which kind");
            return Err(ReconcileError::Impossible(why));
        }
        let properties = properties_of(&survey, orphan.kind, name);
        let properties = properties.ok_or_else(|| ReconcileError::Impossible(orphan.why.clone()))?;
        self.adopt_from(properties, "admin").await
    }

    /// The project that `properties` tell of, made anew if it is not there.
    pub(super) async fn adopt_from(&self, properties: &Properties, by: &'static str) -> Result<Key, ReconcileError> {
        let record = record_of(properties, self.shared.clock.now()).map_err(ReconcileError::Impossible)?;
        let key = record.key.clone();
        let event = NewEvent::new(self.shared.clock.now(), Some(&key), "adopted", "the project was found on the host");
        let adopted = self.shared.store.adopt_project(record, self.shared.addresses, Some(event.by(by))).await?;
        if adopted.new {
            self.shared.metrics.phase_changed(None, Some(PhaseLabel::from(&adopted.record.phase)));
        }
        // It looks for itself what is there.
        self.registry.spawn(&self.shared, &key);
        Ok(key)
    }

    /// Removes an orphan: an instance for good, a volume to the trash.
    pub async fn remove_orphan(&self, kind: OrphanKind, name: &str) -> Result<(), ReconcileError> {
        let survey = self.survey().await?;
        let orphans = orphans_of(&survey, &self.known().await?);
        let orphan = orphans.iter().find(|o| o.kind == kind && o.name == name);
        let orphan = orphan.ok_or_else(|| ReconcileError::NotThere { name: name.to_owned() })?;
        let key = orphan.key.as_deref().and_then(|key| key.parse::<Key>().ok());
        match (kind, key) {
            (OrphanKind::Instance, _) if survey.instances.iter().any(|found| found.name == name && found.running) => {
                let why = format!("{name} is running: stop it first, with the runtime's own tools, or adopt it");
                return Err(ReconcileError::Taken(why));
            }
            (OrphanKind::Instance, _) => self.shared.effects.remove_instance(name).await?,
            (OrphanKind::Volume, Some(key)) => self.shared.effects.discard_volume(&key).await?,
            (OrphanKind::Volume, None) => {
                return Err(ReconcileError::Impossible(format!("{name} is not ours: Kiln does not touch it")));
            }
            (OrphanKind::Record, _) => {
                return Err(ReconcileError::Impossible(format!("remove the project: `kiln rm {name}`")));
            }
        }
        self.note("orphan", format!("{kind} {name} was removed"));
        Ok(())
    }

    /// Until it succeeds, nobody gets a new project: it could be one that the host has.
    async fn try_to_rebuild(&self, when: Rebuild) {
        if let Err(error) = self.rebuild_now(when).await {
            tracing::error!(%error, "the database is empty and the host cannot be looked through; trying again");
            self.shared.set_rebuilding(Some(in_one_line(&error)));
        }
    }

    /// Fills the database from the marks on the host, as an admin asked.
    pub async fn rebuild(&self) -> Result<(), ReconcileError> {
        self.rebuild_now(Rebuild::Asked).await
    }

    /// Volumes are the caches, and carry the settings. What instances add are addresses ([`claims`]), and projects
    /// that lost their volume. A runtime that is away keeps nobody waiting whose project has a volume; but the database is
    /// not whole before it was seen.
    async fn rebuild_now(&self, when: Rebuild) -> Result<(), ReconcileError> {
        let after = self.shared.deadlines.observe;
        let volumes = tokio::time::timeout(after, self.shared.effects.volumes()).await;
        let volumes = volumes.map_err(|_| ReconcileError::TimedOut { after })??;
        let runtime_patience = if when == Rebuild::First { RUNTIME_PATIENCE } else { after };
        let survey = tokio::time::timeout(runtime_patience, self.shared.effects.survey()).await;
        let (instances, unseen) = match survey {
            Ok(Ok(survey)) => (Some(survey.instances), None),
            Ok(Err(error)) => (None, Some(in_one_line(&error))),
            Err(_) => {
                let why = format!("the runtime did not answer within {} s", runtime_patience.as_secs());
                (None, Some(why))
            }
        };
        let mut projects = 0;
        for Claim { key, told } in claims(&volumes, instances.as_deref(), self.shared.addresses) {
            for properties in &told {
                if self.put_back(&key, properties, when).await? {
                    projects += 1;
                    break;
                }
            }
        }
        if let Some(why) = &unseen {
            tracing::error!(
                projects,
                why,
                "the database was filled from the volumes; the instances are still to be seen"
            );
        } else {
            self.shared.store.rebuilt(None).await?;
            // A first start, with no database that was kept aside, is nothing to tell.
            if projects > 0 || self.shared.store.figures().journal_rows > 0 {
                tracing::warn!(projects, "the database was filled from what is on the host");
                self.note("rebuilt", format!("the database was rebuilt from the host: {projects} project(s)"));
            }
        }
        self.shared.set_rebuilding(unseen);
        Ok(())
    }

    /// False: what the object tells of is no project, or not one that can be put back; that is said.
    async fn put_back(&self, key: &Key, properties: &Properties, when: Rebuild) -> Result<bool, StoreError> {
        let record = match record_of(properties, self.shared.clock.now()) {
            Ok(record) => record,
            Err(why) => {
                tracing::warn!(%key, "an object on the host tells of no project: {why}");
                return Ok(false);
            }
        };
        let text = "the project was found on the host, and put back into the database";
        let event = NewEvent::new(self.shared.clock.now(), Some(key), "rebuilt", text);
        let (store, addresses) = (&self.shared.store, self.shared.addresses);
        let put_back = match when {
            Rebuild::Asked => store.mend_project(record, addresses, Some(event)),
            Rebuild::First | Rebuild::Later => store.adopt_project(record, addresses, Some(event)),
        };
        match put_back.await {
            Ok(adopted) => {
                // What is there when the projects are taken up is seen to then.
                if adopted.new && when == Rebuild::Later {
                    self.take_up_late(&adopted.record);
                }
                Ok(true)
            }
            Err(error) if error.retry_after().is_some() => Err(error),
            Err(error) => {
                tracing::error!(%key, %error, "a project of the host cannot be put back; `kiln orphans` lists it");
                self.note("orphan", format!("{key} could not be put back into the database: {error}"));
                Ok(false)
            }
        }
    }

    /// One that runs gets its worker from the look around that follows; what is only a copy goes, and somebody has to see to that.
    fn take_up_late(&self, record: &ProjectRecord) {
        self.shared.metrics.phase_changed(None, Some(PhaseLabel::from(&record.phase)));
        let hot = self.shared.settings(record).tier == Some(kiln_domain::Tier::Hot);
        if hot || record.key.role().is_derived() {
            self.registry.spawn(&self.shared, &record.key);
        }
    }

    pub(super) fn note(&self, kind: &'static str, text: String) {
        drop(self.shared.store.record(NewEvent::new(self.shared.clock.now(), None, kind, text)));
    }
}

/// The marks of what an orphan is.
fn properties_of<'a>(survey: &'a Survey, kind: OrphanKind, name: &str) -> Option<&'a Properties> {
    let volume = survey.volumes.iter().find(|found| found.name == name).map(|found| &found.properties);
    let instance = survey.instances.iter().find(|found| found.name == name).map(|found| &found.properties);
    volume.filter(|_| kind == OrphanKind::Volume).or(instance)
}

/// A copy of a cache, or the instance of one, that is nobody's: there is nothing to lose in it, and nothing to find again.
fn is_leaked(orphan: &Orphan) -> bool {
    let role = orphan.key.as_deref().and_then(|key| key.parse::<Key>().ok()).map(|key| key.role());
    orphan.adoptable && orphan.kind != OrphanKind::Record && role.is_some_and(Role::is_derived)
}

/// What stands on the host and in no project, and projects whose cache should be there and is not.
fn orphans_of(survey: &Survey, known: &BTreeMap<Key, ProjectRecord>) -> Vec<Orphan> {
    // A trial is nobody's, and whoever tries snapshots out takes it away.
    let has_a_home =
        |key: &Option<Key>| key.as_ref().is_some_and(|key| key.role() == Role::Trial || known.contains_key(key));
    let mut orphans = Vec::new();
    let of = |kind, name: &str, key: Option<&Key>, properties: &Properties| {
        let (why, adoptable) = match key {
            None => ("it does not carry our mark, and Kiln does not touch it".to_owned(), false),
            Some(key) => match record_of(properties, kiln_domain::Timestamp::EPOCH) {
                Ok(record) if record.key == *key => ("its project is not in the database".to_owned(), true),
                Ok(_) => ("its name and its marks tell of different projects".to_owned(), false),
                Err(why) => (why, false),
            },
        };
        Orphan { kind, name: name.to_owned(), key: key.map(ToString::to_string), why, adoptable }
    };
    for found in &survey.instances {
        if !has_a_home(&found.key) {
            orphans.push(of(OrphanKind::Instance, &found.name, found.key.as_ref(), &found.properties));
        }
    }
    for found in &survey.volumes {
        if !has_a_home(&found.key) {
            orphans.push(of(OrphanKind::Volume, &found.name, found.key.as_ref(), &found.properties));
        }
    }
    let caches: BTreeSet<&Key> = survey.volumes.iter().filter_map(|found| found.key.as_ref()).collect();
    for record in known.values() {
        // One that never got that far, or is on its way, has none.
        let should = matches!(record.phase, Phase::Idle | Phase::Warm);
        if should && !caches.contains(&record.key) {
            let why = "its cache is gone from the host; its next build starts with an empty one".to_owned();
            let key = record.key.to_string();
            orphans.push(Orphan { kind: OrphanKind::Record, name: key.clone(), key: Some(key), why, adoptable: false });
        }
    }
    orphans
}

/// The project that an object's marks tell of.
pub(super) fn record_of(properties: &Properties, now: kiln_domain::Timestamp) -> Result<ProjectRecord, String> {
    let part = |name: &str| properties.get(name).map_or("", String::as_str);
    let arch: Arch = part("arch").parse().map_err(|_| "its marks name no architecture".to_owned())?;
    let spec = BuildSpec::new(part("repo"), part("name"), part("target"), arch.as_str())
        .map_err(|error| format!("its marks are no project's: {error}"))?;
    // An address out of the range, or none, is given anew when it is put into the database.
    let address = part("address").parse().unwrap_or(std::net::Ipv4Addr::UNSPECIFIED);
    let project = Key::of(&spec);
    let wrong = |_| format!("its marks are those of {project}, and its key is {:?}", part("key"));
    let pull_request = properties.get(PULL_REQUEST).cloned();
    let identity = Identity { key: part("key").parse().map_err(wrong)?, spec, pull_request };
    if !identity.is_consistent() {
        return Err(format!("its marks are those of {project}, and its key is {:?}", part("key")));
    }
    let mut record = ProjectRecord::of(identity, address, now);
    record.settings = match part("settings") {
        "" => Settings::default(),
        text => serde_json::from_str(text).map_err(|error| format!("its settings cannot be read: {error}"))?,
    };
    record.cache.size = match part(SIZE) {
        "" => None,
        text => Some(text.parse().map_err(|_| format!("its size {text:?} is no number of bytes"))?),
    };
    // What is derived goes when nobody needs it, and so is looked at.
    record.phase = if record.key.role().is_derived() { Phase::Draining } else { Phase::Idle };
    // How often it was started before, nobody knows; more often than there were seconds it was not.
    record.generation = Generation::from_stored(now.as_millis().unsigned_abs() / 1000);
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(change: impl FnOnce(&mut Properties)) -> Properties {
        let spec = BuildSpec::new("github.com/org/repo", "", "app", "amd64").expect("valid");
        let record = ProjectRecord::new(spec, "10.88.0.7".parse().expect("an address"), kiln_domain::Timestamp::EPOCH);
        let mut properties = super::super::host_effects::properties(&record);
        change(&mut properties);
        properties
    }

    #[test]
    fn a_project_s_marks_are_the_project() {
        let properties = marks(|p| {
            p.insert("settings".into(), r#"{"tier":"hot"}"#.into());
            p.insert("size".into(), (135_u64 << 30).to_string());
        });
        let record = record_of(&properties, kiln_domain::Timestamp::EPOCH).expect("a project");
        assert_eq!(record.cache.size, Some(135 << 30), "what its cache has grown to");
        assert_eq!((record.spec.target.as_str(), record.address.to_string()), ("app", "10.88.0.7".to_owned()));
        assert_eq!(record.settings.tier, Some(kiln_domain::Tier::Hot));
    }

    #[test]
    fn marks_that_contradict_themselves_are_no_project() {
        for broken in [
            marks(|p| drop(p.insert("repo".into(), "github.com/other/repo".into()))),
            marks(|p| drop(p.remove("arch"))),
            marks(|p| drop(p.insert("settings".into(), "{".into()))),
            marks(|p| drop(p.insert("size".into(), "large".into()))),
            Properties::new(),
        ] {
            assert!(record_of(&broken, kiln_domain::Timestamp::EPOCH).is_err(), "{broken:?}");
        }
    }
}
