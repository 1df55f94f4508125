//! `kiln build`, the real program, against a stand-in kilnd on a unix socket and a stand-in buildx that writes down how
//! it was called. What is looked at: who is called in which order, that a routed build is released whatever happens,
//! the exit code, and that nothing stays behind.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use kiln_wire::{CompleteRequest, Credential, RouteRequest, RouteResponse};

/// Longer than anything here takes; a test that waits so long has failed.
const DEADLINE: Duration = Duration::from_secs(30);

/// What kilnd was asked and buildx was called with, in order.
type Journal = Arc<Mutex<Vec<String>>>;

#[derive(Clone)]
struct Kilnd {
    journal: Journal,
    /// The statuses of the next answers to `/route` and `/complete`; 200 and 204 when there are none left.
    failures: Arc<Mutex<Vec<u16>>>,
    with_credential: bool,
}

struct Stage {
    dir: tempfile::TempDir,
    kilnd: Kilnd,
    buildx: PathBuf,
    _server: tokio::runtime::Runtime,
}

impl Stage {
    /// `script` is what buildx does for `build`, after it has written down its arguments.
    fn new(script: &str) -> Self {
        Self::with(script, |_| {})
    }

    fn with(script: &str, change: impl FnOnce(&mut Kilnd)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("tmp")).expect("made");
        fs::create_dir(dir.path().join("context")).expect("made");
        let buildx = dir.path().join("buildx");
        let log = dir.path().join("buildx.log");
        let body = format!(
            "#!/bin/sh\n{{ printf '%s' \"$1\"; shift; printf '|%s' \"$@\"; echo; }} >>{log}\n\
             [ \"$(tail -n 1 {log} | cut -d'|' -f1)\" = create ] && {{\n\
               stat -c '%a %n' {tmp}/* {tmp}/*/*.pem | sed 's/ .*tmp/ /' >>{log}.modes; exit 0; }}\n:\n{script}\n",
            log = log.display(),
            tmp = dir.path().join("tmp").display(),
        );
        fs::write(&buildx, body).expect("written");
        fs::set_permissions(&buildx, fs::Permissions::from_mode(0o755)).expect("set");
        let mut kilnd = Kilnd { journal: Journal::default(), failures: Arc::default(), with_credential: true };
        change(&mut kilnd);
        let server = serve(&dir.path().join("kiln.sock"), kilnd.clone());
        Self { dir, kilnd, buildx, _server: server }
    }

    fn kiln(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command
            .args(arguments)
            .current_dir(self.dir.path().join("context"))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.dir.path())
            .env("TMPDIR", self.dir.path().join("tmp"))
            .env("KILN_SOCKET", self.dir.path().join("kiln.sock"))
            .env("KILN_BUILDX", &self.buildx)
            .env("KILN_REPO", "https://github.com/Org/Repo.git")
            .env("KILN_ARCH", "amd64");
        command
    }

    fn build(&self, arguments: &[&str]) -> Output {
        let words: Vec<&str> = ["build"].iter().chain(arguments).copied().collect();
        self.kiln(&words).output().expect("run")
    }

    fn start(&self, arguments: &[&str]) -> Child {
        let words: Vec<&str> = ["build"].iter().chain(arguments).copied().collect();
        self.kiln(&words).stderr(Stdio::piped()).spawn().expect("run")
    }

    fn asked(&self) -> Vec<String> {
        self.kilnd.journal.lock().expect("whole").clone()
    }

    /// One line a call, words apart by `|`.
    fn called(&self) -> Vec<String> {
        let log = fs::read_to_string(self.dir.path().join("buildx.log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    fn left_behind(&self) -> Vec<PathBuf> {
        fs::read_dir(self.dir.path().join("tmp")).expect("read").map(|entry| entry.expect("entry").path()).collect()
    }

    fn await_file(&self, name: &str) {
        let (path, start) = (self.dir.path().join(name), Instant::now());
        until(start, || path.exists(), &format!("{name} to appear"));
    }
}

fn until(start: Instant, condition: impl Fn() -> bool, what: &str) {
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

fn serve(socket: &Path, kilnd: Kilnd) -> tokio::runtime::Runtime {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let listener = UnixListener::bind(socket).expect("bound");
    listener.set_nonblocking(true).expect("set");
    runtime.spawn(async move {
        let router = Router::new()
            .route("/route", post(route))
            .route("/complete", post(complete))
            .route("/v1/events", get(endless_events))
            .route("/v1/projects", get(|| async { Json(serde_json::json!([])) }))
            .with_state(kilnd);
        let listener = tokio::net::UnixListener::from_std(listener).expect("a listener");
        axum::serve(listener, router).await.expect("served");
    });
    runtime
}

/// One event, and then nothing for ever.
async fn endless_events() -> Response {
    let event = "data: {\"id\":1,\"at\":\"t\",\"kind\":\"phase\",\"text\":\"warm\"}\n\n";
    let first = futures_util::stream::once(async move { Ok::<_, std::io::Error>(event) });
    let stream = futures_util::StreamExt::chain(first, futures_util::stream::pending());
    axum::body::Body::from_stream(stream).into_response()
}

impl Kilnd {
    fn note(&self, line: String) -> Option<Response> {
        self.journal.lock().expect("whole").push(line);
        let failure = self.failures.lock().expect("whole").pop()?;
        let status = StatusCode::from_u16(failure).expect("a status");
        Some((status, "not now").into_response())
    }
}

async fn route(State(kilnd): State<Kilnd>, Json(request): Json<RouteRequest>) -> Response {
    let key = kiln_domain::Key::of(&request.spec().expect("a spec"));
    if let Some(failure) = kilnd.note(format!("route {} {} {}", request.repo, request.target, request.untrusted)) {
        return failure;
    }
    let credential = kilnd.with_credential.then(|| Credential {
        ca: "CA".into(),
        cert: "CERT".into(),
        key: "KEY".into(),
        expires: "2030-01-01T00:00:00Z".into(),
    });
    Json(RouteResponse {
        key,
        build_id: Some("00112233aabbccdd".into()),
        endpoint: "tcp://127.0.0.1:1234".into(),
        namespace: "kiln".into(),
        ready: true,
        server_name: "buildkitd-x.kiln".into(),
        generation: 1,
        credential,
        lease_id: None,
        status: None,
    })
    .into_response()
}

async fn complete(State(kilnd): State<Kilnd>, Json(request): Json<CompleteRequest>) -> Response {
    let line = format!("complete {} {}", request.key, request.build_id.unwrap_or_default());
    kilnd.note(line).unwrap_or_else(|| StatusCode::NO_CONTENT.into_response())
}

const COMPLETE: &str = "complete pbcce5b6205652dd7 00112233aabbccdd";

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn routes_builds_and_releases_in_this_order() {
    let stage = Stage::new("echo built");
    let output = stage.build(&["--progress=plain", "-t", "a:1", "--untrusted", ".", "--push"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "built\n");
    assert_eq!(stderr(&output), "");
    assert_eq!(stage.asked(), ["route github.com/org/repo default true", COMPLETE]);
    let called = stage.called();
    assert_eq!(called.len(), 2, "{called:?}");
    let name = called[0].split('|').nth(2).expect("a name").to_owned();
    assert!(name.starts_with("kiln-pbcce5b6205652dd7-"), "{name}");
    let tmp = stage.dir.path().join("tmp");
    assert!(
        called[0].starts_with(&format!("create|--name|{name}|--driver|remote|--driver-opt|cacert={}", tmp.display()))
    );
    assert!(called[0].ends_with("|--driver-opt|servername=buildkitd-x.kiln|tcp://127.0.0.1:1234"), "{}", called[0]);
    assert_eq!(called[1], format!("build|--builder|{name}|--progress=plain|-t|a:1|.|--push"));
    assert_eq!(stage.left_behind(), [] as [PathBuf; 0]);
}

#[test]
fn the_credential_is_for_our_eyes_only() {
    let stage = Stage::new("");
    assert!(stage.build(&["."]).status.success());
    let modes = fs::read_to_string(stage.dir.path().join("buildx.log.modes")).expect("written");
    let modes: Vec<&str> = modes.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(modes, ["700", "600", "600", "600"], "the directory, then three files");
}

#[test]
fn the_target_is_buildx_s_and_the_key_s() {
    let stage = Stage::new("");
    assert!(stage.build(&["--target", "Run", "."]).status.success());
    assert_eq!(stage.asked()[0], "route github.com/org/repo run false");
    assert!(stage.called()[1].ends_with("|--target|Run|."));
}

#[test]
fn jobs_beside_each_other_have_builders_of_their_own() {
    let stage = Stage::new("");
    assert!(stage.build(&["."]).status.success() && stage.build(&["."]).status.success());
    let called = stage.called();
    assert_ne!(called[0].split('|').nth(2), called[2].split('|').nth(2));
}

#[test]
fn buildx_s_exit_code_is_ours() {
    for (script, code) in [("exit 17", 17), ("kill -KILL $$", 137)] {
        let stage = Stage::new(script);
        assert_eq!(stage.build(&["."]).status.code(), Some(code), "after {script}");
        assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE), "after {script}");
        assert_eq!(stage.left_behind(), [] as [PathBuf; 0]);
    }
}

#[test]
fn a_signal_reaches_buildx_and_the_build_is_released() {
    for (signal, word) in [("TERM", "terminated"), ("INT", "interrupted"), ("HUP", "hung up")] {
        let script = "cd \"$(dirname \"$0\")\"\ntrap 'echo interrupted >heard; exit 130' INT\ntrap 'echo terminated >heard; exit 5' TERM\n\
                      trap 'echo hung up >heard; exit 6' HUP\n: >started\nwhile :; do sleep 0.05; done";
        let stage = Stage::new(script);
        let mut child = stage.start(&["."]);
        stage.await_file("started");
        let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().expect("run");
        assert!(sent.success());
        let code = child.wait().expect("ended").code();
        let heard = fs::read_to_string(stage.dir.path().join("heard")).expect("buildx heard it");
        assert_eq!(heard.trim(), word);
        assert!(matches!(code, Some(130 | 5 | 6)), "{code:?}");
        assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE), "after SIG{signal}");
        assert_eq!(stage.asked().len(), 2, "released once");
        assert_eq!(stage.left_behind(), [] as [PathBuf; 0]);
    }
}

