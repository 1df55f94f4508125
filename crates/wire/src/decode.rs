//! From bytes to a request: bounded, strict, exactly one value.

use serde::de::DeserializeOwned;
use thiserror::Error;

/// Longest accepted body (the reference's limit).
pub const MAX_BODY_BYTES: usize = 8192;

#[derive(Debug, Error)]
pub enum DecodeError {
    #[error("request body is too large: {0} bytes, at most {MAX_BODY_BYTES} are accepted")]
    TooLarge(usize),
    #[error("request body is not what this endpoint takes: {0}")]
    Json(#[from] serde_json::Error),
}

/// Refuses what is too large, not JSON, of another shape, with unknown or repeated fields, or followed by anything.
///
/// Stricter than the reference in three points, none of which its clients use: field names are matched exactly (its
/// language also takes `Repo` for `repo`), a field may come once (there the last one wins, so that two readers of one
/// request could see two repositories), and `null` is no text.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, DecodeError> {
    if body.len() > MAX_BODY_BYTES {
        return Err(DecodeError::TooLarge(body.len()));
    }
    // Serde also takes the values of an object's fields as a list, in the order of their declaration.
    if body.trim_ascii_start().first() == Some(&b'[') {
        return Err(DecodeError::Json(serde::de::Error::custom("invalid type: a list, expected an object")));
    }
    Ok(serde_json::from_slice(body)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{CompleteRequest, RouteRequest, RouteResponse};

    fn route(body: &str) -> Result<RouteRequest, String> {
        decode(body.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_request_of_the_reference_s_clients() {
        let request = route(r#"{"repo":"github.com/o/r","name":"api","target":"t","arch":"amd64","untrusted":true}"#);
        let expected = RouteRequest {
            repo: "github.com/o/r".to_owned(),
            name: "api".to_owned(),
            target: "t".to_owned(),
            arch: "amd64".to_owned(),
            untrusted: true,
            ..RouteRequest::default()
        };
        assert_eq!(request, Ok(expected));
        assert_eq!(route("{}"), Ok(RouteRequest::default()), "what is missing is for the validation to say");
        assert_eq!(route(" \n{}\t "), Ok(RouteRequest::default()));
    }

    #[test]
    fn what_is_refused_and_why() {
        for (body, words) in [
            (r#"{"repo":"r","arch":"amd64","extra":true}"#, "unknown field `extra`"),
            (r#"{"repo":"r"}{"repo":"s"}"#, "trailing characters"),
            (r#"{"repo":"r"} x"#, "trailing characters"),
            ("not JSON", "not what this endpoint takes"),
            ("", "not what this endpoint takes"),
            ("null", "invalid type: null"),
            ("[]", "invalid type: a list"),
            (r#" ["h/o/r","","","amd64"]"#, "invalid type: a list"),
            (r#"{"repo":null}"#, "invalid type: null"),
            (r#"{"repo":7}"#, "invalid type: integer"),
            (r#"{"untrusted":"yes"}"#, "invalid type: string"),
            (r#"{"pullRequest":12}"#, "invalid type: integer"),
            (r#"{"pull_request":"12"}"#, "unknown field `pull_request`"),
            (r#"{"pullRequest":"1","pullRequest":"2"}"#, "duplicate field `pullRequest`"),
            (r#"{"branch":["main"]}"#, "invalid type: sequence"),
            (r#"{"repo":"r","repo":"s"}"#, "duplicate field `repo`"),
            (r#"{"Repo":"r"}"#, "unknown field `Repo`"),
            ("{\"repo\":\"\u{0}\"}", "control character"),
            (r#"{"repo":"r""#, "EOF"),
        ] {
            let error = route(body).expect_err(body);
            assert!(error.contains(words), "{body}: {error}");
        }
        assert!(decode::<RouteRequest>(b"{\"repo\":\"\xff\"}").is_err(), "not UTF-8");
        let deep = format!("{{\"repo\":{}", "[".repeat(8000));
        assert!(route(&deep).is_err(), "nesting does not exhaust the stack");
    }

    #[test]
    fn the_limit_is_in_bytes_and_inclusive() {
        let exact = format!("{{}}{}", " ".repeat(MAX_BODY_BYTES - 2));
        assert!(route(&exact).is_ok());
        let error = route(&(exact + " ")).expect_err("one too many");
        assert!(error.contains("8193 bytes, at most 8192"), "{error}");
    }

    #[test]
    fn a_build_id_may_be_missing_null_or_empty() {
        for (body, expected) in [
            (r#"{"key":"k"}"#, None),
            (r#"{"key":"k","buildId":null}"#, None),
            (r#"{"key":"k","buildId":""}"#, Some("")),
            (r#"{"key":"k","buildId":"b"}"#, Some("b")),
        ] {
            let request: CompleteRequest = decode(body.as_bytes()).expect(body);
            assert_eq!(request.build_id.as_deref(), expected, "{body}");
        }
        assert!(decode::<CompleteRequest>(br#"{"key":"k","build_id":"b"}"#).is_err());
    }

    /// An old client and a new server, and the other way round.
    #[test]
    fn versions_may_differ() {
        let sent =
            serde_json::to_string(&RouteRequest { repo: "r".into(), arch: "amd64".into(), ..Default::default() });
        assert_eq!(sent.expect("serialises"), r#"{"repo":"r","arch":"amd64"}"#, "nothing that an old server refuses");
        let newer = r#"{"key":"pbcce5b6205652dd7","endpoint":"tcp://h:1","namespace":"n","ready":true,
            "serverName":"s","generation":3,"cache":{"type":"s3"},"somethingNew":[1]}"#;
        let response: RouteResponse = serde_json::from_str(newer).expect("a client ignores what it does not know");
        assert_eq!((response.generation, response.build_id, response.credential), (3, None, None));
        assert_eq!((response.lease_id, response.status), (None, None), "an older server says nothing of them");
    }

    #[test]
    fn branches() {
        for branch in ["", "main", "feature/x", "\u{e9}t\u{e9}", &"b".repeat(256)] {
            assert_eq!(crate::check_branch(branch), Ok(()), "{branch:?}");
        }
        for (branch, words) in
            [(&*"b".repeat(257), "257 bytes, at most 256"), ("a\nb", "'\\n'"), ("\u{1b}[2J", "cannot be printed")]
        {
            let error = crate::check_branch(branch).expect_err(branch);
            assert!(error.contains(words), "{branch:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode::<RouteRequest>(&body);
            let _ = decode::<CompleteRequest>(&body);
            let _ = decode::<crate::Rollback>(&body);
        }

        #[test]
        fn what_a_client_writes_a_server_reads(
            repo in any::<String>(), name in any::<String>(), target in any::<String>(), arch in any::<String>(),
            untrusted in any::<bool>(), credential in any::<bool>(), build_id in any::<Option<String>>(),
            pull_request in any::<Option<String>>(), branch in any::<Option<String>>(),
        ) {
            let request = RouteRequest { repo, name, target, arch, untrusted, pull_request, branch, credential, build_id };
            let body = serde_json::to_vec(&request).expect("serialises");
            prop_assume!(body.len() <= MAX_BODY_BYTES);
            prop_assert_eq!(decode::<RouteRequest>(&body).expect("reads"), request);
        }
    }
}
