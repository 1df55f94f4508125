//! The life of one connection, from its first byte to its end.

use std::io;
use std::net::SocketAddrV4;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kiln_domain::Key;
use kiln_hello::{Alert, HelloReader, Progress};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::admission::Admitted;
use super::live::{Live, Stop};
use super::{Door, Gateway, NoDoor, Refusal, relay, sockets};

/// Between the two attempts to connect: long enough for a listener to come up that was said to be there.
const BETWEEN_DIALS: Duration = Duration::from_millis(100);

/// How long the directory may take for a client that has finished writing.
const HALF_CLOSED: Duration = Duration::from_secs(1);

/// How long a refused client may take to read its alert.
const FAREWELL: Duration = Duration::from_millis(500);

/// How much of what a refused client still sends is read and thrown away.
const FAREWELL_BYTES: usize = 256 * 1024;

/// Why there is nothing to relay.
struct Refused {
    refusal: Refusal,
    alert: Alert,
    why: String,
}

impl Refused {
    fn new(refusal: Refusal, why: impl Into<String>) -> Self {
        Self { refusal, alert: refusal.alert(), why: why.into() }
    }
}

/// Ends with the connection, or soon after it was stopped.
pub(super) async fn run(gateway: &Gateway, client: TcpStream, mut admitted: Admitted) {
    let live = Arc::clone(admitted.live());
    // Apart, so that a connection that idles for hours does not carry the room that its beginning needed.
    let found = Box::pin(unless_stopped(&live, find_daemon(gateway, &client, &mut admitted))).await;
    match found {
        Ok(Ok((door, daemon, hello))) => {
            relay_to_the_end(gateway, client, daemon, hello, &live).await;
            // Last: while a byte may still flow, the project is busy (K2).
            drop(door);
        }
        Ok(Err(refused)) => {
            gateway.counters.refused(refused.refusal, live.from(), &refused.why);
            let _ = Box::pin(unless_stopped(&live, say_no(&client, refused.alert))).await;
        }
        Err(stop) => {
            if let Some(refusal) = refusal_of(stop) {
                gateway.counters.refused(refusal, live.from(), live.key().map_or("", Key::as_str));
                // Without a farewell: its place has been given away.
                refuse_at_once(&client, refusal);
            }
            sockets::reset_on_close(&client);
        }
    }
}

async fn unless_stopped<T>(live: &Live, doing: impl Future<Output = T>) -> Result<T, Stop> {
    tokio::select! {
        biased;
        stop = live.stopped() => Err(stop),
        done = doing => Ok(done),
    }
}

/// `None`: there is nobody left to tell.
const fn refusal_of(stop: Stop) -> Option<Refusal> {
    match stop {
        Stop::Cut => None,
        Stop::Shed => Some(Refusal::Shed),
        Stop::Closed => Some(Refusal::NameClosed),
    }
}

/// For a client that gets no task of its own: what fits into its socket at once.
pub(super) fn refuse_at_once(client: &TcpStream, refusal: Refusal) {
    // It is closed next; one that cannot be told is not told.
    let _ = client.try_write(&refusal.alert().to_bytes());
}

async fn find_daemon(
    gateway: &Gateway,
    client: &TcpStream,
    admitted: &mut Admitted,
) -> Result<(Door, TcpStream, Vec<u8>), Refused> {
    let limits = &gateway.limits;
    let proxied = gateway.is_trusted(admitted.live().peer());
    let (name, hello) = timeout(limits.hello, read_hello(client, proxied, admitted))
        .await
        .map_err(|_| Refused::new(Refusal::HelloTimedOut, "no complete hello in time"))??;
    let name = name.ok_or_else(|| Refused::new(Refusal::NoName, "the hello names no host"))?;
    let key = gateway
        .key_of(&name)
        .ok_or_else(|| Refused::new(Refusal::ForeignName, format!("{name:?} is not a daemon's name")))?;
    admitted.said_hello(&key, hello.len()).map_err(|refusal| Refused::new(refusal, key.as_str()))?;
    let door = open_door(gateway, client, &key).await?;
    let daemon = dial(door.address, limits.dial).await.map_err(|e| {
        gateway.directory.unreachable(&key);
        let why = format!("its daemon does not answer at {}: {e}", door.address);
        turn_away(gateway, Refusal::Unreachable, &key, &why)
    })?;
    match admitted.reached().map_err(refusal_of) {
        Ok(()) => Ok((door, daemon, hello)),
        Err(Some(refusal)) => Err(Refused::new(refusal, key.as_str())),
        // The gateway goes down, which the caller is told as well.
        Err(None) => std::future::pending().await,
    }
}

/// For a project that exists: the reason is told where its admin looks.
fn turn_away(gateway: &Gateway, refusal: Refusal, key: &Key, why: &str) -> Refused {
    gateway.directory.turned_away(key, why);
    Refused::new(refusal, format!("{key}: {why}"))
}

