//! What `zfs get -Hp -o name,property,value,source` prints.
//!
//! Text and not its JSON (`-j`, since 2.3): only properties are asked for whose values are numbers, words, names of datasets,
//! or were written by us as one line of ASCII. A name of a dataset has neither tabs nor line ends. So one parser does for all
//! versions, and what somebody else wrote into one of our properties damages that one only.

use std::collections::BTreeMap;

/// In the order in which [`parse`] expects them.
pub(super) const COLUMNS: &str = "name,property,value,source";

/// Where a value comes from, as far as it matters: whether it was set on the very dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Value {
    text: String,
    local: bool,
}

/// The properties of one dataset or snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts(BTreeMap<String, Value>);

/// By name.
pub(super) type Rows = BTreeMap<String, Facts>;

/// The rows, and how many lines were none. Of a property that comes twice nothing is known: one of the lines must be part of
/// a value.
pub(super) fn parse(printed: &str) -> (Rows, usize) {
    let (mut rows, mut twice, mut odd) = (Rows::new(), Vec::new(), 0);
    for line in printed.lines().filter(|line| !line.is_empty()) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [name, property, text, source] = columns[..] else {
            odd += 1;
            continue;
        };
        let value = Value { text: text.to_owned(), local: source == "local" };
        let facts: &mut Facts = rows.entry(name.to_owned()).or_default();
        if facts.0.insert(property.to_owned(), value).is_some() {
            twice.push((name, property));
        }
    }
    odd += twice.len();
    for (name, property) in twice {
        if let Some(facts) = rows.get_mut(name) {
            facts.0.remove(property);
        }
    }
    (rows, odd)
}

impl Facts {
    /// `None` for `-`, which is how nothing is printed.
    pub(super) fn text(&self, property: &str) -> Option<&str> {
        self.0.get(property).map(|value| value.text.as_str()).filter(|text| *text != "-")
    }

    /// A property that was set on this very dataset: what is inherited says nothing about it, and what was received with a
    /// stream was said of another.
    pub(super) fn local(&self, property: &str) -> Option<&str> {
        self.0.get(property).filter(|value| value.local).map(|value| value.text.as_str())
    }

    pub(super) fn number(&self, property: &str) -> Option<u64> {
        self.text(property)?.parse().ok()
    }

    pub(super) fn is(&self, property: &str, text: &str) -> bool {
        self.text(property) == Some(text)
    }

    /// A list with commas in between, as of `clones`.
    pub(super) fn names(&self, property: &str) -> Vec<String> {
        let listed = self.text(property).unwrap_or_default();
        listed.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_two_datasets() {
        let printed = "tank/a\ttype\tfilesystem\t-\ntank/a\trefquota\t67108864\tlocal\ntank/a\tkiln:key\tp1\tlocal\n\
            tank/a\tclones\ttank/b,tank/c d\t-\ntank/b\tkiln:key\tp1\tinherited from tank\ntank/b\torigin\ttank/a@x\t-\n\
            tank/b\tkiln:properties\t-\t-\ntank/b\tkiln:discarded\t5\treceived\ntank/b\tclones\t\t-\n";
        let (rows, odd) = parse(printed);
        let (a, b) = (&rows["tank/a"], &rows["tank/b"]);
        assert_eq!((odd, a.number("refquota"), a.local("kiln:key")), (0, Some(67_108_864), Some("p1")));
        assert_eq!(a.names("clones"), ["tank/b", "tank/c d"]);
        assert_eq!((b.local("kiln:key"), b.text("kiln:key")), (None, Some("p1")), "inherited is not ours");
        assert_eq!((b.local("kiln:discarded"), b.text("kiln:properties")), (None, None));
        assert!(b.names("clones").is_empty() && b.is("origin", "tank/a@x"));
    }

    #[test]
    fn a_value_with_a_line_end_damages_itself_only() {
        let printed = "t/a\tkiln:key\tp1\nt/a\tkiln:key\tp2\tlocal\n\tlocal\nt/a\tused\t5\t-\nt/a\tkiln:key\tp3\tlocal";
        let (rows, odd) = parse(printed);
        assert_eq!((rows["t/a"].local("kiln:key"), rows["t/a"].number("used")), (None, Some(5)));
        assert_eq!(odd, 3);
        assert_eq!(parse(""), (Rows::new(), 0));
    }
}
