//! What happens to the database of a kilnd: its disk fills up or becomes read-only under it, and somebody edits it by
//! hand. Reads go on, what cannot be made durable is refused and says why, and nothing that was promised is lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::bad_places::Tmpfs;
use super::http::{self, Answer};
use super::stage::{Kilnd, Stage, is_root, real_buildkitd, until};

const REPO: &str = "example.com/o/r";

/// Routes that may find room in what the database has set aside already.
const MANY: usize = 20_000;

/// A stage whose caches are not where its state is.
fn stage(program: &Path) -> Stage {
    let mut stage = Stage::new("drain = '5s'");
    let caches = stage.dir.path().join("caches");
    fs::create_dir(&caches).expect("made");
    let more = format!("\n[volumes]\npath = '{}'\n[policy]\nmax_leases = 100000\n", caches.display());
    stage.more.push_str(&more);
    stage.install(program);
    stage
}

fn leases(kilnd: &Kilnd<'_>) -> usize {
    kilnd.project(REPO)["leases"].as_array().map_or(0, Vec::len)
}

/// The token of a lease.
#[track_caller]
fn route(kilnd: &Kilnd<'_>) -> String {
    let answer = kilnd.route(REPO);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["buildId"].as_str().expect("a token").to_owned()
}

/// Routes until one is refused; how many were answered, and the refusal.
#[track_caller]
fn route_until_refused(kilnd: &Kilnd<'_>) -> (usize, Answer) {
    for answered in 0..MANY {
        let answer = kilnd.route(REPO);
        if answer.status != 200 {
            return (answered, answer);
        }
    }
    panic!("{MANY} routes were answered with nowhere to write to");
}

