//! Clients that come through a load balancer.

use super::*;

/// Version 1, for a client with an address of its own.
const SPEAKS_FOR: &[u8] = b"PROXY TCP4 192.0.2.7 198.51.100.1 40000 1234\r\n";

#[tokio::test]
async fn a_load_balancer_says_whom_it_speaks_for() {
    let (gateway, daemon) = Running::before_a_daemon_behind("127.0.0.0/8", Limits::default()).await;
    let first = hello(NAME);
    let v2 =
        [&b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c"[..], &[192, 0, 2, 7, 198, 51, 100, 1, 0x9c, 0x40, 4, 0xd2]].concat();
    for header in [SPEAKS_FOR, &v2] {
        // Cut within the header, and with the hello in the same segment.
        let mut client = gateway.dial_and_say(&header[..20]).await;
        client.write_all(&[&header[20..], &first[..9]].concat()).await.expect("written");
        client.write_all(&first[9..]).await.expect("written");
        let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
        assert_eq!(exactly(&mut backend, first.len()).await, first, "the header is not for the daemon");
        let shown = gateway.gateway.connections();
        assert_eq!((shown.len(), shown[0].from), (1, "192.0.2.7:40000".parse().expect("an address")));
        drop((client, backend));
        until("it ends", || gateway.gateway.connections().is_empty()).await;
    }
    for bytes in [&first[..], b"PROXY TCP4 192.0.2.7\r\n", b"GET / HTTP/1.1\r\n"] {
        let mut client = gateway.dial_and_say(bytes).await;
        assert_eq!(rest_of(&mut client).await.expect("an alert"), Alert::UnexpectedMessage.to_bytes());
    }
    assert_eq!(gateway.refused(Refusal::BadProxyHeader), 3);
    gateway.stop().await;
}

#[tokio::test]
async fn nobody_else_may_say_whom_it_speaks_for() {
    let (gateway, _daemon) = Running::before_a_daemon_behind("192.0.2.0/24", Limits::default()).await;
    let bytes = [SPEAKS_FOR, &hello(NAME)].concat();
    let mut client = gateway.dial_and_say(&bytes).await;
    assert_eq!(rest_of(&mut client).await.expect("an alert"), Alert::UnexpectedMessage.to_bytes());
    assert_eq!(gateway.refused(Refusal::NotTls), 1);
    gateway.stop().await;
}

#[tokio::test]
async fn clients_of_a_load_balancer_are_limited_one_by_one() {
    let limits = Limits { half_open_per_source: 1, ..Limits::default() };
    let (gateway, _daemon) = Running::before_a_daemon_behind("127.0.0.1", limits).await;
    let first = gateway.dial_and_say(SPEAKS_FOR).await;
    until("it is known", || gateway.gateway.connections().iter().any(|one| one.from.port() == 40_000)).await;
    let mut second = gateway.dial_and_say(SPEAKS_FOR).await;
    assert_eq!(rest_of(&mut second).await.expect("an alert"), Alert::InternalError.to_bytes());
    assert_eq!(gateway.refused(Refusal::TooManyFromSource), 1);
    drop(first);
    gateway.stop().await;
}
