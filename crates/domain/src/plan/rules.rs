//! The rules themselves, in their order. See the [module](super) for each one's why.

use std::time::Duration;

use super::reason::Reason;
use super::situation::{Counted, FilesSeen, InstanceSeen, Place, Situation, StopWish, VolumeSeen};
use super::step::{Step, Stop};
use super::upkeep::upkeep;
use crate::cache::history::newest_good;
use crate::idle;
use crate::project::Phase;
use crate::time::Timestamp;

/// The answer of [`plan`].
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The phase the project is in, while the step runs if there is one.
    pub phase: Phase,
    pub step: Option<Step>,
    pub reason: Reason,
    /// Look again at this time even if nothing happens; `None`: only an event can change the answer.
    pub look_again: Option<Timestamp>,
}

impl Plan {
    fn step(phase: Phase, step: Step, reason: Reason) -> Self {
        Self { phase, step: Some(step), reason, look_again: None }
    }

    fn rest(phase: Phase, reason: Reason, look_again: Option<Timestamp>) -> Self {
        Self { phase, step: None, reason, look_again }
    }
}

/// A cache that breaks again this soon after it was taken back is not helped by taking it back again.
const RESCUE_AGAIN: Duration = Duration::from_hours(1);

/// Before a lease or the hot tier, which nobody waits on, asks for a place again.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// The one function that decides.
pub fn plan(situation: &Situation<'_>) -> Plan {
    let plan = decide(situation);
    if plan.step.is_some() || plan.phase == Phase::Removing {
        return plan;
    }
    // 9
    let upkeep = upkeep(situation);
    Plan { step: upkeep.step, look_again: plan.look_again.into_iter().chain(upkeep.due).min(), ..plan }
}

fn decide(situation: &Situation<'_>) -> Plan {
    let Situation { record, demand, settings, policy, observed, now, .. } = *situation;
    // 1
    if record.phase == Phase::Removing {
        return remove(situation, Reason::Removing);
    }
    if let InstanceSeen::Running { incarnation, .. } = &observed.instance {
        // 2
        if demand.stop == Some(StopWish::Force) {
            return Plan::step(Phase::Draining, Step::StopInstance(Stop::Force), Reason::Forced);
        }
        // 3
        if let Some(reached) = situation.leaks {
            let reason = Reason::NotIsolated { reached: reached.to_owned() };
            return Plan::step(Phase::Draining, Step::StopInstance(Stop::Force), reason);
        }
        let ours = record.incarnation.as_deref() == Some(incarnation);
        if let (true, Some(evidence)) = (ours, situation.health.wedged(demand.connections > 0, &policy.health)) {
            return Plan::step(Phase::Rolling, Step::StopInstance(Stop::Force), Reason::Wedged(evidence));
        }
    }
    // 4, before it is on its way up again
    if let Some(plan) = replace(situation) {
        return plan;
    }
    // 4
    let need = demand.need(settings, now, policy);
    if let Some(need) = need.filter(|need| *need != Reason::Hot || !may_roll(situation)) {
        return bring_up(situation, need);
    }
    // 5
    if let Some(wish) = demand.stop {
        return give_way(situation, wish);
    }
    // 6
    if let Some(what) = observed.outdated().filter(|_| may_roll(situation)) {
        return take_down(situation, Phase::Rolling, Reason::Outdated { what });
    }
    // 7
    let window = idle::window(record, settings, now, &policy.idle);
    // A clock set back must not make a window endless: it never closes later than one window from now.
    let closes = record.last_activity.plus(window).min(now.plus(window));
    if closes > now && !situation.room_wanted {
        if let InstanceSeen::Running { incarnation, serving, .. } = &observed.instance {
            return linger(situation, incarnation, *serving, Reason::IdleWindowOpen { closes, window }, closes);
        }
        if record.phase == Phase::Rolling {
            return bring_up(situation, Reason::RollGoesOn);
        }
    }
    // 8
    let reason = match (closes > now, situation.room_wanted) {
        (true, true) => Reason::RoomWanted,
        (true, false) => Reason::Down,
        (false, _) => Reason::IdleWindowPassed { window },
    };
    take_down(situation, Phase::Draining, reason)
}

/// A cache is replaced while nothing runs on it, whoever waits for the daemon: they get it with the cache that was asked for.
fn replace(situation: &Situation<'_>) -> Option<Plan> {
    let Situation { demand, observed, .. } = *situation;
    if observed.instance.is_running() || observed.volume != VolumeSeen::Ready {
        return None;
    }
    let (step, reason) = match demand.stop? {
        StopWish::Rollback(to) => (Step::Rollback(to), Reason::RollbackRequested { to }),
        StopWish::Reset => (Step::DiscardCache, Reason::ResetRequested),
        StopWish::Stop | StopWish::Evict | StopWish::Remove | StopWish::Force => return None,
    };
    Some(Plan::step(resting(situation), step, reason))
}

