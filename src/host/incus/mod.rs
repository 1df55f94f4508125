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
//! * One that is only older (its image, its limits, its name servers, its pool) may be started, and says so.
//! * How far it may reach is in force, and verified, before it starts ([`super::network`]).
//! * Incus being away (it restarts in a minute) is [`RuntimeError::Unavailable`]; instances live on meanwhile.
//! * Everything is in an Incus project of our own, with its own images and profiles, restricted to unprivileged
//!   containers. Nothing outside that project is looked at or changed.
//!
//! [`wanted`] says what an instance is made of, [`client`] speaks to Incus, [`events`] hears that something changed.
//!
//! What must not be here: when to start or stop anything; how the image is made (that is [`crate::image`]).

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kiln_domain::Key;
use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{OnceCell, broadcast};
use tokio_util::task::AbortOnDropHandle;

use super::network::{Network, NetworkError, PROOF_DEADLINE, ProofError};
use super::pressure;
use super::{Change, FoundInstance, InstanceEvent, InstanceSpec, InstanceState, Runtime, RuntimeError, StopBound};
use crate::causes::in_one_line;
use client::{ApiError, Bounds, Client, status};
use image::Alias;
use wanted::Found;

pub(crate) mod client;
mod events;
mod guard;
mod image;
mod prepare;
mod wanted;
mod words;

#[cfg(test)]
mod hostile_tests;
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
/// Where cgroup v2 is mounted: alone, or beside v1 as systemd's hybrid layout has it.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
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
    /// Untrusted instances each have user ids of their own on this host; where Incus has enough of them to give.
    pub own_ids: bool,
}

impl IncusConfig {
    pub fn new(socket: PathBuf, pool: String) -> Self {
        Self {
            socket,
            project: "kiln".to_owned(),
            pool,
            image: "kiln".to_owned(),
            resolvers: Vec::new(),
            own_ids: true,
        }
    }
}

/// Instances in Incus.
pub struct IncusRuntime {
    config: IncusConfig,
    client: Client,
    network: Arc<Network>,
    image: Arc<Alias>,
    /// Set once the project is there and the table is in force.
    prepared: Arc<OnceCell<()>>,
    events: broadcast::Sender<InstanceEvent>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

impl IncusRuntime {
    /// Connects when first needed, so that Kiln can start while Incus is away; events are followed from now on.
    /// Must be called within a tokio runtime.
    pub fn new(config: IncusConfig, network: Arc<Network>) -> Result<Self, RuntimeError> {
        Self::with_bounds(config, network, Bounds::default())
    }

    fn with_bounds(config: IncusConfig, network: Arc<Network>, bounds: Bounds) -> Result<Self, RuntimeError> {
        prepare::check_names(&config)?;
        let client = Client::with_bounds(&config.socket, &config.project, bounds)
            .map_err(|e| failure("connect to", &config.project, e))?;
        let (events, _) = broadcast::channel(EVENTS);
        let image = Arc::new(Alias::new(client.clone(), &config.image));
        let follower =
            events::follow(config.socket.clone(), config.project.clone(), Arc::clone(&image), events.clone());
        let follower = AbortOnDropHandle::new(tokio::spawn(follower));
        let prepared = Arc::new(OnceCell::new());
        let guard = guard::stand(client.clone(), Arc::clone(&network), Arc::clone(&prepared));
        let tasks = [follower, AbortOnDropHandle::new(tokio::spawn(guard))];
        Ok(Self { config, client, network, image, prepared, events, _tasks: tasks })
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
            guard::put_in_force(&self.client, &self.network).await
        };
        self.prepared.get_or_try_init(|| preparing).await.copied()
    }

    async fn find(&self, operation: &'static str, name: &str) -> Result<Option<Found>, RuntimeError> {
        let path = path_of(name);
        match self.client.get::<Found>(&path).await {
            Ok(found) if found.name == name => Ok(Some(found)),
            Ok(found) => {
                let what = client::presentable(&format!("the instance {}", found.name));
                Err(failure(operation, name, ApiError::Garbled { path, what }))
            }
            Err(ApiError::NotFound(_)) => Ok(None),
            Err(error) => Err(failure(operation, name, error)),
        }
    }

