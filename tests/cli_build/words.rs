//! What the command takes, and what it prints.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use kiln_wire::Why;

use super::stage::{COMPLETE, Stage, stderr};

#[test]
fn what_the_command_line_got_wrong() {
    let stage = Stage::new("");
    for (arguments, word) in [
        (&["build", "--builder", "x", "."][..], "--builder"),
        (&["build", "--wait", "soon", "."], "--wait"),
        (&["build", "--arch", "riscv", "."], "unsupported arch"),
        (&["build", "--repo", "h/a b", "."], "repo contains"),
        (&["build", "--url", "https://h", "."], "--url"),
        (&["show", "nonsense"], "is not a key"),
        (&["build", "--pull-request", "12", "."], "say --untrusted"),
        (&["build", "--untrusted", "--pull-request", "1 2", "."], "the pull request contains ' '"),
        (&["key", "--pull-request", "12"], "say --untrusted"),
        (&["cache"], "kiln cache"),
        (&["cache", "log", "nonsense"], "is not a key"),
        (&["cache", "rollback", "pbcce5b6205652dd7", "latest"], "one looks like kiln-000042"),
        (&["cache", "rollback", "pbcce5b6205652dd7", "kiln-42"], "kiln cache log"),
        (&["cache", "reset"], "<KEY>"),
        (&["nonsense"], "nonsense"),
    ] {
        let output = stage.kiln(arguments).output().expect("run");
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(word), "{arguments:?}: {}", stderr(&output));
    }
    let output = stage.kiln(&["build", "."]).env_remove("KILN_REPO").output().expect("run");
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("--repo"), "{}", stderr(&output));
    assert_eq!(stage.asked(), [] as [&str; 0]);
}

#[test]
fn without_a_kilnd_the_remedy_is_named() {
    let stage = Stage::new("");
    let output = stage.kiln(&["--socket", "/nowhere/kiln.sock", "ps"]).output().expect("run");
    assert_eq!(output.status.code(), Some(69));
    let said = stderr(&output);
    assert!(
        said.contains("not running") && said.contains("/nowhere/kiln.sock") && said.contains("systemctl start"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1);
}

#[test]
fn a_reader_that_has_had_enough_ends_it_quietly() {
    let stage = Stage::new("");
    let command = "\"$0\" events --follow 2>&1 >&3 3>&- | cat >&2; exit 0";
    let mut shell = Command::new("sh");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = shell
        .args(["-c", &format!("exec 3>&1; {command}"), env!("CARGO_BIN_EXE_kiln")])
        .env("KILN_SOCKET", stage.dir.path().join("kiln.sock"))
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .expect("run");
    assert_eq!(stderr(&output), "");
}

#[test]
fn an_output_that_cannot_be_written_is_no_panic() {
    let stage = Stage::new("");
    let full = || fs::File::options().write(true).open("/dev/full").expect("opened");
    let closed = || std::io::pipe().expect("a pipe").1;
    for words in [&["ps"][..], &["key", "--json"], &["completions", "bash"], &["--help"]] {
        let output = stage.kiln(words).stdout(full()).output().expect("run");
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", stderr(&output));
        assert_eq!(stderr(&output).lines().count(), 1, "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).starts_with("kiln: cannot write to stdout: No space left"), "{}", stderr(&output));
        let output = stage.kiln(words).stdout(closed()).output().expect("run");
        assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()), "{words:?}");
    }
    for (words, code) in [(&["--socket", "/nowhere/kiln.sock", "ps"][..], 69), (&["build", "--builder", "x", "."], 64)]
    {
        for stderr in [Stdio::from(full()), closed().into()] {
            let status = stage.kiln(words).stdout(Stdio::null()).stderr(stderr).status().expect("run");
            assert_eq!(status.code(), Some(code), "{words:?}");
        }
    }
}

