//! What is written down beside a volume.
//!
//! Identity is kept in a file and not in extended attributes: a file survives every way of copying, backing up and
//! restoring a directory, can be read by whoever has to repair things by hand, and exists on every file system. It lies
//! beside the cache and not in it, so no daemon sees it.

use kiln_domain::{Key, Timestamp};
use serde::{Deserialize, Serialize};

use crate::host::Properties;

/// Raised when an older Kiln would misread the files.
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
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Origin {
    pub key: Key,
    pub snapshot: u64,
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
        Self { format: FORMAT, properties, size, origin, last_snapshot: 0, discarded: None }
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
        let record = Record::new(&key, &Properties::new(), Some(5), Some(Origin { key: key.fork(), snapshot: 3 }));
        assert!(record.belongs_to(&key) && !record.belongs_to(&key.fork()));
        let text = serde_json::to_string(&record).expect("written");
        assert_eq!(serde_json::from_str::<Record>(&text).expect("read"), record);
        let odd = text.replacen('{', "{\"surprise\":1,", 1);
        assert!(serde_json::from_str::<Record>(&odd).is_err());
    }
}
