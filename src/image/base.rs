//! The base root: Debian's smallest, with what buildkitd calls, without what nobody reads in there.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tokio::process::Command;

use super::{DEBOOTSTRAP, ImageError, PACK, hex, io_error, run, sources};

/// runc runs the steps, git fetches git contexts, ca-certificates lets both speak to registries.
const PACKAGES: &str = "runc,git,ca-certificates";

/// Emptied: package lists and archives, manuals, translations, logs.
const EMPTIED: [&str; 9] = [
    "var/lib/apt/lists",
    "var/cache/apt",
    "var/cache/debconf",
    "var/log",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
];

/// Mount points, and what has to differ between instances.
const MADE: [&str; 2] = ["etc/kiln", "var/lib/buildkit"];
const REMOVED: [&str; 3] = ["etc/machine-id", "etc/hostname", "etc/resolv.conf"];

/// From the cache, or made now.
pub(super) async fn provide(cache: &Path, refresh: bool, say: &mut impl FnMut(&str)) -> Result<PathBuf, ImageError> {
    let source = sources::find().await?;
    let kept = cache.join(format!("image-base-{}.tar", recipe(&source.suite)));
    if !refresh && tokio::fs::try_exists(&kept).await.map_err(io_error("look at", &kept))? {
        say(&format!("using the base root {}", kept.display()));
        return Ok(kept);
    }
    say(&format!("making a base root of {} from {} (some minutes)", source.suite, source.mirror));
    let work = tempfile::tempdir_in(cache).map_err(io_error("make a directory in", cache))?;
    let root = work.path().join("rootfs");
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.arg("--variant=minbase").arg(format!("--include={PACKAGES}")).arg(&source.suite).arg(&root);
    debootstrap.arg(&source.mirror);
    // Its programs are where root's path leads, also when this was started by somebody else.
    debootstrap.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    run(debootstrap, DEBOOTSTRAP).await?;
    say("packing it");
    let stripping = root.clone();
    // Thousands of small files: not for a thread that serves others.
    let stripped = tokio::task::spawn_blocking(move || strip(&stripping)).await;
    stripped.map_err(|error| ImageError::Incus(error.to_string()))??;
    let partial = work.path().join("base.tar");
    let mut tar = Command::new("tar");
    tar.args(["--create", "--numeric-owner", "--sort=name", "--xattrs", "--one-file-system"]);
    tar.arg("--file").arg(&partial).arg("--directory").arg(work.path()).arg("rootfs");
    run(tar, PACK).await?;
    tokio::fs::rename(&partial, &kept).await.map_err(io_error("keep", &kept))?;
    Ok(kept)
}

/// One that is given: in place of Debian's own, so the programs that buildkitd calls are the giver's matter, but not what would
/// only be found at the first start of an instance.
pub(super) async fn check(tar: &Path) -> Result<(), ImageError> {
    let part = |why: String| ImageError::Part { what: "the base root", path: tar.display().to_string(), why };
    tokio::fs::metadata(tar).await.map_err(|error| part(error.to_string()))?;
    let mut list = Command::new("tar");
    list.arg("--list").arg("--file").arg(tar);
    let listing = run(list, PACK).await?;
    let names: Vec<_> = listing.lines().map(|name| name.trim_end_matches('/')).collect();
    let wanted = MADE.map(|name| format!("rootfs/{name}"));
    match wanted.iter().find(|name| !names.contains(&name.as_str())) {
        Some(missing) => {
            Err(part(format!("it has no {missing}; everything lies below rootfs/ in it, this directory too")))
        }
        None => Ok(()),
    }
}

/// Names what determines the root's contents; the mirror does not.
fn recipe(suite: &str) -> String {
    let mut hash = Sha256::new();
    for part in [suite, std::env::consts::ARCH, PACKAGES].into_iter().chain(EMPTIED).chain(MADE).chain(REMOVED) {
        hash.update(part);
        hash.update([0]);
    }
    hex(&hash.finalize()[..8])
}

fn strip(root: &Path) -> Result<(), ImageError> {
    for name in EMPTIED {
        let path = root.join(name);
        if path.is_dir() {
            std::fs::remove_dir_all(&path).map_err(io_error("empty", &path))?;
            std::fs::create_dir(&path).map_err(io_error("make", &path))?;
        }
    }
    for name in REMOVED {
        let path = root.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io_error("remove", &path)(error)),
            _ => {}
        }
    }
    for name in MADE {
        let path = root.join(name);
        std::fs::create_dir_all(&path).map_err(io_error("make", &path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripping_leaves_the_directories() {
        let root = tempfile::tempdir().expect("a directory");
        let doc = root.path().join("usr/share/doc/x");
        std::fs::create_dir_all(&doc).expect("made");
        std::fs::write(doc.join("README"), "x").expect("written");
        std::fs::create_dir_all(root.path().join("etc")).expect("made");
        std::fs::write(root.path().join("etc/machine-id"), "x").expect("written");
        strip(root.path()).expect("stripped");
        strip(root.path()).expect("stripped twice");
        assert!(root.path().join("usr/share/doc").is_dir() && !doc.exists());
        assert!(root.path().join("var/lib/buildkit").is_dir() && !root.path().join("etc/machine-id").exists());
    }

    #[tokio::test]
    async fn a_base_root_of_one_s_own_has_the_mount_points() {
        let work = tempfile::tempdir().expect("a directory");
        let tar = work.path().join("base.tar");
        assert!(check(&tar).await.expect_err("nothing").to_string().contains("base.tar"));
        let pack = || {
            let mut command = std::process::Command::new("tar");
            command.arg("-C").arg(work.path()).arg("-cf").arg(&tar).arg("rootfs");
            assert!(command.status().expect("run").success());
        };
        std::fs::create_dir_all(work.path().join("rootfs/etc/kiln")).expect("made");
        pack();
        let error = check(&tar).await.expect_err("one mount point only").to_string();
        assert!(error.contains("has no rootfs/var/lib/buildkit"), "{error}");
        std::fs::create_dir_all(work.path().join("rootfs/var/lib/buildkit")).expect("made");
        pack();
        check(&tar).await.expect("both");
    }

    #[test]
    fn another_suite_is_another_recipe() {
        assert_ne!(recipe("bookworm"), recipe("trixie"));
        assert_eq!(recipe("trixie"), recipe("trixie"));
    }
}
