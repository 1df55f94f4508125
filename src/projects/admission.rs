//! The door for starts: how many at a time, in which order, and whether the host has room.
//!
//! [`kiln_domain::admission`] says whether one more start may begin; this keeps the queue. It is fair: first come, first
//! served, whichever project; only a project that needs nothing new goes through at once. While somebody waits, the host
//! is looked at every second; while nobody does, it is looked at when a start asks, and now and then for memory. A start that
//! waits for memory or for a place among the daemons, and a host that is short of memory, make the one go that nobody has
//! needed for longest.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kiln_domain::admission::{AdmissionPolicy, HostLoad, Refused, Verdict, WaitsFor, admit};
use kiln_domain::plan::Place;
use kiln_domain::{Key, Timestamp};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::effects::Effects;
use super::messages::Message;

/// How long a reading of the host is good for, and how often it is read while somebody waits.
const FRESH: Duration = Duration::from_secs(1);

/// A storage that hangs must hold nobody up: what cannot be read in this time is not known.
const READ_PATIENCE: Duration = Duration::from_millis(500);

pub(super) struct Admission {
    policy: AdmissionPolicy,
    effects: Arc<dyn Effects>,
    state: Mutex<State>,
    reading: tokio::sync::Mutex<Reading>,
    /// Rung when a start is refused because the caches' storage is full.
    storage_full: Notify,
    /// For the task that watches the host while somebody waits.
    own: Weak<Self>,
}

/// What was read last, and a reading that has not come back: a storage that hangs is asked once.
#[derive(Default)]
struct Reading {
    last: Option<(Instant, HostLoad)>,
    pending: Option<JoinHandle<HostLoad>>,
}

#[derive(Default)]
struct State {
    starting: BTreeSet<Key>,
    /// Daemons that are up; one on its way up may be among them already.
    up: BTreeSet<Key>,
    /// Daemons that are up and that nobody needs, since when.
    unneeded: BTreeMap<Key, (Timestamp, mpsc::Sender<Message>)>,
    queue: VecDeque<Waiting>,
    /// Why the first of the queue waits.
    waits_for: Option<WaitsFor>,
    load: HostLoad,
    watched: bool,
    /// Which daemon was last asked to make room, and when.
    asked: Option<(Key, Instant)>,
    /// When one last went.
    eased: Option<Instant>,
}

struct Waiting {
    key: Key,
    new_volume: bool,
    mailbox: mpsc::Sender<Message>,
}

/// How a project's daemon stands, as far as others' starts care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Down,
    Needed,
    /// Since its last activity.
    Unneeded(Timestamp),
}

/// What is seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueFigures {
    pub starting: usize,
    pub queued: usize,
    pub running: usize,
}

impl State {
    fn load(&self) -> HostLoad {
        let running = self.up.difference(&self.starting).count();
        HostLoad { starting: self.starting.len(), running, queued: self.queue.len(), ..self.load }
    }

    fn is_busy(&self) -> bool {
        !self.starting.is_empty() || !self.queue.is_empty()
    }

    fn place(&self, key: &Key) -> Option<Place> {
        if self.starting.contains(key) {
            return Some(Place::Admitted);
        }
        let at = self.queue.iter().position(|waiting| waiting.key == *key)?;
        // Whoever is not the first waits for what the first waits for, and for the first.
        let waits_for = self.waits_for.unwrap_or(WaitsFor::Turn);
        Some(Place::Queued { position: at + 1, length: self.queue.len(), waits_for })
    }

    /// Lets in whoever may start now, in order.
    fn promote(&mut self, policy: &AdmissionPolicy) {
        let before = (self.queue.len(), self.waits_for);
        self.let_in(policy);
        if before != (self.queue.len(), self.waits_for) {
            // Each has another place now, or waits for something else, and tells its callers.
            for waiting in &self.queue {
                let _ = waiting.mailbox.try_send(Message::Nudge);
            }
        }
    }

    fn let_in(&mut self, policy: &AdmissionPolicy) {
        while let Some(first) = self.queue.front() {
            match admit(&HostLoad { queued: 0, ..self.load() }, first.new_volume, policy) {
                Verdict::Admit => {
                    if let Some(Waiting { key, mailbox, .. }) = self.queue.pop_front() {
                        self.starting.insert(key);
                        // A full mailbox needs no nudge: the worker looks for its place with each message it takes out.
                        let _ = mailbox.try_send(Message::Nudge);
                    }
                }
                Verdict::Wait(waits_for) => {
                    self.waits_for = Some(waits_for);
                    return;
                }
                // It asks again itself, and hears why.
                Verdict::Refuse(_) => {
                    if let Some(Waiting { mailbox, .. }) = self.queue.pop_front() {
                        let _ = mailbox.try_send(Message::Nudge);
                    }
                }
            }
        }
        self.waits_for = None;
    }
}

