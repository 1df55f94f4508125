//! Small JSON files that are replaced in one step, and private directories.

use std::fs::{DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Begins every name of what is not finished or half removed.
pub(super) const HALF: &str = ".half-";

/// `None` when there is no such file; `InvalidData` when it is damaged or from a newer Kiln.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Written aside, synced and renamed: a crash leaves the old file or the new one, and perhaps one whose name begins with
/// [`HALF`] beside it.
pub(super) fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    write_unseen(path, value)?;
    sync_directory(parent(path)?)
}

/// As [`write()`], in a directory that is being made: its own rename, which comes later, is in the file system's journal behind
/// this one, and is made durable then.
pub(super) fn write_unseen<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let directory = parent(path)?;
    let mut aside = tempfile::Builder::new().prefix(HALF).tempfile_in(directory)?;
    aside.write_all(&serde_json::to_vec_pretty(value)?)?;
    aside.as_file().sync_all()?;
    aside.persist(path)?;
    Ok(())
}

fn parent(path: &Path) -> io::Result<&Path> {
    path.parent().ok_or_else(|| io::Error::other("a path without a directory"))
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
    fn a_damaged_file_is_an_error_and_not_absent() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("record.json");
        assert_eq!(read::<Vec<u8>>(&path).expect("absent is no error"), None);
        for text in ["", "[", "{}", "[1]x"] {
            std::fs::write(&path, text).expect("written");
            let error = read::<Vec<u8>>(&path).expect_err(text);
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "of {text:?}");
        }
    }

    #[test]
    fn nothing_is_left_aside() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("record.json");
        write(&path, &[1, 2]).expect("written");
        write(&path, &[3]).expect("written again");
        assert_eq!(read::<Vec<u8>>(&path).expect("read"), Some(vec![3]));
        assert_eq!(std::fs::read_dir(directory.path()).expect("listed").count(), 1);
        std::fs::create_dir(directory.path().join("taken.json")).expect("made");
        write(&directory.path().join("taken.json"), &1).expect_err("a directory is in the way");
        assert_eq!(std::fs::read_dir(directory.path()).expect("listed").count(), 2);
    }
}
