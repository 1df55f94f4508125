//! `kiln cache` and `kiln du`: the past of a cache, a way back, and where the bytes are.

use std::ops::RangeInclusive;

use kiln_domain::Timestamp;
use kiln_wire::{CacheEntry, CacheView, DiskUsage, Rollback, RolledBack, SnapshotView, Storage, UsageView};

use super::CliError;
use super::args::{CacheArgs, CacheVerb};
use super::client::Client;
use super::print::{self, Printer, fields, human_size, json, out, plain};
use super::show::{age, kin_of};
use crate::clock::{Clock as _, SystemClock};

/// What may be gone back from, for people.
const IN_THE_TRASH: &str = "what the cache held until now is in the trash (`kiln trash ls`)";

/// `kiln cache`.
pub(super) async fn run(client: &Client, args: &CacheArgs) -> Result<(), CliError> {
    match &args.verb {
        CacheVerb::Log { key } => {
            let cache = client.cache(key, false).await?;
            if args.json { json(&cache.snapshots) } else { log(&cache) }
        }
        CacheVerb::Usage { key } => {
            let CacheView { usage, unmeasured, .. } = client.cache(key, true).await?;
            if let Some(why) = unmeasured {
                return Err(CliError::Unmeasured { key: key.clone(), why });
            }
            if args.json {
                return json(&usage);
            }
            match &usage {
                Some(usage) => fields(&usage_lines(usage)),
                None => out(&format!("{key} has no cache: its next build begins with an empty one\n")),
            }
        }
        CacheVerb::Snapshot { key } => {
            let (newest, is_new) = client.snapshot(key).await?;
            if args.json {
                return json(&newest);
            }
            let name = plain(&newest.name);
            out(&if is_new {
                format!("{name} was taken of {key}\n")
            } else {
                format!("nothing was written to {key} since {name}, so none was taken\n")
            })
        }
        CacheVerb::Rollback { key, to, force } => {
            let request = Rollback { snapshot: to.map(|name| name.to_string()), force: *force };
            let RolledBack { snapshot } = &client.roll_back(key, &request).await?;
            if args.json {
                return json(&serde_json::json!({ "key": key, "snapshot": snapshot }));
            }
            out(&format!("{key} has gone back to {}; {IN_THE_TRASH}\n", plain(snapshot)))
        }
        CacheVerb::Reset { key, force } => {
            client.reset(key, *force).await?;
            if args.json {
                return json(&serde_json::json!({ "key": key }));
            }
            out(&format!("{key} begins anew with an empty cache; {IN_THE_TRASH}\n"))
        }
    }
}

fn log(cache: &CacheView) -> Result<(), CliError> {
    if cache.snapshots.is_empty() {
        return out(&format!(
            "{key} has no snapshots; `kiln cache snapshot {key}` takes one, and Kiln does so while the project builds\n",
            key = plain(&cache.key)
        ));
    }
    let now = SystemClock.now();
    let mut rows: Vec<_> = cache.snapshots.iter().map(|snapshot| snapshot_row(snapshot, now)).collect();
    let heading = aligned(LOG, &mut rows, 4..=4);
    Printer::for_stdout().table(heading.each_ref().map(String::as_str), &rows)
}

const LOG: [&str; 5] = ["SNAPSHOT", "VERDICT", "TAKEN", "AT", "ALONE"];

fn snapshot_row(snapshot: &SnapshotView, now: Timestamp) -> [String; 5] {
    let SnapshotView { name, taken, verdict, bytes } = snapshot;
    [name.clone(), verdict.clone(), age(taken, now), taken.clone(), size_or_dash(*bytes)]
}

