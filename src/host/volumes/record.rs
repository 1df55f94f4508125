//! What is written down beside a volume.
//!
//! Identity is kept in a file and not in extended attributes: a file survives every way of copying, backing up and
//! restoring a directory, can be read by whoever has to repair things by hand, and exists on every file system. It lies
//! beside the cache and not in it, so no daemon sees it.

use std::collections::BTreeMap;

use kiln_domain::{Key, Timestamp, Verdict};
use serde::{Deserialize, Serialize};

use crate::host::Properties;

/// Raised when an older Kiln would misread the files. It refuses fields that it does not know by itself, volume by volume, so
/// those that came later are absent while they have nothing to say.
pub(super) const FORMAT: u32 = 1;

/// What is remembered of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub format: u32,
    pub properties: Properties,
    pub size: Option<u64>,
    /// What it was cloned from, so that a clone that is asked for again is known to be the same.
    pub origin: Option<Origin>,
    /// Sequence of the youngest snapshot ever taken, destroyed or not.
    pub last_snapshot: u64,
    /// When it was last discarded; means something in the trash only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discarded: Option<Timestamp>,
    /// What is known of snapshots, by their sequence. Which ones there are is told by their directories: one may be missing
    /// here (taken before this was written down), and what is here may be gone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub snapshots: BTreeMap<u64, Kept>,
    /// It is, or is to become, the live volume of a rollback whose older snapshots still lie with what it replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returning: Option<Returning>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Origin {
    pub key: Key,
    /// `None`: what the volume held just then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<u64>,
}

/// What is remembered of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kept {
    pub taken: Timestamp,
    #[serde(with = "verdict")]
    pub verdict: Verdict,
}

/// A rollback under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Returning {
    /// Sequence of the snapshot that it goes back to.
    pub to: u64,
    /// Sequence of the entry of the trash that what is replaced becomes.
    pub trash: u64,
}

mod verdict {
    use std::borrow::Cow;

    use kiln_domain::Verdict;
    use serde::{Deserialize, Deserializer, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(verdict: &Verdict, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(verdict.name())
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Verdict, D::Error> {
        Ok(Verdict::from_name(&Cow::<str>::deserialize(deserializer)?))
    }
}

/// Marks a directory as a root of ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Marker {
    pub format: u32,
    pub engine: String,
    /// Sequence of the youngest entry of the trash ever made, purged or not.
    pub last_trash: u64,
}

pub(super) const KEY_PROPERTY: &str = "key";

impl Record {
    pub(super) fn new(key: &Key, properties: &Properties, size: Option<u64>, origin: Option<Origin>) -> Self {
        let mut properties = properties.clone();
        properties.insert(KEY_PROPERTY.to_owned(), key.to_string());
        Self {
            format: FORMAT,
            properties,
            size,
            origin,
            last_snapshot: 0,
            discarded: None,
            snapshots: BTreeMap::new(),
            returning: None,
        }
    }

    pub(super) fn belongs_to(&self, key: &Key) -> bool {
        self.properties.get(KEY_PROPERTY).is_some_and(|found| found == key.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_knows_its_key_and_refuses_what_it_does_not_know() {
        let key: Key = "pbcce5b6205652dd7".parse().expect("a key");
        let origin = Origin { key: key.fork(), snapshot: Some(3) };
        let mut record = Record::new(&key, &Properties::new(), Some(5), Some(origin));
        record.snapshots.insert(3, Kept { taken: Timestamp::from_millis(7), verdict: Verdict::Good });
        assert!(record.belongs_to(&key) && !record.belongs_to(&key.fork()));
        let text = serde_json::to_string(&record).expect("written");
        assert_eq!(serde_json::from_str::<Record>(&text).expect("read"), record);
        let odd = text.replacen('{', "{\"surprise\":1,", 1);
        assert!(serde_json::from_str::<Record>(&odd).is_err());
    }

    /// What the first versions wrote, to the letter; and what they can read as long as nothing newer has to be said.
    #[test]
    fn records_of_before_are_read_and_written() {
        let text = r#"{"format":1,"properties":{"key":"pbcce5b6205652dd7"},"size":5,
            "origin":{"key":"forkpbcce5b6205652dd7","snapshot":3},"last_snapshot":4}"#;
        let record: Record = serde_json::from_str(text).expect("read");
        assert_eq!((record.last_snapshot, record.snapshots.len(), record.returning), (4, 0, None));
        assert_eq!(record.origin.as_ref().and_then(|origin| origin.snapshot), Some(3));
        let again = serde_json::to_value(&record).expect("written");
        assert_eq!(again, serde_json::from_str::<serde_json::Value>(text).expect("JSON"));
    }
}
