//! docs/failure-modes.md names the tests that show each answer: they must exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

fn test_names(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry")) {
        let path = entry.path();
        if path.is_dir() {
            test_names(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("text");
            let functions =
                text.lines().filter_map(|line| line.trim_start().trim_start_matches("async ").strip_prefix("fn "));
            found.extend(functions.filter_map(|line| line.split_once('(')).map(|(name, _)| name.to_owned()));
        }
    }
}

#[test]
fn every_failure_mode_is_answered_by_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut known = BTreeSet::new();
    for directory in ["src", "crates", "tests"] {
        test_names(&root.join(directory), &mut known);
    }
    let page = fs::read_to_string(root.join("docs/failure-modes.md")).expect("the page");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| |"))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let numbers: BTreeSet<&str> = rows.iter().filter_map(|row| row.first()).flat_map(|cell| cell.split(", ")).collect();
    let wanted = (1..=15).chain(17..=24).chain([27]).map(|n| format!("L{n}"));
    let wanted = wanted.chain((1..=30).map(|n| format!("F{n}")));
    let others = [
        "C1", "C2", "C6", "C7", "C8", "C10", "C11", "C12", "C13", "F46", "F47", "F48", "F52", "F53", "F62", "G1", "G2",
        "G3", "L16", "W3", "W6", "W7", "W8", "W9", "W14",
    ];
    let wanted = wanted.chain(others.map(str::to_owned));
    for number in wanted {
        assert!(numbers.contains(number.as_str()), "{number} is not answered");
    }
    for row in &rows {
        let tests: Vec<&str> = row.last().expect("a cell").split(", ").map(|name| name.trim_matches('`')).collect();
        assert!(!tests.is_empty());
        for name in tests {
            assert!(known.contains(name), "{} is to be shown by {name}, which does not exist", row[0]);
        }
    }
}
