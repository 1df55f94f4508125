//! Directories, ports and a database that cannot be used: exit code 1, one line with the remedy, nothing changed.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::stage::{Stage, is_root};

/// A small file system in memory, gone with this.
pub(crate) struct Tmpfs(PathBuf);

impl Tmpfs {
    pub(crate) fn new(at: &Path, options: &str) -> Option<Self> {
        if !is_root("mounting a file system") {
            return None;
        }
        fs::create_dir(at).expect("made");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &format!("{options},mode=700"), "tmpfs"]).arg(at).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(at.to_owned())),
            other => {
                eprintln!("skipped: no tmpfs can be mounted: {other:?}");
                None
            }
        }
    }

    pub(crate) fn fill(&self) {
        let full = fs::write(self.0.join("filler"), vec![7; 20 << 20]);
        assert!(full.is_err(), "it holds more than it should");
    }

    /// Undoes [`Tmpfs::fill`].
    pub(crate) fn clear(&self) {
        fs::remove_file(self.0.join("filler")).expect("removed");
    }

    /// Full without taking memory.
    fn use_up_inodes(&self) {
        let made = (0..1000).take_while(|n| fs::write(self.0.join(format!("filler-{n}")), "").is_ok()).count();
        assert!(made < 1000, "it holds more than it should");
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: a failed test may have left something that is open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A stage with its volumes in a place of their own.
fn stage_with_volumes() -> (Stage, PathBuf) {
    let mut stage = Stage::new("");
    let volumes = stage.dir.path().join("caches");
    stage.more = format!("[volumes]\npath = '{}'\n", volumes.display());
    (stage, volumes)
}

#[test]
fn the_volumes_directory_is_missing_or_a_file() {
    let (stage, volumes) = stage_with_volumes();
    let shown = volumes.display().to_string();
    stage.fails().says(1, &[&shown, "there is no such directory", "mkdir -p -m 0700"]);
    fs::write(&volumes, "").expect("written");
    stage.fails().says(1, &[&shown, "not a directory", "name a directory"]);
    assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
}

#[test]
fn the_run_directory_can_be_changed_by_others() {
    let stage = Stage::new("");
    let run = stage.host().join("run");
    fs::create_dir_all(&run).expect("made");
    fs::set_permissions(&run, fs::Permissions::from_mode(0o777)).expect("set");
    stage.fails().says(1, &[&run.display().to_string(), "can be changed by others", "chmod go-w"]);
}

#[test]
fn the_state_directory_can_be_changed_by_others() {
    let stage = Stage::new("");
    fs::create_dir_all(stage.state()).expect("made");
    fs::set_permissions(stage.state(), fs::Permissions::from_mode(0o777)).expect("set");
    stage.fails().says(1, &[&stage.state().display().to_string(), "can be changed by others", "chmod go-w"]);
    assert_eq!(fs::read_dir(stage.state()).expect("read").count(), 0, "nothing was made");
    fs::set_permissions(stage.state(), fs::Permissions::from_mode(0o700)).expect("set");
    if is_root("giving a directory away") {
        std::os::unix::fs::chown(stage.state(), Some(65534), None).expect("given away");
        stage.fails().says(1, &["belongs to user 65534", "chown 0"]);
    }
}

#[test]
fn the_volumes_directory_is_somebody_else_s() {
    let (stage, volumes) = stage_with_volumes();
    fs::create_dir_all(volumes.join("live")).expect("made");
    stage.fails().says(1, &[&volumes.display().to_string(), "not Kiln's", "name an empty directory"]);
    assert_eq!(fs::read_dir(&volumes).expect("read").count(), 1, "nothing was added");
}

#[test]
fn the_volumes_are_read_only() {
    let (stage, volumes) = stage_with_volumes();
    let Some(_mounted) = Tmpfs::new(&volumes, "ro,size=1m") else { return };
    stage.fails().says(1, &[&volumes.display().to_string(), "mounted read-only", "remount"]);
    assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
}

#[test]
fn the_volumes_are_full_from_the_beginning() {
    let (stage, volumes) = stage_with_volumes();
    let Some(mounted) = Tmpfs::new(&volumes, "size=1m") else { return };
    mounted.fill();
    stage.fails().says(1, &[&volumes.display().to_string(), "is full", "free some space"]);
    assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
}

/// A kilnd that has builds to look after starts; only what needs space is refused.
#[test]
fn the_volumes_have_become_full() {
    let (stage, volumes) = stage_with_volumes();
    let Some(mounted) = Tmpfs::new(&volumes, "size=1g,nr_inodes=64") else { return };
    stage.start().terminate();
    mounted.use_up_inodes();
    let kilnd = stage.start();
    let answer = kilnd.route("example.com/o/r");
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(answer.body.contains("100 % full") && answer.body.contains("kiln trash empty"), "{answer:?}");
    assert_eq!(fs::read_dir(volumes.join("live")).expect("read").count(), 0, "half a volume was left");
    kilnd.is_well();
}

#[test]
fn the_state_directory_cannot_be_made() {
    let stage = Stage::new("");
    fs::write(stage.state(), "").expect("written");
    let before = stage.listing();
    stage.fails().says(1, &[&stage.state().display().to_string(), "directory"]);
    assert!(stage.listing() == before);
}

#[test]
fn the_state_directory_is_read_only_or_full() {
    let stage = Stage::new("");
    let Some(mounted) = Tmpfs::new(&stage.state(), "ro,size=1m") else { return };
    stage.fails().says(1, &[&stage.state().display().to_string(), "Read-only"]);
    drop(mounted);
    fs::remove_dir(stage.state()).expect("removed");
    let Some(mounted) = Tmpfs::new(&stage.state(), "size=1m") else { return };
    mounted.fill();
    stage.fails().says(1, &[&stage.database().display().to_string(), "full"]);
}

/// A killed kilnd starts again on a full disk: there are builds to look after. After a clean stop it needs a little room.
#[test]
fn the_state_directory_has_become_full() {
    let stage = Stage::new("");
    let Some(mounted) = Tmpfs::new(&stage.state(), "size=16m") else { return };
    stage.start().terminate();
    mounted.fill();
    stage.fails().says(1, &["the disk is full", &stage.database().display().to_string(), "free some"]);
    fs::remove_file(mounted.0.join("filler")).expect("removed");
    stage.start().kill();
    mounted.fill();
    let kilnd = stage.start();
    assert_eq!(kilnd.get("/v1/projects").body, "[]");
}

#[test]
fn a_port_is_taken() {
    let stage = Stage::new("");
    for (address, key) in [(stage.gateway, "gateway.listen"), (stage.api, "api.listen")] {
        // If somebody else was quicker, it is taken just as well.
        let _taken = TcpListener::bind(address);
        stage.fails().says(1, &[&address.to_string(), key, "another port", "in use"]);
        assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
    }
}

#[test]
fn an_address_is_not_this_machine_s() {
    let mut stage = Stage::new("");
    stage.gateway = "192.0.2.1:1234".parse().expect("an address");
    stage.fails().says(1, &["192.0.2.1:1234", "gateway.listen"]);
    assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
}

#[test]
fn the_socket_s_path_is_taken() {
    let stage = Stage::new("");
    let path = stage.dir.path().join("socket");
    let text = stage.config_text().replacen("[api]\n", &format!("[api]\nsocket = {path:?}\n"), 1);
    let config = stage.write_config(&text, 0o600);
    fs::write(&path, "precious").expect("written");
    stage.fails_with(&config).says(1, &[&path.display().to_string(), "not a socket", "move it away"]);
    assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
    fs::remove_file(&path).expect("removed");
    let _taken = UnixListener::bind(&path).expect("bound");
    stage.fails_with(&config).says(1, &[&path.display().to_string(), "another kilnd"]);
    assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
}

#[test]
fn no_buildkitd_anywhere() {
    let stage = Stage::new("");
    let text = stage.config_text();
    let text: Vec<_> = text.lines().filter(|line| !line.starts_with("buildkitd")).collect();
    let config = stage.write_config(&text.join("\n"), 0o600);
    let output =
        Command::new(env!("CARGO_BIN_EXE_kilnd")).arg("--config").arg(&config).env("PATH", "/nonexistent").output();
    let output = output.expect("run");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.contains("no buildkitd on the PATH") && stderr.contains("buildkit.buildkitd"), "{stderr}");
    assert!(stage.listing().is_empty(), "{:?}", stage.listing().keys());
}

