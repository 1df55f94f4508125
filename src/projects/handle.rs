//! [`Projects`]: how a build asks for a daemon.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::admission::AdmissionPolicy;
use kiln_domain::cache::{EvictionPolicy, FanOutPolicy, ForkBounds};
use kiln_domain::project::PullRequestError;
use kiln_domain::settings::HostSize;
use kiln_domain::{AddressPool, BuildSpec, Identity, Key, Lease, LeaseToken, Policy, Rules, Settings};
use kiln_wire::{Credential, RouteResponse};
use std::net::SocketAddrV4;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::admission::{Admission, QueueFigures};
use super::answer::{Addressing, Ready, Routed, Standing};
use super::effects::{Effects, StepDeadlines};
use super::fanout::{Spread, unless_away};
use super::forks::ComingForks;
use super::messages::{Granted, Message, Refusal, RefusalKind, Releasing, Renewing};
use super::registry::{Registry, Shared, WorkerHandle};
use super::trials::Trials;
use super::turned_away::TurnedAway;
use crate::clock::{Clock, rfc3339};
use crate::entropy::{Entropy, NoEntropy};
use crate::gateway::{Directory, Door, NoDoor};
use crate::metrics::{LeaseEnd, Metrics};
use crate::pki::{Pki, PkiError};
use crate::store::{NewEvent, Store, StoreError};

/// A worker that goes just as a message arrives loses it; asking again finds or makes the next one. Twice in a row is
/// already unlikely.
pub(super) const TRIES: usize = 5;

/// What the end of a copy takes, beyond the patience of whoever wants the next one: a stop, and freeing a volume.
const LEAVES_WITHIN: Duration = Duration::from_secs(15);

pub struct ProjectsConfig {
    pub policy: Policy,
    pub admission: AdmissionPolicy,
    pub eviction: EvictionPolicy,
    /// What counts for a project that says nothing else.
    pub defaults: Settings,
    pub rules: Rules,
    /// Beyond which no setting of a project may go.
    pub host_size: HostSize,
    pub deadlines: StepDeadlines,
    pub addresses: AddressPool,
    pub addressing: Addressing,
    /// The daemons' port, on each daemon's own address.
    pub daemon_port: u16,
    /// How long `/route` waits for a daemon.
    pub route_wait: Duration,
    /// How long a parked gateway connection waits; below the 20 s that buildx itself waits for a daemon.
    pub connect_wait: Duration,
    /// How long what was thrown away is kept.
    pub trash_kept: Duration,
    pub forks: ForkBounds,
    pub fan_out: FanOutPolicy,
    /// Whether untrusted builds can be kept apart on this host, and why not.
    pub untrusted: Result<(), String>,
}

impl ProjectsConfig {
    /// What stands in the documentation as defaults, for daemons at `addresses`.
    pub fn with_defaults(addresses: AddressPool, addressing: Addressing) -> Self {
        Self {
            policy: Policy::default(),
            admission: AdmissionPolicy::default(),
            eviction: EvictionPolicy::default(),
            defaults: Settings::default(),
            rules: Rules::default(),
            host_size: HostSize::default(),
            deadlines: StepDeadlines::default(),
            addresses,
            addressing,
            daemon_port: 8372,
            route_wait: Duration::from_mins(3),
            connect_wait: Duration::from_secs(16),
            trash_kept: Duration::from_hours(24 * 7),
            forks: ForkBounds::default(),
            fan_out: FanOutPolicy::default(),
            untrusted: Err("nothing keeps them apart here".to_owned()),
        }
    }
}

/// Whoever asks, as far as it was proven, in words. `None`: some client.
pub type Who = Option<Arc<str>>;

/// Who asks, as far as it decides on the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Caller {
    /// It runs code that nobody has reviewed.
    pub untrusted: bool,
    /// What names the pull request of an untrusted build for its forge; each has a fork of its own.
    pub pull_request: Option<String>,
    /// Where a project has several daemons, a branch goes where it went before.
    pub branch: Option<String>,
    /// For the journal.
    pub who: Who,
}

