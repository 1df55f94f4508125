//! A build that goes well: who is called with what, and what of it is left.

use std::fs;
use std::path::PathBuf;

use super::stage::{COMPLETE, Stage, stderr};

#[test]
fn routes_builds_and_releases_in_this_order() {
    let stage = Stage::new("echo built");
    let output = stage.build(&["--progress=plain", "-t", "a:1", "--untrusted", ".", "--push"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "built\n");
    assert_eq!(stderr(&output), "");
    assert_eq!(stage.asked(), ["route github.com/org/repo default true", COMPLETE]);
    let called = stage.called();
    assert_eq!(called.len(), 2, "{called:?}");
    let name = called[0].split('|').nth(2).expect("a name").to_owned();
    assert!(name.starts_with("kiln-pbcce5b6205652dd7-"), "{name}");
    let tmp = stage.dir.path().join("tmp");
    assert!(
        called[0].starts_with(&format!("create|--name|{name}|--driver|remote|--driver-opt|cacert={}", tmp.display()))
    );
    assert!(called[0].ends_with("|--driver-opt|servername=buildkitd-x.kiln|tcp://127.0.0.1:1234"), "{}", called[0]);
    assert_eq!(called[1], format!("build|--builder|{name}|--progress=plain|-t|a:1|.|--push"));
    assert_eq!(stage.left_behind(), [] as [PathBuf; 0]);
}

#[test]
fn the_credential_is_for_our_eyes_only() {
    let stage = Stage::new("");
    assert!(stage.build(&["."]).status.success());
    let modes = fs::read_to_string(stage.dir.path().join("buildx.log.modes")).expect("written");
    let modes: Vec<&str> = modes.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(modes, ["700", "600", "600", "600"], "the directory, then three files");
}

#[test]
fn the_target_is_buildx_s_and_the_key_s() {
    let stage = Stage::new("");
    assert!(stage.build(&["--target", "Run", "."]).status.success());
    assert_eq!(stage.asked()[0], "route github.com/org/repo run false");
    assert!(stage.called()[1].ends_with("|--target|Run|."));
}

#[test]
fn jobs_beside_each_other_have_builders_of_their_own() {
    let stage = Stage::new("");
    assert!(stage.build(&["."]).status.success() && stage.build(&["."]).status.success());
    let called = stage.called();
    assert_ne!(called[0].split('|').nth(2), called[2].split('|').nth(2));
}

#[test]
fn buildx_s_exit_code_is_ours() {
    for (script, code) in [("exit 17", 17), ("kill -KILL $$", 137)] {
        let stage = Stage::new(script);
        assert_eq!(stage.build(&["."]).status.code(), Some(code), "after {script}");
        assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE), "after {script}");
        assert_eq!(stage.left_behind(), [] as [PathBuf; 0]);
    }
}

#[test]
fn a_dry_run_asks_and_calls_nobody() {
    let stage = Stage::new("");
    let output = stage.build(&["--dry-run", "--build-arg", "A=b c", "."]);
    assert!(output.status.success(), "{}", stderr(&output));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("pbcce5b6205652dd7") && said.contains("--build-arg 'A=b c' ."), "{said}");
    assert!(stage.asked().is_empty() && stage.called().is_empty());
}
