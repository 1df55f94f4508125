//! The `zfs` command: by absolute path, with fixed arguments, under a deadline. One dataset at a time.

use std::path::{Path, PathBuf};

use async_trait::async_trait;

use super::super::VolumeError;
use super::super::command::{Failure, Program, QUICK};
use super::fault::{Fault, MODULE, SUSPENDED};
use super::rows::{COLUMNS, Facts, Rows, parse};
use super::verbs::{Setting, Verbs};

/// Where the kernel says how a pool is. Reading it does not wait for the pool.
const POOLS: &str = "/proc/spl/kstat/zfs";

#[derive(Debug, Clone)]
pub(super) struct Zfs {
    program: Program,
    zpool: Program,
    pool: String,
    /// So many commands are run before all fail, as they would after a crash.
    #[cfg(test)]
    fuse: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

/// What a listing is of.
#[derive(Debug, Clone, Copy)]
pub(super) enum Below<'a> {
    /// File systems and volumes, so many levels deep, and the dataset itself.
    Datasets(&'a str, u8),
    /// The snapshots of so many levels of datasets.
    Snapshots(&'a str, u8),
}

impl Zfs {
    pub(super) fn find(search: &[PathBuf], pool: &str) -> Result<Self, VolumeError> {
        const REMEDY: &str = "install zfsutils-linux, or choose the engine btrfs or dir";
        let find = |name| Program::find(name, search, REMEDY);
        Ok(Self {
            program: find("zfs")?,
            zpool: find("zpool")?,
            pool: pool.to_owned(),
            #[cfg(test)]
            fuse: std::sync::Arc::new(usize::MAX.into()),
        })
    }

    #[cfg(test)]
    pub(super) fn stop_after(&self, commands: usize) {
        self.fuse.store(commands, std::sync::atomic::Ordering::SeqCst);
    }

    #[cfg(test)]
    pub(super) fn burn(&self) -> Result<(), Fault> {
        use std::sync::atomic::Ordering::SeqCst;

        let spent = self
            .fuse
            .fetch_update(SeqCst, SeqCst, |left| if left == usize::MAX { Some(left) } else { left.checked_sub(1) });
        spent.map(drop).map_err(|_| Fault::unusable("the test ends here", "none"))
    }

    /// What `zfs version` prints, also where it cannot tell all.
    pub(super) async fn version(&self) -> Result<String, Fault> {
        Ok(self.program.run_leniently(&["version"], QUICK).await?.stdout)
    }

    /// `None` when it is not imported. A command on a pool that is suspended may hang where no signal reaches it, so this is
    /// looked at first.
    pub(super) fn pool_state(&self) -> Option<String> {
        let state = std::fs::read_to_string(Path::new(POOLS).join(&self.pool).join("state")).ok()?;
        Some(state.trim().to_owned())
    }

    pub(super) fn check_pool(&self) -> Result<(), Fault> {
        let pool = &self.pool;
        match self.pool_state().as_deref() {
            None if !Path::new("/dev/zfs").exists() => Err(Fault::unusable("there is no /dev/zfs", MODULE)),
            None => Err(Fault::unusable(
                format!("there is no pool {pool}, or it is not imported"),
                format!("import it: zpool import {pool}"),
            )),
            Some("SUSPENDED") => {
                Err(Fault::unusable(format!("pool {pool} is suspended"), format!("{SUSPENDED} {pool}")))
            }
            Some(_) => Ok(()),
        }
    }

    /// As `zpool` has it, for one that is not suspended.
    pub(super) async fn pool_health(&self) -> Result<String, Fault> {
        self.run(&self.zpool, &["list", "-H", "-o", "health", &self.pool]).await
    }

    async fn run(&self, program: &Program, args: &[&str]) -> Result<String, Fault> {
        #[cfg(test)]
        self.burn()?;
        self.check_pool()?;
        match program.run_leniently(args, QUICK).await {
            Ok(printed) if printed.complete => Ok(printed.stdout),
            Ok(printed) => Err(Fault::from_said(&printed.stderr, || program.line(args))),
            // The pool may have been suspended meanwhile.
            Err(failure @ Failure::TimedOut { .. }) => self.check_pool().and(Err(failure.into())),
            Err(failure) => Err(failure.into()),
        }
    }

    async fn zfs(&self, args: &[&str]) -> Result<(), Fault> {
        self.run(&self.program, args).await.map(drop)
    }

    /// The properties named, of all datasets or snapshots named that exist.
    pub(super) async fn get<S: AsRef<str> + Sync>(&self, properties: &[&str], names: &[S]) -> Result<Rows, Fault> {
        self.check_pool()?;
        let properties = properties.join(",");
        let mut args = vec!["get", "-Hp", "-o", COLUMNS, &properties];
        args.extend(names.iter().map(AsRef::as_ref));
        let printed = self.program.run_leniently(&args, QUICK).await?;
        // It goes on after a name that does not exist.
        let other = printed.stderr.lines().find(|line| !line.contains("does not exist"));
        if let Some(said) = other.filter(|_| !printed.complete) {
            return Err(Fault::from_said(said, || self.program.line(&args)));
        }
        let (rows, odd) = parse(&printed.stdout);
        if odd > 0 {
            let said = format!("{odd} lines that cannot be understood: {:?}", printed.stdout);
            return Err(Fault::Failed(Failure::Command { command: self.program.line(&args), said }));
        }
        Ok(rows)
    }

    /// `None` when it does not exist.
    pub(super) async fn look(&self, properties: &[&str], name: &str) -> Result<Option<Facts>, Fault> {
        Ok(self.get(properties, &[name]).await?.remove(name))
    }

    /// What lies below a dataset; what cannot be understood of it is left out.
    pub(super) async fn list(&self, properties: &[&str], below: Below<'_>) -> Result<Rows, Fault> {
        let (kinds, dataset, depth) = match below {
            Below::Datasets(dataset, depth) => ("filesystem,volume", dataset, depth),
            Below::Snapshots(dataset, depth) => ("snapshot", dataset, depth),
        };
        let (properties, depth) = (properties.join(","), depth.to_string());
        let args = ["get", "-Hp", "-d", &depth, "-t", kinds, "-o", COLUMNS, &properties, dataset];
        let (rows, odd) = parse(&self.run(&self.program, &args).await?);
        if odd > 0 {
            tracing::warn!(dataset, odd, "lines of `zfs get` cannot be understood");
        }
        Ok(rows)
    }

    /// Mounts nothing, as long as `canmount` is `noauto` or `off`.
    pub(super) async fn create(&self, dataset: &str, settings: &[Setting]) -> Result<(), Fault> {
        let options: Vec<String> = settings.iter().map(Setting::argument).collect();
        let mut args = vec!["create"];
        args.extend(options.iter().flat_map(|option| ["-o", option]));
        args.push(dataset);
        self.zfs(&args).await
    }

    /// All in one transaction.
    pub(super) async fn set(&self, dataset: &str, settings: &[Setting]) -> Result<(), Fault> {
        let settings: Vec<String> = settings.iter().map(Setting::argument).collect();
        let mut args = vec!["set"];
        args.extend(settings.iter().map(String::as_str));
        args.push(dataset);
        self.zfs(&args).await
    }

    /// Without the property that was set on it.
    pub(super) async fn unset(&self, dataset: &str, property: &str) -> Result<(), Fault> {
        self.zfs(&["inherit", property, dataset]).await
    }

    /// Leaves it mounted where it is.
    pub(super) async fn rename(&self, from: &str, to: &str) -> Result<(), Fault> {
        self.zfs(&["rename", "-u", from, to]).await
    }

    pub(super) async fn rename_snapshot(&self, from: &str, to: &str) -> Result<(), Fault> {
        self.zfs(&["rename", from, to]).await
    }

    pub(super) async fn mount(&self, dataset: &str) -> Result<(), Fault> {
        match self.zfs(&["mount", dataset]).await {
            Err(Fault::Failed(Failure::Command { said, .. })) if said.contains("already mounted") => Ok(()),
            mounted => mounted,
        }
    }

    pub(super) async fn unmount(&self, dataset: &str) -> Result<(), Fault> {
        match self.zfs(&["unmount", dataset]).await {
            Err(Fault::Failed(Failure::Command { said, .. })) if said.contains("not currently mounted") => Ok(()),
            unmounted => unmounted,
        }
    }

    /// Nothing below it, and no snapshots.
    pub(super) async fn destroy(&self, dataset: &str) -> Result<(), Fault> {
        self.zfs(&["destroy", dataset]).await
    }

    /// Waits until everything written is on the disks, and counted.
    pub(super) async fn sync(&self) -> Result<(), Fault> {
        self.run(&self.zpool, &["sync", &self.pool]).await.map(drop)
    }

    /// Waits until what was destroyed is free, which ZFS does behind one's back, and counted.
    pub(super) async fn freed(&self) -> Result<(), Fault> {
        self.run(&self.zpool, &["wait", "-t", "free", &self.pool]).await?;
        self.sync().await
    }

    /// The tags of what others hold a snapshot by.
    pub(super) async fn holds(&self, snapshot: &str) -> Result<Vec<String>, Fault> {
        let printed = self.run(&self.program, &["holds", "-H", snapshot]).await?;
        Ok(printed.lines().filter_map(|line| line.split('\t').nth(1)).map(str::to_owned).collect())
    }
}

#[async_trait]
impl Verbs for Zfs {
    fn name(&self) -> &'static str {
        "the zfs command"
    }

    async fn snapshot(&self, snapshot: &str, settings: &[Setting]) -> Result<(), Fault> {
        let options: Vec<String> = settings.iter().map(Setting::argument).collect();
        let mut args = vec!["snapshot"];
        args.extend(options.iter().flat_map(|option| ["-o", option]));
        args.push(snapshot);
        self.zfs(&args).await
    }

    async fn destroy_snapshots(&self, dataset: &str, names: &[String]) -> Result<(), Fault> {
        if names.is_empty() {
            return Ok(());
        }
        let all = format!("{dataset}@{}", names.join(","));
        match self.zfs(&["destroy", "-d", &all]).await {
            Err(Fault::Absent) => Ok(()),
            destroyed => destroyed,
        }
    }

    async fn clone_snapshot(&self, snapshot: &str, target: &str, settings: &[Setting]) -> Result<(), Fault> {
        let options: Vec<String> = settings.iter().map(Setting::argument).collect();
        let mut args = vec!["clone"];
        args.extend(options.iter().flat_map(|option| ["-o", option]));
        args.extend([snapshot, target]);
        self.zfs(&args).await
    }

    async fn promote(&self, clone: &str) -> Result<(), Fault> {
        self.zfs(&["promote", clone]).await
    }
}
