//! What can go wrong with the store, once it is open and while it is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kiln_domain::{AddressPool, BuildSpec, Key};
use rusqlite::ErrorCode;
use thiserror::Error;

/// Why a read or a write did not happen. A write whose answer is an error is not in the file, with one exception that
/// no database can rule out: when the disk fails in the middle of a commit, what it kept is known after a restart only.
#[derive(Debug, Clone, Error)]
pub enum StoreError {
    /// K1: two identities with one key are never given one daemon.
    #[error(
        "key {key} belongs to repo {:?} name {:?} target {:?} arch {}; another build must not share its cache: \
         give this one another name",
        .stored.repo.as_str(), .stored.name, .stored.target, .stored.arch
    )]
    OtherIdentity { key: Key, stored: Box<BuildSpec> },
    #[error("no address is free in {pool}, which has room for {} projects: widen the range", .pool.size())]
    NoAddress { pool: AddressPool },
    #[error("there is no project {key} in the database")]
    UnknownProject { key: Key },
    #[error("project {key} is {phase} and not being removed: nothing of it is forgotten")]
    NotRemoving { key: Key, phase: String },
    /// Only somebody else's hand can have written this.
    #[error(
        "what the database holds under {stored} belongs under {right}: give it that key again, or remove the row, and \
         its project is found again by its next build"
    )]
    WrongKey { stored: Key, right: Key },
    #[error("the database has {waiting} writes waiting and takes no more: try again in a second")]
    WritesWaiting { waiting: usize },
    #[error("no connection to the database became free within {seconds} s: try again in a second")]
    ReadsWaiting { seconds: u64 },
    #[error("the database is new, and the host could not be looked through yet for the projects it has: {why}")]
    Rebuilding { why: String },
    /// It goes on, and its connection comes back with its end.
    #[error("a read of {path} did not end within {} s: look whether its disk hangs", .after.as_secs())]
    ReadHangs { path: PathBuf, after: Duration },
    /// Nothing was written. It goes by with whatever the other program does.
    #[error("cannot {doing}: another program has {path} locked: a backup, or `sqlite3`? Try again when it has ended")]
    Locked {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: Arc<rusqlite::Error>,
    },
    #[error("the database is closed")]
    Closed,
    /// Nothing was written. Reads go on.
    #[error("the disk is full: free some space on the file system of {path}")]
    Full { path: PathBuf },
    /// Nothing was written: it would have gone into a file that no start finds again.
    #[error(
        "{path} was removed or replaced while kilnd had it open: restart kilnd, which takes up what is there then, or \
         rebuilds it from the host"
    )]
    Gone { path: PathBuf },
    #[error(
        "there are {most} tokens already, and that is as many as may be: revoke those that nobody uses (`kiln token list`)"
    )]
    TooManyTokens { most: usize },
    /// Nothing was written. Reads may go on.
    #[error(
        "cannot {doing}: the disk of {path} is read-only or fails; see what `dmesg` says of it, and mount it to be written again"
    )]
    Disk {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: Arc<rusqlite::Error>,
    },
    #[error("cannot {doing}")]
    Sqlite {
        doing: &'static str,
        #[source]
        source: Arc<rusqlite::Error>,
    },
    #[error("cannot read the {name} of a row of the database")]
    Column {
        name: &'static str,
        #[source]
        source: Arc<rusqlite::Error>,
    },
    /// Only somebody else's hand can have written this.
    #[error(
        "the database holds {found:?} as {column}, which Kiln never writes: restore it from a copy; a project comes back \
         from what the host has of it with `kilnd --rebuild`"
    )]
    Nonsense { column: &'static str, found: String },
}

/// For what goes away by itself.
const SOON: Duration = Duration::from_secs(1);

/// For a disk that somebody has to see to.
const AFTER_A_REPAIR: Duration = Duration::from_secs(30);

