//! Subvolumes of a btrfs: snapshots and clones cost nothing and are one instant of a volume, running daemon or not.
//!
//! Sizes are enforced where quotas are switched on (`btrfs quota enable`), which is left to the admin: they cost
//! something on every write of the whole file system.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;

use super::command::{Failure, Program, QUICK, WALK};
use super::dir::{available, remove_all};
use super::tree::{Copy, Medium, Tree};
use super::{Usage, VolumeError, root};
use crate::clock::Clock;
use crate::host::occupancy;

pub type BtrfsEngine = Tree<Btrfs>;

/// `BTRFS_SUPER_MAGIC` of linux/magic.h.
const MAGIC: u64 = 0x9123_683E;

/// The medium of [`BtrfsEngine`].
#[derive(Debug)]
pub struct Btrfs {
    btrfs: Program,
    rm: Program,
}

/// A row of `btrfs qgroup show`: bytes.
#[derive(Debug, PartialEq, Eq)]
struct Quota {
    referenced: u64,
    exclusive: u64,
    limit: Option<u64>,
}

impl BtrfsEngine {
    /// `root` must exist on a btrfs; `search` are the directories in which programs are looked for, as [`super::SEARCH`];
    /// `clock` says when something went to the trash.
    pub async fn at(root: &Path, search: &[PathBuf], clock: Arc<dyn Clock>) -> Result<Self, VolumeError> {
        let btrfs = Program::find("btrfs", search, "install btrfs-progs, or choose the engine dir")?;
        let rm = Program::find("rm", search, "install coreutils")?;
        Self::open(root, Btrfs { btrfs, rm }, clock, is_btrfs).await
    }
}

fn is_btrfs(path: &Path) -> Result<(), VolumeError> {
    const REMEDY: &str =
        "mount a btrfs there (mkfs.btrfs makes one), name a directory on one, or choose the engine dir";
    match rustix::fs::statfs(path) {
        Ok(stat) if u64::try_from(stat.f_type).is_ok_and(|kind| kind == MAGIC) => Ok(()),
        Ok(_) => Err(root::unusable(path, "it is not on a btrfs", REMEDY)),
        Err(error) => Err(root::unusable(path, &error.to_string(), REMEDY)),
    }
}

#[async_trait]
impl Medium for Btrfs {
    fn name(&self) -> &'static str {
        "btrfs"
    }

    fn copies_are_instant(&self) -> bool {
        true
    }

    async fn make(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        self.run(&["subvolume".as_ref(), "create".as_ref(), "--".as_ref(), at.as_os_str()]).await?;
        self.limit(at, size).await
    }

    async fn copy(&self, from: &Path, to: &Path, use_: Copy) -> Result<(), Failure> {
        let mut args: Vec<&OsStr> = vec!["subvolume".as_ref(), "snapshot".as_ref()];
        if use_ == Copy::Snapshot {
            args.push("-r".as_ref());
        }
        args.extend::<[&OsStr; 3]>(["--".as_ref(), from.as_os_str(), to.as_os_str()]);
        self.run(&args).await?;
        match use_ {
            Copy::Snapshot => Ok(()),
            Copy::Volume { size } => self.limit(to, size).await,
        }
    }

    async fn remove(&self, at: &Path) -> Result<(), Failure> {
        if !tokio::fs::try_exists(at).await.map_err(|e| Failure::io(at, e))? {
            return Ok(());
        }
        if let Some(point) = occupancy::mounts_below(at).map_err(|e| Failure::io(at, e))?.first() {
            return Err(Failure::Busy { holder: format!("the mount {}", point.display()) });
        }
        let args: [&OsStr; 4] = ["subvolume".as_ref(), "delete".as_ref(), "--".as_ref(), at.as_os_str()];
        let printed = self.btrfs.run_leniently(&args, QUICK).await?;
        if printed.complete {
            return Ok(());
        }
        // A daemon may have made subvolumes of its own in there, and a crash leaves plain directories: both can be emptied
        // file by file. There is no --one-file-system because each subvolume counts as one; mounts were looked for above.
        if printed.stderr.contains("Directory not empty") || printed.stderr.contains("Not a Btrfs subvolume") {
            return remove_all(&self.rm, at, false).await;
        }
        Err(self.btrfs.failure(&args, &printed.stderr))
    }

    async fn usage(&self, at: &Path) -> Result<Usage, Failure> {
        let free = available(at)?;
        if let Some(quota) = self.quota(at).await? {
            let left = quota.limit.map_or(u64::MAX, |limit| limit.saturating_sub(quota.referenced));
            return Ok(Usage { used: quota.exclusive, size: quota.limit, available: free.min(left) });
        }
        let args: [&OsStr; 6] =
            ["filesystem".as_ref(), "du".as_ref(), "-s".as_ref(), "--raw".as_ref(), "--".as_ref(), at.as_os_str()];
        let printed = self.btrfs.run(&args, WALK).await?;
        let used =
            parse_du(&printed).ok_or_else(|| self.btrfs.failure(&args, &format!("not understood: {printed}")))?;
        Ok(Usage { used, size: None, available: free })
    }

    async fn resize(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        let Some(quota) = self.quota(at).await? else { return Ok(()) };
        let floor = quota.referenced.saturating_add(quota.referenced / 10);
        let limit = size.map_or_else(|| "none".to_owned(), |size| size.max(floor).to_string());
        self.run(&["qgroup".as_ref(), "limit".as_ref(), "--".as_ref(), limit.as_ref(), at.as_os_str()]).await
    }
}

