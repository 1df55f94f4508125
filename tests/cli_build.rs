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
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post};
use axum::{Json, Router};
use kiln_wire::{
    ApiError, CompleteRequest, Credential, LeaseView, Origin, ProjectView, Renew, RouteRequest, RouteResponse,
    RouteStatus, Setting, SettingsView, Trashed, Why,
};

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
    /// The daemon is ready after so many polls.
    polls: Arc<Mutex<u32>>,
    /// As one that knows neither polls nor renewals.
    old: bool,
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
        let mut kilnd = Kilnd {
            journal: Journal::default(),
            failures: Arc::default(),
            with_credential: true,
            polls: Arc::default(),
            old: false,
        };
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
            .route("/v1/projects/{key}", get(|| async { Json(view()) }).delete(noted))
            .route("/v1/projects/{key}/why", get(why))
            .route("/v1/projects/{key}/settings", patch(set))
            .route("/v1/projects/{key}/stop", post(noted))
            .route("/v1/leases/{id}/renew", post(renew))
            .route("/v1/orphans", get(|| async { Json(serde_json::json!([])) }))
            .route("/v1/orphans/adopt", post(taken))
            .route("/v1/orphans/remove", post(noted))
            .route("/v1/trash", get(trash).delete(|| async { Json(serde_json::json!({"removed": 2})) }))
            .route("/v1/trash/{name}", delete(noted))
            .route("/v1/trash/{name}/restore", post(taken))
            .with_state(kilnd);
        let listener = tokio::net::UnixListener::from_std(listener).expect("a listener");
        axum::serve(listener, router).await.expect("served");
    });
    runtime
}