impl Caller {
    /// Of code that nobody has reviewed, and that does not say whose it is.
    pub fn untrusted() -> Self {
        Self { untrusted: true, ..Self::default() }
    }
}

/// What a build asks for besides its identity.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RouteOptions {
    pub caller: Caller,
    /// It wants a credential in the answer.
    pub credential: bool,
    /// How long to wait for a daemon that is not warm, and then to answer with the lease alone. `None`: as long as a
    /// route may wait, and then an error and no lease.
    pub wait: Option<Duration>,
    /// The lease of an earlier answer: it is renewed and goes on, and no other is made.
    pub resume: Option<LeaseToken>,
}

#[derive(Debug, Error)]
pub enum RouteError {
    #[error("untrusted builds are refused: {0}")]
    Untrusted(String),
    #[error(transparent)]
    PullRequest(#[from] PullRequestError),
    #[error("{text}")]
    TooManyForks { text: String },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{text}")]
    OtherIdentity { text: String },
    #[error("{text}")]
    Failed { text: String, retryable: bool, timed_out: bool },
    #[error("{live} builds hold {key} already, and {limit} may")]
    TooManyLeases { key: Key, live: usize, limit: usize },
    /// The host has no room for another daemon.
    #[error("{text}")]
    NotAdmitted { text: String },
    /// A disk or a volume is full.
    #[error("{text}")]
    NoRoom { text: String },
    #[error("gave up after {} s; it is {phase}, because {reason}", .after.as_secs())]
    NotReady { after: Duration, phase: String, reason: String, queue: Option<(usize, usize)> },
    #[error("there is no lease with this buildId any more: it ended or was released; route again without buildId")]
    Gone,
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
    fn from(Refusal { kind, text }: Refusal) -> Self {
        match kind {
            RefusalKind::OtherIdentity => Self::OtherIdentity { text },
            RefusalKind::TooManyLeases { key, live, limit } => Self::TooManyLeases { key, live, limit },
            RefusalKind::NotAdmitted => Self::NotAdmitted { text },
            RefusalKind::NoRoom => Self::NoRoom { text },
            RefusalKind::NotNow | RefusalKind::Leaving => Self::Failed { text, retryable: true, timed_out: false },
            RefusalKind::TimedOut => Self::Failed { text, retryable: true, timed_out: true },
            RefusalKind::Broken => Self::Failed { text, retryable: false, timed_out: false },
        }
    }
}

#[derive(Debug, Error)]
pub enum RenewError {
    #[error("there is no such lease")]
    Unknown,
    #[error("this lease has ended: route again")]
    Ended,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A cheap handle on all projects.
#[derive(Clone)]
pub struct Projects {
    pub(super) shared: Arc<Shared>,
    pub(super) registry: Registry,
    pub(super) config: Arc<ProjectsConfig>,
    pub(super) spread: Spread,
    pub(super) coming: ComingForks,
    turned_away: TurnedAway,
    /// Whether copies of caches cost next to nothing here.
    pub(super) cheap: bool,
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
        let metrics = Arc::new(Metrics::new());
        let (spread, coming, cheap) = (Spread::default(), ComingForks::default(), effects.snapshots_are_cheap());
        let shared = Shared {
            metrics,
            rebuilding: Mutex::default(),
            surveyed: AtomicBool::new(false),
            admission: Admission::new(config.admission, effects.clone()),
            trials: Trials::default(),
            store,
            effects,
            clock,
            policy: config.policy,
            defaults: config.defaults.clone(),
            rules: config.rules.clone(),
            host_size: config.host_size,
            deadlines: config.deadlines.where_copies_are_instant(cheap),
            addresses: config.addresses,
        };
        let projects = Self {
            shared: Arc::new(shared),
            registry: Registry::default(),
            config: Arc::new(config),
            spread,
            coming,
            turned_away: TurnedAway::default(),
            cheap,
            pki,
            entropy,
        };
        projects.register_levels();
        projects
    }

