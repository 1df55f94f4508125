//! Incus that is not there, is stopped, or does not want to: kilnd starts all the same, says so when it is asked for a
//! daemon, and makes nothing meanwhile.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::stage::Stage;

const REPO: &str = "example.com/o/r";

/// With a database from better days: a new one takes no project before Incus was seen.
fn stage() -> (Stage, PathBuf) {
    let mut stage = Stage::with_script("exit 1", "");
    let (_, code) = stage.start().terminate();
    assert_eq!(code, Some(0));
    let socket = stage.dir.path().join("incus.socket");
    stage.more = format!(
        "[runtime.incus]\nsocket = '{}'\ntable = 'kiln-test-{net}'\n[runtime]\nkind = 'incus'\naddresses = '10.91.{net}.0/24'\n",
        socket.display(),
        net = stage.net
    );
    (stage, socket)
}

/// Starts, refuses a route with these words, and is well. What is on disk stays as it was, the database excepted.
#[track_caller]
fn refuses(stage: &Stage, status: u16, words: &[&str], within: Duration) {
    let kilnd = stage.start();
    let listing = || {
        let mut all = stage.listing();
        all.retain(|path, _| !path.display().to_string().contains("kiln.db"));
        all
    };
    let before = listing();
    let start = Instant::now();
    let answer = kilnd.route(REPO);
    assert!(start.elapsed() < within, "{:?}", start.elapsed());
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.head.contains("retry-after"), status == 503, "{answer:?}");
    for word in words {
        assert!(answer.body.contains(word), "no {word:?} in {answer:?}");
    }
    assert_eq!(kilnd.project(REPO)["phase"], "failed");
    assert!(listing() == before, "something was made");
    kilnd.is_well();
    let table = Command::new("nft").args(["list", "table", "inet", &format!("kiln-test-{}", stage.net)]).output();
    assert!(table.is_ok_and(|listed| !listed.status.success()) || !Path::new("/usr/sbin/nft").exists());
    let (took, code) = kilnd.terminate();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// Answers every connection in its own way, for as long as the test runs.
fn stand_in(socket: &Path, answer: impl Fn(&mut UnixStream) + Send + 'static) {
    let listener = UnixListener::bind(socket).expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
                head.push(byte[0]);
            }
            answer(&mut stream);
        }
    });
}

fn says(status: &'static str, kind: &'static str, body: &'static str) -> impl Fn(&mut UnixStream) + Send + 'static {
    move |stream| {
        let length = body.len();
        let head = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
        // The other side may have gone already.
        let _ = stream.write_all(format!("{head}{body}").as_bytes());
    }
}

/// A look at the host has 20 s.
const A_LOOK: Duration = Duration::from_secs(25);

const QUICK: Duration = Duration::from_secs(5);

#[test]
fn absent() {
    let (stage, socket) = stage();
    refuses(&stage, 503, &["incus is not available", &socket.display().to_string(), "systemctl status incus"], QUICK);
}

#[test]
fn stopped() {
    let (stage, socket) = stage();
    drop(UnixListener::bind(&socket).expect("bound"));
    refuses(&stage, 503, &["incus is not available", "Connection refused", "systemctl status incus"], QUICK);
}

#[test]
fn a_user_that_it_does_not_trust() {
    let (stage, socket) = stage();
    let body = r#"{"type":"sync","status_code":200,"metadata":{"api_extensions":[],"auth":"untrusted"}}"#;
    stand_in(&socket, says("200 OK", "application/json", body));
    refuses(&stage, 503, &["does not trust this user", "incus-admin"], QUICK);
}

#[test]
fn one_that_is_too_old() {
    let (stage, socket) = stage();
    let body = r#"{"type":"sync","status_code":200,"metadata":{"api_extensions":["projects"],"auth":"trusted"}}"#;
    stand_in(&socket, says("200 OK", "application/json", body));
    refuses(&stage, 503, &["lacks the API extension", "Incus 6.0 or newer"], QUICK);
}

#[test]
fn forbidden() {
    let (stage, socket) = stage();
    let body = r#"{"type":"error","error_code":403,"error":"not authorized"}"#;
    stand_in(&socket, says("403 Forbidden", "application/json", body));
    refuses(&stage, 503, &["incus is not available", "not authorized", "403", "incus-admin"], QUICK);
}

#[test]
fn failing() {
    let (stage, socket) = stage();
    let body = r#"{"type":"error","error_code":500,"error":"database is locked"}"#;
    stand_in(&socket, says("500 Internal Server Error", "application/json", body));
    refuses(&stage, 503, &["incus is not available", "database is locked", "journalctl -u incus"], QUICK);
}

#[test]
fn something_else_on_its_socket() {
    let (stage, socket) = stage();
    stand_in(&socket, says("502 Bad Gateway", "text/html", "<html><h1>Bad gateway</h1></html>"));
    refuses(&stage, 503, &["Incus 6.0 or newer that listens there"], QUICK);
}

#[test]
fn no_http_at_all() {
    let (stage, socket) = stage();
    stand_in(&socket, |stream| {
        let _ = stream.write_all(b"\x00\x01\x02 hello\r\n\r\n");
    });
    refuses(&stage, 503, &["incus is not available", "systemctl status incus"], QUICK);
}

#[test]
fn one_that_breaks_off_in_the_middle_of_an_answer() {
    let (stage, socket) = stage();
    stand_in(&socket, |stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"type\":\"sync\"");
    });
    refuses(&stage, 503, &["incus is not available", "systemctl status incus"], QUICK);
}

#[test]
fn one_that_never_answers() {
    let (stage, socket) = stage();
    stand_in(&socket, |stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    refuses(&stage, 503, &["incus is not available", "timed out", "systemctl status incus"], A_LOOK);
}

#[test]
fn a_new_database_takes_no_project_before_the_instances_were_seen() {
    let (stage, _) = stage();
    std::fs::remove_dir_all(stage.state()).expect("removed");
    let kilnd = stage.start();
    let answer = kilnd.route(REPO);
    assert_eq!((answer.status, answer.head.contains("retry-after")), (503, true), "{answer:?}");
    for word in ["the database is new", "incus is not available", "systemctl status incus"] {
        assert!(answer.body.contains(word), "no {word:?} in {answer:?}");
    }
    assert_eq!(kilnd.get("/v1/projects").json(), serde_json::json!([]));
    kilnd.is_well();
}
