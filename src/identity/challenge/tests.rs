//! A stand-in of GitHub's API, with answers of the shapes that it gives, as far as they are read, and some that are not.

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::book::{BETWEEN_LOOKS, CHALLENGE_LIFE, MOST_LOOKS, MOST_OF_ONE, TOKEN_LIFE};
use super::*;
use crate::config::identity::ForgeKind;

const NOW: i64 = 1_900_000_000;
const RUN: u64 = 30_433_642;
const CREDENTIALS: &str = "github_pat_0123456789";

struct Still(AtomicI64);

impl Clock for Still {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::SeqCst))
    }
}

/// Never the same twice.
#[derive(Default)]
struct Counting(AtomicU64);

impl Entropy for Counting {
    fn token(&self) -> Result<[u8; 8], NoEntropy> {
        Ok(self.0.fetch_add(1, Ordering::SeqCst).to_be_bytes())
    }
}

#[derive(Default)]
struct Api {
    answers: Mutex<HashMap<String, (u16, String)>>,
    asked: Mutex<Vec<(String, HeaderMap)>>,
}

struct Stand {
    api: Arc<Api>,
    address: String,
    clock: Arc<Still>,
    challenges: Challenges,
    _files: tempfile::TempDir,
    _task: AbortOnDropHandle<()>,
}

async fn answer(State(api): State<Arc<Api>>, request: Request) -> Response {
    let path = request.uri().path_and_query().expect("a path").to_string();
    api.asked.lock().expect("sound").push((path.clone(), request.headers().clone()));
    match api.answers.lock().expect("sound").get(&path) {
        Some((302, there)) => (StatusCode::FOUND, [("location", there.clone())]).into_response(),
        Some((status, body)) => (StatusCode::from_u16(*status).expect("a status"), body.clone()).into_response(),
        None => (StatusCode::NOT_FOUND, json!({"message": "Not Found", "status": "404"}).to_string()).into_response(),
    }
}

fn run() -> Value {
    json!({
        "id": RUN, "name": "Build", "node_id": "MDEyOldvcmtmbG93IFJ1bjI2OTI4OQ==", "check_suite_id": 42, "head_branch": "main",
        "head_sha": "acb5820ced9479c074f688cc328bf03f341a511d", "path": ".github/workflows/build.yml@main", "run_number": 562,
        "event": "pull_request", "status": "in_progress", "conclusion": null, "workflow_id": 159_038, "pull_requests": [],
        "created_at": "2030-03-17T17:40:00Z", "run_attempt": 1, "actor": {"login": "octocat", "id": 1},
        "repository": {"id": 1_296_269, "name": "Hello-World", "full_name": "octo-org/Hello-World", "private": false},
        "head_repository": {"id": 217_723_378, "name": "Hello-World", "full_name": "stranger/Hello-World", "fork": true},
    })
}

fn job(id: u64, status: &str, ended: Option<i64>) -> Value {
    let ended = ended.map(|at| jiff::Timestamp::from_second(at).expect("a time").to_string());
    json!({
        "id": id, "run_id": RUN, "status": status, "conclusion": ended.as_ref().map(|_| "success"), "name": "challenge",
        "started_at": "2030-03-17T17:40:00Z", "completed_at": ended, "steps": [], "labels": ["ubuntu-latest"],
    })
}

fn pull(number: u64, head: u64, state: &str) -> Value {
    json!({
        "number": number, "state": state, "title": "kiln", "draft": false,
        "head": {"label": "stranger:main", "ref": "main", "sha": run()["head_sha"], "repo": {"id": head, "full_name": "stranger/Hello-World"}},
        "base": {"label": "octo-org:main", "ref": "main", "sha": "00", "repo": {"id": 1_296_269, "full_name": "octo-org/Hello-World"}},
    })
}

