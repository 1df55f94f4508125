//! What is a token, and what is refused before anybody's key is looked for.

use proptest::prelude::*;

use super::*;

fn encode(text: &str) -> String {
    URL_SAFE_NO_PAD.encode(text)
}

const HEADER: &str = r#"{"alg":"RS256","kid":"one","typ":"JWT"}"#;
const PAYLOAD: &str = r#"{"iss":"https://issuer.example","exp":2000000000}"#;

fn token(header: &str, payload: &str) -> String {
    format!("{}.{}.{}", encode(header), encode(payload), encode("signature"))
}

fn error(text: &str) -> String {
    parse(text).map_or_else(|error| error.to_string(), |token| format!("accepted as {token:?}"))
}

fn claims(payload: &str) -> Claims {
    let text = token(HEADER, &format!(r#"{{"iss":"x",{payload}}}"#));
    parse(&text).expect("a token").claims
}

#[test]
fn a_token_says_who_it_is_from() {
    let text = token(HEADER, PAYLOAD);
    let read = parse(&text).expect("a token");
    assert_eq!((read.algorithm, read.key_id.as_str()), (Algorithm::RS256, "one"));
    assert_eq!(read.issuer, "https://issuer.example");
    assert_eq!(format!("{}.{}", read.signed, read.signature), text);
    assert!(!format!("{read:?}").contains(read.signature), "{read:?}");
}

#[test]
fn what_has_not_the_shape_is_refused() {
    let whole = token(HEADER, PAYLOAD);
    let (signed, _) = whole.rsplit_once('.').expect("three parts");
    for text in [
        String::new(),
        "a.b".to_owned(),
        format!("{whole}.{}", encode("second")),
        format!("{whole}."),
        format!("{signed}."),
        format!("{signed}.{}", encode(&"x".repeat(1025))),
        format!("{whole}="),
        format!("{whole}\n"),
        format!(" {whole}"),
        whole.replace('.', ".."),
        format!("{}.{}.c2ln+/", encode(HEADER), encode(PAYLOAD)),
        // The last character has bits that stand for nothing: one signature must have one spelling.
        format!("{signed}.YR"),
        format!(r#"{{"payload":"{}","signatures":[{{}},{{}}]}}"#, encode(PAYLOAD)),
    ] {
        assert!(error(&text).contains("no JSON web token"), "{text}: {}", error(&text));
    }
    assert!(error(&"a".repeat(MAX_TOKEN_BYTES + 1)).contains("too long"));
}

#[test]
fn what_asks_for_no_signature_or_a_shared_secret_is_refused() {
    for name in ["none", "None", "nOnE", "HS256", "HS512", "rs256", "RS256 ", "ES256K", "dir"] {
        let header = format!(r#"{{"alg":"{name}","kid":"one"}}"#);
        assert!(error(&token(&header, PAYLOAD)).contains("is signed with"), "{name}");
    }
    for header in [r#"{"kid":"one"}"#, r#"{"alg":null,"kid":"one"}"#, r#"{"alg":["RS256"],"kid":"one"}"#] {
        assert!(error(&token(header, PAYLOAD)).contains("\"alg\""), "{header}");
    }
}

#[test]
fn what_a_header_may_not_say() {
    for (header, says) in [
        (r#"{"alg":"RS256"}"#, "kid"),
        (r#"{"alg":"RS256","kid":""}"#, "kid"),
        (r#"{"alg":"RS256","kid":7}"#, "kid"),
        (r#"{"alg":"RS256","kid":"one","crit":["exp"]}"#, "critical"),
        (r#"{"alg":"RS256","kid":"one","crit":[]}"#, "critical"),
        (r#"{"alg":"RS256","kid":"one","typ":"logout+jwt"}"#, "not a JWT"),
        (r#"{"alg":"RS256","kid":"one","alg":"none"}"#, "alg is there twice"),
        ("[]", "an object is wanted"),
        ("\"RS256\"", "an object is wanted"),
        ("{", "EOF"),
    ] {
        let error = error(&token(header, PAYLOAD));
        assert!(error.contains(says), "{header}: {error}");
    }
}

#[test]
fn what_a_payload_may_not_be() {
    let deep = format!(r#"{{"iss":"x","a":{}{}}}"#, "[".repeat(4000), "]".repeat(4000));
    let many = format!(r#"{{"iss":"x","a":[{}0]}}"#, "0,".repeat(600));
    for (payload, says) in [
        ("{}", "\"iss\""),
        (r#"{"iss":""}"#, "\"iss\""),
        (r#"{"iss":["x"]}"#, "\"iss\""),
        (r#"{"iss":"x","iss":"y"}"#, "iss is there twice"),
        (r#"{"iss":"x","\u0069ss":"y"}"#, "iss is there twice"),
        (r#"{"iss":"x","a":{"b":1,"b":2}}"#, "b is there twice"),
        (r#"{"iss":"x"} {}"#, "trailing"),
        (r#"{"iss":"x","exp":1e999}"#, "out of range"),
        ("not JSON", "expected"),
        (&deep, "levels deep"),
        (&many, "values"),
    ] {
        let error = error(&token(HEADER, payload));
        assert!(error.contains(says), "{error}");
    }
    let bytes = format!("{}.{}.{}", encode(HEADER), URL_SAFE_NO_PAD.encode(b"{\"iss\":\"\xff\"}"), encode("s"));
    assert!(error(&bytes).contains("payload"), "text that is not UTF-8");
}

/// The reference's vector of claims as text.
#[test]
fn claims_are_text_as_the_reference_has_it() {
    let claims = claims(r#""a":"repo","b":true,"c":false,"d":null,"e":42.0,"f":42,"g":[],"h":{},"i":1.5"#);
    for (name, text) in [
        ("a", Some("repo")),
        ("b", Some("true")),
        ("c", Some("false")),
        ("d", Some("")),
        ("e", Some("42")),
        ("f", Some("42")),
        ("g", None),
        ("h", None),
        ("i", Some("1.5")),
        ("missing", Some("")),
    ] {
        assert_eq!(claims.text(name).as_deref(), text, "{name}");
    }
}

#[test]
fn dates_and_audiences() {
    let claims = claims(r#""exp":1.5,"nbf":"7","iat":-1,"aud":["a",7,"b"],"k":{"io":{"ns":"prod"}}"#);
    assert_eq!(claims.date("exp"), Ok(Some(1500)));
    assert_eq!(claims.date("auth_time"), Ok(None));
    assert_eq!(claims.date("nbf"), Err(TokenError::Date("nbf")));
    assert_eq!(claims.date("iat"), Err(TokenError::Date("iat")));
    assert_eq!(claims.audiences(), ["a", "b"]);
    let at = |names: &[&str]| claims.at(&names.iter().map(ToString::to_string).collect::<Vec<_>>()).cloned();
    assert_eq!(at(&["k", "io", "ns"]), Some(Claim::Text("prod".to_owned())));
    assert_eq!(at(&["k", "ns"]), None);
    assert_eq!(at(&["exp", "x"]), None);
}

#[test]
fn what_is_shown_fits_on_a_line() {
    assert_eq!(shown("a\nb\u{202e}\u{1b}[0m"), "a\\nb\\u{202e}\\u{1b}[0m");
    assert!(shown(&"x".repeat(5000)).len() <= 103);
}

proptest! {
    #[test]
    fn nothing_panics_and_what_is_accepted_is_whole(header in any::<String>(), payload in any::<String>(), raw in any::<String>()) {
        let _ = parse(&raw);
        let _ = parse(&token(&header, PAYLOAD));
        let text = token(HEADER, &payload);
        if let Ok(read) = parse(&text) {
            prop_assert_eq!(format!("{}.{}", read.signed, read.signature), text.clone());
        }
    }
}
