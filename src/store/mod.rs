//! What must survive: projects, leases, the journal of events. SQLite, one file.
//!
//! One writer thread takes writes from a channel and commits whatever has gathered together: one `fdatasync` for many
//! answers (group commit). `synchronous=FULL`, so a write that was acknowledged survives `kill -9` and power loss (K4).
//! Readers have connections of their own and never wait for the writer.
//!
//! Promises: a write is acknowledged only after its commit; writes are applied in the order of their submission; each is
//! atomic, and one that fails does not harm the others in its commit. A file from a newer Kiln, another program's, or one
//! that another kilnd holds is refused at opening with an error that says so; a damaged one, too, or it is kept beside a
//! new one, as the caller asks. A damaged row spoils nothing but itself: lists leave it out and tell of it once.
//!
//! What a warm `/route` costs: one row in `leases`, `projects` and `events` each, six pages on average, appended to a log
//! whose blocks are allocated already, and one `fdatasync` of it. Moving pages from the log to the database happens
//! between commits (`writer`).
//!
//! | file | what is in it |
//! |---|---|
//! | `lock` | one kilnd per database |
//! | `schema` | from a path to a database that can be trusted; migrations |
//! | `aside` | how a damaged database makes way for a new one |
//! | `commit` | the group commit |
//! | `writer` | the writing thread: queue and checkpoints |
//! | `writes` | each write as SQL |
//! | `readers` | connections that only read |
//! | `rows` | from rows to the domain's types |
//! | `tokens` | tokens that were given out, as rows |
//! | `damage` | rows that do not fit |
//! | `events` | the journal, and how much of it is kept |
//! | `files` | that the open files are still those of their names |
//! | `memory` | the same without a file and a thread, for simulations |
//!
//! What must not be here: rules about leases and phases (kiln-domain), secrets in clear.

mod aside;
mod commit;
mod damage;
mod error;
mod events;
mod files;
mod lock;
mod memory;
mod readers;
mod rows;
mod schema;
mod tokens;
mod writer;
mod writes;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_domain::access::TokenId;
use kiln_domain::{AddressPool, BuildTimes, Identity, Key, Lease, ProjectRecord, Timestamp, TokenHash};
use rusqlite::Connection;
use tokio::sync::broadcast;
use tracing::error;

pub use commit::{Commit, Figures};
use commit::{Watch, Writing};
pub use damage::Damaged;
use damage::Told;
pub use error::{OpenError, StoreError};
pub use events::{Event, NewEvent, Retention};
use lock::Lock;
use memory::Memory;
pub use memory::{MemoryDisk, Saved};
use readers::Readers;
use rows::List;
pub use rows::TakenUp;
pub use tokens::TokenRecord;
use writer::Writer;
pub use writes::Created;

use crate::causes::in_one_line;

/// The open database. Clones are the same one; when the last is dropped, what was submitted is written (the drop waits
/// for that), the file is closed and the lock given back. Over a [`MemoryDisk`], nothing is written but by that.
#[derive(Clone)]
pub struct Store {
    engine: Arc<Engine>,
    told: Arc<Told>,
}

enum Engine {
    /// Dropped in this order: readers first, so that the writer is the last to close and can empty the log.
    File {
        readers: Readers,
        writer: Writer,
    },
    Memory(Arc<Memory>),
}

/// The answer of [`Store::open_or_set_aside`].
pub struct Opened {
    pub store: Store,
    /// Where the damaged database is kept whose place this one took.
    pub set_aside: Option<PathBuf>,
}

/// The lock on a database whose directory is there.
fn lock(path: &Path) -> Result<Lock, OpenError> {
    let directory = lock::directory(path);
    let problem = |why| OpenError::Directory { directory: directory.to_owned(), why };
    match directory.metadata() {
        Ok(metadata) if metadata.is_dir() => Lock::acquire(path),
        Ok(_) => Err(problem("it is not a directory".to_owned())),
        Err(error) => Err(problem(error.to_string())),
    }
}

impl Store {
    /// Says at once, and without touching anything, that another kilnd holds the database at `path`.
    pub fn check_free(path: &Path) -> Result<(), OpenError> {
        Lock::check_free(path)
    }

