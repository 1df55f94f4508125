//! The relay on real sockets, polled by hand: what it holds, when it waits, and that it does not spin.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::Wake;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::*;

/// How often it asked to be polled.
#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Both ends of a connection: the gateway's and the peer's.
async fn leg() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let dialled = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
    (listener.accept().await.expect("accepted").0, dialled)
}

fn live() -> Live {
    Live::new(1, "192.0.2.1:40000".parse().expect("an address"), tokio::time::Instant::now())
}

fn kept(pools: &Pools) -> (usize, usize) {
    (pools.buffers_kept(), pools.pipes_kept())
}

/// Whatever the peer sends without end, until it does not get on.
async fn fill_up(peer: &TcpStream) -> usize {
    let (mut sent, bytes) = (0, vec![7; 256 * 1024]);
    while timeout(Duration::from_millis(300), peer.writable()).await.is_ok() {
        sent += peer.try_write(&bytes).unwrap_or(0);
    }
    sent
}

#[tokio::test]
async fn an_idle_connection_holds_nothing_and_what_it_held_is_used_again() {
    let ((client, mut near), (daemon, mut far)) = (leg().await, leg().await);
    let (pools, live) = (Arc::new(Pools::default()), live());
    let mut relay = Relay::new(client, daemon, Vec::new(), Arc::clone(&pools));
    let talk = async {
        for size in [1, 100, BUFFER, BUFFER + 1, 5 * PIPE, 3] {
            let (sent, mut got) = (vec![size as u8; size], vec![0; size]);
            let (written, read) = tokio::join!(near.write_all(&sent), far.read_exact(&mut got));
            assert!(written.is_ok() && read.is_ok() && got == sent, "{size}");
        }
    };
    tokio::select! {
        _ = poll_fn(|cx| relay.poll(cx, &live)) => panic!("it ended"),
        () = talk => {}
    }
    assert!(matches!((&relay.to_daemon.held, &relay.to_client.held), (Held::Nothing, Held::Nothing)));
    assert_eq!(kept(&pools), (1, 1), "one of each was enough, and each was given back");
    drop((near, far));
    poll_fn(|cx| relay.poll(cx, &live)).await.expect("both have ended");
}

#[tokio::test]
async fn what_a_sink_does_not_take_stays_in_its_source_and_nobody_spins() {
    let ((client, near), (daemon, mut far)) = (leg().await, leg().await);
    let (pools, live) = (Arc::new(Pools::default()), live());
    let mut relay = Relay::new(client, daemon, Vec::new(), Arc::clone(&pools));
    let sent = tokio::select! {
        _ = poll_fn(|cx| relay.poll(cx, &live)) => panic!("it ended"),
        sent = fill_up(&near) => sent,
    };
    let asked = Arc::new(Wakes::default());
    let waker = asked.clone().into();
    for _ in 0..3 {
        assert!(relay.poll(&mut Context::from_waker(&waker), &live).is_pending());
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(asked.0.load(Relaxed), 0, "its source has something and its sink takes nothing: it waits");
    // The other direction goes on meanwhile.
    far.write_all(b"meanwhile").await.expect("written");
    let mut near = near;
    let mut got = [0; 9];
    tokio::select! {
        _ = poll_fn(|cx| relay.poll(cx, &live)) => panic!("it ended"),
        read = near.read_exact(&mut got) => assert_eq!((read.expect("read"), &got), (9, b"meanwhile")),
    }
    near.shutdown().await.expect("half-closed");
    let rest = async {
        let mut all = Vec::new();
        far.read_to_end(&mut all).await.expect("read to its end");
        all.len()
    };
    tokio::select! {
        _ = poll_fn(|cx| relay.poll(cx, &live)) => panic!("it ended"),
        count = rest => assert_eq!(count, sent, "what was held up arrives, and then the end"),
    }
    assert_eq!(live.state(), State::HalfClosed);
}

#[tokio::test]
async fn a_relay_that_is_dropped_gives_no_pipe_back_that_holds_a_stranger_s_bytes() {
    let ((client, near), (daemon, far)) = (leg().await, leg().await);
    let (pools, live) = (Arc::new(Pools::default()), live());
    let mut relay = Relay::new(client, daemon, Vec::new(), Arc::clone(&pools));
    tokio::select! {
        _ = poll_fn(|cx| relay.poll(cx, &live)) => panic!("it ended"),
        _ = fill_up(&near) => {}
    }
    assert!(matches!(relay.to_daemon.held, Held::InPipe(_)), "it is in the middle of bulk");
    drop(relay);
    assert_eq!((pools.pipes_kept(), pools.pipes_open()), (0, 0));
    drop(far);
}

#[tokio::test]
async fn without_a_pipe_bulk_is_copied() {
    let ((client, mut near), (daemon, mut far)) = (leg().await, leg().await);
    let (pools, live) = (Arc::new(Pools::default()), live());
    let all: Vec<_> = std::iter::from_fn(|| pools.pipe()).collect();
    assert_eq!(all.len(), PIPES);
    let mut relay = Relay::new(client, daemon, Vec::new(), Arc::clone(&pools));
    let (sent, mut got) = (vec![7; 4 << 20], vec![0; 4 << 20]);
    tokio::select! {
        _ = poll_fn(|cx| relay.poll(cx, &live)) => panic!("it ended"),
        _ = async { tokio::join!(near.write_all(&sent), far.read_exact(&mut got)) } => {}
    }
    assert!(got == sent);
}
