//! From rows to the domain's types. Whatever does not fit is an error that says which column.

use std::net::Ipv4Addr;
use std::time::Duration;

use kiln_domain::project::{Settings, Tier};
use kiln_domain::{BuildSpec, Generation, Key, Lease, Phase, ProjectRecord, Timestamp, TokenHash};
use rusqlite::{Connection, Params, Row};

use super::StoreError;
use super::events::Event;

const COLUMNS: &str = "key, repo, name, target, arch, address, phase, phase_reason, generation, incarnation, tier,
    idle_window_ms, volume_bytes, created, last_activity";

pub(super) fn project(connection: &Connection, key: &Key) -> Result<Option<ProjectRecord>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM projects WHERE key = ?1");
    Ok(collect(connection, &sql, [key.as_str()], "read the project", to_project)?.pop())
}

pub(super) fn projects(connection: &Connection) -> Result<Vec<ProjectRecord>, StoreError> {
    let sql = format!("SELECT {COLUMNS} FROM projects ORDER BY key");
    collect(connection, &sql, [], "read the projects", to_project)
}

pub(super) fn active_projects(connection: &Connection) -> Result<Vec<ProjectRecord>, StoreError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM projects
        WHERE phase NOT IN ('absent', 'idle') OR tier = 'hot' OR key IN (SELECT key FROM leases) ORDER BY key"
    );
    collect(connection, &sql, [], "read the active projects", to_project)
}

pub(super) fn leases(connection: &Connection, key: &Key) -> Result<Vec<Lease>, StoreError> {
    let sql = "SELECT token, created, renewed FROM leases WHERE key = ?1 ORDER BY created, token";
    collect(connection, sql, [key.as_str()], "read the leases", lease)
}

pub(super) fn all_leases(connection: &Connection) -> Result<Vec<(Key, Lease)>, StoreError> {
    let sql = "SELECT key, token, created, renewed FROM leases ORDER BY key, created, token";
    collect(connection, sql, [], "read the leases", |row| Ok((key(get(row, "key")?)?, lease(row)?)))
}

fn lease(row: &Row<'_>) -> Result<Lease, StoreError> {
    Ok(Lease {
        token: TokenHash::from_stored(get(row, "token")?),
        created: instant(row, "created")?,
        renewed: instant(row, "renewed")?,
    })
}

pub(super) fn events(connection: &Connection, after: i64, limit: u32) -> Result<Vec<Event>, StoreError> {
    let sql = "SELECT id, at, key, kind, text FROM events WHERE id > ?1 ORDER BY id LIMIT ?2";
    collect(connection, sql, (after, limit), "read the journal", |row| {
        Ok(Event {
            id: get(row, "id")?,
            at: instant(row, "at")?,
            key: get::<Option<String>>(row, "key")?.map(key).transpose()?,
            kind: get(row, "kind")?,
            text: get(row, "text")?,
        })
    })
}

pub(super) fn latest_event_id(connection: &Connection) -> Result<i64, StoreError> {
    let ids = collect(connection, "SELECT coalesce(max(id), 0) AS id FROM events", [], "read the journal", |row| {
        get(row, "id")
    })?;
    Ok(ids.first().copied().unwrap_or(0))
}

pub(super) fn key(text: String) -> Result<Key, StoreError> {
    text.parse().map_err(|_| StoreError::Nonsense { column: "key", found: text })
}

pub(super) const fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Warm => "warm",
        Tier::Hot => "hot",
    }
}

/// Saturates; 292 million years are enough for a window.
pub(super) fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

fn to_project(row: &Row<'_>) -> Result<ProjectRecord, StoreError> {
    let arch: String = get(row, "arch")?;
    let address: i64 = get(row, "address")?;
    let tier: String = get(row, "tier")?;
    let generation: i64 = get(row, "generation")?;
    let spec = BuildSpec {
        repo: repo(get(row, "repo")?)?,
        name: get(row, "name")?,
        target: get(row, "target")?,
        arch: arch.parse().map_err(|_| StoreError::Nonsense { column: "arch", found: arch })?,
    };
    let address = u32::try_from(address)
        .map(Ipv4Addr::from_bits)
        .map_err(|_| StoreError::Nonsense { column: "address", found: address.to_string() })?;
    let settings = Settings {
        tier: match tier.as_str() {
            "warm" => Tier::Warm,
            "hot" => Tier::Hot,
            _ => return Err(StoreError::Nonsense { column: "tier", found: tier }),
        },
        idle_window: get::<Option<i64>>(row, "idle_window_ms")?.map(|ms| Duration::from_millis(ms.unsigned_abs())),
        volume_bytes: get::<Option<i64>>(row, "volume_bytes")?.map(i64::unsigned_abs),
    };
    Ok(ProjectRecord {
        key: key(get(row, "key")?)?,
        spec,
        address,
        phase: phase(get(row, "phase")?, get(row, "phase_reason")?)?,
        generation: Generation::from_stored(generation.unsigned_abs()),
        incarnation: get(row, "incarnation")?,
        settings,
        created: instant(row, "created")?,
        last_activity: instant(row, "last_activity")?,
    })
}

/// A normal form is its own normal form, so parsing gives back what was stored.
fn repo(text: String) -> Result<kiln_domain::RepoName, StoreError> {
    kiln_domain::RepoName::parse(&text).map_err(|_| StoreError::Nonsense { column: "repo", found: text })
}

fn phase(name: String, reason: Option<String>) -> Result<Phase, StoreError> {
    Ok(match name.as_str() {
        "absent" => Phase::Absent,
        "provisioning" => Phase::Provisioning,
        "starting" => Phase::Starting,
        "warm" => Phase::Warm,
        "draining" => Phase::Draining,
        "idle" => Phase::Idle,
        "failed" => Phase::Failed { reason: reason.unwrap_or_default() },
        _ => return Err(StoreError::Nonsense { column: "phase", found: name }),
    })
}

fn instant(row: &Row<'_>, column: &'static str) -> Result<Timestamp, StoreError> {
    Ok(Timestamp::from_millis(get(row, column)?))
}

fn get<T: rusqlite::types::FromSql>(row: &Row<'_>, column: &'static str) -> Result<T, StoreError> {
    row.get(column).map_err(StoreError::sqlite("read a column of the database"))
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
