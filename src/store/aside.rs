//! A damaged database is kept, whole, under another name, so that a new one can take its place.
//!
//! It is more than one file, and a new database must never meet the log of an old one. So all of them first get their
//! second names, then the first name of the database goes, then that of its log: at every point the database is still
//! there with all that belongs to it, or it is gone and kept. Whoever is interrupted leaves a state that tells the next
//! start, by the files' identities, where to go on. The index of the log is not kept: SQLite makes it from the log.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use kiln_domain::Timestamp;

use super::OpenError;
use super::lock::{beside, directory};
use crate::clock::rfc3339;

/// The database, its log, and the journal that it has while it is made.
const SIDES: [&str; 3] = ["", "-wal", "-journal"];

/// One change of the directory.
#[derive(Debug)]
pub(super) enum Step {
    Link { file: PathBuf, second_name: PathBuf },
    Unlink { file: PathBuf },
    Sync { directory: PathBuf },
}

/// Moves the damaged database at `path` to `<path>.corrupt-<now>`, or finishes what was begun. Nobody has it open.
pub(super) fn set_aside(path: &Path, now: Timestamp) -> Result<PathBuf, OpenError> {
    check_readable(path)?;
    let kept = kept_under(path, now)?;
    for step in steps(path, &kept) {
        step.carry_out()?;
    }
    Ok(kept)
}

/// Whether there is a log with something in it and no database that it could belong to. SQLite would delete it.
pub(super) fn is_log_alone(path: &Path) -> bool {
    let bytes = |side| fs::metadata(beside(path, side)).map_or(0, |metadata| metadata.len());
    bytes("") == 0 && bytes("-wal") > 0
}

/// What a disk does not give back is not damaged but unread, and stays where it is.
fn check_readable(path: &Path) -> Result<(), OpenError> {
    for side in SIDES {
        let file = beside(path, side);
        let read = File::open(&file).and_then(|mut open| io::copy(&mut open, &mut io::sink()));
        match read {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(OpenError::Io { doing: "read", path: file, source });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The name under which some of it is kept already, or a new one that nothing has.
fn kept_under(path: &Path, now: Timestamp) -> Result<PathBuf, OpenError> {
    let here = directory(path);
    let io = |source| OpenError::Io { doing: "look into", path: here.to_owned(), source };
    let prefix = beside(Path::new(path.file_name().unwrap_or_default()), ".corrupt-");
    for entry in here.read_dir().map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if !name.as_encoded_bytes().starts_with(prefix.as_os_str().as_encoded_bytes()) {
            continue;
        }
        for side in SIDES {
            if let Some(begun) = without_suffix(&name, side).map(|name| here.join(name))
                && is_same_file(&beside(path, side), &beside(&begun, side))
            {
                return Ok(begun);
            }
        }
    }
    // Down to the second in the form that needs no quotes; a number behind it for the next of the same second.
    let stamp: String = rfc3339(now).chars().take_while(|c| *c != '.' && *c != 'Z').filter(|c| *c != ':').collect();
    let free = |name: &PathBuf| SIDES.iter().all(|side| !beside(name, side).exists());
    let mut name = beside(path, &format!(".corrupt-{stamp}"));
    let mut number = 1;
    while !free(&name) {
        number += 1;
        name = beside(path, &format!(".corrupt-{stamp}-{number}"));
    }
    Ok(name)
}

fn without_suffix<'a>(name: &'a OsStr, suffix: &str) -> Option<&'a Path> {
    Some(Path::new(name.to_str()?.strip_suffix(suffix)?))
}

/// What is left to do, in this order.
pub(super) fn steps(path: &Path, kept: &Path) -> Vec<Step> {
    let files: Vec<(PathBuf, PathBuf)> = SIDES
        .iter()
        .map(|side| (beside(path, side), beside(kept, side)))
        .filter(|(file, _)| file.symlink_metadata().is_ok())
        .collect();
    let sync = || Step::Sync { directory: directory(path).to_owned() };
    let mut steps: Vec<Step> = files
        .iter()
        .filter(|(file, second_name)| !is_same_file(file, second_name))
        .map(|(file, second_name)| Step::Link { file: file.clone(), second_name: second_name.clone() })
        .collect();
    // Two names for an index that is in use would be two databases that share one.
    let index = Some(beside(path, "-shm")).filter(|index| index.exists());
    for file in index.into_iter().chain(files.into_iter().map(|(file, _)| file)) {
        // What was done before is on the disk before the next begins.
        steps.extend([sync(), Step::Unlink { file }]);
    }
    steps.push(sync());
    steps
}

impl Step {
    pub(super) fn carry_out(self) -> Result<(), OpenError> {
        let (doing, path, outcome) = match self {
            Self::Link { file, second_name } => {
                let outcome = fs::hard_link(&file, &second_name);
                ("keep the damaged database as", second_name, outcome)
            }
            Self::Unlink { file } => {
                let outcome = fs::remove_file(&file);
                ("make room for a new database at", file, outcome)
            }
            Self::Sync { directory } => {
                let outcome = File::open(&directory).and_then(|open| open.sync_all());
                ("write to the disk", directory, outcome)
            }
        };
        outcome.map_err(|source| match source.kind() {
            io::ErrorKind::StorageFull => OpenError::Full { path: path.clone() },
            _ => OpenError::Io { doing, path: path.clone(), source },
        })
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    match (one.symlink_metadata(), other.symlink_metadata()) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}
