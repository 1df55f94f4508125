//! Keeps one issuer's keys, and hands them out.
//!
//! One task of each issuer asks it, so no two requests are ever under way, and no issuer waits for another:
//!
//! ```text
//!            every REFRESH, or when a token names an unknown key, at most once in BETWEEN
//!   resting ────────────────────────────────────────────────────────────────────────────▶ asking
//!      ▲                          keys, or why not; then a longer and longer pause           │
//!      └────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Whoever has a token with a known key is answered from memory. Others wait for the answer that is under way or due, for
//! [`WAIT`] at most and [`MOST_WAITING`] at a time; where none is due, they are told at once. Keys outlive failed attempts until
//! they are [`KEPT`] old.

use std::sync::Arc;
use std::time::Duration;

use kiln_token::{Token, shown_within};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::discovery::Source;
use super::signature::KeySet;
use crate::causes::in_one_line;

/// From good keys to the next look.
pub(super) const REFRESH: Duration = Duration::from_mins(10);
/// Keys of this age are not used any more.
pub(super) const KEPT: Duration = Duration::from_hours(6);
/// Between two attempts, the first of which succeeded.
pub(super) const BETWEEN: Duration = Duration::from_mins(1);
/// After one that failed; doubled with each further one.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(5);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_mins(5);
/// How long a caller waits for keys.
pub(super) const WAIT: Duration = Duration::from_secs(5);
pub(super) const MOST_WAITING: usize = 256;
/// Of a failure as it is told: part of it may be the issuer's own words.
const MOST_FAILURE_BYTES: usize = 400;

/// What is known of an issuer.
#[derive(Clone, Default)]
struct Known {
    keys: Option<(Arc<KeySet>, Instant)>,
    /// That have ended.
    attempts: u64,
    is_asking: bool,
    failures: u32,
    failure: Option<String>,
    /// No attempt before. `None`: there was none yet.
    not_before: Option<Instant>,
}

pub(super) struct Keeper {
    known: watch::Receiver<Known>,
    /// The attempt that somebody waits for, counted from 1.
    wanted: watch::Sender<u64>,
    waiting: Semaphore,
    _task: AbortOnDropHandle<()>,
}

/// Why there is no key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoKey {
    /// The issuer has been asked, and knows none of that name.
    Unknown,
    /// It could not be asked. Again after `retry_after`.
    Unavailable { why: &'static str, retry_after: Duration },
}

/// For whoever looks after the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssuerState {
    pub issuer: String,
    pub keys: usize,
    /// How long ago they were read; `None`: never.
    pub age: Option<Duration>,
    /// Why the last attempt failed.
    pub failure: Option<String>,
}

impl Keeper {
    pub(super) fn start(issuer: String, source: Source) -> Self {
        let (state, known) = watch::channel(Known { is_asking: true, ..Known::default() });
        let (wanted, wishes) = watch::channel(0);
        let task = tokio::spawn(keep(issuer, source, state, wishes));
        Self { known, wanted, waiting: Semaphore::new(MOST_WAITING), _task: AbortOnDropHandle::new(task) }
    }

    /// Keys of which one has the name that the token says.
    pub(super) async fn keys_for(&self, token: &Token<'_>) -> Result<Arc<KeySet>, NoKey> {
        let mut known = self.known.clone();
        let until = Instant::now() + WAIT;
        let mut place = None;
        loop {
            let now = Instant::now();
            let state = known.borrow_and_update().clone();
            if let Some(keys) = state.usable(now).filter(|keys| keys.has(token)) {
                return Ok(keys);
            }
            if let Some(answer) = state.answer(now) {
                return Err(answer);
            }
            if place.is_none() {
                let busy = |_| NoKey::Unavailable { why: "too many wait for them", retry_after: WAIT };
                place = Some(self.waiting.try_acquire().map_err(busy)?);
            }
            if !state.is_asking {
                let next = state.attempts + 1;
                self.wanted.send_if_modified(|wanted| std::mem::replace(wanted, next.max(*wanted)) < next);
            }
            if !matches!(timeout_at(until, known.changed()).await, Ok(Ok(()))) {
                return Err(NoKey::Unavailable { why: "it has not answered yet", retry_after: WAIT });
            }
        }
    }

    pub(super) fn state(&self, issuer: &str) -> IssuerState {
        let known = self.known.borrow();
        IssuerState {
            issuer: issuer.to_owned(),
            keys: known.keys.as_ref().map_or(0, |(keys, _)| keys.len()),
            age: known.keys.as_ref().map(|(_, taken)| taken.elapsed()),
            failure: known.failure.clone(),
        }
    }
}

impl Known {
    fn usable(&self, now: Instant) -> Option<Arc<KeySet>> {
        self.keys.as_ref().filter(|(_, taken)| now.duration_since(*taken) < KEPT).map(|(keys, _)| keys.clone())
    }

    /// What is said of a token whose key is not there, without asking anybody; `None` while an attempt is under way or due.
    fn answer(&self, now: Instant) -> Option<NoKey> {
        let pause = self.not_before.and_then(|at| at.checked_duration_since(now)).filter(|left| !left.is_zero());
        match pause {
            _ if self.is_asking => None,
            None => None,
            Some(left) if self.failure.is_some() => {
                // What exactly is for the log: a stranger gets here, too.
                let why = "it could not be reached, or did not answer as it should";
                Some(NoKey::Unavailable { why, retry_after: left })
            }
            Some(_) => Some(NoKey::Unknown),
        }
    }

    fn take(&mut self, outcome: Result<KeySet, String>, now: Instant) {
        self.attempts += 1;
        self.is_asking = false;
        match outcome {
            Ok(keys) => {
                self.keys = Some((Arc::new(keys), now));
                (self.failures, self.failure) = (0, None);
                self.not_before = Some(now + BETWEEN);
            }
            Err(why) => {
                self.not_before = Some(now + pause(self.failures));
                self.failures = self.failures.saturating_add(1);
                self.failure = Some(why);
            }
        }
    }
}

fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.min(16)).min(LONGEST_PAUSE)
}

async fn keep(issuer: String, source: Source, state: watch::Sender<Known>, mut wishes: watch::Receiver<u64>) {
    loop {
        state.send_modify(|known| known.is_asking = true);
        let outcome = source.keys().await.map_err(|error| shown_within(&in_one_line(&error), MOST_FAILURE_BYTES));
        match &outcome {
            Ok(keys) if keys.len() == 0 => {
                tracing::warn!(issuer, "the issuer has no key that can be used: its tokens are refused");
            }
            Ok(keys) => tracing::debug!(issuer, keys = keys.len(), "keys of the issuer read"),
            Err(why) => tracing::warn!(issuer, why, "the keys of the issuer cannot be read; tried again"),
        }
        state.send_modify(|known| known.take(outcome, Instant::now()));
        let (attempts, not_before, is_good) = {
            let known = state.borrow();
            (known.attempts, known.not_before.unwrap_or_else(Instant::now), known.failure.is_none())
        };
        // After a failure it is tried again as soon as may be; good keys are looked at again later, or when somebody wants to.
        let next = if is_good { Instant::now() + REFRESH } else { not_before };
        tokio::select! {
            () = sleep_until(next) => {}
            somebody = async { wishes.wait_for(|wanted| *wanted > attempts).await.is_ok() } => {
                if !somebody {
                    return;
                }
                sleep_until(not_before).await;
            }
        }
    }
}
