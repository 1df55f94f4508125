//! What a step of ZFS ended with, told from what `zfs` said (always in the C locale).

use std::fmt::Display;

use super::super::VolumeError;
use super::super::command::Failure;

/// Why a step failed, before the engine adds what it was doing to which volume.
#[derive(Debug)]
pub(super) enum Fault {
    /// There is no such dataset or snapshot.
    Absent,
    /// The name is taken.
    Exists,
    /// Something uses it; the text is ZFS's, or says who.
    Busy(String),
    /// It has children, or clones that need it.
    Needed(String),
    /// The pool, or a quota, is full.
    Full,
    /// What is asked for is less than what is used.
    TooSmall,
    /// Nothing can be done before somebody does something about it.
    Unusable {
        why: String,
        remedy: String,
    },
    Failed(Failure),
}

impl Fault {
    pub(super) fn unusable(why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Unusable { why: why.into(), remedy: remedy.into() }
    }

    /// `command` for those that have no kind of their own.
    pub(super) fn from_said(said: &str, command: impl FnOnce() -> String) -> Self {
        let says = |texts: &[&str]| texts.iter().any(|text| said.contains(text));
        // In this order: a mount that fails for want of a key says so after `mount failed`, and so on.
        if says(&["pool I/O is currently suspended", "pool is suspended"]) {
            Self::unusable("its pool is suspended", SUSPENDED)
        } else if says(&["key not loaded", "key is not loaded"]) {
            Self::unusable(
                "it is encrypted and its key is not loaded",
                "load it: zfs load-key -r, with the name of the dataset",
            )
        } else if says(&["/dev/zfs", "modules are not loaded", "modules cannot be auto-loaded"]) {
            Self::unusable("the kernel has no OpenZFS", MODULE)
        } else if says(&["ermission denied", "peration not permitted", "must be run as root"]) {
            Self::unusable("permission was denied", "run kilnd as root")
        } else if says(&["Read-only file system", "pool is read-only", "pool is read only"]) {
            Self::unusable("its pool is imported read-only", "import it anew: zpool export, then zpool import")
        } else if says(&["size is less than current used"]) {
            Self::TooSmall
        } else if says(&["out of space", "o space left on device", "quota exceeded", "Disk quota"]) {
            Self::Full
        } else if says(&["has children", "has dependent clones", "dependent clone"]) {
            Self::Needed(said.to_owned())
        } else if says(&["is busy", "resource busy", "being held"]) {
            Self::Busy(said.to_owned())
        } else if says(&["already exists", "dataset exists"]) {
            Self::Exists
        } else if says(&["does not exist", "o such pool or dataset", "could not find any snapshots"]) {
            Self::Absent
        } else if says(&["irectory is not empty"]) {
            Self::unusable(
                "there are files in the directory that it is to be mounted on",
                "move them away: they were written there while it was not mounted",
            )
        } else {
            Self::Failed(Failure::Command { command: command(), said: said.to_owned() })
        }
    }

    pub(super) fn during(self, operation: &'static str, name: impl Display) -> VolumeError {
        let name = name.to_string();
        match self {
            Self::Absent => VolumeError::Missing { operation, name },
            Self::Exists => VolumeError::Exists { operation, name },
            Self::Busy(holder) | Self::Needed(holder) => VolumeError::Busy { operation, name, holder },
            Self::Full => VolumeError::Full { operation, name },
            Self::TooSmall => {
                let said = "it holds more than that".to_owned();
                VolumeError::Command { operation, name, command: "zfs".to_owned(), said }
            }
            Self::Unusable { why, remedy } => VolumeError::Unusable { path: name, why, remedy },
            Self::Failed(failure) => failure.during(operation, name),
        }
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Full => Self::Full,
            Failure::Busy { holder } => Self::Busy(holder),
            other => Self::Failed(other),
        }
    }
}