    /// A daemon that answers, and a lease on it that is on disk; or, where the caller does not want to wait, the lease
    /// and where the daemon stands.
    pub async fn route(&self, spec: BuildSpec, options: RouteOptions) -> Result<Routed, RouteError> {
        let identity = self.identity(spec, &options.caller)?;
        let routed = match (options.resume, options.wait) {
            (Some(token), wait) => self.resume(&identity, token, wait.unwrap_or(self.config.route_wait)).await?,
            (None, wait) => self.lease_somewhere(identity, wait, &options.caller).await?,
        };
        let ready = matches!(routed.standing, Standing::Ready(_));
        let credential = if options.credential && ready { Some(self.credential(&routed.key).await?) } else { None };
        Ok(routed.with_credential(credential))
    }

    /// The way of the reference's clients: nothing is promised before the daemon answers.
    pub(super) async fn lease_when_ready(
        &self,
        identity: &Identity,
        who: &Who,
        deadline: Instant,
    ) -> Result<Routed, RouteError> {
        let token = LeaseToken::from_random(self.entropy.token()?);
        for _ in 0..TRIES {
            let worker = self.worker(identity).await?;
            let (reply, answer) = oneshot::channel();
            let message = Message::Route { identity: identity.clone(), token: token.hash(), who: who.clone(), reply };
            if worker.mailbox.send(message).await.is_err() {
                continue;
            }
            let wait = self.wait(&worker, deadline.saturating_duration_since(Instant::now()), answer);
            match unless_away(&identity.key, &worker, wait).await? {
                Some(Err(leaving @ Refusal { kind: RefusalKind::Leaving, .. })) => {
                    self.let_it_leave(&worker, leaving, deadline).await?;
                }
                Some(granted) => return self.granted(&identity.key, &worker, token, granted?).await,
                None => {}
            }
        }
        Err(RouteError::Closing)
    }

    /// A copy that is on its way out is followed by a fresh one.
    async fn let_it_leave(&self, worker: &WorkerHandle, leaving: Refusal, deadline: Instant) -> Result<(), RouteError> {
        let left = tokio::time::timeout_at(deadline, worker.mailbox.closed()).await;
        left.map_err(|_elapsed| Refusal { kind: RefusalKind::NotNow, ..leaving }.into())
    }

    /// The lease first, and then as much of the wait as the caller has patience for.
    pub(super) async fn lease(&self, identity: &Identity, who: &Who, patience: Duration) -> Result<Routed, RouteError> {
        let token = LeaseToken::from_random(self.entropy.token()?);
        let deadline = Instant::now() + patience.min(self.config.route_wait) + LEAVES_WITHIN;
        for _ in 0..TRIES {
            let worker = self.worker(identity).await?;
            let (reply, answer) = oneshot::channel();
            let message = Message::Lease { identity: identity.clone(), token: token.hash(), who: who.clone(), reply };
            if worker.mailbox.send(message).await.is_err() {
                continue;
            }
            match answer.await {
                Ok(Err(leaving @ Refusal { kind: RefusalKind::Leaving, .. })) => {
                    self.let_it_leave(&worker, leaving, deadline).await?;
                }
                Ok(granted) => {
                    let routed = self.granted(&identity.key, &worker, token, granted?).await?;
                    return unless_away(&identity.key, &worker, self.stay(&worker, routed, patience)).await;
                }
                Err(_) => {}
            }
        }
        Err(RouteError::Closing)
    }

    async fn granted(
        &self,
        key: &Key,
        worker: &WorkerHandle,
        token: LeaseToken,
        granted: Granted,
    ) -> Result<Routed, RouteError> {
        let Granted { warm, lease, durable, undelivered } = granted;
        durable.await?;
        let standing = match warm {
            Some(warm) => Standing::Ready(Ready { generation: warm.generation }),
            None => worker.standing(),
        };
        let addressing = self.config.addressing.clone();
        Ok(Routed {
            addressing,
            key: key.clone(),
            lease: lease.token,
            token,
            standing,
            credential: None,
            undelivered,
            left: None,
        })
    }

