//! Whether ZFS, the pool and the root are such that caches can live there; and taking possession of the root.

use std::path::Path;

use super::super::VolumeError;
use super::super::listing::{LIVE, TRASH};
use super::super::root::Claim;
use super::cli::Zfs;
use super::dataset::{LAST_TRASH, ROOM, room_settings};
use super::fault::{Fault, MODULE};
use super::mounts;
use super::names::Root;
use super::rows::Facts;
use super::version::Installed;

const OPEN: &str = "open";

const ROOT: [&str; 7] = ["type", "mountpoint", "canmount", "keystatus", "encryptionroot", "readonly", ROOM];

/// A root that is ours as long as this lives.
pub(super) struct Claimed {
    pub claim: Claim,
    /// Sequence of the youngest entry of the trash.
    pub last_trash: u64,
}

/// Everything that is checked before anything is changed, and then the root and its rooms.
pub(super) async fn claim(zfs: &Zfs, root: &Root, base: &Path) -> Result<Claimed, VolumeError> {
    check_version(zfs).await?;
    zfs.check_pool().map_err(|e| e.during(OPEN, root.pool()))?;
    check_health(zfs, root).await?;
    let names = [root.to_string(), root.room(LIVE), root.room(TRASH)];
    let properties: Vec<&str> = ROOT.into_iter().chain([LAST_TRASH]).collect();
    let rows = zfs.get(&properties, &names).await.map_err(|e| e.during(OPEN, root))?;
    suits(rows.get(root.as_str()), root, base)?;
    mount_root(zfs, root, base).await?;
    let wanted = base.to_owned();
    // On the mounted root: it is the same directory, and so the same lock, wherever it is mounted.
    let claim = tokio::task::spawn_blocking(move || Claim::new(&wanted, "zfs", &[LIVE], |_| Ok(())));
    let claim = claim.await.map_err(|e| unusable(root, &e.to_string(), "start kilnd again"))??;
    for room in [LIVE, TRASH] {
        have_room(zfs, root, room, rows.get(&root.room(room))).await?;
    }
    let trash = rows.get(&root.room(TRASH));
    let last_trash = trash.and_then(|facts| facts.local(LAST_TRASH)?.parse().ok()).unwrap_or_default();
    Ok(Claimed { claim, last_trash })
}

async fn check_health(zfs: &Zfs, root: &Root) -> Result<(), VolumeError> {
    match zfs.pool_health().await.map_err(|e| e.during(OPEN, root.pool()))?.as_str() {
        "ONLINE" => Ok(()),
        "DEGRADED" => {
            tracing::warn!(pool = root.pool(), "the pool is degraded and works: zpool status says what it lacks");
            Ok(())
        }
        health => {
            let remedy = format!("mend it: zpool status {} says how", root.pool());
            Err(unusable(root, &format!("its pool is {health}"), &remedy))
        }
    }
}

async fn check_version(zfs: &Zfs) -> Result<(), VolumeError> {
    if !Path::new("/dev/zfs").exists() {
        return Err(Fault::unusable("there is no /dev/zfs", MODULE).during(OPEN, "OpenZFS"));
    }
    let printed = zfs.version().await.map_err(|e| e.during(OPEN, "OpenZFS"))?;
    let of_module = |file: &str| std::fs::read_to_string(Path::new("/sys/module/zfs").join(file)).ok();
    let (module, cloning) = (of_module("version"), of_module("parameters/zfs_bclone_enabled"));
    if let Some(warning) = Installed::read(&printed, module.as_deref(), cloning.as_deref()).check()? {
        tracing::warn!("{warning}");
    }
    Ok(())
}

/// The root belongs to the admin: nothing about it is changed but that it is mounted where it says itself.
async fn mount_root(zfs: &Zfs, root: &Root, base: &Path) -> Result<(), VolumeError> {
    let at = || {
        let seen = mounts::dataset_at(base);
        seen.map_err(|source| VolumeError::Io { operation: OPEN, path: base.display().to_string(), source })
    };
    if at()?.as_deref() != Some(root.as_str()) {
        zfs.mount(root.as_str()).await.map_err(|e| e.during(OPEN, root))?;
        if let Some(other) = at()?.filter(|other| other != root.as_str()) {
            let why = format!("{other} is mounted over it at {}", base.display());
            return Err(unusable(root, &why, &format!("unmount that: umount {}", base.display())));
        }
    }
    Ok(())
}

