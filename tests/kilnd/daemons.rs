//! A buildkitd that is missing, goes at once, or never answers: the route says why, in time, and once it is mended the
//! next one works.

use std::time::{Duration, Instant};

use super::http::Answer;
use super::stage::{DEADLINE, Kilnd, Stage, real_buildkitd};

const REPO: &str = "example.com/o/r";
const QUICK: &str = "ready_within = '2s'\ndrain = '1s'";

/// A route that must fail, with all these words in its answer and in what /v1 shows.
#[track_caller]
fn fails(kilnd: &Kilnd<'_>, within: Duration, status: u16, words: &[&str]) -> Answer {
    let start = Instant::now();
    let answer = kilnd.route(REPO);
    assert!(start.elapsed() < within, "{:?}", start.elapsed());
    assert_eq!(answer.status, status, "{answer:?}");
    let project = kilnd.project(REPO);
    assert_eq!(project["phase"], "failed", "{project}");
    assert_eq!(project["leases"].as_array().map(Vec::len), Some(0), "{project}");
    let reason = project["reason"].as_str().expect("a reason");
    for word in words {
        assert!(answer.body.contains(word), "no {word:?} in {answer:?}");
        assert!(reason.contains(word), "no {word:?} in {reason:?}");
    }
    kilnd.is_well();
    answer
}

/// With the real program in its place.
fn works_when_mended(stage: &Stage, kilnd: &Kilnd<'_>) {
    let Some(program) = real_buildkitd("routing to a buildkitd that was mended") else { return };
    stage.install(&program);
    let answer = kilnd.route(REPO);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["ready"], true);
    assert_eq!(kilnd.project(REPO)["phase"], "warm");
    assert_eq!(stage.daemons().len(), 1);
}

#[test]
fn one_that_is_missing() {
    let stage = Stage::new(QUICK);
    let kilnd = stage.start();
    let program = stage.buildkitd().display().to_string();
    for _ in 0..2 {
        fails(&kilnd, Duration::from_secs(5), 500, &["there is no program", &program, "name another buildkitd"]);
    }
    works_when_mended(&stage, &kilnd);
}

#[test]
fn one_that_is_no_program() {
    let stage = Stage::new(QUICK);
    let kilnd = stage.start();
    std::fs::write(stage.buildkitd(), "hello").expect("written");
    fails(&kilnd, Duration::from_secs(5), 500, &["may not be executed", "chmod 0755"]);
    works_when_mended(&stage, &kilnd);
}

#[test]
fn one_that_goes_at_once() {
    let stage = Stage::with_script("echo 'the moon is in the wrong quarter' >&2\nexit 3", QUICK);
    let kilnd = stage.start();
    for _ in 0..5 {
        fails(&kilnd, Duration::from_secs(5), 500, &["last words", "the moon is in the wrong quarter"]);
    }
    super::stage::until("the dead to be buried", || kilnd.zombies().is_empty());
    assert!(stage.daemons().is_empty());
    works_when_mended(&stage, &kilnd);
}

#[test]
fn one_that_never_answers() {
    let stage = Stage::with_script("echo 'thinking about it'\nwhile :; do sleep 0.1; done", QUICK);
    let kilnd = stage.start();
    fails(&kilnd, Duration::from_secs(8), 504, &["does not serve", "thinking about it"]);
    assert!(stage.daemons().len() <= 1);
    works_when_mended(&stage, &kilnd);
    assert!(kilnd.zombies().is_empty(), "{:?}", kilnd.zombies());
}

/// It takes connections and says nothing, on the address that the daemon should have.
#[test]
fn one_whose_address_somebody_else_has() {
    let stage = Stage::with_script("echo 'listen tcp: address already in use' >&2\nsleep 0.3\nexit 1", QUICK);
    let kilnd = stage.start();
    fails(&kilnd, Duration::from_secs(5), 500, &["address already in use"]);
    let address = kilnd.project(REPO)["address"].as_str().expect("an address").to_owned();
    let _squatter = std::net::TcpListener::bind(&address).expect("bound");
    let start = Instant::now();
    fails(&kilnd, Duration::from_secs(8), 500, &["address already in use"]);
    assert!(start.elapsed() < DEADLINE);
    kilnd.is_well();
}
