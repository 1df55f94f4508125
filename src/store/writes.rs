//! Each write as SQL. All of them run inside the transaction of their commit, each in a savepoint.

use std::net::Ipv4Addr;

use kiln_domain::{
    AddressPool, BuildTimes, Identity, Key, Lease, Phase, ProjectRecord, Settings, Timestamp, TokenHash,
};
use rusqlite::{OptionalExtension as _, ToSql, named_params};
use serde::Serialize;

use super::StoreError;
use super::commit::Writing;
use super::events::{NewEvent, record};
use super::rows;

/// The answer of [`super::Store::create_project`] and [`super::Store::adopt_project`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    pub record: ProjectRecord,
    /// False: it was there already.
    pub new: bool,
}

pub(super) fn create_project(
    writing: &mut Writing<'_>,
    identity: Identity,
    pool: AddressPool,
    now: Timestamp,
) -> Result<Created, StoreError> {
    if let Some(record) = of_this_identity(writing, &identity)? {
        return Ok(Created { record, new: false });
    }
    let mut record = ProjectRecord::of(identity, lowest_free_address(writing, pool)?, now);
    if record.key.role().is_derived()
        && let Some(project) = rows::project_as_stored(writing.connection, &record.key.project())?
    {
        record.take_after(&project);
    }
    insert_project(writing, &record)?;
    Ok(Created { record, new: true })
}

pub(super) fn adopt_project(
    writing: &mut Writing<'_>,
    record: ProjectRecord,
    pool: AddressPool,
    event: Option<NewEvent>,
) -> Result<Created, StoreError> {
    let mut record = rows::check_key(record)?;
    if let Some(mut known) = of_this_identity(writing, &record.identity())? {
        // The cache came back, and the project had stayed.
        if known.cache.size.is_none() && record.cache.size.is_some() {
            known.cache.size = record.cache.size;
            save_project(writing, &known, None)?;
        }
        return Ok(Created { record: known, new: false });
    }
    if !pool.contains(record.address) || !is_free(writing, record.address)? {
        record.address = lowest_free_address(writing, pool)?;
    }
    insert_project(writing, &record)?;
    journal(writing, event)?;
    Ok(Created { record, new: true })
}

/// As [`adopt_project`], also in the place of a row that cannot be read; its leases stay.
pub(super) fn mend_project(
    writing: &mut Writing<'_>,
    record: ProjectRecord,
    pool: AddressPool,
    event: Option<NewEvent>,
) -> Result<Created, StoreError> {
    let stored = rows::project_as_stored(writing.connection, &record.key);
    if matches!(stored, Err(StoreError::Nonsense { .. } | StoreError::Column { .. })) {
        let failed = StoreError::sqlite("remove the damaged row");
        // Until the end of this commit: the leases have a project again before.
        writing.connection.execute_batch("PRAGMA defer_foreign_keys = ON").map_err(&failed)?;
        writing.connection.execute("DELETE FROM projects WHERE key = ?1", [record.key.as_str()]).map_err(failed)?;
    }
    adopt_project(writing, record, pool, event)
}

/// The project with this key. K1: one of another identity is an error.
fn of_this_identity(writing: &Writing<'_>, identity: &Identity) -> Result<Option<ProjectRecord>, StoreError> {
    let record = rows::project_as_stored(writing.connection, &identity.key)?;
    match record {
        Some(record) if record.identity() != *identity => {
            Err(StoreError::OtherIdentity { key: record.key, stored: Box::new(record.spec) })
        }
        record => Ok(record),
    }
}

fn insert_project(writing: &Writing<'_>, record: &ProjectRecord) -> Result<(), StoreError> {
    let (phase, phase_reason) = phase_columns(&record.phase);
    let insert = "INSERT INTO projects (key, repo, name, target, arch, address, phase, phase_reason, generation,
            incarnation, settings, builds, created, last_activity, pull_request, cache)
        VALUES (:key, :repo, :name, :target, :arch, :address, :phase, :phase_reason, :generation,
            :incarnation, :settings, :builds, :created, :last_activity, :pull_request, :cache)";
    writing
        .connection
        .prepare_cached(insert)
        .and_then(|mut statement| {
            statement.execute(named_params! {
                ":key": record.key.as_str(),
                ":repo": record.spec.repo.as_str(),
                ":name": record.spec.name,
                ":target": record.spec.target,
                ":arch": record.spec.arch.as_str(),
                ":address": record.address.to_bits(),
                ":phase": phase,
                ":phase_reason": phase_reason,
                ":generation": clamped(record.generation.get()),
                ":incarnation": record.incarnation,
                ":settings": json(&record.settings)?,
                ":builds": json(&record.builds)?,
                ":created": record.created.as_millis(),
                ":last_activity": record.last_activity.as_millis(),
                ":pull_request": record.pull_request,
                ":cache": json(&record.cache)?,
            })
        })
        .map(drop)
        .map_err(StoreError::sqlite("add the project"))
}

