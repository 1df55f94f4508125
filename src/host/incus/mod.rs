//! The production runtime: unprivileged, id-mapped system containers of Incus, over its REST API on the unix socket.
//!
//! ```text
//!            create (one request, complete)        start            stop, or it dies
//! Absent ───────────────────────────────→ Stopped ─────→ Running ───────────────→ Stopped
//!    ↑                                       │ differs from its spec: HalfMade          │
//!    └──────────────────── destroy ──────────┴──────────────────────────────────────────┘
//! ```
//!
//! Promises beyond the trait's:
//! * An instance that is down and differs from its spec is [`InstanceState::HalfMade`] and is never started. One that
//!   runs is `Running` whatever differs: a build may be going on, and a difference can wait until it is quiet.
//! * How far it may reach is in force, and verified, before it starts ([`super::network`]).
//! * Incus being away (it restarts in a minute) is [`RuntimeError::Unavailable`]; instances live on meanwhile.
//! * Everything is in an Incus project of our own, with its own images and profiles, restricted to unprivileged
//!   containers. Nothing outside that project is looked at or changed.
//!
//! [`wanted`] says what an instance is made of, [`client`] speaks to Incus, [`events`] hears that something changed.
//!
//! What must not be here: when to start or stop anything; how the image is made (that is [`crate::image`]).

use std::future::Future;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kiln_domain::Key;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::{OnceCell, broadcast};
use tokio_util::task::AbortOnDropHandle;

use super::network::{Network, NetworkError, Reach};
use super::{InstanceEvent, InstanceSpec, InstanceState, Runtime, RuntimeError, StopBound};
use crate::causes::in_one_line;
use client::{ApiError, Client, status};
use wanted::Found;

pub(crate) mod client;
mod events;
mod prepare;
mod wanted;
mod words;

#[cfg(test)]
mod real_tests;

const NAME: &str = "incus";
/// Unpacking an image onto a slow disk takes seconds; a snapshot of one takes none.
const CREATE: Duration = Duration::from_mins(3);
const START: Duration = Duration::from_mins(1);
/// Killing the processes and unmounting, on a busy host.
const FORCE: Duration = Duration::from_mins(1);
/// From the death of an instance's first process to Incus's knowing.
const DYING: Duration = Duration::from_secs(5);
/// What Incus may take beyond a drain's own time.
const STOP_OVERHEAD: Duration = Duration::from_secs(15);
const DELETE: Duration = Duration::from_mins(1);
/// Events wait here for a listener that is busy; one that falls behind is told so by the channel.
const EVENTS: usize = 1024;

/// What all instances have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncusConfig {
    pub socket: PathBuf,
    /// The Incus project that holds our instances and images; made when missing.
    pub project: String,
    /// The storage pool for root disks (caches are volumes of ours, beside it).
    pub pool: String,
    /// Alias of the container image, as `kiln image build` leaves it.
    pub image: String,
    /// Name servers for the instances.
    pub resolvers: Vec<IpAddr>,
}

impl IncusConfig {
    pub fn new(socket: PathBuf, pool: String) -> Self {
        Self { socket, project: "kiln".to_owned(), pool, image: "kiln".to_owned(), resolvers: Vec::new() }
    }
}

/// Instances in Incus.
pub struct IncusRuntime {
    config: IncusConfig,
    client: Client,
    network: Arc<Network>,
    /// Set once the project is there and the table is in force.
    prepared: OnceCell<()>,
    events: broadcast::Sender<InstanceEvent>,
    _follower: AbortOnDropHandle<()>,
}

impl IncusRuntime {
    /// Connects when first needed, so that Kiln can start while Incus is away; events are followed from now on.
    /// Must be called within a tokio runtime.
    pub fn new(config: IncusConfig, network: Arc<Network>) -> Result<Self, RuntimeError> {
        prepare::check_names(&config)?;
        let client =
            Client::new(&config.socket, &config.project).map_err(|e| failure("connect to", &config.project, e))?;
        let (events, _) = broadcast::channel(EVENTS);
        let follower = events::follow(config.socket.clone(), config.project.clone(), events.clone());
        let follower = AbortOnDropHandle::new(tokio::spawn(follower));
        Ok(Self { config, client, network, prepared: OnceCell::new(), events, _follower: follower })
    }

