//! Tokens as rows. What they are worth is the domain's to say.

use kiln_domain::Timestamp;
use kiln_domain::access::{Grade, Scope, TokenId};
use rusqlite::{Connection, Row, named_params};

use super::StoreError;
use super::commit::Writing;
use super::events::{NewEvent, record};
use super::rows::{self, List};

/// What is kept of a token that was given out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRecord {
    pub id: TokenId,
    pub hash: [u8; 32],
    /// What its maker calls it.
    pub name: String,
    pub grade: Grade,
    pub scope: Scope,
    pub made_by: String,
    pub created: Timestamp,
    /// From then on it is worth nothing. `None`: never.
    pub expires: Option<Timestamp>,
    /// To within a minute.
    pub last_used: Option<Timestamp>,
}

/// All of them are kept in memory by who looks them up.
pub(super) const MOST: usize = 4096;

const TOKENS: &str =
    "SELECT id, hash, name, grade, scope, made_by, created, expires, last_used FROM tokens ORDER BY created, id";

/// That one was given out, whatever became of it.
const GIVEN: &str = "tokens-given";

pub(super) fn were_given(connection: &Connection) -> Result<bool, StoreError> {
    Ok(rows::note(connection, GIVEN)?.is_some())
}

/// The oldest first.
pub(super) fn tokens(connection: &Connection) -> Result<List<TokenRecord>, StoreError> {
    rows::list(connection, TOKENS, [], MOST, "read the tokens", to_token)
}

fn to_token(row: &Row<'_>) -> Result<TokenRecord, StoreError> {
    let nonsense = |column| move |found: String| StoreError::Nonsense { column, found };
    let (id, grade): (String, String) = (rows::get(row, (0, "id"))?, rows::get(row, (3, "grade"))?);
    let patterns: Vec<String> = rows::json(row, (4, "scope"))?;
    let patterns = patterns.into_iter().map(|text| text.parse().map_err(|_| nonsense("scope")(text)));
    let expires: Option<i64> = rows::get(row, (7, "expires"))?;
    let last_used: Option<i64> = rows::get(row, (8, "last_used"))?;
    Ok(TokenRecord {
        id: id.parse().map_err(|_| nonsense("id")(id))?,
        hash: rows::get(row, (1, "hash"))?,
        name: rows::get(row, (2, "name"))?,
        grade: Grade::named(&grade).ok_or_else(|| nonsense("grade")(grade))?,
        scope: Scope::new(patterns.collect::<Result<_, _>>()?),
        made_by: rows::get(row, (5, "made_by"))?,
        created: rows::instant(row, (6, "created"))?,
        expires: expires.map(Timestamp::from_millis),
        last_used: last_used.map(Timestamp::from_millis),
    })
}

pub(super) fn add(writing: &mut Writing<'_>, token: &TokenRecord, event: NewEvent) -> Result<(), StoreError> {
    let count: i64 = writing
        .connection
        .query_row("SELECT count(*) FROM tokens", [], |row| row.get(0))
        .map_err(StoreError::sqlite("count the tokens"))?;
    if count.unsigned_abs() >= MOST as u64 {
        return Err(StoreError::TooManyTokens { most: MOST });
    }
    let patterns: Vec<String> = token.scope.patterns().iter().map(ToString::to_string).collect();
    let scope = serde_json::json!(patterns).to_string();
    let insert = "INSERT INTO tokens (id, hash, name, grade, scope, made_by, created, expires)
        VALUES (:id, :hash, :name, :grade, :scope, :made_by, :created, :expires)";
    writing
        .connection
        .execute(
            insert,
            named_params! {
                ":id": token.id.as_str(),
                ":hash": token.hash,
                ":name": token.name,
                ":grade": token.grade.name(),
                ":scope": scope,
                ":made_by": token.made_by,
                ":created": token.created.as_millis(),
                ":expires": token.expires.map(Timestamp::as_millis),
            },
        )
        .map_err(StoreError::sqlite("add the token"))?;
    writing
        .connection
        .execute("INSERT INTO notes (name, value) VALUES (?1, 1) ON CONFLICT (name) DO NOTHING", [GIVEN])
        .map_err(StoreError::sqlite("note that a token was given out"))?;
    record(writing, event).map(drop)
}

/// False: there was none, and nothing is written.
pub(super) fn remove(writing: &mut Writing<'_>, id: &TokenId, event: NewEvent) -> Result<bool, StoreError> {
    let removed = writing
        .connection
        .execute("DELETE FROM tokens WHERE id = ?1", [id.as_str()])
        .map_err(StoreError::sqlite("remove the token"))?;
    if removed > 0 {
        record(writing, event)?;
    }
    Ok(removed > 0)
}

pub(super) fn used(writing: &mut Writing<'_>, id: &TokenId, at: Timestamp) -> Result<(), StoreError> {
    let update = "UPDATE tokens SET last_used = max(coalesce(last_used, 0), ?2) WHERE id = ?1";
    writing
        .connection
        .execute(update, (id.as_str(), at.as_millis()))
        .map(drop)
        .map_err(StoreError::sqlite("note that a token was used"))
}