#[test]
fn the_database_is_another_kilnd_s() {
    let stage = Stage::new("");
    let first = stage.start();
    // The first one goes on with its own database meanwhile, in the log and its index.
    let is_its_log =
        |path: &Path| path.extension().is_some_and(|extension| extension == "db-shm" || extension == "db-wal");
    let contents = || {
        let mut listing = stage.listing();
        listing.retain(|path, _| !is_its_log(path));
        listing
    };
    let before = contents();
    // The same configuration: that its ports are taken too is not what is said.
    stage.fails().says(1, &["another kilnd", &format!("process {}", first.pid()), "stop that one first"]);
    // Another one's, but for the state directory.
    let (api, gateway) = (stage.api.to_string(), stage.gateway.to_string());
    let other = Stage::new("");
    let text = stage.config_text().replace(&api, &other.api.to_string()).replace(&gateway, &other.gateway.to_string());
    let text =
        text.replace(&stage.host().join("run").display().to_string(), &other.host().join("run").display().to_string());
    let config = other.write_config(&text, 0o600);
    other
        .fails_with(&config)
        .says(1, &[&stage.database().display().to_string(), "another kilnd", "another state directory"]);
    let after = contents();
    let changed: Vec<_> =
        after.iter().filter(|(path, seen)| before.get(*path) != Some(*seen)).map(|(path, _)| path).collect();
    assert!(after == before && other.listing().is_empty(), "something was touched: {changed:?}");
    first.is_well();
}

