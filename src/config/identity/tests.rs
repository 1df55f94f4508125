//! What the section may say.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::*;
use crate::config::{Config, Overrides};

fn load(text: &str) -> Result<Identity, String> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), text).expect("written");
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600)).expect("chmod");
    Config::load(Some(file.path()), &Overrides::default())
        .map(|config| config.identity)
        .map_err(|error| error.to_string())
}

fn issuer(more: &str) -> String {
    format!("[[identity.issuers]]\naudience = 'https://kiln.example'\n{more}\n")
}

fn challenge(more: &str) -> String {
    format!(
        "[[identity.challenges]]\nkind = 'github'\ncredentials_file = '/etc/kiln/github'\nrepositories = ['github.com/org/*']\n{more}\n"
    )
}

const GITHUB: &str = "kind = 'github'\nissuer = 'https://token.actions.githubusercontent.com'";
const GENERIC: &str = "kind = 'generic'\nissuer = 'https://agent.buildkite.com'\nhost = 'git.example'\nrepo_claim = 'repo'\nlane = 'trusted'";

#[test]
fn an_example_of_everything_survives_a_round_trip() {
    let text = format!(
        "[identity]\nrepositories = ['github.com/org/*']\nreplay = 'refuse'\n{}{}{}",
        issuer(&format!("{GITHUB}\n[[identity.issuers.untrusted]]\nenvironment = 'preview'\nref = 'refs/heads/*'")),
        issuer(
            "kind = 'gitlab'\nissuer = 'https://gitlab.example:8443'\nca_file = '/etc/kiln/ca.pem'\nleeway = '0s'\n\
             algorithms = ['RS256', 'ES256']\nclaims = ['new']\nlane = 'untrusted'\n[[identity.issuers.trusted]]\nnew = 'x'"
        ),
        issuer(&format!("{GENERIC}\nrepo_claim_has_host = true\npull_request_claim = 'pr'")) + &challenge(""),
    );
    let identity = load(&text).expect("valid");
    assert_eq!(identity.issuers.len(), 3);
    assert_eq!(identity.challenges[0].repo_host().as_deref(), Some("github.com"));
    assert_eq!(identity.issuers[1].repo_host().as_deref(), Some("gitlab.example"), "of an issuer with a port");
    assert_eq!(identity.patterns().expect("read").map(|list| list.len()), Some(1));
    let config = Config { identity, ..Config::default() };
    let rendered = toml::to_string(&config).expect("renders");
    assert_eq!(Config::parse(Path::new("x"), &rendered).expect("parses"), config, "{rendered}");
}

#[test]
fn a_path_of_names_leads_to_a_claim() {
    let text = issuer(&GENERIC.replace("'repo'", "['kubernetes.io', 'namespace']"));
    assert_eq!(load(&text).expect("valid").issuers[0].repo_claim(), ["kubernetes.io", "namespace"]);
}

