//! Plain directories: the engine for every file system.
//!
//! Copies are made by `cp`, which shares blocks where the file system can (XFS, btrfs, bcachefs) and copies where not,
//! and keeps owners, modes, times, hard links, devices and extended attributes. Neither is one instant of a volume that is
//! being written, so a volume is copied only while no daemon is in it. Sizes are not enforced.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use kiln_domain::cache::size::Fill;

use super::command::{Failure, Program, WALK};
use super::medium::{Copy, Medium};
use super::tree::{Tree, blocking, move_to};
use super::{Usage, VolumeError};
use crate::clock::Clock;
use crate::host::files;

pub type DirEngine = Tree<Dir>;

const REMEDY: &str = "install coreutils";

/// The medium of [`DirEngine`].
#[derive(Debug)]
pub struct Dir {
    cp: Program,
    rm: Program,
    du: Program,
}

impl DirEngine {
    /// `root` must exist; `search` are the directories in which programs are looked for, as [`super::SEARCH`];
    /// `clock` says when a snapshot was taken, and when something went to the trash.
    pub async fn at(root: &Path, search: &[PathBuf], clock: Arc<dyn Clock>) -> Result<Self, VolumeError> {
        Self::open(root, Dir::find(search)?, clock, |_| Ok(())).await
    }
}

impl Dir {
    pub(super) fn find(search: &[PathBuf]) -> Result<Self, VolumeError> {
        let find = |name| Program::find(name, search, REMEDY);
        Ok(Self { cp: find("cp")?, rm: find("rm")?, du: find("du")? })
    }
}

#[async_trait]
impl Medium for Dir {
    fn name(&self) -> &'static str {
        "dir"
    }

    fn copies_are_instant(&self) -> bool {
        false
    }

    async fn make(&self, at: &Path, _size: Option<u64>) -> Result<(), Failure> {
        blocking(at, |at| files::make_private_directory(at).map_err(|e| Failure::io(at, e))).await
    }

    async fn copy(&self, from: &Path, to: &Path, _use: Copy) -> Result<(), Failure> {
        let args: [&OsStr; 8] = [
            "-dR".as_ref(),
            // Named one by one: under -a, cp says nothing of an attribute that it could not copy, and an overlay without
            // its attributes is another file system.
            "--preserve=mode,ownership,timestamps,links,xattr".as_ref(),
            "--reflink=auto".as_ref(),
            "--one-file-system".as_ref(),
            "--no-target-directory".as_ref(),
            "--".as_ref(),
            from.as_os_str(),
            to.as_os_str(),
        ];
        self.cp.run(&args, WALK).await?;
        // The rename that follows must not be on disk before what it names.
        blocking(to, |to| {
            let directory = File::open(to).map_err(|e| Failure::io(to, e))?;
            rustix::fs::syncfs(&directory).map_err(|e| Failure::io(to, e))
        })
        .await
    }

    async fn carry(&self, from: &Path, to: &Path) -> Result<(), Failure> {
        let to = to.to_owned();
        blocking(from, move |from| {
            let carried = matches!(from.try_exists(), Ok(false)) && matches!(to.try_exists(), Ok(true));
            if carried { Ok(()) } else { move_to(from, &to) }
        })
        .await
    }

    async fn remove(&self, at: &Path) -> Result<(), Failure> {
        remove_all(&self.rm, at, true).await
    }

    /// Which blocks `cp` could share is known to the file system alone.
    /// What is removed is free at once.
    async fn freed(&self, _root: &Path) -> Result<(), Failure> {
        Ok(())
    }

    async fn usage(&self, at: &Path, _snapshots: &[PathBuf]) -> Result<Usage, Failure> {
        let args: [&OsStr; 5] = [
            "--summarize".as_ref(),
            "--block-size=1".as_ref(),
            "--one-file-system".as_ref(),
            "--".as_ref(),
            at.as_os_str(),
        ];
        let printed = self.du.run_leniently(&args, WALK).await?;
        // Files that vanish while a daemon works make du complain; its sum is still the best there is.
        let used = printed.stdout.split_whitespace().next().and_then(|sum| sum.parse().ok());
        let used = used.ok_or_else(|| self.du.failure(&args, &format!("{}{}", printed.stdout, printed.stderr)))?;
        let (available, inodes_available) = room(at)?;
        Ok(Usage { used, shared: None, snapshots: None, size: None, available, inodes_available })
    }

    /// Nothing tells but a comparison of everything.
    async fn written_since(&self, _at: &Path, _snapshot: &Path) -> Result<Option<bool>, Failure> {
        Ok(None)
    }

    /// Nothing enforces a size here.
    async fn fill(&self, _at: &Path) -> Result<Option<Fill>, Failure> {
        Ok(None)
    }

    async fn resize(&self, _at: &Path, _size: Option<u64>) -> Result<(), Failure> {
        Ok(())
    }
}

/// What the file system of `path` has left for us: bytes, and files where they are counted.
pub(super) fn room(path: &Path) -> Result<(u64, Option<u64>), Failure> {
    let space = rustix::fs::statvfs(path).map_err(|e| Failure::io(path, e))?;
    Ok((space.f_bavail.saturating_mul(space.f_frsize), (space.f_files > 0).then_some(space.f_favail)))
}

/// Removes a tree, mounts excepted. A copy that outlived the kilnd that began it may still be adding to the tree, hence more
/// than one attempt; it ends with an error of its own as soon as its directory is gone.
pub(super) async fn remove_all(rm: &Program, at: &Path, one_file_system: bool) -> Result<(), Failure> {
    const ATTEMPTS: usize = 3;
    let mut args: Vec<&OsStr> = vec!["-rf".as_ref()];
    if one_file_system {
        args.push("--one-file-system".as_ref());
    }
    args.extend::<[&OsStr; 2]>(["--".as_ref(), at.as_os_str()]);
    let mut outcome = Ok(());
    for _ in 0..ATTEMPTS {
        outcome = match rm.run(&args, WALK).await {
            Err(Failure::Command { said, .. }) if said.contains("Directory not empty") => {
                Err(Failure::Busy { holder: format!("something that keeps writing below {}", at.display()) })
            }
            done => return done.map(|_| ()),
        };
    }
    outcome
}
