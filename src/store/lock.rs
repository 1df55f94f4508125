//! One kilnd per database, for as long as it runs.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::OpenError;

/// Held until dropped, and by the kernel no longer than the process lives: a killed kilnd leaves no stale lock.
///
/// Closing the file would not be enough: a process that is being started has a copy of its descriptor until it becomes
/// another program, and would keep the lock for so long.
///
/// The file stays when the lock goes. Removing it would let two processes lock two files of the same name.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Lock {
    /// Whether another process holds the database, without touching anything. What it says may be out of date at once:
    /// only [`Lock::acquire`] decides.
    pub(super) fn check_free(database: &Path) -> Result<(), OpenError> {
        // Without the file nobody holds it, and one that cannot be opened is for `acquire` to complain of.
        let Ok(file) = File::open(beside(database, ".lock")) else { return Ok(()) };
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Err(rustix::io::Errno::WOULDBLOCK) => Err(held(database, file)),
            Err(_) => Ok(()),
            Ok(()) => {
                drop(Self(file));
                Ok(())
            }
        }
    }

    pub(super) fn acquire(database: &Path) -> Result<Self, OpenError> {
        let path = beside(database, ".lock");
        let io = |doing| {
            let path = path.clone();
            move |source| OpenError::Io { doing, path, source }
        };
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io("open the lock file"))?;
        if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK {
                return Err(io("lock")(error.into()));
            }
            return Err(held(database, file));
        }
        // The note is for whoever comes second; that the disk is full must not keep the first from starting.
        let noted = file.set_len(0).and_then(|()| file.rewind());
        if let Err(error) = noted.and_then(|()| writeln!(file, "{}", std::process::id())) {
            tracing::debug!(%error, path = %path.display(), "cannot note who holds the database");
        }
        Ok(Self(file))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Err(error) = flock(&self.0, FlockOperation::Unlock) {
            tracing::debug!(%error, "cannot unlock the database");
        }
    }
}

fn held(database: &Path, lock: File) -> OpenError {
    // Empty for the moment between another's lock and its note; the number only helps a reader of the error.
    let mut note = String::new();
    let _ = lock.take(32).read_to_string(&mut note);
    OpenError::Held { path: database.to_owned(), pid: note.trim().parse().ok() }
}

/// `<path><suffix>`.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Where the file at `path` is.
pub(super) fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_with_its_holder_though_a_copy_of_its_descriptor_lives() {
        let directory = tempfile::tempdir().expect("a directory");
        let database = directory.path().join("kiln.db");
        let lock = Lock::acquire(&database).expect("free");
        let copy = lock.0.try_clone().expect("copied");
        assert!(matches!(Lock::check_free(&database), Err(OpenError::Held { .. })));
        drop(lock);
        Lock::check_free(&database).expect("free again");
        Lock::acquire(&database).expect("free again");
        drop(copy);
    }
}