#[test]
fn prints_for_programs() {
    let stage = Stage::new("");
    let output = stage.kiln(&["ps", "--json"]).output().expect("run");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[]\n");
    let output = stage.kiln(&["key", "--json"]).output().expect("run");
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value["key"], "pbcce5b6205652dd7");
    let fork = stage.kiln(&["key", "--untrusted", "--pull-request", "12", "--json"]).output().expect("run");
    let fork: serde_json::Value = serde_json::from_slice(&fork.stdout).expect("JSON");
    let key = fork["key"].as_str().expect("a key");
    assert!(key.starts_with('f') && key.ends_with("pbcce5b6205652dd7") && key.len() == 34, "{key}");
    assert_eq!(fork["pullRequest"], "12");
    let alone = stage.kiln(&["key", "--untrusted"]).output().expect("run");
    assert_eq!(String::from_utf8_lossy(&alone.stdout), "forkpbcce5b6205652dd7\n");
    let dir = stage.dir.path().join("credential");
    let output = stage.kiln(&["route", "--json", "--credential"]).arg(&dir).output().expect("run");
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value["buildId"], "00112233aabbccdd");
    assert!(value.get("credential").is_none(), "the key belongs into its file only");
    assert_eq!(fs::read_to_string(dir.join("key.pem")).expect("written"), "KEY");
    assert_eq!(fs::metadata(&dir).expect("there").permissions().mode() & 0o777, 0o700);
    assert!(stage.kiln(&["complete", "pbcce5b6205652dd7", "00112233aabbccdd"]).status().expect("run").success());
    assert_eq!(stage.asked().last().map(String::as_str), Some(COMPLETE));
    let output = stage.kiln(&["completions", "bash"]).output().expect("run");
    assert!(String::from_utf8_lossy(&output.stdout).contains("_kiln"));
}

