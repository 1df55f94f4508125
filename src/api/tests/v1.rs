//! `/v1`: projects, leases, and the document that describes all of it.

use kiln_domain::Tier;
use kiln_wire::{ApiError, Change};

use super::*;

#[tokio::test]
async fn projects_are_listed_shown_and_stopped() {
    let server = Server::start().await;
    let known = format!("/v1/projects/{}", view().key);
    assert_eq!(server.get("/v1/projects").await.json::<Vec<ProjectView>>(), [view()]);
    assert_eq!(server.get(&known).await.json::<ProjectView>(), view());
    assert_eq!(server.post(&format!("{known}/stop"), "").await.status, 204);
    for (path, status, words) in [
        ("/v1/projects/p0123456789abcdef", 404, "there is no project p0123456789abcdef"),
        ("/v1/projects/nonsense", 400, "is not a key"),
        ("/v1/nothing", 404, "openapi"),
    ] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, status, "{path}");
        assert!(answer.json::<ApiError>().error.contains(words), "{answer:?}");
    }
    let answer = server.post("/v1/projects", "").await;
    assert_eq!(answer.status, 405);
    answer.json::<ApiError>();
    assert_eq!(server.post(&format!("{known}/stop?force=true"), "").await.status, 204);
    assert_eq!(server.post(&format!("{known}/stop?force=false"), "").await.status, 204);
    assert_eq!(server.send("DELETE", &known, "").await.status, 204);
    let why = server.get(&format!("{known}/why")).await.json::<Why>();
    assert_eq!(why.headline, "It is warm.");
    let key = view().key;
    assert_eq!(
        *server.heart.verbs.lock().expect("no panic"),
        ["false", "true", "false"]
            .map(|force| format!("stop {key} {force}"))
            .into_iter()
            .chain([format!("remove {key}"), format!("why {key}")])
            .collect::<Vec<_>>()
    );
    for query in ["force=perhaps", "force", "forec=true"] {
        let answer = server.post(&format!("{known}/stop?{query}"), "").await;
        assert_eq!(answer.status, 400, "{query}");
        answer.json::<ApiError>();
    }
    for (method, path) in [
        ("DELETE", ""),
        ("GET", "/why"),
        ("POST", "/stop"),
        ("PATCH", "/settings"),
        ("GET", "/cache"),
        ("POST", "/snapshots"),
        ("POST", "/rollback"),
        ("POST", "/reset"),
    ] {
        let answer = server.send(method, &format!("/v1/projects/nonsense{path}"), "{}").await;
        assert_eq!(answer.status, 400, "{method} {path}");
        assert!(answer.json::<ApiError>().error.contains("is not a key"), "{answer:?}");
    }
    let fault = server.post("/v1/projects/forkpbcce5b6205652dd7/stop", "").await;
    assert_eq!(fault.status, 500, "a fault in one request ends that request");
    assert_eq!(server.get("/nothing").await.status, 404);
}

/// `KILN_BLESS=1 cargo test openapi` writes it anew.
#[tokio::test]
async fn the_openapi_document_is_the_one_that_is_checked_in() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/openapi.json");
    if std::env::var_os("KILN_BLESS").is_some() {
        std::fs::write(path, openapi()).expect("writes");
    }
    let checked_in = std::fs::read_to_string(path).expect("docs/openapi.json is there");
    assert!(
        checked_in == openapi(),
        "docs/openapi.json is stale: KILN_BLESS=1 cargo test openapi, and look at the diff"
    );
    let server = Server::start().await;
    let document = server.get("/v1/openapi.json").await.json::<serde_json::Value>();
    assert_eq!(document, serde_json::from_str::<serde_json::Value>(&checked_in).expect("JSON"));
    for path in [
        "/route",
        "/prewarm",
        "/complete",
        "/v1/projects",
        "/v1/projects/{key}/cache",
        "/v1/projects/{key}/snapshots",
        "/v1/projects/{key}/rollback",
        "/v1/projects/{key}/reset",
        "/v1/caches",
        "/v1/events",
        "/readyz",
        "/metrics",
        "/v1/trash/{name}",
    ] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
    assert!(document["paths"]["/v1/projects/{key}"]["delete"].is_object());
}

