//! The gateway between real sockets, with a directory that does as it is told.

use std::io;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kiln_hello::Alert;
use rustix::net::sockopt;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

mod bounded;
mod closing;
mod proxied;

use crate::clock::{Clock as _, SystemClock};
use crate::pki::{DaemonNames, Pki};

const KEY: &str = "pbcce5b6205652dd7";
const NAME: &str = "buildkitd-pbcce5b6205652dd7.builds.example.com";
const DEADLINE: Duration = Duration::from_secs(10);

/// Everything in a test ends, one way or the other.
async fn soon<T>(what: impl Future<Output = T>) -> T {
    timeout(DEADLINE, what).await.expect("it took too long")
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let waited = async {
        while !condition() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(timeout(DEADLINE, waited).await.is_ok(), "never happened: {what}");
}

#[derive(Clone)]
enum Says {
    At(SocketAddrV4),
    No(NoDoor),
}

struct Fake {
    says: Says,
    /// Waited for by each call, when set.
    wakes: Option<Arc<Notify>>,
    calls: AtomicUsize,
    /// Calls that were dropped or answered.
    ended: Arc<AtomicUsize>,
    held: Arc<AtomicUsize>,
    unreachable: AtomicUsize,
    turned_away: Mutex<Vec<String>>,
}

struct CountDown(Arc<AtomicUsize>);
impl Drop for CountDown {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct CountUp(Arc<AtomicUsize>);
impl Drop for CountUp {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Fake {
    fn new(says: Says) -> Self {
        Self {
            says,
            wakes: None,
            calls: AtomicUsize::new(0),
            ended: Arc::default(),
            held: Arc::default(),
            unreachable: AtomicUsize::new(0),
            turned_away: Mutex::default(),
        }
    }

    fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Directory for Fake {
    async fn open(&self, key: &Key) -> Result<Door, NoDoor> {
        let _ended = CountUp(Arc::clone(&self.ended));
        self.calls.fetch_add(1, Ordering::SeqCst);
        if let Some(wakes) = &self.wakes {
            wakes.notified().await;
        }
        if key.as_str() != KEY {
            return Err(NoDoor::Unknown);
        }
        match self.says.clone() {
            Says::At(address) => {
                self.held.fetch_add(1, Ordering::SeqCst);
                Ok(Door { address, held: Box::new(CountDown(Arc::clone(&self.held))) })
            }
            Says::No(no) => Err(no),
        }
    }

    fn unreachable(&self, key: &Key) {
        assert_eq!(key.as_str(), KEY);
        self.unreachable.fetch_add(1, Ordering::SeqCst);
    }

    fn turned_away(&self, key: &Key, why: &str) {
        assert_eq!(key.as_str(), KEY);
        self.turned_away.lock().expect("no panic").push(why.to_owned());
    }
}

struct Running {
    address: SocketAddr,
    gateway: Arc<Gateway>,
    fake: Arc<Fake>,
    shutdown: CancellationToken,
    served: JoinHandle<()>,
}

impl Running {
    async fn start(fake: Fake, limits: Limits) -> Self {
        Self::start_behind(&[], fake, limits).await
    }

    async fn start_behind(behind: &[&str], fake: Fake, limits: Limits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("bound");
        let fake = Arc::new(fake);
        let directory: Arc<dyn Directory> = Arc::clone(&fake) as _;
        // A parent domain stands before one below it (G1).
        let domains = ["example.com".to_owned(), ".Builds.Example.com.".to_owned()];
        let trusted = behind.iter().map(|source| source.parse().expect("a source")).collect();
        let gateway = Arc::new(Gateway::new(directory, &domains, limits).behind(trusted));
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(Arc::clone(&gateway).serve(listener, shutdown.clone()));
        Self { address, gateway, fake, shutdown, served }
    }

    /// In front of a daemon that is a bare socket.
    async fn before_a_daemon(limits: Limits) -> (Self, TcpListener) {
        let daemon = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        (Self::start(Fake::new(Says::At(v4(&daemon))), limits).await, daemon)
    }

    /// With clients that come through a load balancer.
    async fn before_a_daemon_behind(source: &str, limits: Limits) -> (Self, TcpListener) {
        let daemon = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        (Self::start_behind(&[source], Fake::new(Says::At(v4(&daemon))), limits).await, daemon)
    }

    async fn dial(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }

    async fn dial_and_say(&self, bytes: &[u8]) -> TcpStream {
        let mut client = self.dial().await;
        client.write_all(bytes).await.expect("written");
        client
    }

    fn refused(&self, refusal: Refusal) -> u64 {
        self.gateway.counters().snapshot().refused(refusal)
    }

    async fn stop(self) {
        self.shutdown.cancel();
        soon(self.served).await.expect("no panic");
        assert_eq!(self.fake.held(), 0, "a door is still held");
        assert_eq!(self.gateway.counters().snapshot().open, 0);
    }
}

fn v4(listener: &TcpListener) -> SocketAddrV4 {
    match listener.local_addr().expect("bound") {
        SocketAddr::V4(address) => address,
        SocketAddr::V6(_) => unreachable!("bound to v4"),
    }
}

fn hello(name: &str) -> Vec<u8> {
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut connection = ClientConnection::new(Arc::new(config), name).expect("a connection");
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).expect("written to memory");
    bytes
}

async fn rest_of(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    soon(stream.read_to_end(&mut bytes)).await?;
    Ok(bytes)
}

async fn exactly(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    soon(stream.read_exact(&mut bytes)).await.expect("so many bytes");
    bytes
}

#[tokio::test]
async fn what_was_read_is_replayed_and_each_direction_ends_on_its_own() {
    let (gateway, daemon) = Running::before_a_daemon(Limits::default()).await;
    let mut client = gateway.dial().await;
    client.set_nodelay(true).expect("set");
    let mut sent = hello(NAME);
    for byte in &sent {
        client.write_all(&[*byte]).await.expect("written");
    }
    client.write_all(b"and more").await.expect("written");
    sent.extend(b"and more");
    client.shutdown().await.expect("half-closed");

    let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
    assert_eq!(rest_of(&mut backend).await.expect("read to its end"), sent);
    assert_eq!(gateway.fake.held(), 1, "the client has finished, the daemon has not");
    backend.write_all(b"late response").await.expect("written");
    drop(backend);
    assert_eq!(rest_of(&mut client).await.expect("read to its end"), b"late response");

    until("the connection ends", || gateway.gateway.counters().snapshot().open == 0).await;
    let counted = gateway.gateway.counters().snapshot();
    assert_eq!((counted.relayed, counted.broken), (1, 0));
    assert_eq!((counted.to_daemons, counted.to_clients), (sent.len() as u64, 13));
    gateway.stop().await;
}

#[tokio::test]
async fn more_than_all_buffers_hold_goes_both_ways_at_once() {
    let (gateway, daemon) = Running::before_a_daemon(Limits::default()).await;
    let first = hello(NAME);
    let client = gateway.dial_and_say(&first).await;
    let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
    assert_eq!(exactly(&mut backend, first.len()).await, first);
    let payload: Vec<u8> = (0..8 << 20).map(|i: u32| (i % 251) as u8).collect();
    let talk = |stream: TcpStream, payload: Vec<u8>| async move {
        let (mut read, mut write) = stream.into_split();
        let expected = payload.clone();
        let writer = tokio::spawn(async move {
            write.write_all(&payload).await.expect("written");
            write.shutdown().await.expect("half-closed");
        });
        let mut got = Vec::new();
        read.read_to_end(&mut got).await.expect("read");
        writer.await.expect("no panic");
        assert!(got == expected, "what arrived is not what was sent");
    };
    soon(async { tokio::join!(talk(client, payload.clone()), talk(backend, payload.clone())) }).await;
    gateway.stop().await;
}

/// A daemon's listener as buildkitd sets it up, with a project's certificates.
fn acceptor(pki: &Pki, key: &Key) -> TlsAcceptor {
    let read = |name: &str| pki.read_daemon_file(key, name).expect("read").expect("there");
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(&read("ca.pem"))), Arc::clone(&provider));
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(verifier.build().expect("a verifier"))
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(read("cert.pem").as_bytes()).expect("a certificate")],
            PrivateKeyDer::from_pem_slice(read("key.pem").as_bytes()).expect("a key"),
        );
    TlsAcceptor::from(Arc::new(config.expect("they belong together")))
}