fn usage_lines(usage: &UsageView) -> [(&'static str, String); 6] {
    let known = |bytes: Option<u64>| bytes.map(human_size).unwrap_or_default();
    [
        ("unique", human_size(usage.used)),
        ("shared", known(usage.shared)),
        ("snapshots", known(usage.snapshots)),
        ("may hold", usage.size.map_or_else(|| "what the storage has".to_owned(), human_size)),
        ("can take", human_size(usage.available)),
        ("files it can take", usage.inodes_available.map(|files| files.to_string()).unwrap_or_default()),
    ]
}

/// `kiln du`.
pub(super) async fn du(client: &Client, printer: Printer, as_json: bool) -> Result<(), CliError> {
    let usage = client.disk_usage().await?;
    if as_json {
        return json(&usage);
    }
    let now = SystemClock.now();
    let mut rows = du_rows(&usage, now);
    let heading = aligned(DU, &mut rows, 1..=4);
    printer.table(heading.each_ref().map(String::as_str), &rows)?;
    let mut lines = Vec::new();
    if !usage.trash.is_empty() {
        let count = usage.trash.len();
        lines.push(("trash", format!("{count} deleted, until {}: `kiln trash ls`", last_expiry(&usage))));
    }
    if let Some(storage) = &usage.storage {
        lines.push(("storage", fullness(storage)));
    }
    out("\n")?;
    print::fields(&lines)
}

const DU: [&str; 7] = ["KEY", "UNIQUE", "SHARED", "SNAPSHOTS", "MAY HOLD", "LAST USED", "REPOSITORY"];

fn du_rows(usage: &DiskUsage, now: Timestamp) -> Vec<[String; 7]> {
    let mut rows: Vec<_> = usage.caches.iter().map(|cache| du_row(cache, now)).collect();
    let sums = &usage.sums;
    rows.push([
        "all".to_owned(),
        human_size(sums.unique),
        size_or_dash((sums.shared > 0).then_some(sums.shared)),
        size_or_dash((sums.snapshots > 0).then_some(sums.snapshots)),
        String::new(),
        String::new(),
        String::new(),
    ]);
    rows
}

const ORPHAN: &str = "of no project: `kiln orphans`";

fn du_row(cache: &CacheEntry, now: Timestamp) -> [String; 7] {
    let part = |part: fn(&UsageView) -> Option<u64>| size_or_dash(cache.usage.as_ref().and_then(part));
    let unique = match &cache.usage {
        Some(usage) => human_size(usage.used),
        None => "?".to_owned(),
    };
    let kin = kin_of(&cache.key, &cache.role, cache.pull_request.as_deref());
    let whose = match (&cache.repo, cache.role.as_str(), kin) {
        (Some(repo), _, None) => repo.clone(),
        (Some(repo), _, Some(kin)) => format!("{repo}, {kin}"),
        // It is nobody's, and goes by itself.
        (None, "trial", _) => "a snapshot that is tried out".to_owned(),
        (None, _, None) => ORPHAN.to_owned(),
        (None, _, Some(kin)) => format!("{ORPHAN}, {kin}"),
    };
    [
        cache.key.clone(),
        unique,
        part(|usage| usage.shared),
        part(|usage| usage.snapshots),
        part(|usage| usage.size),
        cache.last_activity.as_deref().map_or_else(|| "-".to_owned(), |at| age(at, now)),
        whose,
    ]
}

/// `########------------ 41 % full: 41.0 GiB of 100 GiB, 59.0 GiB free`.
fn fullness(storage: &Storage) -> String {
    const WIDTH: u64 = 20;
    let Storage { used, total } = *storage;
    // A file system may hold more than it says it can.
    let of = |whole: u64| {
        u64::try_from(u128::from(used.min(total)) * u128::from(whole) / u128::from(total.max(1))).unwrap_or(whole)
    };
    let full = usize::try_from(of(WIDTH)).unwrap_or_default();
    let bar = format!("{}{}", "#".repeat(full), "-".repeat(WIDTH as usize - full));
    format!(
        "{bar} {} % full: {} of {}, {} free",
        of(100),
        human_size(used),
        human_size(total),
        human_size(total.saturating_sub(used))
    )
}

/// When the last of it will have gone by age.
fn last_expiry(usage: &DiskUsage) -> String {
    usage.trash.iter().map(|one| one.expires.clone()).max().unwrap_or_default()
}

fn size_or_dash(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), human_size)
}

/// The heading, and the rows with `columns` to the right: numbers are compared by their ends.
fn aligned<const N: usize>(
    heading: [&str; N],
    rows: &mut [[String; N]],
    columns: RangeInclusive<usize>,
) -> [String; N] {
    let mut heading = heading.map(str::to_owned);
    for column in columns {
        let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(heading[column].len());
        for cell in rows.iter_mut().map(|row| &mut row[column]).chain([&mut heading[column]]) {
            *cell = format!("{cell:>width$}");
        }
    }
    heading
}

