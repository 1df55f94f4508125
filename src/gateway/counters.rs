//! What the gateway did, in numbers, and a log that cannot be flooded.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use kiln_hello::{Alert, HelloError};
use tokio::time::Instant;

use super::live::State;

/// Why a connection was not relayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    TooManyConnections,
    TooManyHalfOpen,
    TooManyFromSource,
    /// The load balancer's word on whom it speaks for is missing or wrong.
    BadProxyHeader,
    /// Closed before a complete hello; port scans and health checks of load balancers look like this.
    HelloUnfinished,
    HelloTimedOut,
    NotTls,
    HelloTooLarge,
    HelloMalformed,
    /// No server name, or an IP address in its place.
    NoName,
    /// A name that is not a daemon's below one of our domains.
    ForeignName,
    /// Its name was closed by an admin.
    NameClosed,
    UnknownProject,
    /// Its address, or its project, has as many connections as it may.
    TooManyFromAddress,
    TooManyOfProject,
    /// Too many, or too many bytes of them, wait for a daemon: of its project, or in all.
    TooManyParkedOfProject,
    TooManyParked,
    Unavailable,
    WakeTimedOut,
    /// The directory named an address that nobody answers at.
    Unreachable,
    /// The client went away while its daemon was woken.
    ClientLeft,
    /// All places were taken, and this was the newest that no daemon had answered.
    Shed,
}

impl Refusal {
    pub const ALL: [Self; 22] = [
        Self::TooManyConnections,
        Self::TooManyHalfOpen,
        Self::TooManyFromSource,
        Self::BadProxyHeader,
        Self::HelloUnfinished,
        Self::HelloTimedOut,
        Self::NotTls,
        Self::HelloTooLarge,
        Self::HelloMalformed,
        Self::NoName,
        Self::ForeignName,
        Self::NameClosed,
        Self::UnknownProject,
        Self::TooManyFromAddress,
        Self::TooManyOfProject,
        Self::TooManyParkedOfProject,
        Self::TooManyParked,
        Self::Unavailable,
        Self::WakeTimedOut,
        Self::Unreachable,
        Self::ClientLeft,
        Self::Shed,
    ];

    /// A label for logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TooManyConnections => "too_many_connections",
            Self::TooManyHalfOpen => "too_many_half_open",
            Self::TooManyFromSource => "too_many_from_source",
            Self::BadProxyHeader => "bad_proxy_header",
            Self::HelloUnfinished => "hello_unfinished",
            Self::HelloTimedOut => "hello_timed_out",
            Self::NotTls => "not_tls",
            Self::HelloTooLarge => "hello_too_large",
            Self::HelloMalformed => "hello_malformed",
            Self::NoName => "no_name",
            Self::ForeignName => "foreign_name",
            Self::NameClosed => "name_closed",
            Self::UnknownProject => "unknown_project",
            Self::TooManyFromAddress => "too_many_from_address",
            Self::TooManyOfProject => "too_many_of_project",
            Self::TooManyParkedOfProject => "too_many_parked_of_project",
            Self::TooManyParked => "too_many_parked",
            Self::Unavailable => "unavailable",
            Self::WakeTimedOut => "wake_timed_out",
            Self::Unreachable => "unreachable",
            Self::ClientLeft => "client_left",
            Self::Shed => "shed",
        }
    }

    /// What the client is told when nothing more exact is known.
    pub(super) const fn alert(self) -> Alert {
        match self {
            Self::NoName | Self::ForeignName | Self::NameClosed | Self::UnknownProject => Alert::UnrecognizedName,
            Self::NotTls | Self::BadProxyHeader => Alert::UnexpectedMessage,
            Self::HelloTooLarge | Self::HelloMalformed | Self::HelloUnfinished => Alert::DecodeError,
            _ => Alert::InternalError,
        }
    }

    /// Whether an admin should see it: the others are what the internet does all day, or a client's own mistake.
    const fn is_ours(self) -> bool {
        matches!(
            self,
            Self::TooManyConnections
                | Self::TooManyHalfOpen
                | Self::TooManyOfProject
                | Self::TooManyParkedOfProject
                | Self::TooManyParked
                | Self::BadProxyHeader
                | Self::Shed
                | Self::Unavailable
                | Self::WakeTimedOut
                | Self::Unreachable
        )
    }
}

impl From<&HelloError> for Refusal {
    fn from(error: &HelloError) -> Self {
        match error {
            HelloError::NotTls(_) | HelloError::NotClientHello(_) => Self::NotTls,
            HelloError::TooLarge | HelloError::RecordLength(_) => Self::HelloTooLarge,
            HelloError::Malformed(_) | HelloError::Unsuitable(_) => Self::HelloMalformed,
        }
    }
}

