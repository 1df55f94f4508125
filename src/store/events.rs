//! The journal: what happened, in words, in order.

use std::borrow::Cow;
use std::time::Duration;

use kiln_domain::{Key, Timestamp};
use rusqlite::{Connection, Row, named_params};

use super::StoreError;
use super::commit::Writing;

/// How much of the journal is kept: what is older than `age` goes, and the oldest beyond `rows` or `bytes`. The newest
/// event always stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    pub age: Duration,
    pub rows: u64,
    pub bytes: u64,
}

impl Default for Retention {
    /// A month, and room for the busiest one: a day of a hundred builds an hour makes some ten thousand events.
    fn default() -> Self {
        Self { age: Duration::from_hours(24 * 30), rows: 100_000, bytes: 32 << 20 }
    }
}

/// Old rows that one write removes at most, and how many events there are between two looks for what is too old. Also
/// what a clock that jumps ahead can cost: so many for each that is written meanwhile, and not the whole journal.
const STEP: u64 = 64;

/// What a row takes beside its text, roughly.
const ROW: u64 = 64;

/// A text beyond this is cut: it would be somebody's output and not a reason.
const LONGEST_TEXT: usize = 64 * 1024;

/// How full the journal is, known without counting, and how full it may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Journal {
    pub(super) retention: Retention,
    rows: u64,
    bytes: u64,
}

impl Journal {
    /// Reads how long each row is, which takes milliseconds.
    pub(super) fn of(connection: &Connection) -> rusqlite::Result<Self> {
        let sql = "SELECT count(*), coalesce(sum(octet_length(text)), 0) FROM events";
        let (rows, text) = connection.query_row(sql, [], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)))?;
        let (rows, text) = (rows.unsigned_abs(), text.unsigned_abs());
        Ok(Self { retention: Retention::default(), rows, bytes: text + rows * ROW })
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    fn is_full(&self) -> bool {
        self.rows > self.retention.rows || self.bytes > self.retention.bytes
    }

    /// Full up to a little less than is allowed, so that not each write has something to remove.
    fn is_nearly_full(&self) -> bool {
        let Retention { rows, bytes, .. } = self.retention;
        self.rows > rows - rows / 64 || self.bytes > bytes - bytes / 64
    }
}

/// An event that is not in the journal yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvent {
    pub at: Timestamp,
    /// The project it is about; `None`: all of Kiln.
    pub key: Option<Key>,
    /// A word a script can match.
    pub kind: &'static str,
    /// On whose account: `kiln`, `admin`, `client …`.
    pub by: Cow<'static, str>,
    /// The rule of the plan that led to it, if one did.
    pub rule: Option<&'static str>,
    pub text: String,
}

impl NewEvent {
    /// Of Kiln's own account and by no rule.
    pub fn new(at: Timestamp, key: Option<&Key>, kind: &'static str, text: impl Into<String>) -> Self {
        Self { at, key: key.cloned(), kind, by: Cow::Borrowed("kiln"), rule: None, text: text.into() }
    }

    #[must_use]
    pub fn by(self, who: impl Into<Cow<'static, str>>) -> Self {
        Self { by: who.into(), ..self }
    }

    #[must_use]
    pub fn rule(self, name: &'static str) -> Self {
        Self { rule: Some(name), ..self }
    }
}

/// An event of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Grows with every event; never given twice.
    pub id: i64,
    pub at: Timestamp,
    pub key: Option<Key>,
    pub kind: String,
    pub by: String,
    pub rule: Option<String>,
    pub text: String,
}

const INSERT: &str = r#"INSERT INTO events (at, key, kind, "by", rule, text)
    VALUES (:at, :key, :kind, :by, :rule, :text)"#;

/// Adds to the journal, and to what is announced once the transaction is committed.
pub(super) fn record(writing: &mut Writing<'_>, event: NewEvent) -> Result<i64, StoreError> {
    let NewEvent { at, key, kind, by, rule, mut text } = event;
    text.truncate(text.floor_char_boundary(LONGEST_TEXT));
    let id = writing
        .connection
        .prepare_cached(INSERT)
        .and_then(|mut statement| {
            statement.insert(named_params! {
                ":at": at.as_millis(),
                ":key": key.as_ref().map(Key::as_str),
                ":kind": kind,
                ":by": by,
                ":rule": rule,
                ":text": text,
            })
        })
        .map_err(StoreError::sqlite("add to the journal"))?;
    writing.journal.rows += 1;
    writing.journal.bytes += text.len() as u64 + ROW;
    if writing.journal.is_full() || id.unsigned_abs().is_multiple_of(STEP) {
        prune(writing, id, at).map_err(StoreError::sqlite("shorten the journal"))?;
    }
    let (kind, by, rule) = (kind.to_owned(), by.into_owned(), rule.map(str::to_owned));
    writing.events.push(Event { id, at, key, kind, by, rule, text });
    Ok(id)
}

/// Takes away from the oldest events before `newest`, a step of them at most.
fn prune(writing: &mut Writing<'_>, newest: i64, now: Timestamp) -> rusqlite::Result<()> {
    let was_full = writing.journal.is_full();
    let oldest = "SELECT id, at, octet_length(text) FROM events WHERE id < ?1 ORDER BY id LIMIT ?2";
    let mut statement = writing.connection.prepare_cached(oldest)?;
    let columns = |row: &Row<'_>| Ok((row.get(0)?, Timestamp::from_millis(row.get(1)?), row.get::<_, i64>(2)?));
    let limit = i64::try_from(STEP).unwrap_or(i64::MAX);
    let oldest: Vec<(i64, Timestamp, i64)> =
        statement.query_map((newest, limit), columns)?.collect::<rusqlite::Result<_>>()?;
    let mut delete = writing.connection.prepare_cached("DELETE FROM events WHERE id = ?1")?;
    for (id, at, text) in oldest {
        let journal = &mut *writing.journal;
        if (was_full && journal.is_nearly_full()) || now.since(at) > journal.retention.age {
            delete.execute([id])?;
            journal.rows = journal.rows.saturating_sub(1);
            journal.bytes = journal.bytes.saturating_sub(text.unsigned_abs() + ROW);
        }
    }
    Ok(())
}
