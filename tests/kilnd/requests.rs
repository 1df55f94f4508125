//! Requests that are wrong: 4xx with the field and the remedy, and nothing is made of them.

use super::http;
use super::stage::{Kilnd, Stage};

const HUGE: usize = 10 << 20;

/// The project's daemon is not wanted here: there is none.
fn stage() -> Stage {
    Stage::new("")
}

#[track_caller]
fn refuses(kilnd: &Kilnd<'_>, path: &str, body: &str, status: u16, words: &[&str]) {
    let answer = kilnd.post(path, body);
    assert_eq!(answer.status, status, "{body}: {answer:?}");
    for word in words {
        assert!(answer.body.contains(word), "no {word:?} in {answer:?} of {body}");
    }
    assert_eq!(answer.body.trim_end().lines().count(), 1, "{answer:?}");
}

#[test]
fn what_is_no_request_is_refused_and_changes_nothing() {
    let stage = stage();
    let kilnd = stage.start();
    let before = stage.listing();
    let too_large = "request body is too large";
    for path in ["/route", "/prewarm"] {
        for (body, words) in [
            ("", &["not what this endpoint takes"][..]),
            ("hello", &["not what this endpoint takes"]),
            ("[]", &["not what this endpoint takes"]),
            (r#"{"repo":"h/o/r","arch":"amd64"} {}"#, &["trailing characters"]),
            (r#"{"repo":"h/o/r","arch":"amd64","commit":"main"}"#, &["unknown field `commit`", "`repo`"]),
            (r#"{"repo":["h/o/r"],"arch":"amd64"}"#, &["expected a string"]),
            (r#"{"arch":"amd64"}"#, &["repo is required", "github.com/org/repo"]),
            (r#"{"repo":"////","arch":"amd64"}"#, &["repo is required", "github.com/org/repo"]),
            (r#"{"repo":"https:///","arch":"amd64"}"#, &["repo is required"]),
            (r#"{"repo":"h/o\u0000/r","arch":"amd64"}"#, &[r"repo contains '\0'", "github.com/org/repo"]),
            (r#"{"repo":"h/o\u001b[31m/r","arch":"amd64"}"#, &[r"repo contains '\u{1b}'"]),
            (r#"{"repo":"h/o\n/r","arch":"amd64"}"#, &[r"repo contains '\n'"]),
            (r#"{"repo":"h/o/r","name":"a\u0000b","arch":"amd64"}"#, &["name contains", "printed"]),
            (r#"{"repo":"h/o/r","target":"a\u0007","arch":"amd64"}"#, &["target contains", "printed"]),
            (r#"{"repo":"h/o/r"}"#, &["unsupported arch", "amd64 or arm64"]),
            (r#"{"repo":"h/o/r","arch":"riscv64"}"#, &[r#"unsupported arch "riscv64""#, "amd64 or arm64"]),
        ] {
            refuses(&kilnd, path, body, 400, words);
        }
        refuses(&kilnd, path, "{\"repo\":\"h/\0\",\"arch\":\"amd64\"}", 400, &["control character"]);
        let of = |length| format!(r#"{{"repo":"{}","arch":"amd64"}}"#, "r".repeat(length));
        refuses(&kilnd, path, &of(513), 400, &["repo is too long: 513 bytes", "512"]);
        refuses(&kilnd, path, &of(8192), 400, &[too_large, "8192"]);
        refuses(&kilnd, path, &of(HUGE), 400, &[too_large, "8192"]);
        let chunked = http::post_chunked(&stage.socket(), path, of(HUGE).as_bytes()).expect("an answer");
        assert_eq!((chunked.status, chunked.body.contains(too_large)), (400, true), "{chunked:?}");
    }
    assert_eq!(kilnd.get("/v1/projects").body, "[]");
    assert!(stage.listing() == before, "something was written");
    kilnd.is_well();
}

#[test]
fn what_is_no_key_is_refused_and_changes_nothing() {
    let stage = stage();
    let kilnd = stage.start();
    let before = stage.listing();
    let long = "p".repeat(4000);
    for key in ["nonsense", "p000000000000000g", "P0000000000000000", "%00", "p%00", "%ff", "%C3%A4", "..%2f..", &long]
    {
        for answer in [kilnd.get(&format!("/v1/projects/{key}")), kilnd.post(&format!("/v1/projects/{key}/stop"), "")] {
            assert_eq!(answer.status, 400, "{key}: {answer:?}");
            let error = answer.json()["error"].as_str().map(str::to_owned).expect("an error");
            assert!(error.contains("a key is p and 16 hexadecimal digits") && error.len() < 600, "{key}: {error}");
        }
    }
    for answer in [kilnd.get("/v1/projects/p0000000000000000"), kilnd.post("/v1/projects/p0000000000000000/stop", "")] {
        assert_eq!(answer.status, 404, "{answer:?}");
        assert!(answer.body.contains("kiln ps"), "{answer:?}");
    }

    let token = "0123456789abcdef";
    for (body, words) in [
        ("{}".to_owned(), "key is required"),
        (format!(r#"{{"key":" ","buildId":"{token}"}}"#), "key is required"),
        (format!(r#"{{"key":"{}","buildId":"{token}"}}"#, "p".repeat(65)), "key is too long"),
        (r#"{"key":"p0000000000000000"}"#.to_owned(), "buildId is required"),
        (r#"{"key":"p0000000000000000","buildId":"\u0000"}"#.to_owned(), "buildId"),
    ] {
        refuses(&kilnd, "/complete", &body, 400, &[words]);
    }
    // As the reference has it: nothing to release is a release.
    for key in ["pdeadbeef", "p0000000000000000", "../../etc"] {
        let answer = kilnd.post("/complete", &format!(r#"{{"key":"{key}","buildId":"{token}"}}"#));
        assert_eq!(answer.status, 204, "{answer:?}");
    }
    assert!(stage.listing() == before, "something was written");
    kilnd.is_well();
}
