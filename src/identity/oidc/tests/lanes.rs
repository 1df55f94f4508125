//! Which lane a build is in, by its forge and by the rules of the configuration.

use super::*;
use crate::identity::oidc::lanes::trust;

#[expect(clippy::needless_pass_by_value, reason = "reads better where it is called")]
fn of(config: &IssuerConfig, change: Value) -> Trust {
    let token = Signer::sign(&one(), &claims(GITHUB, &change));
    trust(config, &kiln_token::parse(&token).expect("a token").claims)
}

fn with(rules: &str) -> IssuerConfig {
    issuer(&format!("kind = 'github'\nissuer = '{GITHUB}'\n{rules}"))
}

fn gitlab(rules: &str) -> IssuerConfig {
    issuer(&format!("kind = 'gitlab'\nissuer = 'https://gitlab.com'\n{rules}"))
}

/// W6: the ref alone says nothing of whose code a run works on.
#[test]
fn w6_runs_that_a_stranger_can_set_off_are_untrusted_whatever_their_ref() {
    let forgejo = issuer("kind = 'forgejo'\nissuer = 'https://forge.example/api/actions'");
    let ghes = issuer("kind = 'ghes'\nissuer = 'https://ghe.example/_services/token'");
    for config in [github(), forgejo, ghes] {
        for event in [
            "pull_request",
            "pull_request_target",
            "workflow_run",
            "issue_comment",
            "issues",
            "discussion",
            "discussion_comment",
            "pull_request_review",
            "pull_request_review_comment",
            "check_run",
            "deployment_status",
            "watch",
            "fork",
            "something_new",
            "Push",
        ] {
            assert_eq!(of(&config, json!({"event_name": event})), untrusted("run-4711"), "{event}");
        }
        for event in ["push", "schedule", "workflow_dispatch", "repository_dispatch", "release", "merge_group", ""] {
            assert_eq!(of(&config, json!({"event_name": event})), Trust::Trusted, "{event}");
        }
        assert_eq!(of(&config, json!({"event_name": ["push"]})), untrusted("run-4711"), "a list is no event");
    }
}

/// W6, other way round: whoever knows the workflow can trust it.
#[test]
fn w6_one_workflow_can_be_trusted_by_its_file() {
    let config = with(
        "[[trusted]]\nevent_name = 'workflow_run'\n\
         job_workflow_ref = 'org/ci/.github/workflows/release.yml@refs/heads/*'",
    );
    let run = |file: &str| json!({"event_name": "workflow_run", "job_workflow_ref": file});
    assert_eq!(of(&config, run("org/ci/.github/workflows/release.yml@refs/heads/main")), Trust::Trusted);
    for file in [
        "org/ci/.github/workflows/test.yml@refs/heads/main",
        "evil/ci/.github/workflows/release.yml@refs/heads/main",
        "",
    ] {
        assert_eq!(of(&config, run(file)), untrusted("run-4711"), "{file}");
    }
    assert_eq!(of(&config, json!({"event_name": "issue_comment"})), untrusted("run-4711"));
}

#[test]
fn a_rule_that_says_untrusted_goes_before_one_that_says_trusted() {
    let config = with(
        "[[untrusted]]\nenvironment = 'preview*'\n[[untrusted]]\nref_protected = 'false'\nref = 'refs/heads/*'\n\
         [[trusted]]\nref = 'refs/pull/*'",
    );
    assert_eq!(of(&config, json!({"ref": "refs/pull/3/merge"})), Trust::Trusted);
    assert_eq!(of(&config, json!({"ref": "refs/pull/3/merge", "environment": "preview-3"})), untrusted("3"));
    assert_eq!(of(&config, json!({"ref_protected": false})), untrusted("run-4711"));
    assert_eq!(of(&config, json!({"ref_protected": "true"})), Trust::Trusted);
    assert_eq!(of(&config, json!({"environment": ["preview"]})), untrusted("run-4711"), "what cannot be compared");
    assert_eq!(
        of(&with("[[trusted]]\nactor = '*'"), json!({"event_name": "watch", "actor": ["x"]})),
        untrusted("run-4711")
    );
    let closed = with("lane = 'untrusted'\n[[trusted]]\nref_protected = 'true'");
    assert_eq!(of(&closed, json!({"event_name": "push"})), untrusted("run-4711"));
    assert_eq!(of(&closed, json!({"event_name": "push", "ref_protected": "true"})), Trust::Trusted);
}

