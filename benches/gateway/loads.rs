//! What clients and backend do while a proxy is measured.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::CertifiedKey;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};

use crate::Outcome;
use crate::account::{descriptors, memory, processor_time};
use crate::proxies::{NAME, Proxy, more_descriptors};

/// The first byte after the hello says what a connection is for.
const ECHO: u8 = b'e';
const SWALLOW: u8 = b's';

/// Clients that connect at the same time.
const CLIENTS: usize = 16;
const HANDSHAKES: usize = 1600;
const ROUND_TRIPS: usize = 10_000;
const FRAME: usize = 100;

pub(crate) type Figures = Vec<(String, f64)>;

pub(crate) struct Load {
    pub(crate) name: String,
    what: What,
}

enum What {
    Handshakes,
    RoundTrips,
    Bulk { streams: usize, write: usize, bytes: u64 },
    Idle { connections: usize },
}

pub(crate) fn all(idle: usize, bytes: u64) -> Vec<Load> {
    let load = |name: &str, what| Load { name: name.to_owned(), what };
    // First, while nothing has been used that could be used again.
    let mut all = vec![load("idle", What::Idle { connections: idle })];
    all.extend([load("handshakes", What::Handshakes), load("round trips", What::RoundTrips)]);
    for (streams, write) in [(1, 256 << 10), (8, 256 << 10), (1, 4 << 10), (1, 16 << 10), (1, 64 << 10)] {
        let name = format!("{streams} × {} KiB", write >> 10);
        all.push(Load { name, what: What::Bulk { streams, write, bytes } });
    }
    all
}

impl Load {
    pub(crate) fn run(&self, proxy: &Proxy) -> Outcome<Figures> {
        match self.what {
            What::Handshakes => handshakes(proxy),
            What::RoundTrips => round_trips(proxy),
            What::Bulk { streams, write, bytes } => self.bulk(proxy, streams, write, bytes),
            What::Idle { connections } => idle(proxy, connections),
        }
    }

    fn bulk(&self, proxy: &Proxy, streams: usize, write: usize, bytes: u64) -> Outcome<Figures> {
        let payload = vec![7; write];
        let start = Instant::now();
        let before = processor_time(&proxy.pids())?;
        thread::scope(|scope| {
            let all: Vec<_> = (0..streams)
                .map(|_| {
                    scope.spawn(|| -> io::Result<()> {
                        let mut stream = connect(proxy.address, SWALLOW)?;
                        let mut left = bytes / streams as u64;
                        while left > 0 {
                            let now = write.min(usize::try_from(left).unwrap_or(write));
                            stream.write_all(&payload[..now])?;
                            left -= now as u64;
                        }
                        stream.shutdown(Shutdown::Write)?;
                        // The backend has all of it.
                        stream.read_to_end(&mut Vec::new()).map(drop)
                    })
                })
                .collect();
            all.into_iter().try_for_each(|one| one.join().map_err(|_| io::ErrorKind::Other)?)
        })?;
        let used = processor_time(&proxy.pids())?.saturating_sub(before);
        let gigabytes = bytes as f64 / 1e9;
        Ok(vec![
            (format!("CPU-s per GB, {}", self.name), used.as_secs_f64() / gigabytes),
            (format!("GB/s, {}", self.name), gigabytes / start.elapsed().as_secs_f64()),
        ])
    }
}

/// TLS from end to end, and then the end of the connection.
fn handshakes(proxy: &Proxy) -> Outcome<Figures> {
    let config = client_config();
    let before = processor_time(&proxy.pids())?;
    thread::scope(|scope| {
        let all: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| -> io::Result<()> {
                    for _ in 0..HANDSHAKES / CLIENTS {
                        let name = ServerName::try_from(NAME).map_err(io::Error::other)?;
                        let session = ClientConnection::new(Arc::clone(&config), name).map_err(io::Error::other)?;
                        let mut stream = StreamOwned::new(session, TcpStream::connect(proxy.address)?);
                        stream.sock.set_nodelay(true)?;
                        stream.write_all(b"?")?;
                        stream.read_exact(&mut [0])?;
                    }
                    Ok(())
                })
            })
            .collect();
        all.into_iter().try_for_each(|one| one.join().map_err(|_| io::ErrorKind::Other)?)
    })?;
    let used = processor_time(&proxy.pids())?.saturating_sub(before);
    Ok(vec![("CPU µs per connection (TLS handshake)".to_owned(), used.as_secs_f64() * 1e6 / HANDSHAKES as f64)])
}

/// A small frame there and one back, one at a time.
fn round_trips(proxy: &Proxy) -> Outcome<Figures> {
    let mut stream = connect(proxy.address, ECHO)?;
    let mut frame = [7; FRAME];
    let before = processor_time(&proxy.pids())?;
    let mut took = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let start = Instant::now();
        stream.write_all(&frame)?;
        stream.read_exact(&mut frame)?;
        took.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let used = processor_time(&proxy.pids())?.saturating_sub(before);
    took.sort_by(f64::total_cmp);
    Ok(vec![
        ("CPU µs per round trip of 100 bytes".to_owned(), used.as_secs_f64() * 1e6 / ROUND_TRIPS as f64),
        ("µs per round trip, p50".to_owned(), took[ROUND_TRIPS / 2]),
        ("µs per round trip, p99".to_owned(), took[ROUND_TRIPS * 99 / 100]),
    ])
}

