//! Reads a ClientHello, finds the daemon that it names, relays bytes.
//!
//! ```text
//!   accept ─▶ admit ─▶ read the hello ─▶ name ─▶ key ─▶ Directory::open ─▶ dial ─▶ replay ─▶ relay ─▶ end
//!                │            │            │                 │              │
//!                └────────────┴────────────┴──── refuse ─────┴──────────────┘   an alert, a count, a line in the log
//! ```
//!
//! Promises: TLS is never terminated and the bytes read are replayed exactly; there is no default route; whatever is
//! refused gets a TLS alert; a sleeping project is woken while the connection waits; an open connection is counted at
//! its project for as long as it lives, so nothing stops the daemon under it (K2). Each wait has a deadline and everything
//! that strangers can pile up a bound ([`Limits`]), and a peer that vanished without a word is noticed ([`sockets`]).
//!
//! | file | |
//! |---|---|
//! | `admission.rs` | how many may be open, of whom; which one goes for another |
//! | `live.rs` | one open connection as others see it |
//! | `connection.rs` | its life |
//! | `handover/` | how a successor gets it |
//! | `relay.rs`, `sockets.rs` | bytes, and the options of both legs |
//! | `trusted.rs` | who may say whom it speaks for (PROXY protocol) |
//! | `counters.rs` | what happened, in numbers and in the log |
//!
//! The gateway knows keys and addresses only, through [`Directory`].

use std::fmt;
use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kiln_domain::Key;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

mod admission;
mod connection;
mod counters;
pub mod handover;
mod live;
mod relay;
mod sockets;
#[cfg(test)]
mod tests;
mod trusted;

use admission::Admission;
use connection::{Beginning, Life};
pub use counters::{Counters, Figures, Refusal, Snapshot};
use live::Stop;
pub use live::{Connection, State};
pub(crate) use relay::PIPES;
pub use trusted::{ParseTrustedSourceError, TrustedSource};

use crate::seldom::Seldom;

/// A way to a daemon. The project counts as connected until this is dropped.
pub struct Door {
    pub address: SocketAddrV4,
    /// Dropped with the door; what it does is the directory's business.
    pub held: Box<dyn Send>,
}

/// Why a connection gets no daemon. The client sees only a TLS alert; the text is for our log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoDoor {
    /// No such project.
    Unknown,
    /// It exists but could not be woken.
    Unavailable(String),
}

impl fmt::Display for NoDoor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("there is no such project"),
            Self::Unavailable(why) => f.write_str(why),
        }
    }
}

/// Where the gateway looks names up; waking what sleeps is part of it.
///
/// A call may be dropped before it answers: its client went away, or the wait took too long.
#[async_trait]
pub trait Directory: Send + Sync + 'static {
    async fn open(&self, key: &Key) -> Result<Door, NoDoor>;

    /// A daemon whose door was opened could not be reached.
    fn unreachable(&self, key: &Key);

    /// A connection for a project that exists was refused. Whoever looks for the reason looks at the project.
    fn turned_away(&self, key: &Key, why: &str);
}

/// How much and how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time, in whatever state. When so many are open, a newcomer gets the place of the newest that no
    /// daemon has answered.
    pub connections: usize,
    /// Connections at a time that have not said their name yet, from everywhere and from one source (an IPv4 address or
    /// an IPv6 /64).
    pub half_open: usize,
    pub half_open_per_source: usize,
    /// Connections at a time that have said their name, from one source and of one project.
    pub per_address: usize,
    pub per_project: usize,
    /// Of those, connections that wait for their daemon, and the bytes of their hellos: in all and of one project.
    pub parked: usize,
    pub parked_bytes: usize,
    pub parked_per_project: usize,
    pub parked_bytes_per_project: usize,
    /// From the accept to the end of the hello.
    pub hello: Duration,
    /// What waking a daemon may take. buildx gives up after 20 s (docker/buildx, driver/remote), and an answer that
    /// comes just before is worth nothing: the build still has to get through the handshake.
    pub wake: Duration,
    /// One attempt to connect to a daemon that was said to be ready. There are two.
    pub dial: Duration,
    /// How long connections may live on once the gateway is told to stop.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            half_open: 1_000,
            half_open_per_source: 100,
            per_address: 2_048,
            per_project: 1_024,
            parked: 2_048,
            parked_bytes: 16 << 20,
            parked_per_project: 256,
            parked_bytes_per_project: 2 << 20,
            hello: Duration::from_secs(5),
            wake: Duration::from_secs(17),
            dial: Duration::from_secs(1),
            drain: Duration::from_secs(10),
        }
    }
}

pub struct Gateway {
    directory: Arc<dyn Directory>,
    domains: Vec<String>,
    /// They begin with a PROXY header, and nobody else may.
    trusted: Vec<TrustedSource>,
    limits: Limits,
    admission: Admission,
    counters: Counters,
    pools: Arc<relay::Pools>,
    connections: TaskTracker,
    /// False while a handover is under way.
    accepting: watch::Sender<bool>,
    /// Where connections go then.
    freezing: Mutex<Option<mpsc::UnboundedSender<handover::Frozen>>>,
}