    /// As [`IncusRuntime::new`], and says at once if Incus lacks something.
    pub async fn connect(config: IncusConfig, network: Arc<Network>) -> Result<Self, RuntimeError> {
        let runtime = Self::new(config, network)?;
        runtime.prepared().await?;
        Ok(runtime)
    }

    async fn prepared(&self) -> Result<(), RuntimeError> {
        let preparing = async {
            prepare::prepare(&self.client, &self.config).await?;
            prepare::pool(&self.client, &self.config).await?;
            self.network.ensure().await.map_err(|e| closed("prepare", &self.config.project, &e))?;
            // The table may have been lost with the instances still running: say again who may reach what.
            for found in self.all().await? {
                if let (Some(key), Some(address), true) = (found.key(), found.address(), is_up(found.status_code)) {
                    self.admit(&key, address).await?;
                }
            }
            Ok(())
        };
        self.prepared.get_or_try_init(|| preparing).await.copied()
    }

    async fn admit(&self, key: &Key, address: std::net::Ipv4Addr) -> Result<(), RuntimeError> {
        // A fork runs code that nobody has vouched for.
        let reach = if key.is_fork() { Reach::Confined } else { Reach::Public };
        self.network.admit(address, reach).await.map_err(|e| closed("start", &key.daemon_name(), &e))
    }

    async fn all(&self) -> Result<Vec<Found>, RuntimeError> {
        let found = self.client.get("/1.0/instances?recursion=1").await;
        found.map_err(|error| failure("list", "instances", error))
    }

    async fn find(&self, spec: &InstanceSpec) -> Result<Option<Found>, RuntimeError> {
        match self.client.get(&path_of(spec)).await {
            Ok(found) => Ok(Some(found)),
            Err(ApiError::NotFound(_)) => Ok(None),
            Err(error) => Err(failure("look at", &spec.key.daemon_name(), error)),
        }
    }

    fn state_of(&self, found: &Found, spec: &InstanceSpec) -> Result<InstanceState, RuntimeError> {
        if is_up(found.status_code) {
            return Ok(InstanceState::Running { incarnation: found.last_used_at.clone() });
        }
        // A frozen one is as good as stopped: starting it thaws it.
        if !matches!(found.status_code, status::STOPPED | status::STARTING | status::FROZEN | status::FREEZING) {
            let remedy = format!("see what `incus info {} --project {}` says", found.name, self.config.project);
            let why = format!("it reports {} as {:?} (code {})", found.name, found.status, found.status_code);
            return Err(RuntimeError::Unavailable { runtime: NAME, why, remedy });
        }
        match found.difference(spec, &self.config) {
            Some(why) => Ok(InstanceState::HalfMade { why }),
            None => Ok(InstanceState::Stopped),
        }
    }

    async fn put_state(&self, spec: &InstanceSpec, body: Value, patience: Duration) -> Result<(), ApiError> {
        let path = format!("{}/state", path_of(spec));
        self.client.operate(Method::PUT, &path, Some(&body), patience).await.map(drop)
    }