impl Admission {
    pub(super) fn new(policy: AdmissionPolicy, effects: Arc<dyn Effects>) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            policy,
            effects,
            state: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            storage_full: Notify::new(),
            own: own.clone(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whole between any two operations.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place a project has, if it has asked for one.
    pub(super) fn place(&self, key: &Key) -> Place {
        self.state().place(key).unwrap_or_default()
    }

    /// Asks for a place. Asking again changes nothing.
    pub(super) async fn ask(&self, key: &Key, new_volume: bool, mailbox: &mpsc::Sender<Message>) -> Place {
        let load = self.read().await;
        let mut state = self.state();
        state.load = load;
        if let Some(place) = state.place(key) {
            return place;
        }
        let verdict = match admit(&state.load(), new_volume, &self.policy) {
            Verdict::Admit if !state.queue.is_empty() => Verdict::Wait(state.waits_for.unwrap_or(WaitsFor::Turn)),
            verdict => verdict,
        };
        match verdict {
            Verdict::Admit => {
                state.starting.insert(key.clone());
                Place::Admitted
            }
            Verdict::Refuse(why) => {
                if matches!(why, Refused::Storage { .. } | Refused::StorageForNew { .. }) {
                    self.storage_full.notify_one();
                }
                Place::Refused(why)
            }
            Verdict::Wait(waits_for) => {
                let first = state.queue.is_empty();
                if first {
                    state.waits_for = Some(waits_for);
                }
                state.queue.push_back(Waiting { key: key.clone(), new_volume, mailbox: mailbox.clone() });
                self.watch(&mut state);
                state.place(key).unwrap_or_default()
            }
        }
    }

    /// Gives a place back: the start is over, failed, or not needed any more.
    pub(super) fn leave(&self, key: &Key) {
        let mut state = self.state();
        let started = state.starting.remove(key);
        let waited = state.queue.len();
        state.queue.retain(|waiting| waiting.key != *key);
        if started || state.queue.len() < waited {
            state.promote(&self.policy);
        }
    }

    pub(super) fn report(&self, key: &Key, standing: Standing, mailbox: &mpsc::Sender<Message>) {
        let mut state = self.state();
        state.unneeded.remove(key);
        let answered = matches!(standing, Standing::Down | Standing::Needed);
        if answered && state.asked.as_ref().is_some_and(|(asked, _)| asked == key) {
            state.asked = None;
            state.eased = (standing == Standing::Down).then(Instant::now);
        }
        let went = match standing {
            Standing::Down => state.up.remove(key),
            Standing::Needed => {
                state.up.insert(key.clone());
                false
            }
            Standing::Unneeded(since) => {
                state.up.insert(key.clone());
                state.unneeded.insert(key.clone(), (since, mailbox.clone()));
                false
            }
        };
        if went {
            state.promote(&self.policy);
        }
    }

    /// Whether starts are under way or waited for.
    pub(super) fn is_busy(&self) -> bool {
        self.state().is_busy()
    }

    pub(super) fn figures(&self) -> QueueFigures {
        let state = self.state();
        let HostLoad { starting, running, queued, .. } = state.load();
        QueueFigures { starting, queued, running }
    }

    async fn read(&self) -> HostLoad {
        let mut reading = self.reading.lock().await;
        if let Some((at, load)) = reading.last
            && at.elapsed() < FRESH
        {
            return load;
        }
        let pending = reading.pending.get_or_insert_with(|| {
            let effects = self.effects.clone();
            tokio::spawn(async move { effects.load().await })
        });
        // What is not known holds nothing back.
        let load = match tokio::time::timeout(READ_PATIENCE, pending).await {
            Ok(read) => {
                reading.pending = None;
                read.unwrap_or_default()
            }
            Err(_) => HostLoad::default(),
        };
        reading.last = Some((Instant::now(), load));
        load
    }

    /// A task for as long as somebody waits.
    fn watch(&self, state: &mut State) {
        if std::mem::replace(&mut state.watched, true) {
            return;
        }
        let own = self.own.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(FRESH).await;
                let Some(admission) = own.upgrade() else { return };
                let load = admission.read().await;
                let mut state = admission.state();
                state.load = load;
                state.promote(&admission.policy);
                if state.queue.is_empty() {
                    state.watched = false;
                    return;
                }
                let waits_for = state.waits_for;
                make_room(&mut state, waits_for);
            }
        });
    }

    /// While nobody waits for a start: a host that is short of memory is eased before anything on it is killed. True: it is
    /// short.
    pub(super) async fn ease(&self) -> bool {
        let load = self.read().await;
        let mut state = self.state();
        state.load = load;
        let memory = HostLoad { storage: None, ..load };
        let short = match admit(&memory, false, &self.policy) {
            Verdict::Wait(waits_for) => Some(waits_for),
            Verdict::Refuse(Refused::Thrashing { full }) => Some(WaitsFor::MemoryPressure { some: full }),
            Verdict::Refuse(_) | Verdict::Admit => None,
        };
        make_room(&mut state, short);
        short.is_some()
    }

    /// Returns when a start has been refused because the caches' storage is full.
    pub(super) async fn refused_for_storage(&self) {
        self.storage_full.notified().await;
    }
}

/// A daemon that was asked to go is given this long, and then the next is asked: one that does not answer stays for now.
const GOES_WITHIN: Duration = Duration::from_secs(15);

/// The kernel's figure for memory pressure is an average over this long: what a stop gave back shows only then.
const SHOWS_WITHIN: Duration = Duration::from_secs(10);

/// One at a time, the one that nobody has needed for longest: the next is asked when it is down, or needed again.
fn make_room(state: &mut State, waits_for: Option<WaitsFor>) {
    let waits = waits_for.is_some_and(WaitsFor::eased_by_a_stop);
    let asked = state.asked.as_ref().is_some_and(|(_, at)| at.elapsed() < GOES_WITHIN);
    let lags = matches!(waits_for, Some(WaitsFor::MemoryPressure { .. }));
    let eased = lags && state.eased.is_some_and(|at| at.elapsed() < SHOWS_WITHIN);
    if !waits || asked || eased {
        return;
    }
    let longest = state.unneeded.iter().min_by_key(|(_, (since, _))| *since).map(|(key, _)| key.clone());
    if let Some(key) = longest
        && let Some((_, mailbox)) = state.unneeded.remove(&key)
    {
        let _ = mailbox.try_send(Message::RoomWanted);
        state.asked = Some((key, Instant::now()));
    }
}
