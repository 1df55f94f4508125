//! What grows too old: in the trash, and of the snapshots of projects that nobody builds.
//!
//! When the caches' storage is nearly full, both go earlier (`eviction.rs`). Nothing but the trash is freed here: snapshots are
//! their workers' business, who are asked.

use std::time::Duration;

use kiln_domain::cache::history::surplus;
use kiln_domain::{Key, Phase, Role, Step, Timestamp};

use tokio::time::Instant;

use super::admin::VerbError;
use super::effects::EffectError;
use super::handle::Projects;
use super::reconcile::ReconcileError;
use super::registry::Registry;
use crate::host::Properties;
use crate::host::volumes::{ParseNameError, TrashName, Trashed, VolumeError};

/// The trash is looked through this often at least.
const LOOK_EVERY: Duration = Duration::from_mins(10);

/// Snapshots are kept for days.
const THIN_EVERY: Duration = Duration::from_hours(24);

/// Freeing a large cache takes its time; one that hangs must not keep the next from being freed for ever.
pub(super) const PURGE_PATIENCE: Duration = Duration::from_mins(10);

/// Of what could not be freed the first tell the story.
const TOLD: usize = 5;

impl Projects {
    /// What is in the trash, and when each goes by age.
    pub async fn trash(&self) -> Result<Vec<(Trashed, Timestamp)>, EffectError> {
        let kept = self.config.trash_kept;
        let trash = self.shared.effects.trash().await?;
        Ok(trash
            .into_iter()
            .map(|entry| (entry.since.plus(kept), entry))
            .map(|(expires, entry)| (entry, expires))
            .collect())
    }

    /// Brings a cache back, and with it its project. One that came back without its project, because Kiln died in between,
    /// gets it with the next call.
    pub async fn restore(&self, name: &str) -> Result<Key, ReconcileError> {
        let name = parse(name)?;
        let rests = |phase: &Phase| phase.is_quiet() || matches!(phase, Phase::Failed { .. });
        let there = self.shared.effects.trash().await?.iter().any(|entry| entry.name == name);
        let record = self.shared.store.project(name.key()).await?;
        if let Some(record) = record.filter(|record| there && !rests(&record.phase)) {
            return Err(has_another(name.key(), &format!("is {} with a cache of its own", record.phase.name())));
        }
        let properties = if there {
            let _looks_again = LooksAgain { registry: &self.registry, key: name.key() };
            self.shared.effects.restore(&name).await.map_err(|error| match error {
                EffectError::Volume(VolumeError::Exists { .. }) => {
                    has_another(name.key(), "has another cache in its place")
                }
                error => error.into(),
            })?
        } else {
            self.without_project(name.key())
                .await?
                .ok_or_else(|| ReconcileError::NotInTrash { name: name.to_string() })?
        };
        self.adopt_from(&properties, "admin").await
    }

    /// The marks of a cache that is in its place and whose project is unknown.
    async fn without_project(&self, key: &Key) -> Result<Option<Properties>, ReconcileError> {
        if self.shared.store.project(key).await?.is_some() {
            return Ok(None);
        }
        let found = self.shared.effects.survey().await?.volumes;
        Ok(found.into_iter().find(|volume| volume.key.as_ref() == Some(key)).map(|volume| volume.properties))
    }

    /// Frees one for good. False: there is none of that name.
    pub async fn purge(&self, name: &str) -> Result<bool, ReconcileError> {
        let name = parse(name)?;
        let there = self.shared.effects.trash().await?.iter().any(|entry| entry.name == name);
        if there {
            self.shared.effects.purge(&name).await?;
            self.note("purged", format!("{name} was freed for good, as an admin asked"));
        }
        Ok(there)
    }

    /// Frees all of it for good, and says how many there were; or, after all others, which could not be freed.
    pub async fn empty_trash(&self) -> Result<u64, VerbError> {
        let trash = self.shared.effects.trash().await.map_err(|error| failed(&error, error.in_words()))?;
        let (mut freed, mut kept) = (0, Vec::new());
        for entry in trash {
            match self.shared.effects.purge(&entry.name).await {
                Ok(()) => {
                    self.note("purged", format!("{} was freed for good, as an admin asked", entry.name));
                    freed += 1;
                }
                Err(error) => kept.push(error),
            }
        }
        let Some(first) = kept.first() else { return Ok(freed) };
        let told: Vec<String> = kept.iter().take(TOLD).map(EffectError::in_words).collect();
        let more = if kept.len() > TOLD { "; and more of the same" } else { "" };
        Err(failed(first, format!("{freed} freed, and {} not: {}{more}", kept.len(), told.join("; "))))
    }

    pub(super) async fn empty_trash_by_age(&self) {
        let mut calm = Calm::new(self.shared.clock.now());
        loop {
            let next = match self.purge_what_is_due(calm.holds(self.shared.clock.now())).await {
                Ok(next) => next,
                Err(error) => {
                    tracing::warn!(%error, "the trash could not be looked through; trying again later");
                    None
                }
            };
            let wait = next.map_or(LOOK_EVERY, |at| at.since(self.shared.clock.now()).min(LOOK_EVERY));
            tokio::time::sleep(wait.max(Duration::from_secs(1))).await;
        }
    }

