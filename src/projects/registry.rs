//! Key → worker. A worker is in here for as long as it lives.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kiln_domain::settings::HostSize;
use kiln_domain::{AddressPool, Identity, Key, Lease, LeaseToken, Phase, Policy, ProjectRecord, Role, Rules, Settings};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};

use super::admission::Admission;
use super::answer::Standing;
use super::effects::{Effects, StepDeadlines};
use super::messages::{Connections, Message, Renewing, Status, WorkerLoad};
use super::trials::Trials;
use super::worker::Worker;
use crate::clock::Clock;
use crate::metrics::{Metrics, PhaseLabel};
use crate::store::{Store, StoreError};

/// Requests that may wait in a worker's mailbox. A worker empties it without waiting for the host, so that this is
/// reached only when requests come faster than the store takes leases; then callers wait their turn here.
const MAILBOX_DEPTH: usize = 1024;

/// Before a record is read again whose reading only had to wait too long for its turn.
const READ_AGAIN: Duration = Duration::from_secs(1);

/// A fault that shows again at once must not fill the processor.
const AFTER_A_PANIC: Duration = Duration::from_secs(1);

/// What every worker needs.
pub(super) struct Shared {
    pub(super) store: Store,
    pub(super) effects: Arc<dyn Effects>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) admission: Arc<Admission>,
    pub(super) trials: Trials,
    pub(super) metrics: Arc<Metrics>,
    /// Why the database, which is new, has not been filled from the host yet.
    pub(super) rebuilding: Mutex<Option<String>>,
    /// The host has been looked through since the start: whatever runs has its worker.
    pub(super) surveyed: AtomicBool,
    pub(super) policy: Policy,
    pub(super) defaults: Settings,
    pub(super) rules: Rules,
    pub(super) host_size: HostSize,
    pub(super) deadlines: StepDeadlines,
    pub(super) addresses: AddressPool,
}

impl Shared {
    pub(super) fn rebuilding(&self) -> Option<String> {
        self.rebuilding.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_rebuilding(&self, why: Option<String>) {
        *self.rebuilding.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }

    /// What counts for a project.
    pub(super) fn settings(&self, record: &ProjectRecord) -> Settings {
        self.rules.settings(&record.settings, &record.spec.repo, &self.defaults).for_role(record.key.role())
    }
}

/// A worker's address.
#[derive(Clone)]
pub(super) struct WorkerHandle {
    pub(super) mailbox: mpsc::Sender<Message>,
    pub(super) status: watch::Receiver<Status>,
    pub(super) connections: Connections,
    pub(super) load: WorkerLoad,
}

impl WorkerHandle {
    /// Where the daemon stands, for somebody whose wait for it has not begun or is over.
    pub(super) fn standing(&self) -> Standing {
        let Status { phase, reason, queue, .. } = self.status.borrow().clone();
        let phase = phase.as_ref().map_or("unknown", Phase::name);
        Standing::Coming { phase, reason, queue }
    }

    /// What it knows of the host may not be so any more. One that has gone has nothing running; one that has much to do keeps
    /// nobody else's news waiting.
    pub(super) fn look_again(&self) {
        if let Err(TrySendError::Full(message)) = self.mailbox.try_send(Message::HostChanged)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let mailbox = self.mailbox.clone();
            runtime.spawn(async move { mailbox.send(message).await });
        }
    }

    /// Returns when it failed, or has to wait for its place among the starts.
    pub(super) async fn cannot_be_had(&self) {
        let mut status = self.status.clone();
        let away = |status: &Status| status.queue.is_some() || matches!(status.phase, Some(Phase::Failed { .. }));
        if status.wait_for(away).await.is_err() {
            // It has gone, and whoever waits for its answer sees that.
            std::future::pending::<()>().await;
        }
    }

    /// `None`: there is no such lease.
    pub(super) async fn renew(&self, token: &LeaseToken) -> Option<Renewing> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(Message::Renew { token: token.hash(), reply }).await.ok()?;
        answer.await.ok().flatten()
    }
}

