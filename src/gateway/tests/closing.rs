//! What is open as others see it, and how a name is closed.

use super::*;

#[tokio::test]
async fn a_name_that_is_closed_is_reset_and_refused_until_it_is_opened() {
    let (gateway, daemon) = Running::before_a_daemon(Limits::default()).await;
    let (first, key) = (hello(NAME), KEY.parse::<Key>().expect("a key"));
    let mut client = gateway.dial_and_say(&first).await;
    let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
    assert_eq!(exactly(&mut backend, first.len()).await, first);
    assert_eq!(gateway.gateway.close(&key), 1);
    for stream in [&mut client, &mut backend] {
        let error = rest_of(stream).await.expect_err("a reset, not an end");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
    let mut refused = gateway.dial_and_say(&first).await;
    assert_eq!(rest_of(&mut refused).await.expect("an alert"), Alert::UnrecognizedName.to_bytes());
    assert_eq!(gateway.refused(Refusal::NameClosed), 1);
    assert!(gateway.gateway.open(&key));
    let client = gateway.dial_and_say(&first).await;
    let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
    assert_eq!(exactly(&mut backend, first.len()).await, first);
    drop((client, backend));
    gateway.stop().await;
}

#[tokio::test]
async fn a_name_that_is_closed_lets_nobody_wait_for_its_daemon() {
    let fake = Fake { wakes: Some(Arc::new(Notify::new())), ..Fake::new(Says::No(NoDoor::Unknown)) };
    let gateway = Running::start(fake, Limits::default()).await;
    let mut waits = gateway.dial_and_say(&hello(NAME)).await;
    until("it waits", || gateway.fake.calls.load(Ordering::SeqCst) == 1).await;
    assert_eq!(gateway.gateway.close(&KEY.parse().expect("a key")), 1);
    let _ = rest_of(&mut waits).await;
    assert_eq!((gateway.refused(Refusal::NameClosed), gateway.fake.ended.load(Ordering::SeqCst)), (1, 1));
    gateway.stop().await;
}

#[tokio::test]
async fn what_is_open_is_shown_with_what_it_does() {
    let daemon = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let wakes = Arc::new(Notify::new());
    let fake = Fake { wakes: Some(Arc::clone(&wakes)), ..Fake::new(Says::At(v4(&daemon))) };
    let gateway = Running::start(fake, Limits::default()).await;
    let (first, key) = (hello(NAME), KEY.parse::<Key>().expect("a key"));
    let one = || gateway.gateway.connections().into_iter().next().expect("one is open");
    let in_state = |state| {
        let gateway = &gateway.gateway;
        move || gateway.connections().iter().any(|one| one.state == state)
    };
    let mut client = gateway.dial().await;
    until("it is in", in_state(State::Hello)).await;
    assert_eq!((one().key, one().from), (None, client.local_addr().expect("bound")));
    client.write_all(&first).await.expect("written");
    until("it waits", in_state(State::Parked)).await;
    assert_eq!((one().key, one().to_daemon), (Some(key.clone()), 0));
    wakes.notify_one();
    let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
    backend.write_all(b"answer").await.expect("written");
    assert_eq!(exactly(&mut client, 6).await, b"answer");
    until("it relays", in_state(State::Relaying)).await;
    until("bytes are counted", || one().to_client == 6).await;
    assert_eq!((one().key, one().to_daemon), (Some(key), first.len() as u64));
    client.shutdown().await.expect("half-closed");
    until("one side has finished", in_state(State::HalfClosed)).await;
    assert_eq!(rest_of(&mut backend).await.expect("an end"), first);
    drop(backend);
    until("it ends", || gateway.gateway.connections().is_empty()).await;
    gateway.stop().await;
}
