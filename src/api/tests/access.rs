//! Who gets through to what, over the whole router.

use axum::body::{Body, to_bytes};
use axum::http::{HeaderName, Method, Request, Response, header};
use kiln_domain::access::Standing;
use kiln_wire::{NewToken, TokenView};
use serde_json::json;
use tower::ServiceExt as _;

use super::*;
use crate::identity::oidc::Verifier;
use crate::identity::oidc::tests::github_at_the_door;
use crate::identity::{Caller as Who, Local, Loopback, SystemAccounts, Tokens};

const OWN: &str = "pbcce5b6205652dd7";
const OTHERS: &str = "p1141ac10afcdcc14";

/// What shows nothing and is nobody, from another host.
fn far() -> Source {
    Source::Tcp("203.0.113.7".parse().expect("an address"))
}

fn near() -> Source {
    Source::Tcp("127.0.0.1".parse().expect("an address"))
}

struct Door {
    router: Router,
    heart: Arc<FakeHeart>,
    store: Store,
}

impl Door {
    fn new(loopback: Loopback) -> Self {
        Self::with(loopback, None)
    }

    fn with(loopback: Loopback, forges: Option<Verifier>) -> Self {
        let heart = Arc::new(FakeHeart::default());
        let (store, disk) = Store::in_memory().expect("opens");
        tokio::spawn(async move {
            loop {
                disk.commit_now();
                tokio::task::yield_now().await;
            }
        });
        let own = rustix::process::getuid().as_raw();
        let local = Local::new(Vec::new(), own, Arc::new(SystemAccounts));
        let (clock, entropy) =
            (Arc::new(crate::clock::SystemClock), Arc::new(crate::entropy::SystemEntropy::default()));
        let tokens = Tokens::new(store.clone(), clock, entropy);
        let callers = Arc::new(Callers::new(local, tokens, loopback).with_forges(forges, None));
        let often = std::num::NonZeroU32::new(1000).expect("not zero");
        let rates = Rates { strangers: often, ..Rates::DEFAULT };
        let settings = Settings { nameless_release: true, rates, ..SETTINGS };
        let router = Api::new(heart.clone(), callers, store.clone(), Arc::new(Metrics::new()), settings).router();
        Self { router, heart, store }
    }

    async fn ask(&self, from: Source, bearer: &[&str], method: &str, path: &str, body: &str) -> (u16, String) {
        let answer = self.answer(from, bearer, method, path, body).await;
        let status = answer.status().as_u16();
        let body = to_bytes(answer.into_body(), 1 << 20).await.expect("a short body");
        (status, String::from_utf8_lossy(&body).into_owned())
    }

    async fn answer(&self, from: Source, bearer: &[&str], method: &str, path: &str, body: &str) -> Response<Body> {
        let mut request = Request::builder().method(method).uri(path).extension(from);
        for shown in bearer {
            request = request.header(header::AUTHORIZATION, format!("Bearer {shown}"));
        }
        let request = request.body(Body::from(body.to_owned())).expect("a request");
        self.router.clone().oneshot(request).await.expect("infallible")
    }

    async fn token(&self, grade: &str, repositories: &[&str]) -> NewToken {
        let wanted =
            serde_json::json!({"name": "of a test", "grade": grade, "repositories": repositories, "lasts": "1h"});
        let (status, body) = self.ask(own_source(), &[], "POST", "/v1/tokens", &wanted.to_string()).await;
        assert_eq!(status, 201, "{body}");
        serde_json::from_str(&body).expect("a token")
    }
}

