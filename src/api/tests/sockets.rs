//! Listening: modes, leftovers, guards, and bounds in time.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use super::*;

#[tokio::test]
async fn a_dead_kilnds_socket_is_replaced_and_a_living_ones_is_not() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = directory.path().join("kiln.sock");
    // A socket whose owner is gone leaves its file, as kill -9 does.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("binds"));
    assert!(path.exists());
    let listener = Listener::unix(&path).expect("replaces it");
    assert_eq!(fs::metadata(&path).expect("is there").permissions().mode() & 0o777, 0o660);
    assert!(matches!(Listener::unix(&path), Err(ListenError::Held { .. })));
    UnixStream::connect(&path).await.expect("the refusal did no harm");
    drop(listener);
    assert!(!path.exists());

    fs::write(&path, "precious").expect("writes");
    assert!(matches!(Listener::unix(&path), Err(ListenError::NotASocket { .. })));
    assert_eq!(fs::read_to_string(&path).expect("is there"), "precious");
}

#[tokio::test]
async fn a_successors_socket_is_left_alone() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = directory.path().join("kiln.sock");
    let first = Listener::unix(&path).expect("listens");
    fs::remove_file(&path).expect("somebody removes it");
    let _second = Listener::unix(&path).expect("listens");
    drop(first);
    assert!(path.exists());
}

#[tokio::test]
async fn only_loopback_is_listened_on() {
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        let refused = Listener::tcp(address.parse().expect("an address")).await;
        assert!(matches!(refused, Err(ListenError::NotLoopback { .. })), "{address}");
    }
}

#[tokio::test]
async fn web_pages_are_kept_out_of_tcp() {
    let server = Server::start().await;
    let post = |headers: &str| {
        format!("POST /route HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: {}\r\n\r\n{BODY}", BODY.len())
    };
    let host = format!("Host: {}\r\n", server.tcp);
    assert_eq!(server.over_tcp(&post(&host)).await.status, 200);
    assert_eq!(server.over_tcp(&post("Host: localhost\r\n")).await.status, 200);
    for headers in ["Host: evil.example\r\n", &format!("{host}Origin: http://127.0.0.1\r\n"), &(host.clone() + &host)] {
        let answer = server.over_tcp(&post(headers)).await;
        assert_eq!(answer.status, 403, "{headers}");
        assert!(answer.is_plain());
    }
    let v1 = server.over_tcp("GET /v1/projects HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n").await;
    assert_eq!(v1.status, 403);
    v1.json::<kiln_wire::ApiError>();
    // No browser reaches the unix socket, and there Host means nothing.
    let over_unix = exchange(server.connect().await, &post("Host: kiln\r\n")).await;
    assert_eq!(over_unix.status, 200);
}

#[tokio::test]
async fn a_connection_carries_more_than_one_request() {
    let server = Server::start().await;
    let mut stream = server.connect().await;
    for _ in 0..3 {
        let keep = format!("POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{BODY}", BODY.len());
        stream.write_all(keep.as_bytes()).await.expect("sends");
        let mut seen = String::new();
        while !seen.contains("\"generation\":1}") {
            let mut part = [0; 4096];
            let read = tokio::time::timeout(PATIENCE, stream.read(&mut part)).await.expect("in time").expect("reads");
            assert!(read > 0, "closed after {seen}");
            seen.push_str(&String::from_utf8_lossy(&part[..read]));
        }
        assert!(seen.starts_with("HTTP/1.1 200"));
    }
}

/// In memory there is nothing that could be lost on the way.
impl super::super::delivery::Peer for tokio::io::DuplexStream {
    const TELLS_UNREAD: bool = false;

    fn has_reset(&self) -> bool {
        false
    }
}