/// Whatever it is: written down, and done.
async fn noted(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> StatusCode {
    noted_as(&kilnd, request).await;
    StatusCode::NO_CONTENT
}

async fn noted_as(kilnd: &Kilnd, request: axum::extract::Request) {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let body = axum::body::to_bytes(request.into_body(), 8192).await.expect("a body");
    let line = format!("{method} {uri} {}", String::from_utf8_lossy(&body));
    kilnd.journal.lock().expect("whole").push(line.trim().to_owned());
}

async fn taken(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> Response {
    noted_as(&kilnd, request).await;
    Json(serde_json::json!({"key": "pbcce5b6205652dd7"})).into_response()
}

async fn set(State(kilnd): State<Kilnd>, request: axum::extract::Request) -> Response {
    noted_as(&kilnd, request).await;
    Json(view()).into_response()
}

async fn trash() -> Response {
    let one = Trashed {
        name: "p1-old".into(),
        key: Some("p1".into()),
        repo: Some("h/r\u{1b}[2J".into()),
        since: "2020-01-01T00:00:00Z".into(),
        expires: "2030-01-01T00:00:00Z".into(),
    };
    Json([one]).into_response()
}

async fn why() -> Response {
    let because = vec!["a lease is alive".to_owned()];
    Json(Why { key: "p1".into(), headline: "It is warm.".into(), because, ..Why::default() }).into_response()
}

fn view() -> ProjectView {
    let setting = |value: Option<&str>, origin| Setting { value: value.map(str::to_owned), origin };
    ProjectView {
        key: "pbcce5b6205652dd7".into(),
        phase: "warm".into(),
        settings: Some(SettingsView {
            tier: setting(Some("hot"), Origin::Project),
            idle_window: setting(Some("15m"), Origin::Default),
            volume: setting(Some("20GiB"), Origin::Rule),
            memory: setting(None, Origin::Default),
            cpus: setting(Some("4"), Origin::Project),
            processes: setting(None, Origin::Default),
        }),
        pending: vec!["cpus: 2 now".into()],
        ..ProjectView::default()
    }
}

async fn renew(
    State(kilnd): State<Kilnd>,
    axum::extract::Path(id): axum::extract::Path<String>,
    Json(request): Json<Renew>,
) -> Response {
    let token: kiln_domain::LeaseToken = request.build_id.parse().expect("a token");
    assert_eq!(token.hash().as_str(), id);
    if kilnd.old {
        return (StatusCode::NOT_FOUND, Json(ApiError { error: "nothing here".into() })).into_response();
    }
    let lease = LeaseView {
        id,
        created: "2026-11-29T00:00:00Z".into(),
        renewed: "2026-11-29T00:00:00Z".into(),
        expires: "2026-11-29T02:00:00Z".into(),
        alive_until: "2026-11-29T00:00:15Z".into(),
    };
    kilnd.note("renew".into()).unwrap_or_else(|| Json(lease).into_response())
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

async fn route(State(kilnd): State<Kilnd>, headers: HeaderMap, Json(request): Json<RouteRequest>) -> Response {
    let key = kiln_domain::Key::of(&request.spec().expect("a spec"));
    let again = if request.build_id.is_some() { " again" } else { "" };
    let line = format!("route {} {} {}{again}", request.repo, request.target, request.untrusted);
    if let Some(failure) = kilnd.note(line) {
        return failure;
    }
    let polled = headers.get("prefer").is_some_and(|value| value.as_bytes().starts_with(b"respond-async, wait="));
    let ready = {
        let mut polls = kilnd.polls.lock().expect("whole");
        let ready = *polls == 0 || !polled;
        *polls = polls.saturating_sub(1);
        ready
    };
    let credential = (ready && kilnd.with_credential).then(|| Credential {
        ca: "CA".into(),
        cert: "CERT".into(),
        key: "KEY".into(),
        expires: "2030-01-01T00:00:00Z".into(),
    });
    let token: kiln_domain::LeaseToken = "00112233aabbccdd".parse().expect("a token");
    let status = RouteStatus {
        phase: "starting".into(),
        reason: "two others start".into(),
        queue_position: Some(2),
        queue_length: Some(3),
    };
    let response = RouteResponse {
        key,
        build_id: Some("00112233aabbccdd".into()),
        endpoint: "tcp://127.0.0.1:1234".into(),
        namespace: "kiln".into(),
        ready,
        server_name: "buildkitd-x.kiln".into(),
        generation: 1,
        credential,
        lease_id: (!kilnd.old).then(|| token.hash().as_str().to_owned()),
        status: (!ready).then_some(status),
    };
    (if ready { StatusCode::OK } else { StatusCode::ACCEPTED }, Json(response)).into_response()
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

#[test]
fn a_daemon_that_takes_its_time_is_polled_for_with_one_lease() {
    let stage = Stage::with("", |kilnd| kilnd.polls = Arc::new(Mutex::new(2)));
    let output = stage.build(&["."]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output), "", "nobody looks, so nothing is said");
    let route = "route github.com/org/repo default false";
    assert_eq!(stage.asked(), [route, &format!("{route} again"), &format!("{route} again"), COMPLETE]);
}

#[test]
fn a_lease_that_ended_meanwhile_is_asked_for_anew() {
    // Without a lease in hand that is an answer to be told.
    let stage = Stage::new("");
    stage.kilnd.failures.lock().expect("whole").extend([410]);
    let output = stage.build(&["."]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("410"), "{}", stderr(&output));

    let stage = Stage::with("", |kilnd| kilnd.polls = Arc::new(Mutex::new(9)));
    let child = stage.start(&["--wait", "20s", "."]);
    until(Instant::now(), || stage.asked().iter().any(|line| line.ends_with("again")), "a poll");
    stage.kilnd.failures.lock().expect("whole").extend([410]);
    until(Instant::now(), || stage.asked().iter().filter(|line| line.ends_with("false")).count() == 2, "a route anew");
    *stage.kilnd.polls.lock().expect("whole") = 0;
    assert!(child.wait_with_output().expect("ended").status.success());
    assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE));
}

#[test]
fn a_wait_that_is_over_says_what_it_waited_for_and_gives_the_lease_back() {
    for verb in ["build", "route"] {
        let stage = Stage::with("", |kilnd| kilnd.polls = Arc::new(Mutex::new(999)));
        let output = stage.kiln(&[verb, "--wait", "3s", "."]).output().expect("run");
        assert_eq!(output.status.code(), Some(69));
        let said = stderr(&output);
        assert!(said.contains("within 3 s") && said.contains("two others start (place 2 of 3 in the queue)"), "{said}");
        assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE), "{verb}");
    }
}

#[test]
fn a_signal_while_it_waits_gives_the_lease_back() {
    for verb in ["build", "route"] {
        let stage = Stage::with("", |kilnd| kilnd.polls = Arc::new(Mutex::new(999)));
        let mut child = stage.kiln(&[verb, "."]).spawn().expect("run");
        until(Instant::now(), || stage.asked().iter().any(|line| line.ends_with("again")), "a poll");
        let sent = Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().expect("run");
        assert!(sent.success());
        assert_eq!(child.wait().expect("ended").code(), Some(128 + 15), "{verb}");
        assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE), "{verb}");
        assert_eq!(stage.called(), [] as [&str; 0]);
    }
}

