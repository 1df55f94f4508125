//! The directory that an engine lives in: checked before anything is changed in it, marked as ours, held by one kilnd.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, StatVfsMountFlags};

use super::VolumeError;
use super::record::{FORMAT, Marker};
use crate::host::files;
use crate::host::occupancy::Held;

pub(super) const MARKER: &str = "kiln-volumes.json";

/// A root that is ours as long as this lives.
pub(super) struct Claim {
    /// Absolute and without symbolic links, so that it compares with what the kernel reports.
    pub root: PathBuf,
    pub marker: Marker,
    pub held: Held,
}

impl Claim {
    /// Checks `root`, holds it and makes the directories named in `rooms`. `suits` is the engine's own check. Nothing is
    /// changed unless everything is well.
    pub(super) fn new(
        root: &Path,
        engine: &'static str,
        rooms: &[&str],
        suits: impl FnOnce(&Path) -> Result<(), VolumeError>,
    ) -> Result<Self, VolumeError> {
        let root = check(root)?;
        suits(&root)?;
        let held = hold(&root)?;
        let marker = if let Some(marker) = files::read(&root.join(MARKER)).map_err(|e| unreadable(&root, &e))? {
            known(&root, engine, marker)?
        } else {
            let marker = unmarked(&root, engine, rooms)?;
            files::write(&root.join(MARKER), &marker).map_err(|e| unwritable(&root, &e))?;
            marker
        };
        for room in rooms {
            make_room(&root.join(room)).map_err(|e| unwritable(&root, &e))?;
        }
        Ok(Self { root, marker, held })
    }
}

/// Where the marker of a claimed root is kept up to date.
pub(super) fn marker_path(root: &Path) -> PathBuf {
    root.join(MARKER)
}

/// That `root` is a directory that can be written to, and is full only if it is ours already: then there are builds to
/// look after and a cache to prune, and a new volume will say that there is no space.
pub(super) fn check(root: &Path) -> Result<PathBuf, VolumeError> {
    if !root.is_absolute() {
        return Err(unusable(root, "it is not an absolute path", "write it from / on"));
    }
    let canonical = root.canonicalize().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let remedy = format!("create it: mkdir -p -m 0700 {}", root.display());
            unusable(root, "there is no such directory", &remedy)
        }
        io::ErrorKind::NotADirectory => unusable(root, "it is not a directory", "name a directory"),
        _ => unwritable(root, &error),
    })?;
    if !canonical.is_dir() {
        return Err(unusable(root, "it is not a directory", "name a directory"));
    }
    let space = rustix::fs::statvfs(&canonical).map_err(|e| unwritable(root, &e.into()))?;
    if space.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(unusable(root, "its file system is mounted read-only", "remount it: mount -o remount,rw"));
    }
    // File systems that make inodes as needed report zero of them in all.
    if space.f_bavail == 0 || (space.f_files > 0 && space.f_favail == 0) {
        if canonical.join(MARKER).exists() {
            return Ok(canonical);
        }
        return Err(unusable(root, "its file system is full", "free some space, or name a directory on another one"));
    }
    Ok(canonical)
}

/// A lock on the directory itself: it needs no file, and the kernel releases it however we end.
fn hold(root: &Path) -> Result<Held, VolumeError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(root, flags, Mode::empty()).map_err(|e| unwritable(root, &e.into()))?;
    Held::try_lock(directory).map_err(|e| unwritable(root, &e))?.ok_or_else(|| {
        unusable(root, "another kilnd uses it", "stop that one, or give this one a directory of its own")
    })
}

fn known(root: &Path, engine: &'static str, marker: Marker) -> Result<Marker, VolumeError> {
    if marker.format > FORMAT {
        return Err(unusable(root, "it was written by a newer Kiln", "run that version, or name another directory"));
    }
    if marker.engine != engine {
        let why = format!("it holds volumes of the engine {}, and {engine} was asked for", marker.engine);
        return Err(unusable(root, &why, "configure that engine, or name another directory"));
    }
    Ok(marker)
}

/// A directory that we have not seen before must not hold anything where our rooms go.
fn unmarked(root: &Path, engine: &'static str, rooms: &[&str]) -> Result<Marker, VolumeError> {
    for room in rooms {
        if root.join(room).symlink_metadata().is_ok() {
            let why = format!("it holds {room:?}, which is not Kiln's (there is no {MARKER})");
            return Err(unusable(root, &why, "name an empty directory"));
        }
    }
    Ok(Marker { format: FORMAT, engine: engine.to_owned(), last_trash: 0 })
}

fn make_room(path: &Path) -> io::Result<()> {
    match files::make_private_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            // Not for nothing: on a ZFS that is full even that fails.
            if path.metadata()?.permissions().mode() & 0o7777 == 0o700 {
                return Ok(());
            }
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
        }
        made => made,
    }
}

fn unreadable(root: &Path, error: &io::Error) -> VolumeError {
    let remedy = format!("restore {} from a backup, or name another directory", root.join(MARKER).display());
    unusable(root, &format!("its {MARKER} cannot be read: {error}"), &remedy)
}

fn unwritable(root: &Path, error: &io::Error) -> VolumeError {
    unusable(root, &error.to_string(), "make it readable and writable for the user that kilnd runs as, which is root")
}

pub(super) fn unusable(path: &Path, why: &str, remedy: &str) -> VolumeError {
    VolumeError::Unusable { path: path.display().to_string(), why: why.to_owned(), remedy: remedy.to_owned() }
}
