//! What is wrong with the section, each with its remedy.

use std::time::Duration;

use kiln_domain::RepoName;

use super::{ClaimRule, GITHUB_ISSUER_HOST, Identity, Issuer, IssuerKind, Lane};
use crate::config::ConfigError;

/// More than clocks that are kept right ever differ; a token is good for longer by it.
const LONGEST_LEEWAY: Duration = Duration::from_mins(5);

const MOST_ISSUERS: usize = 32;

/// Claims of GitHub's tokens that say something of a build. Forgejo and Gitea have some of them.
const GITHUB_CLAIMS: [&str; 30] = [
    "actor",
    "actor_id",
    "base_ref",
    "check_run_id",
    "enterprise",
    "enterprise_id",
    "enterprise_slug",
    "environment",
    "environment_node_id",
    "event_name",
    "head_ref",
    "job_workflow_ref",
    "job_workflow_sha",
    "ref",
    "ref_protected",
    "ref_type",
    "repository",
    "repository_id",
    "repository_owner",
    "repository_owner_id",
    "repository_visibility",
    "run_attempt",
    "run_id",
    "run_number",
    "runner_environment",
    "sha",
    "sub",
    "workflow",
    "workflow_ref",
    "workflow_sha",
];

const GITLAB_CLAIMS: [&str; 31] = [
    "ci_config_ref_uri",
    "ci_config_sha",
    "deployment_action",
    "deployment_tier",
    "environment",
    "environment_action",
    "environment_protected",
    "job_id",
    "job_project_id",
    "job_project_path",
    "job_source",
    "namespace_id",
    "namespace_path",
    "pipeline_id",
    "pipeline_source",
    "pipeline_source_event",
    "project_id",
    "project_path",
    "project_visibility",
    "ref",
    "ref_path",
    "ref_protected",
    "ref_type",
    "runner_environment",
    "runner_id",
    "sha",
    "sub",
    "target_ref",
    "target_ref_protected",
    "user_id",
    "user_login",
];

impl Identity {
    pub(in crate::config) fn check(&self) -> Result<(), ConfigError> {
        self.check_repositories()?;
        if self.issuers.len() > MOST_ISSUERS {
            return wrong("identity.issuers", self.issuers.len(), "give at most 32");
        }
        for (at, issuer) in self.issuers.iter().enumerate() {
            issuer.check()?;
            let same = |other: &&Issuer| bare(&other.issuer) == bare(&issuer.issuer);
            if self.issuers[..at].iter().find(same).is_some() {
                return wrong("identity.issuers", &issuer.issuer, "is there twice: an issuer has one entry");
            }
        }
        self.challenges.iter().try_for_each(super::Forge::check)
    }

    fn check_repositories(&self) -> Result<(), ConfigError> {
        const KEY: &str = "identity.repositories";
        if self.repositories.as_ref().is_some_and(Vec::is_empty) {
            return wrong(
                KEY,
                "[]",
                "lets nobody build: leave it out for all that are proven, or leave out the issuers",
            );
        }
        match self.patterns() {
            Ok(_) => Ok(()),
            Err(error) => {
                wrong(KEY, format!("{:?}", self.repositories.as_deref().unwrap_or_default()), &error.to_string())
            }
        }
    }
}

impl Issuer {
    fn check(&self) -> Result<(), ConfigError> {
        self.check_place()?;
        self.check_host()?;
        let audience = &self.audience;
        if audience.is_empty() || audience.len() > 512 || !audience.bytes().all(|b| b.is_ascii_graphic()) {
            return wrong(
                "identity.issuers.audience",
                audience,
                "give the name that tokens for this Kiln carry, such as its address",
            );
        }
        if self.algorithms.is_empty() {
            return wrong("identity.issuers.algorithms", "[]", "give at least one, such as RS256");
        }
        if self.leeway > LONGEST_LEEWAY {
            return wrong(
                "identity.issuers.leeway",
                format!("{:?}", self.leeway),
                "give at most 5m, and keep the clocks right",
            );
        }
        if let Some(path) = self.ca_file.as_ref().filter(|path| !path.is_absolute()) {
            return wrong("identity.issuers.ca_file", path.display(), "give an absolute path");
        }
        self.check_mapping()?;
        self.check_rules()
    }