    async fn state_of(&self, found: &Found, spec: &InstanceSpec) -> Result<InstanceState, RuntimeError> {
        let up = is_up(found.status_code);
        // A frozen one is as good as stopped: starting it thaws it.
        let down = matches!(found.status_code, status::STOPPED | status::STARTING | status::FROZEN | status::FREEZING);
        if !up && !down {
            let remedy = format!("see what `incus info {} --project {}` says", found.name, self.config.project);
            let said = client::presentable(&found.status);
            let why = format!("it reports {} as {said:?} (code {})", found.name, found.status_code);
            return Err(RuntimeError::Unavailable { runtime: NAME, why, remedy });
        }
        if up && found.last_used_at.is_empty() {
            let what = "an instance that runs and was never started".to_owned();
            return Err(failure("look at", &found.name, ApiError::Garbled { path: path_of(&found.name), what }));
        }
        let mut compared = found.compare(spec, &self.config, self.image.fingerprint().await.as_deref());
        Ok(match compared.wrong {
            wrong if up => {
                compared.outdated.extend(wrong.map(|_| Change::Make));
                InstanceState::Running { incarnation: found.last_used_at.clone(), outdated: compared.outdated }
            }
            Some(why) => InstanceState::HalfMade { why },
            None => InstanceState::Stopped { outdated: compared.outdated },
        })
    }

    async fn put_state(&self, name: &str, body: Value, patience: Duration) -> Result<(), ApiError> {
        let path = format!("{}/state", path_of(name));
        self.client.operate(Method::PUT, &path, Some(&body), patience).await.map(drop)
    }

    /// Does something that Incus refuses while it does something else to the same instance: if it refuses, waits for the
    /// other work and tries once more.
    async fn settled<F, T>(&self, name: &str, patience: Duration, act: impl Fn() -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let refusal = match act().await {
            Err(refusal @ ApiError::Refused { .. }) => refusal,
            other => return other,
        };
        let Some(other) = self.client.underway(name).await? else { return Err(refusal) };
        let waited_for = client::presentable(&format!("Incus's operation {}", other.description));
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
        match self.find("look at", &spec.key.daemon_name()).await? {
            None => Ok(InstanceState::Absent),
            Some(found) => self.state_of(&found, spec).await,
        }
    }

    async fn found(&self) -> Result<Vec<FoundInstance>, RuntimeError> {
        self.prepared().await?;
        let mut all: Vec<_> = guard::all(&self.client).await?.into_iter().map(describe).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    async fn create(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        self.prepared().await?;
        let name = spec.key.daemon_name();
        let body = wanted::creation(spec, &self.config);
        let act = || self.client.operate(Method::POST, "/1.0/instances", Some(&body), CREATE);
        let refusal = match self.settled(&name, CREATE, act).await {
            Ok(_) => return Ok(()),
            Err(error @ (ApiError::Refused { .. } | ApiError::NotFound(_) | ApiError::Lost { .. })) => error,
            Err(error) => return Err(failure("create", &name, error)),
        };
        // Whether it was refused because there is one cannot be told from the answer; looking tells.
        let why = match self.look(spec).await? {
            InstanceState::Running { .. } => return Ok(()),
            InstanceState::Stopped { outdated } if outdated.is_empty() => return Ok(()),
            InstanceState::Stopped { outdated } => format!("one exists that is older in {}", in_words(&outdated)),
            InstanceState::HalfMade { why } => format!("one exists that differs: {why}"),
            InstanceState::Absent => return Err(self.explain("create", &name, refusal).await),
        };
        Err(RuntimeError::Refused { operation: "create", instance: name, why })
    }

    async fn start(&self, spec: &InstanceSpec) -> Result<String, RuntimeError> {
        self.prepared().await?;
        let name = spec.key.daemon_name();
        let refused = |why: String| RuntimeError::Refused { operation: "start", instance: name.clone(), why };
        // Somebody waits. To say in which lane an address is does no harm where nothing is started then.
        let admission = guard::admit(&self.network, &spec.key, *spec.address.ip(), spec.lane);
        let (found, admitted) = tokio::join!(self.find("look at", &name), admission);
        let found = found?.ok_or_else(|| refused("there is none".to_owned()))?;
        match self.state_of(&found, spec).await? {
            InstanceState::Running { incarnation, .. } => return Ok(incarnation),
            InstanceState::HalfMade { why } => return Err(refused(why)),
            InstanceState::Stopped { .. } | InstanceState::Absent => {}
        }
        admitted?;
        if !found.last_used_at.is_empty() {
            // What the console kept of an earlier life is not this one's last words.
            words::forget(&self.client, &path_of(&name)).await;
        }
        let mut outcome = self.try_start(&name, found.status_code).await;
        if outcome.is_err() && self.swept(spec).await? {
            outcome = self.try_start(&name, status::STOPPED).await;
        }
        match (self.look(spec).await?, outcome) {
            (InstanceState::Running { incarnation, .. }, _) => Ok(incarnation),
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
            let outcome = self.put_state(&name, body, drain + STOP_OVERHEAD).await;
            if let Err(error) = outcome {
                tracing::debug!(instance = name, %error, after = ?begun.elapsed(), "no graceful stop");
            }
            if self.is_down(spec).await? {
                return Ok(());
            }
        }
        let act = || self.put_state(&name, json!({"action": "stop", "force": true}), FORCE);
        let outcome = self.settled(&name, FORCE, act).await;
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
        self.delete(&spec.key.daemon_name()).await?;
        // Also of one that was gone already: the end of an earlier removal may be missing.
        self.dismiss(*spec.address.ip()).await;
        Ok(())
    }

    async fn destroy_found(&self, name: &str) -> Result<(), RuntimeError> {
        // It becomes part of a URL. Incus itself allows no others.
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            let why = "no instance has such a name".to_owned();
            return Err(RuntimeError::Refused { operation: "destroy", instance: format!("{name:?}"), why });
        }
        self.prepared().await?;
        let address = self.find("destroy", name).await?.filter(|found| found.key().is_some()).and_then(|f| f.address());
        self.delete(name).await?;
        if let Some(address) = address {
            self.dismiss(address).await;
        }
        Ok(())
    }

