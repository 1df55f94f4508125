//! What is read at a scrape.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::gateway;
use crate::gateway::Figures;

/// Something that goes up and down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Leases that are alive.
    Leases,
    /// Open data-plane connections.
    Connections,
    /// Rolls that wait for a build to end.
    RollsHeld,
    /// Starts that wait for their turn.
    QueueLength,
    StartsUnderWay,
    /// `some avg10` of the host's memory pressure, as a ratio.
    MemoryPressureSome,
    /// `full avg10`.
    MemoryPressureFull,
    /// Of the volumes' file system, as a ratio.
    VolumeBytesUsed,
    VolumeInodesUsed,
    JournalRows,
}

impl Level {
    pub const ALL: [Self; 10] = [
        Self::Leases,
        Self::Connections,
        Self::RollsHeld,
        Self::QueueLength,
        Self::StartsUnderWay,
        Self::MemoryPressureSome,
        Self::MemoryPressureFull,
        Self::VolumeBytesUsed,
        Self::VolumeInodesUsed,
        Self::JournalRows,
    ];

    const fn describe(self) -> (&'static str, &'static str) {
        match self {
            Self::Leases => ("leases", "Leases that are alive"),
            Self::Connections => ("connections", "Open connections to daemons"),
            Self::RollsHeld => ("rolls_held", "Daemons that wait for a quiet moment to be replaced"),
            Self::QueueLength => ("queue_length", "Starts that wait for their turn"),
            Self::StartsUnderWay => ("starts_under_way", "Daemons on their way up"),
            Self::MemoryPressureSome => {
                ("memory_pressure_some_ratio", "Share of the last 10 s in which some task waited for memory")
            }
            Self::MemoryPressureFull => {
                ("memory_pressure_full_ratio", "Share of the last 10 s in which all tasks waited for memory")
            }
            Self::VolumeBytesUsed => ("volume_bytes_used_ratio", "How full the caches' file system is, in bytes"),
            Self::VolumeInodesUsed => ("volume_inodes_used_ratio", "How full the caches' file system is, in inodes"),
            Self::JournalRows => ("journal_rows", "Events in the journal"),
        }
    }
}

/// Something that only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Count {
    /// Of the database, each one `fdatasync`.
    StoreCommits,
    /// Several share a commit.
    StoreWrites,
    /// Events that were not written to the journal.
    EventsDropped,
}

impl Count {
    pub const ALL: [Self; 3] = [Self::StoreCommits, Self::StoreWrites, Self::EventsDropped];

    const fn describe(self) -> (&'static str, &'static str) {
        match self {
            Self::StoreCommits => ("store_commits", "Commits of the database, each one fdatasync"),
            Self::StoreWrites => ("store_writes", "Writes to the database, of which several share a commit"),
            Self::EventsDropped => ("events_dropped", "Events that could not be written to the journal"),
        }
    }
}

type ReadLevel = Box<dyn Fn() -> Option<f64> + Send + Sync>;
type ReadCount = Box<dyn Fn() -> u64 + Send + Sync>;
type ReadGateway = Box<dyn Fn() -> Option<Figures> + Send + Sync>;

/// Who knows what.
#[derive(Clone, Default)]
pub(super) struct Readings(Arc<Mutex<Readers>>);

#[derive(Default)]
struct Readers {
    levels: BTreeMap<Level, Arc<ReadLevel>>,
    counts: BTreeMap<Count, Arc<ReadCount>>,
    gateway: Option<Arc<ReadGateway>>,
}

impl Readings {
    pub(super) fn set_level(&self, level: Level, read: ReadLevel) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).levels.insert(level, Arc::new(read));
    }

    pub(super) fn set_count(&self, count: Count, read: ReadCount) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).counts.insert(count, Arc::new(read));
    }

    pub(super) fn set_gateway(&self, read: ReadGateway) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).gateway = Some(Arc::new(read));
    }
}

impl fmt::Debug for Readings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readings").finish_non_exhaustive()
    }
}

impl Collector for Readings {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        // A reading may block, and must not keep others from registering.
        let (levels, counts, gateway) = {
            let readers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            (readers.levels.clone(), readers.counts.clone(), readers.gateway.clone())
        };
        for (level, read) in levels {
            let Some(value) = read() else { continue };
            let (name, help) = level.describe();
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        for (count, read) in counts {
            let (name, help) = count.describe();
            let counter = ConstCounter::new(read());
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        if let Some(figures) = gateway.and_then(|read| read()) {
            gateway::encode(&mut encoder, &figures)?;
        }
        Ok(())
    }
}