    /// Opens the database at `path`, making it if there is none; its directory must exist. A damaged one is refused.
    /// Blocks: reads the whole file once to check it.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, schema::MIGRATIONS)
    }

    /// Like [`Store::open`], but for a damaged database: that one is kept beside the path, with its log, and a new one
    /// made. Only damage counts as such: a full disk, one that is read-only or cannot be read, a newer Kiln's database,
    /// another program's and one that is held are refused as ever. Whenever the process dies, the next call finishes it.
    pub fn open_or_set_aside(path: &Path, now: Timestamp) -> Result<Opened, OpenError> {
        let lock = lock(path)?;
        let (connection, set_aside) = match schema::open_writer(path, schema::MIGRATIONS) {
            Err(damage @ OpenError::Corrupt { .. }) => {
                let kept = aside::set_aside(path, now)?;
                error!(error = in_one_line(&damage), kept = %kept.display(), "a new database is made");
                (schema::open_writer(path, schema::MIGRATIONS)?, Some(kept))
            }
            opened => (opened?, None),
        };
        Ok(Opened { store: Self::start(path, connection, lock)?, set_aside })
    }

    fn open_with(path: &Path, migrations: &[&str]) -> Result<Self, OpenError> {
        let lock = lock(path)?;
        Self::start(path, schema::open_writer(path, migrations)?, lock)
    }

    fn start(path: &Path, connection: Connection, lock: Lock) -> Result<Self, OpenError> {
        let readers = Readers::open(path)?;
        let writer = Writer::start(connection, path, lock)?;
        Ok(Self::with(Engine::File { readers, writer }))
    }

    /// For simulations: a database in memory that commits when its disk is told to, and never by itself. Needs no thread
    /// and no timer, so that it runs under a paused clock; everything else is as it is over a file.
    pub fn in_memory() -> Result<(Self, MemoryDisk), OpenError> {
        MemoryDisk::new()
    }

    fn over(memory: Arc<Memory>) -> Self {
        Self::with(Engine::Memory(memory))
    }

    fn with(engine: Engine) -> Self {
        Self { engine: Arc::new(engine), told: Arc::default() }
    }

    async fn read<T, F>(&self, read: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    {
        match &*self.engine {
            Engine::File { readers, .. } => readers.read(read).await,
            Engine::Memory(memory) => memory.read(read),
        }
    }

    /// What does not fit is left out, and told of once.
    async fn list<T, F>(&self, read: F) -> Result<Vec<T>, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<List<T>, StoreError> + Send + 'static,
    {
        let (fits, damaged) = self.read(read).await?;
        for row in self.told.news(&damaged) {
            error!(row = row.key, "a row of the database is damaged and left out: {}", row.why);
        }
        Ok(fits)
    }

    fn submit<T, F>(&self, write: F) -> Commit<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Writing<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        self.submit_telling(false, write)
    }

    /// `tells`: an event goes along, and counts as dropped if it does not get into the journal.
    fn submit_telling<T, F>(&self, tells: bool, write: F) -> Commit<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Writing<'_>) -> Result<T, StoreError> + Send + 'static,
    {
        match &*self.engine {
            Engine::File { writer, .. } => writer.submit(tells, write),
            Engine::Memory(memory) => memory.submit(tells, write),
        }
    }

    fn watch(&self) -> &Watch {
        match &*self.engine {
            Engine::File { writer, .. } => writer.watch(),
            Engine::Memory(memory) => memory.watch(),
        }
    }

    pub async fn project(&self, key: &Key) -> Result<Option<ProjectRecord>, StoreError> {
        let key = key.clone();
        self.read(move |connection| rows::project(connection, &key)).await
    }

    /// By key.
    pub async fn projects(&self) -> Result<Vec<ProjectRecord>, StoreError> {
        self.list(rows::projects).await
    }

    /// Everything a start of Kiln has to know. The damaged rows are the caller's to tell of.
    pub async fn take_up(&self) -> Result<TakenUp, StoreError> {
        let found = self.read(rows::take_up).await?;
        self.told.news(&found.damaged);
        Ok(found)
    }

    /// A project's leases, the oldest first; none of a project that is unknown.
    pub async fn leases(&self, key: &Key) -> Result<Vec<Lease>, StoreError> {
        let key = key.clone();
        self.list(move |connection| rows::leases(connection, &key)).await
    }

    /// The lease with this token, and whose it is.
    pub async fn lease(&self, token: &TokenHash) -> Result<Option<(Key, Lease)>, StoreError> {
        let token = token.clone();
        self.read(move |connection| rows::lease(connection, &token)).await
    }

    /// The leases of all projects, by key and age.
    pub async fn all_leases(&self) -> Result<Vec<(Key, Lease)>, StoreError> {
        self.list(rows::all_leases).await
    }

    /// At most `limit` events with ids above `after`, in order; fewer where the journal ends.
    pub async fn events(&self, after: i64, limit: u32) -> Result<Vec<Event>, StoreError> {
        self.list(move |connection| rows::events(connection, after, limit)).await
    }

    /// The latest `limit` events about a project, the newest last.
    pub async fn events_of(&self, key: &Key, limit: u32) -> Result<Vec<Event>, StoreError> {
        let key = key.clone();
        self.list(move |connection| rows::latest_events_of(connection, &key, limit)).await
    }

    /// As [`Store::events`], of those about a project.
    pub async fn later_events_of(&self, key: &Key, after: i64, limit: u32) -> Result<Vec<Event>, StoreError> {
        let key = key.clone();
        self.list(move |connection| rows::later_events_of(connection, &key, after, limit)).await
    }

    /// 0 before the first.
    pub async fn latest_event_id(&self) -> Result<i64, StoreError> {
        self.read(rows::latest_event_id).await
    }

    /// Events from now on, each after its commit, in the order of their ids. A receiver that lags reads the rest with
    /// [`Store::events`].
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.watch().subscribe()
    }

    /// Whether the database is new, and the projects that the host may have are not in it: until [`Store::rebuilt`]. So a
    /// crash in the middle of rebuilding only means that it is done again.
    pub async fn needs_rebuild(&self) -> Result<bool, StoreError> {
        self.read(|connection| rows::note(connection, writes::REBUILT)).await.map(|note| note.is_none())
    }

    pub fn figures(&self) -> Figures {
        self.watch().figures()
    }

    /// What has the key of `identity`, a project or what is derived from one: the one there is, or a new one with the lowest free address of `pool`.
    /// An existing one with another identity is [`StoreError::OtherIdentity`].
    pub fn create_project(&self, identity: impl Into<Identity>, pool: AddressPool, now: Timestamp) -> Commit<Created> {
        let identity = identity.into();
        self.submit(move |writing| writes::create_project(writing, identity, pool, now))
    }

    /// Puts in a whole record, as a rebuild or the trash has it. Its address is kept if it is free and in `pool`; else it
    /// gets the lowest free one. One that is there already with this identity is answered as it is, but for the size of its
    /// cache if it knows none, and `event` is not written; one with another identity is [`StoreError::OtherIdentity`].
    pub fn adopt_project(&self, record: ProjectRecord, pool: AddressPool, event: Option<NewEvent>) -> Commit<Created> {
        self.submit_telling(event.is_some(), move |writing| writes::adopt_project(writing, record, pool, event))
    }

    /// [`Store::adopt_project`], also where a row of the project is there that cannot be read: it is replaced, and the
    /// project keeps its leases.
    pub fn mend_project(&self, record: ProjectRecord, pool: AddressPool, event: Option<NewEvent>) -> Commit<Created> {
        self.submit_telling(event.is_some(), move |writing| writes::mend_project(writing, record, pool, event))
    }

    /// Writes phase, generation, incarnation, settings, builds and last activity as `record` has them; identity, address
    /// and birth are for life.
    pub fn save_project(&self, record: &ProjectRecord, event: Option<NewEvent>) -> Commit<()> {
        let record = record.clone();
        self.submit_telling(event.is_some(), move |writing| writes::save_project(writing, &record, event))
    }

    /// Forgets a project and its leases; its events stay. False: there was none, and nothing is written. In any phase but
    /// `Removing` it is [`StoreError::NotRemoving`].
    pub fn remove_project(&self, key: &Key, event: Option<NewEvent>) -> Commit<bool> {
        let key = key.clone();
        self.submit_telling(event.is_some(), move |writing| writes::remove_project(writing, &key, event))
    }

    /// Forgets a project of which nothing ever came: absent, never started, with no settings of its own and no lease. False: it
    /// is not one of those, and nothing is written.
    pub fn forget_unborn(&self, key: &Key) -> Commit<bool> {
        let key = key.clone();
        self.submit(move |writing| writes::forget_unborn(writing, &key))
    }

    /// Adds the lease, moves the project's last activity forward to the lease's birth, and notes its builds.
    pub fn add_lease(&self, key: &Key, lease: &Lease, builds: &BuildTimes, event: Option<NewEvent>) -> Commit<()> {
        let (key, lease, builds) = (key.clone(), lease.clone(), builds.clone());
        self.submit_telling(event.is_some(), move |writing| writes::add_lease(writing, &key, &lease, &builds, event))
    }

    /// Notes that the client was there at `renewed`, unless it was there later. False: there is no such lease.
    pub fn renew_lease(&self, token: &TokenHash, renewed: Timestamp) -> Commit<bool> {
        let token = token.clone();
        self.submit(move |writing| writes::renew_lease(writing, &token, renewed))
    }

    /// Removes the lease and moves its project's last activity forward to `now`. Where there is none: false, and
    /// nothing is written, not even the event.
    pub fn remove_lease(&self, token: &TokenHash, now: Timestamp, event: Option<NewEvent>) -> Commit<bool> {
        let token = token.clone();
        self.submit_telling(event.is_some(), move |writing| writes::remove_lease(writing, &token, now, event))
    }

    /// Removes leases that count no more, which is nobody's activity. Resolves to how many there were.
    pub fn forget_leases(&self, tokens: Vec<TokenHash>) -> Commit<usize> {
        self.submit(move |writing| writes::forget_leases(writing, &tokens))
    }

    /// A write that changes something, committed like any other: whether the database can be written to.
    pub fn ping(&self) -> Commit<()> {
        self.submit(|writing| writes::ping(writing))
    }

    /// The projects of the host are in the database; ends [`Store::needs_rebuild`].
    pub fn rebuilt(&self, event: Option<NewEvent>) -> Commit<()> {
        self.submit_telling(event.is_some(), move |writing| writes::rebuilt(writing, event))
    }

    /// Adds to the journal; resolves to the event's id.
    pub fn record(&self, event: NewEvent) -> Commit<i64> {
        self.submit_telling(true, move |writing| events::record(writing, event))
    }

    /// The oldest first.
    pub async fn tokens(&self) -> Result<Vec<TokenRecord>, StoreError> {
        self.list(tokens::tokens).await
    }

    /// Whether one was ever given out, also if it is gone.
    pub async fn tokens_were_given(&self) -> Result<bool, StoreError> {
        self.read(tokens::were_given).await
    }

    /// [`StoreError::TooManyTokens`] where there are as many as may be.
    pub fn add_token(&self, token: &TokenRecord, event: NewEvent) -> Commit<()> {
        let token = token.clone();
        self.submit_telling(true, move |writing| tokens::add(writing, &token, event))
    }

    /// False: there is no such token, and the event is not written.
    pub fn remove_token(&self, id: &TokenId, event: NewEvent) -> Commit<bool> {
        let id = id.clone();
        self.submit_telling(true, move |writing| tokens::remove(writing, &id, event))
    }

    /// Notes that it was used at `at`, unless it was later.
    pub fn token_used(&self, id: &TokenId, at: Timestamp) -> Commit<()> {
        let id = id.clone();
        self.submit(move |writing| tokens::used(writing, &id, at))
    }

    /// Bounds the journal, from its next event on; [`Retention::default`] until then. What is too much by then goes in
    /// small steps, with the events that come.
    pub fn retain(&self, retention: Retention) -> Commit<()> {
        self.submit(move |writing| {
            writing.journal.retention = retention;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests;
