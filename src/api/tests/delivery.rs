//! Clients that hang up at every moment there is. A lease that nobody learnt of is released; one that somebody may have
//! learnt of stays.

use super::*;

/// Hang-ups per moment.
const MANY: usize = 60;

/// Where an answer is large.
const FEW: usize = 6;

async fn ask(stream: &mut (impl AsyncWrite + Unpin), close: bool) {
    let request = request("POST", "/route", BODY);
    let request = if close { request } else { request.replacen("Connection: close\r\n", "", 1) };
    stream.write_all(request.as_bytes()).await.expect("sends");
}

/// So many more that were released, and so many that were delivered.
async fn outcome_of(server: &Server, before: (usize, usize)) -> (usize, usize) {
    server.settled(before.0 + before.1 + MANY).await;
    let now = counts(server);
    (now.0 - before.0, now.1 - before.1)
}

fn counts(server: &Server) -> (usize, usize) {
    (server.heart.released.load(Ordering::SeqCst), server.heart.delivered.load(Ordering::SeqCst))
}

#[tokio::test]
async fn gone_before_the_answer() {
    let server = Server::with(FakeHeart { route_waits: true, ..FakeHeart::default() }).await;
    for over_tcp in [false, true] {
        let before = counts(&server);
        for _ in 0..MANY {
            if over_tcp {
                let mut stream = TcpStream::connect(server.tcp).await.expect("connects");
                ask(&mut stream, true).await;
                server.heart.entered.notified().await;
            } else {
                let mut stream = server.connect().await;
                ask(&mut stream, true).await;
                server.heart.entered.notified().await;
            }
            // Whether the close or the answer comes first is a race, and either is right.
            server.heart.go.notify_one();
        }
        assert_eq!(outcome_of(&server, before).await, (MANY, 0), "over TCP: {over_tcp}");
    }
}

#[tokio::test]
async fn gone_with_the_answer_unread() {
    let server = Server::start().await;
    for close in [true, false] {
        let before = counts(&server);
        let sent = server.metrics.text(crate::metrics::Format::Prometheus).expect("text");
        assert!(sent.contains(&format!("kiln_answers_lost_total {}\n", before.0)), "{sent}");
        for _ in 0..MANY {
            let mut stream = server.connect().await;
            ask(&mut stream, close).await;
            // The answer is there, and nobody reads it.
            stream.readable().await.expect("is answered");
        }
        assert_eq!(outcome_of(&server, before).await, (MANY, 0), "Connection: close {close}");
    }
}

#[tokio::test]
async fn gone_in_the_middle_of_the_answer() {
    // More than a socket's buffers hold, so the server is still writing.
    let server = Server::with(FakeHeart { padding: 8 << 20, ..FakeHeart::default() }).await;
    for number in 0..FEW {
        if number % 2 == 0 {
            let mut stream = server.connect().await;
            ask(&mut stream, true).await;
            stream.read_exact(&mut [0; 1000]).await.expect("is answered");
        } else {
            let mut stream = TcpStream::connect(server.tcp).await.expect("connects");
            ask(&mut stream, true).await;
            stream.read_exact(&mut [0; 1000]).await.expect("is answered");
        }
    }
    server.settled(FEW).await;
    assert_eq!(counts(&server), (FEW, 0));
}

#[tokio::test]
async fn gone_after_having_read_the_answer() {
    let server = Server::start().await;
    for (over_tcp, close) in [(false, true), (false, false), (true, true), (true, false)] {
        let before = counts(&server);
        for _ in 0..MANY {
            if over_tcp {
                let mut stream = TcpStream::connect(server.tcp).await.expect("connects");
                ask(&mut stream, close).await;
                read_answer(&mut stream).await;
            } else {
                let mut stream = server.connect().await;
                ask(&mut stream, close).await;
                read_answer(&mut stream).await;
            }
        }
        assert_eq!(outcome_of(&server, before).await, (0, MANY), "over TCP: {over_tcp}, Connection: close {close}");
    }
}

/// Exactly the answer, to its last byte.
async fn read_answer(stream: &mut (impl AsyncRead + Unpin)) {
    let mut seen = Vec::new();
    while !seen.ends_with(b"\"generation\":1}") {
        let mut part = [0; 512];
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut part)).await.expect("in time").expect("reads");
        assert!(read > 0, "closed after {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&part[..read]);
    }
}

#[tokio::test]
async fn a_client_that_stays_has_its_lease_with_the_next_request() {
    let server = Server::start().await;
    let mut stream = server.connect().await;
    for _ in 0..3 {
        ask(&mut stream, false).await;
        read_answer(&mut stream).await;
    }
    server.settled(2).await;
    assert_eq!(counts(&server), (0, 2), "of the third nothing has been heard");
    drop(stream);
    server.settled(3).await;
    assert_eq!(counts(&server), (0, 3));
}

#[tokio::test]
async fn requests_sent_ahead_of_their_answers_are_delivered() {
    let server = Server::start().await;
    let mut stream = server.connect().await;
    let one = request("POST", "/route", BODY).replacen("Connection: close\r\n", "", 1);
    stream.write_all(one.repeat(5).as_bytes()).await.expect("sends");
    for _ in 0..5 {
        read_answer(&mut stream).await;
        // The answers may come in one piece, and the last of them ends it.
        if server.heart.routes.lock().expect("no panic").len() == 5 {
            break;
        }
    }
    server.settled(4).await;
    drop(stream);
    server.settled(5).await;
    assert_eq!(counts(&server).0 + counts(&server).1, 5);
}

#[tokio::test]
async fn a_reader_that_takes_its_time_keeps_its_lease() {
    let server = Server::start().await;
    let mut stream = server.connect().await;
    ask(&mut stream, true).await;
    server.settled(1).await;
    assert_eq!(counts(&server), (0, 1), "in doubt it is delivered");
    read_answer(&mut stream).await;
}
