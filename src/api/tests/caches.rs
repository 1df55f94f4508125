//! `/v1/projects/{key}/cache` and what changes it, and `/v1/caches`.

use kiln_wire::{ApiError, RolledBack};

use super::refused::Kiln;
use super::*;

#[tokio::test]
async fn a_cache_is_shown_kept_and_put_back() {
    let server = Server::start().await;
    let known = format!("/v1/projects/{}", view().key);
    assert_eq!(server.get(&format!("{known}/cache")).await.json::<CacheView>(), cache());
    let unmeasured = server.get(&format!("{known}/cache?usage=false")).await;
    assert_eq!(unmeasured.json::<CacheView>(), CacheView { usage: None, ..cache() });
    for status in [201, 200] {
        let answer = server.post(&format!("{known}/snapshots"), "").await;
        assert_eq!((answer.status, answer.json::<SnapshotView>().name.as_str()), (status, "kiln-000042"));
    }
    for (body, back) in [
        ("{}", "kiln-000041"),
        (r#"{"snapshot":null}"#, "kiln-000041"),
        (r#"{"snapshot":"kiln-000042"}"#, "kiln-000042"),
        (r#"{"snapshot":"@kiln-000042","force":true}"#, "kiln-000042"),
    ] {
        let answer = server.post(&format!("{known}/rollback"), body).await;
        assert_eq!((answer.status, answer.json::<RolledBack>().snapshot.as_str()), (200, back), "{body}");
    }
    for body in ["{}", r#"{"force":true}"#] {
        let answer = server.post(&format!("{known}/reset"), body).await;
        assert_eq!((answer.status, answer.body.as_str()), (204, ""), "{body}");
    }
    let key = view().key;
    assert_eq!(
        *server.heart.verbs.lock().expect("no panic"),
        [
            "cache",
            "cache",
            "snapshot",
            "snapshot",
            "rollback KEY None false",
            "rollback KEY None false",
            "rollback KEY Some(SnapshotName(42)) false",
            "rollback KEY Some(SnapshotName(42)) true",
            "reset KEY false",
            "reset KEY true",
        ]
        .map(|verb| if verb.contains("KEY") { verb.replace("KEY", &key) } else { format!("{verb} {key}") })
    );
}

#[tokio::test]
async fn what_asks_for_no_way_back_is_refused_before_anything_is_touched() {
    let server = Server::start().await;
    let known = format!("/v1/projects/{}", view().key);
    let long = format!(r#"{{"snapshot":"kiln-{}"}}"#, "0".repeat(4000));
    for (path, body, words) in [
        ("rollback", "", "not what this endpoint takes"),
        ("rollback", "null", "not what this endpoint takes"),
        ("rollback", r#"["kiln-000042",true]"#, "a list"),
        ("rollback", r#"{"to":"kiln-000042"}"#, "unknown field `to`"),
        ("rollback", r#"{"snapshot":42}"#, "invalid type"),
        ("rollback", r#"{"snapshot":"kiln-000042","force":"yes"}"#, "invalid type"),
        ("rollback", r#"{"snapshot":"kiln-000042","snapshot":"kiln-000041"}"#, "duplicate field"),
        ("rollback", r#"{"snapshot":""}"#, "is not the name of a snapshot"),
        ("rollback", r#"{"snapshot":"latest"}"#, "kiln cache log"),
        ("rollback", r#"{"snapshot":"kiln-42"}"#, "one looks like kiln-000042"),
        ("rollback", r#"{"snapshot":"daily-000042"}"#, "is not the name of a snapshot"),
        ("rollback", r#"{"snapshot":"kiln-000042/../kiln-000041"}"#, "is not the name of a snapshot"),
        ("rollback", r#"{"snapshot":"pbcce5b6205652dd7@kiln-000042"}"#, "is not the name of a snapshot"),
        ("rollback", "{\"snapshot\":\"kiln-000042\\u001b[2J\"}", "is not the name of a snapshot"),
        ("rollback", "{\"snapshot\":\"kiln-000042\\u0000\"}", "is not the name of a snapshot"),
        ("rollback", r#"{"snapshot":"kiln-99999999999999999999"}"#, "is not the name of a snapshot"),
        ("rollback", &long, "is not the name of a snapshot"),
        ("reset", "", "not what this endpoint takes"),
        ("reset", "[]", "a list"),
        ("reset", r#"{"force":1}"#, "invalid type"),
        ("reset", r#"{"snapshot":"kiln-000042"}"#, "unknown field `snapshot`"),
    ] {
        let answer = server.post(&format!("{known}/{path}"), body).await;
        assert_eq!(answer.status, 400, "{path} {body}: {answer:?}");
        let error = answer.json::<ApiError>().error;
        assert!(error.contains(words) && error.len() < 400 && !error.contains('\u{1b}'), "{path} {body}: {error}");
    }
    for query in ["usage=perhaps", "usage", "measure=false"] {
        let answer = server.get(&format!("{known}/cache?{query}")).await;
        assert_eq!(answer.status, 400, "{query}");
        answer.json::<ApiError>();
    }
    for (method, path) in
        [("GET", "snapshots"), ("GET", "rollback"), ("DELETE", "cache"), ("POST", "cache"), ("GET", "reset")]
    {
        let answer = server.send(method, &format!("{known}/{path}"), "{}").await;
        assert_eq!(answer.status, 405, "{method} {path}");
        answer.json::<ApiError>();
    }
    assert!(server.heart.verbs.lock().expect("no panic").is_empty(), "what is malformed is not asked for");
}

#[tokio::test]
async fn where_the_bytes_are_is_one_answer() {
    let server = Server::start().await;
    let answer = server.get("/v1/caches").await;
    assert_eq!(answer.json::<DiskUsage>(), disk_usage());
    let raw = answer.json::<serde_json::Value>();
    assert_eq!(raw["caches"][0]["lastActivity"], "2026-11-29T00:00:00Z");
    assert_eq!(raw["caches"][0]["usage"]["used"], 1_u64 << 30);
    assert!(raw["caches"][1].get("usage").is_none(), "what is not known is not there: {raw}");
    assert_eq!(raw["sums"], serde_json::json!({"unique": 1_u64 << 30, "shared": 2_u64 << 30, "snapshots": 4096}));
}

#[tokio::test]
async fn a_snapshot_is_of_one_cache_and_a_build_is_not_cut_off_for_another_past() {
    let kiln = Kiln::start().await;
    kiln.host.set_cheap();
    let build = |repo: &str| format!(r#"{{"repo":"github.com/org/{repo}","arch":"amd64"}}"#);
    let (mine, other): (RouteResponse, RouteResponse) =
        (kiln.post("/route", &build("mine")).await.json(), kiln.post("/route", &build("other")).await.json());
    let path = |key: &Key, verb: &str| format!("/v1/projects/{key}/{verb}");
    let taken = kiln.post(&path(&other.key, "snapshots"), "").await;
    assert_eq!(taken.status, 201, "{taken:?}");
    let name = taken.json::<SnapshotView>().name;
    let log = kiln.send("GET", &path(&other.key, "cache"), "").await.json::<CacheView>();
    assert_eq!(log.snapshots.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), [name.as_str()]);

    let named = format!(r#"{{"snapshot":"{name}"}}"#);
    let answer = kiln.post(&path(&mine.key, "rollback"), &named).await;
    let error = answer.json::<ApiError>().error;
    assert_eq!(answer.status, 404, "{error}");
    assert!(error.contains(&name) && error.contains("kiln cache snapshot"), "{error}");
    for verb in ["rollback", "reset"] {
        let answer = kiln.post(&path(&other.key, verb), if verb == "reset" { "{}" } else { &named }).await;
        let error = answer.json::<ApiError>().error;
        assert_eq!(answer.status, 409, "{verb}: {error}");
        assert!(error.contains(&format!("kiln cache {verb} --force {}", other.key)), "{verb}: {error}");
    }
    let nobody = "p0123456789abcdef".parse().expect("a key");
    for (method, verb, body) in
        [("GET", "cache", ""), ("POST", "snapshots", ""), ("POST", "rollback", "{}"), ("POST", "reset", "{}")]
    {
        let answer = kiln.send(method, &path(&nobody, verb), body).await;
        assert_eq!(answer.status, 404, "{method} {verb}: {answer:?}");
        assert!(answer.json::<ApiError>().error.contains("kiln ps"), "{answer:?}");
    }

    let done = |build: &RouteResponse| {
        format!(r#"{{"key":"{}","buildId":"{}"}}"#, build.key, build.build_id.as_deref().unwrap_or_default())
    };
    assert_eq!(kiln.post("/complete", &done(&other)).await.status, 204);
    let back = kiln.post(&path(&other.key, "rollback"), &named).await;
    assert_eq!((back.status, back.json::<RolledBack>().snapshot), (200, name), "{back:?}");
    let shown = kiln.send("GET", &format!("/v1/projects/{}", other.key), "").await.json::<ProjectView>();
    assert_eq!((shown.role.as_str(), shown.project, shown.pull_request), ("project", None, None));
    assert!(shown.last_snapshot.is_some(), "{:?}", shown.last_snapshot);
}

#[tokio::test]
async fn a_pull_request_has_a_daemon_that_shows_whose_it_is_and_a_cache_without_a_past() {
    let kiln = Kiln::with(|config| config.untrusted = Ok(())).await;
    let of = |rest: &str| format!(r#"{{"repo":"github.com/org/repo","arch":"amd64","untrusted":true{rest}}}"#);
    let fork: RouteResponse = kiln.post("/route", &of(r#","pullRequest":"12""#)).await.json();
    let alone: RouteResponse = kiln.post("/route", &of("")).await.json();
    let project = fork.key.project();
    let whose = Key::of(&BuildSpec::new("github.com/org/repo", "", "", "amd64").expect("valid"));
    assert_eq!((&project, &fork.key, &alone.key), (&whose, &whose.pull_request("12"), &whose.fork()));
    assert_eq!(fork.server_name, fork.key.server_name("kiln.internal"));
    let listed = kiln.send("GET", "/v1/projects", "").await.json::<Vec<ProjectView>>();
    let shown: Vec<_> = listed
        .iter()
        .map(|one| (one.key.as_str(), one.role.as_str(), one.project.as_deref(), one.pull_request.as_deref()))
        .collect();
    let parent = Some(whose.as_str());
    assert_eq!(
        shown,
        [(fork.key.as_str(), "pull-request", parent, Some("12")), (alone.key.as_str(), "fork", parent, None)]
    );
    for (verb, body) in [("snapshots", ""), ("rollback", "{}"), ("rollback", r#"{"snapshot":"kiln-000001"}"#)] {
        let answer = kiln.post(&format!("/v1/projects/{}/{verb}", fork.key), body).await;
        let error = answer.json::<ApiError>().error;
        assert!(answer.status == 400 && error.contains(&format!("kiln cache log {whose}")), "{verb}: {error}");
        let nobody = kiln.post(&format!("/v1/projects/{}/{verb}", whose.pull_request("13")), body).await;
        assert_eq!(nobody.status, 404, "{verb}: {nobody:?}");
    }
    for odd in ["1 2", "\\u202e1", "\\u0000", &"1".repeat(129)] {
        let answer = kiln.post("/route", &of(&format!(r#","pullRequest":"{odd}""#))).await;
        assert!(answer.status == 400 && answer.body.contains("the pull request"), "{odd}: {answer:?}");
    }
}

#[tokio::test]
async fn more_forks_than_may_be_are_refused_and_told_when_to_come_again() {
    let kiln = Kiln::with(|config| {
        config.untrusted = Ok(());
        config.forks.per_project = 1;
    })
    .await;
    let of = |number| format!(r#"{{"repo":"h/o/r","arch":"amd64","untrusted":true,"pullRequest":"{number}"}}"#);
    assert_eq!(kiln.post("/route", &of(1)).await.status, 200);
    let answer = kiln.post("/route", &of(2)).await;
    assert!(answer.status == 429 && answer.is_plain() && answer.header("retry-after").is_some(), "{answer:?}");
    assert_eq!(kiln.post("/route", &of(1)).await.status, 200, "the one that is there takes builds");
}
