//! What is in an engine's root: read, and never changed.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use kiln_domain::{Key, Snapshot, SnapshotName, Timestamp, Verdict};

use super::command::Failure;
use super::record::{self, KEY_PROPERTY, Kept, Record};
use super::root::MARKER;
use super::{FoundVolume, Fullness, TrashName, Trashed, Volume};
use crate::host::Properties;
use crate::host::files::{self, HALF};

pub(super) const LIVE: &str = "live";
pub(super) const TRASH: &str = "trash";
pub(super) const RECORD: &str = "record.json";
pub(super) const CACHE: &str = "cache";
pub(super) const SNAPSHOTS: &str = "snapshots";

/// What stands where a volume should be.
pub(super) enum Home {
    Absent,
    Ours(Volume, Record),
    Foreign(String),
    Unreadable(PathBuf, io::Error),
}

pub(super) fn read_home(home: &Path, key: &Key) -> Home {
    match home.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Home::Absent,
        Err(error) => return Home::Unreadable(home.to_owned(), error),
        Ok(metadata) if !metadata.is_dir() => return Home::Foreign("something that is not a directory".to_owned()),
        Ok(_) => {}
    }
    let record = match files::read::<Record>(&home.join(RECORD)) {
        // It may have been moved to the trash since we looked.
        Ok(None) if matches!(home.try_exists(), Ok(false)) => return Home::Absent,
        Ok(None) => return Home::Foreign(format!("a directory without our {RECORD}")),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Home::Foreign(format!("a directory with a damaged {RECORD} ({error})"));
        }
        Err(error) => return Home::Unreadable(home.join(RECORD), error),
        Ok(Some(record)) => record,
    };
    if record.format > record::FORMAT {
        return Home::Foreign("a volume of a newer Kiln".to_owned());
    }
    if !record.belongs_to(key) {
        return Home::Foreign(format!("the volume of {:?}", record.properties.get(KEY_PROPERTY)));
    }
    let path = home.join(CACHE);
    match path.symlink_metadata() {
        // Damage, and not to be taken for an empty cache.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Home::Foreign(format!("a record whose {CACHE} is missing"))
        }
        Err(error) => Home::Unreadable(path, error),
        Ok(metadata) if !metadata.is_dir() => Home::Foreign(format!("a volume whose {CACHE} is not a directory")),
        Ok(_) => Home::Ours(Volume { key: key.clone(), path, properties: record.properties.clone() }, record),
    }
}

/// An entry of the trash; `None` when there is none any more, or not yet: a rollback puts there what is to become the live
/// volume in one exchange. One whose record is damaged is listed all the same, or nobody
/// could ever free it.
pub(super) fn describe(home: &Path, name: TrashName) -> Result<Option<Trashed>, Failure> {
    let metadata = match home.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found.map_err(|e| Failure::io(home, e))?,
    };
    let record = files::read::<Record>(&home.join(RECORD)).unwrap_or_else(|error| {
        tracing::debug!(path = %home.display(), %error, "the record of a volume in the trash cannot be read");
        None
    });
    if record.as_ref().is_some_and(|record| record.returning.is_some()) {
        return Ok(None);
    }
    let discarded = record.as_ref().and_then(|record| record.discarded);
    Ok(Some(Trashed {
        name,
        // The rename into the trash is the last change that a directory's own times know of.
        since: discarded.unwrap_or_else(|| changed(&metadata)),
        properties: record.map(|record| record.properties).unwrap_or_default(),
    }))
}

fn changed(metadata: &std::fs::Metadata) -> Timestamp {
    let millis = metadata.ctime().saturating_mul(1000).saturating_add(metadata.ctime_nsec() / 1_000_000);
    Timestamp::from_millis(millis)
}

/// The snapshots of a volume, oldest first. Of one that is not written down the directory's own last change tells about when
/// it was taken.
pub(super) fn history(home: &Path, record: &Record) -> Result<Vec<Snapshot>, Failure> {
    let snapshots = home.join(SNAPSHOTS);
    let mut history = Vec::new();
    for name in names_in::<SnapshotName>(&snapshots)? {
        let kept = match record.snapshots.get(&name.sequence()) {
            Some(kept) => *kept,
            None => match snapshots.join(name.to_string()).symlink_metadata() {
                Ok(metadata) => Kept { taken: changed(&metadata), verdict: Verdict::Unchecked },
                // Destroyed since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(Failure::io(&snapshots, error)),
            },
        };
        history.push(Snapshot { name, taken: kept.taken, verdict: kept.verdict, bytes: None });
    }
    Ok(history)
}

