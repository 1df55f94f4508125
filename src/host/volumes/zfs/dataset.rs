//! What a volume is as a dataset: the properties that it is made with, and what is read back.

use std::path::{Path, PathBuf};

use kiln_domain::cache::{Snapshot, SnapshotName, Verdict};
use kiln_domain::{Key, Timestamp};

use super::super::listing::{CACHE, LIVE};
use super::super::record::KEY_PROPERTY;
use super::super::{Usage, Volume, VolumeError};
use super::rows::Facts;
use super::text::{LONGEST_VALUE, decode, encode};
use super::verbs::Setting;
use crate::host::Properties;

/// Whose it is. Means something only where it was set on the very dataset, as do all of these.
pub(super) const KEY: &str = "kiln:key";
/// All properties as JSON; see `text`.
pub(super) const PROPERTIES: &str = "kiln:properties";
/// Sequence of the youngest snapshot ever taken, destroyed or not.
pub(super) const LAST_SNAPSHOT: &str = "kiln:last-snapshot";
/// What it was cloned from: `<key>@kiln-000042`, or `<key>` for what that held at the moment.
pub(super) const ORIGIN: &str = "kiln:origin";
/// When it was last discarded, in milliseconds; means something in the trash only.
pub(super) const DISCARDED: &str = "kiln:discarded";
/// `rollback` on a volume that is to take the place of another.
pub(super) const INTENT: &str = "kiln:intent";
/// On the datasets that only hold others.
pub(super) const ROOM: &str = "kiln:room";
/// Sequence of the youngest entry of the trash ever made, purged or not; on the dataset that holds them. A property can still be
/// set where no file can be written: a pool that is full must not keep anything from being thrown away.
pub(super) const LAST_TRASH: &str = "kiln:last-trash";
/// When a snapshot was taken, in milliseconds. One without it is not part of a history, whatever its name.
pub(super) const TAKEN: &str = "kiln:taken";
pub(super) const VERDICT: &str = "kiln:verdict";

/// What is read of a volume.
pub(super) const VOLUME: [&str; 14] = [
    "type",
    "mountpoint",
    "canmount",
    "origin",
    "refquota",
    "referenced",
    "written",
    "usedbysnapshots",
    "available",
    KEY,
    PROPERTIES,
    LAST_SNAPSHOT,
    ORIGIN,
    DISCARDED,
];

/// What is read of a snapshot.
pub(super) const SNAPSHOT: [&str; 7] = ["used", "referenced", "clones", "defer_destroy", "userrefs", TAKEN, VERDICT];

pub(super) const ROLLBACK: &str = "rollback";

/// A dataset that is ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub key: Key,
    pub properties: Properties,
    pub facts: Facts,
}

/// What a new volume knows of itself.
#[derive(Debug)]
pub(super) struct Birth<'a> {
    pub key: &'a Key,
    pub properties: &'a Properties,
    pub size: Option<u64>,
    pub origin: Option<String>,
    pub last_snapshot: u64,
}

/// Where the dataset of a volume is mounted. The cache is a directory in it: so a dataset that is not mounted is a path that
/// does not exist, and never an empty cache; and no instance sees `.zfs`.
pub(super) fn mountpoint(base: &Path, key: &Key) -> PathBuf {
    base.join(LIVE).join(key.as_str())
}

/// For a volume that holds so much, and a tenth of that: a daemon cannot even start on a full one, nor throw anything away.
pub(super) fn at_least(holds: u64) -> u64 {
    holds.saturating_add(holds / 10)
}

/// What an instance gets.
pub(super) fn cache_path(base: &Path, key: &Key) -> PathBuf {
    mountpoint(base, key).join(CACHE)
}

pub(super) fn with_key(key: &Key, properties: &Properties) -> Properties {
    let mut properties = properties.clone();
    properties.insert(KEY_PROPERTY.to_owned(), key.to_string());
    properties
}