/// What a start that is refused may leave: the note in the lock file, which says who looked.
fn without_side_files(stage: &Stage) -> std::collections::BTreeMap<PathBuf, (u32, u64, Vec<u8>)> {
    let mut listing = stage.listing();
    listing.retain(|path, _| path.extension().is_none_or(|extension| extension != "lock"));
    // What SQLite makes to read the file, and what is in none of it.
    listing.retain(|path, (.., contents)| match path.extension().and_then(|extension| extension.to_str()) {
        Some("db-shm") => false,
        Some("db-wal") => !contents.is_empty(),
        _ => true,
    });
    listing
}

/// A stage whose kilnd has run and gone, and whose database has then been changed.
fn with_database(change: impl FnOnce(&Path)) -> Stage {
    let stage = Stage::new("");
    let (_, code) = stage.start().terminate();
    assert_eq!(code, Some(0));
    change(&stage.database());
    stage
}

#[test]
fn the_database_is_damaged() {
    let overwrite = |path: &Path, at: usize, length: usize| {
        let mut bytes = fs::read(path).expect("read");
        assert!(bytes.len() > at + length, "{} bytes", bytes.len());
        bytes[at..at + length].fill(0xa5);
        fs::write(path, bytes).expect("written");
    };
    for (at, length) in [(0, 100), (4096, 4096), (100, 300)] {
        let stage = with_database(|path| overwrite(path, at, length));
        let damaged = fs::read(stage.database()).expect("read");
        let kilnd = stage.start();
        kilnd.is_well();
        let aside = |name: &str| name.starts_with("kiln.db.corrupt-") && !name.ends_with("-wal");
        let names =
            fs::read_dir(stage.state()).expect("read").filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let kept: Vec<_> = names.filter(|name| aside(name)).collect();
        assert_eq!(kept.len(), 1, "the damaged one is kept, once: {kept:?}");
        assert!(fs::read(stage.state().join(&kept[0])).expect("read") == damaged);
        let events = kilnd.get("/v1/events?follow=false").body;
        assert!(events.contains("database-damaged") && events.contains("rebuilt"), "{events}");
    }
}

#[test]
fn the_database_is_from_the_future() {
    let stage = with_database(|path| {
        let database = rusqlite::Connection::open(path).expect("opened");
        database
            .execute_batch("PRAGMA journal_mode = DELETE; PRAGMA user_version = 99; PRAGMA journal_mode = WAL;")
            .expect("set");
    });
    let before = without_side_files(&stage);
    stage.fails().says(1, &[&stage.database().display().to_string(), "newer Kiln", "version 99", "install the newer"]);
    assert!(without_side_files(&stage) == before, "something was changed");
}

#[test]
fn the_database_is_another_program_s() {
    let stage = Stage::new("");
    fs::create_dir(stage.state()).expect("made");
    let database = rusqlite::Connection::open(stage.database()).expect("opened");
    database.execute_batch("CREATE TABLE songs (title TEXT)").expect("made");
    drop(database);
    let before = fs::read(stage.database()).expect("read");
    stage.fails().says(1, &[&stage.database().display().to_string(), "another program", "another state directory"]);
    assert_eq!(fs::read(stage.database()).expect("read"), before);
}
