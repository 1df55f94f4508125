//! The store of a simulation: the same writes and reads over a database in memory, and no thread at all.
//!
//! Nothing happens by itself. Writes gather until [`MemoryDisk::commit_now`] commits them together; reads see what was
//! committed and run inline. So a seed decides when a commit happens, what shares it, and what a crash finds.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::backup::Backup;
use rusqlite::{Connection, ffi};
use tokio::sync::Notify;

use super::commit::{self, BATCH, Commit, Committer, Job, QUEUE, Watch, Writing};
use super::{OpenError, Store, StoreError, schema};

/// What messages call it.
const PATH: &str = ":memory:";

pub(super) struct Memory {
    state: Mutex<State>,
    submitted: Notify,
    watch: Watch,
}

struct State {
    /// `None` after the crash.
    committer: Option<Committer>,
    queue: Vec<Box<dyn Job>>,
    full: bool,
}

impl Memory {
    fn open(connection: Connection) -> Result<Arc<Self>, OpenError> {
        let committer = Committer::new(connection, Path::new(PATH))?;
        let watch = committer.watch();
        let state = Mutex::new(State { committer: Some(committer), queue: Vec::new(), full: false });
        Ok(Arc::new(Self { state, submitted: Notify::new(), watch }))
    }

    pub(super) fn submit<T, F>(&self, tells: bool, write: F) -> Commit<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Writing<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        let mut state = self.state();
        if state.committer.is_none() {
            return Commit::refused(StoreError::Closed);
        }
        if state.queue.len() >= QUEUE {
            if tells {
                self.watch.event_dropped();
            }
            return Commit::refused(StoreError::WritesWaiting { waiting: QUEUE });
        }
        let (job, commit) = commit::job(tells, write);
        state.queue.push(job);
        self.submitted.notify_one();
        commit
    }

    pub(super) fn read<T>(&self, read: impl FnOnce(&Connection) -> Result<T, StoreError>) -> Result<T, StoreError> {
        self.state().committer.as_ref().map_or(Err(StoreError::Closed), |committer| read(committer.connection()))
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The disk below a [`Store::in_memory`], for whoever plays fate. Clones are the same one.
#[derive(Clone)]
pub struct MemoryDisk(Arc<Memory>);

impl MemoryDisk {
    pub(super) fn new() -> Result<(Store, Self), OpenError> {
        Self::over(schema::open_in_memory()?)
    }

    fn over(connection: Connection) -> Result<(Store, Self), OpenError> {
        let memory = Memory::open(connection)?;
        Ok((Store::over(memory.clone()), Self(memory)))
    }

    /// How many writes wait for a commit.
    pub fn waiting(&self) -> usize {
        self.0.state().queue.len()
    }

    /// Resolves when a write waits. For one task at a time.
    pub async fn some_waiting(&self) {
        while self.waiting() == 0 {
            self.0.submitted.notified().await;
        }
    }

    /// Commits everything that waits, as the writing thread does: up to 256 writes together. How many there were.
    pub fn commit_now(&self) -> usize {
        self.commit_first(usize::MAX)
    }

    /// Commits the first `count` writes that wait, or as many as there are; the others wait on.
    pub fn commit_first(&self, count: usize) -> usize {
        let mut state = self.0.state();
        let State { committer: Some(committer), queue, full } = &mut *state else { return 0 };
        let count = count.min(queue.len());
        let mut due = queue.drain(..count).peekable();
        while due.peek().is_some() {
            let mut batch: Vec<_> = due.by_ref().take(BATCH).collect();
            if *full {
                batch.push(Box::new(NoRoom));
            }
            committer.commit(&mut batch);
        }
        count
    }

    /// While it is full, every commit fails as SQLite's do on a full disk, and reads go on.
    pub fn set_full(&self, full: bool) {
        self.0.state().full = full;
    }

    /// The process dies: what was not committed is lost, and every use of this store fails as closed from here on. `None`
    /// if it died before.
    pub fn crash(&self) -> Option<Saved> {
        let mut state = self.0.state();
        // Dropping the writes tells those who wait; in a real crash nobody is left to hear it.
        state.queue.clear();
        state.committer.take().map(|committer| Saved(committer.into_connection()))
    }
}

/// What a crash left on the disk.
pub struct Saved(Connection);

impl Saved {
    /// The same once more: many futures for one past, and a beginning that costs no migration.
    pub fn copy(&self) -> Result<Self, OpenError> {
        let mut copy = Connection::open_in_memory().map_err(schema::at(Path::new(PATH), "open"))?;
        Backup::new(&self.0, &mut copy)
            .and_then(|backup| backup.run_to_completion(4096, Duration::ZERO, None))
            .map_err(schema::at(Path::new(PATH), "copy"))?;
        schema::set_up(&copy, Path::new(PATH))?;
        Ok(Self(copy))
    }

    /// The next start.
    pub fn open(self) -> Result<(Store, MemoryDisk), OpenError> {
        MemoryDisk::over(self.0)
    }
}

/// Does what SQLite does when there is no room: the whole transaction is undone, and the statement fails.
struct NoRoom;

impl Job for NoRoom {
    fn run(&mut self, writing: &mut Writing<'_>) -> Result<(), StoreError> {
        let doing = "commit to the database";
        writing.connection.execute_batch("ROLLBACK").map_err(StoreError::sqlite(doing))?;
        Err(StoreError::sqlite(doing)(rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_FULL), None)))
    }

    fn answer(self: Box<Self>, _: Result<(), StoreError>, _: &Path) -> bool {
        false
    }
}
