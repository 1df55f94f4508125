//! [`Effects`] on a model host in memory: for the tests of the worker, and for `kiln bench route`, which measures the
//! way of a warm request and not a host.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::plan::{FilesSeen, InstanceSeen, Observed, Step, VolumeSeen};
use kiln_domain::{Key, ProjectRecord};
use tokio::sync::{Semaphore, broadcast};

use super::effects::{EffectError, Effects};
use crate::host::{InstanceEvent, RuntimeError};

/// What the model should do instead of obeying.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mood {
    #[default]
    Obedient,
    /// The step fails and changes nothing.
    Failing(Step),
    /// The step succeeds and its answer is lost.
    Lossy(Step),
    /// The step succeeds, and the daemon dies while the answer is on its way; then it obeys again.
    FatalOnce(Step),
}

#[derive(Debug)]
struct Host {
    seen: HashMap<Key, Observed>,
    done: Vec<(Key, Step)>,
    starts: u64,
    mood: Mood,
}

/// See the module. Each step takes one permit from `gate`, so that a test can hold a step in flight.
#[derive(Debug)]
pub struct ModelEffects {
    host: Mutex<Host>,
    events: broadcast::Sender<InstanceEvent>,
    pub gate: Semaphore,
}

impl Default for ModelEffects {
    fn default() -> Self {
        let host = Host { seen: HashMap::new(), done: Vec::new(), starts: 0, mood: Mood::default() };
        Self { host: Mutex::new(host), events: broadcast::Sender::new(64), gate: Semaphore::new(Self::OPEN) }
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

    /// The steps carried out so far, in order.
    pub fn done(&self) -> Vec<(Key, Step)> {
        self.host().done.clone()
    }

    /// The daemon dies by itself.
    pub fn kill(&self, key: &Key) {
        if let Some(seen) = self.host().seen.get_mut(key) {
            seen.instance = InstanceSeen::Stopped;
        }
        // Nobody may be listening.
        let _ = self.events.send(InstanceEvent::Changed(key.clone()));
    }

    pub fn instance(&self, key: &Key) -> InstanceSeen {
        self.host().seen.get(key).map_or(InstanceSeen::Absent, |seen| seen.instance.clone())
    }
}

const NOTHING: Observed =
    Observed { volume: VolumeSeen::Absent, files: FilesSeen::Stale, instance: InstanceSeen::Absent };

#[async_trait]
impl Effects for ModelEffects {
    async fn observe(&self, record: &ProjectRecord) -> Result<Observed, EffectError> {
        Ok(self.host().seen.get(&record.key).cloned().unwrap_or(NOTHING))
    }

    async fn perform(&self, step: Step, record: &ProjectRecord) -> Result<Option<String>, EffectError> {
        if let Ok(permit) = self.gate.acquire().await {
            permit.forget();
        }
        let outcome = self.carry_out(step, record);
        if self.is_fatal(step) {
            self.kill(&record.key);
            tokio::time::sleep(Self::ON_ITS_WAY).await;
        }
        outcome
    }

    async fn last_words(&self, _record: &ProjectRecord) -> String {
        String::new()
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

    fn carry_out(&self, step: Step, record: &ProjectRecord) -> Result<Option<String>, EffectError> {
        let mut host = self.host();
        let failed = || {
            let instance = record.key.daemon_name();
            Err(RuntimeError::Refused { operation: step.name(), instance, why: "the model says so".into() }.into())
        };
        if host.mood == Mood::Failing(step) {
            return failed();
        }
        host.done.push((record.key.clone(), step));
        let incarnation = (step == Step::StartInstance).then(|| {
            host.starts += 1;
            format!("run-{}", host.starts)
        });
        host.seen.entry(record.key.clone()).or_insert(NOTHING).apply(step, incarnation.clone());
        if host.mood == Mood::Lossy(step) { failed() } else { Ok(incarnation) }
    }
}
