//! What comes to a gateway's port besides TLS: each gets its alert or is closed, in time, and the others go on.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::stage::{Kilnd, Stage};

const UNEXPECTED_MESSAGE: u8 = 10;
const DECODE_ERROR: u8 = 50;
const INTERNAL_ERROR: u8 = 80;
const UNRECOGNIZED_NAME: u8 = 112;

/// Longer than the gateway gives a hello.
const PATIENCE: Duration = Duration::from_secs(15);

/// Well-formed, and nobody's.
const UNKNOWN: &[u8] = b"buildkitd-p0000000000000000.kiln.internal";

fn connect(gateway: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&gateway, PATIENCE).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream.set_nodelay(true).expect("set");
    stream
}

/// A fatal alert, in the clear, and then the end.
#[track_caller]
fn alert_of(stream: &mut TcpStream) -> u8 {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("closed in time");
    assert_eq!(bytes.len(), 7, "{bytes:?}");
    assert_eq!(bytes[..6], [21, 3, 3, 0, 2, 2], "{bytes:?}");
    bytes[6]
}

#[track_caller]
fn answer_to(gateway: SocketAddr, bytes: &[u8]) -> u8 {
    let mut stream = connect(gateway);
    stream.write_all(bytes).expect("sent");
    alert_of(&mut stream)
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &length(body.len()), body].concat()
}

fn length(count: usize) -> [u8; 2] {
    u16::try_from(count).expect("fits").to_be_bytes()
}

/// A ClientHello in one record that asks for `name`, whatever is in it.
fn hello(name: &[u8]) -> Vec<u8> {
    let entry = [&[0][..], &length(name.len()), name].concat();
    let names = extension(0, &[&length(entry.len())[..], &entry].concat());
    // ecdsa_secp256r1_sha256
    let extensions = [names, extension(13, &[0, 2, 4, 3])].concat();
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend(length(extensions.len()));
    body.extend(extensions);
    let message = [&[1, 0][..], &length(body.len()), &body].concat();
    [&[22, 3, 1][..], &length(message.len()), &message].concat()
}

/// A hello that is in order still gets the answer that it should.
#[track_caller]
fn goes_on(stage: &Stage, kilnd: &Kilnd<'_>) {
    assert_eq!(answer_to(stage.gateway, &hello(UNKNOWN)), UNRECOGNIZED_NAME);
    kilnd.is_well();
}

#[test]
fn what_is_not_tls_is_told_so() {
    let stage = Stage::new("");
    let kilnd = stage.start();
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: builds.example.com\r\n\r\n"[..],
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\0\0\0\0\0\0\0",
        // An alert and application data, in well-formed records.
        &[21, 3, 3, 0, 2, 2, 40],
        &[23, 3, 3, 0, 1, 0],
    ] {
        assert_eq!(answer_to(stage.gateway, bytes), UNEXPECTED_MESSAGE, "of {bytes:?}");
        goes_on(&stage, &kilnd);
    }
}

#[test]
fn one_that_says_nothing_and_leaves_costs_nothing() {
    let stage = Stage::new("");
    let kilnd = stage.start();
    for _ in 0..200 {
        drop(connect(stage.gateway));
    }
    let mut half_closed = connect(stage.gateway);
    half_closed.shutdown(Shutdown::Write).expect("shut");
    assert_eq!(alert_of(&mut half_closed), DECODE_ERROR);
    goes_on(&stage, &kilnd);
}

#[test]
fn names_that_are_none_are_refused() {
    let stage = Stage::new("");
    let kilnd = stage.start();
    let long = format!("buildkitd-p0000000000000000.{}kiln.internal", "a.".repeat(130));
    assert!(long.len() > 300);
    for (name, alert) in [
        (&b"127.0.0.1"[..], UNRECOGNIZED_NAME),
        (b"::1", UNRECOGNIZED_NAME),
        (b"", DECODE_ERROR),
        (b"buildkitd-p0000000000000000.kiln.internal\0.evil.example", DECODE_ERROR),
        (b"\0", DECODE_ERROR),
        ("buildkitd-pä000000000000000.kiln.internal".as_bytes(), DECODE_ERROR),
        (b"\xff\xfe", DECODE_ERROR),
        (long.as_bytes(), DECODE_ERROR),
        (b"kiln.internal", UNRECOGNIZED_NAME),
        (b"buildkitd-p0000000000000000.kiln.internal.evil.example", UNRECOGNIZED_NAME),
    ] {
        let shown = String::from_utf8_lossy(name).into_owned();
        let got = answer_to(stage.gateway, &hello(name));
        assert_eq!(got, alert, "of {shown:?}");
        goes_on(&stage, &kilnd);
    }
}

#[test]
fn a_hello_in_single_bytes_is_read() {
    let stage = Stage::new("");
    let kilnd = stage.start();
    let mut stream = connect(stage.gateway);
    for byte in hello(UNKNOWN) {
        // No waiting for an answer and no Nagle: a segment each, as far as the kernel goes along.
        stream.write_all(&[byte]).expect("sent");
    }
    assert_eq!(alert_of(&mut stream), UNRECOGNIZED_NAME);
    goes_on(&stage, &kilnd);
}

#[test]
fn one_that_never_finishes_is_cut_and_others_do_not_wait_for_it() {
    let stage = Stage::new("");
    let kilnd = stage.start();
    let whole = hello(UNKNOWN);
    let start = Instant::now();
    let mut silent = connect(stage.gateway);
    let mut slow = connect(stage.gateway);
    slow.write_all(&whole[..whole.len() / 2]).expect("sent");
    goes_on(&stage, &kilnd);
    assert!(start.elapsed() < Duration::from_secs(4), "others waited");
    // A byte now and then does not buy time.
    let mut dripping = connect(stage.gateway);
    let mut bytes = whole.iter();
    let refused = loop {
        std::thread::park_timeout(Duration::from_millis(200));
        let sent = bytes.next().map_or(Ok(()), |byte| dripping.write_all(&[*byte]));
        let mut probe = [0];
        dripping.set_nonblocking(true).expect("set");
        let seen = dripping.peek(&mut probe);
        dripping.set_nonblocking(false).expect("set");
        match (sent, seen) {
            (Ok(()), Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => break start.elapsed(),
        }
        assert!(start.elapsed() < PATIENCE, "it is still read");
    };
    assert!((4..8).contains(&refused.as_secs()), "{refused:?}");
    for stream in [&mut silent, &mut slow] {
        assert_eq!(alert_of(stream), INTERNAL_ERROR);
    }
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    goes_on(&stage, &kilnd);
}
