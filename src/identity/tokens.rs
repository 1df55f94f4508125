//! Tokens that an admin gave out. All of them are in memory, as they are on the disk: a request is looked up without asking the
//! database.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kiln_domain::Timestamp;
use kiln_domain::access::{AccessToken, Grade, Scope, TokenId};
use subtle::ConstantTimeEq as _;
use thiserror::Error;

use super::{Caller, IdentifyError};
use crate::clock::Clock;
use crate::entropy::{Entropy, NoEntropy};
use crate::store::{NewEvent, Store, StoreError, TokenRecord};

/// How exactly it is known when a token was used last: a write for each request would be one too many.
const USED_WITHIN: Duration = Duration::from_mins(1);

const LONGEST_NAME: usize = 128;

/// The longest that a token may count, unless it is said that it shall for ever.
const LONGEST_LIFE: Duration = Duration::from_hours(24 * 366 * 5);

/// What a new token shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub name: String,
    pub grade: Grade,
    pub scope: Scope,
    /// `None`: it never ends.
    pub lasts: Option<Duration>,
}

/// A new token, to be handed over once.
#[derive(Debug)]
pub struct Issued {
    pub token: AccessToken,
    pub record: TokenRecord,
}

#[derive(Debug, Error)]
pub enum TokenError {
    #[error("{0}")]
    Wanted(String),
    #[error("there is no token {0}: `kiln token list` shows those there are")]
    Unknown(TokenId),
    #[error(transparent)]
    Entropy(#[from] NoEntropy),
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub struct Tokens {
    store: Store,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    known: RwLock<HashMap<TokenId, TokenRecord>>,
    given: AtomicBool,
}

impl Tokens {
    /// Of a store that has none, and never had.
    pub fn new(store: Store, clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        Self { store, clock, entropy, known: RwLock::default(), given: AtomicBool::new(false) }
    }

    /// With all that the store has.
    pub async fn load(store: Store, clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Result<Self, StoreError> {
        let (known, given) = (store.tokens().await?, store.tokens_were_given().await?);
        let known = known.into_iter().map(|record| (record.id.clone(), record)).collect();
        let (known, given) = (RwLock::new(known), AtomicBool::new(given));
        Ok(Self { known, given, ..Self::new(store, clock, entropy) })
    }

    /// Whether one was ever given out. That it has ended, or was revoked, opens nothing again.
    pub fn were_given(&self) -> bool {
        self.given.load(Ordering::Relaxed)
    }

    pub(super) fn caller(&self, token: &AccessToken) -> Result<Caller, IdentifyError> {
        let now = self.clock.now();
        let record = self.read(|known| known.get(token.id()).cloned());
        // Whether the name or the secret is wrong is nobody's business, and takes the same time.
        let hash = record.as_ref().map_or([0; 32], |record| record.hash);
        let is_right = bool::from(hash.ct_eq(&token.hash()));
        let record = record.filter(|_| is_right).ok_or(IdentifyError::Token)?;
        if is_over(&record, now) {
            return Err(IdentifyError::TokenOver { id: record.id });
        }
        self.note_use(&record, now);
        let who = format!("token {} ({})", record.id, record.name);
        Ok(Caller { standing: record.grade.standing(record.scope), who })
    }

    /// Nobody waits for it to be written, and one that cannot be is no reason to refuse a build.
    fn note_use(&self, record: &TokenRecord, now: Timestamp) {
        if record.last_used.is_some_and(|last| now.since(last) < USED_WITHIN) {
            return;
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.get_mut(&record.id) {
            known.last_used = Some(now);
            drop(self.store.token_used(&record.id, now));
        }
    }

    /// On the disk when it returns. `by`: who asked.
    pub async fn issue(&self, wanted: Wanted, by: &Caller) -> Result<Issued, TokenError> {
        check(&wanted)?;
        let Wanted { name, grade, scope, lasts } = wanted;
        let token = self.new_token()?;
        let created = self.clock.now();
        let expires = lasts.map(|lasts| created.plus(lasts));
        let (id, hash, made_by) = (token.id().clone(), token.hash(), by.who.clone());
        let record = TokenRecord { id, hash, name, grade, scope, made_by, created, expires, last_used: None };
        let text = format!("token {} ({}) was made: {}", record.id, record.name, grade.name());
        // Also if it cannot be written, or nobody waits for that: closed is the safe side.
        self.given.store(true, Ordering::Relaxed);
        self.store.add_token(&record, NewEvent::new(created, None, "token", text).by(by.who.clone())).await?;
        self.known.write().unwrap_or_else(PoisonError::into_inner).insert(record.id.clone(), record.clone());
        Ok(Issued { token, record })
    }

    fn new_token(&self) -> Result<AccessToken, NoEntropy> {
        let mut secret = [0; 32];
        for piece in secret.chunks_exact_mut(8) {
            piece.copy_from_slice(&self.entropy.token()?);
        }
        Ok(AccessToken::from_random(self.entropy.token()?, secret))
    }

    /// Worth nothing from now on, and when it returns also after a restart.
    pub async fn revoke(&self, id: &TokenId, by: &Caller) -> Result<(), TokenError> {
        let record = self.known.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        let name = record.as_ref().map(|record| format!(" ({})", record.name)).unwrap_or_default();
        let event = NewEvent::new(self.clock.now(), None, "token", format!("token {id}{name} was revoked"));
        match self.store.remove_token(id, event.by(by.who.clone())).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(TokenError::Unknown(id.clone())),
            Err(error) => {
                // It is still on the disk, and would be back after a restart: whoever lists tokens must see it.
                if let Some(record) = record {
                    self.known.write().unwrap_or_else(PoisonError::into_inner).insert(id.clone(), record);
                }
                Err(error.into())
            }
        }
    }

    /// The oldest first.
    pub fn list(&self) -> Vec<TokenRecord> {
        let mut list: Vec<_> = self.read(|known| known.values().cloned().collect());
        list.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        list
    }

    fn read<T>(&self, look: impl FnOnce(&HashMap<TokenId, TokenRecord>) -> T) -> T {
        look(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn is_over(record: &TokenRecord, now: Timestamp) -> bool {
    record.expires.is_some_and(|end| now >= end)
}

fn check(wanted: &Wanted) -> Result<(), TokenError> {
    let refuse = |why: String| Err(TokenError::Wanted(why));
    let (grade, name) = (wanted.grade.name(), &wanted.name);
    let printable = |c: char| !c.is_control() && !kiln_domain::repo::is_invisible(c);
    if name.trim().is_empty() || name.len() > LONGEST_NAME || !name.chars().all(printable) {
        return refuse(format!("a token's name says what it is for: 1 to {LONGEST_NAME} bytes that can be printed"));
    }
    if wanted.grade.needs_scope() && wanted.scope.patterns().is_empty() {
        return refuse(format!("a token for a {grade} takes repositories: name at least one, or \"*\" for all"));
    }
    if !wanted.grade.takes_scope() && !wanted.scope.patterns().is_empty() {
        return refuse(format!("repositories mean nothing for a token of grade {grade}"));
    }
    match wanted.lasts {
        Some(lasts) if lasts < Duration::from_secs(1) || lasts > LONGEST_LIFE => {
            refuse("a token lasts from a second to five years, or says that it never ends".to_owned())
        }
        _ => Ok(()),
    }
}