#[tokio::test]
async fn each_failure_of_a_verb_has_its_status() {
    let server = Server::start().await;
    let key = || view().key.parse::<Key>().expect("a key");
    let soon = Duration::from_millis(1500);
    let calls = [
        ("POST", format!("/v1/projects/{}/stop", key()), ""),
        ("DELETE", format!("/v1/projects/{}", key()), ""),
        ("GET", format!("/v1/projects/{}/why", key()), ""),
        ("PATCH", format!("/v1/projects/{}/settings", key()), r#"{"cpus":2}"#),
        ("GET", format!("/v1/projects/{}/cache", key()), ""),
        ("POST", format!("/v1/projects/{}/snapshots", key()), ""),
        ("POST", format!("/v1/projects/{}/rollback", key()), "{}"),
        ("POST", format!("/v1/projects/{}/reset", key()), "{}"),
        ("GET", "/v1/caches".to_owned(), ""),
        ("GET", "/v1/orphans".to_owned(), ""),
        ("POST", "/v1/orphans/adopt".to_owned(), r#"{"name":"x"}"#),
        ("POST", "/v1/orphans/remove".to_owned(), r#"{"kind":"volume","name":"x"}"#),
        ("GET", "/v1/trash".to_owned(), ""),
        ("DELETE", "/v1/trash".to_owned(), ""),
        ("DELETE", "/v1/trash/x".to_owned(), ""),
        ("POST", "/v1/trash/x/restore".to_owned(), ""),
    ];
    for (method, path, body) in calls {
        for (error, status, words) in [
            (VerbError::NoProject(key()), 404, "kiln ps"),
            (
                VerbError::NotThere { what: "volume", name: "x".into(), remedy: "list them" },
                404,
                "volume \"x\": list them",
            ),
            (VerbError::Impossible("cpus = 0: at least one".into()), 400, "at least one"),
            (
                VerbError::Busy { key: key(), need: "1 live lease(s)".into() },
                409,
                "kiln stop --force pbcce5b6205652dd7",
            ),
            (
                VerbError::InUse { key: key(), need: "1 live lease(s)".into(), verb: "rollback" },
                409,
                "kiln cache rollback --force pbcce5b6205652dd7",
            ),
            (
                VerbError::NoSnapshot { why: "it has none".into(), remedy: "take one".into() },
                404,
                "it has none; take one",
            ),
            (VerbError::Taken("it has another cache".into()), 409, "another cache"),
            (VerbError::Unavailable { why: "Incus is away".into(), retry_after: soon }, 503, "Incus is away"),
            (VerbError::Failed("it hangs".into()), 500, "it hangs"),
        ] {
            *server.heart.verb_fails.lock().expect("no panic") = Some(error);
            let answer = server.send(method, &path, body).await;
            assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
            assert!(answer.json::<ApiError>().error.contains(words), "{method} {path}: {answer:?}");
            assert_eq!(answer.header("retry-after"), (status == 503).then_some("2"), "{method} {path}");
        }
    }
}

#[tokio::test]
async fn settings_are_changed_one_by_one() {
    let server = Server::start().await;
    let path = format!("/v1/projects/{}/settings", view().key);
    let change = async |body: &str| server.send("PATCH", &path, body).await;
    let all = r#"{"tier":"hot","idleWindow":null,"volume":"20GiB","volumeMax":"40GiB","memory":"512 MiB","cpus":4,
        "processes":null,"io":"50MiB","entitlements":["network.host"],"fanOut":0}"#;
    assert_eq!(change(all).await.json::<ProjectView>(), view());
    assert_eq!(change(r#"{"tier":"warm","idleWindow":"1h 30m"}"#).await.status, 200);
    let verbs = server.heart.verbs.lock().expect("no panic").clone();
    let expected = SettingsChange {
        tier: Change::To(Tier::Hot),
        idle_window: Change::Reset,
        volume_bytes: Change::To(20 << 30),
        volume_max_bytes: Change::To(40 << 30),
        memory_bytes: Change::To(512 << 20),
        cpus: Change::To(4),
        processes: Change::Reset,
        io_bytes: Change::To(50 << 20),
        entitlements: Change::To([kiln_domain::Entitlement::NetworkHost].into()),
        fan_out: Change::To(0),
    };
    assert_eq!(verbs[0], format!("set {} {expected:?}", view().key));
    let window = Change::To(Duration::from_secs(5400));
    let expected = SettingsChange { tier: Change::To(Tier::Warm), idle_window: window, ..SettingsChange::default() };
    assert_eq!(verbs[1], format!("set {} {expected:?}", view().key));
    for (body, words) in [
        ("{}", "nothing is to be changed"),
        ("", "not what this endpoint takes"),
        (r#"{"tier":"cold"}"#, "it is warm or hot"),
        (r#"{"tier":""}"#, "it is warm or hot"),
        (r#"{"idleWindow":"soon"}"#, "idleWindow is \"soon\""),
        (r#"{"idleWindow":"900"}"#, "write it as"),
        (r#"{"idleWindow":900}"#, "invalid type"),
        (r#"{"volume":"20GB"}"#, "20GiB"),
        (r#"{"volumeMax":"40"}"#, "volumeMax is"),
        (r#"{"fanOut":65536}"#, "invalid value"),
        (r#"{"memory":"-1GiB"}"#, "memory is"),
        (r#"{"cpus":"4"}"#, "invalid type"),
        (r#"{"cpus":-1}"#, "invalid value"),
        (r#"{"processes":4294967296}"#, "invalid value"),
        (r#"{"io":"fast"}"#, "io is"),
        (r#"{"entitlements":["device"]}"#, "security.insecure or network.host"),
        (r#"{"entitlements":"network.host"}"#, "invalid type"),
        (r#"{"arch":"arm64"}"#, "unknown field `arch`"),
        (r#"{"cpus":1,"cpus":2}"#, "duplicate field"),
        (r#"[{"cpus":1}]"#, "a list"),
    ] {
        let answer = change(body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(answer.json::<ApiError>().error.contains(words), "{body}: {answer:?}");
    }
    assert_eq!(server.heart.verbs.lock().expect("no panic").len(), 2, "what is malformed is not asked for");
}

#[tokio::test]
async fn a_lease_is_renewed_by_whoever_holds_its_token() {
    let server = Server::start().await;
    let token = LeaseToken::from_random(TOKEN);
    let (hash, other) = (token.hash(), LeaseToken::from_random([1; 8]).hash());
    let body = format!(r#"{{"buildId":"{}"}}"#, token.reveal());
    let renew = async |id: &str, body: &str| server.post(&format!("/v1/leases/{id}/renew"), body).await;
    assert_eq!(renew(hash.as_str(), &body).await.json::<LeaseView>().id, hash.as_str());
    for id in [other.as_str(), &hash.as_str()[..63], "x", &hash.as_str().to_uppercase(), "%ff", token.reveal()] {
        let answer = renew(id, &body).await;
        assert_eq!(answer.status, 404, "{id}");
        assert!(!answer.json::<ApiError>().error.contains(token.reveal()), "a token in an answer");
    }
    for (body, words) in [
        ("{}", "missing field"),
        (r#"{"buildId":""}"#, "malformed buildId"),
        (r#"{"buildId":null}"#, "invalid type"),
        (r#"{"buildId":"abababababababag"}"#, "malformed buildId"),
        (r#"{"buildId":"abababababababab","x":1}"#, "unknown field"),
    ] {
        let answer = renew(hash.as_str(), body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(answer.json::<ApiError>().error.contains(words), "{body}: {answer:?}");
    }
    let later = RenewError::Unavailable { why: "full".to_owned(), retry_after: Duration::ZERO };
    for (error, status) in
        [(RenewError::Unknown, 404), (RenewError::Ended, 410), (later, 503), (RenewError::Failed("x".into()), 500)]
    {
        *server.heart.renew_fails.lock().expect("no panic") = Some(error);
        let answer = renew(hash.as_str(), &body).await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.header("retry-after"), (status == 503).then_some("1"));
        answer.json::<ApiError>();
    }
    assert_eq!(server.get(&format!("/v1/leases/{}/renew", hash.as_str())).await.status, 405);
}