fn roots(ca: &str) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).expect("a certificate")).expect("a root");
    roots
}

#[tokio::test]
async fn mutual_tls_goes_through_untouched() {
    let state = tempfile::tempdir().expect("a directory");
    let pki = Pki::new(state.path()).expect("pki");
    let key: Key = KEY.parse().expect("a key");
    let now = SystemClock.now();
    let names = DaemonNames { server_names: vec![NAME.to_owned()], addresses: Vec::new() };
    pki.write_daemon_files(&key, &names, now).expect("written");
    let mine = pki.issue_credential(&key, now, now.plus(Duration::from_hours(1))).expect("issued");
    let (gateway, daemon) = Running::before_a_daemon(Limits::default()).await;
    let acceptor = acceptor(&pki, &key);
    let echo = tokio::spawn(async move {
        let (stream, _) = daemon.accept().await.expect("accepted");
        let mut stream = acceptor.accept(stream).await.expect("a client of ours");
        let mut bytes = [0; 5];
        stream.read_exact(&mut bytes).await.expect("read");
        stream.write_all(&bytes).await.expect("written");
        stream.shutdown().await.expect("closed");
    });
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots(&mine.ca))
        .with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(mine.cert.as_bytes()).expect("a certificate")],
            PrivateKeyDer::from_pem_slice(mine.key.as_bytes()).expect("a key"),
        )
        .expect("they belong together");
    let name = ServerName::try_from(NAME).expect("a name");
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, gateway.dial().await);
    let mut client = soon(connecting).await.expect("shaken hands with the daemon itself");
    client.write_all(b"hello").await.expect("written");
    let mut answer = Vec::new();
    soon(client.read_to_end(&mut answer)).await.expect("closed in good order");
    assert_eq!(answer, b"hello");
    drop(client);
    soon(echo).await.expect("no panic");
    gateway.stop().await;
}