/// The worker's side of its [`WorkerHandle`].
pub(super) struct Desk {
    pub(super) mailbox: mpsc::Receiver<Message>,
    /// To hand out to those who will have to tell the worker something.
    pub(super) own_mailbox: mpsc::Sender<Message>,
    pub(super) status: watch::Sender<Status>,
    pub(super) connections: Connections,
    pub(super) load: WorkerLoad,
}

#[derive(Clone, Default)]
pub(super) struct Registry(Arc<Mutex<BTreeMap<Key, WorkerHandle>>>);

impl Registry {
    fn workers(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, WorkerHandle>> {
        // The map is whole between any two operations, so a panic elsewhere cannot have torn it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: &Key) -> Option<WorkerHandle> {
        self.workers().get(key).cloned()
    }

    /// The workers of a project and its members, and how many members others have. However many projects there are, only
    /// members are looked at: their keys, which begin with a `c`, come first.
    pub(super) fn family(&self, project: &Key) -> (BTreeMap<Key, WorkerHandle>, usize) {
        let workers = self.workers();
        let members = workers.iter().take_while(|(key, _)| matches!(key.role(), Role::Member(_)));
        let (own, others): (Vec<_>, Vec<_>) = members.partition(|(key, _)| key.project() == *project);
        let primary = workers.get_key_value(project);
        (own.into_iter().chain(primary).map(|(key, worker)| (key.clone(), worker.clone())).collect(), others.len())
    }

    /// The forks that have a worker; their keys come after those of members.
    pub(super) fn forks(&self) -> Vec<Key> {
        let workers = self.workers();
        let rest = workers.keys().skip_while(|key| matches!(key.role(), Role::Member(_)));
        rest.take_while(|key| key.is_fork()).cloned().collect()
    }

    pub(super) fn all(&self) -> Vec<WorkerHandle> {
        self.workers().values().cloned().collect()
    }

    /// Called by a worker that has nothing left to do: `false` if a message came in at the last moment.
    pub(super) fn remove_if_idle(&self, key: &Key, mailbox: &mpsc::Receiver<Message>) -> bool {
        let mut workers = self.workers();
        if !mailbox.is_empty() {
            return false;
        }
        workers.remove(key);
        true
    }

    /// The worker of `key`, made if there is none. `Ok(None)`: there is no such project, and no `identity` to make it from.
    ///
    /// The new worker is in the registry before its record is read, so a second caller finds it and does not read a
    /// record that the first is about to change.
    pub(super) async fn worker(
        &self,
        shared: &Arc<Shared>,
        key: &Key,
        identity: Option<&Identity>,
    ) -> Result<Option<WorkerHandle>, StoreError> {
        if let Some(worker) = self.get(key) {
            return Ok(Some(worker));
        }
        let known = match identity {
            // Its daemon may be running already, at an address that the empty database would give away.
            Some(_) if let Some(why) = shared.rebuilding() => {
                shared.store.project(key).await?.map(|_| true).ok_or(StoreError::Rebuilding { why })?
            }
            Some(identity) => return self.make(shared, key, identity).await.map(Some),
            None => shared.store.project(key).await?.is_some(),
        };
        Ok(known.then(|| self.spawn(shared, key)))
    }

    /// As a task of its own: whoever goes away meanwhile must not leave a project that nobody looks after. A fork would keep its
    /// address for ever.
    async fn make(&self, shared: &Arc<Shared>, key: &Key, identity: &Identity) -> Result<WorkerHandle, StoreError> {
        let unattended = Unattended { registry: self.clone(), shared: Arc::clone(shared), key: key.clone() };
        let identity = identity.clone();
        let made = tokio::spawn(async move {
            let Shared { store, addresses, clock, metrics, .. } = &*unattended.shared;
            let created = store.create_project(&identity, *addresses, clock.now()).await?;
            if created.new {
                metrics.phase_changed(None, Some(PhaseLabel::from(&created.record.phase)));
            }
            Ok(unattended)
        });
        // Whoever has gone drops it with the task's outcome.
        let _unattended = made.await.unwrap_or(Err(StoreError::Closed))?;
        Ok(self.spawn(shared, key))
    }

    /// The worker of a project that is in the store.
    pub(super) fn spawn(&self, shared: &Arc<Shared>, key: &Key) -> WorkerHandle {
        self.spawn_with(shared, key, Connections::default())
    }

    fn spawn_with(&self, shared: &Arc<Shared>, key: &Key, connections: Connections) -> WorkerHandle {
        let mut workers = self.workers();
        if let Some(worker) = workers.get(key) {
            return worker.clone();
        }
        let (own_mailbox, mailbox) = mpsc::channel(MAILBOX_DEPTH);
        let step = Some("read its record");
        let unread = Status { phase: None, reason: String::new(), step, queue: None, leases: 0, pending: None };
        let (status, seen) = watch::channel(unread);
        let load = WorkerLoad::default();
        let (own, shown) = (own_mailbox.clone(), connections.clone());
        let worker = WorkerHandle { mailbox: own, status: seen, connections: shown, load: load.clone() };
        workers.insert(key.clone(), worker.clone());
        let desk = Desk { mailbox, own_mailbox, status, connections, load };
        tokio::spawn(Self::live(self.clone(), Arc::clone(shared), key.clone(), desk));
        worker
    }

    async fn live(self, shared: Arc<Shared>, key: Key, desk: Desk) {
        let mut entry = Entry {
            registry: self.clone(),
            shared: Arc::clone(&shared),
            key: key.clone(),
            mailbox: desk.own_mailbox.clone(),
            connections: desk.connections.clone(),
            ended: false,
        };
        match read(&shared, &key).await {
            Ok(Some((record, leases))) => Worker::new(shared, self, desk, record, leases).work().await,
            // Whoever waits sees its reply dropped and asks again.
            Ok(None) => {}
            Err(error) => tracing::error!(%key, %error, "cannot read a project"),
        }
        entry.ended = true;
    }
}

async fn read(shared: &Shared, key: &Key) -> Result<Option<(ProjectRecord, Vec<Lease>)>, StoreError> {
    loop {
        let read = async {
            let record = shared.store.project(key).await?;
            let leases = shared.store.leases(key).await?;
            Ok::<_, StoreError>(record.map(|record| (record, leases)))
        };
        match read.await {
            // Thousands of workers begin at once after a restart, and each of them has leases to look after.
            // And one whose disk is being seen to has them still.
            Err(error) if error.retry_after().is_some() => tokio::time::sleep(READ_AGAIN).await,
            outcome => return outcome,
        }
    }
}

/// A project that was written down, until it has a worker: it gets one at the latest when this is dropped.
struct Unattended {
    registry: Registry,
    shared: Arc<Shared>,
    key: Key,
}

impl Drop for Unattended {
    fn drop(&mut self) {
        // Without a runtime the process is ending, and the next start looks after it.
        if tokio::runtime::Handle::try_current().is_ok() {
            self.registry.spawn(&self.shared, &self.key);
        }
    }
}

/// Takes a worker out of the registry at its end, whichever. One that panicked must not lock its project up, nor leave its
/// leases and its daemon to nobody: another takes its place after a moment, with the same open connections.
struct Entry {
    registry: Registry,
    shared: Arc<Shared>,
    key: Key,
    mailbox: mpsc::Sender<Message>,
    connections: Connections,
    ended: bool,
}

impl Drop for Entry {
    fn drop(&mut self) {
        {
            let mut workers = self.registry.workers();
            // One that found nothing left to do has gone already, and its place may be another's.
            if workers.get(&self.key).is_some_and(|worker| worker.mailbox.same_channel(&self.mailbox)) {
                workers.remove(&self.key);
            }
        }
        // A task that is dropped with its runtime has not panicked.
        if self.ended || !std::thread::panicking() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (registry, shared) = (self.registry.clone(), Arc::clone(&self.shared));
            let (key, connections) = (self.key.clone(), self.connections.clone());
            runtime.spawn(async move {
                tokio::time::sleep(AFTER_A_PANIC).await;
                registry.spawn_with(&shared, &key, connections);
                // Not while the other unwinds: a second panic in there would end the process.
                tracing::error!(%key, "a worker panicked; another has taken its place");
            });
        }
    }
}