/// How long the server keeps a connection on which nothing but `sent` arrives, on a clock that jumps.
async fn kept(sent: &str) -> (Duration, String) {
    let heart = Arc::new(FakeHeart::default());
    let directory = TempDir::new().expect("a temporary directory");
    let store = Store::open(&directory.path().join("kiln.db")).expect("opens");
    let callers = Arc::new(Callers::of_one_user(store.clone()));
    let router = Api::new(heart, callers, store, Arc::new(Metrics::new()), SETTINGS).router();
    let (mut client, server) = tokio::io::duplex(64 * 1024);
    let place = Room::new(Size { places: 1, reserve: 0 }).enter();
    let from = Source::Tcp(std::net::Ipv4Addr::LOCALHOST.into());
    tokio::spawn(connection::serve(server, from, router, place, CancellationToken::new()));
    client.write_all(sent.as_bytes()).await.expect("sends");
    let begin = tokio::time::Instant::now();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.expect("reads to the end");
    (begin.elapsed(), answer)
}

#[tokio::test(start_paused = true)]
async fn every_stage_has_an_end() {
    let seconds = |kept: Duration| kept.as_secs();
    let (idle, _) = kept("").await;
    assert_eq!(seconds(idle), 60, "nothing sent");
    let (head, _) = kept("POST /route HTTP/1.1\r\nHost: x\r\nX-Slow: ").await;
    assert_eq!(seconds(head), 5, "a head that does not end");
    let (body, answer) = kept("POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{").await;
    assert!((15..=75).contains(&seconds(body)), "a body that does not end: {body:?}");
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    let (between, answer) = kept("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!(seconds(between), 60, "between two requests");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// A few places, so that a test can take them all.
async fn small(heart: FakeHeart) -> Server {
    Server::with_size(heart, SETTINGS, Size { places: 4, reserve: 2 }).await
}

const HEALTH: &str = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

#[tokio::test]
async fn connections_that_keep_us_waiting_make_way_for_others_and_no_request_does() {
    let server = small(FakeHeart { route_waits: true, ..FakeHeart::default() }).await;
    let mut build = server.connect().await;
    build.write_all(request("POST", "/route", BODY).as_bytes()).await.expect("sends");
    server.heart.entered.notified().await;
    let mut silent = Vec::new();
    for sent in
        ["", "POST /route HTTP/1.1\r\nX-Slow: ", "POST /complete HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"]
    {
        for _ in 0..20 {
            let (mut over_unix, mut over_tcp) =
                (server.connect().await, TcpStream::connect(server.tcp).await.expect("connects"));
            over_unix.write_all(sent.as_bytes()).await.expect("sends");
            over_tcp.write_all(sent.as_bytes()).await.expect("sends");
            silent.push((over_unix, over_tcp));
        }
        assert_eq!(server.get("/healthz").await.status, 200, "after {sent:?}");
        assert_eq!(server.over_tcp(HEALTH).await.status, 200, "after {sent:?}");
    }
    server.heart.go.notify_one();
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, build.read_to_string(&mut answer)).await.expect("in time").expect("reads");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn where_all_places_have_requests_under_way_short_ones_are_answered_all_the_same() {
    let server = small(FakeHeart { route_waits: true, ..FakeHeart::default() }).await;
    let mut builds = Vec::new();
    for _ in 0..4 {
        let mut build = TcpStream::connect(server.tcp).await.expect("connects");
        build.write_all(request("POST", "/route", BODY).as_bytes()).await.expect("sends");
        server.heart.entered.notified().await;
        builds.push(build);
    }
    for _ in 0..8 {
        let kept = HEALTH.replace("Connection: close\r\n", "");
        let answer = server.over_tcp(&kept).await;
        assert_eq!((answer.status, answer.header("connection")), (200, Some("close")), "{answer:?}");
    }
    let answer = server.over_tcp(&request("POST", "/route", BODY)).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{answer:?}");
    assert!(answer.is_plain() && answer.body.contains("as many requests under way as it takes"), "{answer:?}");
    server.settled(1).await;
    assert_eq!(server.heart.released.load(Ordering::SeqCst), 1, "its lease went with it");
    // On the other door nobody notices.
    assert_eq!(server.post("/prewarm", BODY).await.status, 202);
    server.heart.go.notify_waiters();
    for mut build in builds {
        let mut answer = String::new();
        tokio::time::timeout(PATIENCE, build.read_to_string(&mut answer)).await.expect("in time").expect("reads");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}
