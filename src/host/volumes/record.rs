//! Small JSON files beside a volume, replaced in one step.
//!
//! Identity is kept in a file and not in extended attributes: a file survives every way of copying, backing up and
//! restoring a directory, can be read by whoever has to repair things by hand, and exists on every file system. It lies
//! beside the cache and not in it, so no daemon sees it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use kiln_domain::Key;
use serde::de::DeserializeOwned;
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
        Self { format: FORMAT, properties, size, origin, last_snapshot: 0 }
    }

    pub(super) fn belongs_to(&self, key: &Key) -> bool {
        self.properties.get(KEY_PROPERTY).is_some_and(|found| found == key.as_str())
    }
}

/// `None` when there is no such file; `InvalidData` when it is damaged or from a newer Kiln.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Written aside, synced and renamed: a crash leaves the old file or the new one.
pub(super) fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let aside = path.with_extension("new");
    let text = serde_json::to_vec_pretty(value)?;
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&aside, path)
    })();
    if written.is_err() {
        // Of a full disk: the space it took is needed; that it could not be removed adds nothing.
        let _ = std::fs::remove_file(&aside);
    }
    written?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Makes renames and creations in it durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// 0700: programs that builds left with their set-uid bits must be out of everybody's reach on the host.
pub(super) fn make_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_or_newer_record_is_an_error_and_not_absent() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("record.json");
        assert!(read::<Record>(&path).expect("absent is no error").is_none());
        for text in ["", "{", "[]", "{\"format\":1}", "{\"format\":2,\"properties\":{},\"size\":null,\"origin\":null,\"last_snapshot\":0,\"x\":1}"] {
            std::fs::write(&path, text).expect("written");
            let error = read::<Record>(&path).expect_err(text);
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "of {text:?}");
        }
    }

    #[test]
    fn nothing_is_left_aside() {
        let directory = tempfile::tempdir().expect("a directory");
        let key: Key = "pbcce5b6205652dd7".parse().expect("a key");
        let record = Record::new(&key, &Properties::new(), Some(5), None);
        let path = directory.path().join("record.json");
        write(&path, &record).expect("written");
        write(&path, &record).expect("written again");
        assert_eq!(read::<Record>(&path).expect("read"), Some(record));
        assert_eq!(std::fs::read_dir(directory.path()).expect("listed").count(), 1);
        std::fs::create_dir(directory.path().join("taken.json")).expect("made");
        write(&directory.path().join("taken.json"), &1).expect_err("a directory is in the way");
        assert_eq!(std::fs::read_dir(directory.path()).expect("listed").count(), 2);
    }
}
