//! The journal: what happened, in words, in order.

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
    pub text: String,
}

/// An event of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Grows with every event; never given twice.
    pub id: i64,
    pub at: Timestamp,
    pub key: Option<Key>,
    pub kind: String,
    pub text: String,
}

/// Adds to the journal, and to what is announced once the transaction is committed.
pub(super) fn record(writing: &mut Writing<'_>, event: NewEvent) -> Result<i64, StoreError> {
    let failed = StoreError::sqlite("add to the journal");
    let mut statement = writing
        .connection
        .prepare_cached("INSERT INTO events (at, key, kind, text) VALUES (:at, :key, :kind, :text)")
        .map_err(&failed)?;
    let id = statement
        .insert(named_params! {
            ":at": event.at.as_millis(),
            ":key": event.key.as_ref().map(Key::as_str),
            ":kind": event.kind,
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
    let NewEvent { at, key, kind, text } = event;
    writing.events.push(Event { id, at, key, kind: kind.to_owned(), text });
    Ok(id)
}