fn route(repo: &str) -> String {
    format!(r#"{{"repo":"{repo}","arch":"amd64"}}"#)
}

#[tokio::test]
async fn who_shows_nothing_gets_nothing() {
    let door = Door::new(Loopback::Nothing);
    for from in [far(), near()] {
        for one in &super::super::access::ENDPOINTS {
            let path = one.path().replace("{key}", OWN).replace("{id}", "0000000000000000").replace("{name}", "x");
            let answer = door.answer(from, &[], one.method().as_str(), &path, &route("github.com/org/repo")).await;
            let is_open = ["/healthz", "/v1/openapi.json", "/complete"].contains(&one.path())
                || path.ends_with("/renew")
                || path.starts_with("/v1/challenges");
            assert_eq!(answer.status() == StatusCode::UNAUTHORIZED, !is_open, "{path}: {}", answer.status());
            assert_eq!(answer.headers().contains_key(header::WWW_AUTHENTICATE), !is_open, "{path}");
        }
    }
    assert_eq!(*door.heart.verbs.lock().expect("no panic"), Vec::<String>::new(), "nothing was asked of the heart");
    let headers = [("x-forwarded-for", "127.0.0.1"), ("x-buildkit-operator-admin-token", "")];
    for (name, value) in headers {
        let request = Request::builder().method(Method::POST).uri("/route").extension(far());
        let request = request.header(HeaderName::from_static(name), value).body(Body::from(BODY)).expect("a request");
        let answer = door.router.clone().oneshot(request).await.expect("infallible");
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED, "{name} proves nothing");
    }
}

/// W10, and each is told when to come again.
#[tokio::test]
async fn who_asks_too_often_waits_and_nobody_else() {
    let door = Door::new(Loopback::Builder);
    let made = door.token("builder", &["*"]).await;
    let mut refused = 0;
    for _ in 0..200 {
        let answer = door.answer(far(), &[&made.token], "POST", "/prewarm", BODY).await;
        if answer.status() == StatusCode::TOO_MANY_REQUESTS {
            assert!(answer.headers().contains_key(header::RETRY_AFTER));
            refused += 1;
        }
    }
    assert!(refused > 0);
    let other = door.token("builder", &["*"]).await;
    let elsewhere = Source::Tcp("203.0.113.99".parse().expect("an address"));
    for (from, shown) in [(elsewhere, &[other.token.as_str()][..]), (near(), &[]), (own_source(), &[])] {
        assert_eq!(door.ask(from, shown, "POST", "/prewarm", BODY).await.0, 202, "{from:?}");
    }
    assert_eq!(door.ask(far(), &[], "GET", "/healthz", "").await.0, 200);
}

#[tokio::test]
async fn a_program_of_this_host_may_build_until_there_are_tokens() {
    let door = Door::new(Loopback::UntilTokens);
    assert_eq!(door.ask(near(), &[], "POST", "/route", BODY).await.0, 200);
    assert_eq!(door.ask(near(), &[], "GET", "/v1/projects", "").await.0, 200);
    for (method, path) in [("DELETE", "/v1/trash"), ("POST", "/v1/tokens"), ("GET", "/v1/events"), ("GET", "/metrics")]
    {
        assert_eq!(door.ask(near(), &[], method, path, "").await.0, 403, "{path}");
    }
    let made = door.token("builder", &["*"]).await;
    assert_eq!(door.ask(near(), &[], "POST", "/route", BODY).await.0, 401, "now there is something to show");
    assert_eq!(door.ask(near(), &[&made.token], "POST", "/route", BODY).await.0, 200);
    let path = format!("/v1/tokens/{}", made.view.id);
    assert_eq!(door.ask(own_source(), &[], "DELETE", &path, "").await.0, 204);
    assert_eq!(door.ask(near(), &[], "POST", "/route", BODY).await.0, 401, "what was closed is not opened by an end");
}

