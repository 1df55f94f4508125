//! What is mounted below a directory, in our own mount namespace.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Mount points strictly below `directory`, the deepest first: an order in which they can be unmounted.
pub(super) fn below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    Ok(parse(&std::fs::read(MOUNTINFO)?, directory))
}

fn parse(mountinfo: &[u8], directory: &Path) -> Vec<PathBuf> {
    let points = mountinfo.split(|&b| b == b'\n').filter_map(|line| line.split(|&b| b == b' ').nth(4));
    let mut points: Vec<PathBuf> = points
        .map(|field| PathBuf::from(unescape(field)))
        .filter(|point| point != directory && point.starts_with(directory))
        .collect();
    // Later lines are mounted over or within earlier ones.
    points.reverse();
    points.sort_by_key(|point| std::cmp::Reverse(point.as_os_str().as_bytes().len()));
    points
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match octal {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &[u8] = b"22 1 252:0 / / rw - ext4 /dev/vda rw\n\
        30 22 0:30 / /srv/c rw,nosuid shared:1 - btrfs /dev/loop0 rw\n\
        31 30 0:31 / /srv/c/a/rootfs rw - overlay overlay rw\n\
        32 31 0:32 / /srv/c/a/rootfs/dev rw - tmpfs tmpfs rw\n\
        33 22 0:33 / /srv/cc rw - tmpfs tmpfs rw\n\
        34 30 0:34 / /srv/c/with\\040space rw - tmpfs tmpfs rw\n\
        broken\n";

    #[test]
    fn only_what_is_strictly_below_and_the_deepest_first() {
        let points = parse(SAMPLE, Path::new("/srv/c"));
        let expected = ["/srv/c/a/rootfs/dev", "/srv/c/with space", "/srv/c/a/rootfs"].map(PathBuf::from);
        assert_eq!(points, expected);
        assert!(parse(SAMPLE, Path::new("/srv/cc")).is_empty());
    }

    #[test]
    fn the_kernel_s_own_list_can_be_read() {
        assert!(below(Path::new("/")).expect("readable").iter().any(|point| point == Path::new("/proc")));
    }
}