#[tokio::test]
async fn a_sleeping_daemon_is_woken_while_the_connection_waits() {
    let daemon = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let wakes = Arc::new(Notify::new());
    let fake = Fake { wakes: Some(Arc::clone(&wakes)), ..Fake::new(Says::At(v4(&daemon))) };
    let gateway = Running::start(fake, Limits::default()).await;
    let first = hello(NAME);
    let client = gateway.dial_and_say(&first).await;
    until("the directory is asked", || gateway.fake.calls.load(Ordering::SeqCst) == 1).await;
    assert_eq!(gateway.fake.held(), 0);
    wakes.notify_one();
    let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
    assert_eq!(exactly(&mut backend, first.len()).await, first);
    assert_eq!((gateway.fake.held(), gateway.gateway.counters().snapshot().open), (1, 1));
    drop((client, backend));
    until("the door is closed", || gateway.fake.held() == 0).await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_only_its_own_wait() {
    let wakes = Arc::new(Notify::new());
    let nowhere = Says::No(NoDoor::Unavailable("not reached".to_owned()));
    let gateway = Running::start(Fake { wakes: Some(wakes), ..Fake::new(nowhere) }, Limits::default()).await;
    let leaver = gateway.dial_and_say(&hello(NAME)).await;
    let _stayer = gateway.dial_and_say(&hello(NAME)).await;
    until("both wait", || gateway.fake.calls.load(Ordering::SeqCst) == 2).await;
    drop(leaver);
    until("one has left", || gateway.refused(Refusal::ClientLeft) == 1).await;
    assert_eq!(gateway.fake.ended.load(Ordering::SeqCst), 1);
    gateway.shutdown.cancel();
}

#[tokio::test]
async fn whatever_is_refused_gets_its_alert() {
    let gateway =
        Running::start(Fake::new(Says::No(NoDoor::Unavailable("asleep for good".to_owned()))), Limits::default()).await;
    let other = NAME.replace("pbcce5b6205652dd7", "p9f75a8e0cb6e0600");
    for (bytes, alert, refusal) in [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), Alert::UnexpectedMessage, Refusal::NotTls),
        (b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(), Alert::UnexpectedMessage, Refusal::NotTls),
        (vec![22, 3, 1, 0x48, 1], Alert::RecordOverflow, Refusal::HelloTooLarge),
        (vec![22, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff], Alert::DecodeError, Refusal::HelloTooLarge),
        (vec![22, 3, 1, 0, 6, 1, 0, 0, 2, 3, 3], Alert::DecodeError, Refusal::HelloMalformed),
        (hello("10.88.0.7"), Alert::UnrecognizedName, Refusal::NoName),
        (hello("evil.attacker.com"), Alert::UnrecognizedName, Refusal::ForeignName),
        (hello("buildkitd-x.builds.example.com"), Alert::UnrecognizedName, Refusal::ForeignName),
        (hello("buildkitd-pbcce5b6205652dd7.ns.builds.example.com"), Alert::UnrecognizedName, Refusal::ForeignName),
        (hello(&other), Alert::UnrecognizedName, Refusal::UnknownProject),
        (hello(NAME), Alert::InternalError, Refusal::Unavailable),
    ] {
        let before = gateway.refused(refusal);
        let mut client = gateway.dial_and_say(&bytes).await;
        assert_eq!(rest_of(&mut client).await.expect("an alert, not a reset"), alert.to_bytes(), "{refusal:?}");
        assert_eq!(gateway.refused(refusal), before + 1, "{refusal:?}");
    }
    let mut silent = gateway.dial().await;
    silent.shutdown().await.expect("half-closed");
    assert_eq!(rest_of(&mut silent).await.expect("an alert"), Alert::DecodeError.to_bytes());
    assert_eq!(gateway.refused(Refusal::HelloUnfinished), 1);
    gateway.stop().await;
}

