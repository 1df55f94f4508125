//! From rows to the domain's types. Whatever does not fit is an error that says which column.

use std::net::Ipv4Addr;
use std::sync::Arc;

use kiln_domain::{BuildSpec, Generation, Key, Lease, Phase, ProjectRecord, Timestamp, TokenHash};
use rusqlite::types::{FromSql, ValueRef};
use rusqlite::{Connection, Params, Row};
use serde::de::DeserializeOwned;

use super::StoreError;
use super::damage::Damaged;
use super::events::Event;
use crate::causes::in_one_line;

/// A column of one of the lists below: where in it, and its name for messages. Looked up by name, ten thousand projects
/// would take twice as long.
type Column = (usize, &'static str);

const PROJECT: &str = "SELECT key, repo, name, target, arch, address, phase, phase_reason, generation, incarnation,
    settings, builds, created, last_activity, pull_request, cache FROM projects";

const LEASE: &str = "SELECT key, token, created, renewed, expires FROM leases";

const EVENT: &str = r#"SELECT id, at, key, kind, "by", rule, text FROM events"#;

/// Projects and leases begin with it.
const KEY: Column = (0, "key");

/// The rows of a list that fit, and those that do not.
pub(super) type List<T> = (Vec<T>, Vec<Damaged>);

const ALL: usize = usize::MAX;

pub(super) fn project(connection: &Connection, key: &Key) -> Result<Option<ProjectRecord>, StoreError> {
    let sql = format!("{PROJECT} WHERE key = ?1");
    Ok(collect(connection, &sql, [key.as_str()], "read the project", to_project)?.pop())
}

/// Whatever its key: for who compares its identity.
pub(super) fn project_as_stored(connection: &Connection, key: &Key) -> Result<Option<ProjectRecord>, StoreError> {
    let sql = format!("{PROJECT} WHERE key = ?1");
    Ok(collect(connection, &sql, [key.as_str()], "read the project", to_project_as_stored)?.pop())
}

pub(super) fn projects(connection: &Connection) -> Result<List<ProjectRecord>, StoreError> {
    list(connection, &format!("{PROJECT} ORDER BY key"), [], ALL, "read the projects", to_project)
}

pub(super) fn leases(connection: &Connection, key: &Key) -> Result<List<Lease>, StoreError> {
    let sql = format!("{LEASE} WHERE key = ?1 ORDER BY created, token");
    list(connection, &sql, [key.as_str()], ALL, "read the leases", to_lease)
}

pub(super) fn lease(connection: &Connection, token: &TokenHash) -> Result<Option<(Key, Lease)>, StoreError> {
    let sql = format!("{LEASE} WHERE token = ?1");
    Ok(collect(connection, &sql, [token.as_str()], "read the lease", to_key_and_lease)?.pop())
}

pub(super) fn all_leases(connection: &Connection) -> Result<List<(Key, Lease)>, StoreError> {
    let sql = format!("{LEASE} ORDER BY key, created, token");
    list(connection, &sql, [], ALL, "read the leases", to_key_and_lease)
}

/// What a start of Kiln takes up, by key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TakenUp {
    pub projects: Vec<ProjectRecord>,
    /// The oldest of a project first. Those of a damaged project are here, too: its daemon may have builds.
    pub leases: Vec<(Key, Lease)>,
    pub damaged: Vec<Damaged>,
}

/// One state of the database, in two queries.
pub(super) fn take_up(connection: &Connection) -> Result<TakenUp, StoreError> {
    let transaction = connection.unchecked_transaction().map_err(StoreError::sqlite("read the database"))?;
    let (projects, mut damaged) = self::projects(&transaction)?;
    let (leases, damaged_leases) = all_leases(&transaction)?;
    damaged.extend(damaged_leases);
    let homeless = "SELECT key FROM leases WHERE key NOT IN (SELECT key FROM projects) GROUP BY key ORDER BY key";
    damaged.extend(collect(&transaction, homeless, [], "look for leases of nothing", |row| {
        Ok(Damaged { key: name_of(row), why: "it has leases, and there is no such project".to_owned() })
    })?);
    Ok(TakenUp { projects, leases, damaged })
}

