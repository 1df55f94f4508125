//! [`Projects`]: how everybody else asks for a daemon.

use std::collections::HashMap;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::lease::LeasePolicy;
use kiln_domain::{AddressPool, BuildSpec, Key, Lease, LeaseToken, Policy, ProjectRecord};
use kiln_wire::{Credential, LeaseView, ProjectView, RouteResponse};
use thiserror::Error;
use tokio::sync::{broadcast, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::answer::{Addressing, Routed};
use super::effects::{Effects, StepDeadlines};
use super::messages::{Message, Refusal, Releasing, StopRefusal};
use super::registry::{Registry, Shared, WorkerHandle};
use crate::clock::{Clock, rfc3339};
use crate::entropy::{Entropy, NoEntropy};
use crate::gateway::{Directory, Door, NoDoor};
use crate::host::InstanceEvent;
use crate::pki::{Pki, PkiError};
use crate::store::{Store, StoreError};

/// A worker that goes just as a message arrives loses it; asking again finds or makes the next one. Twice in a row is
/// already unlikely.
const TRIES: usize = 5;

pub struct ProjectsConfig {
    pub policy: Policy,
    pub deadlines: StepDeadlines,
    pub addresses: AddressPool,
    pub addressing: Addressing,
    /// The daemons' port, on each daemon's own address.
    pub daemon_port: u16,
    /// How long `/route` waits for a daemon.
    pub route_wait: Duration,
    /// How long a parked gateway connection waits; below the 20 s that buildx itself waits for a daemon.
    pub connect_wait: Duration,
    /// Whether untrusted builds can be kept apart on this host, and why not.
    pub untrusted: Result<(), String>,
}

/// What a build asks for besides its identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RouteOptions {
    /// It runs code that nobody has reviewed.
    pub untrusted: bool,
    /// It wants a credential in the answer.
    pub credential: bool,
}

#[derive(Debug, Error)]
pub enum RouteError {
    #[error("untrusted builds are refused: {0}")]
    Untrusted(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{text}")]
    Failed { text: String, retryable: bool, timed_out: bool },
    #[error("gave up after {} s; it is {phase}, because {reason}", .after.as_secs())]
    NotReady { after: Duration, phase: String, reason: String },
    #[error("cannot make a credential for {key}")]
    Credential {
        key: Key,
        #[source]
        source: PkiError,
    },
    #[error(transparent)]
    Entropy(#[from] NoEntropy),
    #[error("kilnd is shutting down")]
    Closing,
}

impl From<Refusal> for RouteError {
    fn from(refusal: Refusal) -> Self {
        Self::Failed { text: refusal.text, retryable: refusal.retryable, timed_out: refusal.timed_out }
    }
}

#[derive(Debug, Error)]
pub enum StopError {
    #[error("there is no project {0}")]
    Unknown(Key),
    #[error("{key} is busy: {need}")]
    Busy { key: Key, need: String },
    #[error("{text}")]
    Failed { text: String },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("gave up after {} s waiting for {key} to stop", .after.as_secs())]
    TimedOut { key: Key, after: Duration },
}

/// A cheap handle on all projects.
#[derive(Clone)]
pub struct Projects {
    shared: Arc<Shared>,
    registry: Registry,
    config: Arc<ProjectsConfig>,
    pki: Pki,
    entropy: Arc<dyn Entropy>,
}

/// What the heart stands on; tests bring their own.
pub struct Foundations {
    pub store: Store,
    pub effects: Arc<dyn Effects>,
    pub pki: Pki,
    pub clock: Arc<dyn Clock>,
    pub entropy: Arc<dyn Entropy>,
}

impl Projects {
    pub fn new(config: ProjectsConfig, foundations: Foundations) -> Self {
        let Foundations { store, effects, pki, clock, entropy } = foundations;
        let (policy, deadlines, addresses) = (config.policy, config.deadlines, config.addresses);
        let shared = Shared { store, effects, clock, policy, deadlines, addresses };
        Self { shared: Arc::new(shared), registry: Registry::default(), config: Arc::new(config), pki, entropy }
    }

    /// Takes up what was going on when Kiln last ran, and listens to the runtime until `shutdown` in a task of its own.
    ///
    /// To be awaited before the first request is answered: it may be the end of a build whose lease was made before.
    pub async fn start(&self, shutdown: CancellationToken) -> Result<JoinHandle<()>, StoreError> {
        // Before the first look, so that nothing that happens after it goes unheard.
        let events = self.shared.effects.events();
        for record in self.shared.store.active_projects().await? {
            self.registry.spawn(&self.shared, &record.key);
        }
        let projects = self.clone();
        Ok(tokio::spawn(async move {
            shutdown.run_until_cancelled(projects.listen(events)).await;
        }))
    }

