//! Each write as SQL. All of them run on the writer's thread, inside its transaction.

use std::net::Ipv4Addr;

use kiln_domain::{AddressPool, BuildSpec, Key, Lease, Phase, ProjectRecord, Timestamp, TokenHash};
use rusqlite::{OptionalExtension as _, named_params};

use super::StoreError;
use super::events::{NewEvent, record};
use super::rows::{self, millis, tier_name};
use super::writer::Writing;

/// The answer of [`super::Store::create_project`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Created {
    pub record: ProjectRecord,
    /// False: it was there already.
    pub new: bool,
}

pub(super) fn create_project(
    writing: &mut Writing<'_>,
    spec: BuildSpec,
    pool: AddressPool,
    now: Timestamp,
) -> Result<Created, StoreError> {
    let key = Key::of(&spec);
    if let Some(record) = rows::project(writing.connection, &key)? {
        if record.spec != spec {
            return Err(StoreError::OtherIdentity { key, stored: Box::new(record.spec) });
        }
        return Ok(Created { record, new: false });
    }
    let address = lowest_free_address(writing, pool)?;
    let record = ProjectRecord::new(spec, address, now);
    let (phase, phase_reason) = phase_columns(&record.phase);
    let insert = "INSERT INTO projects (key, repo, name, target, arch, address, phase, phase_reason, generation,
            incarnation, tier, idle_window_ms, volume_bytes, created, last_activity)
        VALUES (:key, :repo, :name, :target, :arch, :address, :phase, :phase_reason, :generation,
            :incarnation, :tier, :idle_window_ms, :volume_bytes, :created, :last_activity)";
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
                ":tier": tier_name(record.settings.tier),
                ":idle_window_ms": record.settings.idle_window.map(millis),
                ":volume_bytes": record.settings.volume_bytes.map(clamped),
                ":created": record.created.as_millis(),
                ":last_activity": record.last_activity.as_millis(),
            })
        })
        .map_err(StoreError::sqlite("add the project"))?;
    Ok(Created { record, new: true })
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
            incarnation = :incarnation, tier = :tier, idle_window_ms = :idle_window_ms,
            volume_bytes = :volume_bytes, last_activity = :last_activity
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
                ":tier": tier_name(record.settings.tier),
                ":idle_window_ms": record.settings.idle_window.map(millis),
                ":volume_bytes": record.settings.volume_bytes.map(clamped),
                ":last_activity": record.last_activity.as_millis(),
            })
        })
        .map_err(StoreError::sqlite("save the project"))?;
    if changed == 0 {
        return Err(StoreError::UnknownProject { key: record.key.clone() });
    }
    journal(writing, event)
}

pub(super) fn add_lease(
    writing: &mut Writing<'_>,
    key: &Key,
    lease: &Lease,
    event: Option<NewEvent>,
) -> Result<(), StoreError> {
    if !touch(writing, key, lease.created)? {
        return Err(StoreError::UnknownProject { key: key.clone() });
    }
    writing
        .connection
        .prepare_cached("INSERT INTO leases (token, key, created, renewed) VALUES (?1, ?2, ?3, ?4)")
        .and_then(|mut statement| {
            statement.execute((
                lease.token.as_str(),
                key.as_str(),
                lease.created.as_millis(),
                lease.renewed.as_millis(),
            ))
        })
        .map_err(StoreError::sqlite("add the lease"))?;
    journal(writing, event)
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
    touch(writing, &rows::key(key)?, now)?;
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

/// Activity only ever moves forward: a late write must not close an idle window early. False: no such project.
fn touch(writing: &Writing<'_>, key: &Key, at: Timestamp) -> Result<bool, StoreError> {
    writing
        .connection
        .prepare_cached("UPDATE projects SET last_activity = max(last_activity, ?2) WHERE key = ?1")
        .and_then(|mut statement| statement.execute((key.as_str(), at.as_millis())))
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

/// SQLite's integers are signed; nobody has a volume of 8 EiB or that many starts.
fn clamped(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