fn is_free(writing: &Writing<'_>, address: Ipv4Addr) -> Result<bool, StoreError> {
    writing
        .connection
        .prepare_cached("SELECT 1 FROM projects WHERE address = ?1")
        .and_then(|mut statement| statement.exists([address.to_bits()]))
        .map(|taken| !taken)
        .map_err(StoreError::sqlite("look for a free address"))
}

/// The next one while the range is filled from below without holes, else the first hole.
fn lowest_free_address(writing: &Writing<'_>, pool: AddressPool) -> Result<Ipv4Addr, StoreError> {
    let failed = StoreError::sqlite("look for a free address");
    let (first, last) = (i64::from(pool.first.to_bits()), i64::from(pool.last.to_bits()));
    let (taken, highest): (i64, Option<i64>) = writing
        .connection
        .prepare_cached("SELECT count(*), max(address) FROM projects WHERE address BETWEEN ?1 AND ?2")
        .and_then(|mut statement| statement.query_row([first, last], |row| Ok((row.get(0)?, row.get(1)?))))
        .map_err(&failed)?;
    let without_holes = highest.is_none_or(|highest| highest - first + 1 == taken);
    let free = if without_holes {
        first + taken
    } else {
        let hole = "SELECT ?1 WHERE NOT EXISTS (SELECT 1 FROM projects WHERE address = ?1)
            UNION ALL
            SELECT * FROM (SELECT address + 1 FROM projects AS taken WHERE address BETWEEN ?1 AND ?2
                AND NOT EXISTS (SELECT 1 FROM projects WHERE address = taken.address + 1)
                ORDER BY address LIMIT 1)
            LIMIT 1";
        writing
            .connection
            .prepare_cached(hole)
            .and_then(|mut statement| statement.query_row([first, last], |row| row.get(0)).optional())
            .map_err(&failed)?
            .unwrap_or(first)
    };
    match u32::try_from(free) {
        Ok(bits) if free <= last => Ok(Ipv4Addr::from_bits(bits)),
        _ => Err(StoreError::NoAddress { pool }),
    }
}

pub(super) fn save_project(
    writing: &mut Writing<'_>,
    record: &ProjectRecord,
    event: Option<NewEvent>,
) -> Result<(), StoreError> {
    let (phase, phase_reason) = phase_columns(&record.phase);
    let update = "UPDATE projects SET phase = :phase, phase_reason = :phase_reason, generation = :generation,
            incarnation = :incarnation, settings = :settings, builds = :builds, last_activity = :last_activity,
            cache = :cache
        WHERE key = :key";
    let changed = writing
        .connection
        .prepare_cached(update)
        .and_then(|mut statement| {
            statement.execute(named_params! {
                ":key": record.key.as_str(),
                ":phase": phase,
                ":phase_reason": phase_reason,
                ":generation": clamped(record.generation.get()),
                ":incarnation": record.incarnation,
                ":settings": json(&record.settings)?,
                ":builds": json(&record.builds)?,
                ":last_activity": record.last_activity.as_millis(),
                ":cache": json(&record.cache)?,
            })
        })
        .map_err(StoreError::sqlite("save the project"))?;
    if changed == 0 {
        return Err(StoreError::UnknownProject { key: record.key.clone() });
    }
    journal(writing, event)
}

pub(super) fn forget_unborn(writing: &Writing<'_>, key: &Key) -> Result<bool, StoreError> {
    let delete = "DELETE FROM projects WHERE key = :key AND phase = :absent AND generation = 0 AND settings = :none
        AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.key = projects.key)";
    let absent = Phase::Absent.name();
    json(&Settings::default())
        .and_then(|none| {
            let mut statement = writing.connection.prepare_cached(delete)?;
            statement.execute(named_params! { ":absent": absent, ":none": none, ":key": key.as_str() })
        })
        .map(|forgotten| forgotten > 0)
        .map_err(StoreError::sqlite("forget a project of which nothing came"))
}

pub(super) fn remove_project(
    writing: &mut Writing<'_>,
    key: &Key,
    event: Option<NewEvent>,
) -> Result<bool, StoreError> {
    let failed = StoreError::sqlite("remove the project");
    let phase: Option<String> = writing
        .connection
        .prepare_cached("SELECT phase FROM projects WHERE key = ?1")
        .and_then(|mut statement| statement.query_row([key.as_str()], |row| row.get(0)).optional())
        .map_err(&failed)?;
    match phase {
        None => return Ok(false),
        Some(phase) if phase == Phase::Removing.name() => {}
        Some(phase) => return Err(StoreError::NotRemoving { key: key.clone(), phase }),
    }
    for delete in ["DELETE FROM leases WHERE key = ?1", "DELETE FROM projects WHERE key = ?1"] {
        writing
            .connection
            .prepare_cached(delete)
            .and_then(|mut statement| statement.execute([key.as_str()]))
            .map_err(&failed)?;
    }
    journal(writing, event)?;
    Ok(true)
}