fn idle(proxy: &Proxy, connections: usize) -> Outcome<Figures> {
    let pids = proxy.pids();
    let (memory_before, descriptors_before) = (memory(&pids)?, descriptors(&pids)?);
    let open = (0..connections).map(|_| connect(proxy.address, ECHO)).collect::<io::Result<Vec<_>>>()?;
    let with = memory(&pids)? - memory_before;
    let files = descriptors(&pids)? - descriptors_before;
    let before = processor_time(&pids)?;
    thread::sleep(Duration::from_secs(1));
    let used = processor_time(&pids)?.saturating_sub(before);
    drop(open);
    let start = Instant::now();
    while descriptors(&pids)? > descriptors_before && start.elapsed() < Duration::from_secs(5) {
        thread::sleep(Duration::from_millis(20));
    }
    let many = connections as f64;
    Ok(vec![
        ("bytes per idle connection".to_owned(), with / many),
        ("descriptors per idle connection".to_owned(), files / many),
        ("CPU % while all idle".to_owned(), used.as_secs_f64() * 100.0),
        ("bytes per connection kept after the end".to_owned(), (memory(&pids)? - memory_before) / many),
        ("descriptors kept after the end".to_owned(), descriptors(&pids)? - descriptors_before),
    ])
}

/// A connection whose hello has reached the backend.
fn connect(proxy: SocketAddr, purpose: u8) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(proxy)?;
    stream.set_nodelay(true)?;
    let mut first = hello()?;
    first.push(purpose);
    stream.write_all(&first)?;
    stream.read_exact(&mut [0])?;
    Ok(stream)
}

fn client_config() -> Arc<ClientConfig> {
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map(|builder| builder.dangerous().with_custom_certificate_verifier(Arc::new(Anyone)).with_no_client_auth());
    #[allow(clippy::expect_used, reason = "constant")]
    let mut config = config.expect("the provider has the default versions");
    config.resumption = rustls::client::Resumption::disabled();
    Arc::new(config)
}

/// What a client says first, the same for each, and as long as one with a post-quantum key.
fn hello() -> io::Result<Vec<u8>> {
    static HELLO: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let mut hello = HELLO.lock().map_err(|_| io::ErrorKind::Other)?;
    if hello.is_empty() {
        let name = ServerName::try_from(NAME).map_err(io::Error::other)?;
        let mut session = ClientConnection::new(client_config(), name).map_err(io::Error::other)?;
        session.write_tls(&mut *hello)?;
    }
    Ok(hello.clone())
}

/// Answers whatever comes through a proxy.
pub(crate) struct Backend {
    pub(crate) address: SocketAddrV4,
}

impl Backend {
    pub(crate) fn start() -> Outcome<Self> {
        more_descriptors();
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let SocketAddr::V4(address) = listener.local_addr()? else { return Err("not IPv4".into()) };
        let config = server_config()?;
        let length = hello()?.len();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let config = Arc::clone(&config);
                let one = move || {
                    // What goes wrong is seen by the client.
                    let _ = answer(stream, &config, length);
                };
                // Small stacks: thousands idle at a time.
                let _ = thread::Builder::new().stack_size(128 << 10).spawn(one);
            }
        });
        Ok(Self { address })
    }
}

/// A hello with a purpose behind it is one of ours; any other begins a TLS handshake.
fn answer(mut stream: TcpStream, config: &Arc<ServerConfig>, length: usize) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let ours = hello()?;
    let mut seen = vec![0; length];
    let mut peeked = 0;
    while peeked < length {
        peeked = stream.peek(&mut seen)?;
        if seen[..peeked] != ours[..peeked] {
            let session = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
            let mut stream = StreamOwned::new(session, stream);
            stream.read_exact(&mut [0])?;
            return stream.write_all(b"!");
        }
    }
    stream.read_exact(&mut seen)?;
    let mut purpose = [0];
    stream.read_exact(&mut purpose)?;
    stream.write_all(b"!")?;
    if purpose[0] == ECHO {
        let mut frame = [0; FRAME];
        loop {
            stream.read_exact(&mut frame)?;
            stream.write_all(&frame)?;
        }
    }
    let mut all = vec![0; 256 << 10];
    while stream.read(&mut all)? > 0 {}
    Ok(())
}

fn server_config() -> Outcome<Arc<ServerConfig>> {
    let CertifiedKey { cert, signing_key } = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let key = PrivateKeyDer::try_from(signing_key.serialize_der())?;
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)?;
    Ok(Arc::new(config))
}

/// It is the proxy that is measured, and not what a certificate is worth.
#[derive(Debug)]
struct Anyone;

impl rustls::client::danger::ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        vec![rustls::SignatureScheme::ECDSA_NISTP256_SHA256]
    }
}
