//! K2: nothing takes a daemon away from a running build.
//!
//! Protected is a build whose lease is alive by the rules, one whose connection through the gateway is open, and one that
//! the daemon told of, or would have told of had it been asked. Exceptions: an admin's force; a daemon that is wedged, which
//! takes evidence; and what nobody does (crash, reboot).

use std::collections::{BTreeMap, BTreeSet};

use super::Check;
use super::steady::{Life, Steady};
use crate::cast::Cast;
use crate::config::{POLICY, SECOND};
use crate::history::{Change, Entry, Fact, Incarnation, LeaseId, LeaseRow, Project, Request, Verb};

pub(super) struct NoBuildIsCut {
    cast: Cast,
    clock: Steady,
    /// `None`: it was released.
    leases: BTreeMap<LeaseId, Option<Held>>,
    connections: BTreeMap<u32, Project>,
    builds: BTreeMap<u32, Build>,
    daemons: BTreeMap<Incarnation, Known>,
    /// Forced stops that are under way, and those whose asker hung up.
    forcing: BTreeMap<Request, Project>,
    forced: BTreeSet<Project>,
    stopping: BTreeMap<Incarnation, Stopping>,
    /// Daemons in which nothing goes on any more: there is no build left in one to protect.
    dead: BTreeSet<Incarnation>,
    /// Since when each cache is on its way out.
    freeing: BTreeMap<Project, u64>,
}

/// A lease as kilnd has to see it.
struct Held {
    project: Project,
    life: Life,
    /// At the latest.
    born: u64,
    /// When its client began to renew it: the answer comes later.
    renewing: u64,
}

struct Build {
    incarnation: Incarnation,
    began: u64,
}

/// What kilnd can know of a daemon. It forgets that when it dies.
#[derive(Debug, Clone, Default)]
struct Known {
    answered: bool,
    /// Builds that it told of, and when.
    told: Option<(u64, u32)>,
    silence: Option<Silence>,
}

#[derive(Debug, Clone, Copy)]
struct Silence {
    since: u64,
    probes: u32,
    last: u64,
    cpu: Option<u64>,
    /// From when on it did no work.
    idle_since: u64,
}

/// As it stood when the stop began.
struct Stopping {
    at: u64,
    excused: bool,
    known: Known,
}

/// "No builds" is good for the stop that follows at once; and what passes between two entries.
const TOLD_HOLDS: u64 = 6 * SECOND;
const PROBES: u32 = 3;

impl Known {
    fn questioned(&mut self, at: u64, answered: bool, builds: Option<u32>, cpu: Option<u64>) {
        if answered {
            self.answered = true;
            self.silence = None;
        } else {
            let fresh = Silence { since: at, probes: 0, last: at, cpu: None, idle_since: at };
            let silence = self.silence.get_or_insert(fresh);
            silence.probes += 1;
            let idle = match (silence.cpu, cpu) {
                (Some(before), Some(after)) => after.abs_diff(before) <= (at - silence.last) / 50 + 10,
                _ => false,
            };
            if !idle {
                silence.idle_since = at;
            }
            (silence.last, silence.cpu) = (at, cpu);
        }
        if let Some(builds) = builds {
            self.told = Some((at, builds));
        }
    }

    /// Whether what kilnd heard is enough to call it wedged, by a clock that does not jump.
    fn is_wedged(&self, now: u64, connected: bool) -> bool {
        let Some(silence) = self.silence else { return false };
        let health = POLICY.health;
        let enough = if connected { health.wedged_after_connected } else { health.wedged_after };
        let silent = now - silence.since + SECOND;
        let idle = now - silence.idle_since + SECOND >= enough.as_millis() as u64;
        silence.probes >= PROBES && (idle || silent >= health.silent_at_most.as_millis() as u64)
    }
}