/// Rule 5.
fn give_way(situation: &Situation<'_>, wish: StopWish) -> Plan {
    let Situation { observed, .. } = *situation;
    let reason = match wish {
        StopWish::Stop | StopWish::Force => Reason::StopRequested,
        StopWish::Remove => Reason::RemovalRequested,
        StopWish::Evict => Reason::EvictionRequested,
        StopWish::Reset => Reason::ResetRequested,
        StopWish::Rollback(to) => Reason::RollbackRequested { to },
    };
    if observed.instance.is_running() {
        return take_down(situation, Phase::Draining, reason);
    }
    match wish {
        StopWish::Remove => remove(situation, Reason::Removing),
        // What is derived is freed whole.
        StopWish::Evict if !situation.record.key.role().is_derived() => evict(situation, reason),
        _ => take_down(situation, Phase::Draining, reason),
    }
}

/// The project stays, with its settings and its address; its next build begins with an empty cache.
fn evict(situation: &Situation<'_>, reason: Reason) -> Plan {
    let Situation { observed, .. } = *situation;
    let step = match (&observed.instance, &observed.volume) {
        (InstanceSeen::Absent, VolumeSeen::Ready) => Step::DestroyVolume,
        (InstanceSeen::Absent, _) => return Plan::rest(resting(situation), reason, None),
        _ => Step::DestroyInstance,
    };
    Plan::step(resting(situation), step, reason)
}

/// Whether a running daemon is out of date, and nothing keeps it from being replaced now.
fn may_roll(situation: &Situation<'_>) -> bool {
    let Situation { demand, policy, now, observed, .. } = *situation;
    demand.waiters == 0
        && demand.roll_held_until(now, policy).is_none()
        && !demand.is_busy(now, policy)
        && observed.outdated().is_some()
}

/// Rule 7. What is on its way up is seen through, for the next build: whoever asked for it may only have hung up.
fn linger(situation: &Situation<'_>, incarnation: &str, serving: bool, reason: Reason, closes: Timestamp) -> Plan {
    let Situation { record, gave_up_on, demand, health, served, policy, now, .. } = *situation;
    let worry = (health.is_worrying() || !serving).then(|| health.due(now, &policy.health));
    let (phase, step) = if record.incarnation.as_deref() != Some(incarnation) {
        (Phase::Starting, Some(Step::AdoptInstance))
    } else if serving || served || (gave_up_on == Some(incarnation) && !situation.unborn) {
        (Phase::Warm, worry.filter(|due| *due <= now).map(|_| Step::Probe))
    } else if gave_up_on == Some(incarnation) {
        (failed(situation, &reason), None)
    } else {
        (Phase::Starting, Some(Step::AwaitServing))
    };
    if let Some(step) = step {
        return Plan::step(phase, step, reason);
    }
    let roll = situation.observed.outdated().and_then(|_| demand.roll_held_until(now, policy));
    // Builds that fall out of the day shorten the window.
    let shorter = record.builds.next_change(now);
    let worry = worry.filter(|_| phase == Phase::Warm);
    let look_again = [closes].into_iter().chain(roll).chain(shorter).chain(worry).min();
    Plan { phase, step, reason, look_again }
}

