//! Which builds share a daemon, and every name derived from that.
//!
//! A key is `p` and the first 16 hexadecimal digits of a SHA-256 over the parts of a [`BuildSpec`]. Branch, commit and
//! context are left out on purpose: they are what a cache is shared across. Client and server compute it alike.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::spec::BuildSpec;

const DIGITS: usize = 16;
const DAEMON_PREFIX: &str = "buildkitd-";

/// Names one daemon and the cache that belongs to it.
///
/// A project is `p…` (17 characters); what is derived from it has its [`Role`] in front. Always a legal DNS label, and short
/// enough to be one with `buildkitd-` in front.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(String);

/// What a key stands for beside the project whose key it ends in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// `p…`: the project itself, whose cache is kept.
    Project,
    /// `forkp…`: the reference's single fork, for untrusted builds that do not say whose they are.
    Fork,
    /// `f<16 digits>p…`: the fork of one pull request.
    PullRequest,
    /// `c1p…`: one more daemon for a project that one is not enough for; counted from 1.
    Member(u16),
    /// `tp…`: the clone of a snapshot on which it is tried out.
    Trial,
}

impl Role {
    /// As it is shown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Project => "project",
            Self::Fork => "fork",
            Self::PullRequest => "pull-request",
            Self::Member(_) => "member",
            Self::Trial => "trial",
        }
    }

    /// Whether untrusted code runs there (K7).
    pub const fn is_untrusted(self) -> bool {
        matches!(self, Self::Fork | Self::PullRequest)
    }

    /// Whether its cache is a copy that goes with it.
    pub const fn is_derived(self) -> bool {
        !matches!(self, Self::Project)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not a key: a key is p and 16 hexadecimal digits, as `kiln key` prints it")]
pub struct ParseKeyError(String);

impl Key {
    /// The key of a project (K1).
    pub fn of(spec: &BuildSpec) -> Self {
        let mut hash = Sha256::new();
        hash.update(spec.repo.as_str());
        if !spec.name.is_empty() {
            hash.update(b"\0n:");
            hash.update(&spec.name);
        }
        hash.update(b"\0");
        hash.update(&spec.target);
        hash.update(b"\0");
        hash.update(spec.arch.as_str());
        let digest = hash.finalize();
        Self(format!("p{}", hex(&digest[..DIGITS / 2])))
    }

    /// The reference's single fork of a project, for untrusted builds.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self(format!("fork{}", self.canonical()))
    }

    /// The `index`th clone of a project's daemon, counted from 1.
    #[must_use]
    pub fn clone_number(&self, index: u16) -> Self {
        Self(format!("c{index}{}", self.canonical()))
    }

    /// The fork of one pull request: two of them share nothing. `identity` is whatever names it for its forge.
    #[must_use]
    pub fn pull_request(&self, identity: &str) -> Self {
        let digest = Sha256::digest(identity.as_bytes());
        Self(format!("f{}{}", hex(&digest[..DIGITS / 2]), self.canonical()))
    }

    /// Where a snapshot of the project is tried out.
    #[must_use]
    pub fn trial(&self) -> Self {
        Self(format!("t{}", self.canonical()))
    }

    /// The project that it belongs to, itself if it is one.
    #[must_use]
    pub fn project(&self) -> Self {
        Self(self.canonical().to_owned())
    }

    pub fn role(&self) -> Role {
        // Only keys are keys, so each form has one reading.
        match self.0.as_bytes()[0] {
            b'p' => Role::Project,
            b't' => Role::Trial,
            b'f' if self.0.starts_with("fork") => Role::Fork,
            b'f' => Role::PullRequest,
            _ => Role::Member(self.0[1..self.0.len() - DIGITS - 1].parse().unwrap_or_default()),
        }
    }

    pub fn is_fork(&self) -> bool {
        self.role().is_untrusted()
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `buildkitd-<key>`: the instance, the first label of the name in its certificate and in a client's hello.
    pub fn daemon_name(&self) -> String {
        format!("{DAEMON_PREFIX}{self}")
    }

    /// The name clients ask the gateway for.
    pub fn server_name(&self, domain: &str) -> String {
        format!("{DAEMON_PREFIX}{self}.{domain}")
    }

    /// The inverse of [`Key::server_name`]: `None` unless it is exactly a daemon's name directly below `domain`.
    pub fn from_server_name(name: &str, domain: &str) -> Option<Self> {
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let host = name.strip_suffix(&domain.to_ascii_lowercase())?.strip_suffix('.')?;
        host.strip_prefix(DAEMON_PREFIX)?.parse().ok()
    }

    /// The host's end of the daemon's network interface. At most 15 characters are allowed (`IFNAMSIZ` - 1), so it is
    /// made from the address, which is unique among living daemons, and not from the key.
    pub fn interface_name(address: Ipv4Addr) -> String {
        let [a, b, c, d] = address.octets();
        format!("kiln{a:02x}{b:02x}{c:02x}{d:02x}")
    }

    /// Locally administered, and a function of the key: an address that is used again with another MAC costs half a
    /// minute of stale neighbour entries.
    pub fn mac(&self) -> String {
        let digest = Sha256::digest(self.0.as_bytes());
        let tail: Vec<String> = digest[..5].iter().map(|b| format!("{b:02x}")).collect();
        format!("02:{}", tail.join(":"))
    }

    fn canonical(&self) -> &str {
        &self.0[self.0.len() - DIGITS - 1..]
    }
}

impl FromStr for Key {
    type Err = ParseKeyError;

    fn from_str(text: &str) -> Result<Self, ParseKeyError> {
        let error = || ParseKeyError(text.chars().take(64).collect());
        let start = text.len().checked_sub(DIGITS + 1).ok_or_else(error)?;
        let (role, canonical) = text.split_at_checked(start).ok_or_else(error)?;
        let digits = canonical.strip_prefix('p').ok_or_else(error)?;
        if is_hex(digits) && is_role(role) { Ok(Self(text.to_owned())) } else { Err(error()) }
    }
}

fn is_hex(digits: &str) -> bool {
    digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_role(text: &str) -> bool {
    matches!(text, "" | "fork" | "t")
        || text.strip_prefix('c').is_some_and(is_clone_index)
        || text.strip_prefix('f').is_some_and(|digits| digits.len() == DIGITS && is_hex(digits))
}

/// Decimal, from 1, without leading zeros: one clone has one spelling.
fn is_clone_index(text: &str) -> bool {
    !text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

impl TryFrom<String> for Key {
    type Error = ParseKeyError;

    fn try_from(text: String) -> Result<Self, ParseKeyError> {
        text.parse()
    }
}

impl From<Key> for String {
    fn from(key: Key) -> Self {
        key.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn key(repo: &str, name: &str, target: &str, arch: &str) -> Key {
        Key::of(&BuildSpec::new(repo, name, target, arch).expect("valid"))
    }

    #[test]
    fn vectors_of_the_reference() {
        for (repo, name, target, arch, expected) in [
            ("github.com/org/repo", "", "", "amd64", "pbcce5b6205652dd7"),
            ("https://github.com/Org/Repo.git", "", "default", "x86_64", "pbcce5b6205652dd7"),
            ("git@github.com:Org/Repo.git", "", "Default", "AMD64", "pbcce5b6205652dd7"),
            ("ssh://git@github.com:22/org/repo.git", "", "", "amd64", "pbcce5b6205652dd7"),
            ("github.com/org/repo", "", "", "arm64", "p9f75a8e0cb6e0600"),
            ("github.com/org/repo", "", "", "aarch64", "p9f75a8e0cb6e0600"),
            ("github.com/org/repo", "", "", "ARM64", "p9f75a8e0cb6e0600"),
            ("github.com/org/repo", "", "builder", "amd64", "p1eb36bea77f087e9"),
            ("github.com/org/other", "", "", "amd64", "p1141ac10afcdcc14"),
            ("github.com/org/repo", "api", "", "amd64", "pe1f077ed7ffdb228"),
            ("github.com/org/repo", "API", "", "amd64", "pe1f077ed7ffdb228"),
            ("github.com/org/repo", " api ", "", "amd64", "pe1f077ed7ffdb228"),
            ("github.com/org/repo", "api", "runtime", "arm64", "paff9e28c0942ab63"),
            ("github.com/o/r", "", "", "amd64", "p7a75aa3600abef39"),
            ("github.com/socialgouv/foo", "", "", "amd64", "p24e5f6586bf814e4"),
            ("github.com/acme/app", "", "", "amd64", "p6503c143735e8388"),
            ("github.com/acme/monorepo", "api", "", "amd64", "pa66686ce0678f60b"),
            ("gitlab.example.com/studio-tech/architecture/foo", "", "", "amd64", "pe33bd6f1eba77931"),
            ("SocialGouv/buildkit-operator-example", "", "", "amd64", "p2871cd7a3e76fa02"),
            ("github.com/SocialGouv/buildkit-operator-example", "", "", "amd64", "p467b904732fed984"),
            ("SocialGouv/buildcat-example", "", "", "amd64", "pa081c22c974da132"),
        ] {
            assert_eq!(key(repo, name, target, arch).as_str(), expected, "of {repo} {name} {target} {arch}");
        }
    }

    #[test]
    fn names_derived_from_a_key() {
        let key: Key = "pbcce5b6205652dd7".parse().expect("a key");
        assert_eq!(key.fork().as_str(), "forkpbcce5b6205652dd7");
        assert_eq!(key.clone_number(1).as_str(), "c1pbcce5b6205652dd7");
        assert_eq!(key.clone_number(2).clone_number(3).as_str(), "c3pbcce5b6205652dd7");
        assert_eq!(key.trial().as_str(), "tpbcce5b6205652dd7");
        let pull = key.pull_request("github.com/o/r#12");
        assert_eq!(pull.as_str().len(), 34);
        assert_ne!(pull, key.pull_request("github.com/o/r#13"));
        assert_ne!(pull, "p9f75a8e0cb6e0600".parse::<Key>().expect("a key").pull_request("github.com/o/r#12"));
        for (derived, role) in [
            (key.clone(), Role::Project),
            (key.fork(), Role::Fork),
            (pull, Role::PullRequest),
            (key.clone_number(12), Role::Member(12)),
            (key.trial(), Role::Trial),
        ] {
            assert_eq!((derived.role(), derived.project()), (role, key.clone()), "of {derived}");
        }
        assert_eq!(key.daemon_name(), "buildkitd-pbcce5b6205652dd7");
        assert_eq!(key.server_name("gw.example.com"), "buildkitd-pbcce5b6205652dd7.gw.example.com");
        assert_eq!(Key::interface_name(Ipv4Addr::new(10, 88, 1, 200)), "kiln0a5801c8");
        assert!(Key::interface_name(Ipv4Addr::BROADCAST).len() <= 15);
    }

    #[test]
    fn what_is_not_a_key() {
        for text in [
            "",
            "p",
            "pbcce5b6205652dd",
            "pbcce5b6205652dd77",
            "Pbcce5b6205652dd7",
            "pBCCE5b6205652dd7",
            "xbcce5b6205652dd7",
            "fork",
            "forkforkpbcce5b6205652dd7",
            "c0pbcce5b6205652dd7",
            "c01pbcce5b6205652dd7",
            "c99999pbcce5b6205652dd7",
            "cpbcce5b6205652dd7",
            "fpbcce5b6205652dd7",
            "fbcce5b6205652ddpbcce5b6205652dd7",
            "fBCCE5b6205652dd7pbcce5b6205652dd7",
            "ttpbcce5b6205652dd7",
            "../../etc/passwd00",
            "pbcce5b620565\u{fc}dd7",
            "pbcce5b6205652dd7\n",
        ] {
            assert!(text.parse::<Key>().is_err(), "{text:?} was taken for a key");
        }
    }

    #[test]
    fn a_server_name_is_exactly_one_label_below_the_domain() {
        let of = |name: &str| Key::from_server_name(name, "builds.example.com").map(String::from);
        let key = Some("pbcce5b6205652dd7".to_owned());
        assert_eq!(of("buildkitd-pbcce5b6205652dd7.builds.example.com"), key);
        assert_eq!(of("BUILDKITD-pbcce5b6205652dd7.Builds.Example.Com."), key);
        for name in [
            "evil.example.com",
            "buildkitd-x.other.com",
            "notadaemon.builds.example.com",
            "buildkitd-pbcce5b6205652dd7.ns.builds.example.com",
            "evil.attacker.com",
            "builds.example.com",
            "buildkitd-.builds.example.com",
            "buildkitd-pbcce5b6205652dd7builds.example.com",
            "buildkitd-pbcce5b6205652dd7.builds.example.com..",
            "buildkitd-pbcce5b6205652dd7",
        ] {
            assert_eq!(of(name), None, "of {name}");
        }
    }

    proptest! {
        #[test]
        fn a_key_is_17_characters_and_a_dns_label(repo in "[a-z/]{1,20}", name in ".{0,20}", target in ".{0,20}") {
            if let Ok(spec) = BuildSpec::new(&repo, &name, &target, "amd64") {
                let key = Key::of(&spec);
                prop_assert_eq!(key.as_str().len(), 17);
                for derived in [key.clone(), key.fork(), key.clone_number(65535), key.trial(), key.pull_request(&name)] {
                    let daemon = derived.daemon_name();
                    prop_assert!(daemon.len() <= 63);
                    prop_assert!(daemon.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
                    prop_assert_eq!(derived.as_str().parse::<Key>(), Ok(derived.clone()));
                    prop_assert_eq!(Key::from_server_name(&derived.server_name("d.example"), "d.example"), Some(derived));
                }
            }
        }
    }

    /// Parts that would run into each other if the separators did not keep them apart.
    #[test]
    fn no_two_identities_of_a_corpus_share_a_key() {
        let repos = ["h/a", "h/a/b", "h/ab", "h/a/default", "n:h/a", "123/r", "h/123/r"];
        let names = ["", "a", "n:", "n:a", "default", "amd64", "b"];
        let targets = ["", "a", "n:a", "default2", "amd64", "arm64", "b"];
        let mut seen = HashMap::new();
        for repo in repos {
            for name in names {
                for target in targets {
                    for arch in ["amd64", "arm64"] {
                        let spec = BuildSpec::new(repo, name, target, arch).expect("valid");
                        if let Some(other) = seen.insert(Key::of(&spec), spec.clone()) {
                            assert_eq!(other, spec, "two identities, one key");
                        }
                    }
                }
            }
        }
        assert!(seen.len() > 600);
    }
}
