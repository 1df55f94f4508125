//! What a daemon says at its end when it cannot open its cache.
//!
//! buildkitd keeps its state in bolt databases, maps them into memory, and trusts what it finds there. So damage shows as one
//! of bolt's own errors (`errors` and `freelist.go`, `page.go`, `tx.go` of go.etcd.io/bbolt), as a panic in bolt, or as a fault in a page
//! that the file does not have. A full disk and a missing program say other things, and are no damage.
//!
//! What it logs on its way is not read: a step's output, an image of another version, a database that it has set aside and
//! made anew (`boltutil.SafeOpen`) may come in the same words. The error with which it ends is the last that it says,
//! `buildkitd: …`, on more than one line where several things failed.

/// Bolt's words for a file that it cannot use.
const ERRORS: [&str; 5] =
    ["invalid database", "version mismatch", "checksum error", "file size too small", "database invalid"];

/// How the error begins with which it ends.
const END: &str = "buildkitd: ";

/// How a line of its log begins.
const LOGGED: &str = "time=";

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
    let mut ends = false;
    log.lines()
        .map(str::trim)
        .filter(|line| !line.starts_with(LOGGED))
        .find(|line| {
            ends |= line.starts_with(END);
            let said = |words: &[&str]| words.iter().any(|word| line.contains(word));
            (ends && said(&ERRORS)) || (line.starts_with("panic:") && said(&PANICS)) || (in_bolt && said(&FAULTS))
        })
        .map(|line| line.chars().take(200).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_bolt_says_is_damage() {
        for line in [
            // As recorded, with `metadata_v2.db` and `containerdmeta.db` damaged; the first has its file on the next line.
            "buildkitd: invalid database",
            "buildkitd: checksum error",
            "buildkitd: file size too small 4096",
            "panic: page 12 already freed",
            "panic: assertion failed: Page expected to be: 17, but self identifies as 0",
            "panic: invalid freelist page: 3, page type is branch",
        ] {
            let log = format!("time=\"x\" level=info msg=\"auto snapshotter: using overlayfs\"\n{line}\n");
            assert_eq!(cache_damage(&log).as_deref(), Some(line));
        }
        let recorded = "time=\"2026-11-30T14:23:23Z\" level=warning msg=\"failed check for fsverity support\"\n\
                        buildkitd: invalid database\nfailed to open database file /v/runc-overlayfs/metadata_v2.db\n\
                        [kiln] exited with status 1";
        assert_eq!(cache_damage(recorded).as_deref(), Some("buildkitd: invalid database"));
        let several = "buildkitd: failed to close a tracer\nfailed to open the metadata store: version mismatch";
        assert_eq!(cache_damage(several), several.lines().nth(1).map(str::to_owned));
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
            "time=\"x\" level=warning msg=\"skipping a cache manifest: version mismatch\"\n\
             buildkitd: failed to find runc binary",
            // As recorded: it has set the file aside and goes on; what ends it is something else.
            "time=\"2026-11-30T14:23:16Z\" level=error msg=\"failed to open database file /v/cache.db, resetting to empty. Old \
             database is backed up to /v/cache.db.rd49zln6.bak. This error signifies that buildkitd likely crashed or was \
             sigkilled abruptly, leaving the database corrupted. invalid database\"\n\
             buildkitd: listen tcp 127.88.0.5:8372: bind: address already in use",
            "#8 0.31 npm: checksum error\nbuildkitd: got 1 SIGTERM/SIGINTs, forcing shutdown",
            "buildkitd: got 1 SIGTERM/SIGINTs, forcing shutdown\ntime=\"x\" level=info msg=\"invalid database\"",
            "[kiln] exited with status 1: file size too small",
            "",
        ] {
            assert_eq!(cache_damage(line), None, "{line}");
        }
    }
}