#[test]
fn a_cancelled_build_is_released_before_buildx_has_wound_up() {
    let stage = Stage::new(
        "cd \"$(dirname \"$0\")\"\ntrap 'while [ ! -e go ]; do sleep 0.05; done; exit 1' TERM\n: >started\nwhile :; do sleep 0.05; done",
    );
    let mut child = stage.start(&["."]);
    stage.await_file("started");
    assert!(Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().expect("run").success());
    until(Instant::now(), || stage.asked().iter().any(|line| line == COMPLETE), "the release");
    assert!(child.try_wait().expect("asked").is_none(), "buildx still winds up");
    fs::write(stage.dir.path().join("go"), "").expect("written");
    assert_eq!(child.wait().expect("ended").code(), Some(1));
}

#[test]
fn without_a_buildx_nothing_is_routed() {
    let stage = Stage::new("");
    let output = stage.kiln(&["build", "."]).env("KILN_BUILDX", "/nowhere").output().expect("run");
    assert_eq!(output.status.code(), Some(69));
    assert!(stderr(&output).contains("KILN_BUILDX"), "{}", stderr(&output));
    let output = stage.kiln(&["build", "."]).env_remove("KILN_BUILDX").env("PATH", "/nowhere").output().expect("run");
    assert_eq!(output.status.code(), Some(69));
    assert!(stderr(&output).contains("found no buildx"), "{}", stderr(&output));
    assert_eq!(stage.asked(), [] as [&str; 0]);
}