pub(super) fn found_below(root: &Path) -> Result<Vec<FoundVolume>, Failure> {
    /// Of ext4, in the root of every file system.
    const OF_THE_FILE_SYSTEM: &str = "lost+found";
    let mut found = Vec::new();
    for (name, path) in every_entry(&root.join(LIVE))? {
        let name = format!("{LIVE}/{name}");
        let key = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<Key>().ok());
        found.push(match key.map(|key| read_home(&path, &key)) {
            Some(Home::Absent) => continue,
            Some(Home::Ours(volume, _)) => FoundVolume { name, key: Some(volume.key), properties: volume.properties },
            Some(Home::Unreadable(path, source)) => return Err(Failure::io(&path, source)),
            Some(Home::Foreign(_)) | None => stranger(name),
        });
    }
    for (name, _) in every_entry(&root.join(TRASH))? {
        if name.parse::<TrashName>().is_err() {
            found.push(stranger(format!("{TRASH}/{name}")));
        }
    }
    let ours = [LIVE, TRASH, MARKER, OF_THE_FILE_SYSTEM];
    found.extend(
        every_entry(root)?.into_iter().map(|(name, _)| name).filter(|n| !ours.contains(&n.as_str())).map(stranger),
    );
    found.retain(|volume| !volume.name.rsplit('/').next().unwrap_or_default().starts_with(HALF));
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn stranger(name: String) -> FoundVolume {
    FoundVolume { name, key: None, properties: Properties::new() }
}

/// btrfs counts its metadata in: when there is no more room for it, it tells that no byte is available.
pub(super) fn fullness_of(path: &Path) -> Result<Fullness, Failure> {
    let space = rustix::fs::statvfs(path).map_err(|e| Failure::io(path, e))?;
    let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
    let (used, inodes) = (space.f_blocks.saturating_sub(space.f_bfree), space.f_files.saturating_sub(space.f_ffree));
    Ok(Fullness {
        bytes_used: bytes(used),
        bytes_total: bytes(used.saturating_add(space.f_bavail)),
        inodes_used: inodes,
        inodes_total: if space.f_files == 0 { 0 } else { inodes.saturating_add(space.f_favail) },
    })
}

/// Everything with a half-made name: whole volumes, and what is single: snapshots and files.
pub(super) fn leftovers(root: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), Failure> {
    let (mut homes, mut copies) = (Vec::new(), Vec::new());
    let half = |(name, path): (String, PathBuf)| name.starts_with(HALF).then_some(path);
    for (name, path) in entries(&root.join(LIVE))? {
        if name.starts_with(HALF) {
            homes.push(path);
        } else if name.parse::<Key>().is_ok() {
            copies.extend(entries(&path)?.into_iter().filter_map(half));
            copies.extend(entries(&path.join(SNAPSHOTS))?.into_iter().filter_map(half));
        }
    }
    copies.extend(entries(root)?.into_iter().filter_map(half));
    homes.extend(entries(&root.join(TRASH))?.into_iter().filter_map(half));
    Ok((homes, copies))
}

/// The names of a directory that are text, with their paths.
pub(super) fn entries(directory: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let all = every_entry(directory)?;
    Ok(all.into_iter().filter(|(_, path)| path.file_name().is_some_and(|name| name.to_str().is_some())).collect())
}

/// The names of a directory, as they can be shown, with their paths; a directory that is not there is empty.
fn every_entry(directory: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let read = || -> io::Result<Vec<(String, PathBuf)>> {
        let named = |entry: std::fs::DirEntry| (entry.file_name().to_string_lossy().into_owned(), entry.path());
        std::fs::read_dir(directory)?.map(|entry| entry.map(named)).collect()
    };
    match read() {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(Vec::new()),
        result => result.map_err(|error| Failure::io(directory, error)),
    }
}

pub(super) fn names_in<N: std::str::FromStr + Ord>(directory: &Path) -> Result<Vec<N>, Failure> {
    let mut names: Vec<N> = entries(directory)?.into_iter().filter_map(|(name, _)| name.parse().ok()).collect();
    names.sort();
    Ok(names)
}