    async fn listen(&self, mut events: broadcast::Receiver<InstanceEvent>) {
        loop {
            let workers = match events.recv().await {
                Ok(InstanceEvent::Changed(key)) => self.registry.get(&key).into_iter().collect(),
                Ok(InstanceEvent::Missed) | Err(broadcast::error::RecvError::Lagged(_)) => self.registry.all(),
                Err(broadcast::error::RecvError::Closed) => return,
            };
            for WorkerHandle { mailbox, .. } in workers {
                // A worker that has gone has nothing running.
                let _ = mailbox.send(Message::InstanceChanged).await;
            }
        }
    }

    /// A daemon that answers, and a lease on it that is on disk. Waits for the daemon if need be.
    pub async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Routed, RouteError> {
        self.check_lane(options.untrusted)?;
        let key = Key::of(&spec);
        let token = LeaseToken::from_random(self.entropy.token()?);
        for _ in 0..TRIES {
            let worker = self.worker(&key, &spec).await?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Route { spec: spec.clone(), token: token.hash(), reply }).await.is_err() {
                continue;
            }
            let granted = match self.wait(&worker, self.config.route_wait, answer).await? {
                Some(answer) => answer?,
                None => continue,
            };
            granted.durable.await?;
            let response = self.config.addressing.response(&key, Some(granted.warm));
            let routed = Routed { response, token, undelivered: granted.undelivered };
            let credential = if options.credential { Some(self.credential(&key).await?) } else { None };
            return Ok(routed.with_credential(credential));
        }
        Err(RouteError::Closing)
    }

