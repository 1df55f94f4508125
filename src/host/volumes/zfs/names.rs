//! The names of datasets and snapshots below our root. They are made from keys and sequences alone, so none of them can need
//! an escape; the root's own name is checked once.

use std::fmt;

use kiln_domain::Key;
use kiln_domain::cache::SnapshotName;

use super::super::TrashName;
use super::super::listing::{LIVE, TRASH};
use crate::host::files::HALF;

/// What all names together may have (`ZFS_MAX_DATASET_NAME_LEN`, less its NUL).
const LONGEST_NAME: usize = 255;
/// What we may put after the root: `/trash/`, a name in the trash, `@` and the longest snapshot name of ours.
const LONGEST_TAIL: usize = 160;

const SEED: &str = "kiln-seed-";
const KEPT: &str = "kiln-kept-";

/// The dataset that everything of ours is below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Root(String);

impl Root {
    /// `None` for what is not the name of a file system of ZFS.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        let component = |part: &str| !part.is_empty() && part != "." && part != ".." && part.chars().all(legal);
        let well = name.len() + LONGEST_TAIL <= LONGEST_NAME
            && name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.split('/').all(component);
        well.then(|| Self(name.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn pool(&self) -> &str {
        self.0.split('/').next().unwrap_or(&self.0)
    }

    pub(super) fn room(&self, room: &str) -> String {
        format!("{}/{room}", self.0)
    }

    pub(super) fn live(&self, key: &Key) -> String {
        format!("{}/{LIVE}/{key}", self.0)
    }

    /// A volume that is about to take the place of the one of that key.
    pub(super) fn half(&self, key: &Key) -> String {
        format!("{}/{LIVE}/{HALF}{key}", self.0)
    }

    pub(super) fn trashed(&self, name: &TrashName) -> String {
        format!("{}/{TRASH}/{name}", self.0)
    }

    /// An entry of the trash that is being freed, and is in no list any more.
    pub(super) fn dying(&self, name: &TrashName) -> String {
        format!("{}/{TRASH}/{HALF}{name}", self.0)
    }

    /// The inverse of [`Root::live`] and its like: what comes after the root.
    pub(super) fn relative<'a>(&self, dataset: &'a str) -> Option<&'a str> {
        dataset.strip_prefix(&self.0)?.strip_prefix('/')
    }
}

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(super) fn snapshot_of(dataset: &str, name: SnapshotName) -> String {
    format!("{dataset}@{name}")
}

/// What a fork is cloned from: part of no history, and gone with the fork. `moment` sets it apart from one of the same fork
/// that an older volume in the trash still needs.
pub(super) fn seed_of(dataset: &str, target: &Key, moment: i64) -> String {
    format!("{dataset}@{SEED}{target}-{moment}")
}

/// What a snapshot is called when the volume that it was part of goes and a clone of it stays: names of two histories would
/// get into each other's way.
pub(super) fn kept_name(from: &TrashName, number: u64) -> String {
    format!("{KEPT}{from}-{number}")
}

/// Whether the part after the `@` names something that is part of no history.
pub(super) fn is_passing(snapshot: &str) -> bool {
    snapshot.starts_with(SEED) || snapshot.starts_with(KEPT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_the_name_of_a_file_system() {
        for name in ["tank", "tank/kiln/cache", "t/with-all_the.legal:ones"] {
            assert_eq!(Root::parse(name).expect(name).as_str(), name);
        }
        let long = format!("tank/{}", "x".repeat(100));
        for name in
            ["", "/tank", "tank/", "tank//x", "9tank", "tank/x@y", "tank/x y", "tank/..", "-o", "tank/\n", &long]
        {
            assert_eq!(Root::parse(name), None, "{name:?} was taken for a dataset");
        }
    }

    #[test]
    fn names_below_it() {
        let root = Root::parse("tank/kiln").expect("a name");
        let key: Key = "pbcce5b6205652dd7".parse().expect("a key");
        let trashed = TrashName::new(key.clone(), 7);
        assert_eq!(root.pool(), "tank");
        assert_eq!(root.live(&key), "tank/kiln/live/pbcce5b6205652dd7");
        assert_eq!(root.trashed(&trashed), "tank/kiln/trash/pbcce5b6205652dd7.000007");
        assert_eq!(root.relative("tank/kiln/live/x"), Some("live/x"));
        assert_eq!(root.relative("tank/kilnx/live"), None);
        let longest = TrashName::new(key.pull_request("1"), u64::MAX);
        let tail = format!("{}@{}", root.dying(&longest), kept_name(&longest, u64::MAX)).len() - root.as_str().len();
        assert!(tail <= LONGEST_TAIL, "{tail}");
        assert!(is_passing("kiln-seed-x-1") && is_passing("kiln-kept-x-1") && !is_passing("kiln-000042"));
    }
}
