//! The one thread that writes, and how writes share a commit.
//!
//! ```text
//!   submit ──▶ queue (bounded) ──▶ take what has gathered ──▶ BEGIN ─ savepoint per write ─ COMMIT ──▶ answer all
//! ```
//!
//! While one commit waits for the disk, the next writes gather; so the slower the disk, the more share its flush, and
//! no timer is needed: a write that comes alone is committed at once. Every write is in a savepoint of its own: one
//! that fails undoes itself and harms nobody. When the commit fails, everybody in it hears so, and the thread goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tokio::sync::{broadcast, oneshot};
use tracing::{error, warn};

use super::events::Event;
use super::lock::Lock;
use super::{OpenError, StoreError};

/// Writes that may wait. Eight full commits: whoever is let in is answered within nine flushes of the disk, some tens
/// of milliseconds on a decent one; and more than this waiting means that the disk is stuck, which is better said.
const QUEUE: usize = 2048;

/// Writes in one commit: bounds what the first of them waits for, and what one failing commit takes with it.
const BATCH: usize = 256;

/// Pages in the log from which on they are moved to the database (SQLite's own default). 4 MiB, inside the region
/// that is allocated at the start.
const CHECKPOINT_PAGES: i64 = 1000;

/// Fits a subscriber that looks away for a moment; one that lags further re-reads the journal.
const BROADCAST: usize = 1024;

/// What a write sees: the open transaction, and the events to announce once it is committed.
pub(super) struct Writing<'a> {
    pub(super) connection: &'a Connection,
    pub(super) events: &'a mut Vec<Event>,
}

/// A write on its way to the disk: resolves when it is committed or refused. It was submitted when this was made, and
/// dropping this does not call it back.
#[derive(Debug)]
#[must_use = "the outcome of a write is known only when this is awaited"]
pub struct Commit<T>(Waiting<T>);

#[derive(Debug)]
enum Waiting<T> {
    Refused(Option<StoreError>),
    Submitted(oneshot::Receiver<Result<T, StoreError>>),
}

impl<T> Future for Commit<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Waiting::Refused(error) => Poll::Ready(Err(error.take().unwrap_or(StoreError::Closed))),
            Waiting::Submitted(answer) => {
                Pin::new(answer).poll(context).map(|received| received.unwrap_or(Err(StoreError::Closed)))
            }
        }
    }
}

/// What the writer has done since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    pub commits: u64,
    pub writes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    commits: AtomicU64,
    writes: AtomicU64,
}

pub(super) struct Writer {
    queue: Option<SyncSender<Box<dyn Job>>>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<Counters>,
    events: broadcast::Sender<Event>,
}

impl Writer {
    pub(super) fn start(connection: Connection, lock: Lock) -> Result<Self, OpenError> {
        let (queue, jobs) = sync_channel(QUEUE);
        let (events, _) = broadcast::channel(BROADCAST);
        let counters = Arc::new(Counters::default());
        let worker = Worker { connection, counters: counters.clone(), events: events.clone(), _lock: lock };
        let thread = std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || worker.run(&jobs))
            .map_err(|source| OpenError::Io { doing: "start the writer of", path: "the database".into(), source })?;
        Ok(Self { queue: Some(queue), thread: Some(thread), counters, events })
    }

    /// Puts `write` in the queue. Never blocks: where there is no room, the answer is an error at once.
    pub(super) fn submit<T, F>(&self, write: F) -> Commit<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Writing<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Submitted { write: Some(write), outcome: None, reply });
        let refused = match self.queue.as_ref().map(|queue| queue.try_send(job)) {
            Some(Ok(())) => return Commit(Waiting::Submitted(answer)),
            Some(Err(TrySendError::Full(_))) => StoreError::WritesWaiting { waiting: QUEUE },
            Some(Err(TrySendError::Disconnected(_))) | None => StoreError::Closed,
        };
        Commit(Waiting::Refused(Some(refused)))
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    pub(super) fn figures(&self) -> Figures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Figures { commits: read(&self.counters.commits), writes: read(&self.counters.writes) }
    }
}

impl Drop for Writer {
    /// Returns when everything submitted is on the disk and the file is closed: a few flushes at most.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("the writer of the database had panicked");
        }
    }
}