#[test]
fn what_fails_after_the_route_is_released() {
    // buildx went away between the look and the call.
    let stage = Stage::new("");
    fs::write(&stage.buildx, "#!/nowhere/sh\n").expect("written");
    let output = stage.build(&["."]);
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE));
    assert_eq!(stage.left_behind(), [] as [PathBuf; 0]);

    // `buildx create` fails: its words are shown.
    fs::write(&stage.buildx, "#!/bin/sh\necho no such driver >&2\nexit 3\n").expect("written");
    let output = stage.build(&["."]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no such driver"), "{}", stderr(&output));
    assert_eq!(stage.asked().len(), 4);

    // There is nowhere to put the credential.
    let output = stage.kiln(&["build", "."]).env("TMPDIR", "/nowhere").output().expect("run");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/nowhere"), "{}", stderr(&output));
    assert_eq!(stage.asked().len(), 6);

    // kilnd gave none.
    let bare = Stage::with("", |kilnd| kilnd.with_credential = false);
    let output = bare.build(&["."]);
    assert!(stderr(&output).contains("without a credential"), "{}", stderr(&output));
    assert_eq!(bare.asked().last().map(String::as_str), Some(COMPLETE));
}

#[test]
fn waits_out_a_kilnd_that_is_busy_or_restarts() {
    // Taken from the end: the route is refused twice, the release once.
    let stage = Stage::new("");
    stage.kilnd.failures.lock().expect("whole").extend([503, 504]);
    assert!(stage.build(&["."]).status.success());
    assert_eq!(stage.asked().iter().filter(|line| line.starts_with("route")).count(), 3);
    let stage = Stage::new("cd \"$(dirname \"$0\")\"; : >started; while [ ! -e go ]; do sleep 0.05; done");
    let child = stage.start(&["."]);
    stage.await_file("started");
    stage.kilnd.failures.lock().expect("whole").push(503);
    fs::write(stage.dir.path().join("go"), "").expect("written");
    assert!(child.wait_with_output().expect("ended").status.success());
    assert_eq!(stage.asked()[1..], [COMPLETE, COMPLETE]);
}

