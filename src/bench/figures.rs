//! Percentiles, CPU time, the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Of a set of durations, in microseconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Spread {
    pub(super) count: usize,
    pub(super) min: u64,
    pub(super) p50: u64,
    pub(super) p99: u64,
    pub(super) max: u64,
}

impl Spread {
    pub(super) fn of(mut durations: Vec<Duration>) -> Self {
        durations.sort_unstable();
        let at = |percent: usize| {
            let last = durations.len().saturating_sub(1);
            durations.get(last * percent / 100).map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
        };
        Self { count: durations.len(), min: at(0), p50: at(50), p99: at(99), max: at(100) }
    }
}

/// CPU time of this process so far, all threads.
pub(super) fn cpu_time() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(spent).unwrap_or_default()
}

/// What one bare `fdatasync` of a rewritten page costs in `directory`: the floor of any durable answer.
pub(super) fn fdatasync(directory: &Path, rounds: usize) -> io::Result<Spread> {
    const PAGE: usize = 4096;
    const PAGES: u64 = 256;
    let file: File = tempfile::tempfile_in(directory)?;
    for page in 0..PAGES {
        file.write_all_at(&[1; PAGE], page * PAGE as u64)?;
    }
    file.sync_all()?;
    let mut taken = Vec::with_capacity(rounds);
    for round in 0..rounds as u64 {
        let start = Instant::now();
        file.write_all_at(&[round as u8; PAGE], (round % PAGES) * PAGE as u64)?;
        file.sync_data()?;
        taken.push(start.elapsed());
    }
    Ok(Spread::of(taken))
}

pub(super) fn millis(micros: u64) -> String {
    format!("{:.2}", micros as f64 / 1000.0)
}
