//! Hands the listener and all connections to a successor, so that a restart drops none.
//!
//! ```text
//!   this process                                   the successor
//!   freeze: nothing is accepted or moved any more
//!   Listener, Waiting…, Relayed…, Complete ──────▶ takes them, and holds each one's project as connected
//!                                          ◀────── Holding
//!   Yours ───────────────────────────────────────▶ moves bytes
//!   closes its copies, lets the projects go
//! ```
//!
//! Promises: each direction is cut between two bytes, and what had been read and not yet written goes along; an end that was
//! passed on is not passed on again; a connection that waits for its daemon is read again from its first byte. Until it
//! says `Yours` this process can go on as if nothing had been, whatever becomes of the successor, because that has not
//! moved a byte; afterwards it never does. The projects are held by one of the two at every moment (K2).
//!
//! | file | |
//! |---|---|
//! | `record.rs` | what is said of a connection, as bytes |
//! | `channel.rs` | where records and descriptors are kept: a unix socket between two processes |

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::mpsc;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::timeout;

mod channel;
mod record;
#[cfg(test)]
mod tests;

pub use channel::Channel;
use channel::Keeper;
use record::{Direction, Record, RecordError};

use super::admission::Admitted;
use super::connection::{Beginning, Life};
use super::live::{State, Stop};
use super::relay::{FrozenRelay, FrozenWay};
use super::{Door, Gateway};

/// Why a handover did not come about. Who wanted to hand over goes on.
#[derive(Debug, Error)]
pub enum HandoverError {
    #[error("the other process has gone")]
    Gone,
    #[error("the other process does not keep up")]
    Slow,
    #[error("the other process cannot be talked to")]
    Socket(#[source] io::Error),
    #[error("a record of {0} bytes is longer than any")]
    TooLong(usize),
    #[error("{got} descriptors came where {wanted} belong")]
    Descriptors { got: usize, wanted: usize },
    #[error("a descriptor came that is no connection")]
    NoSocket,
    #[error("a record cannot be read: {0}")]
    Record(String),
    #[error("something else was to come than {0}")]
    OutOfTurn(&'static str),
    #[error("more than {0} connections came, which is all there may be")]
    TooMany(usize),
}

impl From<io::Error> for HandoverError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
        match error.kind() {
            BrokenPipe | ConnectionReset | UnexpectedEof => Self::Gone,
            TimedOut | WouldBlock => Self::Slow,
            _ => Self::Socket(error),
        }
    }
}

impl From<RecordError> for HandoverError {
    fn from(error: RecordError) -> Self {
        Self::Record(error.to_string())
    }
}

/// A connection that is in nobody's hands. Its place and its project are held.
pub(super) struct Frozen {
    pub(super) admitted: Admitted,
    pub(super) what: What,
}

pub(super) enum What {
    Waiting { client: TcpStream, introduced: bool, read: Vec<u8> },
    Relayed { relay: FrozenRelay, door: Option<Door> },
}

/// What a successor got, not in use yet.
pub struct Taken {
    pub listener: TcpListener,
    connections: Vec<(Record, Vec<OwnedFd>)>,
    channel: Channel,
}

/// Everything that comes, for a gateway with room for so many connections.
pub async fn take(mut channel: Channel, most: usize) -> Result<Taken, HandoverError> {
    blocking(move || {
        let (Record::Listener, mut descriptors) = channel.take()? else {
            return Err(HandoverError::OutOfTurn("the listener"));
        };
        let listener = descriptors.pop().ok_or(HandoverError::NoSocket)?.into();
        let mut connections = Vec::new();
        loop {
            match channel.take()? {
                (Record::Complete, _) => return Ok(Taken { listener, connections, channel }),
                (record @ (Record::Waiting(_) | Record::Relayed(_)), descriptors) if connections.len() < most => {
                    connections.push((record, descriptors));
                }
                (Record::Waiting(_) | Record::Relayed(_), _) => return Err(HandoverError::TooMany(most)),
                _ => return Err(HandoverError::OutOfTurn("a connection")),
            }
        }
    })
    .await
}

