//! Which repository a token is of.

use kiln_domain::RepoName;
use kiln_token::{Claim, Claims, shown};

use super::ProveError;
use crate::config::identity::{Issuer, IssuerKind};

/// Longer than any forge allows.
const LONGEST: usize = 400;

/// Its normal form, with the host that the issuer speaks for. Only what a forge itself would call a repository is taken: the normal
/// form of the claim is the claim in lower case, so no two names become one, and nothing looks like another.
pub(super) fn repository(config: &Issuer, host: &str, claims: &Claims) -> Result<RepoName, ProveError> {
    let names = config.repo_claim();
    let claim = || names.join(".");
    let Some(Claim::Text(text)) = claims.at(&names) else { return Err(ProveError::NoRepository { claim: claim() }) };
    let odd = || ProveError::OddRepository { claim: claim(), says: shown(text) };
    let path = if config.repo_claim_has_host {
        let (before, path) = text.split_once('/').ok_or_else(odd)?;
        if !before.eq_ignore_ascii_case(host) {
            return Err(odd());
        }
        path
    } else {
        text
    };
    let parts = path.split('/').count();
    let is_whole = match config.kind {
        IssuerKind::Github | IssuerKind::Ghes | IssuerKind::Forgejo | IssuerKind::Gitea => parts == 2,
        IssuerKind::Gitlab => parts >= 2,
        IssuerKind::Generic => true,
    };
    if !is_whole || path.len() > LONGEST || !path.split('/').all(is_part) {
        return Err(odd());
    }
    let wanted = format!("{host}/{}", path.to_ascii_lowercase());
    match RepoName::parse(&wanted) {
        Ok(name) if name.as_str() == wanted => Ok(name),
        _ => Err(odd()),
    }
}

fn is_part(part: &str) -> bool {
    let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    !part.is_empty() && part != "." && part != ".." && part.bytes().all(is_name)
}