impl Stand {
    /// Where a run of pull request 7 has ended a job that printed the words which `said` are.
    async fn start() -> Self {
        let api = Arc::new(Api::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        let router = Router::new().fallback(answer).with_state(Arc::clone(&api));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.expect("served") });
        let files = tempfile::tempdir().expect("a directory");
        let credentials_file = files.path().join("github");
        std::fs::write(&credentials_file, format!("{CREDENTIALS}\n")).expect("written");
        std::fs::set_permissions(&credentials_file, std::fs::Permissions::from_mode(0o600)).expect("chmod");
        let config = Config {
            kind: ForgeKind::Github,
            api: format!("{address}/api"),
            host: Some("github.com".to_owned()),
            credentials_file,
            ca_file: None,
            repositories: vec!["github.com/octo-org/*".to_owned()],
        };
        let clock = Arc::new(Still(AtomicI64::new(NOW * 1000)));
        let entropy = Arc::new(Counting::default());
        let challenges = Challenges::new(&[config], Arc::clone(&clock) as Arc<dyn Clock>, entropy).expect("sound");
        let stand = Self { api, address, clock, challenges, _files: files, _task: AbortOnDropHandle::new(task) };
        stand.on("runs/30433642", 200, &run().to_string());
        stand.jobs(&[job(11, "completed", Some(NOW + 20)), job(12, "in_progress", None)]);
        stand.on("jobs/12/logs", 404, "<Error><Code>BlobNotFound</Code></Error>");
        stand.pulls(&[pull(7, 217_723_378, "open")]);
        stand
    }

    fn on(&self, path: &str, status: u16, body: &str) {
        let path = format!("/api/repos/octo-org/hello-world/actions/{path}");
        self.api.answers.lock().expect("sound").insert(path, (status, body.to_owned()));
    }

    fn jobs(&self, jobs: &[Value]) {
        let body = json!({"total_count": jobs.len(), "jobs": jobs}).to_string();
        self.on("runs/30433642/jobs?filter=latest&per_page=100", 200, &body);
    }

    fn pulls(&self, pulls: &[Value]) {
        let sha = run()["head_sha"].as_str().expect("text").to_owned();
        let path = format!("/api/repos/octo-org/hello-world/commits/{sha}/pulls?per_page=100");
        self.api.answers.lock().expect("sound").insert(path, (200, json!(pulls).to_string()));
    }

    /// The log of the job that has ended, at another place as GitHub has it.
    fn log(&self, text: &str) {
        self.on("jobs/11/logs", 302, &format!("{}/blob?sig=secret", self.address));
        self.api.answers.lock().expect("sound").insert("/blob?sig=secret".to_owned(), (200, text.to_owned()));
    }

    fn prints(&self, words: &str) {
        self.log(&format!(
            "\u{feff}2030-03-17T17:46:40.0000000Z Run echo\r\n2030-03-17T17:46:41.0000000Z {words}\r\nend\r\n"
        ));
    }

    fn ask(&self) -> Asked {
        self.challenges.ask("https://github.com/Octo-Org/Hello-World.git", RUN).expect("a challenge")
    }

    fn pass(&self, span: Duration) {
        self.clock.0.fetch_add(i64::try_from(span.as_millis()).expect("short"), Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.api.asked.lock().expect("sound").len()
    }
}

#[tokio::test]
async fn a_run_that_printed_its_words_gets_a_token_for_its_pull_request() {
    let stand = Stand::start().await;
    let asked = stand.ask();
    assert_eq!(stand.asked(), 0, "nobody is asked for a challenge");
    assert!(asked.words.starts_with("kiln-challenge-") && asked.words.len() == 47, "{asked:?}");
    assert!(!format!("{asked:?}").contains(&asked.secret));
    stand.prints(&asked.words);
    let Answered::Granted { token, until } = stand.challenges.answer(&asked.secret).await.expect("asked") else {
        panic!("not granted")
    };
    assert_eq!(until, Timestamp::from_millis(NOW * 1000).plus(TOKEN_LIFE));
    assert!(Challenges::looks_like(&token) && !kiln_domain::access::AccessToken::looks_like(&token));
    let verified = stand.challenges.prove(&token).expect("proven");
    let repo = RepoName::parse("github.com/octo-org/hello-world").expect("a repository");
    let trust = Trust::Untrusted { fork: "7".to_owned() };
    assert_eq!(verified.standing, Standing::Build(Proven { repo, trust }));
    assert_eq!(
        verified.who,
        "a build of github.com/octo-org/hello-world, run 30433642, pull request 7, by a challenge"
    );
    assert!(matches!(stand.challenges.answer(&asked.secret).await, Err(ChallengeError::Unknown)), "once");
    stand.pass(TOKEN_LIFE);
    assert_eq!(stand.challenges.prove(&token), None);
    // The credentials are for the API and for nobody else.
    for (path, headers) in stand.api.asked.lock().expect("sound").iter() {
        let shown = headers.get("authorization").map(|value| value.to_str().expect("text").to_owned());
        let expected = path.starts_with("/api/").then(|| format!("Bearer {CREDENTIALS}"));
        assert_eq!(shown, expected, "{path}");
    }
}

