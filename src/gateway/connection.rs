//! The life of one connection, from its first byte to its end.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddrV4;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kiln_domain::Key;
use kiln_hello::{Alert, Hello, HelloReader, Progress};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::admission::Admitted;
use super::handover::{Frozen, What};
use super::live::{Live, Stop};
use super::relay::{FrozenRelay, Relay};
use super::{Door, Gateway, NoDoor, Refusal, sockets};

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

/// The whole of it, as small as can be once it is relayed: it may idle for hours, with thousands beside it.
#[allow(clippy::large_enum_variant, reason = "the large one is what it is nearly always")]
pub(super) enum Life {
    /// Apart, because it takes five times the room, and only for a moment.
    Begins(Pin<Box<dyn Future<Output = Option<Relayed>> + Send>>),
    Relayed(Relayed),
    Over,
}

/// What a connection has said before this life of it.
#[derive(Default)]
pub(super) struct Beginning {
    /// No load balancer's header is to come.
    pub(super) introduced: bool,
    pub(super) read: Vec<u8>,
}

impl Life {
    pub(super) fn new(gateway: Arc<Gateway>, client: TcpStream, admitted: Admitted, beginning: Beginning) -> Self {
        Self::Begins(Box::pin(begin(gateway, client, admitted, beginning)))
    }

    /// One that was frozen.
    pub(super) fn relayed(
        gateway: Arc<Gateway>,
        relay: FrozenRelay,
        door: Option<Door>,
        admitted: Admitted,
    ) -> io::Result<Self> {
        let relay = Relay::thaw(relay, Arc::clone(&gateway.pools))?;
        Ok(Self::Relayed(Relayed { relay, door, admitted, gateway }))
    }
}

impl Future for Life {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            *self = match &mut *self {
                Self::Begins(beginning) => ready!(beginning.as_mut().poll(cx)).map_or(Self::Over, Self::Relayed),
                Self::Relayed(relayed) => {
                    let outcome = ready!(relayed.poll(cx));
                    if let Self::Relayed(relayed) = std::mem::replace(&mut *self, Self::Over) {
                        relayed.end(outcome);
                    }
                    Self::Over
                }
                Self::Over => return Poll::Ready(()),
            };
        }
    }
}