    /// Waits with a lease in hand. What may pass is told as where the daemon stands, and the lease stays with its client;
    /// what somebody has to mend first is an error, or its client would poll until its patience is over. A lease that was
    /// made for this answer goes with it, one from before stays.
    pub(super) async fn stay(
        &self,
        worker: &WorkerHandle,
        mut routed: Routed,
        patience: Duration,
    ) -> Result<Routed, RouteError> {
        if matches!(routed.standing, Standing::Ready(_)) {
            return Ok(routed);
        }
        let (reply, answer) = oneshot::channel();
        // A worker that has gone is followed by another with the next poll.
        if worker.mailbox.send(Message::Await { reply }).await.is_ok() {
            match self.wait(worker, patience.min(self.config.route_wait), answer).await {
                Ok(Some(Ok(warm))) => routed.standing = Standing::Ready(Ready { generation: warm.generation }),
                Ok(Some(Err(
                    refusal @ Refusal {
                        kind: RefusalKind::Broken | RefusalKind::NotAdmitted | RefusalKind::NoRoom, ..
                    },
                ))) => return Err(refusal.into()),
                // One that knows its lease comes back; what went wrong is where the daemon stands.
                Ok(Some(Err(_)) | None) | Err(_) => routed.standing = worker.standing(),
            }
        }
        Ok(routed)
    }

    /// Brings a project's daemon up without waiting for it, and says whether it is up already.
    pub async fn prewarm(&self, spec: BuildSpec, caller: &Caller) -> Result<RouteResponse, RouteError> {
        // An untrusted caller has no business with the trusted daemon (W5).
        let identity = self.identity(spec, caller)?;
        let deadline = Instant::now() + LEAVES_WITHIN;
        for _ in 0..TRIES {
            let worker = self.worker(&identity).await?;
            let (reply, answer) = oneshot::channel();
            if worker.mailbox.send(Message::Prewarm { identity: identity.clone(), reply }).await.is_err() {
                continue;
            }
            match answer.await {
                Ok(Err(leaving @ Refusal { kind: RefusalKind::Leaving, .. })) => {
                    self.let_it_leave(&worker, leaving, deadline).await?;
                }
                Ok(answer) => return Ok(self.config.addressing.of_warm(&identity.key, answer?)),
                Err(_) => {}
            }
        }
        Err(RouteError::Closing)
    }

    /// Releases a lease; `false` if there is no such lease at that project. Costs nothing for what is unknown.
    pub async fn complete(&self, key: &Key, token: &LeaseToken) -> Result<bool, StoreError> {
        let token = token.hash();
        self.release(key, |reply| Message::Complete { token, how: LeaseEnd::Completed, reply: Some(reply) }).await
    }

    /// Releases the oldest lease, as the reference does for a client that names none; `false` if there is none.
    pub async fn complete_oldest(&self, key: &Key) -> Result<bool, StoreError> {
        self.release(key, |reply| Message::CompleteOldest { reply }).await
    }

    async fn release(
        &self,
        key: &Key,
        message: impl FnOnce(oneshot::Sender<Option<Releasing>>) -> Message,
    ) -> Result<bool, StoreError> {
        // A project with a lease has a worker.
        let Some(worker) = self.registry.get(key) else { return Ok(false) };
        let (reply, answer) = oneshot::channel();
        if worker.mailbox.send(message(reply)).await.is_err() {
            return Ok(false);
        }
        // A worker that went away had no lease left.
        match answer.await {
            Ok(Some(Releasing { lease, removed })) => {
                let (projects, key) = (self.clone(), key.clone());
                // As a task of its own: a caller that goes away now must not leave a lease on the disk that nobody knows.
                let settled = tokio::spawn(async move {
                    let released = removed.await;
                    if released.is_err() {
                        projects.keep(&key, lease).await;
                    }
                    released
                });
                settled.await.unwrap_or(Err(StoreError::Closed))
            }
            Ok(None) | Err(_) => Ok(false),
        }
    }

