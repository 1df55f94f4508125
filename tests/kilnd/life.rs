//! kilnd ends in time and its daemons go on; the next kilnd takes them up.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::stage::{DEADLINE, Kilnd, Stage, real_buildkitd, until};

const REPO: &str = "example.com/o/r";

/// A connection to the project's daemon through the gateway that has had an answer from the daemon: its part of a
/// handshake that is left there.
fn relayed(stage: &Stage, name: &str) -> TcpStream {
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut stream = TcpStream::connect(stage.gateway).expect("connected");
    stream.set_read_timeout(Some(DEADLINE)).expect("set");
    let mut hello = Vec::new();
    client.write_tls(&mut hello).expect("a hello");
    stream.write_all(&hello).expect("sent");
    let mut head = [0; 5];
    stream.read_exact(&mut head).expect("the daemon's answer");
    assert_eq!(head[0], 22, "a handshake record, and not an alert: {head:?}");
    stream
}

/// A follower of the events that is being served.
fn follower(stage: &Stage) -> BufReader<UnixStream> {
    let mut stream = UnixStream::connect(stage.socket()).expect("connected");
    stream.set_read_timeout(Some(DEADLINE)).expect("set");
    write!(stream, "GET /v1/events?after=0 HTTP/1.1\r\nhost: kiln\r\n\r\n").expect("sent");
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("data:") {
        line.clear();
        assert!(reader.read_line(&mut line).expect("read") > 0, "the events ended");
    }
    reader
}

fn warm(kilnd: &Kilnd<'_>) -> (u64, String) {
    let answer = kilnd.route(REPO);
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    (answer["generation"].as_u64().expect("a number"), answer["serverName"].as_str().expect("a name").to_owned())
}

#[test]
fn sigterm_ends_it_in_time_and_no_daemon() {
    let Some(program) = real_buildkitd("the end of kilnd") else { return };
    let stage = Stage::new("");
    stage.install(&program);
    let kilnd = stage.start();
    let (generation, name) = warm(&kilnd);
    let daemons = stage.daemons();
    assert_eq!(daemons.len(), 1);
    let mut events = follower(&stage);
    let mut open = relayed(&stage, &name);
    until("the connection to be counted", || kilnd.project(REPO)["connections"] == 1);

    let begun = Instant::now();
    let (took, code) = kilnd.terminate();
    assert_eq!(code, Some(0));
    // The connections' drain time, and little beyond it.
    assert!(took < Duration::from_secs(14), "{took:?}");
    events.read_to_end(&mut Vec::new()).expect("the events end as a stream does");
    // Reset, not closed as if the daemon had finished.
    let _ = open.read_to_end(&mut Vec::new());
    assert!(begun.elapsed() < Duration::from_secs(16));
    assert_eq!(stage.daemons(), daemons, "the daemon goes on");

    let kilnd = stage.start();
    assert_eq!(warm(&kilnd).0, generation, "the same start of the same daemon");
    assert_eq!(stage.daemons(), daemons);
    assert_eq!(kilnd.project(REPO)["leases"].as_array().map(Vec::len), Some(2), "both builds count");
    drop(relayed(&stage, &name));
}

#[test]
fn without_clients_it_ends_at_once() {
    let stage = Stage::new("");
    let kilnd = stage.start();
    let _idle = TcpStream::connect(stage.api).expect("connected");
    let _events = {
        let mut stream = UnixStream::connect(stage.socket()).expect("connected");
        write!(stream, "GET /v1/events HTTP/1.1\r\nhost: kiln\r\n\r\n").expect("sent");
        stream
    };
    let (took, code) = kilnd.terminate();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(!stage.host().join("run/kiln.sock").exists(), "the socket is gone");
}

#[test]
fn sighup_ends_nothing() {
    let stage = Stage::new("");
    let kilnd = stage.start();
    kilnd.signal(Signal::HUP);
    until("a word about it", || kilnd.log().contains("SIGHUP: nothing is read again; restart"));
    kilnd.is_well();
    assert_eq!(kilnd.terminate().1, Some(0));
}

#[test]
fn a_killed_kilnd_takes_no_daemon_along_and_the_next_one_buries_none_alive() {
    let Some(program) = real_buildkitd("the death of kilnd") else { return };
    let stage = Stage::new("drain = '5s'");
    stage.install(&program);
    let kilnd = stage.start();
    let (generation, _) = warm(&kilnd);
    let daemons = stage.daemons();
    kilnd.kill();
    assert_eq!((stage.daemons(), daemons.len()), (daemons.clone(), 1));

    let kilnd = stage.start();
    until("the daemon to be adopted", || kilnd.project(REPO)["phase"] == "warm");
    assert_eq!(kilnd.project(REPO)["generation"], generation);
    assert_eq!(stage.daemons(), daemons);
    let key = kilnd.project(REPO)["key"].as_str().expect("a key").to_owned();
    let stopped = kilnd.post(&format!("/v1/projects/{key}/stop"), "");
    assert_eq!(stopped.status, 409, "a build counts on it: {stopped:?}");
}

#[test]
fn a_daemon_that_was_stopped_leaves_no_zombie() {
    let Some(program) = real_buildkitd("stopping a daemon") else { return };
    let stage = Stage::new("drain = '5s'");
    stage.install(&program);
    let kilnd = stage.start();
    let answer = kilnd.route(REPO).json();
    let (key, build) = (answer["key"].as_str().expect("a key"), answer["buildId"].as_str().expect("a token"));
    let completed = kilnd.post("/complete", &format!(r#"{{"key":"{key}","buildId":"{build}"}}"#));
    assert_eq!(completed.status, 204, "{completed:?}");
    let stopped = kilnd.post(&format!("/v1/projects/{key}/stop"), "");
    assert_eq!(stopped.status, 204, "{stopped:?}");
    assert!(stage.daemons().is_empty());
    until("the dead to be buried", || kilnd.zombies().is_empty());
    assert_eq!(kilnd.project(REPO)["phase"], "idle");
    assert_eq!(kilnd.route(REPO).status, 200);
}
