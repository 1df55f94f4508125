//! Why a project is as it is, in words.
//!
//! The plan says what is done next and by which rule. This adds what a person asks then: since when, until when, what else
//! holds, and what will happen if nothing changes. Pure, so that each answer is a row of a test.

use crate::idle;
use crate::plan::{InstanceSeen, Plan, Reason, Situation};
use crate::project::Phase;
use crate::settings::Tier;
use crate::time::{Timestamp, span};

/// The answer to "why?".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// "warm, because 2 live lease(s)".
    pub headline: String,
    /// What else is known and matters, a sentence each.
    pub because: Vec<String>,
    /// What happens if nothing changes.
    pub next: Option<String>,
}

/// Explains `plan`, which was made of `situation`.
pub fn explain(situation: &Situation<'_>, plan: &Plan) -> Explanation {
    let Situation { record, now, .. } = *situation;
    let headline = match (&record.phase, plan.step) {
        (phase @ Phase::Failed { .. }, None) => format!("{phase}; {}", plan.reason),
        (phase, None) => format!("{}, because {}", phase.name(), plan.reason),
        (phase, Some(step)) => format!("{}, about to {}, because {}", phase.name(), step.name(), plan.reason),
    };
    let mut because = demand(situation);
    because.extend(health(situation));
    because.extend(roll(situation));
    because.extend(setbacks(situation));
    because.push(activity(situation));
    Explanation { headline, because, next: plan.look_again.and_then(|at| next(situation, plan, at, now)) }
}

fn demand(situation: &Situation<'_>) -> Vec<String> {
    let Situation { demand, now, policy, settings, .. } = *situation;
    let mut known = Vec::new();
    let connected = demand.connections > 0;
    for lease in demand.leases {
        let age = span(now.since(lease.created));
        let text = if !lease.is_alive(now, connected, &policy.lease) {
            format!("a lease of {age} ago is no longer used and keeps nothing up")
        } else if connected {
            format!(
                "a lease of {age} ago counts while a connection is open, until {} from now",
                left(now, lease.expires)
            )
        } else {
            let ends = lease.renewed.plus(policy.lease.grace).min(lease.expires);
            format!(
                "a lease of {age} ago counts for another {} unless it is renewed or a connection opens",
                left(now, ends)
            )
        };
        known.push(text);
    }
    if connected {
        known.push(format!("{} connection(s) through the gateway are open", demand.connections));
    }
    if demand.waiters > 0 {
        known.push(format!("{} request(s) wait for the daemon", demand.waiters));
    }
    if settings.tier == Some(Tier::Hot) {
        known.push("the project is hot: it is kept up, and comes up again when it died".to_owned());
    }
    known
}

fn health(situation: &Situation<'_>) -> Option<String> {
    let silence = situation.health.silence()?;
    let text = format!("the daemon left {} call(s) unanswered in {}", silence.probes, span(silence.silent_for));
    Some(format!("{text}; that alone is no fault: it is wedged only if it does no work meanwhile"))
}

fn roll(situation: &Situation<'_>) -> Option<String> {
    let Situation { observed, demand, now, policy, .. } = *situation;
    let what = observed.outdated()?;
    let held = if demand.is_busy(now, policy) {
        "it is replaced when no build needs it".to_owned()
    } else if let Some(until) = demand.roll_held_until(now, policy) {
        format!("a lease that was not released holds that back for another {}", left(now, until))
    } else if demand.waiters > 0 {
        "the requests that wait are served first".to_owned()
    } else if let Some(builds) = situation.counted.map(|counted| counted.builds).filter(|builds| *builds > 0) {
        format!("{builds} build(s) that it tells of hold that back")
    } else {
        "it is replaced now".to_owned()
    };
    Some(format!("the daemon is out of date ({what}); {held}"))
}

fn setbacks(situation: &Situation<'_>) -> Option<String> {
    let Situation { setbacks, now, demand, settings, policy, .. } = *situation;
    let last = setbacks.last.filter(|_| setbacks.count > 0)?;
    let text = format!("{} setback(s) in a row, the last one {} ago", setbacks.count, span(now.since(last)));
    Some(match setbacks.pause_ends(now) {
        Some(ends) if demand.need(settings, now, policy).is_some() => {
            format!("{text}; without a request the next try is in {}", left(now, ends))
        }
        _ => text,
    })
}

fn activity(situation: &Situation<'_>) -> String {
    let Situation { record, settings, now, policy, .. } = *situation;
    let window = span(idle::window(record, settings, now, &policy.idle));
    let builds = record.builds.count(now);
    let origin =
        if settings.idle_window.is_some() { "as set".to_owned() } else { format!("for {builds} build(s) in a day") };
    format!("last activity {} ago; its idle window is {window}, {origin}", span(now.since(record.last_activity)))
}

fn next(situation: &Situation<'_>, plan: &Plan, at: Timestamp, now: Timestamp) -> Option<String> {
    let wait = left(now, at);
    let running = matches!(situation.observed.instance, InstanceSeen::Running { .. });
    Some(match &plan.reason {
        Reason::IdleWindowOpen { closes, .. } if at == *closes => format!("it is stopped in {wait}; its cache stays"),
        Reason::BackingOff { .. } => format!("it is tried again in {wait}, or at once with the next request"),
        Reason::ActiveBuilds { .. } => format!("it is asked again in {wait}"),
        Reason::Refused(_) => format!("it asks for its turn again in {wait}"),
        _ if running => format!("it is looked at again in {wait}"),
        _ => return None,
    })
}

fn left(now: Timestamp, until: Timestamp) -> String {
    span(until.since(now))
}
