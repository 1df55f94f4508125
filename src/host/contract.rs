//! What every runtime must do; run on the model and on the real ones.

use std::time::Duration;

use kiln_domain::Key;
use tokio::sync::broadcast;

use super::{
    Change, FoundInstance, InstanceEvent, InstanceSpec, InstanceState, Lane, Runtime, RuntimeError, StopBound,
};

/// More than any step takes; a test that reaches it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// Down, and as it would be made now.
pub(crate) const STOPPED: InstanceState = InstanceState::Stopped { outdated: Vec::new() };

/// Up, and as it would be made now.
pub(crate) fn running(incarnation: &str) -> InstanceState {
    InstanceState::Running { incarnation: incarnation.to_owned(), outdated: Vec::new() }
}

pub(crate) fn key() -> Key {
    "pbcce5b6205652dd7".parse().expect("a key")
}

/// `make` gives the spec of a key, always the same one, with everything that a start needs. The runtime is left empty.
pub(crate) async fn runtime(runtime: &dyn Runtime, make: &(dyn Fn(&Key) -> InstanceSpec + Sync)) {
    let whole = async {
        absent(runtime, &make(&key())).await;
        life(runtime, &make(&key())).await;
        outdated(runtime, &make(&key())).await;
        lanes(runtime, &make(&key())).await;
        two_at_once(runtime, &make(&key()), &make(&key().clone_number(1))).await;
    };
    tokio::time::timeout(10 * PATIENCE, whole).await.expect("the contract takes too long");
}

/// Looks until the state is as wanted.
pub(crate) async fn until(
    runtime: &dyn Runtime,
    spec: &InstanceSpec,
    wanted: impl Fn(&InstanceState) -> bool,
) -> InstanceState {
    let mut events = runtime.events();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let state = runtime.look(spec).await.expect("looked");
        if wanted(&state) {
            return state;
        }
        assert!(tokio::time::Instant::now() < deadline, "still {state:?}; {}", runtime.last_words(spec).await);
        // An event makes it quick; where one may come late, look again soon.
        let _ = tokio::time::timeout(Duration::from_millis(20), events.recv()).await;
    }
}

