//! A log or an output that cannot be written: lines are lost, and nothing else.

use std::fs::File;
use std::process::Stdio;

use super::stage::Stage;

fn full() -> File {
    File::options().write(true).open("/dev/full").expect("opened")
}

/// A pipe that nobody reads any more.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

#[test]
fn a_log_that_cannot_be_written_ends_nothing() {
    for stderr in [full().into(), closed()] {
        let stage = Stage::new("");
        let kilnd = stage.start_logging_to(&[], stderr);
        // There is no buildkitd, which is worth a line in the log each time.
        for _ in 0..2 {
            let answer = kilnd.route("example.com/o/r");
            assert!(answer.status == 500 && answer.body.contains("there is no program"), "{answer:?}");
            kilnd.is_well();
        }
        assert_eq!(kilnd.terminate().1, Some(0));
    }
}

#[test]
fn a_complaint_that_cannot_be_written_changes_no_exit_code() {
    for stderr in [full().into(), closed()] {
        let mut command = Stage::command(&["--config", "/nonexistent/kiln.toml"]);
        assert_eq!(command.stderr(stderr).status().expect("run").code(), Some(78));
    }
}

#[test]
fn a_configuration_that_cannot_be_printed() {
    let stage = Stage::new("");
    let config = stage.write_config("", 0o600).display().to_string();
    let check = |stdout: Stdio| Stage::command(&["--check", "--config", &config]).stdout(stdout).output().expect("run");
    let output = check(full().into());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("kilnd: cannot write to standard output: No space left"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let output = check(closed());
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
}
