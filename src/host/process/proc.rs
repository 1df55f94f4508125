//! What `/proc` knows of a process, and how one is told from another that got its number later.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

/// One process of one boot: numbers are used again, but not within one tick of the clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Identity {
    pub pid: i32,
    /// Ticks after boot, field 22 of `/proc/<pid>/stat`.
    pub start: u64,
    pub boot: String,
}

impl Identity {
    /// `None` when it is gone, a zombie included.
    pub(super) fn of(pid: i32, boot: &str) -> io::Result<Option<Self>> {
        Ok(stat(pid)?.filter(Stat::lives).map(|stat| Self { pid, start: stat.start, boot: boot.to_owned() }))
    }

    pub(super) fn lives(&self, boot: &str) -> io::Result<bool> {
        Ok(self.boot == boot && stat(self.pid)?.is_some_and(|stat| stat.lives() && stat.start == self.start))
    }

    /// A handle that can not come to mean another process; `None` when this one is gone. A zombie still has one.
    pub(super) fn open(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = Pid::from_raw(self.pid) else { return Ok(None) };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Compared after opening: the number may have changed hands before.
        Ok(stat(self.pid)?.filter(|stat| stat.start == self.start).map(|_| pidfd))
    }

    /// Changes with every start.
    pub(super) fn incarnation(&self) -> String {
        let boot: String = self.boot.chars().filter(char::is_ascii_hexdigit).take(8).collect();
        format!("{}.{}.{boot}", self.pid, self.start)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stat {
    state: u8,
    pub parent: i32,
    /// CPU time in ticks, its own and that of the children that it has waited for.
    ticks: u64,
    pub start: u64,
}

impl Stat {
    fn lives(&self) -> bool {
        !matches!(self.state, b'Z' | b'X')
    }
}

/// `None` when there is no such process.
pub(super) fn stat(pid: i32) -> io::Result<Option<Stat>> {
    let path = format!("/proc/{pid}/stat");
    match std::fs::read(&path) {
        Ok(bytes) => parse(&bytes).map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, path)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse(bytes: &[u8]) -> Option<Stat> {
    // The second field is the program's name in parentheses and may hold anything, parentheses and spaces included.
    let end = bytes.iter().rposition(|&b| b == b')')?;
    let mut fields = std::str::from_utf8(bytes.get(end + 1..)?).ok()?.split_ascii_whitespace();
    let state = fields.next()?.bytes().next()?;
    let parent = fields.next()?.parse().ok()?;
    // Fields 14 to 17, and the parent's was field 4. Those of the children are signed in the kernel's listing.
    let mut ticks = 0_u64;
    let mut used = fields.by_ref().skip(9);
    for _ in 0..4 {
        ticks = ticks.saturating_add(used.next()?.parse().ok()?);
    }
    // Field 22.
    let start = fields.nth(4)?.parse().ok()?;
    Some(Stat { state, parent, ticks, start })
}

/// Whether `pid` is `program` with `--root volume`. A script is run by an interpreter, which then comes first.
pub(super) fn is_daemon(pid: i32, program: &Path, volume: &Path) -> io::Result<bool> {
    let line = match std::fs::read(format!("/proc/{pid}/cmdline")) {
        Ok(line) => line,
        Err(error) if is_gone(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    let arguments: Vec<&OsStr> = line.split(|&b| b == 0).map(OsStr::from_bytes).collect();
    let is_program = arguments.iter().take(2).any(|argument| *argument == program);
    Ok(is_program && arguments.windows(2).any(|pair| pair[0] == "--root" && pair[1] == volume))
}

/// All processes that we can see.
pub(super) fn pids() -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        pids.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(pids)
}

/// CPU time of a process and of all that descend from it now.
pub(super) fn cpu_time_of_tree(root: i32) -> io::Result<Duration> {
    let mut left = Vec::new();
    for pid in pids()? {
        left.extend(stat(pid)?.map(|stat| (pid, stat)));
    }
    let (mut tree, mut ticks) = (HashSet::from([root]), 0_u64);
    ticks = left.iter().filter(|(pid, _)| *pid == root).fold(ticks, |sum, (_, stat)| sum.saturating_add(stat.ticks));
    loop {
        let (children, others): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|(pid, stat)| *pid != root && tree.contains(&stat.parent));
        if children.is_empty() {
            break;
        }
        for (pid, stat) in children {
            tree.insert(pid);
            ticks = ticks.saturating_add(stat.ticks);
        }
        left = others;
    }
    Ok(Duration::from_millis(ticks.saturating_mul(1000) / clock_ticks_per_second().max(1)))
}

pub(super) fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// A process may end between the opening of its file and the reading.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let line = b"12 (a) (b c) S 7 12 12 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2\n";
        assert_eq!(parse(line), Some(Stat { state: b'S', parent: 7, ticks: 5 + 6 + 7 + 8, start: 98765 }));
        for broken in [
            "",
            "12",
            "12 (a",
            "12 (a)",
            "12 (a) S",
            "12 (a) S 7 1 1 1",
            "12 (a) S x 12 12 0 -1 4 1 2 3 4 5 6 7 8 20 0 1 0 9",
        ] {
            assert_eq!(parse(broken.as_bytes()), None, "of {broken:?}");
        }
    }

    #[test]
    fn we_live_and_our_successor_is_another() {
        let (boot, pid) = (boot_id().expect("readable"), i32::try_from(std::process::id()).expect("fits"));
        let me = Identity::of(pid, &boot).expect("readable").expect("alive");
        assert!(me.lives(&boot).expect("readable") && me.open().expect("opened").is_some());
        assert!(!me.lives("another boot").expect("readable"));
        let later = Identity { start: me.start + 1, ..me.clone() };
        assert!(!later.lives(&boot).expect("readable") && later.open().expect("no error").is_none());
        assert_ne!(me.incarnation(), later.incarnation());
        assert!(stat(i32::MAX).expect("no error").is_none());
    }
}
