//! What a kilnd serves of figures is what docs/metrics.md lists: each has somebody who reads it.

use std::collections::BTreeSet;
use std::path::Path;

use super::stage::Stage;

/// `name type`, of each.
fn documented() -> BTreeSet<String> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).expect("the page");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `kiln_"));
    let listed = rows.map(|row| {
        let mut cells = row.split('|').map(|cell| cell.trim().trim_matches('`'));
        format!("kiln_{} {}", cells.next().unwrap_or_default(), cells.next().unwrap_or_default())
    });
    listed.collect()
}

#[test]
fn what_is_documented_is_what_a_kilnd_serves() {
    let stage = Stage::with_script("exit 1", "");
    let kilnd = stage.start();
    let metrics = || kilnd.get("/metrics").body;
    let text = metrics();
    let served: BTreeSet<String> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).map(str::to_owned).collect();
    let mut listed = documented();
    if !Path::new("/proc/pressure/memory").exists() {
        // What cannot be read is left out.
        listed.retain(|figure| !figure.starts_with("kiln_memory_pressure_"));
    }
    assert_eq!(listed, served, "docs/metrics.md on the left, kilnd on the right");
    for figure in &served {
        let name = figure.split(' ').next().unwrap_or_default();
        let series = text.lines().filter(|line| line.starts_with(name)).count();
        assert!(series > 0, "{name} has no series");
    }
    let journal = |text: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix("kiln_journal_rows "));
        value.and_then(|value| value.parse::<f64>().ok()).expect("a number")
    };
    assert_eq!(kilnd.route("example.com/o/r").status, 500);
    assert!(journal(&metrics()) > journal(&text), "a failed start is told of: {}", metrics());
    assert!(text.lines().any(|line| line == "kiln_events_dropped_total 0"), "{text}");
}
