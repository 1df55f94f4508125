//! A lease while it is waited with, and while it is built with.

use std::fs;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::stage::{COMPLETE, Stage, stderr, until};

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