#[test]
fn gitlab_s_merge_requests_are_untrusted_whatever_their_branch_is_called() {
    let by_default = |change: Value| {
        let mut claims =
            json!({"pipeline_id": "99", "ref": "main", "ref_path": "refs/heads/main", "ref_protected": "false"});
        for (name, value) in change.as_object().expect("an object") {
            claims[name] = value.clone();
        }
        of(&gitlab(""), claims)
    };
    let strict = gitlab("[[untrusted]]\nref_protected = 'false'");
    let unprotected = json!({"pipeline_source": "push", "pipeline_id": 5, "ref_protected": "false"});
    assert_eq!(of(&strict, unprotected), untrusted("run-5"));
    for source in ["push", "schedule", "web", "api", "trigger", "pipeline"] {
        assert_eq!(by_default(json!({"pipeline_source": source})), Trust::Trusted, "{source}");
    }
    for source in ["merge_request_event", "external_pull_request_event", "parent_pipeline", "something_new"] {
        assert_eq!(by_default(json!({"pipeline_source": source})), untrusted("run-99"), "{source}");
    }
    assert_eq!(by_default(json!({"pipeline_source": "parent_pipeline", "ref_protected": "true"})), Trust::Trusted);
    let numbered = json!({"pipeline_source": "merge_request_event", "merge_request_iid": 12});
    assert_eq!(by_default(numbered), untrusted("12"));
    let by_ref = json!({"pipeline_source": "push", "ref_path": "refs/merge-requests/12/head"});
    assert_eq!(by_default(by_ref), untrusted("12"));
}

/// K7: a build can never choose whose cache it shares.
#[test]
fn a_fork_is_named_by_its_forge_and_by_nothing_else() {
    let fork = |config: &IssuerConfig, change: Value| match of(config, change) {
        Trust::Untrusted { fork } => fork,
        Trust::Trusted => panic!("trusted"),
    };
    let pull = |name: &str| fork(&github(), json!({"ref": name, "event_name": "pull_request"}));
    assert_eq!(pull("refs/pull/7/merge"), "7");
    assert_eq!(pull("refs/pull/7"), "7");
    for name in
        ["refs/pull/", "refs/pull/7x/merge", "refs/pull/-7/merge", "refs/pull/../7/merge", "refs/pull/\u{667}/merge"]
    {
        assert_eq!(pull(name), "run-4711", "{name}");
    }
    assert_eq!(pull(&format!("refs/pull/{}/merge", "7".repeat(21))), "run-4711");
    let nameless = |sub: &str| fork(&github(), json!({"event_name": "watch", "run_id": "x", "sub": sub}));
    assert_ne!(nameless("a"), nameless("b"));
    assert!(nameless("a").starts_with("sub-"));
    let generic = issuer(
        "kind = 'generic'\nissuer = 'https://x.example'\nhost = 'h.example'\nrepo_claim = 'repository'\n\
         lane = 'untrusted'\npull_request_claim = 'pr'",
    );
    assert_eq!(fork(&generic, json!({"pr": 12})), "12");
    assert_eq!(fork(&generic, json!({"pr": "false"})), "run-4711");
    let named = fork(&generic, json!({"pr": "run-1"}));
    assert!(named.starts_with("pr-") && named.len() == 35, "{named}");
    let spec = kiln_domain::BuildSpec::new("github.com/org/repo", "", "", "amd64").expect("a build");
    for fork in [named, nameless("a"), pull("refs/pull/7/merge"), fork(&github(), json!({"event_name": "watch"}))] {
        let identity = kiln_domain::Identity::pull_request(spec.clone(), &fork).expect("a name that the rules allow");
        assert_eq!(identity.pull_request, Some(fork));
    }
}
