//! Handovers between gateways of this process, over the same socket as between two.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use kiln_domain::Key;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::gateway::tests::{KEY, NAME, exactly, hello, rest_of, soon, until, v4};
use crate::gateway::{Connection, Directory, Limits, NoDoor, Refusal};

/// Counts what is held, over all gateways: a project that nobody holds could be stopped.
#[derive(Default)]
struct Held {
    now: AtomicUsize,
    gaps: AtomicUsize,
}

struct Holds(Arc<Held>);

impl Drop for Holds {
    fn drop(&mut self) {
        if self.0.now.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.gaps.fetch_add(1, Ordering::SeqCst);
        }
    }
}

struct At {
    address: std::net::SocketAddrV4,
    held: Arc<Held>,
    /// Nobody is let in before it is given a permit.
    awake: tokio::sync::Semaphore,
}

#[async_trait]
impl Directory for At {
    async fn open(&self, _: &Key) -> Result<Door, NoDoor> {
        self.awake.acquire().await.expect("never closed").forget();
        self.held.now.fetch_add(1, Ordering::SeqCst);
        Ok(Door { address: self.address, held: Box::new(Holds(Arc::clone(&self.held))) })
    }

    fn unreachable(&self, _: &Key) {}

    fn turned_away(&self, _: &Key, _: &str) {}
}

/// One kilnd.
struct House {
    gateway: Arc<Gateway>,
    directory: Arc<At>,
    /// A second descriptor of what it serves.
    listener: TcpListener,
    shutdown: CancellationToken,
    served: JoinHandle<()>,
}

impl House {
    fn serving(listener: TcpListener, daemon: &tokio::net::TcpListener, held: &Arc<Held>, doors: usize) -> Self {
        let awake = tokio::sync::Semaphore::new(doors);
        let directory = Arc::new(At { address: v4(daemon), held: Arc::clone(held), awake });
        let domains = ["builds.example.com".to_owned()];
        let gateway = Arc::new(Gateway::new(Arc::clone(&directory) as _, &domains, Limits::default()));
        let (shutdown, door) = (CancellationToken::new(), listener.try_clone().expect("cloned"));
        let door = tokio::net::TcpListener::from_std(door).expect("taken in");
        let served = tokio::spawn(Arc::clone(&gateway).serve(door, shutdown.clone()));
        Self { gateway, directory, listener, shutdown, served }
    }

    async fn first(daemon: &tokio::net::TcpListener, held: &Arc<Held>, doors: usize) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
        Self::serving(listener.into_std().expect("taken out"), daemon, held, doors)
    }

    async fn dial(&self) -> tokio::net::TcpStream {
        tokio::net::TcpStream::connect(self.listener.local_addr().expect("bound")).await.expect("connected")
    }

    /// A connection that has reached the daemon.
    async fn build(&self, daemon: &tokio::net::TcpListener) -> (tokio::net::TcpStream, tokio::net::TcpStream) {
        let (first, mut client) = (hello(NAME), self.dial().await);
        client.write_all(&first).await.expect("written");
        let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
        assert_eq!(exactly(&mut backend, first.len()).await, first);
        (client, backend)
    }

    fn offers(&self, to: UnixStream) -> JoinHandle<Result<usize, HandoverError>> {
        let (gateway, listener) = (Arc::clone(&self.gateway), self.listener.try_clone().expect("cloned"));
        let channel = Channel::with_patience(to, Duration::from_secs(5)).expect("a channel");
        tokio::spawn(async move { gateway.hand_over(listener, channel).await })
    }

    /// To another one, which goes on with everything.
    async fn succeeded(self, daemon: &tokio::net::TcpListener, held: &Arc<Held>, doors: usize) -> Self {
        let (mine, its) = UnixStream::pair().expect("a pair");
        let offer = self.offers(mine);
        let taken = take(Channel::new(its).expect("a channel"), 100).await.expect("all of it");
        let next = Self::serving(taken.listener.try_clone().expect("cloned"), daemon, held, doors);
        let adopted = soon(next.gateway.adopt(taken)).await.expect("its own");
        assert_eq!(soon(offer).await.expect("no panic").expect("handed over"), adopted);
        assert_eq!(self.gateway.connections(), []);
        self.stop().await;
        next
    }

    async fn stop(self) {
        self.shutdown.cancel();
        soon(self.served).await.expect("no panic");
        assert_eq!(self.gateway.counters().snapshot().open, 0);
    }

    fn only(&self) -> Connection {
        let all = self.gateway.connections();
        assert_eq!(all.len(), 1, "{all:?}");
        all.into_iter().next().expect("one")
    }
}