/// One write in the queue.
trait Job: Send {
    fn run(&mut self, writing: &mut Writing<'_>) -> Result<(), StoreError>;
    /// `commit` is the fate of the commit that it ran in.
    fn answer(self: Box<Self>, commit: Result<(), StoreError>);
}

struct Submitted<T, F> {
    write: Option<F>,
    outcome: Option<Result<T, StoreError>>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Job for Submitted<T, F>
where
    T: Send,
    F: FnOnce(&mut Writing<'_>) -> Result<T, StoreError> + Send,
{
    fn run(&mut self, writing: &mut Writing<'_>) -> Result<(), StoreError> {
        let Some(write) = self.write.take() else { return Ok(()) };
        let outcome = write(writing);
        let told = outcome.as_ref().map(|_| ()).map_err(Clone::clone);
        self.outcome = Some(outcome);
        told
    }

    fn answer(self: Box<Self>, commit: Result<(), StoreError>) {
        let outcome = match (commit, self.outcome) {
            // Its own error says more than the commit's.
            (_, Some(Err(own))) => Err(own),
            (Err(error), _) => Err(error),
            (Ok(()), outcome) => outcome.unwrap_or(Err(StoreError::Closed)),
        };
        // Nobody listens where the caller went away; the write stands all the same.
        let _ = self.reply.send(outcome);
    }
}

struct Worker {
    connection: Connection,
    counters: Arc<Counters>,
    events: broadcast::Sender<Event>,
    /// Given back after the connection is closed: fields are dropped in this order.
    _lock: Lock,
}

impl Worker {
    fn run(self, jobs: &Receiver<Box<dyn Job>>) {
        let mut batch = Vec::with_capacity(BATCH);
        while let Ok(first) = jobs.recv() {
            batch.push(first);
            batch.extend(jobs.try_iter().take(BATCH - 1));
            self.commit(&mut batch);
            self.checkpoint_if_due();
        }
        // One plain file is left, for whoever copies it.
        if let Err(error) = self.checkpoint("PRAGMA wal_checkpoint(TRUNCATE)") {
            warn!(%error, "could not empty the database's log at the end; the next start does it");
        }
    }

    fn commit(&self, batch: &mut Vec<Box<dyn Job>>) {
        let mut events = Vec::new();
        let committed = self.run_in_transaction(batch, &mut events);
        match &committed {
            Ok(()) => {
                self.counters.commits.fetch_add(1, Ordering::Relaxed);
                self.counters.writes.fetch_add(batch.len() as u64, Ordering::Relaxed);
                for event in events {
                    // An error here only means that nobody listens.
                    let _ = self.events.send(event);
                }
            }
            Err(error) => {
                let source = std::error::Error::source(error).map(ToString::to_string);
                error!(%error, source, writes = batch.len(), "nothing of this commit was written");
                self.leave_transaction();
            }
        }
        for job in batch.drain(..) {
            job.answer(committed.clone());
        }
    }

    fn run_in_transaction(&self, batch: &mut [Box<dyn Job>], events: &mut Vec<Event>) -> Result<(), StoreError> {
        self.execute("BEGIN IMMEDIATE").map_err(StoreError::sqlite("begin a commit"))?;
        for job in batch {
            self.execute("SAVEPOINT one").map_err(StoreError::sqlite("begin a write"))?;
            let announced = events.len();
            let mut writing = Writing { connection: &self.connection, events };
            // A fault in one write must not end the thread that all others need.
            let outcome = catch_unwind(AssertUnwindSafe(|| job.run(&mut writing))).unwrap_or(Err(StoreError::Closed));
            if let Err(error) = outcome {
                events.truncate(announced);
                // Some errors (a full disk, say) undo the whole transaction and not the statement alone.
                if self.connection.is_autocommit() {
                    return Err(error);
                }
                self.execute("ROLLBACK TO one").map_err(StoreError::sqlite("undo a write"))?;
            }
            self.execute("RELEASE one").map_err(StoreError::sqlite("end a write"))?;
        }
        self.execute("COMMIT").map_err(StoreError::sqlite("commit to the database"))
    }

    fn execute(&self, sql: &str) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql)?.execute([]).map(drop)
    }

    /// After a failure the transaction may be open still, and would swallow the next.
    fn leave_transaction(&self) {
        if !self.connection.is_autocommit()
            && let Err(error) = self.execute("ROLLBACK")
        {
            error!(%error, "could not roll back");
        }
    }

    /// Between two commits and after the answers, so that it is nobody's latency unless writes come without a pause;
    /// and from this thread, so that no commit comes between and the log starts again from its beginning.
    fn checkpoint_if_due(&self) {
        let moved = match self.checkpoint("PRAGMA wal_checkpoint(NOOP)") {
            Ok(pages) if pages < CHECKPOINT_PAGES => return,
            Ok(_) => self.checkpoint("PRAGMA wal_checkpoint(PASSIVE)"),
            Err(error) => Err(error),
        };
        if let Err(error) = moved {
            warn!(%error, "could not move the database's log into the database; trying again after the next commit");
        }
    }

    /// Pages that were in the log and not in the database yet.
    fn checkpoint(&self, pragma: &str) -> rusqlite::Result<i64> {
        let mut statement = self.connection.prepare_cached(pragma)?;
        statement.query_row([], |row| Ok(row.get::<_, i64>(1)? - row.get::<_, i64>(2)?))
    }
}
