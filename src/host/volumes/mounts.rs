//! File systems that live as long as a test.

use std::path::{Path, PathBuf};
use std::process::Command;

pub(super) fn run(program: &str, args: &[&std::ffi::OsStr]) {
    let output = Command::new(program).args(args).output().expect("started");
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A mount that goes with the test.
pub(super) struct Mount {
    pub(super) path: PathBuf,
    directory: Option<tempfile::TempDir>,
}

impl Mount {
    pub(super) fn new(args: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().expect("a directory");
        let mut mount = Self::over(directory.path(), args)?;
        mount.directory = Some(directory);
        Some(mount)
    }

    pub(super) fn over(path: &Path, args: &[&str]) -> Option<Self> {
        let output = Command::new("mount").args(args).arg(path).output();
        match output {
            Ok(output) if output.status.success() => {
                Some(Self { path: path.canonicalize().expect("there"), directory: None })
            }
            Ok(output) => {
                eprintln!("skipped: cannot mount: {}", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                eprintln!("skipped: no mount program: {error}");
                None
            }
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(&self.path).output();
        if let Ok(output) = unmounted
            && !output.status.success()
        {
            eprintln!("cannot unmount: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
    }
}

/// A btrfs in a sparse file, gone with the test.
pub(super) struct BtrfsMount {
    pub(super) path: PathBuf,
    _mount: Mount,
    _directory: tempfile::TempDir,
}

impl BtrfsMount {
    pub(super) fn new() -> Option<Self> {
        let directory = tempfile::tempdir().expect("a directory");
        let (image, point) = (directory.path().join("image"), directory.path().join("mnt"));
        std::fs::create_dir(&point).expect("made");
        std::fs::File::create(&image).and_then(|file| file.set_len(256 << 20)).expect("a sparse file");
        match Command::new("mkfs.btrfs").arg("-q").arg(&image).output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                eprintln!("skipped: mkfs.btrfs: {}", String::from_utf8_lossy(&output.stderr).trim());
                return None;
            }
            Err(error) => {
                eprintln!("skipped: no mkfs.btrfs: {error}");
                return None;
            }
        }
        // The kernel frees the loop device with the mount, also when the test is killed and the mount is taken down by hand.
        let mount = Mount::over(&point, &["-o", "loop", image.to_str().expect("text")])?;
        Some(Self { path: mount.path.clone(), _mount: mount, _directory: directory })
    }

    pub(super) fn subvolumes(&self) -> Vec<String> {
        let output = Command::new("btrfs").args(["subvolume", "list"]).arg(&self.path).output().expect("btrfs");
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
    }
}

/// A dataset that a test may fill, gone with it: below the one that `KILN_TEST_ZFS` names, or on a pool of its own.
pub(super) struct ZfsRoot {
    pub(super) dataset: String,
    pub(super) path: PathBuf,
    pool: Option<tempfile::TempDir>,
    _directory: tempfile::TempDir,
}

impl ZfsRoot {
    pub(super) fn new() -> Option<Self> {
        let Ok(parent) = std::env::var("KILN_TEST_ZFS") else {
            eprintln!("skipped: KILN_TEST_ZFS names no dataset to make some in");
            return None;
        };
        Some(Self::below(&parent, &[]))
    }

    /// A pool of its own of so many files, and a root on it made with `options`.
    pub(super) fn on_a_pool(files: usize, options: &[&str]) -> Option<Self> {
        std::env::var("KILN_TEST_ZFS").is_ok().then_some(())?;
        let directory = tempfile::tempdir().expect("a directory");
        let name = format!("kt{}", directory.path().file_name().expect("a name").to_string_lossy().replace('.', ""));
        let files: Vec<String> =
            (0..files).map(|number| directory.path().join(number.to_string()).display().to_string()).collect();
        for file in &files {
            std::fs::File::create(file).and_then(|file| file.set_len(256 << 20)).expect("a sparse file");
        }
        let mut args = vec!["create", "-O", "mountpoint=none", &name];
        if files.len() > 1 {
            args.push("mirror");
        }
        args.extend(files.iter().map(String::as_str));
        tool("zpool", &args);
        let mut root = Self::below(&name, options);
        root.pool = Some(directory);
        Some(root)
    }

    pub(super) fn below(parent: &str, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().canonicalize().expect("there").join("caches");
        let name = directory.path().file_name().expect("a name").to_string_lossy().replace('.', "t");
        let (dataset, mountpoint) = (format!("{parent}/{name}"), format!("mountpoint={}", path.display()));
        let mut args = vec!["create", "-o", &mountpoint];
        args.extend(options);
        args.push(&dataset);
        tool("zfs", &args);
        Self { dataset, path, pool: None, _directory: directory }
    }

    pub(super) fn pool(&self) -> &str {
        self.dataset.split('/').next().expect("a name")
    }

    /// Below the root, and what is to be known of it.
    pub(super) fn get(&self, property: &str, name: &str) -> String {
        tool("zfs", &["get", "-Hp", "-o", "value", property, &format!("{}/{name}", self.dataset)])
    }

    /// Everything below the root, snapshots too, without the rooms.
    pub(super) fn contents(&self) -> Vec<String> {
        let listed = tool("zfs", &["list", "-H", "-r", "-t", "all", "-o", "name", &self.dataset]);
        let below = listed.lines().filter_map(|name| name.strip_prefix(&self.dataset)?.strip_prefix('/'));
        below.filter(|name| !["live", "trash"].contains(name)).map(str::to_owned).collect()
    }
}

impl Drop for ZfsRoot {
    fn drop(&mut self) {
        let args: &[&str] = if self.pool.is_some() {
            &["zpool", "destroy", "-f", self.pool()]
        } else {
            &["zfs", "destroy", "-Rf", &self.dataset]
        };
        let output = Command::new(args[0]).args(&args[1..]).output().expect("started");
        if !output.status.success() {
            eprintln!("{args:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
    }
}

/// What a tool that must succeed printed.
pub(super) fn tool(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("started");
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}
