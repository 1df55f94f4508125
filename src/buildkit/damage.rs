//! What a daemon says at its start when it cannot open its cache.
//!
//! buildkitd keeps its state in bolt databases, maps them into memory, and trusts what it finds there. So damage shows as one
//! of bolt's own errors (`errors` and `freelist.go`, `page.go`, `tx.go` of go.etcd.io/bbolt), as a panic in bolt, or as a fault in a page
//! that the file does not have. A full disk and a missing program say other things, and are no damage.

/// Bolt's words for a file that it cannot use.
const ERRORS: [&str; 5] =
    ["invalid database", "version mismatch", "checksum error", "file size too small", "database invalid"];

/// Where a panic or a fault is bolt's own.
const IN_BOLT: [&str; 2] = ["go.etcd.io/bbolt", "bbolt."];

const FAULTS: [&str; 4] =
    ["unexpected fault address", "SIGBUS", "SIGSEGV", "invalid memory address or nil pointer dereference"];

const PANICS: [&str; 8] = [
    "already freed",
    "page expected to be",
    "Page expected to be",
    "invalid freelist page",
    "invalid page type",
    "cannot free page",
    "assertion failed",
    "slice bounds out of range",
];

/// The line that says so, `None` if none does.
pub fn cache_damage(log: &str) -> Option<String> {
    let in_bolt = IN_BOLT.iter().any(|place| log.contains(place));
    log.lines()
        .map(str::trim)
        .find(|line| {
            let said = |words: &[&str]| words.iter().any(|word| line.contains(word));
            said(&ERRORS) || (line.starts_with("panic:") && said(&PANICS)) || (said(&FAULTS) && in_bolt)
        })
        .map(|line| line.chars().take(200).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_bolt_says_is_damage() {
        for line in [
            "buildkitd: failed to create lease manager: invalid database",
            "buildkitd: checksum error",
            "buildkitd: file size too small 4096",
            "panic: page 12 already freed",
            "panic: assertion failed: Page expected to be: 17, but self identifies as 0",
            "panic: invalid freelist page: 3, page type is branch",
        ] {
            let log = format!("time=\"x\" level=info msg=\"auto snapshotter: using overlayfs\"\n{line}\n");
            assert_eq!(cache_damage(&log).as_deref(), Some(line));
        }
        let fault = "unexpected fault address 0x7f0000001000\nfatal error: fault\n[signal SIGBUS: bus error]\n\
                     go.etcd.io/bbolt.(*DB).meta(...)";
        assert_eq!(cache_damage(fault).as_deref(), Some("unexpected fault address 0x7f0000001000"));
    }

    #[test]
    fn other_ends_are_not() {
        for line in [
            "buildkitd: write /var/lib/buildkit/containerdmeta.db: disk quota exceeded",
            "buildkitd: failed to find runc binary",
            "buildkitd: got 1 SIGTERM/SIGINTs, forcing shutdown",
            "panic: runtime error: invalid memory address or nil pointer dereference",
            "",
        ] {
            assert_eq!(cache_damage(line), None, "{line}");
        }
    }
}