pub(crate) async fn hear(events: &mut broadcast::Receiver<InstanceEvent>, key: &Key) {
    let heard = async {
        loop {
            match events.recv().await {
                Ok(InstanceEvent::Changed(changed)) if changed == *key => return,
                Ok(InstanceEvent::Missed) | Err(broadcast::error::RecvError::Lagged(_)) => return,
                Ok(InstanceEvent::Changed(_)) => {}
                Err(broadcast::error::RecvError::Closed) => panic!("no more events"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.expect("an event");
}

async fn absent(runtime: &dyn Runtime, spec: &InstanceSpec) {
    assert!(!runtime.name().is_empty());
    assert_eq!(runtime.look(spec).await.expect("looked"), InstanceState::Absent);
    assert!(runtime.found().await.expect("listed").is_empty());
    runtime.stop(spec, StopBound::Force).await.expect("nothing to stop is success");
    runtime.destroy(spec).await.expect("nothing to destroy is success");
    let error = runtime.start(spec).await.expect_err("nothing to start");
    assert!(matches!(error, RuntimeError::Refused { .. }) && !error.is_retryable(), "{error}");
    not_proven(runtime, spec).await;
    assert_eq!(runtime.last_words(spec).await, "");
    assert_eq!(runtime.look(spec).await.expect("looked"), InstanceState::Absent, "a failed start makes nothing");
}

async fn life(runtime: &dyn Runtime, spec: &InstanceSpec) {
    let had_volume = spec.volume.exists();
    runtime.create(spec).await.expect("created");
    runtime.create(spec).await.expect("an equal one is success");
    assert_eq!(runtime.look(spec).await.expect("looked"), STOPPED, "created is not started");
    is_found(runtime, spec, false).await;
    assert_eq!(runtime.cpu_time(spec).await.expect("measured"), None, "what does not run uses nothing");

    let mut events = runtime.events();
    let first = runtime.start(spec).await.expect("started");
    hear(&mut events, &spec.key).await;
    assert_eq!(runtime.look(spec).await.expect("looked"), running(&first));
    assert_eq!(runtime.start(spec).await.expect("running already is success"), first);
    runtime.create(spec).await.expect("an equal one that runs is success");
    let found = is_found(runtime, spec, true).await;
    for error in [runtime.destroy(spec).await.err(), runtime.destroy_found(&found.name).await.err()] {
        assert!(matches!(error, Some(RuntimeError::Refused { .. })), "it runs: {error:?}");
    }
    assert!(runtime.cpu_time(spec).await.expect("measured").is_some());
    if runtime.isolates() {
        runtime.prove_isolation(spec).await.expect("it is isolated");
    } else {
        not_proven(runtime, spec).await;
    }
    assert_eq!(runtime.look(spec).await.expect("looked"), running(&first));

    runtime.stop(spec, StopBound::Graceful(PATIENCE)).await.expect("stopped");
    assert_eq!(runtime.look(spec).await.expect("looked"), STOPPED, "a stop returns when it is down");
    not_proven(runtime, spec).await;
    hear(&mut events, &spec.key).await;
    runtime.stop(spec, StopBound::Graceful(PATIENCE)).await.expect("stopped already is success");

    let second = runtime.start(spec).await.expect("started");
    assert_ne!(first, second, "each start is another incarnation");
    runtime.stop(spec, StopBound::Force).await.expect("stopped");
    assert_eq!(runtime.look(spec).await.expect("looked"), STOPPED);

    runtime.destroy(spec).await.expect("destroyed");
    runtime.destroy(spec).await.expect("destroyed already is success");
    assert_eq!(runtime.look(spec).await.expect("looked"), InstanceState::Absent);
    assert!(runtime.found().await.expect("listed").is_empty());
    assert_eq!(spec.volume.exists(), had_volume, "the volume stays");
}

/// What does not run, or is not isolated by its runtime, is not proven to be; and that is no violation.
async fn not_proven(runtime: &dyn Runtime, spec: &InstanceSpec) {
    let error = runtime.prove_isolation(spec).await.expect_err("nothing to prove");
    assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
}

/// Whose code an instance runs can be told of it later, and it is not taken for one of the other lane.
async fn lanes(runtime: &dyn Runtime, spec: &InstanceSpec) {
    let untrusted = InstanceSpec { lane: Lane::Untrusted, ..spec.clone() };
    if !runtime.isolates() {
        for refused in [runtime.create(&untrusted).await.err(), runtime.start(&untrusted).await.err()] {
            assert!(matches!(refused, Some(RuntimeError::Refused { .. })), "{refused:?}");
        }
        assert_eq!(runtime.look(spec).await.expect("looked"), InstanceState::Absent);
        return;
    }
    for (spec, other) in [(spec, &untrusted), (&untrusted, spec)] {
        runtime.create(spec).await.expect("created");
        let found = is_found(runtime, spec, false).await;
        assert_eq!(found.properties.get("lane").map(String::as_str), Some(spec.lane.name()));
        let state = runtime.look(other).await.expect("looked");
        assert!(matches!(state, InstanceState::HalfMade { .. }), "{state:?}");
        assert!(runtime.start(other).await.is_err(), "started in another lane");
        runtime.start(spec).await.expect("started");
        runtime.prove_isolation(spec).await.expect("it is isolated");
        runtime.stop(spec, StopBound::Force).await.expect("stopped");
        runtime.destroy(spec).await.expect("destroyed");
    }
}

/// The only one there, with what it carries.
async fn is_found(runtime: &dyn Runtime, spec: &InstanceSpec, running: bool) -> FoundInstance {
    let mut found = runtime.found().await.expect("listed");
    assert_eq!(found.len(), 1, "{found:?}");
    let found = found.remove(0);
    assert_eq!((found.key.as_ref(), found.running), (Some(&spec.key), running));
    let carried = |name: &String| found.properties.get(name).map_or("", String::as_str);
    assert!(spec.properties.iter().all(|(name, value)| carried(name) == value), "{found:?}");
    found
}

/// Other limits are no reason not to start, and are seen until it is made anew.
async fn outdated(runtime: &dyn Runtime, spec: &InstanceSpec) {
    let mut wanted = spec.clone();
    wanted.limits.processes = Some(spec.limits.processes.unwrap_or(0) + 1234);
    runtime.create(spec).await.expect("created");
    let older = InstanceState::Stopped { outdated: vec![Change::Limits] };
    assert_eq!(runtime.look(&wanted).await.expect("looked"), older);
    let incarnation = runtime.start(&wanted).await.expect("it works as it is");
    let older = InstanceState::Running { incarnation: incarnation.clone(), outdated: vec![Change::Limits] };
    assert_eq!(runtime.look(&wanted).await.expect("looked"), older);
    assert_eq!(runtime.look(spec).await.expect("looked"), running(&incarnation));
    runtime.stop(&wanted, StopBound::Force).await.expect("stopped");
    let name = is_found(runtime, spec, false).await.name;
    runtime.destroy_found(&name).await.expect("destroyed by its name");
    runtime.destroy_found(&name).await.expect("destroyed already is success");
    runtime.create(&wanted).await.expect("created");
    assert_eq!(runtime.look(&wanted).await.expect("looked"), STOPPED, "made anew it is what was wanted");
    runtime.destroy(&wanted).await.expect("destroyed");
    for name in ["", ".", "..", "../run", "/", "a/b", "a/"] {
        let outcome = runtime.destroy_found(name).await;
        // The model has no place where such a name could lead to.
        assert!(outcome.is_err() || runtime.name() == "fake", "{name:?} was taken for a name");
    }
}

async fn two_at_once(runtime: &dyn Runtime, one: &InstanceSpec, other: &InstanceSpec) {
    let (a, b) = tokio::join!(runtime.create(one), runtime.create(one));
    a.and(b).expect("created by both");
    let (a, b, c) = tokio::join!(runtime.start(one), runtime.start(one), runtime.start(one));
    let a = a.expect("started");
    assert_eq!((&a, &a), (&b.expect("started"), &c.expect("started")), "one daemon for all");

    runtime.create(other).await.expect("created");
    let of_other = runtime.start(other).await.expect("started");
    assert_ne!(a, of_other);
    assert_eq!(runtime.found().await.expect("listed").len(), 2);
    runtime.stop(one, StopBound::Graceful(PATIENCE)).await.expect("stopped");
    let state = runtime.look(other).await.expect("looked");
    assert_eq!(state, running(&of_other), "a stop is for one instance");
    let (a, b) =
        tokio::join!(runtime.stop(other, StopBound::Graceful(PATIENCE)), runtime.stop(other, StopBound::Force));
    a.and(b).expect("stopped by both");
    for spec in [one, other] {
        runtime.destroy(spec).await.expect("destroyed");
    }
}
