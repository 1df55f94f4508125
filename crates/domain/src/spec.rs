//! What a build says of itself, and the limits on it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::repo::{RepoError, RepoName, is_invisible, lower};

/// Longest component name and target, in bytes (the reference's limits).
pub const MAX_NAME_BYTES: usize = 128;
pub const MAX_TARGET_BYTES: usize = 128;

/// What a project's daemon builds for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Arch {
    type Err = SpecError;

    /// Accepts the kernel's names too; there is no default.
    fn from_str(spelling: &str) -> Result<Self, SpecError> {
        match spelling.trim().to_ascii_lowercase().as_str() {
            "amd64" | "x86_64" => Ok(Self::Amd64),
            "arm64" | "aarch64" => Ok(Self::Arm64),
            _ => Err(SpecError::Arch(spelling.chars().take(32).collect())),
        }
    }
}

/// The identity of a project, in normal form: two builds share a cache exactly when these are equal (K1).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BuildSpec {
    pub repo: RepoName,
    /// A component of a monorepo; empty when the repository is one project.
    pub name: String,
    /// The Dockerfile target; `default` when none is named.
    pub target: String,
    pub arch: Arch,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    #[error(transparent)]
    Repo(#[from] RepoError),
    #[error("{field} is too long: {bytes} bytes, at most {max} are accepted")]
    TooLong { field: &'static str, bytes: usize, max: usize },
    #[error("{field} contains {found:?}: leave out what cannot be printed")]
    Control { field: &'static str, found: char },
    #[error("unsupported arch {0:?}: use amd64 or arm64")]
    Arch(String),
}

impl BuildSpec {
    /// Checks and normalises, in the reference's order: repo, name, target, arch.
    pub fn new(repo: &str, name: &str, target: &str, arch: &str) -> Result<Self, SpecError> {
        let repo = RepoName::parse(repo)?;
        let name = component("name", name, MAX_NAME_BYTES)?;
        let target = component("target", target, MAX_TARGET_BYTES)?;
        let arch = arch.parse()?;
        let target = if target.is_empty() { "default".to_owned() } else { target };
        Ok(Self { repo, name, target, arch })
    }
}

fn component(field: &'static str, text: &str, max: usize) -> Result<String, SpecError> {
    if text.len() > max {
        return Err(SpecError::TooLong { field, bytes: text.len(), max });
    }
    let text = text.trim();
    // NUL separates the parts of a key, so it could forge another project's identity; the rest only spoils logs.
    if let Some(found) = text.chars().find(|c| c.is_control() || is_invisible(*c)) {
        return Err(SpecError::Control { field, found });
    }
    Ok(text.chars().map(lower).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(repo: &str, name: &str, target: &str, arch: &str) -> String {
        BuildSpec::new(repo, name, target, arch).map_or_else(|e| e.to_string(), |s| format!("accepted as {s:?}"))
    }

    #[test]
    fn accepts_and_normalises() {
        let spec = BuildSpec::new("github.com/o/r", " API ", "", "x86_64").expect("valid");
        assert_eq!((spec.name.as_str(), spec.target.as_str(), spec.arch), ("api", "default", Arch::Amd64));
        assert!(BuildSpec::new("github.com/o/r", "", "", "arm64").is_ok());
    }

    #[test]
    fn refuses_with_the_words_of_the_reference() {
        assert!(error("", "", "", "amd64").contains("repo is required"));
        assert!(error(&"a".repeat(513), "", "", "amd64").contains("repo is too long"));
        assert!(error("h/r", &"n".repeat(129), "", "amd64").contains("name is too long"));
        assert!(error("h/r", "", &"t".repeat(129), "amd64").contains("target is too long"));
        for arch in ["riscv", "", "x"] {
            assert!(error("h/r", "", "", arch).contains("unsupported arch"), "of {arch:?}");
        }
        assert!(BuildSpec::new("h/r", &"n".repeat(128), &"t".repeat(128), "amd64").is_ok());
    }

    #[test]
    fn checks_in_the_reference_s_order() {
        assert!(error("", &"n".repeat(129), "", "x").contains("repo"));
        assert!(error("h/r", &"n".repeat(129), &"t".repeat(129), "x").contains("name"));
        assert!(error("h/r", "", &"t".repeat(129), "x").contains("target"));
    }

    #[test]
    fn a_nul_cannot_forge_another_project() {
        assert!(error("h/r", "a\0default\0amd64", "", "amd64").contains("cannot be printed"));
    }
}
