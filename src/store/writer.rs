//! The one thread that writes to the file.
//!
//! ```text
//!   submit ──▶ queue (bounded) ──▶ take what has gathered ──▶ commit ──▶ checkpoint, if due
//! ```
//!
//! While one commit waits for the disk, the next writes gather; so the slower the disk, the more share its flush, and
//! no timer is needed: a write that comes alone is committed at once. When a commit fails, the thread goes on.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use rusqlite::Connection;
use tracing::{error, warn};

use super::commit::{self, BATCH, COMPLAINTS, Commit, Committer, Job, QUEUE, Watch, Writing};
use super::lock::Lock;
use super::{OpenError, StoreError};
use crate::causes::in_one_line;
use crate::seldom::Seldom;

/// Pages in the log from which on they are moved to the database (SQLite's own default). 4 MiB, inside the region
/// that is allocated at the start.
const CHECKPOINT_PAGES: i64 = 1000;

pub(super) struct Writer {
    queue: Option<SyncSender<Box<dyn Job>>>,
    thread: Option<JoinHandle<()>>,
    watch: Watch,
}

impl Writer {
    pub(super) fn start(connection: Connection, path: &Path, lock: Lock) -> Result<Self, OpenError> {
        let (queue, jobs) = sync_channel(QUEUE);
        let committer = Committer::new(connection, path)?;
        let watch = committer.watch();
        let worker = Worker { committer, complaints: Seldom::once_in(COMPLAINTS), _lock: lock };
        let thread = std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || worker.run(&jobs))
            .map_err(|source| OpenError::Io { doing: "start the writer of", path: path.to_owned(), source })?;
        Ok(Self { queue: Some(queue), thread: Some(thread), watch })
    }

    /// Puts `write` in the queue, with which an event goes along if it `tells`. Never blocks: where there is no room, the
    /// answer is an error at once.
    pub(super) fn submit<T, F>(&self, tells: bool, write: F) -> Commit<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Writing<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        let (job, commit) = commit::job(tells, write);
        let refusal = match self.queue.as_ref().map(|queue| queue.try_send(job)) {
            Some(Ok(())) => return commit,
            Some(Err(TrySendError::Full(_))) => StoreError::WritesWaiting { waiting: QUEUE },
            Some(Err(TrySendError::Disconnected(_))) | None => StoreError::Closed,
        };
        if tells {
            self.watch.event_dropped();
        }
        Commit::refused(refusal)
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
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

struct Worker {
    committer: Committer,
    complaints: Seldom,
    /// Given back after the connection is closed: fields are dropped in this order.
    _lock: Lock,
}

impl Worker {
    fn run(mut self, jobs: &Receiver<Box<dyn Job>>) {
        let mut batch = Vec::with_capacity(BATCH);
        while let Ok(first) = jobs.recv() {
            batch.push(first);
            batch.extend(jobs.try_iter().take(BATCH - 1));
            self.committer.commit(&mut batch);
            self.checkpoint_if_due();
        }
        // One plain file is left, for whoever copies it.
        if let Err(error) = self.checkpoint("PRAGMA wal_checkpoint(TRUNCATE)") {
            let error = in_one_line(&self.committer.failure("empty the database's log", error));
            warn!(error, "the next start does what is left");
        }
    }

    /// Between two commits and after the answers, so that it is nobody's latency unless writes come without a pause;
    /// and from this thread, so that no commit comes between and the log starts again from its beginning.
    fn checkpoint_if_due(&mut self) {
        let moved = match self.checkpoint("PRAGMA wal_checkpoint(NOOP)") {
            Ok(pages) if pages < CHECKPOINT_PAGES => return,
            Ok(_) => self.checkpoint("PRAGMA wal_checkpoint(PASSIVE)"),
            Err(error) => Err(error),
        };
        if let Err(error) = moved
            && self.complaints.is_due(Instant::now())
        {
            let error = in_one_line(&self.committer.failure("move the database's log into the database", error));
            warn!(error, "could not move the database's log; trying again after each commit");
        }
    }

    /// Pages that were in the log and not in the database yet.
    fn checkpoint(&self, pragma: &str) -> rusqlite::Result<i64> {
        let mut statement = self.committer.connection().prepare_cached(pragma)?;
        statement.query_row([], |row| Ok(row.get::<_, i64>(1)? - row.get::<_, i64>(2)?))
    }
}