    /// The client of a lease is there: its grace starts anew, its end stays.
    pub async fn renew(&self, token: &LeaseToken) -> Result<Lease, RenewError> {
        let Some((key, _)) = self.shared.store.lease(&token.hash()).await? else { return Err(RenewError::Unknown) };
        let worker = self.registry.worker(&self.shared, &key, None).await?.ok_or(RenewError::Unknown)?;
        match worker.renew(token).await {
            Some(Renewing { lease, renewed: Some(renewed) }) => {
                // One that was released meanwhile is not there to be renewed.
                if renewed.await? { Ok(lease) } else { Err(RenewError::Unknown) }
            }
            Some(Renewing { renewed: None, .. }) => Err(RenewError::Ended),
            None => Err(RenewError::Unknown),
        }
    }

    /// Whoever is told that a release failed tries again, and must not hear then that there is nothing to release.
    async fn keep(&self, key: &Key, lease: Lease) {
        if let Ok(Some(worker)) = self.registry.worker(&self.shared, key, None).await {
            // One that has gone meanwhile is followed by one that reads the lease from the disk.
            let _ = worker.mailbox.send(Message::StillHeld { lease }).await;
        }
    }

    /// How many projects have a worker now.
    pub fn workers(&self) -> usize {
        self.registry.all().len()
    }

    pub fn store(&self) -> &Store {
        &self.shared.store
    }

    async fn worker(&self, identity: &Identity) -> Result<WorkerHandle, RouteError> {
        let key = &identity.key;
        // Until it has its worker.
        let _place =
            if key.is_fork() && self.registry.get(key).is_none() { Some(self.place_of_fork(key)?) } else { None };
        let worker = self.registry.worker(&self.shared, key, Some(identity)).await?;
        worker.ok_or(RouteError::Closing)
    }

    /// The worker's answer; `None` if the worker went away. The end of the wait says where the project stands.
    async fn wait<T>(
        &self,
        worker: &WorkerHandle,
        after: Duration,
        answer: oneshot::Receiver<T>,
    ) -> Result<Option<T>, RouteError> {
        let mut leaving = Leaving { mailbox: Some(worker.mailbox.clone()) };
        match tokio::time::timeout(after, answer).await {
            Ok(answer) => {
                leaving.mailbox = None;
                Ok(answer.ok())
            }
            Err(_elapsed) => Err(not_ready(worker, after)),
        }
    }

    /// Whose daemon it is that a build asks for (K7).
    fn identity(&self, spec: BuildSpec, caller: &Caller) -> Result<Identity, RouteError> {
        self.check_lane(caller.untrusted)?;
        Ok(match &caller.pull_request {
            _ if !caller.untrusted => Identity::project(spec),
            None => Identity::fork(spec),
            Some(name) => Identity::pull_request(spec, name)?,
        })
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

    pub fn queue(&self) -> QueueFigures {
        self.shared.admission.figures()
    }
}

/// Where a daemon stands that did not come.
pub(super) fn not_ready(worker: &WorkerHandle, after: Duration) -> RouteError {
    let status = worker.status.borrow().clone();
    let standing = || status.phase.as_ref().map_or_else(|| "not looked at".to_owned(), ToString::to_string);
    let phase = status.step.map_or_else(standing, |step| format!("busy with: {step}"));
    RouteError::NotReady { after, phase, reason: status.reason, queue: status.queue }
}

/// A wait that ends without its answer: the worker counts those who wait anew, and may give up its place.
struct Leaving {
    mailbox: Option<mpsc::Sender<Message>>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(mailbox) = self.mailbox.take() {
            let _ = mailbox.try_send(Message::Nudge);
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

    fn unreachable(&self, key: &Key) {
        if let Some(worker) = self.registry.get(key) {
            // A full mailbox is that of a project which is looked at all the time.
            let _ = worker.mailbox.try_send(Message::Suspect);
        }
    }

    fn turned_away(&self, key: &Key, why: &str) {
        if self.turned_away.is_due(key, Instant::now().into_std()) {
            let text = format!("a connection was refused: {why}");
            let event = NewEvent::new(self.shared.clock.now(), Some(key), "connection-refused", text);
            drop(self.shared.store.record(event));
        }
    }
}