/// Rule 4: towards `Warm`, one step at a time.
fn bring_up(situation: &Situation<'_>, need: Reason) -> Plan {
    let Situation { record, observed, demand, setbacks, gave_up_on, now, policy, .. } = *situation;
    if let InstanceSeen::Running { incarnation, serving, .. } = &observed.instance {
        if record.incarnation.as_deref() != Some(incarnation) {
            return Plan::step(Phase::Starting, Step::AdoptInstance, need);
        }
        if *serving || situation.served {
            return keep_up(situation, need, *serving);
        }
    }
    if let VolumeSeen::Foreign { found } = &observed.volume {
        let reason = Reason::Foreign { found: found.clone() };
        return Plan::rest(Phase::Failed { reason: reason.to_string() }, reason, None);
    }
    // A request is worth an immediate try; a lease or the hot tier alone is not worth a busy loop.
    if let (0, Some(until)) = (demand.waiters, setbacks.pause_ends(now)) {
        let reason = Reason::BackingOff { until };
        return Plan::rest(failed(situation, &reason), reason, Some(until));
    }
    if let InstanceSeen::Running { incarnation, .. } = &observed.instance {
        return if gave_up_on != Some(incarnation) {
            Plan::step(Phase::Starting, Step::AwaitServing, need)
        } else if situation.unborn && !demand.is_busy(now, policy) {
            // Nobody can have sent it a build: it has never answered, and no lease or connection tells of one.
            Plan::step(Phase::Rolling, Step::StopInstance(Stop::Force), Reason::NotServing)
        } else {
            // Too loaded to answer, perhaps: busy is not broken (F10), and rule 3 finds out.
            keep_up(situation, need, false)
        };
    }
    if let Some(plan) = rescue(situation).or_else(|| make_room(situation)) {
        return plan;
    }
    // A roll is one until the daemon starts: nobody but the phase knows that it has to come up again.
    let rolling = need == Reason::RollGoesOn;
    if let Some(plan) = wait_for_place(situation, rolling) {
        return plan;
    }
    let making = if rolling { Phase::Rolling } else { Phase::Provisioning };
    match &observed.instance {
        InstanceSeen::HalfMade { why } => {
            Plan::step(making, Step::DestroyInstance, Reason::HalfMade { why: why.clone() })
        }
        InstanceSeen::Stopped { outdated: Some(what) } => {
            Plan::step(making, Step::DestroyInstance, Reason::Outdated { what: what.clone() })
        }
        _ if observed.volume == VolumeSeen::Absent && record.key.role().is_derived() => {
            Plan::step(making, Step::CloneVolume, need)
        }
        _ if observed.volume == VolumeSeen::Absent => Plan::step(making, Step::CreateVolume, need),
        _ if observed.files == FilesSeen::Stale => Plan::step(making, Step::WriteFiles, need),
        InstanceSeen::Absent => Plan::step(making, Step::CreateInstance, need),
        InstanceSeen::Stopped { .. } | InstanceSeen::Running { .. } => {
            let starting = if rolling { Phase::Rolling } else { Phase::Starting };
            Plan::step(starting, Step::StartInstance, need)
        }
    }
}

/// A cache that no daemon can open goes back to its newest good snapshot, once: what fails again has another cause.
fn rescue(situation: &Situation<'_>) -> Option<Plan> {
    let Situation { record, observed, past, now, .. } = *situation;
    // Where there is none, an empty one is on its way, and it was the cache that was damaged. What may have gone back is not taken for
    // damaged before a daemon says so again.
    let damage = past.damage.filter(|_| observed.volume == VolumeSeen::Ready && !past.unclear)?.to_owned();
    let Some(snapshots) = past.snapshots else {
        let reason = Reason::Damaged { damage, tried: false };
        return Some(Plan::step(Phase::Provisioning, Step::ListSnapshots, reason));
    };
    let tried = record.cache.rescued.is_some_and(|rescued| now.since(rescued) < RESCUE_AGAIN);
    let Some(good) = newest_good(snapshots).filter(|_| !tried) else {
        let reason = Reason::Damaged { damage, tried };
        return Some(Plan::rest(Phase::Failed { reason: reason.to_string() }, reason, None));
    };
    let reason = Reason::Rescue { to: good.name, damage };
    Some(Plan::step(Phase::Provisioning, Step::Rollback(good.name), reason))
}

/// A volume that is full to the brim is a brick until it is given more.
fn make_room(situation: &Situation<'_>) -> Option<Plan> {
    let Situation { settings, policy, room, .. } = *situation;
    if !room.full {
        return None;
    }
    if room.measured.is_none() {
        return Some(Plan::step(Phase::Provisioning, Step::Measure, Reason::Full));
    }
    Some(match room.resize(settings, &policy.size) {
        Some(resize) => Plan::step(Phase::Provisioning, Step::Resize(resize.to), Reason::Full),
        None => Plan::rest(Phase::Failed { reason: Reason::Full.to_string() }, Reason::Full, None),
    })
}

/// A daemon that is up and needed: asked now and then whether it is well. One that is silent is waited for: it is slow, or
/// the evidence against it gathers (rule 3).
fn keep_up(situation: &Situation<'_>, need: Reason, serving: bool) -> Plan {
    let Situation { demand, health, now, policy, observed, .. } = *situation;
    let due = health.due(now, &policy.health);
    if due <= now {
        return Plan::step(Phase::Warm, Step::Probe, need);
    }
    let roll = observed.outdated().and_then(|_| demand.roll_held_until(now, policy));
    let look_again = demand.next_lease_change(now, policy).into_iter().chain(roll).chain([due]).min();
    let reason = if serving { need } else { Reason::NotAnswering };
    Plan::rest(Phase::Warm, reason, look_again)
}