    /// Does something that Incus refuses while it does something else to the same instance: if it refuses, waits for the
    /// other work and tries once more.
    async fn settled<F, T>(&self, spec: &InstanceSpec, patience: Duration, act: impl Fn() -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let refusal = match act().await {
            Err(refusal @ ApiError::Refused { .. }) => refusal,
            other => return other,
        };
        let Some(other) = self.client.underway(&spec.key.daemon_name()).await? else { return Err(refusal) };
        let waited_for = format!("Incus's operation {:?}", other.description);
        match self.client.wait(&other.id, &waited_for, patience).await {
            // However it ended, and also if it is gone already: what counts is how things are now.
            Ok(_) | Err(ApiError::Refused { .. } | ApiError::NotFound(_)) => act().await,
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl Runtime for IncusRuntime {
    fn name(&self) -> &'static str {
        NAME
    }

    fn isolates(&self) -> bool {
        true
    }

    async fn look(&self, spec: &InstanceSpec) -> Result<InstanceState, RuntimeError> {
        self.prepared().await?;
        match self.find(spec).await? {
            None => Ok(InstanceState::Absent),
            Some(found) => self.state_of(&found, spec),
        }
    }

    async fn list(&self) -> Result<Vec<Key>, RuntimeError> {
        self.prepared().await?;
        Ok(self.all().await?.iter().filter_map(Found::key).collect())
    }

    async fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        self.prepared().await?;
        let name = spec.key.daemon_name();
        let body = wanted::creation(spec, &self.config);
        let act = || self.client.operate(Method::POST, "/1.0/instances", Some(&body), CREATE);
        let refusal = match self.settled(spec, CREATE, act).await {
            Ok(_) => return Ok(()),
            Err(error @ (ApiError::Refused { .. } | ApiError::NotFound(_))) => error,
            Err(error) => return Err(failure("create", &name, error)),
        };
        // Whether it was refused because there is one cannot be told from the answer; looking tells.
        let why = match self.look(spec).await? {
            InstanceState::Stopped | InstanceState::Running { .. } => return Ok(()),
            InstanceState::HalfMade { why } => format!("one exists that differs: {why}"),
            InstanceState::Absent => self.explain(refusal).await,
        };
        Err(RuntimeError::Refused { operation: "create", instance: name, why })
    }

    async fn start(&self, spec: &InstanceSpec) -> Result<String, RuntimeError> {
        let name = spec.key.daemon_name();
        let refused = |why: String| RuntimeError::Refused { operation: "start", instance: name.clone(), why };
        match self.look(spec).await? {
            InstanceState::Running { incarnation } => return Ok(incarnation),
            InstanceState::Absent => return Err(refused("there is none".to_owned())),
            InstanceState::HalfMade { why } => return Err(refused(why)),
            InstanceState::Stopped => {}
        }
        // What the console kept of an earlier life is not this one's last words.
        let path = path_of(spec);
        let admission = self.admit(&spec.key, *spec.address.ip());
        let (admitted, ()) = tokio::join!(admission, words::forget(&self.client, &path));
        admitted?;
        let mut outcome = self.try_start(spec).await;
        if outcome.is_err() && self.swept(spec).await? {
            outcome = self.try_start(spec).await;
        }
        match (self.look(spec).await?, outcome) {
            (InstanceState::Running { incarnation }, _) => Ok(incarnation),
            (_, Err(error)) => Err(failure("start", &name, error)),
            (_, Ok(())) => {
                let log = self.last_words(spec).await;
                Err(RuntimeError::Exited { instance: name, status: "it stopped".to_owned(), log })
            }
        }
    }

    async fn stop(&self, spec: &InstanceSpec, bound: StopBound) -> Result<(), RuntimeError> {
        self.prepared().await?;
        let name = spec.key.daemon_name();
        if self.is_down(spec).await? {
            return Ok(());
        }
        if let StopBound::Graceful(drain) = bound {
            let body = json!({"action": "stop", "timeout": drain.as_secs().max(1), "force": false});
            let begun = Instant::now();
            let outcome = self.put_state(spec, body, drain + STOP_OVERHEAD).await;
            if let Err(error) = outcome {
                tracing::debug!(instance = name, %error, after = ?begun.elapsed(), "no graceful stop");
            }
            if self.is_down(spec).await? {
                return Ok(());
            }
        }
        let act = || self.put_state(spec, json!({"action": "stop", "force": true}), FORCE);
        let outcome = self.settled(spec, FORCE, act).await;
        match (self.goes_down(spec).await?, outcome) {
            (true, _) => Ok(()),
            (false, Err(error)) => Err(failure("stop", &name, error)),
            (false, Ok(())) => {
                let why = "it runs again: somebody else started it".to_owned();
                Err(RuntimeError::Refused { operation: "stop", instance: name, why })
            }
        }
    }

    async fn destroy(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        if self.find(spec).await?.is_some_and(|found| is_up(found.status_code)) {
            let why = "it runs; stop it first".to_owned();
            return Err(RuntimeError::Refused { operation: "destroy", instance: spec.key.daemon_name(), why });
        }
        let path = path_of(spec);
        let act = || self.client.operate(Method::DELETE, &path, None, DELETE);
        match self.settled(spec, DELETE, act).await {
            Ok(_) | Err(ApiError::NotFound(_)) => Ok(()),
            Err(error) => Err(failure("destroy", &spec.key.daemon_name(), error)),
        }
    }

    async fn last_words(&self, spec: &InstanceSpec) -> String {
        words::last(&self.client, &path_of(spec)).await
    }

    fn events(&self) -> broadcast::Receiver<InstanceEvent> {
        self.events.subscribe()
    }
}

impl IncusRuntime {
    async fn try_start(&self, spec: &InstanceSpec) -> Result<(), ApiError> {
        let act = || async {
            let found: Found = self.client.get(&path_of(spec)).await?;
            let action = if found.status_code == status::FROZEN { "unfreeze" } else { "start" };
            self.put_state(spec, json!({"action": action, "timeout": START.as_secs()}), START).await
        };
        self.settled(spec, START, act).await
    }