/// From the first byte to the daemon. `None`: it was refused, or stopped, and has ended here.
async fn begin(
    gateway: Arc<Gateway>,
    client: TcpStream,
    mut admitted: Admitted,
    beginning: Beginning,
) -> Option<Relayed> {
    let live = Arc::clone(admitted.live());
    let mut said = Said::new(gateway.is_trusted(live.peer().ip()) && !beginning.introduced);
    match unless_stopped(&live, find_daemon(&gateway, &client, &mut admitted, &mut said, beginning.read)).await {
        Ok(Ok((door, daemon))) => {
            gateway.counters.relay_started();
            let relay = Relay::new(client, daemon, said.reader.into_bytes(), Arc::clone(&gateway.pools));
            return Some(Relayed { relay, door: Some(door), admitted, gateway });
        }
        Ok(Err(refused)) => {
            gateway.counters.refused(refused.refusal, live.from(), &refused.why);
            // Stopped meanwhile, it is closed without a farewell.
            let _ = unless_stopped(&live, say_no(&client, refused.alert)).await;
        }
        Err(Stop::Frozen) => {
            admitted.begins_again();
            let (introduced, read) = said.into_parts();
            // It fails only without a runtime.
            if let Ok(client) = client.into_std() {
                gateway.keep(Frozen { admitted, what: What::Waiting { client, introduced, read } });
            }
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
    None
}

async fn unless_stopped<T>(live: &Live, doing: impl Future<Output = T>) -> Result<T, Stop> {
    let mut doing = pin!(doing);
    poll_fn(|cx| match live.poll_stopped(cx) {
        Poll::Ready(stop) => Poll::Ready(Err(stop)),
        Poll::Pending => doing.as_mut().poll(cx).map(Ok),
    })
    .await
}

/// A connection that has reached its daemon. What it consists of goes in this order: while a byte may still flow, the
/// project is busy (K2).
pub(super) struct Relayed {
    relay: Relay,
    /// `None`: it was taken over, and its project could not be held.
    door: Option<Door>,
    admitted: Admitted,
    gateway: Arc<Gateway>,
}

impl Relayed {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<io::Result<()>, Stop>> {
        let live = self.admitted.live();
        match live.poll_stopped(cx) {
            Poll::Ready(stop) => Poll::Ready(Err(stop)),
            Poll::Pending => self.relay.poll(cx, live).map(Ok),
        }
    }

    /// Both streams end gently if both sides had finished, else by a reset; or they go on elsewhere.
    fn end(self, outcome: Result<io::Result<()>, Stop>) {
        let Self { relay, door, admitted, gateway } = self;
        let live = Arc::clone(admitted.live());
        let broken = !matches!(outcome, Ok(Ok(())));
        if matches!(outcome, Err(Stop::Frozen)) {
            match relay.freeze() {
                Ok(relay) => return gateway.keep(Frozen { admitted, what: What::Relayed { relay, door } }),
                Err(error) => tracing::warn!(%error, "a connection is lost: it could not be taken apart"),
            }
        } else {
            if broken {
                relay.reset_on_close();
            }
            drop(relay);
        }
        let (to_daemon, to_client) = live.moved();
        let error = outcome.ok().and_then(Result::err);
        let (from, error) = (live.from(), error.map(tracing::field::display));
        tracing::debug!(%from, to_daemon, to_client, broken, error, "connection ended");
        gateway.counters.relay_ended(to_daemon, to_client, broken);
        drop((door, admitted));
    }
}

/// `None`: there is nobody left to tell.
const fn refusal_of(stop: Stop) -> Option<Refusal> {
    match stop {
        Stop::Cut | Stop::Frozen => None,
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
    said: &mut Said,
    read: Vec<u8>,
) -> Result<(Door, TcpStream), Refused> {
    let limits = &gateway.limits;
    let name = timeout(limits.hello, said.read_hello(client, admitted, read))
        .await
        .map_err(|_| Refused::new(Refusal::HelloTimedOut, "no complete hello in time"))??;
    let name = name.ok_or_else(|| Refused::new(Refusal::NoName, "the hello names no host"))?;
    let key = gateway
        .key_of(&name)
        .ok_or_else(|| Refused::new(Refusal::ForeignName, format!("{name:?} is not a daemon's name")))?;
    admitted.said_hello(&key, said.reader.bytes().len()).map_err(|refusal| Refused::new(refusal, key.as_str()))?;
    let door = open_door(gateway, client, &key).await?;
    let daemon = dial(door.address, limits.dial).await.map_err(|e| {
        gateway.directory.unreachable(&key);
        let why = format!("its daemon does not answer at {}: {e}", door.address);
        turn_away(gateway, Refusal::Unreachable, &key, &why)
    })?;
    match admitted.reached().map_err(refusal_of) {
        Ok(()) => Ok((door, daemon)),
        Err(Some(refusal)) => Err(Refused::new(refusal, key.as_str())),
        // The gateway goes down or hands over, which the caller is told as well.
        Err(None) => std::future::pending().await,
    }
}

/// For a project that exists: the reason is told where its admin looks.
fn turn_away(gateway: &Gateway, refusal: Refusal, key: &Key, why: &str) -> Refused {
    gateway.directory.turned_away(key, why);
    Refused::new(refusal, format!("{key}: {why}"))
}

/// What a client has said so far. It outlives the reading of it, which may be stopped.
struct Said {
    /// What there is of a load balancer's header, while that is to come.
    header: Option<Vec<u8>>,
    reader: HelloReader,
}

impl Said {
    fn new(proxied: bool) -> Self {
        Self { header: proxied.then(Vec::new), reader: HelloReader::new() }
    }

    /// Whether its header is behind it, and every byte but those of the header.
    fn into_parts(self) -> (bool, Vec<u8>) {
        match self.header {
            Some(header) => (false, header),
            None => (true, self.reader.into_bytes()),
        }
    }

    /// The name. `read` was read before.
    async fn read_hello(
        &mut self,
        client: &TcpStream,
        admitted: &mut Admitted,
        read: Vec<u8>,
    ) -> Result<Option<String>, Refused> {
        if let Some(hello) = self.hear(&read, admitted)? {
            return Ok(hello.server_name);
        }
        drop(read);
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
            if let Some(hello) = self.hear(piece.get(..count).unwrap_or_default(), admitted)? {
                return Ok(hello.server_name);
            }
        }
    }

    fn hear(&mut self, piece: &[u8], admitted: &mut Admitted) -> Result<Option<Hello>, Refused> {
        let progress = match &mut self.header {
            None => self.reader.feed(piece),
            Some(before) => {
                before.extend_from_slice(piece);
                let Some(length) = whom_for(before, admitted)? else { return Ok(None) };
                let progress = self.reader.feed(before.get(length..).unwrap_or_default());
                self.header = None;
                progress
            }
        };
        match progress {
            Ok(Progress::NeedMore) => Ok(None),
            Ok(Progress::Hello(hello)) => Ok(Some(hello)),
            Err(error) => Err(Refused { refusal: (&error).into(), alert: error.alert(), why: error.to_string() }),
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
        // A warm project's answer is there before anybody could have left.
        biased;
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

/// An alert, then the end. What the client still sends is read away for a moment: closing a socket with unread bytes
/// sends a reset, which would overtake the alert.
async fn say_no(client: &TcpStream, alert: Alert) {
    let farewell = async {
        sockets::write_all(client, &alert.to_bytes()).await?;
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