#[tokio::test]
async fn an_alert_arrives_also_before_a_flood_that_was_not_read() {
    let gateway = Running::start(Fake::new(Says::No(NoDoor::Unknown)), Limits::default()).await;
    let mut flood = b"POST / HTTP/1.1\r\n".to_vec();
    flood.resize(100_000, b'x');
    let mut client = gateway.dial_and_say(&flood).await;
    assert_eq!(exactly(&mut client, 7).await, Alert::UnexpectedMessage.to_bytes());
    drop(client);
    gateway.stop().await;
}

#[tokio::test]
async fn a_hello_that_is_never_finished_is_cut_at_its_deadline() {
    let limits = Limits { hello: Duration::from_millis(150), ..Limits::default() };
    let gateway = Running::start(Fake::new(Says::No(NoDoor::Unknown)), limits).await;
    let mut client = gateway.dial().await;
    let start = tokio::time::Instant::now();
    let bytes = hello(NAME);
    // One byte now and then does not move the deadline.
    for byte in &bytes[..5] {
        client.write_all(&[*byte]).await.expect("written");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(exactly(&mut client, 7).await, Alert::InternalError.to_bytes());
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(gateway.refused(Refusal::HelloTimedOut), 1);
    drop(client);
    gateway.stop().await;
}

#[tokio::test]
async fn a_daemon_that_is_not_there_is_tried_twice_and_its_door_closed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = v4(&listener);
    drop(listener);
    let gateway = Running::start(Fake::new(Says::At(address)), Limits::default()).await;
    let mut client = gateway.dial_and_say(&hello(NAME)).await;
    assert_eq!(rest_of(&mut client).await.expect("an alert"), Alert::InternalError.to_bytes());
    assert_eq!((gateway.refused(Refusal::Unreachable), gateway.fake.held()), (1, 0));
    assert_eq!(gateway.fake.unreachable.load(Ordering::SeqCst), 1, "whoever owns the daemon is told");

    // One that comes up between the two attempts is reached.
    let client = gateway.dial_and_say(&hello(NAME)).await;
    until("the directory is asked", || gateway.fake.calls.load(Ordering::SeqCst) == 2).await;
    let late = TcpListener::bind(address).await.expect("bound again");
    let reached = soon(late.accept()).await;
    drop((client, reached));
    gateway.stop().await;
}

