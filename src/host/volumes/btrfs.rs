//! Subvolumes of a btrfs: snapshots and clones cost nothing and are one instant of a volume, running daemon or not.
//!
//! Sizes are enforced where quotas are switched on (`btrfs quota enable`), which is left to the admin: they cost
//! something on every write of the whole file system.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use kiln_domain::cache::size::Fill;

use super::command::{Failure, Program, QUICK, WALK};
use super::dir::{remove_all, room};
use super::medium::{Copy, Medium};
use super::tree::{Tree, blocking, move_to};
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

/// Of `btrfs subvolume show`: numbers of transactions.
#[derive(Debug, PartialEq, Eq)]
struct Generations {
    /// The last one on the disk that changed it.
    last: u64,
    /// The one that made it. A snapshot holds everything that its source got up to the end of this one, and nothing later.
    made: u64,
}

impl BtrfsEngine {
    /// `root` must exist on a btrfs; `search` are the directories in which programs are looked for, as [`super::SEARCH`];
    /// `clock` says when a snapshot was taken, and when something went to the trash.
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
        self.inherit(at, size).await
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
            Copy::Volume { size } => self.inherit(to, size).await,
        }
    }

    /// The kernel lets nobody move what is read-only from one directory to another: it is writable for that moment.
    async fn carry(&self, from: &Path, to: &Path) -> Result<(), Failure> {
        if tokio::fs::try_exists(from).await.map_err(|e| Failure::io(from, e))? {
            self.set_read_only(from, false).await?;
            let to = to.to_owned();
            blocking(from, move |from| move_to(from, &to)).await?;
        }
        self.set_read_only(to, true).await
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

    /// A kernel thread frees a subvolume after the commit that took its name away, and what it has freed counts with the next.
    async fn freed(&self, root: &Path) -> Result<(), Failure> {
        self.sync(root).await?;
        let args: [&OsStr; 4] = ["subvolume".as_ref(), "sync".as_ref(), "--".as_ref(), root.as_os_str()];
        self.btrfs.run(&args, WALK).await?;
        self.sync(root).await
    }

    /// What the snapshots hold is the sum of what each holds alone: what two of them share is in nobody's.
    async fn usage(&self, at: &Path, snapshots: &[PathBuf]) -> Result<Usage, Failure> {
        let (free, inodes_available) = room(at)?;
        if let Some(quota) = self.quota(at, Sync::First).await? {
            let mut held = Some(0_u64);
            for snapshot in snapshots {
                // They were written out with the volume. Quotas may have been switched off since.
                let alone = self.quota(snapshot, Sync::Not).await?.map(|quota| quota.exclusive);
                held = held.zip(alone).map(|(held, alone)| held.saturating_add(alone));
            }
            let left = quota.limit.map_or(u64::MAX, |limit| limit.saturating_sub(quota.referenced));
            return Ok(Usage {
                used: quota.exclusive,
                shared: Some(quota.referenced.saturating_sub(quota.exclusive)),
                snapshots: held,
                size: quota.limit,
                available: free.min(left),
                inodes_available,
            });
        }
        let args: [&OsStr; 6] =
            ["filesystem".as_ref(), "du".as_ref(), "-s".as_ref(), "--raw".as_ref(), "--".as_ref(), at.as_os_str()];
        let printed = self.btrfs.run(&args, WALK).await?;
        let (total, used) =
            parse_du(&printed).ok_or_else(|| self.btrfs.failure(&args, &format!("not understood: {printed}")))?;
        let shared = Some(total.saturating_sub(used));
        Ok(Usage { used, shared, snapshots: None, size: None, available: free, inodes_available })
    }

    /// A fork, or another snapshot, counts as something written: it changes the volume's tree, too. What was written is in
    /// no generation before it is on the disk, so "no" takes a sync.
    async fn written_since(&self, at: &Path, snapshot: &Path) -> Result<Option<bool>, Failure> {
        let taken = self.generations(snapshot).await?.made;
        if self.generations(at).await?.last > taken {
            return Ok(Some(true));
        }
        self.sync(at).await?;
        Ok(Some(self.generations(at).await?.last > taken))
    }

    async fn fill(&self, at: &Path) -> Result<Option<Fill>, Failure> {
        let (free, inodes_available) = room(at)?;
        // As of the last commit of the file system: a measurement must not make it write everything out.
        let Some(quota) = self.quota(at, Sync::Not).await? else { return Ok(None) };
        let Some(size) = quota.limit else { return Ok(None) };
        let available = free.min(size.saturating_sub(quota.referenced));
        Ok(Some(Fill { used: quota.referenced, size, available, inodes_available }))
    }

    async fn resize(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        let Some(quota) = self.quota(at, Sync::First).await? else { return Ok(()) };
        self.limit(at, size.map(|size| size.max(quota.floor()))).await
    }
}

