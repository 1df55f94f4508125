//! Which spellings name the same repository.
//!
//! The rules and their order are those of the reference system (its vectors are the table in the tests below), so
//! that both compute the same keys. Where the reference is inconsistent with itself, Kiln decides as follows; each
//! point is a test:
//!
//! * **Numeric owners.** The reference takes the digits of `git@host:123/repo` for a port and so gives `123/repo` and
//!   `456/repo` one cache. Git reads them as a path, and so does Kiln: a port can stand only behind a scheme.
//! * **Stability.** The reference trims once, so its result may change when normalised again (`a///`, `x.git.git`).
//!   Kiln trims until nothing changes: a normalised name is its own normal form.
//! * **`git+ssh://`**, `ssh+git://` and `git+https://` are schemes too.
//! * **Refused**, where the reference hashes what it is given: control characters, white space and invisible characters
//!   inside the name, and `?` or `#`, which belong to a web page's address and not to a repository.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest accepted spelling, in bytes, before normalisation (the reference's limit).
pub const MAX_REPO_BYTES: usize = 512;

/// A repository in normal form: `host/path`, lower case, without scheme, credentials, port or `.git`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RepoName(String);

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RepoError {
    #[error("repo is required: name the repository, as in github.com/org/repo")]
    Missing,
    #[error("repo is too long: {0} bytes, at most {MAX_REPO_BYTES} are accepted")]
    TooLong(usize),
    #[error("repo contains {0:?}, which no repository name has: give it as in github.com/org/repo")]
    Character(char),
}

/// Each is removed once, in this order, so stacked schemes (`https://git://…`) come off together.
const SCHEMES: [&str; 7] = ["https://", "http://", "git://", "ssh://", "git+ssh://", "ssh+git://", "git+https://"];