/// After an accept that failed for want of something (descriptors, memory): retrying at once would only spin.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How often that is said.
const COMPLAINTS: Duration = Duration::from_secs(10);

impl Gateway {
    /// `domains`: daemons are known as `buildkitd-<key>.<domain>` below each of them. Their order means nothing: a
    /// name has to stand directly below one of them (G1).
    pub fn new(directory: Arc<dyn Directory>, domains: &[String], limits: Limits) -> Self {
        let domains = domains.iter().map(|d| d.trim_matches('.').to_ascii_lowercase()).collect();
        let admission = Admission::new(limits.clone());
        Self {
            directory,
            domains,
            trusted: Vec::new(),
            limits,
            admission,
            counters: Counters::default(),
            pools: Arc::default(),
            connections: TaskTracker::new(),
            accepting: watch::Sender::new(true),
            freezing: Mutex::default(),
        }
    }

    /// Connections from these must begin with a PROXY header, which says whom they are for: load balancers.
    #[must_use]
    pub fn behind(mut self, load_balancers: Vec<TrustedSource>) -> Self {
        self.trusted = load_balancers;
        self
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub fn figures(&self) -> Figures {
        Figures { counted: self.counters.snapshot(), open: self.admission.states() }
    }

    /// What is open now, the oldest first.
    pub fn connections(&self) -> Vec<Connection> {
        self.admission.connections()
    }

    /// Resets the connections of this name and refuses new ones, until [`Gateway::open`] or the end of this process.
    /// Returns how many there were. The daemon is left as it is.
    pub fn close(&self, key: &Key) -> usize {
        self.admission.close(key)
    }

    /// False: it was not closed.
    pub fn open(&self, key: &Key) -> bool {
        self.admission.open(key)
    }

    /// Serves until `shutdown`; then no connection is accepted any more, those that live may go on for
    /// [`Limits::drain`], and what is left is reset. Returns when the last one has ended.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, shutdown: CancellationToken) {
        // What is accepted inherits the options, for one call in place of six each. They cannot fail on a TCP socket.
        if let Err(error) = sockets::prepare(&listener) {
            tracing::warn!(%error, "cannot set keepalive: peers that vanish will be noticed late");
        }
        shutdown.run_until_cancelled(self.accept_all(&listener)).await;
        drop(listener);
        self.connections.close();
        if timeout(self.limits.drain, self.connections.wait()).await.is_err() {
            tracing::info!(
                left = self.connections.len(),
                "drain time is over: resetting the connections that are left"
            );
            self.admission.stop_all(Stop::Cut);
            self.connections.wait().await;
        }
    }

    async fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        let mut accepting = self.accepting.subscribe();
        let mut pause = FIRST_PAUSE;
        let mut complaints = Seldom::once_in(COMPLAINTS);
        loop {
            // What comes during a handover waits in the kernel's queue, for us or for the successor. The sender is ours,
            // so neither wait ends but with a yes.
            let _ = accepting.wait_for(|accepting| *accepting).await;
            let accepted = tokio::select! {
                biased;
                _ = accepting.wait_for(|accepting| !accepting) => continue,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((client, from)) => {
                    pause = FIRST_PAUSE;
                    self.admit(client, from);
                }
                // The client was gone before it was accepted; the next one is waiting.
                Err(error) if is_the_clients(&error) => {}
                Err(error) => {
                    self.counters.accept_failed();
                    if complaints.is_due(Instant::now()) {
                        tracing::warn!(%error, "cannot accept a connection; trying again");
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, client: TcpStream, from: SocketAddr) {
        self.counters.accepted();
        let admitted = match self.admission.admit(from, self.is_trusted(from.ip())) {
            Ok(admitted) => admitted,
            Err(refusal) => {
                self.counters.refused(refusal, from, "");
                connection::refuse_at_once(&client, refusal);
                return;
            }
        };
        let live = Arc::clone(admitted.live());
        // Counted here, before it runs: one accepted in the moment of the shutdown is waited for like any other (G2).
        self.connections.spawn(Life::new(Arc::clone(self), client, admitted, Beginning::default()));
        // Accepted just as everything was frozen: in the table too late to be seen there.
        if self.freezing.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            live.stop(Stop::Frozen);
        }
    }

    fn is_trusted(&self, peer: IpAddr) -> bool {
        self.trusted.iter().any(|source| source.contains(peer))
    }

    fn key_of(&self, name: &str) -> Option<Key> {
        self.domains.iter().find_map(|domain| Key::from_server_name(name, domain))
    }
}

fn is_the_clients(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}

/// Whose connections are counted together: an IPv6 customer has at least a /64 to himself.
pub(crate) fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) & !u128::from(u64::MAX)).into()),
        v4 @ IpAddr::V4(_) => v4,
    }
}
