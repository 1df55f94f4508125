//! Private files that are whole or not there.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::PkiError;

/// What is being made in the authorities' directory begins with this; no key does.
pub(super) const UNFINISHED: &str = ".new-";

fn failed<T>(operation: &'static str, path: &Path, result: io::Result<T>) -> Result<T, PkiError> {
    result.map_err(|source| PkiError::Io { operation, path: path.to_owned(), source })
}

pub(super) fn make_directory(path: &Path) -> Result<(), PkiError> {
    failed("make directory", path, DirBuilder::new().mode(0o700).recursive(true).create(path))
}

/// Written aside and renamed; after a power cut it may be empty.
pub(super) fn write(directory: &Path, name: &str, contents: &str) -> Result<(), PkiError> {
    put(directory, name, contents, |_| Ok(()))
}

/// As [`write`], and on the disk; its name is when the directory is synced.
pub(super) fn write_to_disk(directory: &Path, name: &str, contents: &str) -> Result<(), PkiError> {
    put(directory, name, contents, File::sync_all)
}

fn put(directory: &Path, name: &str, contents: &str, sync: fn(&File) -> io::Result<()>) -> Result<(), PkiError> {
    let target = directory.join(name);
    let aside = directory.join(format!(".{name}.new"));
    let written = (|| {
        // What a crash left behind may have had other permissions.
        match fs::remove_file(&aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        file.write_all(contents.as_bytes())?;
        sync(&file)?;
        fs::rename(&aside, &target)
    })();
    failed("write", &target, written)
}

pub(super) fn sync_directory(path: &Path) -> Result<(), PkiError> {
    failed("sync directory", path, File::open(path).and_then(|directory| directory.sync_all()))
}

/// Only "not found" is absence. What is not text is none of ours, and reads as absent too: it is made anew.
pub(super) fn read(path: &Path) -> Result<Option<String>, PkiError> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8(bytes).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::Io { operation: "read", path: path.to_owned(), source }),
    }
}

/// Where losing the difference would be dangerous: `None` only if the file is not there.
pub(super) fn read_bytes(path: &Path) -> Result<Option<Vec<u8>>, PkiError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::Io { operation: "read", path: path.to_owned(), source }),
    }
}

pub(super) fn remove_directory(path: &Path) -> Result<(), PkiError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => failed("remove", path, other),
    }
}

/// Removes what was being made when we crashed.
pub(super) fn sweep(directory: &Path) -> Result<(), PkiError> {
    for entry in failed("list", directory, fs::read_dir(directory))? {
        let entry = failed("list", directory, entry)?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            remove_directory(&entry.path())?;
        }
    }
    Ok(())
}