/// Numbers that are nowhere the same, so that a byte lost, doubled or moved shows.
fn payload(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33).to_be_bytes()
    };
    std::iter::repeat_with(&mut next).flat_map(|word| word.into_iter().skip(4)).take(count).collect()
}

async fn talk(stream: tokio::net::TcpStream, says: Vec<u8>, hears: Vec<u8>) {
    let (mut read, mut write) = stream.into_split();
    let speaking = tokio::spawn(async move {
        write.write_all(&says).await.expect("written");
        write.shutdown().await.expect("half-closed");
    });
    let mut got = Vec::new();
    read.read_to_end(&mut got).await.expect("read to its end");
    speaking.await.expect("no panic");
    assert!(got == hears, "what arrived is not what was sent: {} and {} bytes", got.len(), hears.len());
}

#[tokio::test]
async fn no_byte_of_a_transfer_is_lost_over_three_handovers() {
    const BYTES: usize = 96 << 20;
    let daemon = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let held = Arc::<Held>::default();
    let mut house = House::first(&daemon, &held, 9).await;
    let (client, backend) = house.build(&daemon).await;
    let (up, down) = (payload(BYTES, 1), payload(BYTES, 2));
    let talking = tokio::spawn(talk(client, up.clone(), down.clone()));
    let answering = tokio::spawn(talk(backend, down, up));
    let mut moved = 0;
    for _ in 0..3 {
        let so_far = moved;
        until("more has moved", || house.only().to_daemon > so_far + (BYTES / 8) as u64).await;
        house = house.succeeded(&daemon, &held, 9).await;
        let only = house.only();
        assert!(only.to_daemon > moved, "it does not begin to count again");
        moved = only.to_daemon;
        assert_eq!(only.key.as_ref().map(Key::as_str), Some(KEY));
        let held = (held.now.load(Ordering::SeqCst), held.gaps.load(Ordering::SeqCst));
        assert_eq!(held, (1, 0), "its project is held by one of them at every moment");
    }
    assert!(moved < BYTES as u64, "it had ended before");
    soon(async { tokio::join!(talking, answering) }).await.0.expect("whole");
    until("it ends", || house.gateway.connections().is_empty()).await;
    assert_eq!(held.now.load(Ordering::SeqCst), 0);
    assert_eq!(house.gateway.counters().snapshot().broken, 0);
    house.stop().await;
}

#[tokio::test]
async fn what_had_ended_stays_ended_and_what_had_not_goes_on() {
    let daemon = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let held = Arc::<Held>::default();
    let house = House::first(&daemon, &held, 9).await;
    let (mut client, mut backend) = house.build(&daemon).await;
    client.shutdown().await.expect("half-closed");
    assert_eq!(rest_of(&mut backend).await.expect("an end"), b"");
    until("it is noted", || house.only().state == State::HalfClosed).await;
    let before = house.only();
    let house = house.succeeded(&daemon, &held, 9).await;
    let after = house.only();
    assert_eq!((after.state, after.from, after.to_daemon), (State::HalfClosed, before.from, before.to_daemon));
    assert!(after.age >= before.age, "it is as old as it is");
    backend.write_all(b"late").await.expect("written");
    drop(backend);
    assert_eq!(rest_of(&mut client).await.expect("an end"), b"late");
    until("it ends", || house.gateway.connections().is_empty()).await;
    house.stop().await;
}

#[tokio::test]
async fn one_that_waits_for_its_daemon_waits_at_the_successor_s() {
    let daemon = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let held = Arc::<Held>::default();
    let house = House::first(&daemon, &held, 0).await;
    let (first, mut waits, mut speaks) = (hello(NAME), house.dial().await, house.dial().await);
    waits.write_all(&first).await.expect("written");
    speaks.write_all(&first[..50]).await.expect("written");
    until("one waits", || house.gateway.connections().iter().any(|one| one.state == State::Parked)).await;
    let house = house.succeeded(&daemon, &held, 0).await;
    until("it waits again", || house.gateway.connections().iter().any(|one| one.state == State::Parked)).await;
    speaks.write_all(&first[50..]).await.expect("written");
    house.directory.awake.add_permits(2);
    for _ in 0..2 {
        let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
        assert_eq!(exactly(&mut backend, first.len()).await, first, "from the first byte on");
        backend.write_all(b"!").await.expect("written");
    }
    drop((waits, speaks));
    until("they end", || house.gateway.connections().is_empty()).await;
    house.stop().await;
}