/// The reference's vectors of what keeps it from starting, and what else is certainly a mistake. W14: a typing error is one.
#[test]
fn w14_mistakes_are_named_with_their_remedy() {
    let of = |more: &str| issuer(&format!("{GITHUB}\n{more}"));
    let ghes = "kind = 'ghes'\nissuer = 'https://ghe.example/_services/token'";
    for (text, says) in [
        ("[[identity.issuers]]\nkind = 'github'\naudience = 'x'".to_owned(), "missing field `issuer`"),
        (format!("[[identity.issuers]]\n{GITHUB}"), "missing field `audience`"),
        (format!("[[identity.issuers]]\n{GITHUB}\naudience = ''"), "identity.issuers.audience"),
        (format!("[[identity.issuers]]\n{GITHUB}\naudience = 'a b'"), "identity.issuers.audience"),
        (issuer(GITHUB) + &issuer(&GITHUB.replace("com'", "com/'")), "is there twice"),
        (issuer("kind = 'buildkite'\nissuer = 'https://x.example'"), "unknown variant"),
        (issuer("kind = 'generic'\nissuer = 'https://x.example'"), "needs a host"),
        (issuer(&GENERIC.replace("repo_claim = 'repo'", "")), "identity.issuers.repo_claim"),
        (issuer(&GENERIC.replace("'repo'", "[]")), "identity.issuers.repo_claim"),
        (issuer(&GENERIC.replace("'repo'", "''")), "identity.issuers.repo_claim"),
        (issuer(&GENERIC.replace("lane = 'trusted'", "")), "identity.issuers.lane"),
        (issuer(&GENERIC.replace("git.example", "https://git.example")), "identity.issuers.host"),
        (issuer(&GENERIC.replace("git.example", "Git.example")), "identity.issuers.host"),
        (of("algorithms = []"), "identity.issuers.algorithms"),
        (of("algorithms = ['HS256']"), "unknown variant"),
        (of("algorithms = ['none']"), "unknown variant"),
        (of("leeway = '301s'"), "identity.issuers.leeway"),
        (of("leeway = 10"), "leeway"),
        (of("ca_file = 'ca.pem'"), "identity.issuers.ca_file"),
        (of("jwks_host = 'https://x'"), "identity.issuers.jwks_host"),
        (of("lane = 'trusted'"), "would trust pull requests"),
        (of("repo_claim = 'x'"), "are for kind generic"),
        (of("audiences = ['x']"), "unknown field"),
        (of("[[identity.issuers.untrusted]]"), "rule without a claim"),
        (of("[[identity.issuers.untrusted]]\nevent = 'push'"), "no known claim"),
        (of("[[identity.issuers.untrusted]]\nref_protected = false"), "expected a string"),
        (challenge("api = 'http://api.github.com'"), "identity.challenges.api"),
        (challenge("host = 'GitHub.com'"), "identity.challenges.host"),
        (challenge("ca_file = 'ca'"), "identity.challenges.ca_file"),
        (challenge("token = 'x'"), "unknown field"),
        (challenge("").replace("/etc", "etc"), "identity.challenges.credentials_file"),
        (challenge("").replace("'github.com/org/*'", ""), "identity.challenges.repositories"),
        (challenge("").replace("org/*", "*/org"), "identity.challenges.repositories"),
        (challenge("").replace("'github'", "'gitlab'"), "unknown variant"),
        ("[identity]\nrepositories = []".to_owned(), "lets nobody build"),
        ("[identity]\nrepositories = ['github.com/*/x']".to_owned(), "identity.repositories"),
        ("[identity]\nreplay = 'maybe'".to_owned(), "unknown variant"),
        ("[identity]\nissuer = []".to_owned(), "unknown field"),
        (issuer(&ghes.replace("https", "http")), "not https"),
        (issuer(&ghes.replace("https://", "https://user@")), "no plain address"),
        (issuer(&ghes.replace("token", "token?x=1")), "has a query"),
        (issuer(&ghes.replace("https://", "")), "identity.issuers.issuer"),
        (issuer(&ghes.replace("ghe.example", "gh\u{435}.example")), "no plain address"),
    ] {
        let error = load(&text).map_or_else(|error| error, |identity| format!("accepted as {identity:?}"));
        assert!(error.contains(says) && !error.starts_with("accepted"), "of {text}: {error}");
    }
}

/// W7: a server of one's own is never taken for github.com.
#[test]
fn w7_an_issuer_of_one_s_own_speaks_for_its_own_host() {
    let host = |text: &str| load(&issuer(text)).map(|identity| identity.issuers[0].repo_host().expect("a host"));
    assert_eq!(host(GITHUB).as_deref(), Ok("github.com"));
    assert_eq!(host(&GITHUB.replace(".com'", ".com/enterprise'")).as_deref(), Ok("github.com"));
    let tenant = "kind = 'ghes'\nissuer = 'https://token.actions.octo.ghe.com'";
    assert_eq!(host(tenant).as_deref(), Ok("octo.ghe.com"));
    assert!(host(&GITHUB.replace("'github'", "'ghes'")).expect_err("refused").contains("take kind \"github\""));
    let ghes = "kind = 'ghes'\nissuer = 'https://GHE.example/_services/token'";
    assert_eq!(host(ghes).as_deref(), Ok("ghe.example"));
    assert!(
        host(&format!("{ghes}\nhost = 'github.com'")).expect_err("refused").contains("does not speak for github.com")
    );
    let as_github = "kind = 'github'\nissuer = 'https://ghe.example/_services/token'";
    assert!(host(as_github).expect_err("refused").contains("take kind \"ghes\""));
    assert!(host("kind = 'gitlab'\nissuer = 'https://github.com'").is_err());
}

/// F53: the forge's own address is the login's issuer, not that of the actions.
#[test]
fn f53_forgejo_s_tokens_come_from_below_api_actions() {
    for kind in ["forgejo", "gitea"] {
        let text = |path: &str| issuer(&format!("kind = '{kind}'\nissuer = 'https://forge.example{path}'"));
        assert!(load(&text("/api/actions")).is_ok() && load(&text("/forge/api/actions/")).is_ok());
        assert!(load(&text("")).expect_err("refused").contains("/api/actions"));
    }
}

#[test]
fn only_this_machine_is_asked_in_the_clear() {
    let place = |text: &str| Place::parse(text).map(|place| (place.tls, place.authority(), place.path));
    assert_eq!(place("http://127.0.0.1:99/a"), Ok((false, "127.0.0.1:99".to_owned(), "/a".to_owned())));
    assert_eq!(place("http://[::1]"), Ok((false, "[::1]".to_owned(), "/".to_owned())));
    assert_eq!(place("https://X.example:443/a?b=c"), Ok((true, "x.example".to_owned(), "/a?b=c".to_owned())));
    for text in
        ["http://x.example", "http://127.0.0.1.example", "ftp://localhost", "https://", "https:///a", "x", "//x", ""]
    {
        assert!(place(text).is_err(), "{text}");
    }
}