impl NoBuildIsCut {
    pub(super) fn new(cast: Cast) -> Self {
        Self {
            cast,
            clock: Steady::default(),
            leases: BTreeMap::new(),
            connections: BTreeMap::new(),
            builds: BTreeMap::new(),
            daemons: BTreeMap::new(),
            forcing: BTreeMap::new(),
            forced: BTreeSet::new(),
            stopping: BTreeMap::new(),
            dead: BTreeSet::new(),
            freeing: BTreeMap::new(),
        }
    }

    fn live_lease(&self, entry: &Entry, project: Project) -> Option<LeaseId> {
        self.live_lease_from_before(entry, project, u64::MAX)
    }

    fn live_lease_from_before(&self, entry: &Entry, project: Project, before: u64) -> Option<LeaseId> {
        let (age, connected) = (self.clock.age(entry), self.is_connected(project));
        let alive = |held: &Held| held.project == project && held.born < before && held.life.is_alive(age, connected);
        self.leases.iter().find(|(_, held)| held.as_ref().is_some_and(alive)).map(|(id, _)| *id)
    }

    fn taken_up(&mut self, entry: &Entry, rows: &[LeaseRow], removing: &[Project]) {
        let age = self.clock.age(entry);
        for row in rows {
            // One that was over when its project began to go does not come to life again.
            if let Some(Some(held)) = self.leases.get_mut(&row.lease)
                && (held.life.is_alive(age, false) || !removing.contains(&row.project))
            {
                held.life.taken_up(entry, age, row);
            }
        }
    }

    /// What is only a copy goes with its project's row, which takes nobody any more: its lease would be one of nothing. A project stays,
    /// and who comes when its cache is on its way out gets an empty one, as a moment later; who was there before is not to lose it.
    fn freed(&self, entry: &Entry, project: Project) -> Result<(), String> {
        let began = self.freeing.get(&project).copied().filter(|_| !self.cast.is_derived(project));
        match self.live_lease_from_before(entry, project, began.unwrap_or(u64::MAX)) {
            Some(lease) => Err(format!("{project} was taken away while lease {lease} is alive")),
            None => Ok(()),
        }
    }

    fn is_connected(&self, project: Project) -> bool {
        self.connections.values().any(|of| *of == project)
    }

    fn is_forced(&self, project: Project) -> bool {
        self.forced.contains(&project) || self.forcing.values().any(|of| *of == project)
    }

    fn stop_begins(
        &mut self,
        entry: &Entry,
        project: Project,
        incarnation: Incarnation,
        force: bool,
    ) -> Result<(), String> {
        let known = self.daemons.get(&incarnation).cloned().unwrap_or_default();
        let connected = self.is_connected(project);
        let excused = force && (self.is_forced(project) || known.is_wedged(self.clock.age(entry), connected));
        let silence = known.silence;
        self.stopping.insert(incarnation, Stopping { at: self.clock.age(entry), excused, known });
        if excused {
            return Ok(());
        }
        let how = if force { "by force, without evidence" } else { "in peace" };
        if let Some(lease) = self.live_lease(entry, project) {
            return Err(format!("{project} is stopped {how} while lease {lease} is alive ({silence:?})"));
        }
        if connected {
            return Err(format!("{project} is stopped {how} while a connection is open ({silence:?})"));
        }
        Ok(())
    }

    fn terminated(
        &mut self,
        project: Project,
        incarnation: Incarnation,
        force: bool,
        phase: &str,
    ) -> Result<(), String> {
        let Some(Stopping { at, excused, known }) = self.stopping.get(&incarnation) else {
            return Err(format!("{project} was stopped, and nobody had begun to"));
        };
        // What is being removed is nobody's any more.
        if *excused || phase == "removing" || self.dead.contains(&incarnation) {
            return Ok(());
        }
        if self.is_connected(project) {
            return Err(format!("{project} was stopped while a connection is open"));
        }
        let of_it = self.builds.iter().filter(|(_, build)| build.incarnation == incarnation);
        for (id, build) in of_it {
            match known.told {
                Some((_, builds)) if builds > 0 => {
                    return Err(format!("{project} was stopped though it had told of {builds} build(s)"));
                }
                Some((told, _)) if build.began < told => {
                    return Err(format!("{project} was stopped with build {id} in it, which it had been asked for"));
                }
                Some((told, _)) if at - told > TOLD_HOLDS => {
                    return Err(format!(
                        "{project} was stopped with build {id} in it, on the word it gave {} s before",
                        (at - told) / 1000
                    ));
                }
                Some(_) => {}
                // One that never answered cannot have been sent a build.
                None if !known.answered && !force => {}
                None => {
                    return Err(format!(
                        "{project} was stopped with build {id} in it, and was not asked (force: {force})"
                    ));
                }
            }
        }
        Ok(())
    }

