//! The journal: what happened, in words, in order.

use std::borrow::Cow;

use kiln_domain::{Key, Timestamp};
use rusqlite::named_params;

use super::StoreError;
use super::writer::Writing;

/// Rows that are kept, the newest ones. About 15 MiB of text.
pub(super) const KEPT: i64 = 100_000;

/// How many old rows gather before they are removed together.
const PRUNED_TOGETHER: i64 = 1000;

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
    let failed = StoreError::sqlite("add to the journal");
    let mut statement = writing.connection.prepare_cached(INSERT).map_err(&failed)?;
    let id = statement
        .insert(named_params! {
            ":at": event.at.as_millis(),
            ":key": event.key.as_ref().map(Key::as_str),
            ":kind": event.kind,
            ":by": event.by,
            ":rule": event.rule,
            ":text": event.text,
        })
        .map_err(&failed)?;
    if id % PRUNED_TOGETHER == 0 {
        writing
            .connection
            .prepare_cached("DELETE FROM events WHERE id <= ?1")
            .and_then(|mut statement| statement.execute([id - KEPT]))
            .map_err(&failed)?;
    }
    let NewEvent { at, key, kind, by, rule, text } = event;
    let (kind, by, rule) = (kind.to_owned(), by.into_owned(), rule.map(str::to_owned));
    writing.events.push(Event { id, at, key, kind, by, rule, text });
    Ok(id)
}