/// The database can be read and not written: everything but that goes on.
#[track_caller]
fn only_writes_are_refused(stage: &Stage, kilnd: &Kilnd<'_>, build: &str, words: &str) {
    let daemons = stage.daemons();
    let before = leases(kilnd);
    let (answered, refusal) = route_until_refused(kilnd);
    assert!(matches!(refusal.status, 500 | 503), "{refusal:?}");
    for word in [words, "kiln.db"] {
        assert!(refusal.body.contains(word), "no {word:?} in {refusal:?}");
    }
    assert_eq!(leases(kilnd), before + answered, "a lease for each answer, and none for a refusal");
    // Its own write is smaller than a route's: there may be room for a few of it.
    until("it to say that it is not ready", || {
        let ready = kilnd.get("/readyz");
        ready.status == 503 && ready.body.contains(words)
    });
    let key = kilnd.project(REPO)["key"].as_str().expect("a key").to_owned();
    let released = kilnd.post("/complete", &format!(r#"{{"key":"{key}","buildId":"{build}"}}"#));
    assert!(matches!(released.status, 500 | 503), "{released:?}");
    assert_eq!(leases(kilnd), before + answered, "a release that was not written is none");
    assert_eq!((kilnd.project(REPO)["phase"].as_str(), stage.daemons()), (Some("warm"), daemons));
    kilnd.is_well();
}

#[test]
fn the_database_s_disk_becomes_full_under_it() {
    let Some(program) = real_buildkitd("a route on a full disk") else { return };
    let stage = stage(&program);
    let Some(mounted) = Tmpfs::new(&stage.state(), "size=16m") else { return };
    let kilnd = stage.start();
    let build = route(&kilnd);
    mounted.fill();
    only_writes_are_refused(&stage, &kilnd, &build, "full");
    let known = leases(&kilnd);
    // With room again it goes on by itself, also after the worst.
    mounted.clear();
    until("routes to be answered again", || kilnd.route(REPO).status == 200);
    let known = leases(&kilnd).max(known);
    kilnd.kill();
    let kilnd = stage.start();
    assert_eq!(leases(&kilnd), known);
    until("it to be ready", || kilnd.get("/readyz").status == 200);
}

/// A file system in a file, which can be made to fail as a disk does.
struct Ext4(PathBuf);

impl Ext4 {
    fn new(image: &Path, at: &Path) -> Option<Self> {
        if !is_root("mounting a file system") {
            return None;
        }
        fs::create_dir(at).expect("made");
        fs::File::create(image).and_then(|file| file.set_len(64 << 20)).expect("made");
        let run = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output().map_err(|error| error.to_string())?;
            if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
        };
        let (image, shown) = (image.display().to_string(), at.display().to_string());
        let mounted = run("mkfs.ext4", &["-q", "-E", "root_owner=0:0", &image])
            .and_then(|()| run("mount", &["-o", "loop", &image, &shown]));
        match mounted {
            Ok(()) => Some(Self(at.to_owned())),
            Err(why) => {
                eprintln!("skipped: no ext4 can be mounted: {why}");
                None
            }
        }
    }

    /// As the kernel does when the disk does not take its writes any more.
    fn become_read_only(&self) {
        let aborted = Command::new("mount").args(["-o", "remount,abort"]).arg(&self.0).status().expect("mount");
        // The kernel may say that it could not be remounted; what counts is that nothing can be written.
        let written = fs::write(self.0.join("probe"), "x").and_then(|()| fs::File::open(&self.0)?.sync_all());
        assert!(written.is_err(), "it can still be written to ({aborted})");
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn the_database_s_disk_becomes_read_only_under_it() {
    let Some(program) = real_buildkitd("a route on a read-only disk") else { return };
    let stage = stage(&program);
    let image = stage.dir.path().join("state.img");
    let Some(mounted) = Ext4::new(&image, &stage.state()) else { return };
    let kilnd = stage.start();
    let build = route(&kilnd);
    mounted.become_read_only();
    only_writes_are_refused(&stage, &kilnd, &build, "read-only");
}

/// A daemon that never answers, for as long as there is its program, and no `buildkitd.ends` beside it. Not `exec sleep`: what runs under
/// another name is not taken for the daemon, but for one that died.
const NEVER_ANSWERS: &str = r#"while [ -e "$0" ] && [ ! -e "$0.ends" ]; do sleep 0.05; done"#;

/// A project without a daemon that works: its cache is made before its daemon is started.
fn failed_project(kilnd: &Kilnd<'_>, repo: &str) -> String {
    assert_eq!(kilnd.route(repo).status, 500);
    kilnd.project(repo)["key"].as_str().expect("a key").to_owned()
}

fn edit(stage: &Stage, sql: &str) {
    let database = rusqlite::Connection::open(stage.database()).expect("opened");
    assert_eq!(database.execute(sql, []).expect("edited"), 1, "{sql}");
}

#[test]
fn a_key_that_was_renamed_by_hand_is_told_of_and_spoils_nothing_else() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    let key = failed_project(&kilnd, REPO);
    let other = failed_project(&kilnd, "example.com/o/other");
    assert_eq!(kilnd.terminate().1, Some(0));
    edit(&stage, &format!("UPDATE projects SET key = 'p0123456789abcdef' WHERE key = '{key}'"));
    let kilnd = stage.start();
    let log = kilnd.log();
    assert!(log.contains("p0123456789abcdef") && log.contains("is damaged and left alone"), "{log}");
    until("the journal to tell", || kilnd.get("/v1/events?follow=false&after=0").body.contains(r#""kind":"damaged""#));
    assert_eq!(kilnd.project("example.com/o/other")["key"], other.as_str());
    assert!(kilnd.get("/v1/projects/p0123456789abcdef").status >= 400, "nobody gets what belongs to another");
    // Its owner gets a record of its own again, and the cache that was its.
    assert_eq!(failed_project(&kilnd, REPO), key);
    let orphans = kilnd.get("/v1/orphans");
    assert_eq!((orphans.status, orphans.json().as_array().map(Vec::len)), (200, Some(0)), "{orphans:?}");
    kilnd.is_well();
}

#[test]
fn a_project_whose_row_was_spoilt_by_hand_comes_back_with_a_rebuild() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    let key = failed_project(&kilnd, REPO);
    assert_eq!(kilnd.terminate().1, Some(0));
    edit(&stage, "UPDATE projects SET phase = 'dancing', phase_reason = NULL");
    let kilnd = stage.start();
    let answer = kilnd.get(&format!("/v1/projects/{key}"));
    assert_eq!((answer.status, answer.body.contains("`kilnd --rebuild`")), (500, true), "{answer:?}");
    assert_eq!(kilnd.terminate().1, Some(0));
    let kilnd = stage.start_with(&["--rebuild"]);
    assert_eq!(failed_project(&kilnd, REPO), key);
    let orphans = kilnd.get("/v1/orphans").json();
    assert_eq!(orphans.as_array().map(Vec::len), Some(0), "{orphans}");
    let removed = http::delete(&stage.socket(), &format!("/v1/projects/{key}")).expect("an answer");
    assert_eq!(removed.status, 204, "{removed:?}");
}

/// What a backup or an admin's `sqlite3` does, for longer than a write waits.
#[test]
fn a_database_that_another_program_holds_is_not_now() {
    let stage = Stage::with_script(NEVER_ANSWERS, "");
    let kilnd = stage.start();
    let route = || kilnd.post("/route?wait=0", &format!(r#"{{"repo":"{REPO}","arch":"amd64"}}"#));
    let leased = route();
    assert_eq!(leased.status, 202, "{leased:?}");
    let leased = leased.json();
    let [key, lease, build] = ["key", "leaseId", "buildId"].map(|name| leased[name].as_str().expect("text").to_owned());
    let other = rusqlite::Connection::open(stage.database()).expect("opened");
    other.busy_timeout(super::stage::DEADLINE).expect("set");
    other.execute_batch("BEGIN IMMEDIATE").expect("held");
    let not_now = |answer: Answer| {
        assert_eq!(answer.status, 503, "{answer:?}");
        assert!(answer.head.contains("retry-after: "), "{answer:?}");
        assert!(answer.body.contains("kiln.db locked: a backup, or `sqlite3`?"), "{answer:?}");
    };
    let settings = format!("PATCH /v1/projects/{key}/settings HTTP/1.1\r\nhost: kiln\r\nconnection: close\r\n");
    let settings = format!("{settings}content-length: 14\r\n\r\n{{\"tier\":\"hot\"}}");
    let token = format!(r#"{{"buildId":"{build}"}}"#);
    std::thread::scope(|scope| {
        scope.spawn(|| not_now(route()));
        scope.spawn(|| not_now(kilnd.route("example.com/o/new")));
        scope.spawn(|| not_now(kilnd.post(&format!("/v1/leases/{lease}/renew"), &token)));
        scope.spawn(|| not_now(http::send(&stage.socket(), settings.as_bytes()).expect("an answer")));
    });
    not_now(kilnd.post("/complete", &format!(r#"{{"key":"{key}","buildId":"{build}"}}"#)));
    other.execute_batch("ROLLBACK").expect("given back");
    assert_eq!(route().status, 202);
    assert_eq!(kilnd.post(&format!("/v1/leases/{lease}/renew"), &token).status, 200, "a lease is lost to no lock");
}

/// There is no cache whose way to the trash would take them along.
#[test]
fn a_project_without_a_cache_leaves_no_certificates_when_it_is_removed() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    let key = failed_project(&kilnd, REPO);
    let certificates = ["pki", "daemons"].map(|place| stage.state().join(place).join(&key));
    assert!(certificates.iter().all(|directory| directory.is_dir()), "{certificates:?}");
    fs::remove_dir_all(stage.state().join("volumes/live").join(&key)).expect("lost");
    let removed = http::delete(&stage.socket(), &format!("/v1/projects/{key}")).expect("an answer");
    assert_eq!(removed.status, 204, "{removed:?}");
    assert!(!certificates.iter().any(|directory| directory.exists()), "{certificates:?}");
    assert_eq!(kilnd.get("/v1/trash").json().as_array().map(Vec::len), Some(0));
}

/// Two caches cannot have one place: neither is lost, and the answer says how to swap them.
#[test]
fn a_cache_is_not_restored_over_another() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    let key = failed_project(&kilnd, REPO);
    let remove = || http::delete(&stage.socket(), &format!("/v1/projects/{key}")).expect("an answer").status;
    assert_eq!(remove(), 204);
    let trash = || kilnd.get("/v1/trash").json();
    let name = trash()[0]["name"].as_str().expect("a name").to_owned();
    let restore = || kilnd.post(&format!("/v1/trash/{name}/restore"), "");
    let refused = |why: &str| {
        let answer = restore();
        assert_eq!(answer.status, 409, "{answer:?}");
        for words in [why, &format!("`kiln rm {key}`"), "and then restore this one"] {
            assert!(answer.body.contains(words), "no {words:?} in {answer:?}");
        }
        assert_eq!(trash()[0]["name"], name.as_str(), "it stays where it is");
    };
    assert_eq!(failed_project(&kilnd, REPO), key);
    refused("has another cache in its place");
    // And under a daemon, be it only on its way.
    stage.set_buildkitd(NEVER_ANSWERS);
    let waiting = kilnd.post("/route?wait=0", &format!(r#"{{"repo":"{REPO}","arch":"amd64"}}"#));
    assert_eq!(waiting.status, 202, "{waiting:?}");
    until("it to be on its way", || kilnd.project(REPO)["phase"] == "starting");
    refused("is starting with a cache of its own");
    let token = waiting.json()["buildId"].as_str().expect("a token").to_owned();
    let released = kilnd.post("/complete", &format!(r#"{{"key":"{key}","buildId":"{token}"}}"#));
    assert_eq!(released.status, 204, "{released:?}");
    fs::write(stage.buildkitd().with_extension("ends"), "").expect("written");
    until("it to be removed", || remove() == 204);
    let answer = restore();
    assert_eq!((answer.status, answer.json()["key"].as_str()), (200, Some(key.as_str())), "{answer:?}");
}

/// Killed when the cache is back in its place and its project is not in the database yet.
#[test]
fn a_return_from_the_trash_that_a_crash_cut_short_is_finished_by_the_next_try() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    let key = failed_project(&kilnd, REPO);
    let removed = http::delete(&stage.socket(), &format!("/v1/projects/{key}")).expect("an answer");
    assert_eq!(removed.status, 204, "{removed:?}");
    let name = kilnd.get("/v1/trash").json()[0]["name"].as_str().expect("a name").to_owned();
    let restore = |kilnd: &Kilnd<'_>| kilnd.post(&format!("/v1/trash/{name}/restore"), "");
    assert_eq!(restore(&kilnd).status, 200);
    assert_eq!(kilnd.terminate().1, Some(0));
    edit(&stage, &format!("DELETE FROM projects WHERE key = '{key}'"));
    let kilnd = stage.start();
    let orphans = kilnd.get("/v1/orphans").json();
    assert_eq!((&orphans[0]["key"], &orphans[0]["adoptable"]), (&key.as_str().into(), &true.into()), "{orphans}");
    let answer = restore(&kilnd);
    assert_eq!((answer.status, answer.json()["key"].as_str()), (200, Some(key.as_str())), "{answer:?}");
    assert_eq!(kilnd.project(REPO)["key"], key.as_str());
    assert_eq!(kilnd.get("/v1/orphans").json().as_array().map(Vec::len), Some(0));
    // It is not there a second time.
    let again = restore(&kilnd);
    assert_eq!((again.status, again.body.contains("kiln trash ls")), (404, true), "{again:?}");
}
