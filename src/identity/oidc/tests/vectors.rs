//! The reference's vectors of identity, and what a proof says.

use super::*;

async fn prove(change: Value) -> Result<Verified, ProveError> {
    of_github().prove(&one().sign(&claims(GITHUB, &change))).await
}

#[tokio::test(start_paused = true)]
async fn github_as_the_reference_has_it() {
    assert_eq!(build(prove(json!({})).await), ("github.com/socialgouv/foo".to_owned(), Trust::Trusted));
    let pull = json!({"repository": "socialgouv/foo", "ref": "refs/pull/7/merge"});
    assert_eq!(build(prove(pull).await), ("github.com/socialgouv/foo".to_owned(), untrusted("7")));
    let other = prove(json!({"aud": "someone-else"})).await.expect_err("of another audience");
    assert!(matches!(&other, ProveError::Audience { theirs, .. } if theirs == "someone-else"), "{other}");
    let ended = prove(json!({"exp": NOW - 3600})).await.expect_err("ended");
    assert_eq!(ended, ProveError::Expired(3600));
    let forged = Signer { id: "one", key: two().key };
    let forged = of_github().prove(&forged.sign(&claims(GITHUB, &json!({})))).await;
    assert!(matches!(forged, Err(ProveError::Signature { .. })), "{forged:?}");
    let foreign = prove(json!({"iss": "https://issuer.example"})).await;
    assert!(matches!(foreign, Err(ProveError::UnknownIssuer { hint: "", .. })), "{foreign:?}");
}

#[tokio::test(start_paused = true)]
async fn other_forges_as_the_reference_has_it() {
    let gitlab = "https://gitlab.example.com";
    let forge = "https://forge.example.com/api/actions";
    let config = config(vec![
        issuer(&format!("kind = 'gitlab'\nissuer = '{gitlab}'")),
        issuer(&format!("kind = 'forgejo'\nissuer = '{forge}'")),
    ]);
    let stands = [Stand::new(gitlab, &[one()]), Stand::new(forge, &[two()])];
    let verifier = verifier(&config, &stands);
    for protected in [json!("true"), json!("false"), json!(true), json!(false)] {
        let change = json!({
            "repository": null, "project_path": "studio-tech/architecture/foo", "ref": "main", "ref_protected": protected,
        });
        let proven = build(verifier.prove(&one().sign(&claims(gitlab, &change))).await);
        assert_eq!(proven, ("gitlab.example.com/studio-tech/architecture/foo".to_owned(), Trust::Trusted));
    }
    let change = json!({"repository": "team/app", "ref": "refs/pull/2/head"});
    let proven = build(verifier.prove(&two().sign(&claims(forge, &change))).await);
    assert_eq!(proven, ("forge.example.com/team/app".to_owned(), untrusted("2")));
    let crossed = verifier.prove(&one().sign(&claims(forge, &change))).await;
    assert!(matches!(crossed, Err(ProveError::UnknownKey { .. })), "{crossed:?}");
}

#[tokio::test(start_paused = true)]
async fn what_may_build_is_what_the_list_names() {
    let listed = |list: &[&str]| {
        let repositories = Some(list.iter().map(ToString::to_string).collect());
        let config = config::Identity { repositories, ..config(vec![github()]) };
        verifier(&config, &[Stand::new(GITHUB, &[one()])])
    };
    let of = |repo: &str| one().sign(&claims(GITHUB, &json!({"repository": repo})));
    let all = listed(&["github.com/SocialGouv/*", "gitlab.example.com/studio-tech/architecture/*"]);
    for repo in ["socialgouv/foo", "SocialGouv/Foo"] {
        assert!(all.prove(&of(repo)).await.is_ok(), "{repo}");
    }
    let other = all.prove(&of("outsider/repo")).await.expect_err("not listed");
    assert_eq!(other.refusal(), Refusal::NotListed);
    assert!(other.to_string().contains("github.com/outsider/repo"));
    // Who may build is said only to those who are who they say.
    let forged = Signer { id: "one", key: two().key }.sign(&claims(GITHUB, &json!({"repository": "outsider/repo"})));
    assert_eq!(all.prove(&forged).await.expect_err("forged").refusal(), Refusal::Unproven);
    assert!(of_github().prove(&of("outsider/repo")).await.is_ok(), "no list is all");
}

#[tokio::test(start_paused = true)]
async fn without_issuers_nothing_is_proven_and_nothing_is_wrong() {
    let verifier = verifier(&config::Identity::default(), &[]);
    let error = verifier.prove(&one().sign(&claims(GITHUB, &json!({})))).await.expect_err("nobody's");
    assert!(matches!(error, ProveError::UnknownIssuer { .. }));
    assert_eq!(verifier.issuers(), []);
}

