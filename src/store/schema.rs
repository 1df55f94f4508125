//! From a path to a database that can be trusted: is it ours, is it whole, is it of our version.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

use rusqlite::backup::Backup;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};
use tracing::warn;

use super::OpenError;
use super::aside;
use super::error::is_no_room;
use super::lock::{beside, directory};

/// `KILN`: tells our file from another program's.
const APPLICATION_ID: i64 = 0x4b49_4c4e;

/// In order; the position, counted from 1, is the version a migration leads to. Never changed once released.
pub(super) const MIGRATIONS: &[&str] = &[
    include_str!("migrations/0001_projects_leases_events.sql"),
    include_str!("migrations/0002_ends_settings_builds_reasons.sql"),
    include_str!("migrations/0003_events_by_project.sql"),
    include_str!("migrations/0004_forks_and_caches.sql"),
    include_str!("migrations/0005_tokens.sql"),
];

/// Nobody else writes to the file; this covers an admin who has it open in `sqlite3`.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The write-ahead log is kept this long. A commit then overwrites blocks that are allocated already, so its
/// `fdatasync` has no metadata to write: one flush of the disk and no more.
const WAL_BYTES: u64 = 8 * 1024 * 1024;

/// More than there are, so that each is prepared once.
const STATEMENTS: usize = 64;

const REMEDY: &str = "restore a copy of it, or move it away and start kilnd again: each cache is found again by the next build of its project";

/// Checks, migrates and prepares the file; the connection returned is the only one that may write.
pub(super) fn open_writer(path: &Path, migrations: &[&str]) -> Result<Connection, OpenError> {
    if aside::is_log_alone(path) {
        let detail = "there is a log of it, and it is not there".to_owned();
        return Err(OpenError::Corrupt { path: path.to_owned(), detail, remedy: REMEDY });
    }
    create_private(path)?;
    let sqlite = |doing| at(path, doing);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags).map_err(sqlite("open"))?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(sqlite("set up"))?;
    // What is refused is left as it is, its log included.
    let keep_log = |keep| connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, keep);
    keep_log(true).map_err(sqlite("set up"))?;
    let found = check_ownership(&connection, path, migrations.len())?;
    check_integrity(&connection, path)?;
    keep_log(false).map_err(sqlite("set up"))?;
    // FULL: a commit is on the disk before it is acknowledged (K4). NORMAL would lose the last ones with the power.
    connection
        .execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = OFF;
             PRAGMA wal_autocheckpoint = 0; PRAGMA journal_size_limit = 67108864;",
        )
        .map_err(sqlite("set up"))?;
    migrate(&mut connection, path, found, migrations)?;
    set_up(&connection, path)?;
    // A full disk must not keep kilnd from starting: it has builds to look after.
    if let Err(error) = allocate_wal(path) {
        warn!(%error, path = %path.display(), "could not allocate the database's log in advance; writes take longer");
    }
    Ok(connection)
}

/// The same schema, in memory.
pub(super) fn open_in_memory() -> Result<Connection, OpenError> {
    let path = Path::new(":memory:");
    let mut connection = Connection::open_in_memory().map_err(at(path, "open"))?;
    migrate(&mut connection, path, 0, MIGRATIONS)?;
    set_up(&connection, path)?;
    Ok(connection)
}

/// What a connection that writes needs once the schema is there. Foreign keys not before: a row that belongs to nothing
/// is told of by whoever reads it, and must not keep kilnd from starting.
pub(super) fn set_up(connection: &Connection, path: &Path) -> Result<(), OpenError> {
    connection.execute_batch("PRAGMA foreign_keys = ON").map_err(at(path, "set up"))?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    Ok(())
}

/// For readers: `query_only` by its open mode. The writer must be open already.
pub(super) fn open_reader(path: &Path) -> Result<Connection, OpenError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(at(path, "open"))?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(at(path, "set up"))?;
    // 512 KiB of pages, a quarter of the default: the hot ones are in the kernel's cache anyway.
    connection.execute_batch("PRAGMA cache_size = -512;").map_err(at(path, "set up"))?;
    Ok(connection)
}

/// SQLite gives its side files the mode of the database, so this decides for all of them.
fn create_private(path: &Path) -> Result<(), OpenError> {
    let io = |doing| move |source| OpenError::Io { doing, path: path.to_owned(), source };
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(io("open"))?;
    let metadata = file.metadata().map_err(io("look at"))?;
    if metadata.mode() & 0o077 != 0 {
        file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(io("make private"))?;
    }
    Ok(())
}

