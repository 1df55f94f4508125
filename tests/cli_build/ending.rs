//! Builds that end early or badly: a routed one is released whatever happens.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use super::stage::{COMPLETE, Stage, stderr, until};

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
