//! Tokens that somebody made who should not have got in.

use super::*;

async fn error(token: &str) -> ProveError {
    let error = of_github().prove(token).await.expect_err("a hostile token was taken");
    assert_eq!(error.refusal(), Refusal::Unproven, "{error}");
    let text = error.to_string();
    assert!(text.len() < 700 && text.chars().all(|c| c == ' ' || c.is_ascii_graphic()), "{text}");
    for part in token.split('.').filter(|part| part.len() > 30) {
        assert!(
            !text.contains(&part[..30]) && !format!("{error:?}").contains(&part[..30]),
            "it shows the token: {text}"
        );
    }
    error
}

fn good() -> Value {
    claims(GITHUB, &json!({}))
}

#[tokio::test(start_paused = true)]
async fn what_is_not_signed_or_signed_with_what_everybody_knows() {
    let payload = good().to_string();
    let parts =
        |header: Value, signature: &str| format!("{}.{}.{}", encode(header.to_string()), encode(&payload), signature);
    for name in ["none", "None", "NONE", ""] {
        let header = json!({"alg": name, "kid": "one"});
        assert!(matches!(error(&parts(header.clone(), "")).await, ProveError::Token(_)), "{name}");
        assert!(matches!(error(&parts(header, "eA")).await, ProveError::Token(_)), "{name}");
    }
    // The public key, in each of its spellings, as a shared secret.
    for secret in
        [one().key.public_key_pem(), one().key.public_key_pem().trim().to_owned(), one().jwk()["n"].to_string()]
    {
        let header = json!({"alg": "HS256", "typ": "JWT", "kid": "one"});
        let signed = format!("{}.{}", encode(header.to_string()), encode(&payload));
        let key = jsonwebtoken::EncodingKey::from_secret(secret.as_bytes()).expect("a secret");
        let signature =
            jsonwebtoken::crypto::sign(signed.as_bytes(), &key, jsonwebtoken::Algorithm::HS256).expect("signed");
        let refused = error(&format!("{signed}.{signature}")).await;
        assert!(matches!(&refused, ProveError::Token(TokenError::Algorithm(name)) if name == "HS256"), "{refused}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_algorithm_that_is_not_configured() {
    let header = json!({"alg": "RS512", "kid": "one"});
    let refused = error(&one().sign_as(&header, &good().to_string())).await;
    assert!(matches!(refused, ProveError::Algorithm { algorithm: Algorithm::RS512, .. }), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn a_key_that_the_token_brings_along() {
    let mut jwk = two().jwk();
    jwk["kid"] = json!("one");
    for (name, value) in [
        ("jwk", jwk),
        ("jku", json!("https://evil.example/keys")),
        ("x5u", json!("https://evil.example/cert")),
        ("x5c", json!(["AAAA"])),
    ] {
        let mut header = json!({"alg": "RS256", "kid": "one"});
        header[name] = value;
        let refused = error(&two().sign_as(&header, &good().to_string())).await;
        assert!(matches!(refused, ProveError::Signature { .. }), "{name}: {refused}");
    }
}

#[tokio::test(start_paused = true)]
async fn names_of_keys_that_are_none() {
    for (id, is_token) in [("two", true), ("One", true), ("one ", true), ("../../one", true), ("", false)] {
        let refused = error(&one().sign_as(&json!({"alg": "RS256", "kid": id}), &good().to_string())).await;
        assert_eq!(matches!(refused, ProveError::UnknownKey { .. }), is_token, "{id}: {refused}");
    }
    let refused = error(&one().sign_as(&json!({"alg": "RS256"}), &good().to_string())).await;
    assert!(matches!(refused, ProveError::Token(_)), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn huge_nested_doubled_and_critical() {
    let sign = |payload: &str| one().sign_as(&json!({"alg": "RS256", "kid": "one"}), payload);
    let huge = claims(GITHUB, &json!({"filler": "x".repeat(20_000)})).to_string();
    let nested = good().to_string().replacen('{', &format!("{{\"a\":{}{},", "[".repeat(3000), "]".repeat(3000)), 1);
    let twice = good().to_string().replacen('{', "{\"repository\":\"victim/repo\",", 1);
    let hidden = good().to_string().replacen('{', "{\"repositor\\u0079\":\"victim/repo\",", 1);
    for payload in [huge, nested, twice, hidden, "[]".to_owned(), "{}{}".to_owned()] {
        let refused = error(&sign(&payload)).await;
        assert!(matches!(refused, ProveError::Token(_)), "{refused}");
    }
    let critical = json!({"alg": "RS256", "kid": "one", "crit": ["b64"], "b64": false});
    assert_eq!(error(&one().sign_as(&critical, &good().to_string())).await, ProveError::Token(TokenError::Critical));
    let token = sign(&good().to_string());
    let (_, signature) = token.rsplit_once('.').expect("parts");
    for token in
        [format!("{token}.{signature}"), format!("{token}{signature}"), format!("{token}="), format!("{token} ")]
    {
        error(&token).await;
    }
    let json = json!({"payload": encode(good().to_string()), "signatures": [{"signature": signature}, {"signature": signature}]});
    assert_eq!(
        error(&json.to_string()).await,
        ProveError::Token(TokenError::Shape),
        "the form with several signatures"
    );
}

#[tokio::test(start_paused = true)]
async fn any_change_of_a_signed_token_is_noticed() {
    let token = one().sign(&good());
    let verifier = of_github();
    verifier.prove(&token).await.expect("sound as it is");
    let (signed, signature) = token.rsplit_once('.').expect("parts");
    let (header, payload) = signed.split_once('.').expect("parts");
    let other = claims(GITHUB, &json!({"repository": "victim/repo"}));
    for token in [
        format!("{header}.{}.{signature}", encode(other.to_string())),
        format!("{}.{payload}.{signature}", encode(json!({"kid": "one", "alg": "RS256"}).to_string())),
        format!("{signed}.{}", encode([0; 256])),
        format!("{signed}.{}", encode(&URL_SAFE_NO_PAD.decode(signature).expect("base64")[..255])),
    ] {
        assert!(matches!(error(&token).await, ProveError::Signature { .. }));
    }
}

/// W9: clocks may differ by what is configured, and by no second more.
#[tokio::test(start_paused = true)]
async fn w9_dates_count_to_the_second() {
    let prove = async |change: Value| of_github().prove(&one().sign(&claims(GITHUB, &change))).await;
    // The leeway is 10 s.
    for (change, is_good) in [
        (json!({"exp": NOW - 9}), true),
        (json!({"exp": NOW - 10}), false),
        (json!({"exp": NOW - 11}), false),
        (json!({"nbf": NOW + 10}), true),
        (json!({"nbf": NOW + 11}), false),
        (json!({"iat": NOW + 10}), true),
        (json!({"iat": NOW + 11}), false),
        (json!({"nbf": null, "iat": null}), true),
        (json!({"exp": null}), false),
        (json!({"exp": (NOW + 60).to_string()}), false),
        (json!({"exp": -1}), false),
        (json!({"exp": 1e300}), false),
        (json!({"exp": true}), false),
        (json!({"nbf": "soon"}), false),
        // Milliseconds where seconds are wanted.
        (json!({"exp": NOW * 1000}), false),
    ] {
        assert_eq!(prove(change.clone()).await.is_ok(), is_good, "{change}");
    }
    let strict = IssuerConfig { leeway: Duration::ZERO, ..github() };
    let strict = verifier(&config(vec![strict]), &[Stand::new(GITHUB, &[one()])]);
    for (exp, is_good) in [(NOW + 1, true), (NOW, false), (NOW - 1, false)] {
        let token = one().sign(&claims(GITHUB, &json!({"exp": exp})));
        assert_eq!(strict.prove(&token).await.is_ok(), is_good, "{exp}");
    }
}

#[tokio::test(start_paused = true)]
async fn issuers_that_only_look_like_one() {
    for (name, hint) in [
        ("https://token.actions.githubusercontent.com/", true),
        ("https://TOKEN.actions.githubusercontent.com", true),
        ("http://token.actions.githubusercontent.com", false),
        ("https://token.actions.githubusercontent.com.evil.example", false),
        ("https://token.actions.githubusercontent.com/evil", false),
        ("https://token.\u{430}ctions.githubusercontent.com", false),
    ] {
        let refused = error(&one().sign(&claims(name, &json!({})))).await;
        let ProveError::UnknownIssuer { hint: said, .. } = refused else { panic!("{name}: {refused}") };
        assert_eq!(!said.is_empty(), hint, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn repositories_that_only_look_like_one() {
    for (says, is_named) in [
        (json!("vict\u{456}m/repo"), true),
        (json!("victim/repo\u{200b}"), true),
        (json!("victim/re\u{307}po"), true),
        (json!("victim\u{2215}repo"), true),
        (json!("victim/K\u{212a}"), true),
        (json!("victim/repo/"), true),
        (json!("/victim/repo"), true),
        (json!("victim//repo"), true),
        (json!("victim/repo.git"), true),
        (json!("victim/repo/extra"), true),
        (json!("victim"), true),
        (json!("victim/.."), true),
        (json!("victim/."), true),
        (json!("victim:repo/x"), true),
        (json!("user@victim/repo"), true),
        (json!("https://github.com/victim/repo"), true),
        (json!("victim/repo#x"), true),
        (json!("victim/re po"), true),
        (json!("victim/repo\n"), true),
        (json!("victim/%72epo"), true),
        (json!(""), true),
        (json!("x/".to_owned() + &"y".repeat(500)), true),
        (json!(["victim/repo"]), false),
        (json!(42), false),
        (json!(null), false),
    ] {
        let refused = error(&one().sign(&claims(GITHUB, &json!({"repository": says})))).await;
        assert_eq!(matches!(refused, ProveError::OddRepository { .. }), is_named, "{says}: {refused}");
        assert_eq!(matches!(refused, ProveError::NoRepository { .. }), !is_named, "{says}: {refused}");
    }
}

/// F48: what is more than the token itself makes it none, and says so; it is for who reads it to take the line's end off.
#[tokio::test(start_paused = true)]
async fn f48_a_token_with_a_line_end_is_told_from_a_bad_one() {
    let token = one().sign(&good());
    assert_eq!(error(&format!("{token}\n")).await, ProveError::Token(TokenError::Shape));
    assert_eq!(error("").await, ProveError::Token(TokenError::Shape));
}

#[tokio::test(start_paused = true)]
async fn keys_of_a_set_that_are_not_for_this() {
    let key = one().jwk();
    let with = |change: Value| {
        let mut key = key.clone();
        for (name, value) in change.as_object().expect("an object") {
            key[name] = value.clone();
        }
        key
    };
    let secret = json!({"kty": "oct", "kid": "one", "k": encode("secret"), "alg": "HS256"});
    for entry in [
        with(json!({"use": "enc"})),
        with(json!({"key_ops": ["encrypt"]})),
        with(json!({"alg": "RS512"})),
        with(json!({"alg": "PS256"})),
        with(json!({"kid": ""})),
        with(json!({"kid": 7})),
        with(json!({"kty": "EC"})),
        with(json!({"n": "!"})),
        with(json!({"n": encode([0xff; 64])})),
        secret,
        json!(null),
        json!("one"),
    ] {
        let stand = Stand::new(GITHUB, &[]);
        *stand.0.keys.lock().expect("sound") = vec![entry.clone()];
        let refused = verifier(&config(vec![github()]), &[stand]).prove(&one().sign(&good())).await;
        assert_eq!(refused.as_ref().map_err(ProveError::refusal), Err(Refusal::Unproven), "{entry}: {refused:?}");
    }
    let stand = Stand::new(GITHUB, &[]);
    *stand.0.keys.lock().expect("sound") =
        vec![json!(null), two().jwk(), with(json!({"alg": null, "use": null})), key.clone()];
    let found = verifier(&config(vec![github()]), &[stand]).prove(&one().sign(&good())).await;
    assert!(found.is_ok(), "among others: {found:?}");
}

#[tokio::test(start_paused = true)]
async fn other_kinds_of_keys_where_they_are_configured() {
    let both = IssuerConfig { algorithms: vec![Algorithm::ES256, Algorithm::EdDSA], ..github() };
    let curve = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("a key");
    let edwards = KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key");
    let (x, y) = curve.public_key_raw()[1..].split_at(32);
    let stand = Stand::new(GITHUB, &[]);
    *stand.0.keys.lock().expect("sound") = vec![
        json!({"kty": "EC", "crv": "P-256", "kid": "curve", "x": encode(x), "y": encode(y)}),
        json!({"kty": "OKP", "crv": "Ed25519", "kid": "edwards", "x": encode(edwards.public_key_raw())}),
        one().jwk(),
    ];
    let verifier = verifier(&config(vec![both]), &[stand]);
    let signed = |alg: &str, kid: &str| {
        format!("{}.{}", encode(json!({"alg": alg, "kid": kid}).to_string()), encode(good().to_string()))
    };
    let text = signed("ES256", "curve");
    let key = jsonwebtoken::EncodingKey::from_ec_der(curve.serialized_der());
    let signature = jsonwebtoken::crypto::sign(text.as_bytes(), &key, jsonwebtoken::Algorithm::ES256).expect("signed");
    verifier.prove(&format!("{text}.{signature}")).await.expect("of a curve");
    let text = signed("EdDSA", "edwards");
    let signature = encode(edwards.sign(text.as_bytes()).expect("signed"));
    verifier.prove(&format!("{text}.{signature}")).await.expect("of the other");
    let crossed = format!("{}.{signature}", signed("ES256", "edwards"));
    assert!(matches!(verifier.prove(&crossed).await, Err(ProveError::UnknownKey { .. })));
    assert!(
        matches!(verifier.prove(&one().sign(&good())).await, Err(ProveError::Algorithm { .. })),
        "the default no more"
    );
}