    fn kilnd_died(&mut self) {
        self.connections.clear();
        self.daemons.clear();
        self.forcing.clear();
        self.forced.clear();
    }
}

impl Check for NoBuildIsCut {
    fn name(&self) -> &'static str {
        "K2"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        self.clock.see(entry);
        match &entry.fact {
            Fact::KilndDied => self.kilnd_died(),
            Fact::DatabaseLost => self.leases.clear(),
            Fact::KilndStarted { leases, removing, .. } => self.taken_up(entry, leases, removing),
            Fact::ClockJumped { .. } => {
                let age = self.clock.age(entry);
                self.leases.values_mut().flatten().for_each(|held| held.life.jumped(entry, age));
            }
            Fact::Leased { request, lease, project, row: Some(row), .. } => {
                let life = self.clock.born(entry, *request, row);
                let born = self.clock.born_at_the_latest(entry, *request, row);
                let held = Held { project: *project, life, born, renewing: self.clock.age(entry) };
                self.leases.entry(*lease).or_insert(Some(held));
            }
            Fact::Renewed { lease, change, .. } => {
                let age = self.clock.age(entry);
                if let Some(Some(held)) = self.leases.get_mut(lease) {
                    match change {
                        Change::Begun => held.renewing = age,
                        Change::Done => held.life.renewed(held.renewing),
                        _ => {}
                    }
                }
            }
            Fact::Released { lease, .. } => drop(self.leases.insert(*lease, None)),
            Fact::Opened { connection, project } => drop(self.connections.insert(*connection, *project)),
            Fact::Closed { connection, .. } => drop(self.connections.remove(connection)),
            Fact::BuildBegan { build, incarnation, .. } => {
                self.builds.insert(*build, Build { incarnation: *incarnation, began: self.clock.age(entry) });
            }
            Fact::BuildEnded { build, .. } => drop(self.builds.remove(build)),
            Fact::Questioned { incarnation, answered, builds, cpu, .. } => {
                let age = self.clock.age(entry);
                self.daemons.entry(*incarnation).or_default().questioned(age, *answered, *builds, *cpu);
            }
            Fact::Hung { incarnation, works: false, .. } => drop(self.dead.insert(*incarnation)),
            Fact::Recovered { incarnation, .. } => drop(self.dead.remove(incarnation)),
            Fact::Asked {
                request,
                verb: Verb::Force | Verb::Rollback { force: true, .. } | Verb::Reset { force: true },
                project,
            } => drop(self.forcing.insert(*request, *project)),
            Fact::FreeBegan { project } => drop(self.freeing.insert(*project, self.clock.age(entry))),
            Fact::Freed { project, .. } => return self.freed(entry, *project),
            Fact::HungUp { request } => {
                if let Some(project) = self.forcing.remove(request) {
                    self.forced.insert(project);
                }
            }
            Fact::Ended { request, .. } => drop(self.forcing.remove(request)),
            Fact::StopBegan { project, incarnation, force, .. } => {
                return self.stop_begins(entry, *project, *incarnation, *force);
            }
            Fact::Terminated { project, incarnation, force, phase } => {
                return self.terminated(*project, *incarnation, *force, phase);
            }
            Fact::Gone { project, incarnation, .. } => {
                self.daemons.remove(incarnation);
                self.stopping.remove(incarnation);
                self.forced.remove(project);
            }
            _ => {}
        }
        Ok(())
    }
}
