//! What the environment of a CI says of a build: its pull request and its branch.
//!
//! Two families that set well-known variables by themselves: GitHub Actions (Forgejo's and Gitea's are alike), and GitLab CI.
//! Any other CI says it with `KILN_PULL_REQUEST` and `KILN_BRANCH`; flags and these win.

use kiln_domain::{BuildSpec, Identity};

use super::CliError;
use super::args::Lane;

/// Whose daemon the build gets.
pub(super) fn identity(spec: BuildSpec, lane: &Lane) -> Result<Identity, CliError> {
    Ok(match pull_request(lane, variable)? {
        Some(name) => Identity::pull_request(spec, &name)?,
        None if lane.untrusted => Identity::fork(spec),
        None => Identity::project(spec),
    })
}

/// A branch that is only found here is a hint: one that kilnd would refuse is left out.
pub(super) fn branch(named: Option<&str>) -> Option<String> {
    named.map(str::to_owned).filter(|name| !name.is_empty()).or_else(|| ci_branch(variable))
}

fn variable(name: &str) -> Option<String> {
    super::variable(name)?.into_string().ok()
}

/// Asked for only where the build is untrusted: what is trusted has the project's daemon, whichever pull request it is of.
fn pull_request(lane: &Lane, ci: impl Fn(&str) -> Option<String>) -> Result<Option<String>, CliError> {
    let named = lane.pull_request.as_deref().map(str::trim).filter(|name| !name.is_empty());
    match (named, lane.untrusted) {
        (Some(_), false) => Err(CliError::TrustedPullRequest),
        (Some(name), true) => Ok(Some(name.to_owned())),
        (None, true) => Ok(ci_pull_request(ci)),
        (None, false) => Ok(None),
    }
}

fn ci_pull_request(ci: impl Fn(&str) -> Option<String>) -> Option<String> {
    // `refs/pull/12/merge`, or `/head`.
    let of_ref = |name: String| Some(name.strip_prefix("refs/pull/")?.split('/').next()?.to_owned());
    let is_number = |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    ci("GITHUB_REF").and_then(of_ref).or_else(|| ci("CI_MERGE_REQUEST_IID")).filter(is_number)
}

fn ci_branch(ci: impl Fn(&str) -> Option<String>) -> Option<String> {
    // The first is set for pull requests only, whose `GITHUB_REF_NAME` is no branch.
    let found = ["GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"].into_iter().find_map(ci);
    found.filter(|name| kiln_wire::check_branch(name).is_ok())
}

#[cfg(test)]
mod tests {
    use kiln_domain::Role;

    use super::*;

    fn ci(set: &[(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
        let set = set.to_vec();
        move |name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    }

    fn lane(untrusted: bool, pull_request: Option<&str>) -> Lane {
        Lane { untrusted, pull_request: pull_request.map(str::to_owned) }
    }

    #[test]
    fn a_pull_request_is_the_flag_s_or_the_ci_s() {
        let github = ci(&[("GITHUB_REF", "refs/pull/12/merge")]);
        let of = |lane: &Lane| pull_request(lane, &github).expect("well-formed");
        assert_eq!(of(&lane(true, None)).as_deref(), Some("12"));
        assert_eq!(of(&lane(true, Some(" 7 "))).as_deref(), Some("7"), "the flag wins");
        assert_eq!(of(&lane(true, Some(""))).as_deref(), Some("12"), "an empty one is none");
        assert_eq!(of(&lane(false, None)), None, "a trusted build has the project's own daemon");
        assert!(matches!(pull_request(&lane(false, Some("7")), &github), Err(CliError::TrustedPullRequest)));
        for (name, value, expected) in [
            ("GITHUB_REF", "refs/pull/9/head", Some("9")),
            ("GITHUB_REF", "refs/heads/main", None),
            ("GITHUB_REF", "refs/pull//merge", None),
            ("GITHUB_REF", "refs/pull/x y/merge", None),
            ("GITHUB_REF", "refs/tags/refs/pull/1/merge", None),
            ("CI_MERGE_REQUEST_IID", "31", Some("31")),
            ("CI_MERGE_REQUEST_IID", "", None),
            ("CI_MERGE_REQUEST_ID", "31", None),
        ] {
            assert_eq!(ci_pull_request(ci(&[(name, value)])).as_deref(), expected, "{name}={value}");
        }
    }

    #[test]
    fn a_branch_is_that_of_the_pull_request_where_there_is_one() {
        let github = [("GITHUB_REF_NAME", "12/merge"), ("GITHUB_HEAD_REF", "feature/x")];
        assert_eq!(ci_branch(ci(&github)).as_deref(), Some("feature/x"));
        assert_eq!(ci_branch(ci(&[("GITHUB_REF_NAME", "main")])).as_deref(), Some("main"));
        assert_eq!(ci_branch(ci(&[("CI_COMMIT_REF_NAME", "release")])).as_deref(), Some("release"));
        assert_eq!(ci_branch(ci(&[])), None);
        assert_eq!(ci_branch(ci(&[("GITHUB_REF_NAME", "a\nb")])), None, "a hint fails no build");
        assert_eq!(branch(Some("mine")).as_deref(), Some("mine"));
    }

    #[test]
    fn a_build_that_says_whose_it_is_has_the_key_of_its_fork() {
        let spec = || BuildSpec::new("h/r", "", "", "amd64").expect("valid");
        let role = |lane: &Lane| identity(spec(), lane).expect("an identity").key.role();
        assert_eq!(role(&lane(false, None)), Role::Project);
        assert_eq!(role(&lane(true, Some("12"))), Role::PullRequest);
        assert!(matches!(identity(spec(), &lane(true, Some("1 2"))), Err(CliError::PullRequest(_))));
    }
}