pub(super) fn add_lease(
    writing: &mut Writing<'_>,
    key: &Key,
    lease: &Lease,
    builds: &BuildTimes,
    event: Option<NewEvent>,
) -> Result<(), StoreError> {
    if !touch(writing, key, lease.created, Some(builds))? {
        return Err(StoreError::UnknownProject { key: key.clone() });
    }
    writing
        .connection
        .prepare_cached("INSERT INTO leases (token, key, created, renewed, expires) VALUES (?1, ?2, ?3, ?4, ?5)")
        .and_then(|mut statement| {
            statement.execute((
                lease.token.as_str(),
                key.as_str(),
                lease.created.as_millis(),
                lease.renewed.as_millis(),
                lease.expires.as_millis(),
            ))
        })
        .map_err(StoreError::sqlite("add the lease"))?;
    journal(writing, event)
}

/// The end of a lease is fixed at its birth, and a renewal that comes late must not take back a later one.
pub(super) fn renew_lease(writing: &Writing<'_>, token: &TokenHash, renewed: Timestamp) -> Result<bool, StoreError> {
    writing
        .connection
        .prepare_cached("UPDATE leases SET renewed = max(renewed, ?2) WHERE token = ?1")
        .and_then(|mut statement| statement.execute((token.as_str(), renewed.as_millis())))
        .map(|changed| changed > 0)
        .map_err(StoreError::sqlite("renew the lease"))
}

pub(super) fn remove_lease(
    writing: &mut Writing<'_>,
    token: &TokenHash,
    now: Timestamp,
    event: Option<NewEvent>,
) -> Result<bool, StoreError> {
    let removed: Option<String> = writing
        .connection
        .prepare_cached("DELETE FROM leases WHERE token = ?1 RETURNING key")
        .and_then(|mut statement| statement.query_row([token.as_str()], |row| row.get(0)).optional())
        .map_err(StoreError::sqlite("remove the lease"))?;
    let Some(key) = removed else { return Ok(false) };
    touch(writing, &rows::key(key)?, now, None)?;
    journal(writing, event)?;
    Ok(true)
}

pub(super) fn forget_leases(writing: &mut Writing<'_>, tokens: &[TokenHash]) -> Result<usize, StoreError> {
    let failed = StoreError::sqlite("forget the lease");
    let mut statement = writing.connection.prepare_cached("DELETE FROM leases WHERE token = ?1").map_err(&failed)?;
    let mut forgotten = 0;
    for token in tokens {
        forgotten += statement.execute([token.as_str()]).map_err(&failed)?;
    }
    Ok(forgotten)
}

/// A change of one row, which has to reach the disk like any other.
pub(super) fn ping(writing: &Writing<'_>) -> Result<(), StoreError> {
    let sql = "INSERT INTO notes (name, value) VALUES ('pings', 1)
        ON CONFLICT (name) DO UPDATE SET value = (value + 1) & 0xffffffff";
    writing
        .connection
        .prepare_cached(sql)
        .and_then(|mut statement| statement.execute([]))
        .map(drop)
        .map_err(StoreError::sqlite("write to the database"))
}

/// That the projects of the host are in this database.
pub(super) const REBUILT: &str = "rebuilt";

pub(super) fn rebuilt(writing: &mut Writing<'_>, event: Option<NewEvent>) -> Result<(), StoreError> {
    writing
        .connection
        .prepare_cached("INSERT INTO notes (name, value) VALUES (?1, 1) ON CONFLICT (name) DO UPDATE SET value = 1")
        .and_then(|mut statement| statement.execute([REBUILT]))
        .map_err(StoreError::sqlite("note that the database is complete"))?;
    journal(writing, event)
}

/// Activity only ever moves forward: a late write must not close an idle window early. False: no such project.
fn touch(writing: &Writing<'_>, key: &Key, at: Timestamp, builds: Option<&BuildTimes>) -> Result<bool, StoreError> {
    let update = match builds {
        None => "UPDATE projects SET last_activity = max(last_activity, ?2) WHERE key = ?1",
        Some(_) => "UPDATE projects SET last_activity = max(last_activity, ?2), builds = ?3 WHERE key = ?1",
    };
    let key = key.as_str();
    let at = at.as_millis();
    writing
        .connection
        .prepare_cached(update)
        .and_then(|mut statement| match builds {
            None => statement.execute((key, at)),
            Some(builds) => statement.execute((key, at, json(builds)?)),
        })
        .map(|changed| changed > 0)
        .map_err(StoreError::sqlite("note the project's activity"))
}

fn journal(writing: &mut Writing<'_>, event: Option<NewEvent>) -> Result<(), StoreError> {
    event.map_or(Ok(()), |event| record(writing, event).map(drop))
}

fn phase_columns(phase: &Phase) -> (&'static str, Option<&str>) {
    match phase {
        Phase::Failed { reason } => (phase.name(), Some(reason)),
        _ => (phase.name(), None),
    }
}

/// None of the domain's types can fail to become JSON.
fn json(value: &impl Serialize) -> rusqlite::Result<impl ToSql> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

/// SQLite's integers are signed; nobody has a volume of 8 EiB or that many starts.
fn clamped(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