impl Btrfs {
    async fn run(&self, args: &[&OsStr]) -> Result<(), Failure> {
        self.btrfs.run(args, QUICK).await.map(|_| ())
    }

    async fn limit(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        let Some(size) = size else { return Ok(()) };
        if self.quota(at).await?.is_none() {
            return Ok(());
        }
        let size = size.to_string();
        self.run(&["qgroup".as_ref(), "limit".as_ref(), "--".as_ref(), size.as_ref(), at.as_os_str()]).await
    }

    /// `None` where quotas are off.
    async fn quota(&self, at: &Path) -> Result<Option<Quota>, Failure> {
        let args: [&OsStr; 8] = [
            "qgroup".as_ref(),
            "show".as_ref(),
            "--raw".as_ref(),
            "--sync".as_ref(),
            "-re".as_ref(),
            "-f".as_ref(),
            "--".as_ref(),
            at.as_os_str(),
        ];
        let printed = self.btrfs.run_leniently(&args, QUICK).await?;
        if !printed.complete {
            let off = printed.stderr.contains("quotas not enabled") || printed.stderr.contains("quota not enabled");
            return if off { Ok(None) } else { Err(self.btrfs.failure(&args, &printed.stderr)) };
        }
        let quota = parse_quota(&printed.stdout);
        quota.map(Some).ok_or_else(|| self.btrfs.failure(&args, &format!("not understood: {}", printed.stdout)))
    }
}

/// `qgroupid rfer excl max_rfer max_excl [path]`; the heading and its spelling change with versions, so it is passed over.
fn parse_quota(printed: &str) -> Option<Quota> {
    let row = printed.lines().find(|line| line.trim_start().starts_with("0/"))?;
    let mut columns = row.split_whitespace().skip(1);
    let referenced = columns.next()?.parse().ok()?;
    let exclusive = columns.next()?.parse().ok()?;
    let limit = match columns.next()? {
        "none" => None,
        bytes => Some(bytes.parse().ok()?),
    };
    Some(Quota { referenced, exclusive, limit })
}

/// `Total Exclusive Set-shared Filename` below a heading; what is exclusive would be free without it.
fn parse_du(printed: &str) -> Option<u64> {
    let row = printed.lines().find(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))?;
    row.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_quotas() {
        let printed = "qgroupid         rfer         excl     max_rfer     max_excl \n\
            --------         ----         ----     --------     -------- \n0/257          16384        8192    104857600         none ";
        let quota = Quota { referenced: 16384, exclusive: 8192, limit: Some(104_857_600) };
        assert_eq!(parse_quota(printed), Some(quota));
        let printed =
            "Qgroupid    Referenced    Exclusive Max referenced Max exclusive Path\n0/5 1 2 none none <toplevel>";
        assert_eq!(parse_quota(printed), Some(Quota { referenced: 1, exclusive: 2, limit: None }));
        for broken in
            ["", "0/257", "0/257 1", "0/257 1 2", "0/257 -1 2 none", "0/257 1 2 3.5MiB none", "1/0 1 2 none none"]
        {
            assert_eq!(parse_quota(broken), None, "of {broken:?}");
        }
    }

    #[test]
    fn rows_of_disk_usage() {
        assert_eq!(
            parse_du("     Total   Exclusive  Set shared  Filename\n   2097152     1048576     1048576  /x"),
            Some(1_048_576)
        );
        for broken in ["", "Total Exclusive", "12", "12 x", "12 1.5MiB 0 /x"] {
            assert_eq!(parse_du(broken), None, "of {broken:?}");
        }
    }
}