pub(super) const SUSPENDED: &str = "see what ails it (zpool status -x), mend that, and let it go on: zpool clear";
pub(super) const MODULE: &str =
    "install OpenZFS for this kernel and load it (modprobe zfs), or choose the engine btrfs or dir";

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(said: &str) -> Fault {
        Fault::from_said(said, || "zfs x".to_owned())
    }

    #[test]
    fn what_zfs_says_becomes_a_typed_error() {
        type Is = fn(&Fault) -> bool;
        let all: &[(&str, Is)] = &[
            ("cannot open 'tank/x': dataset does not exist", |f| matches!(f, Fault::Absent)),
            ("could not find any snapshots to destroy; check snapshot names.", |f| matches!(f, Fault::Absent)),
            ("cannot create 'tank/x': dataset already exists", |f| matches!(f, Fault::Exists)),
            ("cannot create snapshot 'tank/x@s': dataset already exists", |f| matches!(f, Fault::Exists)),
            ("cannot destroy 'tank/x': dataset is busy", |f| matches!(f, Fault::Busy(_))),
            ("cannot unmount '/x': pool or dataset is busy", |f| matches!(f, Fault::Busy(_))),
            ("cannot destroy 'tank/x': filesystem has children\nuse '-r' to destroy", |f| {
                matches!(f, Fault::Needed(_))
            }),
            ("cannot destroy 'tank/x': filesystem has dependent clones", |f| matches!(f, Fault::Needed(_))),
            ("cannot create 'tank/x': out of space", |f| matches!(f, Fault::Full)),
            ("cannot set property for 'tank/x': size is less than current used or reserved space", |f| {
                matches!(f, Fault::TooSmall)
            }),
            (
                "cannot create 'tank/x': pool I/O is currently suspended",
                |f| matches!(f, Fault::Unusable { remedy, .. } if remedy.contains("zpool clear")),
            ),
            (
                "cannot mount 'tank/x': encryption key not loaded",
                |f| matches!(f, Fault::Unusable { remedy, .. } if remedy.contains("zfs load-key")),
            ),
            (
                "cannot create 'tank/x': encryption root's key is not loaded or provided",
                |f| matches!(f, Fault::Unusable { remedy, .. } if remedy.contains("zfs load-key")),
            ),
            ("cannot create 'tank/x': pool is read-only", |f| matches!(f, Fault::Unusable { .. })),
            ("cannot mount '/x': failed to create mountpoint: Disk quota exceeded", |f| matches!(f, Fault::Full)),
            ("cannot create snapshots : out of space", |f| matches!(f, Fault::Full)),
            ("cannot destroy 'tank/x@s': snapshot has dependent clones\nuse '-R'", |f| matches!(f, Fault::Needed(_))),
            ("cannot destroy snapshot tank/x@s: it's being held. Run 'zfs holds -r tank/x@s' to see holders.", |f| {
                matches!(f, Fault::Busy(_))
            }),
            ("cannot mount '/x': directory is not empty", |f| matches!(f, Fault::Unusable { .. })),
            (
                "/dev/zfs and /proc/self/mounts are required.\nTry running 'udevadm trigger'",
                |f| matches!(f, Fault::Unusable { remedy, .. } if remedy.contains("modprobe zfs")),
            ),
            (
                "The ZFS modules cannot be auto-loaded.\nTry running 'modprobe zfs'",
                |f| matches!(f, Fault::Unusable { remedy, .. } if remedy.contains("modprobe zfs")),
            ),
            ("cannot create 'tank/x': permission denied", |f| matches!(f, Fault::Unusable { .. })),
            ("internal error: odd", |f| matches!(f, Fault::Failed(Failure::Command { .. }))),
        ];
        for (said, right) in all {
            let found = fault(said);
            assert!(right(&found), "{said:?} became {found:?}");
        }
        let error = fault("internal error: odd").during("create", "p1").to_string();
        assert_eq!(error, "cannot create volume p1: zfs x said: internal error: odd");
    }
}