#[test]
fn a_refusal_is_told_and_ends_it() {
    let stage = Stage::new("");
    stage.kilnd.failures.lock().expect("whole").push(403);
    let output = stage.build(&["."]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "kiln: kilnd did not route: not now (403 Forbidden)\n");
    assert_eq!(stage.called(), [] as [&str; 0]);
}

#[test]
fn a_release_that_fails_is_told_and_changes_nothing() {
    let stage = Stage::new("cd \"$(dirname \"$0\")\"; : >started; while [ ! -e go ]; do sleep 0.05; done; exit 4");
    let child = stage.start(&["."]);
    stage.await_file("started");
    stage.kilnd.failures.lock().expect("whole").push(400);
    fs::write(stage.dir.path().join("go"), "").expect("written");
    let output = child.wait_with_output().expect("ended");
    assert_eq!(output.status.code(), Some(4));
    assert!(stderr(&output).contains("was not released"), "{}", stderr(&output));
    assert!(!stderr(&output).contains("00112233aabbccdd"), "a token on the screen");
}

#[test]
fn a_dry_run_asks_and_calls_nobody() {
    let stage = Stage::new("");
    let output = stage.build(&["--dry-run", "--build-arg", "A=b c", "."]);
    assert!(output.status.success(), "{}", stderr(&output));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("pbcce5b6205652dd7") && said.contains("--build-arg 'A=b c' ."), "{said}");
    assert!(stage.asked().is_empty() && stage.called().is_empty());
}

#[test]
fn what_the_command_line_got_wrong() {
    let stage = Stage::new("");
    for (arguments, word) in [
        (&["build", "--builder", "x", "."][..], "--builder"),
        (&["build", "--wait", "soon", "."], "--wait"),
        (&["build", "--arch", "riscv", "."], "unsupported arch"),
        (&["build", "--repo", "h/a b", "."], "repo contains"),
        (&["build", "--url", "https://h", "."], "--url"),
        (&["show", "nonsense"], "is not a key"),
        (&["nonsense"], "nonsense"),
    ] {
        let output = stage.kiln(arguments).output().expect("run");
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(word), "{arguments:?}: {}", stderr(&output));
    }
    let output = stage.kiln(&["build", "."]).env_remove("KILN_REPO").output().expect("run");
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("--repo"), "{}", stderr(&output));
    assert_eq!(stage.asked(), [] as [&str; 0]);
}

#[test]
fn without_a_kilnd_the_remedy_is_named() {
    let stage = Stage::new("");
    let output = stage.kiln(&["--socket", "/nowhere/kiln.sock", "ps"]).output().expect("run");
    assert_eq!(output.status.code(), Some(69));
    let said = stderr(&output);
    assert!(
        said.contains("not running") && said.contains("/nowhere/kiln.sock") && said.contains("systemctl start"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1);
}

#[test]
fn a_reader_that_has_had_enough_ends_it_quietly() {
    let stage = Stage::new("");
    let command = "\"$0\" events --follow 2>&1 >&3 3>&- | cat >&2; exit 0";
    let mut shell = Command::new("sh");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = shell
        .args(["-c", &format!("exec 3>&1; {command}"), env!("CARGO_BIN_EXE_kiln")])
        .env("KILN_SOCKET", stage.dir.path().join("kiln.sock"))
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .expect("run");
    assert_eq!(stderr(&output), "");
}

#[test]
fn prints_for_programs() {
    let stage = Stage::new("");
    let output = stage.kiln(&["ps", "--json"]).output().expect("run");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[]\n");
    let output = stage.kiln(&["key", "--json"]).output().expect("run");
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value["key"], "pbcce5b6205652dd7");
    let dir = stage.dir.path().join("credential");
    let output = stage.kiln(&["route", "--json", "--credential"]).arg(&dir).output().expect("run");
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value["buildId"], "00112233aabbccdd");
    assert!(value.get("credential").is_none(), "the key belongs into its file only");
    assert_eq!(fs::read_to_string(dir.join("key.pem")).expect("written"), "KEY");
    assert_eq!(fs::metadata(&dir).expect("there").permissions().mode() & 0o777, 0o700);
    assert!(stage.kiln(&["complete", "pbcce5b6205652dd7", "00112233aabbccdd"]).status().expect("run").success());
    assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE));
    let output = stage.kiln(&["completions", "bash"]).output().expect("run");
    assert!(String::from_utf8_lossy(&output.stdout).contains("_kiln"));
}
