//! A configuration that is wrong: exit code 78, one line with the key and the remedy, and nothing touched.

use std::path::Path;

use super::stage::Stage;

/// What kilnd says of `text` in a file with `mode`.
#[track_caller]
fn refused(text: &str, mode: u32, words: &[&str]) -> String {
    let stage = Stage::new("");
    let config = stage.write_config(text, mode);
    let failed = stage.fails_with(&config);
    failed.says(78, words);
    failed.says(78, &[&config.display().to_string()]);
    assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
    failed.stderr
}

#[test]
fn unknown_keys_are_named_with_those_there_are() {
    refused("sate_dir = '/x'\n", 0o600, &["line 1", "unknown field `sate_dir`", "`state_dir`"]);
    refused("\n[api]\nlisten_on = 'x'\n", 0o600, &["line 3", "unknown field `listen_on`", "`listen`"]);
    refused("[gatway]\nlisten = 'x'\n", 0o600, &["line 1", "unknown field `gatway`", "`gateway`"]);
    refused("[runtime.incus]\nimages = 'x'\n", 0o600, &["line 2", "unknown field `images`", "`image`"]);
}

#[test]
fn values_of_another_kind_are_named() {
    refused("[policy]\nidle_window = 'soon'\n", 0o600, &["line 2", "idle_window"]);
    refused("[buildkit]\nport = 'eighty'\n", 0o600, &["line 2", "port"]);
    refused("[api]\nlisten = 'localhost'\n", 0o600, &["line 2", "listen", "127.0.0.1:8080"]);
    refused("[policy]\nidle_window = 15\n", 0o600, &["line 2", "idle_window", "\"15m\""]);
    refused("[volumes]\nsize = 20\n", 0o600, &["line 2", "size", "\"20GiB\""]);
    refused("[api\n", 0o600, &["line 1"]);
}

#[test]
fn contradictions_name_the_key() {
    let stage = Stage::new("");
    for (text, key) in [
        ("[volumes]\npath = 'here'\n", "volumes.path"),
        ("[buildkit]\nbuildkitd = 'buildkitd'\n", "buildkit.buildkitd"),
        ("[api]\nsocket = 'kiln.sock'\n", "api.socket"),
        ("[runtime]\naddresses = '10.0.0.0/16'\n", "runtime.addresses"),
    ] {
        let config = stage.write_config(text, 0o600);
        stage.fails_with(&config).says(78, &[key]);
    }
    assert!(stage.listing().is_empty());
}

#[test]
fn a_missing_file_and_a_directory_in_its_place() {
    let stage = Stage::new("");
    stage.fails_with(Path::new("/nonexistent/kiln.toml")).says(78, &["/nonexistent/kiln.toml", "--config", "No such"]);
    let directory = stage.dir.path().join("kiln.toml");
    std::fs::create_dir(&directory).expect("made");
    stage.fails_with(&directory).says(78, &["kiln.toml", "--config", "directory"]);
    assert!(stage.listing().is_empty());
}

#[test]
fn a_secret_that_others_may_read_is_not_read_out_either() {
    let text = "[api]\nadmin_token = 'hunter2'\n";
    let said = refused(text, 0o644, &["admin_token", "chmod 0600"]);
    assert!(!said.contains("hunter2"), "{said}");
    let said = refused(text, 0o600, &["line 2", "unknown field `admin_token`"]);
    assert!(!said.contains("hunter2"), "{said}");
}

#[test]
fn a_file_that_others_may_write_to() {
    refused("", 0o646, &["chmod go-w"]);
    refused("", 0o660, &["chmod go-w"]);
}
