//! `/v1/orphans` and `/v1/trash`.

use kiln_wire::{ApiError, Emptied, Taken};

use super::*;

#[tokio::test]
async fn orphans_are_listed_adopted_and_removed() {
    let server = Server::start().await;
    assert_eq!(server.get("/v1/orphans").await.json::<Vec<Orphan>>(), [orphan()]);
    let taken = server.post("/v1/orphans/adopt", r#"{"name":"buildkitd-x"}"#).await.json::<Taken>();
    assert_eq!(taken.key, view().key);
    let named = r#"{"kind":"instance","name":"buildkitd-x"}"#;
    assert_eq!(server.post("/v1/orphans/adopt", named).await.status, 200);
    let answer = server.post("/v1/orphans/remove", named).await;
    assert_eq!((answer.status, answer.body.as_str()), (204, ""));
    assert_eq!(
        *server.heart.verbs.lock().expect("no panic"),
        ["orphans", "adopt None buildkitd-x", "adopt Some(Instance) buildkitd-x", "remove orphan instance buildkitd-x"]
    );
    let in_its_folder = r#"{"kind":"volume","name":"live/pbcce5b6205652dd7"}"#;
    assert_eq!(server.post("/v1/orphans/adopt", in_its_folder).await.status, 200);
    assert_eq!(server.post("/v1/orphans/remove", in_its_folder).await.status, 204);
    assert_eq!(
        server.heart.verbs.lock().expect("no panic")[4..],
        ["adopt Some(Volume) live/pbcce5b6205652dd7", "remove orphan volume live/pbcce5b6205652dd7"]
    );
    let long = format!(r#"{{"kind":"volume","name":"{}"}}"#, "x".repeat(256));
    for (path, body, words) in [
        ("adopt", "{}", "missing field `name`"),
        ("adopt", r#"{"name":""}"#, "is not a name"),
        ("adopt", r#"{"name":"../etc"}"#, "is not a name"),
        ("adopt", r#"{"name":"live/../etc"}"#, "is not a name"),
        ("adopt", r#"{"name":"etc/passwd"}"#, "is not a name"),
        ("adopt", r#"{"name":"a b"}"#, "is not a name"),
        ("adopt", "{\"name\":\"a\\u001b[2J\"}", "is not a name"),
        ("adopt", r#"{"kind":"pod","name":"x"}"#, "unknown variant"),
        ("remove", r#"{"name":"x"}"#, "missing field `kind`"),
        ("remove", r#"{"kind":null,"name":"x"}"#, "not what this endpoint takes"),
        ("remove", r#"{"kind":"volume","name":"-rf"}"#, "is not a name"),
        ("remove", &long, "is not a name"),
        ("remove", "", "not what this endpoint takes"),
    ] {
        let answer = server.post(&format!("/v1/orphans/{path}"), body).await;
        assert_eq!(answer.status, 400, "{path} {body}: {answer:?}");
        assert!(answer.json::<ApiError>().error.contains(words), "{path} {body}: {answer:?}");
    }
    assert_eq!(server.heart.verbs.lock().expect("no panic").len(), 6, "what is malformed is not asked for");
}

#[tokio::test]
async fn the_trash_is_listed_given_back_and_emptied() {
    let server = Server::start().await;
    let name = trashed().name;
    assert_eq!(server.get("/v1/trash").await.json::<Vec<Trashed>>(), [trashed()]);
    let taken = server.post(&format!("/v1/trash/{name}/restore"), "").await.json::<Taken>();
    assert_eq!(taken.key, view().key);
    assert_eq!(server.send("DELETE", &format!("/v1/trash/{name}"), "").await.status, 204);
    assert_eq!(server.send("DELETE", "/v1/trash", "").await.json::<Emptied>().removed, 3);
    assert_eq!(
        *server.heart.verbs.lock().expect("no panic"),
        ["trash".to_owned(), format!("restore {name}"), format!("discard {name}"), "empty".to_owned()]
    );
    for name in ["..%2f..%2fetc", ".hidden", "-rf", "%20", "%ff", "a%00b"] {
        for (method, path) in [("POST", format!("/v1/trash/{name}/restore")), ("DELETE", format!("/v1/trash/{name}"))] {
            let answer = server.send(method, &path, "").await;
            assert_eq!(answer.status, 400, "{method} {path}: {answer:?}");
            assert!(answer.json::<ApiError>().error.contains("is not a name"), "{answer:?}");
        }
    }
    // An empty name is the whole trash to a careless client: it must be no way to empty it.
    assert_eq!(server.send("DELETE", "/v1/trash/", "").await.status, 404);
}