    async fn cpu_time(&self, spec: &InstanceSpec) -> Result<Option<Duration>, RuntimeError> {
        self.prepared().await?;
        let name = spec.key.daemon_name();
        match self.client.get::<Usage>(&format!("{}/state", path_of(&name))).await {
            Ok(usage) => Ok(usage.cpu_time()),
            Err(ApiError::NotFound(_)) => Ok(None),
            Err(error) => Err(failure("measure", &name, error)),
        }
    }

    fn pressure(&self, key: &Key) -> Option<f64> {
        let group = cgroup_of(&self.config.project, &key.daemon_name());
        CGROUPS.iter().find_map(|root| pressure::of_cgroup(&Path::new(root).join(&group)))
    }

    async fn prove_isolation(&self, spec: &InstanceSpec) -> Result<(), RuntimeError> {
        const OPERATION: &str = "prove the isolation of";
        self.prepared().await?;
        let name = spec.key.daemon_name();
        let process: Process = match self.client.get(&format!("{}/state", path_of(&name))).await {
            Ok(process) => process,
            Err(error) => return Err(failure(OPERATION, &name, error)),
        };
        let refused = |why: String| RuntimeError::Refused { operation: OPERATION, instance: name.clone(), why };
        // Not positive where there is none.
        let pid = u32::try_from(process.pid).ok().filter(|pid| *pid > 0 && is_up(process.status_code));
        let pid = pid.ok_or_else(|| refused("it does not run".to_owned()))?;
        match self.network.prove(pid, spec.address, spec.lane).await {
            Ok(()) => Ok(()),
            Err(ProofError::Reached(what)) => {
                Err(RuntimeError::NotIsolated { instance: name, reached: format!("from inside it reached {what}") })
            }
            Err(error @ ProofError::Impossible { .. }) => Err(refused(in_one_line(&error))),
            Err(ProofError::TimedOut) => Err(RuntimeError::TimedOut {
                operation: OPERATION,
                instance: name,
                waited_for: "the connections that it must not get".to_owned(),
                after: PROOF_DEADLINE,
            }),
        }
    }

    async fn last_words(&self, spec: &InstanceSpec) -> String {
        words::last(&self.client, &path_of(&spec.key.daemon_name())).await
    }

    fn events(&self) -> broadcast::Receiver<InstanceEvent> {
        self.events.subscribe()
    }
}

impl IncusRuntime {
    /// After a removal. What stays admitted opens nothing by itself, and the next start with this address says anew what it
    /// is: no reason to call the removal failed.
    async fn dismiss(&self, address: Ipv4Addr) {
        if !self.prepared.initialized() {
            return;
        }
        if let Err(error) = self.network.dismiss(address).await {
            tracing::warn!(%address, %error, "the address of a removed instance stays admitted");
        }
    }

