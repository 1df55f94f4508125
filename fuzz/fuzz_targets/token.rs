//! Any bytes as a token: nothing panics, what is accepted is the whole input and says what other readers of JSON read, and
//! what is shown of it fits on a line. Once as it is, and once as the two JSON texts of a token, one per line, so that the
//! fuzzer need not find out base64.
#![no_main]

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kiln_token::{Claim, Claims, MAX_TOKEN_BYTES, Token, TokenError, parse, shown};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|text: &str| {
    let _ = look(text);
    let (header, payload) = text.split_once('\n').unwrap_or((r#"{"alg":"RS256","kid":"k"}"#, text));
    let parts = [header, payload, "signature"].map(|part| URL_SAFE_NO_PAD.encode(part));
    let token = parts.join(".");
    if let Ok(read) = look(&token) {
        let theirs: Value = serde_json::from_str(payload).expect("JSON for everybody");
        assert!(same_object(&read.claims, &theirs), "read as something else");
    }
});

fn look(text: &str) -> Result<Token<'_>, TokenError> {
    let read = parse(text);
    match &read {
        Ok(token) => {
            assert!(text.len() <= MAX_TOKEN_BYTES && !token.issuer.is_empty() && !token.key_id.is_empty());
            assert_eq!(format!("{}.{}", token.signed, token.signature), text);
            for (name, _) in token.claims.iter() {
                let said = token.claims.text(name).unwrap_or_default();
                assert!(shown(&said).len() <= 103 && shown(&said).bytes().all(|b| (b' '..=b'~').contains(&b)));
            }
            let _ = token.claims.audiences();
            for date in ["exp", "nbf", "iat"] {
                let _ = token.claims.date(date);
            }
        }
        Err(error) => {
            let error = error.to_string();
            assert!(error.len() < 400 && error.bytes().all(|b| (b' '..=b'~').contains(&b)), "{error}");
        }
    }
    read
}

fn same_object(ours: &Claims, theirs: &Value) -> bool {
    let Value::Object(theirs) = theirs else { return false };
    theirs.len() == ours.iter().count() && theirs.iter().all(|(name, value)| ours.get(name).is_some_and(|claim| same(claim, value)))
}

fn same(ours: &Claim, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Claim::Null, Value::Null) => true,
        (Claim::Bool(ours), Value::Bool(theirs)) => ours == theirs,
        (Claim::Number(ours), Value::Number(theirs)) => ours == theirs,
        (Claim::Text(ours), Value::String(theirs)) => ours == theirs,
        (Claim::List(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| same(ours, theirs))
        }
        (Claim::Object(ours), theirs) => same_object(ours, theirs),
        _ => false,
    }
}
