//! A disk of so many bytes, for the model host: what is on it, and how full that makes it.

use std::collections::HashMap;

use kiln_domain::{Key, Snapshot, Timestamp};

use crate::host::Properties;
use crate::host::volumes::{FoundVolume, Fullness, TrashName, Trashed, Usage};

/// Without a size nobody knows how full it is.
#[derive(Debug, Default)]
pub(super) struct Disk {
    pub(super) total: u64,
    /// Of what is not a cache.
    pub(super) other: u64,
    sizes: HashMap<Key, u64>,
    trash: Vec<(Trashed, u64)>,
    /// Whoever measures a cache waits for ever.
    pub(super) unmeasurable: bool,
    /// Whether what is freed shows only when somebody waits for it, and how much that is.
    pub(super) lazy: bool,
    freeing: u64,
    /// How often a cache was measured.
    pub(super) measured: usize,
}

impl Disk {
    pub(super) fn fullness(&self, snapshots: &HashMap<Key, Vec<Snapshot>>) -> Option<Fullness> {
        let in_trash: u64 = self.trash.iter().map(|(_, bytes)| bytes).sum();
        let past: u64 = snapshots.values().flatten().filter_map(|snapshot| snapshot.bytes).sum();
        let used = self.other + self.freeing + self.sizes.values().sum::<u64>() + in_trash + past;
        (self.total > 0).then(|| Fullness { bytes_used: used, bytes_total: self.total, ..Fullness::default() })
    }

    pub(super) fn put(&mut self, key: &Key, bytes: u64) {
        self.sizes.insert(key.clone(), bytes);
    }

    pub(super) fn free(&mut self, key: &Key) {
        let bytes = self.sizes.remove(key).unwrap_or(0);
        self.let_go(bytes);
    }

    fn let_go(&mut self, bytes: u64) {
        self.freeing += if self.lazy { bytes } else { 0 };
    }

    pub(super) fn freed(&mut self) {
        self.freeing = 0;
    }

    pub(super) fn throw_away(&mut self, name: TrashName, since: Timestamp, bytes: u64) {
        self.trash.push((Trashed { name, since, properties: Properties::new() }, bytes));
    }

    pub(super) fn trash(&self) -> Vec<Trashed> {
        self.trash.iter().map(|(entry, _)| entry.clone()).collect()
    }

    /// What an entry of the trash tells of its project.
    pub(super) fn mark(&mut self, name: &TrashName, properties: Properties) {
        if let Some((entry, _)) = self.trash.iter_mut().find(|(entry, _)| entry.name == *name) {
            entry.properties = properties;
        }
    }

    pub(super) fn bring_back(&mut self, name: &TrashName) -> Properties {
        let mut back = self.trash.extract_if(.., |(entry, _)| entry.name == *name);
        back.next().map_or_else(Properties::new, |(entry, _)| entry.properties)
    }

    pub(super) fn purge(&mut self, name: &TrashName) {
        let gone: u64 = self.trash.extract_if(.., |(entry, _)| entry.name == *name).map(|(_, bytes)| bytes).sum();
        self.let_go(gone);
    }

    pub(super) fn usage(&mut self, key: &Key) -> Option<Usage> {
        self.measured += 1;
        self.sizes.get(key).map(|used| Usage { used: *used, ..Usage::default() })
    }

    pub(super) fn volumes(&self) -> impl Iterator<Item = FoundVolume> {
        let found = |key: &Key| {
            let name = format!("live/{key}");
            FoundVolume { name, key: Some(key.clone()), properties: Properties::new() }
        };
        self.sizes.keys().map(found)
    }
}
