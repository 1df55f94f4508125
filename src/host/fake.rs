//! A model of a runtime in memory, for tests and simulation of what stands above.
//!
//! It passes the same contract as the real runtimes, and can be told to fail, to hang, to lose daemons and to drain slowly. Time
//! is tokio's, so a paused clock makes it instant.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::Key;
use tokio::sync::{Notify, broadcast};

use super::{InstanceEvent, InstanceSpec, InstanceState, Runtime, RuntimeError, StopBound};

/// What can be made to go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Look,
    List,
    Create,
    Start,
    Stop,
    Destroy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// [`RuntimeError::Unavailable`], before anything is done.
    Fail,
    /// [`RuntimeError::Unavailable`], after it was done: the answer is lost.
    LoseAnswer,
    /// Nothing happens until the fault is taken away.
    Hang,
}

/// See the module.
#[derive(Debug)]
pub struct FakeRuntime {
    state: Mutex<State>,
    changed: Notify,
    events: broadcast::Sender<InstanceEvent>,
}

#[derive(Debug, Default)]
struct State {
    instances: BTreeMap<Key, Model>,
    faults: BTreeMap<Operation, Fault>,
    stillborn: BTreeSet<Key>,
    drains: BTreeMap<Key, Duration>,
    starts: u64,
}

#[derive(Debug)]
struct Model {
    spec: InstanceSpec,
    incarnation: Option<String>,
    words: String,
}

impl Default for FakeRuntime {
    fn default() -> Self {
        Self { state: Mutex::default(), changed: Notify::new(), events: broadcast::channel(256).0 }
    }
}

impl FakeRuntime {
    pub fn new() -> Self {
        Self::default()
    }

    /// Until it is replaced or taken away with `None`.
    pub fn set_fault(&self, operation: Operation, fault: Option<Fault>) {
        let mut state = self.state();
        match fault {
            Some(fault) => state.faults.insert(operation, fault),
            None => state.faults.remove(&operation),
        };
        drop(state);
        self.changed.notify_waiters();
    }

    /// Whether the daemons of a key end right after their start.
    pub fn set_stillborn(&self, key: &Key, stillborn: bool) {
        let mut state = self.state();
        if stillborn {
            state.stillborn.insert(key.clone())
        } else {
            state.stillborn.remove(key)
        };
    }

    /// How long a daemon takes to drain; at once if nothing is said.
    pub fn set_drain(&self, key: &Key, takes: Duration) {
        self.state().drains.insert(key.clone(), takes);
    }

    /// The daemon dies by itself; false when it did not run.
    pub fn kill(&self, key: &Key) -> bool {
        let mut state = self.state();
        let killed = state.instances.get_mut(key).and_then(|model| model.incarnation.take()).is_some();
        drop(state);
        if killed {
            self.announce(key);
        }
        killed
    }

    /// Listeners are told that they missed something.
    pub fn miss_events(&self) {
        let _ = self.events.send(InstanceEvent::Missed);
    }

    /// How many daemons were ever started.
    pub fn starts(&self) -> u64 {
        self.state().starts
    }

    fn announce(&self, key: &Key) {
        // Nobody listening is fine.
        let _ = self.events.send(InstanceEvent::Changed(key.clone()));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Comes back when `operation` may go on; what it returns is to be returned after it was done.
    async fn pass(&self, operation: Operation) -> Result<Result<(), RuntimeError>, RuntimeError> {
        loop {
            // Made before looking: a change in between must not be slept through.
            let changed = self.changed.notified();
            let fault = self.state().faults.get(&operation).copied();
            let unavailable = || RuntimeError::Unavailable {
                runtime: "fake",
                why: format!("{operation:?} was told to fail"),
                remedy: "take the fault away".to_owned(),
            };
            match fault {
                None => return Ok(Ok(())),
                Some(Fault::Fail) => return Err(unavailable()),
                Some(Fault::LoseAnswer) => return Ok(Err(unavailable())),
                Some(Fault::Hang) => changed.await,
            }
        }
    }
}

fn refused(operation: &'static str, key: &Key, why: &str) -> RuntimeError {
    RuntimeError::Refused { operation, instance: key.daemon_name(), why: why.to_owned() }
}

#[async_trait]
impl Runtime for FakeRuntime {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn isolates(&self) -> bool {
        true
    }

    async fn look(&self, spec: &InstanceSpec) -> Result<InstanceState, RuntimeError> {
        let answer = self.pass(Operation::Look).await?;
        let looked = match self.state().instances.get(&spec.key) {
            None => InstanceState::Absent,
            Some(Model { incarnation: Some(incarnation), .. }) => {
                InstanceState::Running { incarnation: incarnation.clone() }
            }
            Some(model) if model.spec != *spec => {
                InstanceState::HalfMade { why: "it was made from another spec".to_owned() }
            }
            Some(_) => InstanceState::Stopped,
        };
        answer.map(|()| looked)
    }