/// Fewer than `limit` are the last there are, whatever does not fit between them.
pub(super) fn events(connection: &Connection, after: i64, limit: u32) -> Result<List<Event>, StoreError> {
    let sql = format!("{EVENT} WHERE id > ?1 ORDER BY id");
    list(connection, &sql, [after], limit as usize, "read the journal", to_event)
}

/// As [`events`], and about one project.
pub(super) fn later_events_of(
    connection: &Connection,
    key: &Key,
    after: i64,
    limit: u32,
) -> Result<List<Event>, StoreError> {
    list(connection, &later_of(), (key.as_str(), after), limit as usize, "read the journal", to_event)
}

/// The newest, the last of them last.
pub(super) fn latest_events_of(connection: &Connection, key: &Key, limit: u32) -> Result<List<Event>, StoreError> {
    let (mut events, damaged) =
        list(connection, &latest_of(), [key.as_str()], limit as usize, "read the journal", to_event)?;
    events.reverse();
    Ok((events, damaged))
}

pub(super) fn later_of() -> String {
    format!("{EVENT} WHERE key = ?1 AND id > ?2 ORDER BY id")
}

pub(super) fn latest_of() -> String {
    format!("{EVENT} WHERE key = ?1 ORDER BY id DESC")
}

pub(super) fn latest_event_id(connection: &Connection) -> Result<i64, StoreError> {
    let ids = collect(connection, "SELECT coalesce(max(id), 0) AS id FROM events", [], "read the journal", |row| {
        get(row, (0, "id"))
    })?;
    Ok(ids.first().copied().unwrap_or(0))
}

/// `None`: not noted.
pub(super) fn note(connection: &Connection, name: &str) -> Result<Option<i64>, StoreError> {
    let sql = "SELECT value FROM notes WHERE name = ?1";
    Ok(collect(connection, sql, [name], "read the store's notes", |row| get(row, (0, "value")))?.pop())
}

pub(super) fn key(text: String) -> Result<Key, StoreError> {
    text.parse().map_err(|_| StoreError::Nonsense { column: "key", found: text })
}

/// K1, for a row that was renamed by hand: a cache is never opened under another identity's key.
pub(super) fn check_key(record: ProjectRecord) -> Result<ProjectRecord, StoreError> {
    if record.identity().is_consistent() {
        Ok(record)
    } else {
        Err(StoreError::WrongKey { stored: record.key, right: Key::of(&record.spec) })
    }
}

fn to_project(row: &Row<'_>) -> Result<ProjectRecord, StoreError> {
    to_project_as_stored(row).and_then(check_key)
}

fn to_project_as_stored(row: &Row<'_>) -> Result<ProjectRecord, StoreError> {
    let arch: String = get(row, (4, "arch"))?;
    let address: i64 = get(row, (5, "address"))?;
    let generation: i64 = get(row, (8, "generation"))?;
    let spec = BuildSpec {
        repo: repo(get(row, (1, "repo"))?)?,
        name: get(row, (2, "name"))?,
        target: get(row, (3, "target"))?,
        arch: arch.parse().map_err(|_| StoreError::Nonsense { column: "arch", found: arch })?,
    };
    let address = u32::try_from(address)
        .map(Ipv4Addr::from_bits)
        .map_err(|_| StoreError::Nonsense { column: "address", found: address.to_string() })?;
    Ok(ProjectRecord {
        key: key(get(row, KEY)?)?,
        spec,
        address,
        phase: phase(get(row, (6, "phase"))?, get(row, (7, "phase_reason"))?)?,
        generation: Generation::from_stored(generation.unsigned_abs()),
        incarnation: get(row, (9, "incarnation"))?,
        settings: json(row, (10, "settings"))?,
        builds: json(row, (11, "builds"))?,
        created: instant(row, (12, "created"))?,
        last_activity: instant(row, (13, "last_activity"))?,
        pull_request: get(row, (14, "pull_request"))?,
        cache: json(row, (15, "cache"))?,
    })
}

fn to_lease(row: &Row<'_>) -> Result<Lease, StoreError> {
    Ok(Lease {
        token: TokenHash::from_stored(get(row, (1, "token"))?),
        created: instant(row, (2, "created"))?,
        renewed: instant(row, (3, "renewed"))?,
        expires: instant(row, (4, "expires"))?,
    })
}

