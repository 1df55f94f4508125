//! What is mounted where, and who keeps it so. Read from the kernel: what ZFS itself reports as mounted may lie below
//! something else.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::host::occupancy::unescape;

/// A line of a process's `mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    point: PathBuf,
    kind: String,
    source: String,
}

/// So many holders are named; one is enough to go and look.
const NAMED: usize = 3;

/// What one sees at `path`: the dataset that is mounted there last.
pub(super) fn dataset_at(path: &Path) -> io::Result<Option<String>> {
    let mounts = parse(&std::fs::read("/proc/self/mountinfo")?);
    let last = mounts.into_iter().rfind(|mount| mount.point == path);
    Ok(last.map(|mount| if mount.kind == "zfs" { mount.source } else { format!("{} ({})", mount.source, mount.kind) }))
}

/// Where a dataset is mounted in our own namespace.
pub(super) fn points_of(dataset: &str) -> io::Result<Vec<PathBuf>> {
    let mounts = parse(&std::fs::read("/proc/self/mountinfo")?);
    Ok(mounts
        .into_iter()
        .filter(|mount| mount.kind == "zfs" && mount.source == dataset)
        .map(|mount| mount.point)
        .collect())
}

/// Who uses a dataset: processes that work in it or have files of it open, and other mount namespaces that it is mounted in.
/// Empty when nobody can be found.
pub(super) fn holders_of(dataset: &str) -> String {
    let points = points_of(dataset).unwrap_or_default();
    let ours = std::fs::read_link("/proc/self/ns/mnt").ok();
    let (mut found, mut namespaces) = (Vec::new(), BTreeMap::new());
    for (process, home) in processes() {
        if let Some(path) = used_by(&home, &points) {
            found.push(format!("{} ({})", describe(process, &home), path.display()));
            continue;
        }
        let Ok(namespace) = std::fs::read_link(home.join("ns/mnt")) else { continue };
        if Some(&namespace) == ours.as_ref() || namespaces.contains_key(&namespace) {
            continue;
        }
        let mounts = parse(&std::fs::read(home.join("mountinfo")).unwrap_or_default());
        let held = mounts.into_iter().find(|mount| mount.kind == "zfs" && mount.source == dataset);
        let text = held.map(|mount| {
            format!("the mount {} in the namespace of {}", mount.point.display(), describe(process, &home))
        });
        namespaces.insert(namespace, text);
    }
    found.extend(namespaces.into_values().flatten());
    let more = found.len().saturating_sub(NAMED);
    found.truncate(NAMED);
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    found.join(", ") + &more
}

fn processes() -> Vec<(u32, PathBuf)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbered =
        entries.flatten().filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())));
    let mut processes: Vec<(u32, PathBuf)> = numbered.collect();
    processes.sort();
    processes
}

/// What a process has of what is below `points`.
fn used_by(home: &Path, points: &[PathBuf]) -> Option<PathBuf> {
    let within = |link: PathBuf| {
        let target = std::fs::read_link(link).ok()?;
        points.iter().any(|point| target.starts_with(point)).then_some(target)
    };
    let open = || std::fs::read_dir(home.join("fd")).ok()?.flatten().find_map(|entry| within(entry.path()));
    ["cwd", "root", "exe"].iter().find_map(|link| within(home.join(link))).or_else(open)
}

fn describe(process: u32, home: &Path) -> String {
    let name = std::fs::read_to_string(home.join("comm")).unwrap_or_default();
    format!("process {process} ({})", name.trim())
}

fn parse(mountinfo: &[u8]) -> Vec<Mount> {
    let text = |field: &[u8]| String::from_utf8_lossy(unescape(field).as_bytes()).into_owned();
    let line = |line: &[u8]| {
        let fields: Vec<&[u8]> = line.split(|&b| b == b' ').collect();
        // Optional fields come before the dash.
        let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
        let point = PathBuf::from(unescape(fields.get(4)?));
        Some(Mount { point, kind: text(fields.get(dash + 1)?), source: text(fields.get(dash + 2)?) })
    };
    mountinfo.split(|&b| b == b'\n').filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mountinfo() {
        let text = b"22 1 252:0 / / rw - ext4 /dev/vda rw\n\
            30 22 0:30 / /srv/kiln rw,noatime shared:1 master:2 - zfs tank/kiln rw,xattr,noacl\n\
            31 30 0:31 / /srv/kiln/with\\040space rw - zfs tank/a\\040b rw\nbroken\n31 30 0:31 / /x rw\n";
        let mount = |point: &str, kind: &str, source: &str| Mount {
            point: point.into(),
            kind: kind.to_owned(),
            source: source.to_owned(),
        };
        assert_eq!(
            parse(text),
            [
                mount("/", "ext4", "/dev/vda"),
                mount("/srv/kiln", "zfs", "tank/kiln"),
                mount("/srv/kiln/with space", "zfs", "tank/a b")
            ]
        );
    }

    #[test]
    fn this_machine_s_own_can_be_read() {
        assert!(dataset_at(Path::new("/proc")).expect("readable").expect("mounted").contains("(proc)"));
        assert!(points_of("no/such").expect("readable").is_empty());
        assert_eq!(holders_of("no/such"), "");
    }

    #[test]
    fn a_process_that_works_in_a_directory_is_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().canonicalize().expect("there");
        let file = std::fs::File::create(path.join("open")).expect("made");
        let me = PathBuf::from("/proc/self");
        assert_eq!(used_by(&me, std::slice::from_ref(&path)), Some(path.join("open")));
        drop(file);
        assert_eq!(used_by(&me, &[path]), None);
    }
}