#[tokio::test(start_paused = true)]
async fn a_generic_issuer_by_its_mapping() {
    let build_service = "https://oidc.service.example/org/1";
    let cluster = "https://kubernetes.example";
    let generic =
        |issuer_name: &str, more: &str| issuer(&format!("kind = 'generic'\nissuer = '{issuer_name}'\n{more}"));
    let config = config(vec![
        generic(
            build_service,
            "host = 'github.com'\nrepo_claim = 'service.example/vcs-origin'\nrepo_claim_has_host = true\nlane = 'trusted'",
        ),
        generic(cluster, "host = 'cluster.example'\nrepo_claim = ['kubernetes.io', 'namespace']\nlane = 'untrusted'"),
    ]);
    let verifier = verifier(&config, &[Stand::new(build_service, &[one()]), Stand::new(cluster, &[two()])]);
    let of = |origin: &str| one().sign(&claims(build_service, &json!({"service.example/vcs-origin": origin})));
    let proven = build(verifier.prove(&of("github.com/Org/Repo")).await);
    assert_eq!(proven, ("github.com/org/repo".to_owned(), Trust::Trusted));
    for origin in ["gitlab.com/org/repo", "org/repo", "github.com", "github.com/", "github.com/../x"] {
        let error = verifier.prove(&of(origin)).await.expect_err("of another host");
        assert!(matches!(error, ProveError::OddRepository { .. }), "{origin}: {error}");
    }
    let change =
        json!({"kubernetes.io": {"namespace": "Prod"}, "sub": "system:serviceaccount:prod:ci", "run_id": null});
    let (repo, trust) = build(verifier.prove(&two().sign(&claims(cluster, &change))).await);
    assert_eq!(repo, "cluster.example/prod");
    let Trust::Untrusted { fork } = trust else { panic!("{trust:?}") };
    assert!(fork.starts_with("sub-") && fork.len() == 36, "{fork}");
}

#[tokio::test(start_paused = true)]
async fn a_proof_tells_who_it_was_and_until_when() {
    let change = json!({"event_name": "push", "actor": "jo\u{202e}\n", "aud": ["other", AUDIENCE]});
    let token = one().sign(&claims(GITHUB, &change));
    let verified = of_github().prove(&token).await.expect("proven");
    assert_eq!(verified.expires, Timestamp::from_millis((NOW + 120) * 1000));
    assert_eq!(
        verified.who,
        format!(
            "a build of github.com/socialgouv/foo, by {GITHUB}, ref refs/heads/main, event_name push, run_id 4711, \
             actor jo\\u{{202e}}\\n"
        )
    );
    let change = json!({"ref": "refs/heads/".to_owned() + &"x".repeat(300), "actor": "y".repeat(300)});
    let long = of_github().prove(&one().sign(&claims(GITHUB, &change))).await.expect("proven").who;
    assert!(long.len() <= crate::identity::LONGEST_WHO && long.ends_with("..."), "{long}");
    assert!(!format!("{verified:?}").contains(token.rsplit_once('.').expect("parts").1));
}

/// W8: a token that comes again is told of, and refused where that is wanted.
#[tokio::test(start_paused = true)]
async fn w8_a_token_that_comes_again_is_noted_or_refused() {
    let verifier_with = |replay| {
        let config = config::Identity { replay, ..config(vec![github()]) };
        verifier(&config, &[Stand::new(GITHUB, &[one()])])
    };
    let token = one().sign(&claims(GITHUB, &json!({})));
    let other = one().sign(&claims(GITHUB, &json!({"jti": "run-1-token-2"})));
    let noting = verifier_with(Replay::Note);
    let repeated = async |token: &str| noting.prove(token).await.expect("proven").is_repeated;
    assert_eq!([repeated(&token).await, repeated(&token).await, repeated(&other).await], [false, true, false]);
    let refusing = verifier_with(Replay::Refuse);
    assert!(refusing.prove(&token).await.is_ok());
    assert_eq!(refusing.prove(&token).await, Err(ProveError::Replayed));
    assert!(refusing.prove(&other).await.is_ok());
    let nameless = one().sign(&claims(GITHUB, &json!({"jti": null})));
    assert_eq!(refusing.prove(&nameless).await, Err(ProveError::Nameless));
    assert!(!noting.prove(&nameless).await.expect("proven").is_repeated);
}

/// W8: each Kiln has an audience of its own, so what is minted for one opens no other.
#[tokio::test(start_paused = true)]
async fn w8_a_token_for_another_kiln_counts_nothing_here() {
    for audience in
        [json!("https://other.example"), json!(["https://other.example", 7]), json!(null), json!([]), json!({})]
    {
        let error = prove(json!({"aud": audience})).await.expect_err("for another");
        assert!(matches!(&error, ProveError::Audience { ours, .. } if ours == AUDIENCE), "{error}");
        assert_eq!(error.refusal(), Refusal::Unproven);
    }
}
