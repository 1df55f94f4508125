//! A cache whose project the database has lost: it is adopted or removed by the name it is listed under.

use std::process::{Command, Output};

use super::stage::{Kilnd, Stage, until};

const REPO: &str = "example.com/o/r";

/// A project with a cache, of which the database forgets: its key. Nothing runs.
fn forgotten(stage: &Stage) -> String {
    let kilnd = stage.start();
    // A daemon that does not start: its cache is made before.
    assert_eq!(kilnd.route(REPO).status, 500);
    let key = kilnd.project(REPO)["key"].as_str().expect("a key").to_owned();
    until("the build to be over", || kilnd.project(REPO)["leases"].as_array().is_some_and(Vec::is_empty));
    assert_eq!(kilnd.terminate().1, Some(0));
    let database = rusqlite::Connection::open(stage.database()).expect("opened");
    assert_eq!(database.execute("DELETE FROM projects WHERE key = ?1", [&key]).expect("edited"), 1);
    key
}

/// The names of the orphans that are volumes.
#[track_caller]
fn caches(kilnd: &Kilnd<'_>) -> Vec<String> {
    let orphans = kilnd.get("/v1/orphans").json();
    let caches = orphans.as_array().expect("a list").iter().filter(|orphan| orphan["kind"] == "volume");
    caches.map(|orphan| orphan["name"].as_str().expect("a name").to_owned()).collect()
}

fn kiln(stage: &Stage, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.args(arguments).env_remove("KILN_URL").env("KILN_SOCKET", stage.socket());
    command.output().expect("run")
}

#[test]
fn a_cache_is_adopted_by_the_name_it_is_listed_under() {
    for by_client in [false, true] {
        let stage = Stage::with_script("exit 1", "");
        let key = forgotten(&stage);
        let kilnd = stage.start();
        let name = format!("live/{key}");
        assert_eq!(caches(&kilnd), [name.as_str()]);
        if by_client {
            let adopted = kiln(&stage, &["orphans", "adopt", &name]);
            assert!(adopted.status.success(), "{adopted:?}");
        } else {
            let adopted = kilnd.post("/v1/orphans/adopt", &format!(r#"{{"name":"{name}"}}"#));
            assert_eq!((adopted.status, adopted.json()["key"].as_str()), (200, Some(key.as_str())), "{adopted:?}");
        }
        assert_eq!(kilnd.project(REPO)["key"], key.as_str());
        assert_eq!(kilnd.get("/v1/orphans").json().as_array().map(Vec::len), Some(0), "with all that is its");
    }
}

#[test]
fn a_cache_is_removed_by_the_name_it_is_listed_under() {
    for by_client in [false, true] {
        let stage = Stage::with_script("exit 1", "");
        let key = forgotten(&stage);
        let kilnd = stage.start();
        let name = format!("live/{key}");
        assert_eq!(caches(&kilnd), [name.as_str()]);
        if by_client {
            let removed = kiln(&stage, &["orphans", "rm", "volume", &name]);
            assert!(removed.status.success(), "{removed:?}");
        } else {
            let removed = kilnd.post("/v1/orphans/remove", &format!(r#"{{"kind":"volume","name":"{name}"}}"#));
            assert_eq!(removed.status, 204, "{removed:?}");
        }
        assert!(caches(&kilnd).is_empty());
        assert_eq!(kilnd.get("/v1/trash").json()[0]["key"], key.as_str(), "it can still be had back");
    }
}