#[tokio::test]
async fn a_wake_that_takes_too_long_is_given_up() {
    let limits = Limits { wake: Duration::from_millis(100), ..Limits::default() };
    let fake = Fake { wakes: Some(Arc::new(Notify::new())), ..Fake::new(Says::No(NoDoor::Unknown)) };
    let gateway = Running::start(fake, limits).await;
    let mut client = gateway.dial_and_say(&hello(NAME)).await;
    assert_eq!(rest_of(&mut client).await.expect("an alert"), Alert::InternalError.to_bytes());
    assert_eq!(gateway.refused(Refusal::WakeTimedOut), 1);
    gateway.stop().await;
}

#[tokio::test]
async fn a_reset_on_one_side_resets_the_other() {
    let (gateway, daemon) = Running::before_a_daemon(Limits::default()).await;
    let first = hello(NAME);
    for client_breaks in [true, false] {
        let client = gateway.dial_and_say(&first).await;
        let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
        assert_eq!(exactly(&mut backend, first.len()).await, first);
        let (breaks, mut other) = if client_breaks { (client, backend) } else { (backend, client) };
        sockets::reset_on_close(&breaks);
        drop(breaks);
        let error = rest_of(&mut other).await.expect_err("a reset, not an end");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
    until("both have ended", || gateway.gateway.counters().snapshot().open == 0).await;
    assert_eq!(gateway.gateway.counters().snapshot().broken, 2);
    gateway.stop().await;
}

#[tokio::test]
async fn both_legs_notice_a_peer_that_vanished() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    sockets::prepare(&listener).expect("set");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
    sockets::prepare(&dialled).expect("set");
    // As the gateway does it: an accepted one has its options from the listener.
    let accepted = listener.accept().await.expect("accepted").0;
    for stream in [&dialled, &accepted] {
        assert!(sockopt::tcp_nodelay(stream).expect("read") && sockopt::socket_keepalive(stream).expect("read"));
        assert_eq!(sockopt::tcp_keepidle(stream).expect("read"), Duration::from_secs(15));
        assert_eq!(sockopt::tcp_keepcnt(stream).expect("read"), 3);
        assert_eq!(sockopt::tcp_user_timeout(stream).expect("read"), 60_000);
    }
}

#[tokio::test]
async fn half_open_connections_are_limited_and_those_over_it_told_at_once() {
    let daemon = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    // Loopback has no limit of its own: see the tests of `admission`.
    let limits = Limits { half_open: 2, half_open_per_source: 1, ..Limits::default() };
    let gateway = Running::start(Fake::new(Says::At(v4(&daemon))), limits).await;
    let mut idle = vec![gateway.dial().await, gateway.dial().await];
    until("both are in", || gateway.gateway.counters().snapshot().accepted == 2).await;
    let mut third = gateway.dial().await;
    assert_eq!(rest_of(&mut third).await.expect("an alert"), Alert::InternalError.to_bytes());
    assert_eq!(gateway.refused(Refusal::TooManyHalfOpen), 1);
    // One of them says its name: there is room for another.
    idle[0].write_all(&hello(NAME)).await.expect("written");
    until("it is relayed", || gateway.gateway.counters().snapshot().open == 1).await;
    idle.push(gateway.dial_and_say(&hello(NAME)).await);
    until("so is the other", || gateway.gateway.counters().snapshot().open == 2).await;
    drop(idle);
    drop(daemon);
    gateway.stop().await;
}

#[tokio::test]
async fn a_shutdown_lets_what_lives_go_on_and_then_cuts_it() {
    let limits = Limits { drain: Duration::from_millis(300), ..Limits::default() };
    let (gateway, daemon) = Running::before_a_daemon(limits).await;
    let first = hello(NAME);
    let mut client = gateway.dial_and_say(&first).await;
    let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
    assert_eq!(exactly(&mut backend, first.len()).await, first);
    gateway.shutdown.cancel();
    let refuses = async {
        while TcpStream::connect(gateway.address).await.is_ok() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    soon(refuses).await;
    backend.write_all(b"still here").await.expect("written");
    assert_eq!(exactly(&mut client, 10).await, b"still here");
    let error = rest_of(&mut client).await.expect_err("cut, not ended");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    assert!(rest_of(&mut backend).await.is_err());
    gateway.stop().await;
}