/// The name and every byte of the client read so far.
async fn read_hello(
    client: &TcpStream,
    proxied: bool,
    admitted: &mut Admitted,
) -> Result<(Option<String>, Vec<u8>), Refused> {
    let mut reader = HelloReader::new();
    let mut header = proxied.then(Vec::new);
    loop {
        let unfinished = |e: io::Error| Refused::new(Refusal::HelloUnfinished, e.to_string());
        client.readable().await.map_err(unfinished)?;
        // On the stack only between two waits, so that a connection that waits does not carry it.
        let mut piece = [0; 4096];
        let count = match client.try_read(&mut piece) {
            Ok(0) => return Err(Refused::new(Refusal::HelloUnfinished, "closed before a complete hello")),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(unfinished(error)),
        };
        let piece = piece.get(..count).unwrap_or_default();
        let progress = match header.take() {
            None => reader.feed(piece),
            Some(mut before) => {
                before.extend_from_slice(piece);
                match whom_for(&before, admitted)? {
                    None => {
                        header = Some(before);
                        continue;
                    }
                    Some(length) => reader.feed(before.get(length..).unwrap_or_default()),
                }
            }
        };
        match progress {
            Ok(Progress::NeedMore) => {}
            Ok(Progress::Hello(hello)) => return Ok((hello.server_name, reader.into_bytes())),
            Err(error) => {
                return Err(Refused { refusal: (&error).into(), alert: error.alert(), why: error.to_string() });
            }
        }
    }
}

/// The length of a load balancer's header, once it is there.
fn whom_for(bytes: &[u8], admitted: &mut Admitted) -> Result<Option<usize>, Refused> {
    match kiln_proxy::read(bytes) {
        Ok(kiln_proxy::Progress::NeedMore) => Ok(None),
        Ok(kiln_proxy::Progress::Header(header)) => {
            if let Some(client) = header.from {
                admitted.comes_from(client).map_err(|refusal| Refused::new(refusal, client.ip().to_string()))?;
            }
            Ok(Some(header.length))
        }
        Err(error) => Err(Refused::new(Refusal::BadProxyHeader, error.to_string())),
    }
}

/// Waits for the directory, but not for longer than the client does.
async fn open_door(gateway: &Gateway, client: &TcpStream, key: &Key) -> Result<Door, Refused> {
    tokio::select! {
        answer = timeout(gateway.limits.wake, gateway.directory.open(key)) => match answer {
            Ok(Ok(door)) => Ok(door),
            Ok(Err(NoDoor::Unknown)) => Err(Refused::new(Refusal::UnknownProject, key.as_str())),
            Ok(Err(NoDoor::Unavailable(why))) => Err(turn_away(gateway, Refusal::Unavailable, key, &why)),
            Err(_) => Err(turn_away(gateway, Refusal::WakeTimedOut, key, "its daemon was not woken in time")),
        },
        () = gone(client) => Err(Refused::new(Refusal::ClientLeft, format!("while {key} was woken"))),
    }
}

/// Returns when the client has hung up. Anything that it sends now is early data, and it can be left to the relay; then
/// it is not watched any further, because its end would only be seen behind that data.
async fn gone(client: &TcpStream) {
    let mut probe = [0];
    match client.peek(&mut probe).await {
        Err(_) => {}
        // It may only have finished writing. No TLS handshake can end after that, but that is for a daemon to find, if
        // there is one awake.
        Ok(0) => sleep(HALF_CLOSED).await,
        Ok(_) => std::future::pending().await,
    }
}

async fn dial(address: SocketAddrV4, deadline: Duration) -> io::Result<TcpStream> {
    let attempt = || async {
        let stream = timeout(deadline, TcpStream::connect(address)).await??;
        sockets::prepare(&stream)?;
        Ok(stream)
    };
    let first: io::Result<TcpStream> = attempt().await;
    if first.is_ok() {
        return first;
    }
    sleep(BETWEEN_DIALS).await;
    attempt().await
}

/// Replays the hello and relays. Both streams are closed when this returns: gently if both sides had finished, else by
/// a reset.
async fn relay_to_the_end(gateway: &Gateway, client: TcpStream, daemon: TcpStream, hello: Vec<u8>, live: &Live) {
    gateway.counters.relay_started();
    let outcome = {
        // Pinned here and lent: handed over by value it would be in the task twice.
        let whole = pin!(async {
            relay::write_all(&daemon, &hello).await?;
            live.to_daemon.fetch_add(hello.len() as u64, Relaxed);
            // A connection that idles for hours does not carry its hello.
            drop(hello);
            relay::relay(&client, &daemon, &gateway.buffers, live).await
        });
        unless_stopped(live, whole).await
    };
    let broken = !matches!(outcome, Ok(Ok(())));
    if broken {
        sockets::reset_on_close(&client);
        sockets::reset_on_close(&daemon);
    }
    let (to_daemon, to_client) = (live.to_daemon.load(Relaxed), live.to_client.load(Relaxed));
    let error = outcome.ok().and_then(Result::err);
    let (from, error) = (live.from(), error.map(tracing::field::display));
    tracing::debug!(%from, to_daemon, to_client, broken, error, "connection ended");
    drop((client, daemon));
    gateway.counters.relay_ended(to_daemon, to_client, broken);
}

/// An alert, then the end. What the client still sends is read away for a moment: closing a socket with unread bytes
/// sends a reset, which would overtake the alert.
async fn say_no(client: &TcpStream, alert: Alert) {
    let farewell = async {
        relay::write_all(client, &alert.to_bytes()).await?;
        sockets::finish_writing(client)?;
        let mut left = FAREWELL_BYTES;
        while left > 0 {
            client.readable().await?;
            let mut piece = [0; 4096];
            match client.try_read(&mut piece) {
                Ok(0) => break,
                Ok(count) => left = left.saturating_sub(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok::<_, io::Error>(())
    };
    // Late, gone or deaf: it is closed all the same.
    let _ = timeout(FAREWELL, farewell).await;
}