fn to_key_and_lease(row: &Row<'_>) -> Result<(Key, Lease), StoreError> {
    Ok((key(get(row, KEY)?)?, to_lease(row)?))
}

fn to_event(row: &Row<'_>) -> Result<Event, StoreError> {
    Ok(Event {
        id: get(row, (0, "id"))?,
        at: instant(row, (1, "at"))?,
        key: get::<Option<String>>(row, (2, "key"))?.map(key).transpose()?,
        kind: get(row, (3, "kind"))?,
        by: get(row, (4, "by"))?,
        rule: get(row, (5, "rule"))?,
        text: get(row, (6, "text"))?,
    })
}

/// A normal form is its own normal form, so parsing gives back what was stored.
fn repo(text: String) -> Result<kiln_domain::RepoName, StoreError> {
    kiln_domain::RepoName::parse(&text).map_err(|_| StoreError::Nonsense { column: "repo", found: text })
}

pub(super) fn phase(name: String, reason: Option<String>) -> Result<Phase, StoreError> {
    Ok(match name.as_str() {
        "absent" => Phase::Absent,
        "provisioning" => Phase::Provisioning,
        "starting" => Phase::Starting,
        "warm" => Phase::Warm,
        "draining" => Phase::Draining,
        "rolling" => Phase::Rolling,
        "idle" => Phase::Idle,
        "removing" => Phase::Removing,
        "failed" => Phase::Failed { reason: reason.unwrap_or_default() },
        _ => return Err(StoreError::Nonsense { column: "phase", found: name }),
    })
}

pub(super) fn json<T: DeserializeOwned>(row: &Row<'_>, column: Column) -> Result<T, StoreError> {
    let text: String = get(row, column)?;
    serde_json::from_str(&text).map_err(|_| StoreError::Nonsense { column: column.1, found: text })
}

pub(super) fn instant(row: &Row<'_>, column: Column) -> Result<Timestamp, StoreError> {
    Ok(Timestamp::from_millis(get(row, column)?))
}

pub(super) fn get<T: FromSql>(row: &Row<'_>, (at, name): Column) -> Result<T, StoreError> {
    row.get(at).map_err(|source| StoreError::Column { name, source: Arc::new(source) })
}

fn collect<T>(
    connection: &Connection,
    sql: &str,
    params: impl Params,
    doing: &'static str,
    convert: impl Fn(&Row<'_>) -> Result<T, StoreError>,
) -> Result<Vec<T>, StoreError> {
    let failed = StoreError::sqlite(doing);
    let mut statement = connection.prepare_cached(sql).map_err(&failed)?;
    let mut rows = statement.query(params).map_err(&failed)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().map_err(&failed)? {
        found.push(convert(row)?);
    }
    Ok(found)
}

/// The first `limit` rows that fit. What does not fit harms nothing else.
pub(super) fn list<T>(
    connection: &Connection,
    sql: &str,
    params: impl Params,
    limit: usize,
    doing: &'static str,
    convert: impl Fn(&Row<'_>) -> Result<T, StoreError>,
) -> Result<List<T>, StoreError> {
    let failed = StoreError::sqlite(doing);
    let mut statement = connection.prepare_cached(sql).map_err(&failed)?;
    let mut rows = statement.query(params).map_err(&failed)?;
    let (mut fits, mut damaged) = (Vec::new(), Vec::new());
    while fits.len() < limit
        && let Some(row) = rows.next().map_err(&failed)?
    {
        match convert(row) {
            Ok(row) => fits.push(row),
            Err(error) => damaged.push(Damaged { key: name_of(row), why: in_one_line(&error) }),
        }
    }
    Ok((fits, damaged))
}

/// What a damaged row is called, whatever of it is damaged. Only the journal's have numbers.
fn name_of(row: &Row<'_>) -> String {
    match row.get_ref(KEY.0) {
        Ok(ValueRef::Text(key)) => String::from_utf8_lossy(key).into_owned(),
        Ok(ValueRef::Integer(id)) => format!("event {id}"),
        _ => String::new(),
    }
}