    /// After a start that failed: whether it, or an earlier one, had left its interface behind, which is now gone.
    async fn swept(&self, spec: &InstanceSpec) -> Result<bool, RuntimeError> {
        let name = spec.key.daemon_name();
        let busy = self.client.underway(&name).await.map_err(|error| failure("start", &name, error))?.is_some();
        // An instance that runs, or is being started by somebody else, needs its interface.
        if busy || !self.is_down(spec).await? {
            return Ok(false);
        }
        self.network.clear(*spec.address.ip()).map_err(|error| closed("start", &name, &error))
    }

    async fn is_down(&self, spec: &InstanceSpec) -> Result<bool, RuntimeError> {
        Ok(self.find(spec).await?.is_none_or(|found| found.status_code == status::STOPPED))
    }

    /// Whether it is down, or is so in a moment: of one that is dying by itself Incus says in one breath that it runs and
    /// that it cannot be stopped.
    async fn goes_down(&self, spec: &InstanceSpec) -> Result<bool, RuntimeError> {
        let deadline = Instant::now() + DYING;
        loop {
            let down = self.is_down(spec).await?;
            if down || Instant::now() >= deadline {
                return Ok(down);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Why a creation was refused, with what to do where we know it.
    async fn explain(&self, refusal: ApiError) -> String {
        let alias = format!("/1.0/images/aliases/{}", self.config.image);
        match self.client.get::<Value>(&alias).await {
            Err(ApiError::NotFound(_)) => {
                format!("there is no image {:?}; run `kiln image build`", self.config.image)
            }
            _ => refusal.to_string(),
        }
    }
}

/// A client of an Incus that has what Kiln needs, in a project that is there; for making the image.
pub(crate) async fn ready(config: &IncusConfig) -> Result<Client, RuntimeError> {
    prepare::check_names(config)?;
    let client = Client::new(&config.socket, &config.project).map_err(|e| failure("connect to", &config.project, e))?;
    prepare::prepare(&client, config).await?;
    Ok(client)
}

fn path_of(spec: &InstanceSpec) -> String {
    format!("/1.0/instances/{}", spec.key.daemon_name())
}

/// One that is on its way down still holds its builds and its volume.
fn is_up(code: u16) -> bool {
    matches!(code, status::RUNNING | status::READY | status::THAWED | status::STOPPING)
}

fn failure(operation: &'static str, instance: &str, error: ApiError) -> RuntimeError {
    let instance = instance.to_owned();
    match error {
        ApiError::Unreachable { socket, source } => RuntimeError::Unavailable {
            runtime: NAME,
            why: format!("no answer on {socket}: {}", in_one_line(&source)),
            remedy:
                "see that Incus is installed and runs (`systemctl status incus`), and that kilnd may use its socket"
                    .to_owned(),
        },
        ApiError::Garbled { .. } => RuntimeError::Unavailable {
            runtime: NAME,
            why: error.to_string(),
            remedy: "see whether it is Incus 6.0 or newer that listens there".to_owned(),
        },
        ApiError::TimedOut { waited_for, after } => RuntimeError::TimedOut { operation, instance, waited_for, after },
        ApiError::NotFound(_) | ApiError::Refused { .. } => {
            RuntimeError::Refused { operation, instance, why: error.to_string() }
        }
    }
}

/// Without its network policy an instance is not started (K7).
fn closed(operation: &'static str, instance: &str, error: &NetworkError) -> RuntimeError {
    let why = format!("its network policy is not in force: {}", in_one_line(error));
    RuntimeError::Refused { operation, instance: instance.to_owned(), why }
}