    async fn delete(&self, name: &str) -> Result<(), RuntimeError> {
        const OPERATION: &str = "destroy";
        if self.find(OPERATION, name).await?.is_some_and(|found| is_up(found.status_code)) {
            let why = "it runs; stop it first".to_owned();
            return Err(RuntimeError::Refused { operation: OPERATION, instance: name.to_owned(), why });
        }
        let path = path_of(name);
        let act = || self.client.operate(Method::DELETE, &path, None, DELETE);
        match self.settled(name, DELETE, act).await {
            Ok(_) | Err(ApiError::NotFound(_)) => Ok(()),
            Err(ApiError::Lost { .. }) if self.find(OPERATION, name).await?.is_none() => Ok(()),
            Err(error) => Err(failure(OPERATION, name, error)),
        }
    }

    /// Of one that was just seen with this status.
    async fn try_start(&self, name: &str, seen: u16) -> Result<(), ApiError> {
        let seen = std::sync::Mutex::new(Some(seen));
        let act = || async {
            let known = seen.lock().unwrap_or_else(PoisonError::into_inner).take();
            let code = match known {
                Some(code) => code,
                None => self.client.get::<Found>(&path_of(name)).await?.status_code,
            };
            let action = if code == status::FROZEN { "unfreeze" } else { "start" };
            self.put_state(name, json!({"action": action, "timeout": START.as_secs()}), START).await
        };
        self.settled(name, START, act).await
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
        Ok(self
            .find("look at", &spec.key.daemon_name())
            .await?
            .is_none_or(|found| found.status_code == status::STOPPED))
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

    /// Why a creation came to nothing, with what to do where we know it.
    async fn explain(&self, operation: &'static str, name: &str, error: ApiError) -> RuntimeError {
        let alias = format!("/1.0/images/aliases/{}", self.config.image);
        if matches!(self.client.get::<Value>(&alias).await, Err(ApiError::NotFound(_))) {
            let why = format!("there is no image {:?}; run `kiln image build`", self.config.image);
            return RuntimeError::Refused { operation, instance: name.to_owned(), why };
        }
        failure(operation, name, error)
    }
}

/// A client of an Incus that has what Kiln needs, in a project that is there; for making the image.
pub(crate) async fn ready(config: &IncusConfig) -> Result<Client, RuntimeError> {
    prepare::check_names(config)?;
    let client = Client::new(&config.socket, &config.project).map_err(|e| failure("connect to", &config.project, e))?;
    prepare::prepare(&client, config).await?;
    Ok(client)
}

/// Where LXC puts what an instance runs, as Incus names its instances to it: those of the project `default` by their names alone.
fn cgroup_of(project: &str, name: &str) -> String {
    if project == "default" { format!("lxc.payload.{name}") } else { format!("lxc.payload.{project}_{name}") }
}

fn path_of(name: &str) -> String {
    format!("/1.0/instances/{name}")
}

fn describe(found: Found) -> FoundInstance {
    let running =
        is_up(found.status_code) || matches!(found.status_code, status::STARTING | status::FREEZING | status::FROZEN);
    FoundInstance { key: found.key(), properties: found.properties(), running, name: found.name }
}

/// The first process of an instance, by the host's number.
#[derive(Deserialize)]
struct Process {
    status_code: u16,
    #[serde(default)]
    pid: i64,
}

/// What Incus says of an instance at work.
#[derive(Deserialize)]
struct Usage {
    status_code: u16,
    #[serde(default)]
    cpu: CpuUsage,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct CpuUsage {
    /// Nanoseconds; not positive where Incus could not find out.
    usage: i64,
}

impl Usage {
    fn cpu_time(&self) -> Option<Duration> {
        let used = u64::try_from(self.cpu.usage).ok().filter(|used| *used > 0)?;
        is_up(self.status_code).then(|| Duration::from_nanos(used))
    }
}

fn in_words(changes: &[Change]) -> String {
    changes.iter().map(Change::to_string).collect::<Vec<_>>().join(", ")
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
        ApiError::Lost { .. } => RuntimeError::Unavailable {
            runtime: NAME,
            why: error.to_string(),
            remedy: "if it was not restarted, see `journalctl -u incus`".to_owned(),
        },
        // What it says of itself while it starts and while it ends.
        ApiError::Refused { code: 503, .. } => RuntimeError::Unavailable {
            runtime: NAME,
            why: error.to_string(),
            remedy: "wait until it has started, or see `journalctl -u incus`".to_owned(),
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
