//! Whether a daemon that runs is well, and what it takes to say that it is not.
//!
//! A daemon under load is slow, and a build that compiles on every core may keep it from answering for a while: slow is
//! not broken (F10), and nothing is ever taken away for it. *Wedged* is a diagnosis, and needs evidence: it was asked
//! several times over a span, never answered, and used next to no processor time meanwhile. A build that runs uses some;
//! a daemon that only waits for something answers.

use std::time::Duration;

use crate::time::Timestamp;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthPolicy {
    /// How often a daemon that somebody needs is asked.
    pub probe_every: Duration,
    /// How often one is asked that did not answer the last time.
    pub ask_again: Duration,
    /// Silence of this length, without work, is the diagnosis.
    pub wedged_after: Duration,
    /// The same while a connection is open: a build may hang on it, so more is asked of the evidence.
    pub wedged_after_connected: Duration,
    /// Silence of this length is the diagnosis whatever the daemon does: no build may take that long.
    pub silent_at_most: Duration,
}

/// What one probe showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probed {
    pub answered: bool,
    /// Processor time that everything in the instance has used since its start; `None`: it cannot be told.
    pub cpu: Option<Duration>,
}

/// Of one run of a daemon. Kept in memory: after a restart of Kiln it is asked anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Health {
    last: Option<Timestamp>,
    silence: Option<Silence>,
    suspect: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Silence {
    probes: u32,
    last: Timestamp,
    /// Processor time at the last probe.
    cpu: Option<Duration>,
    /// For how long it has been silent, and for how long of that, up to now, without work. Added up from probe to probe, each
    /// time no more than two probes are apart: a clock that leaps is no silence.
    silent: Duration,
    idle: Duration,
}

/// Why a daemon is called wedged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evidence {
    pub probes: u32,
    pub silent_for: Duration,
}

impl Health {
    /// One probe may be lost to anything.
    const PROBES: u32 = 3;
    /// A runtime of Go that waits for ever still wakes up for its own bookkeeping; work looks different.
    const IDLE_SHARE: u32 = 50;

    /// It answered a real call.
    #[must_use]
    pub const fn answered(now: Timestamp) -> Self {
        Self { last: Some(now), silence: None, suspect: false }
    }

    /// Somebody could not reach it: ask it now.
    pub const fn suspect(&mut self) {
        self.suspect = true;
    }

    /// As if the clock had always been ahead by what it is now.
    pub fn shift(&mut self, by_millis: i64) {
        self.last = self.last.map(|last| last.shifted(by_millis));
        if let Some(silence) = &mut self.silence {
            silence.last = silence.last.shifted(by_millis);
        }
    }

    pub fn note(&mut self, now: Timestamp, probed: Probed, policy: &HealthPolicy) {
        if probed.answered {
            *self = Self::answered(now);
            return;
        }
        self.last = Some(now);
        self.suspect = false;
        let fresh = Silence { probes: 0, last: now, cpu: None, silent: Duration::ZERO, idle: Duration::ZERO };
        let silence = self.silence.get_or_insert(fresh);
        let step = now.since(silence.last).min(policy.ask_again * 2);
        silence.silent += step;
        silence.idle = match (silence.cpu, probed.cpu) {
            // What ended drops out of the sum, so a fall is a sign of life as well.
            (Some(before), Some(after))
                if after.abs_diff(before) <= step / Self::IDLE_SHARE + Duration::from_millis(10) =>
            {
                silence.idle + step
            }
            // Work, or what may be some.
            _ => Duration::ZERO,
        };
        silence.probes = silence.probes.saturating_add(1);
        (silence.last, silence.cpu) = (now, probed.cpu);
    }

    pub const fn is_silent(&self) -> bool {
        self.silence.is_some()
    }

    /// Silent several times over: slow or wedged, it takes no call now.
    pub fn is_mute(&self) -> bool {
        self.silence.is_some_and(|silence| silence.probes >= Self::PROBES)
    }

    /// Silent, or out of reach for somebody: to be asked even if nobody needs it.
    pub const fn is_worrying(&self) -> bool {
        self.silence.is_some() || self.suspect
    }

    /// For how long it has been silent, and how often it was asked meanwhile.
    pub fn silence(&self) -> Option<Evidence> {
        self.silence.map(|silence| Evidence { probes: silence.probes, silent_for: silence.silent })
    }