    async fn list(&self) -> Result<Vec<Key>, RuntimeError> {
        let answer = self.pass(Operation::List).await?;
        let keys = self.state().instances.keys().cloned().collect();
        answer.map(|()| keys)
    }

    async fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        let answer = self.pass(Operation::Create).await?;
        let mut state = self.state();
        match state.instances.get_mut(&spec.key) {
            Some(model) if model.spec == *spec => {}
            Some(model) if model.incarnation.is_some() => {
                return Err(refused("create", &spec.key, "it runs as something else; stop it first"));
            }
            _ => {
                let model = Model { spec: spec.clone(), incarnation: None, words: String::new() };
                state.instances.insert(spec.key.clone(), model);
            }
        }
        answer
    }

    async fn start(&self, spec: &InstanceSpec) -> Result<String, RuntimeError> {
        let answer = self.pass(Operation::Start).await?;
        let incarnation = {
            let mut guard = self.state();
            let state = &mut *guard;
            let model = state.instances.get_mut(&spec.key);
            let model = model.ok_or_else(|| refused("start", &spec.key, "there is none; create it first"))?;
            if let Some(incarnation) = &model.incarnation {
                return answer.map(|()| incarnation.clone());
            }
            if model.spec != *spec {
                return Err(refused("start", &spec.key, "it was made from another spec; create it again"));
            }
            state.starts += 1;
            let incarnation = format!("start-{}", state.starts);
            let stillborn = state.stillborn.contains(&spec.key);
            model.incarnation = (!stillborn).then(|| incarnation.clone());
            model.words = if stillborn { "stillborn".to_owned() } else { format!("running as {incarnation}") };
            incarnation
        };
        self.announce(&spec.key);
        answer.map(|()| incarnation)
    }

    async fn stop(&self, spec: &InstanceSpec, bound: StopBound) -> Result<(), RuntimeError> {
        let answer = self.pass(Operation::Stop).await?;
        let running = |state: &State| state.instances.get(&spec.key).and_then(|model| model.incarnation.clone());
        let Some(incarnation) = running(&self.state()) else { return answer };
        if let StopBound::Graceful(bound) = bound {
            let drain = self.state().drains.get(&spec.key).copied().unwrap_or_default();
            tokio::time::sleep(drain.min(bound)).await;
        }
        let mut state = self.state();
        // While it drained it may have been killed and started again.
        if running(&state).as_ref() == Some(&incarnation)
            && let Some(model) = state.instances.get_mut(&spec.key)
        {
            model.incarnation = None;
        }
        drop(state);
        self.announce(&spec.key);
        answer
    }

    async fn destroy(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        let answer = self.pass(Operation::Destroy).await?;
        let mut state = self.state();
        if state.instances.get(&spec.key).is_some_and(|model| model.incarnation.is_some()) {
            return Err(refused("destroy", &spec.key, "it is running; stop it first"));
        }
        state.instances.remove(&spec.key);
        answer
    }

    async fn last_words(&self, spec: &InstanceSpec) -> String {
        self.state().instances.get(&spec.key).map(|model| model.words.clone()).unwrap_or_default()
    }

    fn events(&self) -> broadcast::Receiver<InstanceEvent> {
        self.events.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4};
    use std::path::PathBuf;

    use super::*;
    use crate::host::{Limits, Properties, contract};

    fn spec(key: &Key) -> InstanceSpec {
        InstanceSpec {
            key: key.clone(),
            properties: Properties::new(),
            address: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8372),
            volume: PathBuf::from("/nowhere"),
            files: PathBuf::from("/nowhere"),
            limits: Limits::default(),
        }
    }

    #[tokio::test]
    async fn it_keeps_the_contract() {
        contract::runtime(&FakeRuntime::new(), &spec).await;
    }

    #[tokio::test(start_paused = true)]
    async fn it_can_fail_hang_lose_answers_and_die() {
        let (runtime, key) = (FakeRuntime::new(), contract::key());
        let spec = spec(&key);
        runtime.set_fault(Operation::Create, Some(Fault::Fail));
        assert!(runtime.create(&spec).await.expect_err("told to fail").is_retryable());
        assert_eq!(runtime.look(&spec).await.expect("looked"), InstanceState::Absent);
        runtime.set_fault(Operation::Create, Some(Fault::LoseAnswer));
        runtime.create(&spec).await.expect_err("the answer is lost");
        assert_eq!(runtime.look(&spec).await.expect("looked"), InstanceState::Stopped);

        runtime.set_fault(Operation::Start, Some(Fault::Hang));
        let (started, ()) = tokio::join!(runtime.start(&spec), async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(runtime.starts(), 0);
            runtime.set_fault(Operation::Start, None);
        });
        started.expect("it went on");
        assert!(runtime.kill(&key) && !runtime.kill(&key));
        runtime.set_stillborn(&key, true);
        runtime.start(&spec).await.expect("started");
        assert_eq!(runtime.look(&spec).await.expect("looked"), InstanceState::Stopped);
        assert_eq!(runtime.last_words(&spec).await, "stillborn");
    }
}
