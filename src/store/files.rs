//! Whether the database's files are those that were opened: SQLite goes on with removed ones as if nothing had happened, and
//! what it writes there is lost with the process.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::StoreError;

/// Device and inode.
type File = (u64, u64);

pub(super) struct Files {
    database: (PathBuf, File),
    /// The log is there from the first write on, and for as long as a connection is open.
    log: (PathBuf, Option<File>),
}

impl Files {
    /// `None`: the database is in no file.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let mut log = path.as_os_str().to_owned();
        log.push("-wal");
        let log = PathBuf::from(log);
        let opened = file(&log);
        Some(Self { database: (path.to_owned(), file(path)?), log: (log, opened) })
    }

    /// Two looks at directory entries, which the kernel has in memory.
    pub(super) fn are_there(&mut self) -> Result<(), StoreError> {
        let (path, opened) = &self.database;
        let log = file(&self.log.0);
        let same_log = self.log.1.is_none_or(|opened| log == Some(opened));
        if file(path) != Some(*opened) || !same_log {
            return Err(StoreError::Gone { path: path.clone() });
        }
        self.log.1 = log;
        Ok(())
    }
}

fn file(path: &Path) -> Option<File> {
    std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}