    /// When to ask next.
    pub fn due(&self, now: Timestamp, policy: &HealthPolicy) -> Timestamp {
        let every = if self.silence.is_some() { policy.ask_again } else { policy.probe_every };
        match self.last {
            Some(last) if !self.suspect => last.plus(every).min(now.plus(every)),
            _ => now,
        }
    }

    pub fn wedged(&self, connected: bool, policy: &HealthPolicy) -> Option<Evidence> {
        let silence = self.silence?;
        let enough = if connected { policy.wedged_after_connected } else { policy.wedged_after };
        let wedged =
            silence.probes >= Self::PROBES && (silence.idle >= enough || silence.silent >= policy.silent_at_most);
        wedged.then_some(Evidence { probes: silence.probes, silent_for: silence.silent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: HealthPolicy = HealthPolicy {
        probe_every: Duration::from_secs(30),
        ask_again: Duration::from_secs(10),
        wedged_after: Duration::from_secs(60),
        wedged_after_connected: Duration::from_secs(300),
        silent_at_most: Duration::from_secs(7200),
    };

    fn at(seconds: u32) -> Timestamp {
        Timestamp::from_millis(i64::from(seconds) * 1000)
    }

    /// Asked in vain every 10 s from second 0 to `until`; `cpu` is what it has used by each second.
    fn silent(until: u32, cpu: impl Fn(u32) -> Option<Duration>) -> Health {
        let mut health = Health::default();
        for second in (0..=until).step_by(10) {
            health.note(at(second), Probed { answered: false, cpu: cpu(second) }, &POLICY);
        }
        health
    }

    #[test]
    fn silent_and_idle_is_wedged_after_its_span() {
        let idle = |_| Some(Duration::from_secs(5));
        assert_eq!(silent(50, idle).wedged(false, &POLICY), None);
        let evidence = Evidence { probes: 7, silent_for: Duration::from_secs(60) };
        assert_eq!(silent(60, idle).wedged(false, &POLICY), Some(evidence));
        assert_eq!(silent(290, idle).wedged(true, &POLICY), None);
        assert!(silent(300, idle).wedged(true, &POLICY).is_some());
    }

    #[test]
    fn one_that_works_is_slow_and_not_wedged() {
        let busy = |second| Some(Duration::from_secs(u64::from(second)));
        assert_eq!(silent(3600, busy).wedged(false, &POLICY), None);
        assert_eq!(silent(3600, |_| None).wedged(false, &POLICY), None);
        assert!(silent(7200, busy).wedged(false, &POLICY).is_some(), "no build takes that long");
        let awake = |second| Some(Duration::from_millis(u64::from(second) * 5));
        assert!(silent(60, awake).wedged(false, &POLICY).is_some(), "half a percent is no work");
    }

    #[test]
    fn an_answer_clears_it() {
        let mut health = silent(600, |_| Some(Duration::ZERO));
        health.note(at(610), Probed { answered: true, cpu: None }, &POLICY);
        assert_eq!((health.wedged(false, &POLICY), health.is_silent()), (None, false));
    }

    #[test]
    fn a_clock_that_leaps_is_no_evidence() {
        let mut health = Health::default();
        for second in [0, 1_000_000, 1_000_010, 1_000_020] {
            health.note(at(second), Probed { answered: false, cpu: Some(Duration::ZERO) }, &POLICY);
        }
        assert_eq!(health.wedged(false, &POLICY), None);
    }

    #[test]
    fn work_in_between_begins_the_count_anew() {
        let mut health = silent(50, |_| Some(Duration::from_secs(5)));
        health.note(at(60), Probed { answered: false, cpu: Some(Duration::from_secs(9)) }, &POLICY);
        health.note(at(70), Probed { answered: false, cpu: Some(Duration::from_secs(9)) }, &POLICY);
        assert_eq!(health.wedged(false, &POLICY), None);
    }

    #[test]
    fn when_it_is_asked() {
        assert_eq!(Health::default().due(at(5), &POLICY), at(5));
        let mut health = Health::answered(at(100));
        assert_eq!(health.due(at(100), &POLICY), at(130));
        assert_eq!(health.due(at(0), &POLICY), at(30), "a clock that went back delays it by one span at most");
        health.suspect();
        assert_eq!(health.due(at(101), &POLICY), at(101));
        health.note(at(101), Probed { answered: false, cpu: None }, &POLICY);
        assert_eq!(health.due(at(101), &POLICY), at(111));
    }
}