    /// Brings a project's daemon up without waiting for it, and says whether it is up already.
    pub async fn prewarm(&self, spec: BuildSpec, untrusted: bool) -> Result<RouteResponse, RouteError> {
        // An untrusted caller has no business with the trusted daemon (W5).
        self.check_lane(untrusted)?;
        let key = Key::of(&spec);
        for _ in 0..TRIES {
            let worker = self.worker(&key, &spec).await?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Prewarm { spec: spec.clone(), reply }).await.is_err() {
                continue;
            }
            if let Ok(answer) = answer.await {
                return Ok(self.config.addressing.response(&key, answer?));
            }
        }
        Err(RouteError::Closing)
    }

    /// Releases a lease; `false` if there is no such lease at that project. Costs nothing for what is unknown.
    pub async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, StoreError> {
        let Some(worker) = self.registry.get(key) else { return Ok(false) };
        let (reply, answer) = oneshot::channel();
        let message = Message::Complete { token: token.hash(), why: "its client said so", reply: Some(reply) };
        if worker.mailbox.send(message).await.is_err() {
            return Ok(false);
        }
        // A worker that went away had no lease left.
        match answer.await {
            Ok(Some(Releasing { lease, removed })) => {
                let released = removed.await;
                if released.is_err() {
                    self.keep(key, lease).await;
                }
                released
            }
            Ok(None) | Err(_) => Ok(false),
        }
    }

    /// Whoever is told that a release failed tries again, and must not hear then that there is nothing to release.
    async fn keep(&self, key: &Key, lease: Lease) {
        if let Ok(Some(worker)) = self.registry.worker(&self.shared, key, None).await {
            // One that has gone meanwhile is followed by one that reads the lease from the disk.
            let _ = worker.mailbox.send(Message::StillHeld { lease }).await;
        }
    }

    pub async fn stop(&self, key: &Key) -> Result<(), StopError> {
        let deadlines = self.shared.deadlines;
        let after = deadlines.observe + deadlines.of(kiln_domain::Step::StopInstance(kiln_domain::plan::Stop::Force));
        for _ in 0..TRIES {
            let worker = self.registry.worker(&self.shared, key, None).await?;
            let worker = worker.ok_or_else(|| StopError::Unknown(key.clone()))?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Stop { reply }).await.is_err() {
                continue;
            }
            match tokio::time::timeout(after, answer).await {
                Ok(Ok(Ok(()))) => return Ok(()),
                Ok(Ok(Err(StopRefusal::Busy(need)))) => return Err(StopError::Busy { key: key.clone(), need }),
                Ok(Ok(Err(StopRefusal::Failed(text)))) => return Err(StopError::Failed { text }),
                Ok(Err(_gone)) => {}
                Err(_elapsed) => return Err(StopError::TimedOut { key: key.clone(), after }),
            }
        }
        Err(StopError::TimedOut { key: key.clone(), after })
    }

    pub async fn list(&self) -> Result<Vec<ProjectView>, StoreError> {
        let records = self.shared.store.projects().await?;
        let mut leases: HashMap<Key, Vec<Lease>> = HashMap::new();
        for (key, lease) in self.shared.store.all_leases().await? {
            leases.entry(key).or_default().push(lease);
        }
        Ok(records.iter().map(|r| self.view(r, leases.get(&r.key).map_or(&[], Vec::as_slice))).collect())
    }

    pub async fn show(&self, key: &Key) -> Result<Option<ProjectView>, StoreError> {
        let Some(record) = self.shared.store.project(key).await? else { return Ok(None) };
        let leases = self.shared.store.leases(key).await?;
        Ok(Some(self.view(&record, &leases)))
    }

    /// How many projects have a worker now.
    pub fn workers(&self) -> usize {
        self.registry.all().len()
    }

    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    async fn worker(&self, key: &Key, spec: &BuildSpec) -> Result<WorkerHandle, RouteError> {
        let worker = self.registry.worker(&self.shared, key, Some(spec)).await?;
        worker.ok_or(RouteError::Closing)
    }

    /// The worker's answer; `None` if the worker went away. The end of the wait says where the project stands.
    async fn wait<T>(
        &self,
        worker: &WorkerHandle,
        after: Duration,
        answer: oneshot::Receiver<T>,
    ) -> Result<Option<T>, RouteError> {
        match tokio::time::timeout(after, answer).await {
            Ok(answer) => Ok(answer.ok()),
            Err(_elapsed) => {
                let status = worker.status.borrow().clone();
                let standing = || status.phase.map_or_else(|| "not looked at".to_owned(), |phase| phase.to_string());
                let phase = status.step.map_or_else(standing, |step| format!("busy with: {step}"));
                Err(RouteError::NotReady { after, phase, reason: status.reason })
            }
        }
    }

    fn check_lane(&self, untrusted: bool) -> Result<(), RouteError> {
        match &self.config.untrusted {
            Err(why) if untrusted => Err(RouteError::Untrusted(why.clone())),
            _ => Ok(()),
        }
    }

    async fn credential(&self, key: &Key) -> Result<Credential, RouteError> {
        let now = self.shared.clock.now();
        let not_after = now.plus(self.config.policy.lease.max_build_age);
        let (pki, of) = (self.pki.clone(), key.clone());
        let issued = tokio::task::spawn_blocking(move || pki.issue_credential(&of, now, not_after)).await;
        let issued = issued.map_err(|_| RouteError::Closing)?;
        let crate::pki::Credential { ca, cert, key: private, expires } =
            issued.map_err(|source| RouteError::Credential { key: key.clone(), source })?;
        Ok(Credential { ca, cert, key: private, expires: rfc3339(expires) })
    }

    fn view(&self, record: &ProjectRecord, leases: &[Lease]) -> ProjectView {
        let worker = self.registry.get(&record.key);
        let status = worker.as_ref().map(|worker| worker.status.borrow().clone());
        let phase = status.as_ref().and_then(|status| status.phase.as_ref()).unwrap_or(&record.phase);
        let connections = worker.as_ref().map_or(0, |worker| worker.connections.count());
        ProjectView {
            key: record.key.to_string(),
            repo: record.spec.repo.to_string(),
            name: record.spec.name.clone(),
            target: record.spec.target.clone(),
            arch: record.spec.arch.to_string(),
            phase: phase.name().to_owned(),
            reason: status.map(|status| status.reason).unwrap_or_default(),
            generation: record.generation.get(),
            address: SocketAddrV4::new(record.address, self.config.daemon_port).to_string(),
            server_name: record.key.server_name(&self.config.addressing.domain),
            connections: connections as u64,
            leases: leases.iter().map(|lease| lease_view(lease, &self.config.policy.lease)).collect(),
            created: rfc3339(record.created),
            last_activity: rfc3339(record.last_activity),
            settings: None,
            pending: Vec::new(),
            queue: None,
        }
    }
}

#[async_trait]
impl Directory for Projects {
    async fn open(&self, key: &Key) -> Result<Door, NoDoor> {
        for _ in 0..TRIES {
            let worker = self.registry.worker(&self.shared, key, None).await;
            let worker = worker.map_err(|error| NoDoor::Unavailable(error.to_string()))?.ok_or(NoDoor::Unknown)?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Connect { reply }).await.is_err() {
                continue;
            }
            let answer = self.wait(&worker, self.config.connect_wait, answer).await;
            match answer.map_err(|error| NoDoor::Unavailable(error.to_string()))? {
                Some(Ok((warm, held))) => {
                    let address = SocketAddrV4::new(warm.address, self.config.daemon_port);
                    return Ok(Door { address, held: Box::new(held) });
                }
                Some(Err(refusal)) => return Err(NoDoor::Unavailable(refusal.text)),
                None => {}
            }
        }
        Err(NoDoor::Unavailable("kilnd is shutting down".to_owned()))
    }
}

fn lease_view(lease: &Lease, policy: &LeasePolicy) -> LeaseView {
    let expires = lease.expires(policy);
    LeaseView {
        id: lease.token.as_str().to_owned(),
        created: rfc3339(lease.created),
        renewed: rfc3339(lease.renewed),
        expires: rfc3339(expires),
        alive_until: rfc3339(expires.min(lease.renewed.plus(policy.grace))),
    }
}