impl Gateway {
    /// Hands over what is open, with the listener that [`Gateway::serve`] serves. After an error everything goes on here;
    /// after success nothing is left here, and the caller shuts this gateway down. Returns how many went.
    pub async fn hand_over(self: &Arc<Self>, listener: TcpListener, channel: Channel) -> Result<usize, HandoverError> {
        let frozen = self.freeze().await;
        let many = frozen.len();
        let (frozen, outcome) = match spawn_blocking(move || {
            let outcome = offer(&listener, &frozen, channel);
            (frozen, outcome)
        })
        .await
        {
            Ok(done) => done,
            Err(panicked) => return Err(io::Error::other(panicked).into()),
        };
        match outcome {
            Ok(()) => {
                for one in &frozen {
                    if let What::Relayed { .. } = one.what {
                        self.counters.relay_handed_over();
                    }
                }
                drop(frozen);
                Ok(many)
            }
            Err(error) => {
                tracing::warn!(%error, many, "the handover did not come about: going on");
                self.thaw(frozen);
                Err(error)
            }
        }
    }

    /// From a connection that was stopped for a handover.
    pub(super) fn keep(&self, frozen: Frozen) {
        let freezing = self.freezing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(to) = freezing.as_ref() {
            // Whoever froze it waits for it.
            let _ = to.send(frozen);
        }
    }

    /// Stops to accept and to move bytes, and takes everything out.
    async fn freeze(&self) -> Vec<Frozen> {
        let (to, mut from) = mpsc::unbounded_channel();
        *self.freezing.lock().unwrap_or_else(PoisonError::into_inner) = Some(to);
        self.accepting.send_replace(false);
        self.admission.stop_all(Stop::Frozen);
        // Each ends, or sends itself here and ends.
        self.connections.close();
        self.connections.wait().await;
        from.close();
        let mut frozen = Vec::new();
        while let Some(one) = from.recv().await {
            frozen.push(one);
        }
        frozen
    }

    /// Undoes [`Gateway::freeze`].
    fn thaw(self: &Arc<Self>, frozen: Vec<Frozen>) {
        *self.freezing.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.connections.reopen();
        for Frozen { admitted, what } in frozen {
            admitted.live().resume();
            self.go_on(admitted, what);
        }
        self.accepting.send_replace(true);
    }

    fn go_on(self: &Arc<Self>, admitted: Admitted, what: What) {
        let life = match what {
            What::Waiting { client, introduced, read } => tokio::net::TcpStream::from_std(client)
                .map(|client| Life::new(Arc::clone(self), client, admitted, Beginning { introduced, read })),
            What::Relayed { relay, door } => Life::relayed(Arc::clone(self), relay, door, admitted),
        };
        match life {
            Ok(life) => drop(self.connections.spawn(life)),
            Err(error) => tracing::warn!(%error, "a connection is lost: the runtime does not take it back"),
        }
    }

    /// Makes what was taken its own. Each project is held before the one who had it lets go, and no byte moves before
    /// that has said so: after an error nothing has happened. Returns how many there are.
    pub async fn adopt(self: &Arc<Self>, taken: Taken) -> Result<usize, HandoverError> {
        let Taken { listener: _, connections, mut channel } = taken;
        let mut holding = JoinSet::new();
        for (record, descriptors) in connections {
            let gateway = Arc::clone(self);
            holding.spawn(async move { gateway.hold(record, descriptors).await });
        }
        let held: Vec<Frozen> = holding.join_all().await.into_iter().flatten().collect();
        blocking(move || {
            channel.put(&Record::Holding, &[])?;
            match channel.take()? {
                (Record::Yours, _) => Ok(()),
                _ => Err(HandoverError::OutOfTurn("the last word")),
            }
        })
        .await?;
        let many = held.len();
        for Frozen { admitted, what } in held {
            if let What::Relayed { .. } = what {
                self.counters.relay_started();
            }
            self.go_on(admitted, what);
        }
        Ok(many)
    }