impl Quota {
    /// A daemon cannot even start on a full volume.
    const fn floor(&self) -> u64 {
        self.referenced.saturating_add(self.referenced / 10)
    }
}

impl Btrfs {
    async fn run(&self, args: &[&OsStr]) -> Result<(), Failure> {
        self.btrfs.run(args, QUICK).await.map(|_| ())
    }

    async fn sync(&self, at: &Path) -> Result<(), Failure> {
        self.run(&["filesystem".as_ref(), "sync".as_ref(), "--".as_ref(), at.as_os_str()]).await
    }

    /// The size of a new volume, where sizes are enforced. What it was copied from may hold more than that: see
    /// [`Medium::resize`].
    async fn inherit(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        let Some(size) = size else { return Ok(()) };
        let Some(quota) = self.quota(at, Sync::Not).await? else { return Ok(()) };
        self.limit(at, Some(if size < quota.referenced { quota.floor() } else { size })).await
    }

    async fn limit(&self, at: &Path, size: Option<u64>) -> Result<(), Failure> {
        let limit = size.map_or_else(|| "none".to_owned(), |size| size.to_string());
        self.run(&["qgroup".as_ref(), "limit".as_ref(), "--".as_ref(), limit.as_ref(), at.as_os_str()]).await
    }

    async fn set_read_only(&self, at: &Path, read_only: bool) -> Result<(), Failure> {
        let value = if read_only { "true" } else { "false" };
        let mut args: Vec<&OsStr> = ["property", "set", "-ts", "--"].map(OsStr::new).into();
        args.extend::<[&OsStr; 3]>([at.as_os_str(), "ro".as_ref(), value.as_ref()]);
        self.run(&args).await
    }

    async fn generations(&self, at: &Path) -> Result<Generations, Failure> {
        let args: [&OsStr; 4] = ["subvolume".as_ref(), "show".as_ref(), "--".as_ref(), at.as_os_str()];
        let printed = self.btrfs.run(&args, QUICK).await?;
        parse_generations(&printed).ok_or_else(|| self.btrfs.failure(&args, &format!("not understood: {printed}")))
    }

    /// `None` where quotas are off.
    async fn quota(&self, at: &Path, sync: Sync) -> Result<Option<Quota>, Failure> {
        let mut args: Vec<&OsStr> = ["qgroup", "show", "--raw", "-re", "-f"].map(OsStr::new).into();
        if sync == Sync::First {
            args.push("--sync".as_ref());
        }
        args.extend::<[&OsStr; 2]>(["--".as_ref(), at.as_os_str()]);
        let printed = self.btrfs.run_leniently(&args, QUICK).await?;
        if !printed.complete {
            let off = printed.stderr.contains("quotas not enabled") || printed.stderr.contains("quota not enabled");
            return if off { Ok(None) } else { Err(self.btrfs.failure(&args, &printed.stderr)) };
        }
        let quota = parse_quota(&printed.stdout);
        quota.map(Some).ok_or_else(|| self.btrfs.failure(&args, &format!("not understood: {}", printed.stdout)))
    }
}

/// Whether everything is to be on the disk, and counted, before figures are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    First,
    Not,
}

fn parse_generations(printed: &str) -> Option<Generations> {
    let number = |field: &str| {
        let mut values = printed.lines().filter_map(|line| line.trim().strip_prefix(field)?.strip_prefix(':'));
        values.next()?.trim().parse().ok()
    };
    Some(Generations { last: number("Generation")?, made: number("Gen at creation")? })
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

/// `Total Exclusive Set-shared Filename` below a heading: the first two. What is exclusive would be free without it; the rest of the total
/// it has in common with others.
fn parse_du(printed: &str) -> Option<(u64, u64)> {
    let row = printed.lines().find(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))?;
    let mut columns = row.split_whitespace();
    Some((columns.next()?.parse().ok()?, columns.next()?.parse().ok()?))
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
    fn generations_of_a_subvolume() {
        let printed = "live/x/cache\n\tName: \t\t\tcache\n\tUUID: \t\t\t75902280-6019-fc45-9fd7-d9d6aef1720e\n\
            \tGeneration: \t\t18\n\tGen at creation: \t7\n\tParent ID: \t\t5\n";
        assert_eq!(parse_generations(printed), Some(Generations { last: 18, made: 7 }));
        for broken in ["", "\tGeneration: 18", "Gen at creation: 7", "Generation: x\nGen at creation: 7"] {
            assert_eq!(parse_generations(broken), None, "of {broken:?}");
        }
    }

    #[test]
    fn rows_of_disk_usage() {
        assert_eq!(
            parse_du("     Total   Exclusive  Set shared  Filename\n   2097152     1048576     1048576  /x"),
            Some((2_097_152, 1_048_576))
        );
        for broken in ["", "Total Exclusive", "12", "12 x", "12 1.5MiB 0 /x"] {
            assert_eq!(parse_du(broken), None, "of {broken:?}");
        }
    }
}