/// The schema's version, 0 for an empty file.
fn check_ownership(connection: &Connection, path: &Path, known: usize) -> Result<usize, OpenError> {
    let read = |sql| connection.query_row(sql, [], |row| row.get::<_, i64>(0)).map_err(at(path, "read"));
    let (application, version) = (read("PRAGMA application_id")?, read("PRAGMA user_version")?);
    let tables = read("SELECT count(*) FROM sqlite_schema")?;
    if application != APPLICATION_ID && (tables > 0 || application != 0) {
        return Err(OpenError::Foreign { path: path.to_owned() });
    }
    match usize::try_from(version) {
        Ok(version) if version <= known => Ok(version),
        _ => Err(OpenError::Newer {
            path: path.display().to_string(),
            found: version,
            known: version_number(known).into(),
        }),
    }
}

fn check_integrity(connection: &Connection, path: &Path) -> Result<(), OpenError> {
    let corrupt = |detail| OpenError::Corrupt { path: path.to_owned(), detail, remedy: REMEDY };
    let verdict: String =
        connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(at(path, "check"))?;
    if verdict != "ok" {
        return Err(corrupt(verdict));
    }
    Ok(())
}

/// Each migration is one transaction together with its number, so a crash leaves the version before or after it.
fn migrate(connection: &mut Connection, path: &Path, found: usize, migrations: &[&str]) -> Result<(), OpenError> {
    for (index, sql) in migrations.iter().enumerate().skip(found) {
        let version = version_number(index + 1);
        if found > 0 {
            keep_copy(connection, path, version)?;
        }
        let migrate = |connection: &mut Connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            transaction.execute_batch(sql)?;
            transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
            transaction.pragma_update(None, "user_version", version)?;
            transaction.commit()
        };
        migrate(connection).map_err(at(path, "migrate"))?;
    }
    Ok(())
}

/// There are never so many that this saturates.
fn version_number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// `<path>.before-<version>`: the way back when a new Kiln turns out to be worse. Complete or not there.
fn keep_copy(connection: &Connection, path: &Path, version: u32) -> Result<(), OpenError> {
    let copy = beside(path, &format!(".before-{version}"));
    let unfinished = beside(&copy, ".unfinished");
    let io = |doing| {
        let path = copy.clone();
        move |source| OpenError::Io { doing, path, source }
    };
    if unfinished.exists() {
        fs::remove_file(&unfinished).map_err(io("replace the unfinished copy"))?;
    }
    create_private(&unfinished)?;
    let mut target = Connection::open(&unfinished).map_err(at(&unfinished, "open"))?;
    Backup::new(connection, &mut target)
        .and_then(|backup| backup.run_to_completion(4096, Duration::ZERO, None))
        .map_err(at(&unfinished, "copy the database to"))?;
    target.close().map_err(|(_, error)| at(&unfinished, "close")(error))?;
    fs::rename(&unfinished, &copy).map_err(io("keep the copy"))?;
    sync_directory(path).map_err(io("keep the copy"))
}

fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(directory(path))?.sync_all()
}

/// Writes zeros behind what the log holds. They are no frames to SQLite (their salt and checksum are wrong), and its
/// locks are on other files, so this is safe beside the open connection. Truncation by SQLite only costs the speed.
fn allocate_wal(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt as _;

    let wal = beside(path, "-wal");
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(&wal)?;
    let zeros = [0; 8 * 1024];
    let mut end = file.metadata()?.len();
    while end < WAL_BYTES {
        let wanted = zeros.len().min((WAL_BYTES - end) as usize);
        end += file.write_at(&zeros[..wanted], end)? as u64;
    }
    file.sync_all()
}

/// A damaged file may show itself in any statement.
pub(super) fn at(path: &Path, doing: &'static str) -> impl Fn(rusqlite::Error) -> OpenError {
    let path = path.to_owned();
    move |source| match source.sqlite_error_code() {
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            OpenError::Corrupt { path: path.clone(), detail: source.to_string(), remedy: REMEDY }
        }
        _ if is_no_room(&source) => OpenError::Full { path: path.clone() },
        _ => OpenError::Sqlite { doing, path: path.clone(), source },
    }
}