#[tokio::test]
async fn what_is_not_printed_is_not_proven() {
    let stand = Stand::start().await;
    let (asked, other) = (stand.ask(), stand.ask());
    assert_ne!((&asked.words, &asked.secret), (&other.words, &other.secret));
    let line = |text: &str| format!("2030-03-17T17:46:41.0000000Z {text}\n");
    for log in [
        String::new(),
        line(&other.words),
        line(&format!("title: {}", asked.words)),
        line(&format!("{} and more", asked.words)),
        asked.words.clone(),
        "x".repeat(300_000) + "\n" + &line(&asked.words),
    ] {
        stand.log(&log);
        let answered = stand.challenges.answer(&asked.secret).await.expect("asked");
        assert!(matches!(answered, Answered::NotYet { .. }), "{log:.200}");
        stand.pass(BETWEEN_LOOKS);
    }
    // Of a job that ended before there were such words; of another run; of one that goes on.
    stand.prints(&asked.words);
    let mut foreign = job(11, "completed", Some(NOW + 20));
    foreign["run_id"] = json!(RUN + 1);
    for job in [job(11, "completed", Some(NOW - 60)), foreign, job(11, "in_progress", None)] {
        stand.jobs(&[job]);
        assert!(matches!(stand.challenges.answer(&asked.secret).await, Ok(Answered::NotYet { .. })));
        stand.pass(BETWEEN_LOOKS);
    }
}

#[tokio::test]
async fn only_runs_of_forks_that_get_no_token_are_answered() {
    let stand = Stand::start().await;
    for (change, why) in [
        (json!({"event": "push"}), "not of a pull request"),
        (json!({"event": "pull_request_target"}), "not of a pull request"),
        (json!({"status": "completed"}), "does not go on"),
        (json!({"status": null}), "does not go on"),
        (json!({"id": 5}), "another repository"),
        (json!({"repository": {"id": 5, "full_name": "octo-org/other"}}), "another repository"),
        (json!({"head_repository": {"id": 1_296_269}}), "not of a fork"),
        (json!({"head_repository": null}), "the fork is gone"),
        (json!({"head_sha": "../../x"}), "has no commit"),
    ] {
        let asked = stand.ask();
        stand.prints(&asked.words);
        let mut run = run();
        for (name, value) in change.as_object().expect("an object") {
            run[name] = value.clone();
        }
        stand.on("runs/30433642", 200, &run.to_string());
        let error = stand.challenges.answer(&asked.secret).await.expect_err("refused");
        assert!(error.to_string().contains(why), "{change}: {error}");
        assert_eq!(error.refusal(), Refusal::NotListed);
        assert!(matches!(stand.challenges.answer(&asked.secret).await, Err(ChallengeError::Unknown)), "it is over");
    }
    for (status, why) in [(404, "no such run"), (301, "another name")] {
        stand.on("runs/30433642", status, "");
        let error = stand.challenges.answer(&stand.ask().secret).await.expect_err("refused");
        assert!(error.to_string().contains(why), "{error}");
    }
}

/// Its forge names the pull request, and what is of another fork does not count.
#[tokio::test]
async fn the_fork_is_the_one_of_this_commit_from_this_fork() {
    let fork = |pulls: Vec<Value>| async move {
        let stand = Stand::start().await;
        let asked = stand.ask();
        stand.prints(&asked.words);
        stand.pulls(&pulls);
        let Ok(Answered::Granted { token, .. }) = stand.challenges.answer(&asked.secret).await else {
            panic!("not granted")
        };
        match stand.challenges.prove(&token).expect("proven").standing {
            Standing::Build(Proven { trust: Trust::Untrusted { fork }, .. }) => fork,
            other => panic!("{other:?}"),
        }
    };
    let (own, other) = (217_723_378, 99);
    assert_eq!(
        fork(vec![pull(3, other, "open"), pull(9, own, "open"), pull(8, own, "open"), pull(2, own, "closed")]).await,
        "8"
    );
    let mut old = pull(7, own, "open");
    old["head"]["sha"] = json!("feed");
    let mut elsewhere = pull(7, own, "open");
    elsewhere["base"]["repo"]["id"] = json!(5);
    assert_eq!(fork(vec![pull(3, other, "open"), old, elsewhere]).await, format!("run-{RUN}"));
    assert_eq!(fork(Vec::new()).await, format!("run-{RUN}"));
}

