//! The accept loops, and the end.

use std::io;
use std::time::{Duration, Instant};

use axum::{Router, middleware};
use rustix::io::Errno;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::listener::Socket;
use super::places::{Place, Room, Size};
use super::{Api, Listener, connection, guard};
use crate::identity::Source;
use crate::seldom::Seldom;

/// Connections at a time on each listener.
const SIZE: Size = Size { places: 1024, reserve: 64 };

/// The most that both doors take at a time.
pub const MOST_CONNECTIONS: u64 = 2 * (SIZE.places + SIZE.reserve) as u64;

/// What a request under way gets when kilnd stops (the reference's figure).
const GRACE: Duration = Duration::from_secs(5);

/// After a failed `accept`, which means that file descriptors or memory ran out.
const PAUSE: Duration = Duration::from_millis(100);
/// How often that is said.
const COMPLAINTS: Duration = Duration::from_secs(10);

/// Answers requests on all `listeners` until `shutdown`, and then returns when the last request is answered or its
/// grace is over. Requests that are cut off drop their handlers, which releases what they had not delivered.
pub async fn serve(listeners: Vec<Listener>, api: Api, shutdown: CancellationToken) {
    serve_in(SIZE, listeners, api, shutdown).await;
}

pub(super) async fn serve_in(size: Size, listeners: Vec<Listener>, api: Api, shutdown: CancellationToken) {
    let router = api.ending_with(shutdown.clone()).router();
    let mut loops = JoinSet::new();
    for listener in listeners {
        loops.spawn(accept(listener, router.clone(), Room::new(size), shutdown.clone()));
    }
    while loops.join_next().await.is_some() {}
}

async fn accept(listener: Listener, router: Router, room: Room, shutdown: CancellationToken) {
    let router = match &listener.0 {
        Socket::Tcp(_) => router.layer(middleware::from_fn(guard::loopback_only)),
        Socket::Unix { .. } => router,
    };
    let mut connections = JoinSet::new();
    let mut complaints = Seldom::once_in(COMPLAINTS);
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            // Forgets those that have ended.
            Some(_) = connections.join_next() => continue,
            accepted = next(&listener, &room) => accepted,
        };
        match accepted {
            Ok((stream, from)) => {
                drop(connections.spawn(stream.serve(from, router.clone(), room.enter(), shutdown.clone())));
            }
            Err(error) => {
                if is_out_of_descriptors(&error) {
                    room.make_room();
                }
                if complaints.is_due(Instant::now()) {
                    warn!(%error, "could not accept a connection; trying again");
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    // The path goes first: new clients learn at once that nobody is here.
    drop(listener);
    let rest = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, rest).await.is_err() {
        info!(connections = connections.len(), "requests did not end within their grace and are cut off");
        connections.shutdown().await;
    }
}

enum Stream {
    Unix(tokio::net::UnixStream),
    Tcp(tokio::net::TcpStream),
}

impl Stream {
    async fn serve(self, from: Source, router: Router, place: Place, shutdown: CancellationToken) {
        match self {
            Self::Unix(stream) => connection::serve(stream, from, router, place, shutdown).await,
            Self::Tcp(stream) => connection::serve(stream, from, router, place, shutdown).await,
        }
    }
}

/// Only when there is a place, so that nobody is accepted only to wait: the kernel's queue is for that.
async fn next(listener: &Listener, room: &Room) -> io::Result<(Stream, Source)> {
    room.has_place().await;
    match &listener.0 {
        Socket::Unix { listener, .. } => {
            let stream = listener.accept().await?.0;
            // Of the moment when it connected; what it was passed on to since is in its hands.
            let uid = stream.peer_cred()?.uid();
            Ok((Stream::Unix(stream), Source::Socket { uid }))
        }
        Socket::Tcp(listener) => {
            let (stream, from) = listener.accept().await?;
            // Answers are one write each; nothing is gained by waiting for more.
            stream.set_nodelay(true)?;
            Ok((Stream::Tcp(stream), Source::Tcp(from.ip())))
        }
    }
}

/// Of the process, or of the whole host.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw_os_error), Some(Errno::MFILE | Errno::NFILE))
}