    /// The worker of a project that is built sees which of its snapshots have had their time; the others have none.
    pub(super) async fn thin_by_age(&self) {
        let mut calm = Calm::new(self.shared.clock.now());
        let mut last: Option<Instant> = None;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = self.shared.clock.now();
            let due = last.is_none_or(|last| last.elapsed() >= THIN_EVERY);
            if !calm.holds(now) || !due {
                continue;
            }
            match self.thin_what_is_old(now).await {
                Ok(()) => last = Some(Instant::now()),
                Err(error) => tracing::warn!(%error, "the snapshots could not be looked through; trying again later"),
            }
        }
    }

    /// Has those snapshots given up that have had their time by `now`. What cannot be looked at is looked at the next time.
    pub(super) async fn thin_what_is_old(&self, now: Timestamp) -> Result<(), EffectError> {
        let (effects, after) = (&self.shared.effects, self.shared.deadlines.of(Step::ListSnapshots));
        let keys = effects.volumes().await?.into_iter().filter_map(|volume| volume.key);
        for key in keys.filter(|key| key.role() == Role::Project) {
            let listed = tokio::time::timeout(after, effects.snapshots(&key)).await;
            let timed_out = EffectError::TimedOut { step: Step::ListSnapshots.name(), after };
            let old = match listed.unwrap_or(Err(timed_out)) {
                Ok(all) => !surplus(&all, now, &self.shared.policy.history).is_empty(),
                Err(error) => {
                    tracing::debug!(%key, %error, "its snapshots could not be looked at");
                    false
                }
            };
            if old && let Err(error) = self.thin(&key, self.shared.policy.history).await {
                tracing::debug!(%key, %error, "its old snapshots stay for now");
            }
        }
        Ok(())
    }

    /// Answers when the next is due. `by_age`: whether the clock can be trusted with that.
    async fn purge_what_is_due(&self, by_age: bool) -> Result<Option<Timestamp>, EffectError> {
        let mut trash = self.trash().await?;
        trash.sort_by_key(|(entry, _)| entry.since);
        let mut next = None;
        for (entry, expires) in trash {
            let due = by_age && expires <= self.shared.clock.now();
            if !due {
                next = next.or(Some(expires));
                continue;
            }
            let purged = tokio::time::timeout(PURGE_PATIENCE, self.shared.effects.purge(&entry.name)).await;
            match purged.unwrap_or(Err(EffectError::TimedOut { step: "free a cache", after: PURGE_PATIENCE })) {
                Ok(()) => {
                    self.note("purged", format!("{} was freed for good: its time in the trash is over", entry.name));
                }
                Err(error) => tracing::warn!(name = %entry.name, %error, "could not free it"),
            }
        }
        Ok(next)
    }
}

/// Has whoever looks after a project look again when this is dropped: a cache has come into its place, or may have, however that
/// ended. Nothing else on the host tells of it.
struct LooksAgain<'a> {
    registry: &'a Registry,
    key: &'a Key,
}

impl Drop for LooksAgain<'_> {
    fn drop(&mut self) {
        if let Some(worker) = self.registry.get(self.key) {
            worker.look_again();
        }
    }
}

/// What is freed is gone for good, and a wall clock may leap: only one that has gone as evenly as the other for a while can
/// say that something is old.
struct Calm {
    anchor: (Timestamp, Instant),
    since: Instant,
}

impl Calm {
    const LONG_ENOUGH: Duration = Duration::from_hours(1);
    const LEAP: Duration = Duration::from_secs(60);

    fn new(now: Timestamp) -> Self {
        Self { anchor: (now, Instant::now()), since: Instant::now() }
    }

    fn holds(&mut self, now: Timestamp) -> bool {
        let expected = self.anchor.0.plus(self.anchor.1.elapsed());
        self.anchor = (now, Instant::now());
        if now.since(expected).max(expected.since(now)) > Self::LEAP {
            tracing::warn!("the clock has leapt; nothing is taken to be old for a while");
            self.since = Instant::now();
        }
        self.since.elapsed() >= Self::LONG_ENOUGH
    }
}

fn failed(error: &EffectError, text: String) -> VerbError {
    VerbError::Failed { text, retryable: error.is_retryable() }
}

/// Two caches cannot have one place, and neither is thrown away unasked.
fn has_another(key: &Key, why: &str) -> ReconcileError {
    ReconcileError::Taken(format!(
        "not restored, because {key} {why}: put that one in the trash first (`kiln rm {key}`, or `kiln orphans rm` if no \
         project knows it), and then restore this one"
    ))
}

fn parse(name: &str) -> Result<TrashName, ReconcileError> {
    name.parse().map_err(|error: ParseNameError| ReconcileError::Impossible(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn nothing_is_old_by_a_clock_that_has_leapt() {
        let at = |minutes: i64| Timestamp::from_millis(minutes * 60_000);
        let mut calm = Calm::new(at(0));
        assert!(!calm.holds(at(0)), "nor at the start");
        tokio::time::advance(Duration::from_mins(61)).await;
        assert!(calm.holds(at(61)));
        tokio::time::advance(Duration::from_mins(10)).await;
        assert!(!calm.holds(at(20_000)), "forward by days");
        tokio::time::advance(Duration::from_mins(50)).await;
        assert!(!calm.holds(at(20_050)));
        tokio::time::advance(Duration::from_mins(10)).await;
        assert!(calm.holds(at(20_060)), "it has stayed so");
    }
}
