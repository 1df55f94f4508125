//! Who uses a cache: what is mounted below it in our own mount namespace, and the daemon that holds its lock.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

const MOUNTINFO: &str = "/proc/self/mountinfo";
/// buildkitd holds an exclusive `flock` on this file of its root for as long as it lives.
const DAEMON_LOCK: &str = "buildkitd.lock";

pub(super) enum Occupancy {
    /// No daemon is there, and none can start as long as the lock is held. There is no lock where no daemon has ever been.
    Free(Option<Held>),
    Taken,
}

/// A `flock`, released when this is dropped.
///
/// Closing its descriptor would not be enough: a process that is being started has a copy of it until it becomes another
/// program, and keeps the lock for so long.
#[derive(Debug)]
pub(super) struct Held(OwnedFd);

impl Held {
    /// `None` when somebody else holds it.
    pub(super) fn try_lock(file: OwnedFd) -> io::Result<Option<Self>> {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(file))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::flock(&self.0, FlockOperation::Unlock) {
            tracing::warn!(%error, "cannot unlock");
        }
    }
}

/// Takes the lock that a daemon holds on its cache.
pub(super) fn keep_daemon_out(cache: &Path) -> io::Result<Occupancy> {
    // No symbolic link is followed: what lies in a cache may be of a build's making.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::open(cache.join(DAEMON_LOCK), flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::LOOP) => return Ok(Occupancy::Free(None)),
        Err(error) => return Err(error.into()),
    };
    Ok(Held::try_lock(file)?.map_or(Occupancy::Taken, |held| Occupancy::Free(Some(held))))
}

/// Mount points strictly below `directory`, the deepest first: an order in which they can be unmounted.
pub(super) fn mounts_below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    Ok(parse(&std::fs::read(MOUNTINFO)?, directory))
}

/// As [`mounts_below`], and `path` itself if something is mounted there.
pub(super) fn mounts_within(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut points = mounts_below(path)?;
    let parent = path.parent().unwrap_or(path);
    points.extend(mounts_below(parent)?.into_iter().filter(|point| point == path));
    Ok(points)
}

fn parse(mountinfo: &[u8], directory: &Path) -> Vec<PathBuf> {
    let points = mountinfo.split(|&b| b == b'\n').filter_map(|line| line.split(|&b| b == b' ').nth(4));
    let mut points: Vec<PathBuf> = points
        .map(|field| PathBuf::from(unescape(field)))
        .filter(|point| point != directory && point.starts_with(directory))
        .collect();
    // Later lines are mounted over or within earlier ones.
    points.reverse();
    points.sort_by_key(|point| std::cmp::Reverse(point.as_os_str().as_bytes().len()));
    points
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
pub(super) fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match octal {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_its_holder_though_a_copy_of_its_descriptor_lives() {
        let directory = tempfile::tempdir().expect("a directory");
        let lock = std::fs::File::create(directory.path().join(DAEMON_LOCK)).expect("made");
        let copy = lock.try_clone().expect("copied");
        let held = Held::try_lock(lock.into()).expect("no error").expect("free");
        assert!(matches!(keep_daemon_out(directory.path()).expect("no error"), Occupancy::Taken));
        drop(held);
        assert!(matches!(keep_daemon_out(directory.path()).expect("no error"), Occupancy::Free(Some(_))));
        drop(copy);
    }

    const SAMPLE: &[u8] = b"22 1 252:0 / / rw - ext4 /dev/vda rw\n\
        30 22 0:30 / /srv/c rw,nosuid shared:1 - btrfs /dev/loop0 rw\n\
        31 30 0:31 / /srv/c/a/rootfs rw - overlay overlay rw\n\
        32 31 0:32 / /srv/c/a/rootfs/dev rw - tmpfs tmpfs rw\n\
        33 22 0:33 / /srv/cc rw - tmpfs tmpfs rw\n\
        34 30 0:34 / /srv/c/with\\040space rw - tmpfs tmpfs rw\n\
        broken\n";

    #[test]
    fn only_what_is_strictly_below_and_the_deepest_first() {
        let points = parse(SAMPLE, Path::new("/srv/c"));
        let expected = ["/srv/c/a/rootfs/dev", "/srv/c/with space", "/srv/c/a/rootfs"].map(PathBuf::from);
        assert_eq!(points, expected);
        assert!(parse(SAMPLE, Path::new("/srv/cc")).is_empty());
    }

    #[test]
    fn the_kernel_s_own_list_can_be_read() {
        assert!(mounts_below(Path::new("/")).expect("readable").iter().any(|point| point == Path::new("/proc")));
    }
}
