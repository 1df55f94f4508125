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