impl RepoName {
    /// Normalises any spelling that git or a forge uses for a repository.
    pub fn parse(spelling: &str) -> Result<Self, RepoError> {
        if spelling.len() > MAX_REPO_BYTES {
            return Err(RepoError::TooLong(spelling.len()));
        }
        let trimmed = spelling.trim();
        if let Some(bad) =
            trimmed.chars().find(|c| c.is_control() || c.is_whitespace() || is_invisible(*c) || matches!(c, '?' | '#'))
        {
            return Err(RepoError::Character(bad));
        }
        let mut name: String = trimmed.chars().map(lower).collect();
        loop {
            let next = normalise_once(&name);
            if next == name {
                break;
            }
            name = next;
        }
        if name.is_empty() { Err(RepoError::Missing) } else { Ok(Self(name)) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RepoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One character to one character, as the reference's language does it: Rust's string lowering depends on context
/// (final sigma) and can lengthen the text, which would make the same name hash differently on both sides.
pub(crate) fn lower(c: char) -> char {
    let mut lowered = c.to_lowercase();
    lowered.next().unwrap_or(c)
}

fn normalise_once(name: &str) -> String {
    let mut rest = name;
    let mut had_scheme = false;
    for scheme in SCHEMES {
        if let Some(stripped) = rest.strip_prefix(scheme) {
            rest = stripped;
            had_scheme = true;
        }
    }
    rest = strip_credentials(rest);
    let path = match rest.split_once(':') {
        Some((host, tail)) if had_scheme => format!("{host}{}", strip_port(tail)),
        Some((host, tail)) => format!("{host}/{}", tail.replace(':', "/")),
        None => rest.to_owned(),
    };
    let path = path.replace(':', "/");
    let path = path.strip_suffix('/').unwrap_or(&path);
    let path = path.strip_suffix(".git").unwrap_or(path);
    let path = path.strip_suffix('/').unwrap_or(path);
    path.replace("//", "/")
}

/// Unicode's marks of direction and characters of no width: two names that look alike would differ in them, and a name
/// could turn round what stands beside it in a list.
pub fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// `user:password@` counts only in front of the first slash.
fn strip_credentials(rest: &str) -> &str {
    match rest.split_once('@') {
        Some((before, after)) if !before.contains('/') => after,
        _ => rest,
    }
}

/// What follows `host:` in a URL: a port to drop, or (as some spell it) a path. Keeps the separator.
fn strip_port(tail: &str) -> String {
    let end = tail.find('/').unwrap_or(tail.len());
    let (port, path) = tail.split_at(end);
    if port.bytes().all(|b| b.is_ascii_digit()) { path.to_owned() } else { format!("/{tail}") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(spelling: &str, expected: &str) {
        assert_eq!(RepoName::parse(spelling).map(|r| r.0).as_deref(), Ok(expected), "of {spelling:?}");
    }

    #[test]
    fn vectors_of_the_reference() {
        for spelling in [
            "https://github.com/Org/Repo.git",
            "git@github.com:Org/Repo.git",
            "https://github.com/org/repo/",
            "https://github.com/org/repo",
            "https://github.com/org/repo.git",
            "https://github.com/org/repo.git/",
            "http://github.com/org/repo",
            "git://github.com/org/repo",
            "ssh://github.com/org/repo.git",
            "  https://GitHub.com/ORG/repo  ",
            "HTTPS://GITHUB.COM/org/repo",
            "https://github.com:443/org/repo",
            "ssh://git@github.com:22/org/repo.git",
        ] {
            check(spelling, "github.com/org/repo");
        }
        check("ssh://git@gitlab.com/g/p.git", "gitlab.com/g/p");
        check("ssh://git@gitlab.com:22/g/p.git", "gitlab.com/g/p");
        check("https://user:pw@host.example/x/y.git", "host.example/x/y");
        check("https://gitlab.example.com:8443/a/b/c", "gitlab.example.com/a/b/c");
        check("https://github.com/org/.git", "github.com/org");
        check("https://github.com/", "github.com");
        check("SocialGouv/Example", "socialgouv/example");
    }

    #[test]
    fn nothing_is_left_of_these() {
        for spelling in ["", "   ", "/", "//////", ".git", "https://", "https:///.git/"] {
            assert_eq!(RepoName::parse(spelling), Err(RepoError::Missing), "of {spelling:?}");
        }
    }

    #[test]
    fn a_numeric_owner_is_not_a_port() {
        check("git@host:123/repo", "host/123/repo");
        check("ssh://git@host:123/repo", "host/repo");
    }

    #[test]
    fn trims_until_stable() {
        check("h/a///", "h/a");
        check("h/x.git.git", "h/x");
        check("h////x", "h/x");
    }

    #[test]
    fn more_schemes() {
        check("git+ssh://git@github.com/org/repo.git", "github.com/org/repo");
        check("ssh+git://git@github.com:22/org/repo", "github.com/org/repo");
    }

    #[test]
    fn characters_no_repository_has() {
        for (spelling, bad) in [
            ("h/a\0b", '\0'),
            ("h/a\nb", '\n'),
            ("h/a b", ' '),
            ("h/a?x=1", '?'),
            ("h/a#top", '#'),
            ("h/a\u{85}b", '\u{85}'),
        ] {
            assert_eq!(RepoName::parse(spelling), Err(RepoError::Character(bad)), "of {spelling:?}");
        }
    }

    #[test]
    fn what_cannot_be_seen_is_refused() {
        for spelling in ["h/a\u{202e}b", "h/a\u{200b}", "h/\u{2066}a"] {
            assert!(matches!(RepoName::parse(spelling), Err(RepoError::Character(_))), "of {spelling:?}");
        }
    }

    #[test]
    fn length_is_counted_in_bytes_before_normalising() {
        check(&format!("h/{}", "a".repeat(510)), &format!("h/{}", "a".repeat(510)));
        assert_eq!(RepoName::parse(&"a".repeat(513)), Err(RepoError::TooLong(513)));
        assert_eq!(RepoName::parse(&"/".repeat(10_000_000)), Err(RepoError::TooLong(10_000_000)));
    }

    proptest! {
        #[test]
        fn a_normal_form_is_its_own_normal_form(spelling in "[a-zA-Z0-9:/@.+_-]{0,40}(\\.git)?/{0,3}") {
            if let Ok(once) = RepoName::parse(&spelling) {
                prop_assert_eq!(RepoName::parse(once.as_str()), Ok(once.clone()));
            }
        }

        #[test]
        fn every_spelling_of_one_repository_agrees(
            host in "[a-z]{1,8}\\.[a-z]{2,3}", owner in "[a-z][a-z0-9-]{0,8}", name in "[a-z0-9][a-z0-9_-]{0,8}",
        ) {
            let plain = format!("{host}/{owner}/{name}");
            for spelling in [
                format!("https://{plain}"), format!("https://{plain}.git"), format!("http://u:p@{plain}/"),
                format!("git@{host}:{owner}/{name}.git"), format!("ssh://git@{host}:2222/{owner}/{name}"),
                format!(" {} ", plain.to_uppercase()),
            ] {
                prop_assert_eq!(RepoName::parse(&spelling).map(|r| r.0), Ok(plain.clone()));
            }
        }

        #[test]
        fn never_panics(spelling in any::<String>()) {
            let _ = RepoName::parse(&spelling);
        }
    }
}
