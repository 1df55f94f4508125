//! What has a bound, and who learns of it.

use super::*;

#[tokio::test]
async fn a_newcomer_takes_the_place_of_one_that_only_waits() {
    let (gateway, daemon) = Running::before_a_daemon(Limits { connections: 2, ..Limits::default() }).await;
    let first = hello(NAME);
    let mut waits = gateway.dial().await;
    until("it is in", || gateway.gateway.connections().len() == 1).await;
    let mut builds = Vec::new();
    for _ in 0..2 {
        let client = gateway.dial_and_say(&first).await;
        let (mut backend, _) = soon(daemon.accept()).await.expect("accepted");
        assert_eq!(exactly(&mut backend, first.len()).await, first);
        builds.push((client, backend));
    }
    // It has said nothing that was not read, so the alert is not overtaken by the reset.
    let _ = rest_of(&mut waits).await;
    assert_eq!(gateway.refused(Refusal::Shed), 1);
    let mut third = gateway.dial().await;
    assert_eq!(rest_of(&mut third).await.expect("an alert"), Alert::InternalError.to_bytes());
    assert_eq!(gateway.refused(Refusal::TooManyConnections), 1);
    for (mut client, mut backend) in builds {
        backend.write_all(b"goes on").await.expect("written");
        assert_eq!(exactly(&mut client, 7).await, b"goes on");
    }
    gateway.stop().await;
}

#[tokio::test]
async fn why_a_project_cannot_be_had_is_told_to_it() {
    let why = "its disk is full";
    let fake = Fake::new(Says::No(NoDoor::Unavailable(why.to_owned())));
    let gateway = Running::start(fake, Limits::default()).await;
    for name in [NAME.to_owned(), NAME.replace("pbcce5b6205652dd7", "p9f75a8e0cb6e0600")] {
        rest_of(&mut gateway.dial_and_say(&hello(&name)).await).await.expect("an alert");
    }
    assert_eq!(*gateway.fake.turned_away.lock().expect("no panic"), [why], "and nothing of one that does not exist");
    gateway.stop().await;
}

#[tokio::test]
async fn too_many_for_a_project_are_refused_and_it_is_told() {
    let fake = Fake { wakes: Some(Arc::new(Notify::new())), ..Fake::new(Says::No(NoDoor::Unknown)) };
    let gateway = Running::start(fake, Limits { parked_per_project: 1, ..Limits::default() }).await;
    let waits = gateway.dial_and_say(&hello(NAME)).await;
    until("it waits", || gateway.fake.calls.load(Ordering::SeqCst) == 1).await;
    let mut second = gateway.dial_and_say(&hello(NAME)).await;
    assert_eq!(rest_of(&mut second).await.expect("an alert"), Alert::InternalError.to_bytes());
    assert_eq!(gateway.refused(Refusal::TooManyParkedOfProject), 1);
    drop(waits);
    gateway.stop().await;
}