/// Everything is said here, and nothing left to what the parent has: an admin's tuning of the pool must not reach in, and a
/// clone takes over nothing from what it was cloned from.
pub(super) fn settings(base: &Path, birth: &Birth<'_>) -> Result<Vec<Setting>, std::io::Error> {
    let mut settings = vec![
        Setting::text("mountpoint", mountpoint(base, birth.key).to_string_lossy()),
        // With thousands of caches, what is mounted at boot is what is used.
        Setting::word("canmount", "noauto", 2),
        Setting::word("compression", "zstd", 16),
        Setting::number("recordsize", 128 << 10),
        Setting::word("atime", "off", 0),
        Setting::word("xattr", "sa", 2),
        Setting::word("acltype", "off", 0),
        // Programs in a cache belong to builds. Inside an overlay they run all the same.
        Setting::word("setuid", "off", 0),
        Setting::word("exec", "off", 0),
        Setting::word("devices", "off", 0),
        Setting::word("snapdir", "hidden", 0),
        // Nothing is mounted over files that somebody wrote into the directory while it was not mounted.
        Setting::word("overlay", "off", 0),
        Setting::word("readonly", "off", 0),
        // A snapshot of a tool's own on a copy that lives for minutes would keep it from being freed.
        Setting::text("com.sun:auto-snapshot", "false"),
        Setting::text(KEY, birth.key.as_str()),
        properties_setting(&with_key(birth.key, birth.properties))?,
        Setting::text(LAST_SNAPSHOT, birth.last_snapshot.to_string()),
    ];
    settings.extend(birth.size.map(|size| Setting::number("refquota", size)));
    settings.extend(birth.origin.as_ref().map(|origin| Setting::text(ORIGIN, origin)));
    Ok(settings)
}

pub(super) fn properties_setting(properties: &Properties) -> Result<Setting, std::io::Error> {
    let text = encode(properties);
    if text.len() > LONGEST_VALUE {
        let why = format!("its properties take {} bytes, and ZFS keeps at most {LONGEST_VALUE}", text.len());
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    }
    Ok(Setting::text(PROPERTIES, text))
}

pub(super) fn room_settings(room: &'static str) -> Vec<Setting> {
    vec![Setting::word("canmount", "off", 0), Setting::text("mountpoint", "none"), Setting::text(ROOM, room)]
}

impl Found {
    /// The text says what else it is.
    pub(super) fn read(key: &Key, facts: Facts) -> Result<Self, String> {
        if !facts.is("type", "filesystem") {
            return Err(format!("a {} of ZFS", facts.text("type").unwrap_or("dataset")));
        }
        match facts.local(KEY) {
            None => return Err(format!("a dataset without {KEY} of its own")),
            Some(found) if found != key.as_str() => return Err(format!("the volume of {found:?}")),
            Some(_) => {}
        }
        let properties = facts.local(PROPERTIES).and_then(decode);
        let properties = properties.filter(|found| found.get(KEY_PROPERTY).is_some_and(|found| found == key.as_str()));
        match properties {
            Some(properties) => Ok(Self { key: key.clone(), properties, facts }),
            None => Err(format!("a dataset with damaged {PROPERTIES}")),
        }
    }

    pub(super) fn volume(&self, base: &Path) -> Volume {
        let path = cache_path(base, &self.key);
        Volume { key: self.key.clone(), path, properties: self.properties.clone() }
    }