#[test]
fn the_past_of_a_cache_and_where_the_bytes_are() {
    let stage = Stage::new("");
    let key = "pbcce5b6205652dd7";
    let run = |words: &[&str]| {
        let output = stage.kiln(words).output().expect("run");
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let log = run(&["cache", "log", key]);
    assert!(log.starts_with("SNAPSHOT     VERDICT    TAKEN"), "{log}");
    assert!(log.contains("kiln-000041  good") && log.contains("2.00 KiB") && log.ends_with("       -\n"), "{log}");
    let json: serde_json::Value = serde_json::from_str(&run(&["cache", "log", key, "--json"])).expect("JSON");
    assert_eq!((&json[0]["name"], &json[0]["bytes"]), (&"kiln-000041".into(), &2048.into()));
    assert_eq!(run(&["cache", "snapshot", key]), format!("kiln-000042 was taken of {key}\n"));
    assert_eq!(
        run(&["cache", "snapshot", key]),
        format!("nothing was written to {key} since kiln-000042, so none was taken\n")
    );
    for words in [&["cache", "rollback", key][..], &["cache", "rollback", key, "@kiln-000041", "--force"]] {
        let said = run(words);
        assert!(said.contains("has gone back to kiln-000041") && said.contains("`kiln trash ls`"), "{said}");
    }
    let json: serde_json::Value = serde_json::from_str(&run(&["cache", "--json", "rollback", key])).expect("JSON");
    assert_eq!(json, serde_json::json!({"key": key, "snapshot": "kiln-000041"}));
    assert!(run(&["cache", "reset", key]).contains("begins anew with an empty cache; what the cache held"));
    assert!(run(&["cache", "usage", key]).starts_with("unique    3.00 GiB\nshared    1.00 GiB\n"));
    let json: serde_json::Value = serde_json::from_str(&run(&["cache", "usage", key, "--json"])).expect("JSON");
    assert_eq!(json["used"], 3_u64 << 30);
    assert_eq!(
        stage.asked(),
        [
            "snapshots",
            "snapshots",
            "rollback {}",
            r#"rollback {"snapshot":"kiln-000041","force":true}"#,
            "rollback {}",
            "reset {}"
        ]
        .map(|line| format!("POST /v1/projects/{key}/{line}"))
    );

    let du = run(&["du"]);
    assert!(du.contains("h/r\u{fffd}[2J") && du.contains("of no project: `kiln orphans`, member 2"), "{du}");
    assert!(du.contains("\nall ") && du.contains("6.00 GiB") && du.contains("2.00 GiB"), "{du}");
    assert!(du.contains("trash    1 deleted, until 2030-01-01T00:00:00Z: `kiln trash ls`\n"), "{du}");
    assert!(du.ends_with("storage  ##################-- 90 % full: 9.00 GiB of 10.0 GiB, 1.00 GiB free\n"), "{du}");
    let json: serde_json::Value = serde_json::from_str(&run(&["du", "--json"])).expect("JSON");
    assert_eq!(json["sums"]["unique"], 6_u64 << 30);
}

#[test]
fn the_verbs_of_an_admin() {
    let stage = Stage::new("");
    let key = "pbcce5b6205652dd7";
    let run = |words: &[&str]| {
        let output = stage.kiln(words).output().expect("run");
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(run(&["why", key]), "p1: It is warm.\n  because  a lease is alive\n");
    let json: Why = serde_json::from_str(&run(&["why", key, "--json"])).expect("JSON");
    assert_eq!(json.headline, "It is warm.");
    let said = run(&[
        "set",
        key,
        "--tier",
        "hot",
        "--idle-window",
        "30m",
        "--volume",
        "40GiB",
        "--cpus",
        "4",
        "--reset",
        "memory",
    ]);
    assert!(said.contains("tier          hot (project)") && said.contains("volume        20GiB (rule)"), "{said}");
    assert!(said.contains("memory        unlimited (default)") && said.contains("after a roll  cpus: 2 now"), "{said}");
    assert!(run(&["rm", key]).contains("kiln trash ls"));
    assert!(run(&["stop", "--force", key]).contains("was stopped by force"));
    assert!(run(&["stop", key]).contains("is stopped"));
    assert_eq!(run(&["orphans", "--json"]), "[]\n");
    assert!(run(&["orphans"]).starts_with("KIND"));
    assert!(run(&["orphans", "adopt", "buildkitd-x", "--kind", "instance"]).contains(key));
    run(&["orphans", "rm", "volume", "p1"]);
    let table = run(&["trash"]);
    assert!(table.contains("p1-old") && table.contains("h/r\u{fffd}[2J") && table.contains("2030-01-01"), "{table}");
    assert_eq!(run(&["trash", "ls", "--json"]), run(&["trash", "--json"]));
    assert!(run(&["trash", "restore", "p1-old"]).contains(key));
    assert_eq!(run(&["trash", "rm", "p1?old"]), "p1?old is gone\n");
    assert_eq!(run(&["trash", "empty"]), "2 removed for good\n");
    for words in [&["renew", "00112233aabbccdd"][..], &["renew", key, "00112233aabbccdd"]] {
        assert!(run(words).contains("ends at       2026-11-29T02:00:00Z"), "{words:?}");
    }
    let show = run(&["show", key]);
    assert!(show.contains("idle window    15m (default)") && show.contains("after a roll   cpus: 2 now"), "{show}");
    let patch = format!(
        "PATCH /v1/projects/{key}/settings {{\"tier\":\"hot\",\"idleWindow\":\"30m\",\"volume\":\"40GiB\",\"memory\":null,\"cpus\":4}}"
    );
    assert_eq!(
        stage.asked(),
        [
            patch.as_str(),
            &format!("DELETE /v1/projects/{key}"),
            &format!("POST /v1/projects/{key}/stop?force=true"),
            &format!("POST /v1/projects/{key}/stop"),
            r#"POST /v1/orphans/adopt {"kind":"instance","name":"buildkitd-x"}"#,
            r#"POST /v1/orphans/remove {"kind":"volume","name":"p1"}"#,
            "POST /v1/trash/p1%2Dold/restore",
            "DELETE /v1/trash/p1%3Fold",
            "renew",
            "renew",
        ]
        .map(|line| line.replace("p1%2Dold", "p1-old"))
    );
    for words in [
        &["set", key][..],
        &["set", key, "--tier", "cold"],
        &["set", key, "--tier", "hot", "--reset", "tier"],
        &["set", key, "--idle-window", "soon"],
        &["set", key, "--volume", "40GB"],
        &["set", key, "--cpus", "many"],
        &["set", key, "--reset", "arch"],
        &["rm", "nonsense"],
        &["why"],
        &["renew", "nonsense"],
        &["orphans", "rm", "pod", "x"],
        &["orphans", "rm", "volume", "../x"],
        &["trash", "rm", ".."],
        &["trash", "restore", ""],
        &["events", "--key", "nonsense"],
    ] {
        let output = stage.kiln(words).output().expect("run");
        assert_eq!(output.status.code(), Some(64), "{words:?}: {}", stderr(&output));
    }
}
