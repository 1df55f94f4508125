//! Rule 9: what is done for a cache's size and its past when there is nothing else to do for its project.

use std::time::Duration;

use super::situation::{InstanceSeen, Situation, VolumeSeen, bounds};
use super::step::Step;
use crate::cache::history::{Activity, due, surplus};
use crate::project::Generation;
use crate::time::Timestamp;

/// At most one of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Upkeep {
    pub step: Option<Step>,
    /// When there will be something to do.
    pub due: Option<Timestamp>,
}

impl Upkeep {
    const NONE: Self = Self { step: None, due: None };

    const fn step(step: Step) -> Self {
        Self { step: Some(step), due: None }
    }

    const fn later(due: Timestamp) -> Self {
        Self { step: None, due: Some(due) }
    }
}

pub(super) fn upkeep(situation: &Situation<'_>) -> Upkeep {
    let Situation { record, observed, demand, past, now, .. } = *situation;
    // Whoever waits for the daemon, or for its stop, is answered first; and a copy has no history of its own.
    let disturbs = demand.waiters > 0 || demand.stop.is_some();
    if observed.volume != VolumeSeen::Ready || past.damage.is_some() || disturbs || record.key.role().is_derived() {
        return Upkeep::NONE;
    }
    if demand.snapshot {
        return Upkeep::step(Step::TakeSnapshot);
    }
    if let Some(until) = past.paused_until.filter(|until| *until > now) {
        return Upkeep::later(until);
    }
    let room = keep_room(situation);
    if room.step.is_some() {
        return room;
    }
    let history = keep_history(situation);
    Upkeep { step: history.step, due: history.due.into_iter().chain(room.due).min() }
}

fn keep_history(situation: &Situation<'_>) -> Upkeep {
    let Situation { record, observed, demand, past, policy, now, .. } = *situation;
    if past.thin.is_some() && past.snapshots.is_none() {
        return Upkeep::step(Step::ListSnapshots);
    }
    let history = past.thin.unwrap_or(policy.history);
    let surplus = past.snapshots.map_or_else(Vec::new, |snapshots| surplus(snapshots, now, &history));
    let gone = surplus.into_iter().find(|name| Some(*name) != past.on_trial);
    if let Some(gone) = gone {
        return Upkeep::step(Step::DestroySnapshot(gone));
    }
    if !past.cheap {
        return Upkeep::NONE;
    }
    let builds = situation.counted.is_some_and(|counted| counted.builds > 0);
    let building = builds || demand.is_busy(now, policy);
    let running = matches!(observed.instance, InstanceSeen::Running { .. });
    let activity = Activity {
        last: record.cache.snapshot,
        used: (record.generation > Generation::NONE).then_some(record.last_activity),
        building: building && running,
    };
    match due(&activity, now, &policy.history) {
        Some(at) if at <= now => Upkeep::step(Step::TakeSnapshot),
        Some(at) => Upkeep::later(at),
        None => Upkeep::NONE,
    }
}

/// A build can fill a disk quickly, and measuring asks the storage.
const MEASURE_EVERY: Duration = Duration::from_mins(1);

/// While a daemon runs, its volume grows before it is full; what nobody writes to does not.
fn keep_room(situation: &Situation<'_>) -> Upkeep {
    let Situation { record, settings, observed, room, policy, now, .. } = *situation;
    let bounded = bounds(settings, &policy.size).is_some() && !matches!(room.measured, Some((_, None)));
    if !bounded || !matches!(observed.instance, InstanceSeen::Running { .. }) {
        return Upkeep::NONE;
    }
    if let Some(resize) = room.resize(settings, &policy.size) {
        return Upkeep::step(Step::Resize(resize.to));
    }
    match room.measured {
        // Nothing was done since.
        Some((at, _)) if record.last_activity < at && !situation.demand.is_busy(now, policy) => Upkeep::NONE,
        Some((at, _)) if at.min(now).plus(MEASURE_EVERY) > now => Upkeep::later(at.min(now).plus(MEASURE_EVERY)),
        _ => Upkeep::step(Step::Measure),
    }
}