/// `None`: the project has its place.
fn wait_for_place(situation: &Situation<'_>, rolling: bool) -> Option<Plan> {
    let Situation { record, place, demand, now, .. } = *situation;
    let reason = match place {
        Place::Admitted => return None,
        Place::Unasked => Reason::NeedsPlace,
        Place::Queued { position, length, waits_for } => Reason::Queued { position, length, waits_for },
        Place::Refused(why) => Reason::Refused(why),
    };
    match reason {
        Reason::NeedsPlace if rolling => Some(Plan::rest(Phase::Rolling, reason, None)),
        // What is only a copy is not kept for that.
        Reason::Queued { .. } | Reason::Refused(_) if rolling && record.key.role().is_derived() => {
            Some(remove(situation, Reason::Reaped))
        }
        // It has been brought up to date, and nobody needs it: others go first, and the next build starts it.
        Reason::Queued { .. } | Reason::Refused(_) if rolling => Some(Plan::rest(Phase::Idle, Reason::Down, None)),
        Reason::Refused(_) if demand.waiters == 0 => {
            Some(Plan::rest(resting(situation), reason, Some(now.plus(ASK_AGAIN))))
        }
        reason => Some(Plan::rest(resting(situation), reason, None)),
    }
}

/// Rules 5, 6 and 8. What is not running is left as it is.
fn take_down(situation: &Situation<'_>, phase: Phase, reason: Reason) -> Plan {
    let InstanceSeen::Running { incarnation, .. } = &situation.observed.instance else {
        return if situation.record.key.role().is_derived() {
            remove(situation, Reason::Reaped)
        } else {
            Plan::rest(resting(situation), reason, None)
        };
    };
    let Situation { record, health, counted, now, policy, .. } = *situation;
    // A run that nobody knows is adopted before it is asked; and before its first answer nobody can have sent it a build.
    if record.incarnation.as_deref() != Some(incarnation) {
        return Plan::step(Phase::Starting, Step::AdoptInstance, reason);
    }
    match counted.filter(|counted| counted.holds_until(now) > now) {
        _ if situation.unborn => Plan::step(phase, Step::StopInstance(Stop::Graceful), reason),
        Some(Counted { builds: 0, .. }) => Plan::step(phase, Step::StopInstance(Stop::Graceful), reason),
        Some(counted) => {
            let reason = Reason::ActiveBuilds { builds: counted.builds };
            Plan::rest(Phase::Warm, reason, Some(counted.holds_until(now)))
        }
        None if health.is_silent() && health.due(now, &policy.health) > now => {
            Plan::rest(Phase::Warm, Reason::NotAnswering, Some(health.due(now, &policy.health)))
        }
        None => Plan::step(phase, Step::CountBuilds, reason),
    }
}

/// Rule 1: the instance, then the cache, then (by the worker) the record.
fn remove(situation: &Situation<'_>, reason: Reason) -> Plan {
    let Situation { record, observed, .. } = *situation;
    let derived = record.key.role().is_derived();
    let reason = if derived { Reason::Reaped } else { reason };
    let step = match (&observed.instance, &observed.volume) {
        // Somebody else started it: nothing routes to it.
        (InstanceSeen::Running { .. }, _) => Some(Step::StopInstance(Stop::Graceful)),
        (InstanceSeen::Stopped { .. } | InstanceSeen::HalfMade { .. }, _) => Some(Step::DestroyInstance),
        (InstanceSeen::Absent, VolumeSeen::Ready) if derived => Some(Step::DestroyVolume),
        (InstanceSeen::Absent, VolumeSeen::Ready) => Some(Step::Discard),
        (InstanceSeen::Absent, VolumeSeen::Absent | VolumeSeen::Foreign { .. }) => None,
    };
    Plan { phase: Phase::Removing, step, reason, look_again: None }
}

/// The phase of a project whose instance does not run.
fn resting(situation: &Situation<'_>) -> Phase {
    let Situation { record, observed, .. } = *situation;
    match (&record.phase, &observed.instance, &observed.volume) {
        // A failure stays visible until the next request tries again.
        (Phase::Failed { .. }, ..) => record.phase.clone(),
        (_, InstanceSeen::Absent, VolumeSeen::Absent) => Phase::Absent,
        _ => Phase::Idle,
    }
}

fn failed(situation: &Situation<'_>, reason: &Reason) -> Phase {
    match &situation.record.phase {
        Phase::Failed { reason } => Phase::Failed { reason: reason.clone() },
        _ => Phase::Failed { reason: reason.to_string() },
    }
}