#[cfg(test)]
mod tests {
    use kiln_wire::{Sums, Trashed};

    use super::*;

    fn cache(key: &str, role: &str, usage: Option<UsageView>) -> CacheEntry {
        CacheEntry {
            key: key.to_owned(),
            role: role.to_owned(),
            repo: Some("github.com/org/repo".to_owned()),
            last_activity: Some("2026-11-29T00:00:00Z".to_owned()),
            usage,
            ..CacheEntry::default()
        }
    }

    #[test]
    fn where_the_bytes_are_is_a_table_with_its_numbers_in_line() {
        let usage = |used, shared| UsageView { used, shared, size: Some(20 << 30), ..UsageView::default() };
        let caches = vec![
            cache("p7a75aa3600abef39", "project", Some(usage(12 << 30, Some(3 << 20)))),
            CacheEntry {
                pull_request: Some("12".to_owned()),
                ..cache("f0123456789abcdefp7a75aa3600abef39", "pull-request", Some(usage(4096, None)))
            },
            CacheEntry { repo: None, last_activity: None, ..cache("c1p7a75aa3600abef39", "member", None) },
            CacheEntry { repo: None, last_activity: None, ..cache("tp7a75aa3600abef39", "trial", None) },
        ];
        let sums = Sums::of(&caches);
        let now = Timestamp::from_millis(1_795_910_400_000 + 7_200_000);
        let usage = DiskUsage { caches, sums, ..DiskUsage::default() };
        let mut rows = du_rows(&usage, now);
        let heading = aligned(DU, &mut rows, 1..=4);
        let text: Vec<String> =
            [heading].iter().chain(&rows).map(|row| row.join("|").trim_end_matches('|').to_owned()).collect();
        assert_eq!(
            text,
            [
                "KEY|  UNIQUE|  SHARED|SNAPSHOTS|MAY HOLD|LAST USED|REPOSITORY",
                "p7a75aa3600abef39|12.0 GiB|3.00 MiB|        -|20.0 GiB|2 h ago|github.com/org/repo",
                "f0123456789abcdefp7a75aa3600abef39|4.00 KiB|       -|        -|20.0 GiB|2 h ago|github.com/org/repo, pull request 12",
                "c1p7a75aa3600abef39|       ?|       -|        -|       -|-|of no project: `kiln orphans`, member 1",
                "tp7a75aa3600abef39|       ?|       -|        -|       -|-|a snapshot that is tried out",
                "all|12.0 GiB|3.00 MiB|        -|        ",
            ]
        );
    }

    #[test]
    fn fullness_is_a_bar_and_words() {
        let of = |used, total| fullness(&Storage { used, total });
        assert_eq!(of(41 << 30, 100 << 30), "########------------ 41 % full: 41.0 GiB of 100 GiB, 59.0 GiB free");
        assert_eq!(of(0, 0), "-------------------- 0 % full: 0 B of 0 B, 0 B free");
        assert!(of(5, 4).starts_with("#################### 100 % full"), "a file system that holds more than it can");
        assert!(of(u64::MAX, u64::MAX).contains(" 100 % full"), "no overflow");
    }

    #[test]
    fn the_trash_is_told_with_its_end() {
        let trashed = |expires: &str| Trashed {
            name: "x".to_owned(),
            key: None,
            repo: None,
            since: String::new(),
            expires: expires.to_owned(),
        };
        let trash = vec![trashed("2026-12-06T00:00:00Z"), trashed("2026-12-01T00:00:00Z")];
        assert_eq!(last_expiry(&DiskUsage { trash, ..DiskUsage::default() }), "2026-12-06T00:00:00Z");
    }

    #[test]
    fn a_size_that_nobody_knows_is_left_out() {
        let bare = UsageView { used: 4096, available: 1 << 30, ..UsageView::default() };
        let said: Vec<_> = usage_lines(&bare).into_iter().filter(|(_, text)| !text.is_empty()).collect();
        let expected = [("unique", "4.00 KiB"), ("may hold", "what the storage has"), ("can take", "1.00 GiB")];
        assert_eq!(said, expected.map(|(name, text)| (name, text.to_owned())));
    }
}