#[test]
fn a_lease_is_renewed_while_buildx_runs_and_nobody_hears_of_it() {
    let script = "cd \"$(dirname \"$0\")\"; : >started; while [ ! -e go ]; do sleep 0.05; done; exit 3";
    for old in [false, true] {
        let stage = Stage::with(script, |kilnd| kilnd.old = old);
        let mut child = stage.start(&["."]);
        stage.await_file("started");
        if old {
            // Nothing is to happen, so there is nothing to wait for but the time in which it would.
            let begun = Instant::now();
            until(Instant::now(), || begun.elapsed() > Duration::from_secs(6), "time to pass");
        } else {
            stage.kilnd.failures.lock().expect("whole").extend([500]);
            let renewals = || stage.asked().iter().filter(|line| *line == "renew").count();
            until(Instant::now(), || renewals() == 1, "a renewal");
        }
        assert!(child.try_wait().expect("asked").is_none(), "a failed renewal ends no build");
        fs::write(stage.dir.path().join("go"), "").expect("written");
        let output = child.wait_with_output().expect("ended");
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(3), ""), "old: {old}");
        assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE));
        assert_eq!(stage.asked().iter().any(|line| line == "renew"), !old);
    }
}

#[test]
fn the_verbs_of_an_admin() {
    let stage = Stage::new("");
    let key = "pbcce5b6205652dd7";
    let run = |words: &[&str]| {
        let output = stage.kiln(words).output().expect("run");
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(run(&["why", key]), "p1: It is warm.\n  because  a lease is alive\n");
    let json: Why = serde_json::from_str(&run(&["why", key, "--json"])).expect("JSON");
    assert_eq!(json.headline, "It is warm.");
    let said = run(&[
        "set",
        key,
        "--tier",
        "hot",
        "--idle-window",
        "30m",
        "--volume",
        "40GiB",
        "--cpus",
        "4",
        "--reset",
        "memory",
    ]);
    assert!(said.contains("tier          hot (project)") && said.contains("volume        20GiB (rule)"), "{said}");
    assert!(said.contains("memory        unlimited (default)") && said.contains("after a roll  cpus: 2 now"), "{said}");
    assert!(run(&["rm", key]).contains("kiln trash ls"));
    assert!(run(&["stop", "--force", key]).contains("was stopped by force"));
    assert!(run(&["stop", key]).contains("is stopped"));
    assert_eq!(run(&["orphans", "--json"]), "[]\n");
    assert!(run(&["orphans"]).starts_with("KIND"));
    assert!(run(&["orphans", "adopt", "buildkitd-x", "--kind", "instance"]).contains(key));
    run(&["orphans", "rm", "volume", "p1"]);
    let table = run(&["trash"]);
    assert!(table.contains("p1-old") && table.contains("h/r\u{fffd}[2J") && table.contains("2030-01-01"), "{table}");
    assert_eq!(run(&["trash", "ls", "--json"]), run(&["trash", "--json"]));
    assert!(run(&["trash", "restore", "p1-old"]).contains(key));
    assert_eq!(run(&["trash", "rm", "p1?old"]), "p1?old is gone\n");
    assert_eq!(run(&["trash", "empty"]), "2 removed for good\n");
    for words in [&["renew", "00112233aabbccdd"][..], &["renew", key, "00112233aabbccdd"]] {
        assert!(run(words).contains("ends at       2026-11-29T02:00:00Z"), "{words:?}");
    }
    let show = run(&["show", key]);
    assert!(show.contains("idle window    15m (default)") && show.contains("after a roll   cpus: 2 now"), "{show}");
    let patch = format!(
        "PATCH /v1/projects/{key}/settings {{\"tier\":\"hot\",\"idleWindow\":\"30m\",\"volume\":\"40GiB\",\"memory\":null,\"cpus\":4}}"
    );
    assert_eq!(
        stage.asked(),
        [
            patch.as_str(),
            &format!("DELETE /v1/projects/{key}"),
            &format!("POST /v1/projects/{key}/stop?force=true"),
            &format!("POST /v1/projects/{key}/stop"),
            r#"POST /v1/orphans/adopt {"kind":"instance","name":"buildkitd-x"}"#,
            r#"POST /v1/orphans/remove {"kind":"volume","name":"p1"}"#,
            "POST /v1/trash/p1%2Dold/restore",
            "DELETE /v1/trash/p1%3Fold",
            "renew",
            "renew",
        ]
        .map(|line| line.replace("p1%2Dold", "p1-old"))
    );
    for words in [
        &["set", key][..],
        &["set", key, "--tier", "cold"],
        &["set", key, "--tier", "hot", "--reset", "tier"],
        &["set", key, "--idle-window", "soon"],
        &["set", key, "--volume", "40GB"],
        &["set", key, "--cpus", "many"],
        &["set", key, "--reset", "arch"],
        &["rm", "nonsense"],
        &["why"],
        &["renew", "nonsense"],
        &["orphans", "rm", "pod", "x"],
        &["orphans", "rm", "volume", "../x"],
        &["trash", "rm", ".."],
        &["trash", "restore", ""],
        &["events", "--key", "nonsense"],
    ] {
        let output = stage.kiln(words).output().expect("run");
        assert_eq!(output.status.code(), Some(64), "{words:?}: {}", stderr(&output));
    }
}
