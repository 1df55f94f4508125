//! Whose code a build runs, from what its forge says of it.
//!
//! In this order: a rule of the configuration that says untrusted, one that says trusted, and what the kind of issuer makes of it:
//!
//! * **GitHub, Forgejo, Gitea**: trusted is what somebody with write access set off (`TRUSTED_EVENTS`), unless it is of a pull
//!   request (`refs/pull/…`). Everything else may run what anybody wrote: `pull_request_target`, `workflow_run` and comments carry
//!   the ref of the default branch and can still check out a stranger's code (W6).
//! * **GitLab**: as much by `pipeline_source`. A pipeline of a merge request may be of a fork, whatever its branch is called. One
//!   that another pipeline set off is as trusted as its ref is protected: its parent's source is not told.
//! * **Generic**: `lane`.
//!
//! An untrusted build is named by its forge, so that it cannot choose whose cache it shares: by the number of its pull request, else
//! by its run, else by its subject.

use std::fmt::Write as _;

use kiln_domain::access::Trust;
use kiln_domain::lane::Lane;
use kiln_token::Claims;
use sha2::{Digest as _, Sha256};

use super::glob::is_like;
use crate::config::identity::{ClaimRule, Issuer, IssuerKind};

/// Only who may write to the repository can set these off, or the forge itself on behalf of such.
const TRUSTED_EVENTS: [&str; 8] =
    ["push", "schedule", "workflow_dispatch", "repository_dispatch", "release", "create", "delete", "merge_group"];

/// As much of GitLab.
const TRUSTED_SOURCES: [&str; 8] = ["push", "schedule", "web", "webide", "api", "trigger", "pipeline", "chat"];

/// The lane, and the name of the fork if it is untrusted.
pub(super) fn trust(config: &Issuer, claims: &Claims) -> Trust {
    match lane(config, claims) {
        Lane::Trusted => Trust::Trusted,
        Lane::Untrusted => Trust::Untrusted { fork: fork(config, claims) },
    }
}

fn lane(config: &Issuer, claims: &Claims) -> Lane {
    if config.untrusted.iter().any(|rule| is_for(rule, claims, true)) {
        return Lane::Untrusted;
    }
    if config.trusted.iter().any(|rule| is_for(rule, claims, false)) {
        return Lane::Trusted;
    }
    if let Some(lane) = config.lane {
        return lane.into();
    }
    let trusted = match config.kind {
        IssuerKind::Github | IssuerKind::Ghes | IssuerKind::Forgejo | IssuerKind::Gitea => {
            is_trusted_run(&said(claims, "ref"), &said(claims, "event_name"))
        }
        IssuerKind::Gitlab => is_trusted_pipeline(claims),
        // The configuration is not accepted without a lane.
        IssuerKind::Generic => false,
    };
    if trusted { Lane::Trusted } else { Lane::Untrusted }
}

/// What cannot be compared counts as `otherwise`: the safe side of the rule.
fn is_for(rule: &ClaimRule, claims: &Claims, otherwise: bool) -> bool {
    rule.iter().all(|(name, pattern)| claims.text(name).map_or(otherwise, |text| is_like(&text, pattern)))
}

fn is_trusted_run(name: &str, event: &str) -> bool {
    is_branch_or_tag(name) && (event.is_empty() || TRUSTED_EVENTS.contains(&event))
}

/// Or is not told. What is no text, or of a kind that nobody has heard of, is neither.
fn is_branch_or_tag(name: &str) -> bool {
    name.is_empty() || name.starts_with("refs/heads/") || name.starts_with("refs/tags/")
}

fn is_trusted_pipeline(claims: &Claims) -> bool {
    let source = said(claims, "pipeline_source");
    if !is_branch_or_tag(&said(claims, "ref_path")) {
        return false;
    }
    match source.as_str() {
        "" => true,
        "parent_pipeline" => said(claims, "ref_protected") == "true",
        source => TRUSTED_SOURCES.contains(&source),
    }
}

fn fork(config: &Issuer, claims: &Claims) -> String {
    let pull_request = match config.kind {
        IssuerKind::Gitlab => number(&said(claims, "merge_request_iid"))
            .or_else(|| number_in(&said(claims, "ref_path"), "refs/merge-requests/")),
        IssuerKind::Generic => config.pull_request_claim.as_ref().and_then(|name| mapped(&said(claims, name))),
        _ => number_in(&said(claims, "ref"), "refs/pull/"),
    };
    let run = || {
        let id = if config.kind == IssuerKind::Gitlab { "pipeline_id" } else { "run_id" };
        number(&said(claims, id)).map(|id| format!("run-{id}"))
    };
    pull_request.or_else(run).unwrap_or_else(|| format!("sub-{}", digest(&said(claims, "sub"))))
}

/// A list or an object is no text that anything is compared with.
fn said(claims: &Claims, name: &str) -> String {
    claims.text(name).unwrap_or_else(|| "\0".to_owned())
}

/// A forge's number: digits, and no more than one has.
fn number(text: &str) -> Option<String> {
    ((1..=20).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.to_owned())
}

fn number_in(name: &str, prefix: &str) -> Option<String> {
    number(name.strip_prefix(prefix)?.split('/').next()?)
}

/// Some say `false` where there is none.
fn mapped(text: &str) -> Option<String> {
    match text {
        "" | "\0" | "false" => None,
        text => Some(number(text).unwrap_or_else(|| format!("pr-{}", digest(text)))),
    }
}

fn digest(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().take(16).fold(String::new(), |mut hex, byte| {
        // Writing to a string does not fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
