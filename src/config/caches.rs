//! The sections about caches: how large they grow, what is kept of their past, which of them go, and how many daemons share one.

use std::time::Duration;

use kiln_domain::Settings;
use kiln_domain::cache::{EvictionPolicy, FanOutPolicy, ForkBounds, HistoryPolicy, SizePolicy};
use serde::{Deserialize, Serialize};

use super::{Config, ConfigError, units};

/// When a cache's volume grows, and what is lent to one that is full. Percentages are whole numbers, here and below.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Growth {
    /// Share of its size from which on a volume grows; 0: none does.
    pub threshold: u8,
    /// By which it grows.
    pub factor: f64,
    /// Up to which, unless a rule or the project itself says otherwise.
    #[serde(with = "units::bytes")]
    pub max: u64,
    /// On top of its maximum, for a cache that is full all the same.
    #[serde(with = "units::bytes")]
    pub reserve: u64,
}

/// When a project gets daemons beside its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FanOut {
    /// Builds with which a daemon is saturated.
    pub builds: usize,
    /// Daemons that a project may have beside its own, unless a rule or the project itself says otherwise; 0: none.
    pub members: u16,
    /// Such daemons of all projects together.
    pub on_host: usize,
    /// Share of time in which something in a daemon had to wait (`some avg10`) from which on it is saturated with any build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pressure: Option<u8>,
}

/// How many copies of caches for untrusted builds may be at work; more are refused until one ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Forks {
    pub per_project: usize,
    /// Of all projects together.
    pub on_host: usize,
}

/// Which caches go when their storage is nearly full. Percentages are of its bytes or inodes, whichever is fuller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Eviction {
    pub begin: u8,
    pub end: u8,
    /// A cache that was used within it stays.
    #[serde(with = "units::duration")]
    pub keep_newer: Duration,
    /// Unless the storage is as full as this.
    pub urgent: u8,
}

/// What is kept of a cache's past.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Snapshots {
    /// While a project builds; 0: none but by hand.
    #[serde(with = "units::duration")]
    pub every: Duration,
    pub keep: usize,
    #[serde(with = "units::duration")]
    pub keep_for: Duration,
}

impl Default for Growth {
    fn default() -> Self {
        let SizePolicy { factor, max, reserve, .. } = SizePolicy::default();
        Self { threshold: 80, factor, max, reserve }
    }
}

impl Default for FanOut {
    fn default() -> Self {
        let FanOutPolicy { builds, members, on_host, .. } = FanOutPolicy::default();
        Self { builds, members, on_host, pressure: None }
    }
}

impl Default for Forks {
    fn default() -> Self {
        let ForkBounds { per_project, on_host } = ForkBounds::default();
        Self { per_project, on_host }
    }
}

impl Default for Eviction {
    fn default() -> Self {
        Self { begin: 80, end: 75, keep_newer: EvictionPolicy::default().keep_newer, urgent: 95 }
    }
}

impl Default for Snapshots {
    fn default() -> Self {
        let HistoryPolicy { every, keep, keep_for } = HistoryPolicy::default();
        Self { every, keep, keep_for }
    }
}

impl Growth {
    pub fn policy(&self) -> SizePolicy {
        let Self { threshold, factor, max, reserve } = *self;
        SizePolicy { threshold_percent: threshold.into(), factor, max, reserve }
    }
}

impl FanOut {
    pub fn policy(&self) -> FanOutPolicy {
        let Self { builds, members, on_host, pressure } = *self;
        FanOutPolicy { builds, members, on_host, pressure: pressure.map(f64::from) }
    }
}

impl Forks {
    pub const fn bounds(&self) -> ForkBounds {
        let Self { per_project, on_host } = *self;
        ForkBounds { per_project, on_host }
    }
}

impl Eviction {
    pub fn policy(&self) -> EvictionPolicy {
        let Self { begin, end, keep_newer, urgent } = *self;
        EvictionPolicy {
            begin_percent: begin.into(),
            end_percent: end.into(),
            keep_newer,
            urgent_percent: urgent.into(),
            ..EvictionPolicy::default()
        }
    }
}

impl Snapshots {
    pub const fn policy(&self) -> HistoryPolicy {
        HistoryPolicy { every: self.every, keep: self.keep, keep_for: self.keep_for }
    }
}

/// A daemon works in the room above it.
const HIGHEST_THRESHOLD: u8 = 95;
const LARGEST_FACTOR: f64 = 10.0;
/// More often, and a host does little else.
const SHORTEST_CADENCE: Duration = Duration::from_mins(1);

impl Config {
    /// What each value of these sections alone cannot tell.
    pub(super) fn check_caches(&self) -> Result<(), ConfigError> {
        let Self { growth, fan_out, forks, eviction, snapshots, .. } = self;
        let value = |key, value: &dyn std::fmt::Debug, why: &str| {
            Err(ConfigError::Value { key, value: format!("{value:?}"), why: why.to_owned() })
        };
        if growth.threshold > HIGHEST_THRESHOLD {
            return value("growth.threshold", &growth.threshold, "give a percentage, 1 to 95, or 0 for no growth");
        }
        if !(1.0..=LARGEST_FACTOR).contains(&growth.factor) {
            return value("growth.factor", &growth.factor, "give a number from 1 (no growth) to 10");
        }
        if growth.max < Settings::SMALLEST_VOLUME {
            return value(
                "growth.max",
                &growth.max,
                "a cache below 1GiB is of no use; growth.threshold = 0 stops growth",
            );
        }
        if fan_out.builds == 0 {
            return value("fan_out.builds", &fan_out.builds, "give at least 1; fan_out.members = 0 stops fan-out");
        }
        if fan_out.members > Settings::MOST_MEMBERS {
            return value("fan_out.members", &fan_out.members, "give at most 32");
        }
        for (key, bound) in [("forks.per_project", forks.per_project), ("forks.on_host", forks.on_host)] {
            if bound == 0 {
                return value(
                    key,
                    &bound,
                    "give at least 1; untrusted builds are refused where runtime.kind is process",
                );
            }
        }
        for (key, percent) in [
            ("fan_out.pressure", fan_out.pressure),
            ("eviction.begin", Some(eviction.begin)),
            ("eviction.end", Some(eviction.end)),
            ("eviction.urgent", Some(eviction.urgent)),
        ] {
            if let Some(percent) = percent.filter(|percent| !(1..=100).contains(percent)) {
                return value(key, &percent, "give a percentage, 1 to 100");
            }
        }
        if eviction.end >= eviction.begin {
            return value("eviction.end", &eviction.end, "give less than eviction.begin");
        }
        if eviction.urgent < eviction.begin {
            return value("eviction.urgent", &eviction.urgent, "is less than eviction.begin");
        }
        if !snapshots.every.is_zero() && snapshots.every < SHORTEST_CADENCE {
            return value("snapshots.every", &snapshots.every, "give at least 1m, or 0s for none");
        }
        if snapshots.keep == 0 {
            return value("snapshots.keep", &snapshots.keep, "give at least 1; snapshots.every = \"0s\" takes none");
        }
        if snapshots.keep_for < SHORTEST_CADENCE {
            return value("snapshots.keep_for", &snapshots.keep_for, "give at least 1m");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_here_as_default_is_what_the_rules_have() {
        assert_eq!(Growth::default().policy(), SizePolicy::default());
        assert_eq!(FanOut::default().policy(), FanOutPolicy::default());
        assert_eq!(Eviction::default().policy(), EvictionPolicy::default());
        assert_eq!(Snapshots::default().policy(), HistoryPolicy::default());
    }
}