/// Counts since the start.
#[derive(Debug, Default)]
pub struct Counters {
    accepted: AtomicU64,
    accept_failures: AtomicU64,
    relayed: AtomicU64,
    ended: AtomicU64,
    broken: AtomicU64,
    to_daemons: AtomicU64,
    to_clients: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
    quiet: [Mutex<Quiet>; Refusal::ALL.len()],
}

/// The counters at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub accepted: u64,
    pub accept_failures: u64,
    /// Connections that reached a daemon, those that are open now included.
    pub relayed: u64,
    /// Of those, open now.
    pub open: u64,
    /// Ended by a reset, a timeout or our own shutdown, not by both sides closing.
    pub broken: u64,
    /// Bytes, the replayed hello included; those of connections that are open now are not in yet.
    pub to_daemons: u64,
    pub to_clients: u64,
    pub refused: Vec<(Refusal, u64)>,
}

/// What a scrape shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figures {
    pub counted: Snapshot,
    /// Connections that are open now.
    pub open: Vec<(State, u64)>,
}

impl Snapshot {
    pub fn refused(&self, refusal: Refusal) -> u64 {
        self.refused.iter().find(|(r, _)| *r == refusal).map_or(0, |(_, count)| *count)
    }
}

impl Counters {
    pub fn snapshot(&self) -> Snapshot {
        // `ended` before `relayed`: what happens in between makes `open` too large, never negative.
        let ended = self.ended.load(Relaxed);
        let relayed = self.relayed.load(Relaxed);
        let refused = Refusal::ALL.iter().zip(&self.refused).map(|(r, count)| (*r, count.load(Relaxed))).collect();
        Snapshot {
            accepted: self.accepted.load(Relaxed),
            accept_failures: self.accept_failures.load(Relaxed),
            relayed,
            open: relayed.saturating_sub(ended),
            broken: self.broken.load(Relaxed),
            to_daemons: self.to_daemons.load(Relaxed),
            to_clients: self.to_clients.load(Relaxed),
            refused,
        }
    }

    pub(super) fn accepted(&self) {
        self.accepted.fetch_add(1, Relaxed);
    }

    pub(super) fn accept_failed(&self) {
        self.accept_failures.fetch_add(1, Relaxed);
    }

    pub(super) fn relay_started(&self) {
        self.relayed.fetch_add(1, Relaxed);
    }

    pub(super) fn relay_ended(&self, to_daemon: u64, to_client: u64, broken: bool) {
        self.to_daemons.fetch_add(to_daemon, Relaxed);
        self.to_clients.fetch_add(to_client, Relaxed);
        self.broken.fetch_add(u64::from(broken), Relaxed);
        self.ended.fetch_add(1, Relaxed);
    }

    /// Counts it, and logs the first of each kind in ten seconds with the number of those left out before.
    pub(super) fn refused(&self, refusal: Refusal, from: SocketAddr, why: &str) {
        let index = refusal as usize;
        if let Some(count) = self.refused.get(index) {
            count.fetch_add(1, Relaxed);
        }
        // Contended means that somebody else is logging the same thing.
        let Some(Ok(mut quiet)) = self.quiet.get(index).map(Mutex::try_lock) else { return };
        let Some(left_out) = quiet.speak(Instant::now()) else { return };
        let reason = refusal.as_str();
        if refusal.is_ours() {
            tracing::warn!(reason, %from, why, left_out, "connection refused");
        } else {
            tracing::info!(reason, %from, why, left_out, "connection refused");
        }
    }
}

/// When something was last said, and how often it was not said since.
#[derive(Debug, Default)]
struct Quiet {
    spoke: Option<Instant>,
    left_out: u64,
}

impl Quiet {
    const PERIOD: Duration = Duration::from_secs(10);

    /// The number left out since the last time, if it is time to speak.
    fn speak(&mut self, now: Instant) -> Option<u64> {
        if self.spoke.is_some_and(|spoke| now.duration_since(spoke) < Self::PERIOD) {
            self.left_out += 1;
            return None;
        }
        self.spoke = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_stand_at_their_own_index() {
        for (index, refusal) in Refusal::ALL.iter().enumerate() {
            assert_eq!(*refusal as usize, index, "{refusal:?}");
        }
    }

    #[test]
    fn speaks_once_in_a_period_and_says_what_it_left_out() {
        let start = Instant::now();
        let mut quiet = Quiet::default();
        assert_eq!(quiet.speak(start), Some(0));
        assert_eq!(quiet.speak(start + Duration::from_secs(1)), None);
        assert_eq!(quiet.speak(start + Duration::from_secs(9)), None);
        assert_eq!(quiet.speak(start + Quiet::PERIOD), Some(2));
    }
}
