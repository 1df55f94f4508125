//! Asking for a route by short polls, which survive whatever cuts idle connections on the way.
//!
//! ```text
//!   POST /route ──202, buildId──▶ POST /route with buildId ──202──▶ … ──200──▶ the route
//!        │                                 │410: the lease ended
//!        └──────────◀── anew ◀─────────────┘
//! ```
//!
//! An older kilnd knows no short polls and answers when it is done; that is a poll that takes long.

use std::time::Duration;

use kiln_domain::Key;
use kiln_wire::{RouteRequest, RouteResponse, RouteStatus};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::client::{Client, ClientError};

/// How long kilnd may take for a poll. Far below the 50 s after which the strictest proxies cut.
const POLL: Duration = Duration::from_secs(10);
/// What a poll may take beyond that, once kilnd has shown that it knows them.
const SLACK: Duration = Duration::from_secs(10);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);
/// Longer than this a refusal is not waited out without asking again.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long nobody at the socket is taken for kilnd's restart.
const RESTART: Duration = Duration::from_secs(3);
/// The same for whoever was answered before: that there is a kilnd is known, and an upgrade takes its time.
const RESTART_IN_BETWEEN: Duration = Duration::from_secs(30);

/// A route that is being asked for.
#[derive(Debug)]
pub(super) struct Asking {
    client: Client,
    request: RouteRequest,
    /// The project, once there is a lease that has to be given back.
    held: Option<Key>,
    /// Whose daemon it is to be, as far as that is known: which one of several is kilnd's to say.
    key: watch::Sender<Key>,
    status: Option<RouteStatus>,
}

impl Asking {
    pub(super) fn new(client: &Client, request: RouteRequest, key: Key) -> Self {
        Self { client: client.clone(), request, held: None, key: watch::Sender::new(key), status: None }
    }

    pub(super) fn key(&self) -> watch::Receiver<Key> {
        self.key.subscribe()
    }

    /// Until the daemon answers or `wait` is over. An answer that got lost on the way leaves no lease behind for longer
    /// than its grace.
    pub(super) async fn until_ready(&mut self, wait: Duration) -> Result<RouteResponse, ClientError> {
        let start = Instant::now();
        let mut last = None;
        let mut heard = None;
        while let Some(left) = wait.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            let asked = Instant::now();
            // The first answer may be that of a kilnd which knows no polls.
            let patience = if self.held.is_some() { left.min(POLL + SLACK) } else { left };
            let pause = match self.client.route(&self.request, left.min(POLL), patience).await {
                Ok(routed) if routed.ready => {
                    self.held = None;
                    return Ok(routed);
                }
                Ok(waiting) => {
                    heard = Some(Instant::now());
                    self.hold(waiting);
                    // Who has waited for it already asks again at once.
                    if asked.elapsed() < POLL.min(left) / 2 { 2 * PAUSE } else { Duration::ZERO }
                }
                // An older kilnd, which has one daemon for each project anyway.
                Err(error) if self.request.branch.is_some() && error.knows_no("branch") => {
                    self.request.branch = None;
                    Duration::ZERO
                }
                Err(error) if error.is_gone() && self.held.is_some() => {
                    self.held = None;
                    self.request.build_id = None;
                    PAUSE
                }
                Err(error) if may_pass(&error, start, heard) => {
                    let pause = error.retry_after().unwrap_or(PAUSE).clamp(PAUSE, LONGEST_PAUSE);
                    last = Some(error);
                    pause
                }
                Err(error) => return Err(error),
            };
            sleep(pause.min(wait.saturating_sub(start.elapsed()))).await;
        }
        Err(self.too_late(wait, last))
    }

    fn hold(&mut self, waiting: RouteResponse) {
        self.key.send_replace(waiting.key.clone());
        self.held = Some(waiting.key);
        self.request.build_id = waiting.build_id;
        self.status = waiting.status;
    }

    /// What it waited for says more than what went wrong before.
    fn too_late(&mut self, after: Duration, last: Option<ClientError>) -> ClientError {
        match (self.status.take(), last) {
            (Some(status), _) => ClientError::NotReady { after, status: in_words(&status) },
            (None, Some(error)) => error,
            (None, None) => ClientError::TimedOut { what: "route", after },
        }
    }

    /// Gives back the lease of a route that came to nothing.
    pub(super) async fn give_up(self) {
        let Some(key) = self.held else { return };
        // It ends by itself if this fails, and nobody can do anything about it.
        let _ = self.client.complete(&key, self.request.build_id.as_deref()).await;
    }
}

/// Whether the same request may be answered in a moment. Nobody at the socket is a restart for a moment, and then no
/// kilnd. `heard`: when it last answered.
fn may_pass(error: &ClientError, start: Instant, heard: Option<Instant>) -> bool {
    let (since, patience) = heard.map_or((start, RESTART), |heard| (heard, RESTART_IN_BETWEEN));
    let has_gone = matches!(error, ClientError::NotRunning { .. }) && since.elapsed() >= patience;
    error.is_retryable() && !has_gone
}

/// `starting: the host is busy (place 2 of 5 in the queue)`.
pub(super) fn in_words(status: &RouteStatus) -> String {
    let reason = if status.reason.is_empty() { String::new() } else { format!(": {}", status.reason) };
    let place = match (status.queue_position, status.queue_length) {
        (Some(position), Some(length)) => format!(" (place {position} of {length} in the queue)"),
        (Some(position), None) => format!(" (place {position} in the queue)"),
        _ => String::new(),
    };
    format!("{}{reason}{place}", status.phase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_in_words() {
        let status = |reason: &str, position, length| RouteStatus {
            phase: "starting".to_owned(),
            reason: reason.to_owned(),
            queue_position: position,
            queue_length: length,
        };
        assert_eq!(in_words(&status("", None, None)), "starting");
        assert_eq!(in_words(&status("x", Some(2), Some(5))), "starting: x (place 2 of 5 in the queue)");
        assert_eq!(in_words(&status("", Some(2), None)), "starting (place 2 in the queue)");
    }
}
