//! Whether an answer that carries a lease reached its client.
//!
//! ```text
//!   handler ──▶ Answered ──last byte to the kernel──▶ Flushed ──▶ delivered
//!                  │                                     │
//!                  └─ connection ends, write fails ──────┴─ reset with bytes unread ──▶ dropped: the lease is released
//! ```
//!
//! What is taken as a sign, and how sure it is:
//!
//! * A write that fails, and a connection that ends before the last byte is with the kernel: it did not arrive.
//! * Over a unix socket the kernel tells a peer that closed with bytes unread (a reset) from one that had read all (an
//!   end), so the next thing that is heard of the peer settles it.
//! * Over TCP a reset may come from a client that has read everything, so only one that is there already when the last
//!   byte leaves counts: that of a peer which had closed before. Later ones are taken for delivered.
//!
//! In doubt an answer counts as delivered: a lease that nobody uses ends with its grace, while one that is released
//! under a build could cost the build its daemon.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::{TcpStream, UnixStream};

use super::heart::Routed;
use crate::metrics::Metrics;

/// An answer's lease, on its way through the layers as an extension of the response.
#[derive(Clone)]
pub(super) struct Delivery(Arc<Mutex<Option<Undecided>>>);

impl Delivery {
    pub(super) fn of(routed: Box<dyn Routed>, metrics: Arc<Metrics>) -> Self {
        Self(Arc::new(Mutex::new(Some(Undecided { routed: Some(routed), metrics }))))
    }

    /// It comes out once.
    pub(super) fn take(&self) -> Option<Undecided> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Dropped, it was not delivered.
pub(super) struct Undecided {
    routed: Option<Box<dyn Routed>>,
    metrics: Arc<Metrics>,
}

impl Undecided {
    fn delivered(mut self) {
        if let Some(routed) = self.routed.take() {
            routed.delivered();
        }
    }
}

impl Drop for Undecided {
    fn drop(&mut self) {
        if self.routed.is_some() {
            self.metrics.answer_lost();
        }
    }
}

/// What a socket tells of its other end.
pub(super) trait Peer {
    /// A reset is a peer that closed without having read all, and nothing else is.
    const TELLS_UNREAD: bool;

    /// Whether a reset is there already. Does not wait.
    fn has_reset(&self) -> bool;
}

impl Peer for UnixStream {
    const TELLS_UNREAD: bool = true;

    fn has_reset(&self) -> bool {
        false
    }
}

impl Peer for TcpStream {
    const TELLS_UNREAD: bool = false;

    fn has_reset(&self) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut descriptors = [PollFd::new(self, PollFlags::empty())];
        let bad = PollFlags::ERR | PollFlags::HUP;
        poll(&mut descriptors, Some(&at_once)).is_ok() && descriptors[0].revents().intersects(bad)
    }
}

/// The answers of one connection, of which at most one is undecided. Dropped with one that is with the kernel, it counts
/// as delivered: nothing more will be heard of it.
#[derive(Default)]
pub(super) struct Outbox(Mutex<Stage>);

#[derive(Default)]
enum Stage {
    #[default]
    Nothing,
    /// In the connection's buffer to its last byte.
    Answered(Undecided),
    /// With the kernel to its last byte.
    Flushed(Undecided),
}

impl Outbox {
    fn change(&self, change: impl FnOnce(Stage) -> Stage) {
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *stage = change(std::mem::take(&mut *stage));
    }

    /// The whole answer is in the connection's buffer.
    pub(super) fn answered(&self, answer: Undecided) {
        self.change(|before| {
            // A client that sent its next request before this answer says nothing more of the one before.
            if let Stage::Flushed(before) = before {
                before.delivered();
            }
            Stage::Answered(answer)
        });
    }

    /// Nothing is left in the connection's buffer.
    pub(super) fn flushed<P: Peer>(&self, peer: &P) {
        self.change(|stage| match stage {
            Stage::Answered(answer) if P::TELLS_UNREAD => Stage::Flushed(answer),
            Stage::Answered(answer) => {
                if !peer.has_reset() {
                    answer.delivered();
                }
                Stage::Nothing
            }
            other => other,
        });
    }

    /// The next thing that is heard of the peer: bytes, its end, or an error.
    pub(super) fn heard(&self, outcome: Result<(), &io::Error>) {
        self.change(|stage| match stage {
            Stage::Flushed(answer) => {
                if outcome.is_ok() {
                    answer.delivered();
                }
                Stage::Nothing
            }
            other => other,
        });
    }

    /// Whether something is with the kernel of which the peer would still tell.
    pub(super) fn is_open(&self) -> bool {
        matches!(&*self.0.lock().unwrap_or_else(PoisonError::into_inner), Stage::Flushed(_))
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.heard(Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
        let address = listener.local_addr().expect("an address");
        let (client, server) = tokio::join!(TcpStream::connect(address), listener.accept());
        (client.expect("connects"), server.expect("accepts").0)
    }

    #[tokio::test]
    async fn a_peer_that_closed_before_the_last_byte_shows_as_a_reset() {
        let (client, mut server) = pair().await;
        drop(client);
        // Its end has arrived, and says nothing yet: it might only have stopped sending.
        server.readable().await.expect("hears its end");
        assert!(!server.has_reset());
        server.write_all(b"an answer").await.expect("the kernel takes it");
        let answered = async {
            while !server.has_reset() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), answered).await.expect("the other kernel says so");
    }

    #[tokio::test]
    async fn a_peer_that_is_there_shows_as_none() {
        let (mut client, mut server) = pair().await;
        server.write_all(b"an answer").await.expect("the kernel takes it");
        assert!(!server.has_reset());
        client.shutdown().await.expect("stops sending");
        server.readable().await.expect("hears its end");
        server.write_all(b"the rest").await.expect("the kernel takes it");
        assert!(!server.has_reset(), "it still reads");
    }
}