/// What a successor does before it dies.
async fn dies(how: &str, its: UnixStream) {
    match how {
        "at once" => drop(its),
        "in the middle" => {
            let mut channel = Channel::new(its).expect("a channel");
            blocking(move || channel.take().map(drop)).await.expect("the listener");
        }
        "with all of it" => drop(take(Channel::new(its).expect("a channel"), 100).await.expect("all of it")),
        "with another answer" => {
            let mut taken = take(Channel::new(its).expect("a channel"), 100).await.expect("all of it");
            taken.channel.put(&Record::Yours, &[]).expect("written");
        }
        _ => {
            let mut taken = take(Channel::new(its).expect("a channel"), 100).await.expect("all of it");
            std::io::Write::write_all(&mut taken.channel.0, &[0xff; 64]).expect("written");
        }
    }
}

#[tokio::test]
async fn a_successor_that_dies_before_it_has_everything_changes_nothing() {
    let daemon = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let held = Arc::<Held>::default();
    let house = House::first(&daemon, &held, 9).await;
    let (client, backend) = house.build(&daemon).await;
    let mut half_open = house.dial().await;
    half_open.write_all(&hello(NAME)[..9]).await.expect("written");
    until("both are in", || house.gateway.connections().len() == 2).await;
    let (up, down) = (payload(24 << 20, 1), payload(24 << 20, 2));
    let talking = tokio::spawn(talk(client, up.clone(), down.clone()));
    let answering = tokio::spawn(talk(backend, down, up));
    for how in ["at once", "in the middle", "with all of it", "with another answer", "with nonsense"] {
        let (mine, its) = UnixStream::pair().expect("a pair");
        let offer = house.offers(mine);
        dies(how, its).await;
        let outcome = soon(offer).await.expect("no panic");
        assert!(outcome.is_err(), "{how}");
    }
    half_open.write_all(&hello(NAME)[9..]).await.expect("written");
    let (another, _) = soon(daemon.accept()).await.expect("what waited goes on");
    let (client, backend) = house.build(&daemon).await;
    drop((half_open, another, client, backend));
    let (talked, answered) = soon(async { tokio::join!(talking, answering) }).await;
    talked.and(answered).expect("whole");
    until("all has ended", || house.gateway.connections().is_empty()).await;
    assert_eq!(house.gateway.counters().snapshot().refused(Refusal::ClientLeft), 0);
    house.stop().await;
}

#[tokio::test]
async fn a_hostile_predecessor_gets_nothing_taken() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let file = tempfile::tempfile().expect("a file");
    let listens = Record::Listener.to_bytes();
    let said = |bytes: &[u8], descriptors: &[std::os::fd::BorrowedFd<'_>]| {
        let (mine, its) = UnixStream::pair().expect("a pair");
        let length = u32::try_from(bytes.len()).expect("fits").to_be_bytes();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(rustix::net::SendAncillaryMessage::ScmRights(descriptors));
        }
        let whole = [&length[..], bytes].concat();
        let part = [std::io::IoSlice::new(&whole)];
        rustix::net::sendmsg(&mine, &part, &mut control, rustix::net::SendFlags::empty()).expect("sent");
        its
    };
    let (good, other) = (listener.as_fd(), file.as_fd());
    for (bytes, descriptors, word) in [
        (&[][..], &[good][..], "its version"),
        (&[9, 0], &[good], "version 9"),
        (&listens, &[], "0 descriptors came where 1"),
        (&listens, &[good, good], "2 descriptors came where 1"),
        (&listens, &[good, good, good, good], "came where 1"),
        (&listens, &[other], "no connection"),
        (&listens, &[good], "has gone"),
        (&Record::Complete.to_bytes(), &[], "the listener"),
    ] {
        let channel = Channel::new(said(bytes, descriptors)).expect("a channel");
        let error = take(channel, 100).await.map(drop).expect_err(word);
        assert!(error.to_string().contains(word), "{error} is not {word:?}");
    }
    let (mut mine, its) = UnixStream::pair().expect("a pair");
    std::io::Write::write_all(&mut mine, &u32::MAX.to_be_bytes()).expect("written");
    let error = take(Channel::new(its).expect("a channel"), 100).await.map(drop).expect_err("too long");
    assert!(matches!(error, HandoverError::TooLong(_)), "{error}");
    let (_silent, its) = UnixStream::pair().expect("a pair");
    let channel = Channel::with_patience(its, Duration::from_millis(50)).expect("a channel");
    assert!(matches!(take(channel, 100).await.map(drop), Err(HandoverError::Slow)));
}
