//! Who may do what, from outside: tokens over TCP, users of the host on the socket, and what of it is left lying about.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::{Command, Output};

use super::stage::{DEADLINE, Kilnd, Stage, is_root, until};

/// The status of a request over TCP.
fn over_tcp(to: SocketAddr, method: &str, path: &str, token: Option<&str>, body: &str) -> u16 {
    let mut stream = TcpStream::connect(to).expect("connected");
    stream.set_read_timeout(Some(DEADLINE)).expect("set");
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: {to}\r\nconnection: close\r\n{token}content-length: {length}\r\n");
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no answer: {answer:?}"))
}

fn kiln(stage: &Stage, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.args(arguments).env_remove("KILN_URL").env_remove("KILN_TOKEN").env("KILN_SOCKET", stage.socket());
    command.output().expect("run")
}

fn token(stage: &Stage, arguments: &[&str]) -> String {
    let made = kiln(stage, &[&["token", "create", "--name", "of a test", "--expires", "1h"], arguments].concat());
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).expect("text").trim().to_owned()
}

fn prewarm(repo: &str) -> String {
    format!(r#"{{"repo":"{repo}","arch":"amd64"}}"#)
}

#[test]
fn a_token_counts_over_tcp_and_after_a_kill_and_until_it_is_revoked() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    let (own, other) = (prewarm("example.com/own/a"), prewarm("example.com/other/a"));
    let ask = |token: Option<&str>, body: &str| over_tcp(stage.api, "POST", "/prewarm", token, body);
    assert_eq!(ask(None, &other), 202, "nothing else proves who asks yet");
    let token = token(&stage, &["--project", "example.com/own/*"]);
    kilnd.kill();
    let kilnd = stage.start();
    for (shown, body, status) in [
        (Some(token.as_str()), &own, 202),
        (Some(&token), &other, 403),
        (None, &own, 401),
        (Some("kiln_"), &own, 401),
        (Some("junk"), &own, 401),
    ] {
        assert_eq!(ask(shown, body), status, "{shown:?} {body}");
    }
    let list = kilnd.get("/v1/tokens").json();
    let id = list[0]["id"].as_str().expect("an id");
    assert!(list[0]["lastUsed"].is_string(), "{list}");
    assert!(kiln(&stage, &["token", "revoke", id]).status.success());
    assert_eq!(ask(Some(&token), &own), 401);
    kilnd.kill();
    let kilnd = stage.start();
    assert_eq!(ask(Some(&token), &own), 401, "also after a restart");
    leaves_no_secret(&stage, &kilnd, &token);
}

/// In no file and no line that kilnd wrote.
#[track_caller]
fn leaves_no_secret(stage: &Stage, kilnd: &Kilnd<'_>, token: &str) {
    let secret = token.rsplit('_').next().expect("a secret");
    assert_eq!(secret.len(), 64);
    let events = kilnd.get("/v1/events?after=0&follow=false").body;
    assert!(events.contains("was revoked"), "the journal was read: {events}");
    assert!(!events.contains(secret) && !kilnd.log().contains(secret));
    for (path, (_, _, content)) in stage.listing() {
        assert!(!content.windows(secret.len()).any(|piece| piece == secret.as_bytes()), "{}", path.display());
    }
    let mode = std::fs::metadata(stage.database()).expect("there").mode();
    assert_eq!(mode & 0o077, 0, "nobody else reads the hashes");
}

#[test]
fn a_user_of_the_host_may_do_what_the_lists_say() {
    if !is_root("users of the host at the socket") {
        return;
    }
    let lists =
        "[local]\noperators = ['65533']\n[[local.builders]]\nwho = ['65532']\nrepositories = ['example.com/own/*']\n";
    let stage = Stage::with_script("exit 1", lists);
    let kilnd = stage.start();
    for directory in [stage.host(), stage.host().join("run")] {
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755)).expect("set");
    }
    std::fs::set_permissions(stage.host().parent().expect("a stage"), std::fs::Permissions::from_mode(0o755))
        .expect("set");
    std::fs::set_permissions(stage.socket(), std::fs::Permissions::from_mode(0o666)).expect("set");
    let (own, other) = (prewarm("example.com/own/a"), prewarm("example.com/other/a"));
    // setpriv, and not a shell as the user: these numbers have no name.
    let ask = |uid: &str, arguments: &[&str]| {
        let output = Command::new("setpriv")
            .args(["--reuid", uid, "--regid", uid, "--clear-groups", "curl", "--silent", "--unix-socket"])
            .arg(stage.socket())
            .args(["--max-time", "30", "--output", "/dev/null", "--write-out", "%{http_code}"])
            .args(arguments)
            .output()
            .expect("setpriv and curl");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let prewarm = |uid, body: &str| ask(uid, &["--data", body, "http://kiln/prewarm"]);
    for (uid, of_own, of_other, caches, tokens) in [
        ("65532", "202", "403", "403", "403"),
        ("65533", "202", "202", "200", "403"),
        ("65534", "401", "401", "401", "401"),
    ] {
        assert_eq!((prewarm(uid, &own), prewarm(uid, &other)), (of_own.to_owned(), of_other.to_owned()), "{uid}");
        assert_eq!(ask(uid, &["http://kiln/v1/caches"]), caches, "{uid}");
        assert_eq!(ask(uid, &["http://kiln/v1/tokens"]), tokens, "{uid}");
    }
    assert_eq!(kilnd.get("/v1/tokens").status, 200, "whoever runs kilnd");
}

#[test]
fn what_the_gateway_has_open_is_shown() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    assert_eq!(kilnd.get("/v1/connections").body, "[]");
    let silent = TcpStream::connect(stage.gateway).expect("connected");
    let from = silent.local_addr().expect("an address").to_string();
    until("the connection to be shown", || {
        let open = kilnd.get("/v1/connections").json();
        open[0]["from"] == from.as_str() && open[0]["state"] == "hello"
    });
    let shown = kiln(&stage, &["gateway"]);
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.status.success() && text.contains(&from) && text.contains("TO DAEMON"), "{text}");
    drop(silent);
    until("it to be gone", || kilnd.get("/v1/connections").body == "[]");
}
