//! A real disk that turns read-only under the open database, as one does that has met an error.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::super::StoreError;
use super::*;

/// An ext4 of its own on a loop device, unmounted at the end.
struct Disk {
    place: TempDir,
    /// As `/sys/fs/ext4` calls it.
    device: String,
}

impl Disk {
    /// `Err`: why there is none.
    fn new() -> Result<Self, String> {
        let place = TempDir::new().map_err(|error| error.to_string())?;
        let image = place.path().join("image");
        let file = fs::File::create(&image).map_err(|error| error.to_string())?;
        file.set_len(32 << 20).map_err(|error| error.to_string())?;
        let mounted = place.path().join("mounted");
        fs::create_dir(&mounted).map_err(|error| error.to_string())?;
        run("mkfs.ext4", &["-q", "-F"], &[&image])?;
        run("mount", &["-o", "loop,errors=remount-ro"], &[&image, &mounted])?;
        let mut disk = Self { place, device: String::new() };
        let source = run("findmnt", &["-n", "-o", "SOURCE", "--mountpoint"], &[&disk.mounted()])?;
        disk.device = source.trim().trim_start_matches("/dev/").to_owned();
        Ok(disk)
    }

    fn mounted(&self) -> PathBuf {
        self.place.path().join("mounted")
    }

    /// The kernel's own way to try it out.
    fn meets_an_error(&self) -> Result<(), String> {
        let path = format!("/sys/fs/ext4/{}/trigger_fs_error", self.device);
        fs::write(&path, "kiln's test").map_err(|error| format!("{path}: {error}"))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = run("umount", &["-l"], &[&self.mounted()]);
    }
}

fn run(program: &str, options: &[&str], paths: &[&Path]) -> Result<String, String> {
    let output = Command::new(program).args(options).args(paths).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[tokio::test]
async fn a_disk_that_turns_read_only_is_named_and_reads_go_on() {
    let disk = match Disk::new() {
        Ok(disk) => disk,
        Err(why) => return eprintln!("skipped: no ext4 of our own: {why}"),
    };
    let path = disk.mounted().join("kiln.db");
    let store = Store::open(&path).expect("opens");
    store.record(event("before")).await.expect("is written");
    if let Err(why) = disk.meets_an_error() {
        return eprintln!("skipped: this disk cannot be made to fail: {why}");
    }
    for _ in 0..3 {
        let error = store.record(event("after")).await.expect_err("nothing can be written");
        assert!(matches!(&error, StoreError::Disk { path: named, .. } if *named == path), "{error:?}");
        assert!(crate::causes::in_one_line(&error).contains("mounted/kiln.db is read-only or fails"), "{error}");
    }
    let kept = store.events(0, 10).await.expect("reads go on");
    assert_eq!(kept.iter().map(|event| event.text.as_str()).collect::<Vec<_>>(), ["before"]);
}
