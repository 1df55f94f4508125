//! Whose code a daemon runs, and what follows from that for what it may use.

use std::fmt;

use crate::settings::{Entitlements, HostSize, Settings};

/// Everything that runs in one instance is of one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Code that somebody of the project has vouched for.
    Trusted,
    /// Code of anybody: a pull request from a fork, say.
    Untrusted,
}

impl Lane {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trusted => "trusted",
            Self::Untrusted => "untrusted",
        }
    }

    /// As [`Lane::name`] writes it. What is not known is untrusted: that is the safe side.
    pub fn of_mark(mark: Option<&str>) -> Self {
        if mark == Some(Self::Trusted.name()) { Self::Trusted } else { Self::Untrusted }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What one daemon with its builds may use; `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub cpus: Option<u32>,
    pub processes: Option<u32>,
    /// Bytes per second read from the disk, and as many written.
    pub io_bytes: Option<u64>,
}

/// What untrusted code may use at most; `None` leaves it to the host's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UntrustedPolicy {
    pub memory_bytes: Option<u64>,
    pub cpus: Option<u32>,
    pub processes: Option<u32>,
    /// `None`: no bound of its own; not every disk can keep one.
    pub io_bytes: Option<u64>,
}

/// For one build at a time, and an image to unpack.
const UNTRUSTED_MEMORY: u64 = 2 << 30;
const UNTRUSTED_PROCESSES: u32 = 4096;

/// What a daemon of this lane may use. Untrusted code gets what its project has, and no more than the policy says: half of
/// the host's CPUs, a quarter of its memory or 2 GiB, 4096 processes, where it says nothing. So it is never unlimited.
pub fn limits_of(lane: Lane, settings: &Settings, host: &HostSize, policy: &UntrustedPolicy) -> Limits {
    let own = Limits {
        memory_bytes: settings.memory_bytes,
        cpus: settings.cpus,
        processes: settings.processes,
        io_bytes: settings.io_bytes,
    };
    if lane == Lane::Trusted {
        return own;
    }
    let memory = policy.memory_bytes.unwrap_or_else(|| UNTRUSTED_MEMORY.max(host.memory_bytes.unwrap_or(0) / 4));
    let cpus = policy.cpus.unwrap_or_else(|| (host.cpus.unwrap_or(0) / 2).max(1));
    let processes = policy.processes.unwrap_or(UNTRUSTED_PROCESSES);
    Limits {
        memory_bytes: Some(own.memory_bytes.map_or(memory, |own| own.min(memory))),
        cpus: Some(own.cpus.map_or(cpus, |own| own.min(cpus))),
        processes: Some(own.processes.map_or(processes, |own| own.min(processes))),
        io_bytes: own.io_bytes.into_iter().chain(policy.io_bytes).min(),
    }
}

/// What builds of this lane may ask for; untrusted ones nothing, whatever was set for their project.
pub fn entitlements_of(lane: Lane, settings: &Settings) -> Entitlements {
    match lane {
        Lane::Trusted => settings.entitlements.clone().unwrap_or_default(),
        Lane::Untrusted => Entitlements::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Entitlement;

    const HOST: HostSize = HostSize { cpus: Some(16), memory_bytes: Some(64 << 30), without_limits: false };

    fn settings(memory_bytes: Option<u64>, cpus: Option<u32>) -> Settings {
        Settings { memory_bytes, cpus, ..Settings::default() }
    }

    #[test]
    fn the_trusted_have_what_is_set_for_them() {
        let policy = UntrustedPolicy { cpus: Some(1), ..UntrustedPolicy::default() };
        let limits = limits_of(Lane::Trusted, &settings(Some(32 << 30), None), &HOST, &policy);
        assert_eq!(limits, Limits { memory_bytes: Some(32 << 30), ..Limits::default() });
    }

    #[test]
    fn the_untrusted_are_never_unlimited_and_get_no_more_than_their_project() {
        let of = |settings: &Settings, host: &HostSize, policy: &UntrustedPolicy| {
            let limits = limits_of(Lane::Untrusted, settings, host, policy);
            (
                limits.memory_bytes.expect("bounded") >> 30,
                limits.cpus.expect("bounded"),
                limits.processes,
                limits.io_bytes,
            )
        };
        let none = UntrustedPolicy::default();
        assert_eq!(of(&settings(None, None), &HOST, &none), (16, 8, Some(4096), None));
        assert_eq!(of(&settings(Some(4 << 30), Some(2)), &HOST, &none), (4, 2, Some(4096), None));
        assert_eq!(of(&settings(Some(40 << 30), Some(16)), &HOST, &none), (16, 8, Some(4096), None));
        // A host of which nothing is known, and a small one.
        assert_eq!(of(&settings(None, None), &HostSize::default(), &none), (2, 1, Some(4096), None));
        let small = HostSize { cpus: Some(1), memory_bytes: Some(1 << 30), ..HOST };
        assert_eq!(of(&settings(None, None), &small, &none), (2, 1, Some(4096), None));
        let policy = UntrustedPolicy {
            memory_bytes: Some(8 << 30),
            cpus: Some(3),
            processes: Some(512),
            io_bytes: Some(50 << 20),
        };
        assert_eq!(of(&settings(None, None), &HOST, &policy), (8, 3, Some(512), Some(50 << 20)));
        let own = Settings { io_bytes: Some(9 << 20), processes: Some(300), ..settings(None, Some(1)) };
        assert_eq!(of(&own, &HOST, &policy), (8, 1, Some(300), Some(9 << 20)));
    }

    #[test]
    fn an_entitlement_of_the_project_is_none_of_its_untrusted_builds() {
        let granted = Entitlements::from([Entitlement::SecurityInsecure]);
        let settings = Settings { entitlements: Some(granted.clone()), ..Settings::default() };
        assert_eq!(entitlements_of(Lane::Trusted, &settings), granted);
        assert_eq!(entitlements_of(Lane::Untrusted, &settings), Entitlements::new());
        assert_eq!(entitlements_of(Lane::Trusted, &Settings::default()), Entitlements::new());
    }
}