    /// `None`: it is lost.
    async fn hold(self: &Arc<Self>, record: Record, descriptors: Vec<OwnedFd>) -> Option<Frozen> {
        let mut sockets = descriptors.into_iter().map(TcpStream::from);
        match record {
            Record::Waiting(waiting) => {
                let admitted = self.admission.adopt(waiting.peer, waiting.client, waiting.age, None);
                let client = sockets.next()?;
                let what = What::Waiting { client, introduced: waiting.introduced, read: waiting.read };
                Some(Frozen { admitted, what })
            }
            Record::Relayed(relayed) => {
                let admitted = self.admission.adopt(relayed.peer, relayed.client, relayed.age, Some(&relayed.key));
                let door = timeout(self.limits.wake, self.directory.open(&relayed.key)).await;
                let door = match door {
                    Ok(Ok(door)) => Some(door),
                    // Its daemon may still answer on the connection that it has.
                    Ok(Err(why)) => {
                        tracing::warn!(key = %relayed.key, %why, "a connection was taken over, and its project is not held");
                        None
                    }
                    Err(_) => None,
                };
                let (client, daemon) = (sockets.next()?, sockets.next()?);
                admitted.live().has_moved(relayed.to_daemon.moved, relayed.to_client.moved);
                if relayed.to_daemon.ended || relayed.to_client.ended {
                    admitted.live().enter(State::HalfClosed);
                }
                let way = |direction: Direction| FrozenWay { pending: direction.pending, ended: direction.ended };
                let (to_daemon, to_client) = (way(relayed.to_daemon), way(relayed.to_client));
                let relay = FrozenRelay { client, daemon, to_daemon, to_client };
                Some(Frozen { admitted, what: What::Relayed { relay, door } })
            }
            _ => None,
        }
    }
}

/// Returns when the successor has all of it for its own.
fn offer(listener: &TcpListener, frozen: &[Frozen], mut channel: Channel) -> Result<(), HandoverError> {
    channel.put(&Record::Listener, &[listener.as_fd()])?;
    for one in frozen {
        put(&mut channel, one)?;
    }
    channel.put(&Record::Complete, &[])?;
    channel.has_patience(HOLDS_WITHIN)?;
    match channel.take()? {
        (Record::Holding, _) => channel.put(&Record::Yours, &[]),
        _ => Err(HandoverError::OutOfTurn("that the projects are held")),
    }
}

/// What opening the doors may take the successor, all at once.
const HOLDS_WITHIN: Duration = Duration::from_secs(20);

fn put(keeper: &mut impl Keeper, Frozen { admitted, what }: &Frozen) -> Result<(), HandoverError> {
    let live = admitted.live();
    let (peer, client, age) = (live.peer(), live.client(), live.age());
    match what {
        What::Waiting { client: socket, introduced, read } => {
            let waiting = record::Waiting { peer, client, age, introduced: *introduced, read: read.clone() };
            keeper.put(&Record::Waiting(waiting), &[socket.as_fd()])
        }
        What::Relayed { relay, .. } => {
            let key = live.key().ok_or(HandoverError::OutOfTurn("a connection without a name"))?.clone();
            let (to_daemon, to_client) = live.moved();
            let way = |way: &FrozenWay, moved| Direction { moved, ended: way.ended, pending: way.pending.clone() };
            let (to_daemon, to_client) = (way(&relay.to_daemon, to_daemon), way(&relay.to_client, to_client));
            let relayed = record::Relayed { peer, client, age, key, to_daemon, to_client };
            keeper.put(&Record::Relayed(relayed), &[relay.client.as_fd(), relay.daemon.as_fd()])
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HandoverError> + Send + 'static,
) -> Result<T, HandoverError> {
    spawn_blocking(work).await.map_err(io::Error::other)?
}
