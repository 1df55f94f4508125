//! Damage to what buildkitd keeps, as far as it shows within milliseconds: looked for before a start, so that a daemon is not
//! started on a cache on which it would panic, or hand out layers that are not what they say.
//!
//! What does not show here is found by the daemon itself: bits that changed under an untouched time, pages deep in a
//! database. And what lies in a cache may be of a build's making: nothing here follows a symbolic link or waits for a pipe.

use std::fs::{DirEntry, File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use sha2::{Digest as _, Sha256};

mod bolt;
#[cfg(test)]
mod real_tests;

/// Below a worker's directory: its blobs, each named by the digest of its contents.
const BLOBS: [&str; 3] = ["content", "blobs", "sha256"];
/// How much is read in one look. Few blobs differ from those of the good snapshot, but a start must not wait for gigabytes;
/// what is beyond this is told by its size alone.
const READ_AT_MOST: u64 = 256 << 20;

/// The first blob in `cache` that is not what it was in `good`, an older state of the same cache that is known to be sound, in a
/// sentence. Blobs are written once: as long as size and time are equal so are the contents. One that differs was fetched
/// again or is damaged, which its digest tells. Missing ones are the garbage collector's doing.
pub fn changed_blobs(cache: &Path, good: &Path) -> io::Result<Option<String>> {
    let mut budget = READ_AT_MOST;
    for worker in workers(cache)? {
        let (Some(now), Some(then)) = (below(&cache.join(&worker), &BLOBS)?, below(&good.join(&worker), &BLOBS)?)
        else {
            continue;
        };
        for blob in entries(&now)? {
            let (metadata, old) = (absent(blob.metadata())?, absent(then.join(blob.file_name()).symlink_metadata())?);
            let (Some(metadata), Some(old)) = (metadata, old) else { continue };
            if !old.is_file() || (metadata.is_file() && is_sound(&blob, &metadata, &old, &mut budget)?) {
                continue;
            }
            let path = worker.join(BLOBS.join("/")).join(blob.file_name());
            return Ok(Some(format!(
                "the blob {} is not what its name says: {} bytes, and {} when it was last known to be good",
                path.display(),
                metadata.len(),
                old.len()
            )));
        }
    }
    Ok(None)
}

/// The first database in `cache` that is empty, and was not in `good`, an older state of the same cache that is known to be sound.
/// A daemon opens it, and finds nothing of what the others tell of.
pub fn emptied_database(cache: &Path, good: &Path) -> io::Result<Option<String>> {
    for database in databases(cache)? {
        let length = |root: &Path| absent(root.join(&database).symlink_metadata()).map(|found| found.map(|m| m.len()));
        if let (Some(0), Some(then @ 1..)) = (length(cache)?, length(good)?) {
            let name = database.display();
            return Ok(Some(format!(
                "the database {name} is empty, and had {then} bytes when it was last known to be good"
            )));
        }
    }
    Ok(None)
}

/// The first database in `cache` that cannot be opened as it is, in a sentence; a daemon may be at work in it.
pub fn broken_database(cache: &Path) -> io::Result<Option<String>> {
    for database in databases(cache)? {
        let Some(found) = absent(cache.join(&database).symlink_metadata())? else { continue };
        let complaint = if found.is_file() {
            bolt::complaint(&open(&cache.join(&database))?)?
        } else {
            Some("it is not a file".to_owned())
        };
        if let Some(complaint) = complaint {
            return Ok(Some(format!("the database {} is damaged: {complaint}", database.display())));
        }
    }
    Ok(None)
}

/// The names of the directories that the workers of a daemon have: `runc-overlayfs`.
fn workers(cache: &Path) -> io::Result<Vec<PathBuf>> {
    let mut workers: Vec<PathBuf> = Vec::new();
    for entry in entries(cache)? {
        if entry.file_name().as_encoded_bytes().starts_with(b"runc-") && entry.file_type()?.is_dir() {
            workers.push(entry.file_name().into());
        }
    }
    Ok(workers)
}

/// Wherever buildkitd has one; relative to `cache`.
fn databases(cache: &Path) -> io::Result<Vec<PathBuf>> {
    let mut databases = databases_in(cache, Path::new(""))?;
    for worker in workers(cache)? {
        databases.extend(databases_in(cache, &worker)?);
        // The snapshotter's.
        databases.extend(databases_in(cache, &worker.join("snapshots"))?);
    }
    Ok(databases)
}

/// Relative to `cache`.
fn databases_in(cache: &Path, directory: &Path) -> io::Result<Vec<PathBuf>> {
    let Some(found) = below(cache, &directory.iter().collect::<Vec<_>>())? else { return Ok(Vec::new()) };
    let names = entries(&found)?.into_iter().map(|entry| directory.join(entry.file_name()));
    Ok(names.filter(|name| name.extension().is_some_and(|extension| extension == "db")).collect())
}

/// Goes down real directories only.
fn below<N: AsRef<Path>>(directory: &Path, names: &[N]) -> io::Result<Option<PathBuf>> {
    let mut path = directory.to_owned();
    for name in names {
        path.push(name);
        if !absent(path.symlink_metadata())?.is_some_and(|metadata| metadata.is_dir()) {
            return Ok(None);
        }
    }
    Ok(Some(path))
}

/// In the order of their names; a directory that is not there is empty.
fn entries(directory: &Path) -> io::Result<Vec<DirEntry>> {
    let Some(read) = absent(std::fs::read_dir(directory))? else { return Ok(Vec::new()) };
    let mut entries = read.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(DirEntry::file_name);
    Ok(entries)
}

/// Whether a blob is what its name says.
fn is_sound(blob: &DirEntry, now: &Metadata, then: &Metadata, budget: &mut u64) -> io::Result<bool> {
    if (now.len(), now.mtime(), now.mtime_nsec()) == (then.len(), then.mtime(), then.mtime_nsec()) {
        return Ok(true);
    }
    let Some(left) = budget.checked_sub(now.len()) else { return Ok(now.len() == then.len()) };
    *budget = left;
    // Gone since it was listed.
    let Some(file) = absent(open(&blob.path()))? else { return Ok(true) };
    let (mut hasher, mut buffer) = (Sha256::new(), vec![0; 1 << 16]);
    let mut contents = file.take(now.len());
    loop {
        match contents.read(&mut buffer)? {
            0 => break,
            length => hasher.update(&buffer[..length]),
        }
    }
    Ok(blob.file_name().as_encoded_bytes() == hex(&hasher.finalize()).as_bytes())
}

fn hex(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from(b"0123456789abcdef"[usize::from(half & 15)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Whatever can be there, can be gone.
fn absent<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        result => result.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::time::{Duration, SystemTime};

    use super::*;

    const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    /// A cache and the good snapshot of it, each with the blob of "hello".
    fn pair() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let (cache, good) = (directory.path().join("cache"), directory.path().join("good"));
        for root in [&cache, &good] {
            std::fs::create_dir_all(blobs(root)).expect("made");
            put(&blobs(root).join(HELLO), "hello", 0);
        }
        (directory, cache, good)
    }

    fn blobs(root: &Path) -> PathBuf {
        root.join("runc-overlayfs/content/blobs/sha256")
    }

    fn put(path: &Path, text: &str, seconds: u64) {
        std::fs::write(path, text).expect("written");
        let modified = SystemTime::UNIX_EPOCH + Duration::new(1_800_000_000 + seconds, 5);
        File::options().write(true).open(path).and_then(|file| file.set_modified(modified)).expect("set");
    }

    fn changed(cache: &Path, good: &Path) -> Option<String> {
        changed_blobs(cache, good).expect("looked")
    }

    #[test]
    fn a_blob_that_is_no_longer_what_it_was_is_named() {
        let (_directory, cache, good) = pair();
        assert_eq!(changed(&cache, &good), None);
        let blob = blobs(&cache).join(HELLO);
        for (text, seconds) in [("hell", 0), ("hello", 1), ("jello", 1), ("", 0)] {
            put(&blob, text, seconds);
            let complaint = changed(&cache, &good);
            if text == "hello" {
                assert_eq!(complaint, None, "it was removed and fetched again");
                continue;
            }
            let complaint = complaint.expect("damaged");
            assert!(complaint.contains(&format!("runc-overlayfs/content/blobs/sha256/{HELLO}")), "{complaint}");
            assert!(complaint.contains(&format!("{} bytes, and 5 when", text.len())), "{complaint}");
        }
        std::fs::remove_file(&blob).expect("removed");
        assert_eq!(changed(&cache, &good), None, "the garbage collector took it");
        std::fs::create_dir(&blob).expect("made");
        assert!(changed(&cache, &good).is_some());
    }

    #[test]
    fn what_cannot_be_compared_is_no_damage() {
        let (directory, cache, good) = pair();
        put(&blobs(&cache).join("0".repeat(64)), "not in the snapshot", 0);
        put(&blobs(&good).join("1".repeat(64)), "not in the cache", 0);
        std::fs::create_dir_all(blobs(&cache).with_file_name("sha512")).expect("made");
        std::fs::create_dir(cache.join("runc-native")).expect("made");
        std::fs::write(cache.join("runc-file"), "").expect("written");
        assert_eq!(changed(&cache, &good), None);
        assert_eq!(changed(&cache, &directory.path().join("nowhere")), None);
        assert_eq!(changed(&directory.path().join("nowhere"), &good), None);
        // Nothing is looked for behind a link.
        std::fs::remove_dir_all(cache.join("runc-overlayfs/content")).expect("removed");
        put(&blobs(&good).join(HELLO), "jello", 2);
        symlink(good.join("runc-overlayfs/content"), cache.join("runc-overlayfs/content")).expect("linked");
        assert_eq!(changed(&cache, &directory.path().join("good")), None);
    }

    #[test]
    fn what_is_too_large_to_be_read_is_told_by_its_size() {
        let (_directory, cache, good) = pair();
        let sparse = |root: &Path, length: u64| {
            let path = blobs(root).join("f".repeat(64));
            let file = File::create(path).expect("made");
            file.set_len(length).expect("a sparse file");
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(length)).expect("set");
        };
        sparse(&good, READ_AT_MOST + 1);
        let path = blobs(&cache).join("f".repeat(64));
        sparse(&cache, READ_AT_MOST + 1);
        File::options()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH))
            .expect("set");
        assert_eq!(changed(&cache, &good), None);
        sparse(&cache, READ_AT_MOST + 2);
        assert!(changed(&cache, &good).is_some());
    }

    #[test]
    fn an_empty_database_is_damaged_where_it_was_not_empty_before() {
        let (_directory, cache, good) = pair();
        let name = "runc-overlayfs/containerdmeta.db";
        std::fs::write(cache.join(name), "").expect("written");
        assert_eq!(broken_database(&cache).expect("looked"), None, "the power was cut before the first write");
        let emptied = || emptied_database(&cache, &good).expect("looked");
        assert_eq!(emptied(), None, "it was not there before");
        std::fs::write(good.join(name), "").expect("written");
        assert_eq!(emptied(), None, "it was empty before");
        std::fs::write(good.join(name), "database").expect("written");
        let complaint = emptied().expect("damaged");
        assert!(complaint.contains(name) && complaint.contains("had 8 bytes"), "{complaint}");
        std::fs::write(cache.join(name), "d").expect("written");
        assert_eq!(emptied(), None, "what else is wrong is told by itself");
    }

    #[test]
    fn databases_are_found_where_buildkitd_has_them() {
        let (_directory, cache, _good) = pair();
        assert_eq!(broken_database(&cache).expect("looked"), None, "there is none yet");
        std::fs::create_dir(cache.join("runc-overlayfs/snapshots")).expect("made");
        for name in ["cache.db", "runc-overlayfs/metadata_v2.db", "runc-overlayfs/snapshots/metadata.db"] {
            std::fs::write(cache.join(name), "x").expect("written");
            let complaint = broken_database(&cache).expect("looked").expect("damaged");
            assert!(complaint.contains(name), "{complaint}");
            std::fs::remove_file(cache.join(name)).expect("removed");
            symlink("/etc/passwd", cache.join(name)).expect("linked");
            let complaint = broken_database(&cache).expect("looked").expect("damaged");
            assert!(complaint.contains(name) && complaint.contains("not a file"), "{complaint}");
            std::fs::remove_file(cache.join(name)).expect("removed");
        }
        std::fs::write(cache.join("cache.db.compact"), "half a copy").expect("written");
        std::fs::write(cache.join("runc-overlayfs/content/x.db"), "not ours").expect("written");
        assert_eq!(broken_database(&cache).expect("looked"), None);
    }
}
