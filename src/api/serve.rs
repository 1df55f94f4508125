//! The accept loops, and the end.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::{Router, middleware};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::listener::Socket;
use super::{Api, Listener, connection, guard};

/// Connections at a time, all listeners together. Whoever comes next waits in the kernel's queue.
const CONNECTIONS: usize = 1024;

/// What a request under way gets when kilnd stops (the reference's figure).
const GRACE: Duration = Duration::from_secs(5);

/// After a failed `accept`, which means that file descriptors or memory ran out.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers requests on all `listeners` until `shutdown`, and then returns when the last request is answered or its
/// grace is over. Requests that are cut off drop their handlers, which releases what they had not delivered.
pub async fn serve(listeners: Vec<Listener>, api: Api, shutdown: CancellationToken) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let router = api.ending_with(shutdown.clone()).router();
    let mut loops = JoinSet::new();
    for listener in listeners {
        loops.spawn(accept(listener, router.clone(), room.clone(), shutdown.clone()));
    }
    while loops.join_next().await.is_some() {}
}

async fn accept(listener: Listener, router: Router, room: Arc<Semaphore>, shutdown: CancellationToken) {
    let router = match &listener.0 {
        Socket::Tcp(_) => router.layer(middleware::from_fn(guard::loopback_only)),
        Socket::Unix { .. } => router,
    };
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            // Forgets those that have ended.
            Some(_) = connections.join_next() => continue,
            accepted = next(&listener, &room) => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                let serving = stream.serve(router.clone(), shutdown.clone());
                connections.spawn(async move {
                    serving.await;
                    drop(place);
                });
            }
            Err(error) => {
                warn!(%error, "could not accept a connection; trying again");
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
    async fn serve(self, router: Router, shutdown: CancellationToken) {
        match self {
            Self::Unix(stream) => connection::serve(stream, router, shutdown).await,
            Self::Tcp(stream) => connection::serve(stream, router, shutdown).await,
        }
    }
}

/// Takes a place before a client, so that nobody is accepted only to wait.
async fn next(listener: &Listener, room: &Arc<Semaphore>) -> io::Result<(Stream, OwnedSemaphorePermit)> {
    let place = room.clone().acquire_owned().await.map_err(io::Error::other)?;
    let stream = match &listener.0 {
        Socket::Unix { listener, .. } => Stream::Unix(listener.accept().await?.0),
        Socket::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            // Answers are one write each; nothing is gained by waiting for more.
            stream.set_nodelay(true)?;
            Stream::Tcp(stream)
        }
    };
    Ok((stream, place))
}