/// F18: a forge that cannot be asked is no answer, and the challenge goes on.
#[tokio::test]
async fn f18_a_forge_that_cannot_be_asked_is_no_answer() {
    let stand = Stand::start().await;
    let asked = stand.ask();
    stand.prints(&asked.words);
    for (status, body) in
        [(401, "{}"), (403, "rate limit"), (429, ""), (500, ""), (200, "no JSON"), (302, "http://127.0.0.1:1/")]
    {
        stand.on("runs/30433642", status, body);
        let error = stand.challenges.answer(&asked.secret).await.expect_err("down");
        assert!(matches!(error.refusal(), Refusal::Unavailable { .. }), "{status}: {error}");
        assert!(!error.to_string().contains(CREDENTIALS) && !error.to_string().contains("127.0.0.1"), "{error}");
        stand.pass(BETWEEN_LOOKS);
    }
    stand.on("runs/30433642", 200, &run().to_string());
    assert!(matches!(stand.challenges.answer(&asked.secret).await, Ok(Answered::Granted { .. })));
}

#[tokio::test]
async fn a_stranger_gets_little_and_costs_less() {
    let stand = Stand::start().await;
    for repo in [
        "github.com/other/repo",
        "gitlab.com/octo-org/repo",
        "github.com",
        "octo-org/hello-world",
        "github.community/octo-org/x",
    ] {
        let error = stand.challenges.ask(repo, RUN).expect_err("not listed");
        assert_eq!(error.refusal(), Refusal::NotListed, "{repo}");
    }
    assert_eq!(stand.challenges.ask("", RUN).expect_err("no repository").refusal(), Refusal::Unproven);
    for _ in 0..100 {
        assert!(matches!(stand.challenges.answer("guessed").await, Err(ChallengeError::Unknown)));
        assert_eq!(stand.challenges.prove("kilnrun_guessed"), None);
    }
    assert_eq!(stand.asked(), 0, "nobody was asked");
    // With a secret it is one look in a while, and so many in all.
    let asked = stand.ask();
    stand.jobs(&[]);
    for _ in 0..100 {
        assert!(matches!(stand.challenges.answer(&asked.secret).await, Ok(Answered::NotYet { .. })));
    }
    assert_eq!(stand.asked(), 2, "the run and its jobs, once");
    for _ in 1..MOST_LOOKS {
        stand.pass(BETWEEN_LOOKS);
        assert!(matches!(stand.challenges.answer(&asked.secret).await, Ok(Answered::NotYet { .. })));
    }
    stand.pass(BETWEEN_LOOKS);
    assert!(matches!(stand.challenges.answer(&asked.secret).await, Err(ChallengeError::Unknown)));
    // One repository does not take all places, and they become free again.
    while stand.challenges.ask("github.com/octo-org/hello-world", 1).is_ok() {}
    assert_eq!(stand.challenges.book().pending(), MOST_OF_ONE);
    assert!(stand.challenges.ask("github.com/octo-org/other", 1).is_ok());
    stand.pass(CHALLENGE_LIFE);
    assert!(stand.challenges.ask("github.com/octo-org/hello-world", 1).is_ok());
    assert_eq!(stand.challenges.book().pending(), 1);
}

#[test]
fn without_a_forge_it_is_off() {
    let clock = Arc::new(Still(AtomicI64::new(0)));
    let off = Challenges::new(&[], clock, Arc::new(Counting::default())).expect("sound");
    assert!(matches!(off.ask("github.com/org/repo", 1), Err(ChallengeError::NotListed { .. })));
}

#[test]
fn f48_credentials_are_read_without_their_line_end_and_kept_from_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("token");
    let read = |text: &str, mode: u32| {
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("chmod");
        github::credentials(&path).map_err(|error| error.to_string())
    };
    assert_eq!(read(" secret\r\n", 0o600), Ok("secret".to_owned()));
    assert!(read("secret", 0o640).expect_err("refused").contains("chmod 0600"));
    for text in ["", "\n", "two words", "tok\u{e9}n"] {
        assert!(read(text, 0o600).expect_err("refused").contains("one token"), "{text}");
    }
    assert!(github::credentials(std::path::Path::new("/nonexistent")).is_err());
}
