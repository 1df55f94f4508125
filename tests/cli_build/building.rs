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
fn whichever_of_its_daemons_kilnd_chose_is_built_on_and_given_back() {
    let stage = Stage::with("", |kilnd| kilnd.member = 2);
    let output = stage.build(&["."]);
    assert!(output.status.success());
    assert_eq!(stderr(&output), "", "another daemon of the same project is no surprise");
    assert_eq!(stage.asked()[1], "complete c2pbcce5b6205652dd7 00112233aabbccdd");
    let name = stage.called()[0].split('|').nth(2).expect("a name").to_owned();
    assert!(name.starts_with("kiln-c2pbcce5b6205652dd7-"), "{name}");
    assert!(stage.called()[0].contains("servername=buildkitd-x.kiln"), "the name in TLS is the answer's");
}

#[test]
fn a_build_says_of_which_pull_request_and_branch_it_is() {
    let stage = Stage::new("");
    let route = "route github.com/org/repo default";
    assert!(stage.build(&["--untrusted", "--pull-request", "12", "--branch", "feature/x", "."]).status.success());
    assert_eq!(stage.asked()[0], format!("{route} true pull request 12 branch feature/x"));
    assert!(stage.called()[1].ends_with("|."), "buildx gets none of it: {:?}", stage.called());

    let github = [("GITHUB_REF", "refs/pull/7/merge"), ("GITHUB_REF_NAME", "7/merge"), ("GITHUB_HEAD_REF", "fix")];
    let gitlab = [("CI_MERGE_REQUEST_IID", "7"), ("CI_COMMIT_REF_NAME", "fix")];
    for variables in [&github[..], &gitlab] {
        for (words, expected) in [
            (&["build", "--untrusted", "."][..], "true pull request 7 branch fix"),
            (&["build", "--untrusted", "--pull-request", "8", "."], "true pull request 8 branch fix"),
            (&["build", "."], "false branch fix"),
            (&["build", "--branch", "mine", "."], "false branch mine"),
        ] {
            let stage = Stage::new("");
            let status = stage.kiln(words).envs(variables.iter().copied()).status().expect("run");
            assert!(status.success(), "{words:?}");
            assert_eq!(stage.asked()[0], format!("{route} {expected}"), "{words:?}");
        }
    }
}

#[test]
fn a_kilnd_that_knows_no_branches_is_asked_without_one() {
    let stage = Stage::with("", |kilnd| kilnd.old = true);
    let status = stage.kiln(&["build", "."]).env("GITHUB_REF_NAME", "main").status().expect("run");
    assert!(status.success());
    assert_eq!(stage.asked(), ["route github.com/org/repo default false", COMPLETE]);
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
