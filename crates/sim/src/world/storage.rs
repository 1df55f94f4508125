//! The storage that all caches of the model host share: how full it is, and of what. Nothing here waits.

use kiln::host::volumes::{Fullness, Usage};
use kiln_domain::Key;

use super::World;
use crate::history::Fact;

/// In some unit of its own.
pub(super) const SIZE: u64 = 1000;

/// The most that one cache takes: its daemon collects its garbage.
const LARGEST_CACHE: u64 = SIZE / 16;

/// And what one of its snapshots alone holds.
const LARGEST_SNAPSHOT: u64 = SIZE / 64;

/// Of what is not a cache, in a schedule's end: so little that what may go makes room enough.
const OTHER_AT_LAST: u64 = SIZE * 2 / 5;

impl World {
    fn used(&self) -> u64 {
        let volumes = self.host.volumes.values().map(super::volumes::Volume::bytes).sum::<u64>();
        let trash = self.host.trash.values().map(|(_, volume)| volume.bytes()).sum::<u64>();
        self.host.other + volumes + trash
    }

    /// `None`: nobody can tell.
    pub(super) fn percent_full(&self) -> Option<f64> {
        self.profile.storage.fills().then(|| self.used() as f64 * 100.0 / SIZE as f64)
    }

    /// Tells kilnd.
    pub(super) fn fullness(&mut self) -> Option<Fullness> {
        if !self.profile.storage.fills() {
            return None;
        }
        let bytes_used = self.used();
        self.record(Fact::Fullness { permille: (bytes_used * 1000 / SIZE) as u32 });
        Some(Fullness { bytes_used, bytes_total: SIZE, inodes_used: 0, inodes_total: 0 })
    }

    pub(super) fn usage(&self, key: &Key) -> Option<Usage> {
        self.host.volumes.get(key).map(|volume| Usage {
            used: volume.own_bytes(),
            snapshots: Some(volume.bytes() - volume.own_bytes()),
            ..Usage::default()
        })
    }

    /// A build has written to it: some of that replaces what the newest snapshot goes on holding.
    pub(super) fn grow(&mut self, key: &Key) {
        if !self.profile.storage.fills() {
            return;
        }
        let (by, room) = (self.rng.between(0, 12), SIZE.saturating_sub(self.used()));
        if let Some(volume) = self.host.volumes.get_mut(key) {
            volume.grow(by.min(room), LARGEST_CACHE, LARGEST_SNAPSHOT);
        }
    }

    /// Something that is not a cache takes more of it, or less.
    pub(crate) fn use_storage_otherwise(&mut self) {
        self.fault(OTHERWISE);
        let share = self.rng.pick(&[0, 20, 40, 60, 70, 80, 90]).unwrap_or(0);
        self.host.other = SIZE * share / 100;
    }

    pub(crate) fn storage_calms_down(&mut self) {
        self.host.other = self.host.other.min(OTHER_AT_LAST);
    }

    /// In the end, when nothing is left that was used lately.
    pub(crate) fn storage_has_room(&self) -> Result<(), String> {
        match self.percent_full() {
            Some(percent) if percent >= crate::config::EVICTION.begin_percent => {
                Err(format!("the storage is {percent:.0} % full, and nothing goes"))
            }
            _ => Ok(()),
        }
    }
}

/// The fault that is none of an operation.
pub(crate) const OTHERWISE: &str = "storage used otherwise";
