//! How long a daemon stays up for nobody.
//!
//! A project that builds often is worth more patience: the window is the base times the builds of the last day, up to a
//! cap. The reference's rule, kept (its vectors are the tests here). A window that was set for a project is taken as it
//! is. Forks and members have a short one of their own: their next build is
//! rarely near, and what they hold goes with them.

use std::time::Duration;

use crate::project::ProjectRecord;
use crate::settings::Settings;
use crate::time::Timestamp;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdlePolicy {
    /// The base.
    pub window: Duration,
    /// The cap of an adapted window; one below the base switches adapting off.
    pub longest: Duration,
    pub fork_window: Duration,
}

/// The idle window of a project as of `now`. `settings` are the effective ones.
pub fn window(record: &ProjectRecord, settings: &Settings, now: Timestamp, policy: &IdlePolicy) -> Duration {
    if let Some(own) = settings.idle_window {
        return own;
    }
    if record.key.role().is_derived() {
        return policy.fork_window;
    }
    let builds = u32::try_from(record.builds.count(now)).unwrap_or(u32::MAX).max(1);
    policy.window.saturating_mul(builds).min(policy.longest.max(policy.window))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::spec::BuildSpec;

    fn adapted(base: u64, longest: u64, builds: usize, fork: bool) -> u64 {
        let spec = BuildSpec::new("h/r", "", "", "amd64").expect("valid");
        let mut record = ProjectRecord::new(spec, Ipv4Addr::LOCALHOST, Timestamp::EPOCH);
        if fork {
            record.key = record.key.fork();
        }
        (0..builds).for_each(|_| record.builds.note(Timestamp::EPOCH));
        let policy = IdlePolicy {
            window: Duration::from_secs(base),
            longest: Duration::from_secs(longest),
            fork_window: Duration::from_secs(300),
        };
        window(&record, &Settings::default(), Timestamp::EPOCH, &policy).as_secs()
    }

    #[test]
    fn vectors_of_the_reference() {
        const HOUR: u64 = 3600;
        assert_eq!(adapted(900, 0, 8, false), 900);
        assert_eq!(adapted(900, 6 * HOUR, 0, false), 900);
        assert_eq!(adapted(900, 6 * HOUR, 1, false), 900);
        assert_eq!(adapted(900, 6 * HOUR, 4, false), 3600);
        assert_eq!(adapted(900, 6 * HOUR, 30, false), 21_600);
        assert_eq!(adapted(30_000, 4 * HOUR, 8, false), 30_000);
        assert_eq!(
            adapted(600, 6 * HOUR, 4, false),
            2400,
            "the reference looks again every sixth of it; Kiln at its end"
        );
    }

    #[test]
    fn a_fork_is_not_adapted_and_has_its_own() {
        assert_eq!(adapted(900, 21_600, 8, true), 300);
    }
}