#[tokio::test]
async fn a_token_opens_what_it_was_made_for_and_nothing_else() {
    let door = Door::new(Loopback::Nothing);
    let made = door.token("builder", &["github.com/org/repo"]).await;
    let token = [made.token.as_str()];
    let asked = |method: &'static str, path: String, body: String| {
        let (door, token) = (&door, &token);
        async move { door.ask(far(), token, method, &path, &body).await.0 }
    };
    assert_eq!(asked("POST", "/route".to_owned(), route("https://github.com/Org/Repo.git")).await, 200);
    assert_eq!(asked("POST", "/route".to_owned(), route("github.com/org/repository")).await, 403);
    assert_eq!(asked("POST", "/prewarm".to_owned(), route("github.com/other/repo")).await, 403);
    assert_eq!(door.heart.routes.lock().expect("no panic").len(), 1);
    for (path, own, others) in [("", 200, 403), ("/why", 200, 403), ("/cache", 200, 403)] {
        assert_eq!(asked("GET", format!("/v1/projects/{OWN}{path}"), String::new()).await, own, "{path}");
        assert_eq!(asked("GET", format!("/v1/projects/{OTHERS}{path}"), String::new()).await, others, "{path}");
    }
    assert_eq!(asked("POST", format!("/v1/projects/{OWN}/stop"), String::new()).await, 204);
    assert_eq!(asked("POST", format!("/v1/projects/{OWN}/stop?force=true"), String::new()).await, 403);
    assert_eq!(asked("POST", format!("/v1/projects/{OWN}/reset"), r#"{"force":true}"#.to_owned()).await, 403);
    assert_eq!(asked("DELETE", format!("/v1/projects/{OWN}"), String::new()).await, 403);
    assert_eq!(asked("PATCH", format!("/v1/projects/{OWN}/settings"), r#"{"cpus":2}"#.to_owned()).await, 403);
    assert_eq!(asked("GET", "/v1/projects/%70bcce5b6205652dd7".to_owned(), String::new()).await, 403, "a key as it is");
    // Followers stay; this one is refused before.
    assert_eq!(asked("GET", format!("/v1/events?key={OTHERS}"), String::new()).await, 403);
    assert_eq!(asked("GET", "/v1/events".to_owned(), String::new()).await, 403);
}

#[tokio::test]
async fn a_list_shows_what_its_reader_may_see() {
    let door = Door::new(Loopback::Nothing);
    let all = door.ask(own_source(), &[], "GET", "/v1/projects", "").await.1;
    let count = |text: &str| serde_json::from_str::<Vec<ProjectView>>(text).expect("a list").len();
    assert!(count(&all) > 0, "{all}");
    let of_nobody = door.token("builder", &["github.com/nobody/*"]).await;
    let (status, none) = door.ask(far(), &[&of_nobody.token], "GET", "/v1/projects", "").await;
    assert_eq!((status, count(&none)), (200, 0));
    let of_all = door.token("builder", &["*"]).await;
    assert_eq!(count(&door.ask(far(), &[&of_all.token], "GET", "/v1/projects", "").await.1), count(&all));
}

/// K7, F51 and F52: what the request says of itself counts only where it lowers trust.
#[tokio::test]
async fn a_build_gets_the_daemon_of_what_its_forge_says_it_is() {
    let (forges, token) = github_at_the_door();
    let door = Door::with(Loopback::Nothing, Some(forges));
    let trusted = token(&json!({}));
    let of_pull_request = token(&json!({"ref": "refs/pull/7/merge", "event_name": "pull_request"}));
    let asked = async |token: &str, body: &str| {
        let (status, text) = door.ask(far(), &[token], "POST", "/route", body).await;
        assert_eq!(status, 200, "{text}");
        let (spec, options) = door.heart.routes.lock().expect("no panic").pop().expect("a route");
        (spec.repo.to_string(), options.caller.untrusted, options.caller.pull_request)
    };
    let own = "github.com/socialgouv/foo".to_owned();
    let victim = r#"{"repo":"github.com/victim/repo","arch":"amd64"}"#;
    assert_eq!(asked(&trusted, victim).await, (own.clone(), false, None));
    assert_eq!(asked(&trusted, r#"{"arch":"amd64"}"#).await, (own.clone(), false, None), "it need not say so itself");
    let lowered = r#"{"arch":"amd64","untrusted":true,"pullRequest":"8"}"#;
    assert_eq!(asked(&trusted, lowered).await, (own.clone(), true, Some("8".to_owned())));
    for body in [victim, lowered, r#"{"arch":"amd64","untrusted":false}"#] {
        assert_eq!(asked(&of_pull_request, body).await, (own.clone(), true, Some("7".to_owned())), "{body}");
    }
    let path = format!("/v1/projects/{OWN}");
    for (token, path, status) in
        [(&trusted, path.as_str(), 403), (&of_pull_request, &path, 403), (&trusted, "/metrics", 403)]
    {
        assert_eq!(door.ask(far(), &[token], "GET", path, "").await.0, status, "{path}");
    }
    let over = token(&json!({"exp": 1}));
    let (status, text) = door.ask(far(), &[&over], "POST", "/route", victim).await;
    assert!(status == 401 && text.contains("ended") && !text.contains(&over), "{text}");
}

/// F18: an error of the lookup is neither "there is none" nor "it is yours".
#[tokio::test]
async fn a_lookup_that_fails_is_no_absence() {
    let door = Door::new(Loopback::Nothing);
    let made = door.token("builder", &["github.com/org/*"]).await;
    let broken = VerbError::Failed("the database is away".to_owned());
    *door.heart.verb_fails.lock().expect("no panic") = Some(broken);
    let path = format!("/v1/projects/{OWN}");
    let answer = door.answer(far(), &[&made.token], "GET", &path, "").await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers().contains_key(header::RETRY_AFTER));
    assert_eq!(door.ask(far(), &[&made.token], "GET", &path, "").await.0, 200, "and then it is back");
}

/// F15 and F16.
#[tokio::test]
async fn the_token_of_a_lease_releases_it_whoever_shows_it() {
    let door = Door::new(Loopback::Nothing);
    let complete = |id: &str| format!(r#"{{"key":"{OWN}","buildId":"{id}"}}"#);
    let (live, unknown, nameless) =
        (complete("abababababababab"), complete("cdcdcdcdcdcdcdcd"), format!(r#"{{"key":"{OWN}"}}"#));
    for shown in [&[][..], &["junk"], &["kiln_junk"], &["a.b.c"]] {
        for (body, status) in [(&live, 204), (&unknown, 401), (&nameless, 401)] {
            assert_eq!(door.ask(far(), shown, "POST", "/complete", body).await.0, status, "{shown:?} {body}");
        }
    }
    assert_eq!(door.heart.oldest_released.load(Ordering::SeqCst), 0);
    for (body, status) in [(&live, 204), (&unknown, 204), (&nameless, 204)] {
        assert_eq!(door.ask(own_source(), &[], "POST", "/complete", body).await.0, status, "{body}");
    }
    let other = door.token("builder", &["github.com/org/other"]).await;
    assert_eq!(door.ask(far(), &[&other.token], "POST", "/complete", &nameless).await.0, 403);
}

#[tokio::test]
async fn a_token_that_does_not_count_is_not_passed_over_for_a_weaker_proof() {
    let door = Door::new(Loopback::Builder);
    let made = door.token("admin", &[]).await;
    let wrong = format!("{}{}", &made.token[..made.token.len() - 1], if made.token.ends_with('0') { '1' } else { '0' });
    for from in [own_source(), near(), far()] {
        for shown in [vec![wrong.as_str()], vec!["junk"], vec![""], vec![made.token.as_str(), made.token.as_str()]] {
            let (status, text) = door.ask(from, &shown, "POST", "/route", BODY).await;
            assert_eq!(status, 401, "{from:?} {text}");
            assert!(!text.contains("kiln_") || !text.contains(&wrong[5..]), "{text}");
        }
    }
    assert_eq!(door.ask(far(), &[&made.token], "DELETE", "/v1/trash", "").await.0, 200);
}

#[tokio::test]
async fn tokens_are_made_shown_without_their_secret_and_revoked() {
    let door = Door::new(Loopback::Nothing);
    let made = door.token("operator", &[]).await;
    let (status, list) = door.ask(own_source(), &[], "GET", "/v1/tokens", "").await;
    let tokens: Vec<TokenView> = serde_json::from_str(&list).expect("a list");
    assert_eq!((status, tokens[0].id.as_str(), tokens[0].last_used.as_deref()), (200, made.view.id.as_str(), None));
    let secret = made.token.rsplit('_').next().expect("a secret");
    assert!(!list.contains(secret));
    assert_eq!(door.ask(far(), &[&made.token], "GET", "/v1/caches", "").await.0, 200);
    assert!(door.ask(own_source(), &[], "GET", "/v1/tokens", "").await.1.contains("lastUsed"));
    assert_eq!(door.ask(far(), &[&made.token], "GET", "/v1/tokens", "").await.0, 403, "an operator lets nobody in");
    let path = format!("/v1/tokens/{}", made.view.id);
    assert_eq!(door.ask(own_source(), &[], "DELETE", &path, "").await.0, 204);
    assert_eq!(door.ask(far(), &[&made.token], "GET", "/v1/caches", "").await.0, 401);
    assert_eq!(door.ask(own_source(), &[], "DELETE", &path, "").await.0, 404);
    assert_eq!(door.ask(own_source(), &[], "DELETE", "/v1/tokens/x", "").await.0, 400);
    let told = door.store.events(0, 100).await.expect("reads");
    assert!(told.iter().all(|event| !event.text.contains(secret)), "{told:?}");
    assert_eq!(told.iter().filter(|event| event.kind == "token").count(), 2);
    for bad in [
        r#"{"name":"","grade":"builder","repositories":["*"],"lasts":"1h"}"#,
        r#"{"name":"x","grade":"god","lasts":"1h"}"#,
        r#"{"name":"x","grade":"builder","lasts":"1h"}"#,
        r#"{"name":"x","grade":"admin","repositories":["*"],"lasts":"1h"}"#,
        r#"{"name":"x","grade":"admin","lasts":"soon"}"#,
        r#"{"name":"x","grade":"admin","lasts":"0s"}"#,
        r#"{"name":"x","grade":"admin"}"#,
        "{\"name\":\"\\u202egnp\",\"grade\":\"admin\",\"lasts\":\"1h\"}",
    ] {
        assert_eq!(door.ask(own_source(), &[], "POST", "/v1/tokens", bad).await.0, 400, "{bad}");
    }
}

#[tokio::test]
async fn who_changed_something_is_in_the_journal() {
    let door = Door::new(Loopback::Nothing);
    let made = door.token("operator", &["*"]).await;
    let path = format!("/v1/projects/{OWN}/stop");
    assert_eq!(door.ask(far(), &[&made.token], "POST", &path, "").await.0, 204);
    assert_eq!(door.ask(far(), &[&made.token], "POST", "/route", BODY).await.0, 200);
    // Writes are in their order, so what nobody waited for is there, too.
    door.store.ping().await.expect("is written");
    let told = door.store.events(0, 100).await.expect("reads");
    let audit: Vec<_> = told.iter().filter(|event| event.kind == "audit").collect();
    let who = format!("token {} (of a test)", made.view.id);
    assert!(
        audit.iter().any(|event| event.by == who && event.text == format!("{who} asked to stop: done")),
        "{audit:?}"
    );
    assert_eq!(door.ask(own_source(), &[], "POST", "/v1/projects/x/stop", "").await.0, 400);
    door.store.ping().await.expect("is written");
    assert_eq!(door.store.events(0, 100).await.expect("reads").len(), told.len(), "what was refused changed nothing");
    let asked = door.heart.routes.lock().expect("no panic").pop().expect("a route").1.caller.who;
    assert_eq!(asked.as_deref(), Some(who.as_str()));
}

/// It is carried out all the same, so it is told of all the same.
#[tokio::test]
async fn who_hangs_up_is_in_the_journal_too() {
    let door = Door::new(Loopback::Nothing);
    door.heart.hangs.store(true, Ordering::SeqCst);
    let path = format!("/v1/projects/{OWN}/stop");
    {
        let asked = door.ask(own_source(), &[], "POST", &path, "");
        tokio::select! {
            answer = asked => panic!("it hangs: {answer:?}"),
            () = door.heart.changed.notified() => {}
        }
    }
    door.store.ping().await.expect("is written");
    let told = door.store.events(0, 100).await.expect("reads");
    assert!(told.iter().any(|event| event.kind == "audit" && event.text.contains("stop: hung up")), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn who_may_no_more_reads_on_for_seconds_only() {
    let door = Door::new(Loopback::Nothing);
    let made = door.token("operator", &[]).await;
    let answer = door.answer(far(), &[&made.token], "GET", "/v1/events", "").await;
    assert_eq!(answer.status(), 200);
    let reading = tokio::spawn(to_bytes(answer.into_body(), 1 << 20));
    // The clock stands still but for this: it is read on while the token counts.
    for _ in 0..3 {
        tokio::time::advance(Duration::from_secs(6)).await;
        door.store
            .record(crate::store::NewEvent::new(kiln_domain::Timestamp::EPOCH, None, "test", "x"))
            .await
            .expect("told");
    }
    assert!(!reading.is_finished());
    let path = format!("/v1/tokens/{}", made.view.id);
    assert_eq!(door.ask(own_source(), &[], "DELETE", &path, "").await.0, 204);
    tokio::time::advance(Duration::from_secs(6)).await;
    let read = reading.await.expect("no panic").expect("ended");
    assert!(String::from_utf8_lossy(&read).contains("data:"));
}

/// A token that is over counts for nothing, on the second.
#[tokio::test]
async fn a_token_ends() {
    struct At(std::sync::atomic::AtomicI64);
    impl crate::clock::Clock for At {
        fn now(&self) -> kiln_domain::Timestamp {
            kiln_domain::Timestamp::from_millis(self.0.load(Ordering::SeqCst))
        }
    }
    let (store, disk) = Store::in_memory().expect("opens");
    let clock = Arc::new(At(1_000_000.into()));
    let entropy = Arc::new(crate::entropy::SystemEntropy::default());
    let tokens = Tokens::new(store, clock.clone(), entropy);
    let local = Local::new(Vec::new(), 0, Arc::new(SystemAccounts));
    let callers = Callers::new(local, tokens, Loopback::Nothing);
    let wanted = crate::identity::Wanted {
        name: "x".to_owned(),
        grade: kiln_domain::access::Grade::Watcher,
        scope: kiln_domain::access::Scope::default(),
        lasts: Some(Duration::from_secs(60)),
    };
    let admin = Who { standing: Standing::Admin, who: "a test".to_owned() };
    let issue = callers.tokens().issue(wanted, &admin);
    let (issued, ()) = tokio::join!(issue, async {
        while disk.commit_now() == 0 {
            tokio::task::yield_now().await;
        }
    });
    let shown = format!("Bearer {}", issued.expect("is made").token.reveal());
    let standing =
        async || callers.identify(far(), std::iter::once(shown.as_bytes())).await.map(|caller| caller.standing);
    assert_eq!(standing().await.expect("counts"), Standing::Watcher);
    clock.0.store(1_059_999, Ordering::SeqCst);
    assert_eq!(standing().await.expect("counts to the end"), Standing::Watcher);
    clock.0.store(1_060_000, Ordering::SeqCst);
    assert!(standing().await.expect_err("is over").to_string().contains("is over"));
}
