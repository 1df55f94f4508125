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

use super::{
    Change, FoundInstance, InstanceEvent, InstanceSpec, InstanceState, Properties, Runtime, RuntimeError, StopBound,
};

/// What can be made to go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// And the measuring of CPU time.
    Look,
    Prove,
    Found,
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
    /// What each can reach and must not.
    leaks: BTreeMap<Key, String>,
    proofs: u64,
    starts: u64,
    /// What is in our place and not ours, by name; whether it runs.
    strangers: BTreeMap<String, bool>,
    /// Numbers of the current ones.
    image: u64,
    program: u64,
}

#[derive(Debug)]
struct Model {
    spec: InstanceSpec,
    incarnation: Option<String>,
    words: String,
    cpu_time: Duration,
    image: u64,
    program: u64,
}

impl Model {
    fn new(spec: &InstanceSpec, image: u64) -> Self {
        Self {
            spec: spec.clone(),
            incarnation: None,
            words: String::new(),
            cpu_time: Duration::ZERO,
            image,
            program: 0,
        }
    }
}

impl State {
    fn look(&self, spec: &InstanceSpec) -> InstanceState {
        let Some(model) = self.instances.get(&spec.key) else { return InstanceState::Absent };
        let running = model.incarnation.is_some();
        let changes = [
            (model.image != self.image, Change::Image),
            (running && model.program != self.program, Change::Program),
            (model.spec.limits != spec.limits, Change::Limits),
            (running && differs(&model.spec, spec), Change::Make),
        ];
        let outdated = changes.into_iter().filter(|(is, _)| *is).map(|(_, change)| change).collect();
        match &model.incarnation {
            Some(incarnation) => InstanceState::Running { incarnation: incarnation.clone(), outdated },
            None if differs(&model.spec, spec) => {
                InstanceState::HalfMade { why: "it was made from another spec".to_owned() }
            }
            None => InstanceState::Stopped { outdated },
        }
    }
}

/// What it carries of its spec.
fn marked(spec: &InstanceSpec) -> Properties {
    let lane = ("lane".to_owned(), spec.lane.name().to_owned());
    spec.properties.iter().map(|(name, value)| (name.clone(), value.clone())).chain([lane]).collect()
}

