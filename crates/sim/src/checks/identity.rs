//! K1, and the half of K4 that is about daemons: who runs where, and what an answer names.

use std::collections::{BTreeMap, BTreeSet};

use super::Check;
use crate::config::SECOND;
use crate::history::{Cause, Entry, Fact, Incarnation, Lineage, Project, Request};

/// K1: never two daemons on one cache, nor of one project.
#[derive(Default)]
pub(super) struct OneDaemonPerVolume {
    running: BTreeMap<Incarnation, (Project, Lineage)>,
}

impl Check for OneDaemonPerVolume {
    fn name(&self) -> &'static str {
        "K1"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        match entry.fact {
            Fact::Started { project, incarnation, lineage, .. } => {
                let other = self.running.iter().find(|(_, (p, l))| *p == project || *l == lineage);
                if let Some((other, (of, _))) = other {
                    return Err(format!(
                        "{project} was started as {incarnation} while {other} of {of} runs on cache {lineage}"
                    ));
                }
                self.running.insert(incarnation, (project, lineage));
            }
            Fact::Gone { incarnation, .. } => drop(self.running.remove(&incarnation)),
            _ => {}
        }
        Ok(())
    }
}

/// K4: a generation is one daemon for ever, and an answer that says `ready` names one that served.
#[derive(Default)]
pub(super) struct AnAnswerNamesADaemon {
    /// Grows when the project is forgotten: its successor counts anew.
    epochs: BTreeMap<Project, u32>,
    lost: u32,
    numbers: BTreeMap<(Project, u32, u64), Incarnation>,
    served: BTreeSet<Incarnation>,
    /// When kilnd began to stop it, unless somebody forced that or it was wedged.
    stopped: BTreeMap<Incarnation, u64>,
    died: BTreeMap<Incarnation, (u64, Option<u64>)>,
    asked: BTreeMap<Request, u64>,
}

/// How long after a death kilnd may not have heard of it: an event comes late, and a look takes its time.
const HEARD_AFTER: u64 = 30 * SECOND;
/// And how long after the first answer that shows that it never heard.
const NOTICED_AFTER: u64 = 60 * SECOND;

impl AnAnswerNamesADaemon {
    fn epoch(&self, project: Project) -> u32 {
        self.epochs.get(&project).copied().unwrap_or(0) + self.lost
    }

    fn see_answer(&mut self, entry: &Entry, request: Request, project: Project, generation: u64) -> Result<(), String> {
        let Some(incarnation) = self.numbers.get(&(project, self.epoch(project), generation)).copied() else {
            return Err(format!("{project} was answered generation {generation}, which is no daemon's"));
        };
        if !self.served.contains(&incarnation) {
            return Err(format!(
                "{project} was answered generation {generation}, whose daemon {incarnation} never served"
            ));
        }
        if let Some(at) = self.stopped.get(&incarnation) {
            let at = *at as f64 / 1000.0;
            return Err(format!("{project} was answered daemon {incarnation}, whose stop had begun at {at:.3}"));
        }
        let asked = self.asked.get(&request).copied().unwrap_or(entry.at);
        if let Some((died, stale)) = self.died.get_mut(&incarnation) {
            let first = *stale.get_or_insert(entry.at);
            if asked > *died + HEARD_AFTER && asked > first + NOTICED_AFTER {
                return Err(format!(
                    "{project} was answered daemon {incarnation} again and again, which died {} s before",
                    (entry.at - *died) / 1000
                ));
            }
        }
        Ok(())
    }
}

impl Check for AnAnswerNamesADaemon {
    fn name(&self) -> &'static str {
        "K4"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        match entry.fact {
            Fact::DatabaseLost => self.lost += 1,
            Fact::Forgotten { project } => *self.epochs.entry(project).or_default() += 1,
            Fact::Numbered { project, generation, incarnation } => {
                let number = (project, self.epoch(project), generation);
                let before = *self.numbers.entry(number).or_insert(incarnation);
                if before != incarnation {
                    return Err(format!("generation {generation} of {project} was {before} and is {incarnation}"));
                }
            }
            Fact::Serving { incarnation, .. } => drop(self.served.insert(incarnation)),
            Fact::StopBegan { incarnation, force: false, .. } => drop(self.stopped.insert(incarnation, entry.at)),
            // It failed, or was called off: it goes on serving.
            Fact::Questioned { incarnation, answered: true, .. } => drop(self.stopped.remove(&incarnation)),
            Fact::Gone { incarnation, cause: Cause::Crashed | Cause::Rebooted, .. } => {
                self.died.insert(incarnation, (entry.at, None));
            }
            Fact::Asked { request, .. } => drop(self.asked.insert(request, entry.at)),
            Fact::Leased { request, project, ready: Some(generation), .. } => {
                return self.see_answer(entry, request, project, generation);
            }
            _ => {}
        }
        Ok(())
    }
}