impl StoreError {
    /// Whether the same call may succeed later without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::WritesWaiting { .. }
                | Self::ReadsWaiting { .. }
                | Self::ReadHangs { .. }
                | Self::Rebuilding { .. }
                | Self::Locked { .. }
        )
    }

    /// Whether it was refused by a rule, and the database is well.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::OtherIdentity { .. }
                | Self::NoAddress { .. }
                | Self::UnknownProject { .. }
                | Self::NotRemoving { .. }
                | Self::WrongKey { .. }
                | Self::TooManyTokens { .. }
        )
    }

    /// When to try the same call again: also where the disk must be seen to first, because whoever can wait does better to
    /// come again than to give up. `None`: it would fail as it did.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::WritesWaiting { .. } | Self::ReadsWaiting { .. } | Self::Rebuilding { .. } | Self::Locked { .. } => {
                Some(SOON)
            }
            Self::ReadHangs { .. } | Self::Full { .. } | Self::Disk { .. } | Self::Gone { .. } => Some(AFTER_A_REPAIR),
            Self::OtherIdentity { .. }
            | Self::NoAddress { .. }
            | Self::UnknownProject { .. }
            | Self::NotRemoving { .. }
            | Self::WrongKey { .. }
            | Self::TooManyTokens { .. }
            | Self::Closed
            | Self::Sqlite { .. }
            | Self::Column { .. }
            | Self::Nonsense { .. } => None,
        }
    }

    pub(super) fn sqlite(doing: &'static str) -> impl Fn(rusqlite::Error) -> Self {
        move |source| Self::Sqlite { doing, source: Arc::new(source) }
    }

    /// Says which database it is where that is what somebody has to know.
    pub(super) fn of_database(self, path: &Path) -> Self {
        let path = path.to_owned();
        match self {
            Self::Sqlite { source, .. } if is_no_room(&source) => Self::Full { path },
            Self::Sqlite { doing, source } if is_locked(&source) => Self::Locked { doing, path, source },
            Self::Sqlite { doing, source } if is_disk(&source) => Self::Disk { doing, path, source },
            other => other,
        }
    }
}

/// Where a full disk shows, be it in a write or in the index of the log, which is made anew after a clean stop.
pub(super) fn is_no_room(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| {
        error.code == ErrorCode::DiskFull || error.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE
    })
}

/// Where a disk shows that is read-only, or fails: a file system that hits an error turns read-only under an open file,
/// which is an error of input and output to SQLite.
fn is_disk(error: &rusqlite::Error) -> bool {
    use ErrorCode::{CannotOpen, ReadOnly, SystemIoFailure};

    matches!(error.sqlite_error_code(), Some(ReadOnly | SystemIoFailure | CannotOpen))
}

/// Where somebody else's transaction shows that did not end within the time that SQLite waits for it.
fn is_locked(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Why the database cannot be used. Nothing was changed when it is refused.
#[derive(Debug, Error)]
pub enum OpenError {
    #[error(
        "cannot keep the database in {directory}: {why}; make the directory, owned by the user kilnd runs as, mode 0700"
    )]
    Directory { directory: PathBuf, why: String },
    #[error(
        "{path} is held by another kilnd{}: stop that one first, or give this one another state directory",
        .pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
    )]
    Held { path: PathBuf, pid: Option<u32> },
    #[error(
        "{path} was written by a newer Kiln: its schema is version {found}, this one knows {known}; \
         install the newer Kiln again, or go back to the copy {path}.before-{}", .known + 1
    )]
    Newer { path: String, found: i64, known: i64 },
    #[error("{path} is a SQLite database of another program: give kilnd another state directory")]
    Foreign { path: PathBuf },
    #[error("{path} is damaged: {detail}; {remedy}")]
    Corrupt { path: PathBuf, detail: String, remedy: &'static str },
    #[error("the disk is full: free some space on the file system of {path}")]
    Full { path: PathBuf },
    #[error("cannot {doing} {path}")]
    Io {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot {doing} {path}")]
    Sqlite {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
}