    fn check_place(&self) -> Result<(), ConfigError> {
        let place = match self.place() {
            Ok(place) => place,
            Err(why) => return wrong("identity.issuers.issuer", &self.issuer, why),
        };
        if place.path.contains('?') {
            return wrong("identity.issuers.issuer", &self.issuer, "has a query, which no issuer has");
        }
        let actions = matches!(self.kind, IssuerKind::Forgejo | IssuerKind::Gitea);
        if actions && !bare(&self.issuer).ends_with("/api/actions") {
            let why = "is not where the tokens of actions come from: that is <address of the forge>/api/actions";
            return wrong("identity.issuers.issuer", &self.issuer, why);
        }
        if let Some(host) = self.jwks_host.as_ref().filter(|host| !is_authority(host)) {
            return wrong("identity.issuers.jwks_host", host, "give a host, or host:port");
        }
        Ok(())
    }

    /// W7: no issuer speaks for another forge's repositories by mistake.
    fn check_host(&self) -> Result<(), ConfigError> {
        let is_github = self.place().is_ok_and(|place| place.host == GITHUB_ISSUER_HOST);
        if is_github && !matches!(self.kind, IssuerKind::Github | IssuerKind::Generic) {
            return wrong("identity.issuers.issuer", &self.issuer, "is GitHub's own: take kind \"github\"");
        }
        let Some(host) = self.repo_host() else {
            let why = match self.kind {
                IssuerKind::Github => format!(
                    "is not GitHub's own ({GITHUB_ISSUER_HOST}): take kind \"ghes\", or say with host whose repositories it speaks for"
                ),
                _ => "kind generic needs a host: what stands before the name of a repository".to_owned(),
            };
            return wrong("identity.issuers.issuer", &self.issuer, &why);
        };
        if host.contains('/') || RepoName::parse(&host).map_or(true, |name| name.as_str() != host) {
            return wrong(
                "identity.issuers.host",
                &host,
                "give a host's name in lower case, as it stands before owner/repository",
            );
        }
        if host == "github.com" && !matches!(self.kind, IssuerKind::Github | IssuerKind::Generic) {
            return wrong("identity.issuers.host", &host, "this kind of issuer does not speak for github.com");
        }
        Ok(())
    }

    fn check_mapping(&self) -> Result<(), ConfigError> {
        if self.kind == IssuerKind::Generic {
            if self.repo_claim().iter().any(String::is_empty) || self.repo_claim.is_none() {
                return wrong(
                    "identity.issuers.repo_claim",
                    "",
                    "kind generic needs it: the claim that names the repository",
                );
            }
            if self.repo_claim().is_empty() {
                return wrong("identity.issuers.repo_claim", "[]", "name at least one claim");
            }
            if self.lane.is_none() {
                let why = "kind generic needs it: \"trusted\" or \"untrusted\", for builds that no rule is for";
                return wrong("identity.issuers.lane", "", why);
            }
            return Ok(());
        }
        if self.repo_claim.is_some() || self.repo_claim_has_host || self.pull_request_claim.is_some() {
            let why = "repo_claim, repo_claim_has_host and pull_request_claim are for kind generic: of other kinds they are known";
            return wrong("identity.issuers.issuer", &self.issuer, why);
        }
        if self.lane == Some(Lane::Trusted) {
            return wrong(
                "identity.issuers.lane",
                "trusted",
                "would trust pull requests too: name what is to be trusted with trusted rules",
            );
        }
        Ok(())
    }

    fn check_rules(&self) -> Result<(), ConfigError> {
        for rule in self.untrusted.iter().chain(&self.trusted) {
            self.check_rule(rule)?;
        }
        Ok(())
    }

    fn check_rule(&self, rule: &ClaimRule) -> Result<(), ConfigError> {
        if rule.is_empty() {
            return wrong(
                "identity.issuers",
                &self.issuer,
                "has a rule without a claim, which would be for every build",
            );
        }
        let known: &[&str] = match self.kind {
            IssuerKind::Generic => return Ok(()),
            IssuerKind::Gitlab => &GITLAB_CLAIMS,
            _ => &GITHUB_CLAIMS,
        };
        match rule.keys().find(|name| !known.contains(&name.as_str()) && !self.claims.contains(name)) {
            None => Ok(()),
            Some(name) => {
                let why = format!(
                    "is no known claim of this kind ({}): if its tokens have it, add it to claims",
                    known.join(", ")
                );
                wrong("identity.issuers", name, &why)
            }
        }
    }
}

/// Two that differ in this are one.
fn bare(issuer: &str) -> String {
    issuer.trim_end_matches('/').to_ascii_lowercase()
}

fn is_authority(text: &str) -> bool {
    !text.contains('@')
        && text.parse::<axum::http::uri::Authority>().is_ok_and(|authority| !authority.host().is_empty())
}

pub(super) fn wrong<T>(key: &'static str, value: impl std::fmt::Display, why: &str) -> Result<T, ConfigError> {
    Err(ConfigError::Value { key, value: format!("{:?}", value.to_string()), why: why.to_owned() })
}