/// `facts` are of the root, if there is one.
fn suits(facts: Option<&Facts>, root: &Root, base: &Path) -> Result<(), VolumeError> {
    let shown = base.display();
    let Some(facts) = facts else {
        return Err(unusable(
            root,
            "there is no such dataset",
            &format!("create it: zfs create -p -o mountpoint={shown} {root}"),
        ));
    };
    if !facts.is("type", "filesystem") {
        return Err(unusable(root, "it is a volume and not a file system", "name another dataset in volumes.dataset"));
    }
    if facts.is("keystatus", "unavailable") {
        let top = facts.text("encryptionroot").unwrap_or(root.as_str());
        return Err(unusable(
            root,
            "it is encrypted and its key is not loaded",
            &format!("load it: zfs load-key {top}"),
        ));
    }
    let mountpoint = facts.text("mountpoint").unwrap_or("none");
    if mountpoint != base.to_string_lossy() {
        let remedy = format!("zfs set mountpoint={shown} {root}, or name the directory in volumes.path");
        return Err(unusable(root, &format!("its mountpoint is {mountpoint}, and not {shown}"), &remedy));
    }
    if facts.is("canmount", "off") {
        return Err(unusable(root, "it has canmount=off", &format!("zfs set canmount=on {root}")));
    }
    if facts.is("readonly", "on") {
        return Err(unusable(root, "it is read-only", &format!("zfs set readonly=off {root}")));
    }
    Ok(())
}

/// A dataset that only holds others. One that exists must be ours.
async fn have_room(zfs: &Zfs, root: &Root, name: &'static str, facts: Option<&Facts>) -> Result<(), VolumeError> {
    match facts {
        None => zfs.create(&root.room(name), &room_settings(name)).await.map_err(|e| e.during(OPEN, root.room(name))),
        Some(facts) if facts.local(ROOM) == Some(name) => Ok(()),
        Some(_) => {
            let why = format!("it holds {name:?}, which is not Kiln's (it has no {ROOM} of its own)");
            Err(unusable(root, &why, "name another dataset in volumes.dataset"))
        }
    }
}

pub(super) fn unusable(root: &Root, why: &str, remedy: &str) -> VolumeError {
    VolumeError::Unusable { path: root.to_string(), why: why.to_owned(), remedy: remedy.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::rows::parse;
    use super::*;

    fn refusal(pairs: &[(&str, &str)]) -> Result<(), String> {
        let line = |(name, value): &(&str, &str)| format!("tank/k\t{name}\t{value}\tlocal\n");
        let printed = pairs.iter().map(line).collect::<Vec<_>>().concat();
        let (mut rows, _) = parse(&printed);
        let root = Root::parse("tank/k").expect("a name");
        suits(rows.remove("tank/k").as_ref(), &root, Path::new("/srv/k")).map_err(|e| e.to_string())
    }

    #[test]
    fn a_root_that_does_not_do_is_refused_with_its_remedy() {
        let good = [("type", "filesystem"), ("mountpoint", "/srv/k"), ("canmount", "on"), ("readonly", "off")];
        assert_eq!(refusal(&good), Ok(()));
        let none = refusal(&[]).expect_err("none");
        assert!(none.contains("zfs create -p -o mountpoint=/srv/k tank/k"), "{none}");
        for (change, remedy) in [
            (("type", "volume"), "another dataset"),
            (("mountpoint", "legacy"), "zfs set mountpoint=/srv/k tank/k"),
            (("mountpoint", "none"), "zfs set mountpoint=/srv/k tank/k"),
            (("mountpoint", "/tank/k"), "volumes.path"),
            (("canmount", "off"), "zfs set canmount=on tank/k"),
            (("readonly", "on"), "zfs set readonly=off tank/k"),
            (("keystatus", "unavailable"), "zfs load-key"),
        ] {
            let changed: Vec<_> = good.iter().copied().filter(|(name, _)| *name != change.0).chain([change]).collect();
            let said = refusal(&changed).expect_err(change.1);
            assert!(said.contains(remedy), "{change:?}: {said}");
        }
    }
}
