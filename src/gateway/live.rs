//! One open connection, as others see it: what it is and does, and the way to end it.

use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use kiln_domain::Key;
use tokio::sync::Notify;
use tokio::time::Instant;

/// How far a connection has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// It has not said its name yet.
    Hello,
    /// It waits for its daemon.
    Parked,
    Relaying,
    /// One side has finished, the other has not.
    HalfClosed,
}

impl State {
    pub const ALL: [Self; 4] = [Self::Hello, Self::Parked, Self::Relaying, Self::HalfClosed];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Parked => "parked",
            Self::Relaying => "relaying",
            Self::HalfClosed => "half_closed",
        }
    }
}

/// A connection at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Once it has said its name.
    pub key: Option<Key>,
    /// The client, also where a load balancer speaks for it.
    pub from: SocketAddr,
    pub age: Duration,
    /// Bytes, the hello included.
    pub to_daemon: u64,
    pub to_client: u64,
    pub state: State,
}

/// Why a connection is ended from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Stop {
    /// The gateway goes down.
    Cut = 1,
    /// Others need its place.
    Shed,
    /// Its name was closed.
    Closed,
}

impl Stop {
    const ALL: [Self; 3] = [Self::Cut, Self::Shed, Self::Closed];
}

/// Written by the connection's own task, read by whoever asks; nothing here is waited for.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) id: u64,
    peer: SocketAddr,
    /// Whom the peer speaks for.
    client: OnceLock<SocketAddr>,
    since: Instant,
    key: OnceLock<Key>,
    state: AtomicU8,
    pub(super) to_daemon: AtomicU64,
    pub(super) to_client: AtomicU64,
    stop: AtomicU8,
    stopped: Notify,
}

impl Live {
    pub(super) fn new(id: u64, peer: SocketAddr) -> Self {
        Self {
            id,
            peer,
            client: OnceLock::new(),
            since: Instant::now(),
            key: OnceLock::new(),
            state: AtomicU8::new(State::Hello as u8),
            to_daemon: AtomicU64::new(0),
            to_client: AtomicU64::new(0),
            stop: AtomicU8::new(0),
            stopped: Notify::new(),
        }
    }

    pub(super) fn peer(&self) -> IpAddr {
        self.peer.ip()
    }

    pub(super) fn from(&self) -> SocketAddr {
        self.client.get().copied().unwrap_or(self.peer)
    }

    /// Said once, before the hello.
    pub(super) fn speaks_for(&self, client: SocketAddr) {
        let _ = self.client.set(client);
    }

    pub(super) fn key(&self) -> Option<&Key> {
        self.key.get()
    }

    pub(super) fn is_for(&self, key: &Key) {
        let _ = self.key.set(key.clone());
    }

    pub(super) fn enter(&self, state: State) {
        self.state.store(state as u8, Relaxed);
    }

    pub(super) fn state(&self) -> State {
        let number = self.state.load(Relaxed);
        State::ALL.into_iter().find(|state| *state as u8 == number).unwrap_or(State::Hello)
    }

    /// False: it was stopped already, and the first reason counts.
    pub(super) fn stop(&self, why: Stop) -> bool {
        let first = self.stop.compare_exchange(0, why as u8, Relaxed, Relaxed).is_ok();
        if first {
            self.stopped.notify_one();
        }
        first
    }

    pub(super) fn stop_reason(&self) -> Option<Stop> {
        let number = self.stop.load(Relaxed);
        Stop::ALL.into_iter().find(|stop| *stop as u8 == number)
    }

    /// For the connection's own task.
    pub(super) async fn stopped(&self) -> Stop {
        loop {
            if let Some(why) = self.stop_reason() {
                return why;
            }
            self.stopped.notified().await;
        }
    }

    pub(super) fn show(&self, now: Instant) -> Connection {
        Connection {
            key: self.key().cloned(),
            from: self.from(),
            age: now.saturating_duration_since(self.since),
            to_daemon: self.to_daemon.load(Relaxed),
            to_client: self.to_client.load(Relaxed),
            state: self.state(),
        }
    }
}
