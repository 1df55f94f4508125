//! How writes share a commit, whoever calls for it: the writing thread, or a simulation.
//!
//! ```text
//!   BEGIN ─ savepoint per write ─ COMMIT ──▶ announce the events ──▶ answer all
//! ```
//!
//! Every write is in a savepoint of its own: one that fails undoes itself and harms nobody. When the commit fails,
//! everybody in it hears so.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::{broadcast, oneshot};
use tracing::error;

use super::events::{Event, Journal};
use super::files::Files;
use super::{OpenError, StoreError, schema};
use crate::causes::in_one_line;
use crate::seldom::Seldom;

/// What would be said after every commit while a disk is full is said as often.
pub(super) const COMPLAINTS: Duration = Duration::from_mins(1);

/// Writes that may wait. Eight full commits: whoever is let in is answered within nine flushes of the disk, some tens
/// of milliseconds on a decent one; and more than this waiting means that the disk is stuck, which is better said.
pub(super) const QUEUE: usize = 2048;

/// Writes in one commit: bounds what the first of them waits for, and what one failing commit takes with it.
pub(super) const BATCH: usize = 256;

/// Fits a subscriber that looks away for a moment; one that lags further re-reads the journal.
const BROADCAST: usize = 1024;

/// What a write sees: the open transaction, and the events to announce once it is committed.
pub(super) struct Writing<'a> {
    pub(super) connection: &'a Connection,
    pub(super) events: &'a mut Vec<Event>,
    pub(super) journal: &'a mut Journal,
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

impl<T> Commit<T> {
    pub(super) fn refused(error: StoreError) -> Self {
        Self(Waiting::Refused(Some(error)))
    }
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

/// One write in the queue.
pub(super) trait Job: Send {
    fn run(&mut self, writing: &mut Writing<'_>) -> Result<(), StoreError>;
    /// `commit` is the fate of the commit that it ran in, `path` the database's. True: an event was lost with it.
    fn answer(self: Box<Self>, commit: Result<(), StoreError>, path: &Path) -> bool;
}

/// A write for the queue, and its future. `tells`: an event for the journal goes along.
pub(super) fn job<T, F>(tells: bool, write: F) -> (Box<dyn Job>, Commit<T>)
where
    T: Send + 'static,
    F: FnOnce(&mut Writing<'_>) -> Result<T, StoreError> + Send + 'static,
{
    let (reply, answer) = oneshot::channel();
    (Box::new(Submitted { tells, write: Some(write), outcome: None, reply }), Commit(Waiting::Submitted(answer)))
}

struct Submitted<T, F> {
    tells: bool,
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

    fn answer(self: Box<Self>, commit: Result<(), StoreError>, path: &Path) -> bool {
        let outcome = match (commit, self.outcome) {
            // Its own error says more than the commit's.
            (_, Some(Err(own))) => Err(own.of_database(path)),
            (Err(error), _) => Err(error),
            (Ok(()), outcome) => outcome.unwrap_or(Err(StoreError::Closed)),
        };
        // What is against the rules did not happen, and there is nothing to tell of it.
        let lost = self.tells && outcome.as_ref().is_err_and(|error| !error.is_refusal());
        // Nobody listens where the caller went away; the write stands all the same.
        let _ = self.reply.send(outcome);
        lost
    }
}

/// What was written since the start, and how much the journal holds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    pub commits: u64,
    pub writes: u64,
    /// Events that could not be written.
    pub events_dropped: u64,
    pub journal_rows: u64,
}

/// What can be known of commits from outside.
#[derive(Debug, Clone)]
pub(super) struct Watch {
    counters: Arc<Counters>,
    events: broadcast::Sender<Event>,
}

#[derive(Debug, Default)]
struct Counters {
    commits: AtomicU64,
    writes: AtomicU64,
    events_dropped: AtomicU64,
    journal_rows: AtomicU64,
}

impl Watch {
    pub(super) fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    pub(super) fn figures(&self) -> Figures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { commits, writes, events_dropped, journal_rows } = &*self.counters;
        Figures {
            commits: read(commits),
            writes: read(writes),
            events_dropped: read(events_dropped),
            journal_rows: read(journal_rows),
        }
    }

    /// An event was lost, be it before its write was taken.
    pub(super) fn event_dropped(&self) {
        self.counters.events_dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// The one connection that writes.
pub(super) struct Committer {
    connection: Connection,
    path: PathBuf,
    files: Option<Files>,
    journal: Journal,
    watch: Watch,
    complaints: Seldom,
}

impl Committer {
    /// The connection is of this Kiln's schema; `path` is for messages.
    pub(super) fn new(connection: Connection, path: &Path) -> Result<Self, OpenError> {
        let journal = Journal::of(&connection).map_err(schema::at(path, "measure the journal of"))?;
        let (events, _) = broadcast::channel(BROADCAST);
        let counters = Counters { journal_rows: AtomicU64::new(journal.rows()), ..Counters::default() };
        let watch = Watch { counters: Arc::new(counters), events };
        let files = Files::of(path);
        Ok(Self { connection, path: path.to_owned(), files, journal, watch, complaints: Seldom::once_in(COMPLAINTS) })
    }

    pub(super) fn watch(&self) -> Watch {
        self.watch.clone()
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(super) fn into_connection(self) -> Connection {
        self.connection
    }

    /// A failure that is not a write's, in the store's words.
    pub(super) fn failure(&self, doing: &'static str, source: rusqlite::Error) -> StoreError {
        StoreError::sqlite(doing)(source).of_database(&self.path)
    }

    /// Commits `batch` and answers everybody in it, which leaves it empty.
    pub(super) fn commit(&mut self, batch: &mut Vec<Box<dyn Job>>) {
        let mut events = Vec::new();
        let before = self.journal;
        let there = self.files.as_mut().map_or(Ok(()), Files::are_there);
        let committed = there.and_then(|()| self.run_in_transaction(batch, &mut events));
        let committed = committed.map_err(|error| error.of_database(&self.path));
        match &committed {
            Ok(()) => {
                self.watch.counters.commits.fetch_add(1, Ordering::Relaxed);
                self.watch.counters.writes.fetch_add(batch.len() as u64, Ordering::Relaxed);
                for event in events {
                    // An error here only means that nobody listens.
                    let _ = self.watch.events.send(event);
                }
            }
            Err(error) => {
                self.journal = before;
                self.leave_transaction();
                if self.complaints.is_due(Instant::now()) {
                    error!(error = in_one_line(error), writes = batch.len(), "nothing of this commit was written");
                }
            }
        }
        self.watch.counters.journal_rows.store(self.journal.rows(), Ordering::Relaxed);
        for job in batch.drain(..) {
            if job.answer(committed.clone(), &self.path) {
                self.watch.event_dropped();
            }
        }
    }

    fn run_in_transaction(&mut self, batch: &mut [Box<dyn Job>], events: &mut Vec<Event>) -> Result<(), StoreError> {
        self.execute("BEGIN IMMEDIATE").map_err(StoreError::sqlite("begin a commit"))?;
        for job in batch {
            self.execute("SAVEPOINT one").map_err(StoreError::sqlite("begin a write"))?;
            let (announced, before) = (events.len(), self.journal);
            let mut writing = Writing { connection: &self.connection, events, journal: &mut self.journal };
            // A fault in one write must not end the thread that all others need.
            let outcome = catch_unwind(AssertUnwindSafe(|| job.run(&mut writing))).unwrap_or(Err(StoreError::Closed));
            if let Err(error) = outcome {
                events.truncate(announced);
                self.journal = before;
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
}