    pub(super) fn last_snapshot(&self) -> u64 {
        self.facts.local(LAST_SNAPSHOT).and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    pub(super) fn origin(&self) -> Option<&str> {
        self.facts.local(ORIGIN)
    }

    pub(super) fn size(&self) -> Option<u64> {
        self.facts.number("refquota").filter(|size| *size > 0)
    }

    pub(super) fn usage(&self) -> Option<Usage> {
        let referenced = self.facts.number("referenced")?;
        // What was written since the last snapshot, or since it was cloned, is in no other: that much goes with it.
        let used = self.facts.number("written")?.min(referenced);
        Some(Usage {
            used,
            shared: Some(referenced - used),
            snapshots: Some(self.facts.number("usedbysnapshots")?),
            size: self.size(),
            available: self.facts.number("available")?,
            inodes_available: None,
        })
    }
}

/// A snapshot of ours that is part of a history, and meant to stay.
pub(super) fn snapshot(name: &str, facts: &Facts) -> Option<Snapshot> {
    let name: SnapshotName = name.parse().ok()?;
    let taken = facts.local(TAKEN)?.parse().ok()?;
    if facts.is("defer_destroy", "on") {
        return None;
    }
    let verdict = facts.local(VERDICT).map(Verdict::from_name).unwrap_or_default();
    Some(Snapshot { name, taken: Timestamp::from_millis(taken), verdict, bytes: facts.number("used") })
}

/// `None` where it was not written down.
pub(super) fn discarded(facts: &Facts) -> Option<Timestamp> {
    facts.local(DISCARDED)?.parse().ok().map(Timestamp::from_millis)
}

pub(super) fn io(operation: &'static str, path: &Path, source: std::io::Error) -> VolumeError {
    VolumeError::Io { operation, path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::super::rows::parse;
    use super::*;

    fn key() -> Key {
        "pbcce5b6205652dd7".parse().expect("a key")
    }

    fn facts(rows: &[(&str, &str, &str)]) -> Facts {
        let line = |(name, value, source): &(&str, &str, &str)| format!("t/x\t{name}\t{value}\t{source}\n");
        let printed = rows.iter().map(line).collect::<Vec<_>>().concat();
        parse(&printed).0.remove("t/x").expect("a row")
    }

    const PROPERTIES_TEXT: &str = r#"{"key":"pbcce5b6205652dd7","repo":"r"}"#;

    #[test]
    fn what_is_written_is_read_back() {
        let given: Properties = [("repo".to_owned(), "r".to_owned())].into();
        let (key, base) = (key(), Path::new("/srv/k"));
        let birth = Birth {
            key: &key,
            properties: &given,
            size: Some(5 << 30),
            origin: Some("p1@x".to_owned()),
            last_snapshot: 3,
        };
        let arguments: Vec<String> = settings(base, &birth).expect("short").iter().map(Setting::argument).collect();
        let has = |text: &str| assert!(arguments.iter().any(|argument| argument == text), "{text} in {arguments:?}");
        has("mountpoint=/srv/k/live/pbcce5b6205652dd7");
        has("canmount=noauto");
        has("com.sun:auto-snapshot=false");
        has("refquota=5368709120");
        let mut rows = vec![("type", "filesystem", "-")];
        rows.extend(arguments.iter().filter_map(|a| a.split_once('=')).map(|(name, value)| (name, value, "local")));
        let found = Found::read(&key, facts(&rows)).expect("ours");
        assert_eq!(found.properties.get("repo").map(String::as_str), Some("r"));
        assert_eq!((found.last_snapshot(), found.origin(), found.size()), (3, Some("p1@x"), Some(5 << 30)));
        assert_eq!(found.volume(base).path, Path::new("/srv/k/live/pbcce5b6205652dd7/cache"));

        let long: Properties = [("repo".to_owned(), "x".repeat(LONGEST_VALUE))].into();
        let error = settings(base, &Birth { properties: &long, ..birth }).expect_err("too long");
        assert!(error.to_string().contains("8191"), "{error}");
    }

    #[test]
    fn what_is_not_ours_says_what_it_is() {
        let kind = ("type", "filesystem", "-");
        for (rows, says) in [
            (vec![("type", "volume", "-")], "a volume of ZFS"),
            (vec![kind, (KEY, "pbcce5b6205652dd7", "inherited from t")], "without kiln:key"),
            (vec![kind, (KEY, "pbcce5b6205652dd7", "received")], "without kiln:key"),
            (vec![kind, (KEY, "p0000000000000000", "local")], "the volume of"),
            (vec![kind, (KEY, "pbcce5b6205652dd7", "local")], "damaged kiln:properties"),
            (
                vec![kind, (KEY, "pbcce5b6205652dd7", "local"), (PROPERTIES, PROPERTIES_TEXT, "inherited from t")],
                "damaged kiln:properties",
            ),
        ] {
            let said = Found::read(&key(), facts(&rows)).expect_err(says);
            assert!(said.contains(says), "{said}");
        }
        let ours = [kind, (KEY, "pbcce5b6205652dd7", "local"), (PROPERTIES, PROPERTIES_TEXT, "local")];
        assert_eq!(Found::read(&key(), facts(&ours)).expect("ours").size(), None);
    }

    #[test]
    fn snapshots_of_ours() {
        let taken = (TAKEN, "1800000000000", "local");
        let found = snapshot("kiln-000042", &facts(&[taken, (VERDICT, "good", "local"), ("used", "5", "-")]));
        let found = found.expect("ours");
        assert_eq!((found.name, found.verdict, found.bytes), (SnapshotName::new(42), Verdict::Good, Some(5)));
        assert_eq!(found.taken.as_millis(), 1_800_000_000_000);
        assert_eq!(snapshot("daily", &facts(&[taken])), None, "of somebody else's name");
        assert_eq!(snapshot("kiln-000042", &facts(&[(TAKEN, "1", "inherited from t")])), None, "nobody said so of it");
        assert_eq!(snapshot("kiln-000042", &facts(&[taken, ("defer_destroy", "on", "-")])), None, "on its way out");
        assert_eq!(snapshot("kiln-seed-p1-5", &facts(&[taken])), None);
    }

    #[test]
    fn where_the_bytes_are() {
        let rows = [
            ("type", "filesystem", "-"),
            (KEY, "pbcce5b6205652dd7", "local"),
            (PROPERTIES, PROPERTIES_TEXT, "local"),
            ("referenced", "100", "-"),
            ("written", "30", "-"),
            ("usedbysnapshots", "7", "-"),
            ("available", "900", "-"),
            ("refquota", "0", "default"),
        ];
        let usage = Found::read(&key(), facts(&rows)).expect("ours").usage().expect("known");
        assert_eq!((usage.used, usage.shared, usage.snapshots, usage.size), (30, Some(70), Some(7), None));
    }
}
