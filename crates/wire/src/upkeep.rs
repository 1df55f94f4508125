//! What an admin looks after: what nobody knows, what was deleted, whether Kiln can work.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OrphanKind {
    /// Runs, or could, and belongs to no project.
    Instance,
    /// A cache that belongs to no project.
    Volume,
    /// A project whose cache is gone.
    Record,
}

impl OrphanKind {
    pub const ALL: [Self; 3] = [Self::Instance, Self::Volume, Self::Record];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Instance => "instance",
            Self::Volume => "volume",
            Self::Record => "record",
        }
    }
}

impl fmt::Display for OrphanKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for OrphanKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| "it is instance, volume or record".to_owned())
    }
}

/// Longer than any instance, volume or key is called.
const MAX_NAME_BYTES: usize = 255;

/// Where volumes are in their engine's root; an orphan that is one is called so: `live/pbcce5b6205652dd7`.
const FOLDERS: [&str; 2] = ["live", "trash"];

/// Whether it could be one name of one thing: no path, nothing that steers, and nothing that could be an option.
pub fn is_name(text: &str) -> bool {
    let plain = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    !text.is_empty() && text.len() <= MAX_NAME_BYTES && plain && !text.starts_with(['.', '-'])
}

/// Whether it could be an orphan's name: a name, or that of a volume in its folder.
pub fn is_orphan_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((folder, name)) => FOLDERS.contains(&folder) && is_name(name),
        None => is_name(text),
    }
}

/// Something on the host, or in the database, that has lost its other half. Never touched without an explicit verb.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Orphan {
    pub kind: OrphanKind,
    /// As the host calls it.
    pub name: String,
    /// The project it says it belongs to, or belonged to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// In words.
    pub why: String,
    /// Whether it carries enough of an identity to become a project again.
    pub adoptable: bool,
}

/// `POST /v1/orphans/adopt`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Adopt {
    /// Needed where one name stands for more than one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<OrphanKind>,
    pub name: String,
}

/// `POST /v1/orphans/remove`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveOrphan {
    pub kind: OrphanKind,
    pub name: String,
}

/// The project that something was given to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Taken {
    pub key: String,
}

/// A deleted cache that is still there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trashed {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    /// When it was deleted; RFC 3339.
    pub since: String,
    /// When it goes by age; RFC 3339. A full disk may take it earlier.
    pub expires: String,
}

/// How many were removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Emptied {
    pub removed: u64,
}

/// `GET /readyz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    /// Whether all checks are well.
    pub ready: bool,
    pub checks: Vec<Check>,
}

impl Readiness {
    pub fn of(checks: Vec<Check>) -> Self {
        Self { ready: checks.iter().all(|check| check.ok), checks }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Check {
    /// `store`, `host`, `volumes`, …
    pub name: String,
    pub ok: bool,
    /// What is wrong, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Check {
    pub fn well(name: &str) -> Self {
        Self { name: name.to_owned(), ok: true, why: None }
    }

    pub fn ill(name: &str, why: impl Into<String>) -> Self {
        Self { name: name.to_owned(), ok: false, why: Some(why.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for name in ["pbcce5b6205652dd7", "pbcce5b6205652dd7.000007", "buildkitd-x", "note", "a..b"] {
            assert!(is_name(name) && is_orphan_name(name), "{name:?}");
        }
        for name in ["live/pbcce5b6205652dd7", "trash/old"] {
            assert!(is_orphan_name(name) && !is_name(name), "{name:?}");
        }
        let long = format!("live/{}", "x".repeat(MAX_NAME_BYTES + 1));
        for name in [
            "",
            ".",
            "..",
            "-rf",
            ".half-x",
            "a b",
            "a\u{1b}[2J",
            "/",
            "live/",
            "live/.",
            "live/..",
            "live/../x",
            "live/-rf",
            "live/.half-x",
            "live/a/b",
            "live//a",
            "/live/a",
            "a/b",
            "../live/a",
            "Live/a",
            "live/a b",
            &long,
        ] {
            assert!(!is_orphan_name(name), "{name:?} was taken for a name");
        }
    }
}