/// In a way that must not be started.
fn differs(is: &InstanceSpec, wanted: &InstanceSpec) -> bool {
    InstanceSpec { limits: wanted.limits, ..is.clone() } != *wanted
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

    /// The instance of a key reaches something that it must not; until it is taken away with `None`.
    pub fn set_leak(&self, key: &Key, reached: Option<&str>) {
        let mut state = self.state();
        match reached {
            Some(reached) => state.leaks.insert(key.clone(), reached.to_owned()),
            None => state.leaks.remove(key),
        };
    }

    /// How often it was asked to prove something.
    pub fn proofs(&self) -> u64 {
        self.state().proofs
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

    /// From now on instances are made from another image. Listeners are told.
    pub fn replace_image(&self) {
        self.state().image += 1;
        self.miss_events();
    }

    /// From now on daemons are started from another program.
    pub fn replace_program(&self) {
        self.state().program += 1;
    }

    /// Something that is not ours.
    pub fn add_stranger(&self, name: &str, running: bool) {
        self.state().strangers.insert(name.to_owned(), running);
    }

    /// The daemon of `key` works; false when there is none.
    pub fn use_cpu(&self, key: &Key, time: Duration) -> bool {
        let mut state = self.state();
        let model = state.instances.get_mut(key).filter(|model| model.incarnation.is_some());
        model.map(|model| model.cpu_time += time).is_some()
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
        let looked = self.state().look(spec);
        answer.map(|()| looked)
    }

    async fn found(&self) -> Result<Vec<FoundInstance>, RuntimeError> {
        let answer = self.pass(Operation::Found).await?;
        let state = self.state();
        let ours = state.instances.iter().map(|(key, model)| FoundInstance {
            name: key.daemon_name(),
            key: Some(key.clone()),
            properties: marked(&model.spec),
            running: model.incarnation.is_some(),
        });
        let others = state.strangers.iter().map(|(name, running)| FoundInstance {
            name: name.clone(),
            key: None,
            properties: Properties::new(),
            running: *running,
        });
        let mut found: Vec<_> = ours.chain(others).collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        answer.map(|()| found)
    }

    async fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        let answer = self.pass(Operation::Create).await?;
        let mut state = self.state();
        let image = state.image;
        match state.instances.get_mut(&spec.key) {
            Some(model) if model.spec == *spec && model.image == image => {}
            Some(model) if model.spec == *spec && model.incarnation.is_some() => {}
            Some(model) if model.incarnation.is_some() => {
                return Err(refused("create", &spec.key, "it runs as something else; stop it first"));
            }
            _ => {
                let model = Model::new(spec, image);
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
            if differs(&model.spec, spec) {
                return Err(refused("start", &spec.key, "it was made from another spec; create it again"));
            }
            state.starts += 1;
            let incarnation = format!("start-{}", state.starts);
            let stillborn = state.stillborn.contains(&spec.key);
            model.incarnation = (!stillborn).then(|| incarnation.clone());
            (model.program, model.cpu_time) = (state.program, Duration::ZERO);
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

    async fn destroy_found(&self, name: &str) -> Result<(), RuntimeError> {
        let answer = self.pass(Operation::Destroy).await?;
        let mut state = self.state();
        let ours = state.instances.iter().find(|(key, _)| key.daemon_name() == name);
        let ours = ours.map(|(key, model)| (key.clone(), model.incarnation.is_some()));
        let running = ours.as_ref().map_or(state.strangers.get(name) == Some(&true), |(_, running)| *running);
        if running {
            let why = "it is running; stop it first".to_owned();
            return Err(RuntimeError::Refused { operation: "destroy", instance: name.to_owned(), why });
        }
        state.strangers.remove(name);
        if let Some((key, _)) = ours {
            state.instances.remove(&key);
        }
        answer
    }

    async fn cpu_time(&self, spec: &InstanceSpec) -> Result<Option<Duration>, RuntimeError> {
        let answer = self.pass(Operation::Look).await?;
        let state = self.state();
        let model = state.instances.get(&spec.key).filter(|model| model.incarnation.is_some());
        let used = model.map(|model| model.cpu_time);
        answer.map(|()| used)
    }

    async fn prove_isolation(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        let answer = self.pass(Operation::Prove).await?;
        let mut state = self.state();
        state.proofs += 1;
        if state.instances.get(&spec.key).is_none_or(|model| model.incarnation.is_none()) {
            return Err(refused("prove the isolation of", &spec.key, "it does not run"));
        }
        match state.leaks.get(&spec.key) {
            Some(reached) => {
                Err(RuntimeError::NotIsolated { instance: spec.key.daemon_name(), reached: reached.clone() })
            }
            None => answer,
        }
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
    use crate::host::{Lane, Limits, contract};

    fn spec(key: &Key) -> InstanceSpec {
        InstanceSpec {
            key: key.clone(),
            lane: Lane::Trusted,
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
        assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED);

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
        assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED);
        assert_eq!(runtime.last_words(&spec).await, "stillborn");
    }

    #[tokio::test]
    async fn it_can_grow_old_and_have_neighbours() {
        let (runtime, key) = (FakeRuntime::new(), contract::key());
        let spec = spec(&key);
        runtime.create(&spec).await.expect("created");
        runtime.start(&spec).await.expect("started");
        runtime.replace_image();
        runtime.replace_program();
        let InstanceState::Running { outdated, .. } = runtime.look(&spec).await.expect("looked") else {
            panic!("it does not run")
        };
        assert_eq!(outdated, [Change::Image, Change::Program]);
        runtime.stop(&spec, StopBound::Force).await.expect("stopped");
        let stopped = InstanceState::Stopped { outdated: vec![Change::Image] };
        assert_eq!(runtime.look(&spec).await.expect("looked"), stopped, "the next start is of the new program");
        runtime.destroy(&spec).await.expect("destroyed");
        runtime.create(&spec).await.expect("created");
        assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED);

        runtime.start(&spec).await.expect("started");
        runtime.set_leak(&key, Some("the metadata service"));
        let leak = runtime.prove_isolation(&spec).await.expect_err("it leaks");
        assert!(matches!(leak, RuntimeError::NotIsolated { .. }), "{leak}");
        runtime.set_leak(&key, None);
        runtime.prove_isolation(&spec).await.expect("mended");
        runtime.stop(&spec, StopBound::Force).await.expect("stopped");

        runtime.add_stranger("web", true);
        assert_eq!(runtime.found().await.expect("listed").len(), 2);
        runtime.destroy_found("web").await.expect_err("it runs");
        runtime.add_stranger("web", false);
        runtime.destroy_found("web").await.expect("destroyed");
        assert_eq!(runtime.found().await.expect("listed").len(), 1);
        assert!(!runtime.use_cpu(&key, Duration::from_secs(1)), "it does not run");
        runtime.start(&spec).await.expect("started");
        assert!(runtime.use_cpu(&key, Duration::from_secs(1)));
        assert_eq!(runtime.cpu_time(&spec).await.expect("measured"), Some(Duration::from_secs(1)));
    }
}
