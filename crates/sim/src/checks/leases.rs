//! K4: what an answer promised is true for every kilnd that follows.

use std::collections::BTreeMap;

use kiln_domain::Timestamp;

use super::Check;
use super::steady::{Life, Steady};
use crate::cast::Cast;
use crate::history::{Change, Entry, Fact, LeaseId, LeaseRow, Project, Request, Verb};

pub(super) struct AnAnswerIsAPromise {
    cast: Cast,
    leases: BTreeMap<LeaseId, Promise>,
    clock: Steady,
    jumps_back: u32,
}

struct Promise {
    row: LeaseRow,
    life: Life,
    /// It may be gone: its project was to be removed.
    unsure: bool,
    /// It goes with its daemon when its grace is over: that is only a copy.
    passing: bool,
    release: Option<Change>,
    /// When its client began to renew it: by kilnd's clock, before how many leaps back, and how old things were.
    renewal: Option<(Timestamp, u32, u64)>,
}

impl Promise {
    /// Whether it must be there.
    const fn holds(&self, age: u64) -> bool {
        !self.unsure && self.release.is_none() && self.lasts(age)
    }

    const fn lasts(&self, age: u64) -> bool {
        if self.passing { self.life.is_alive(age, false) } else { !self.life.is_over(age) }
    }
}

impl AnAnswerIsAPromise {
    pub(super) fn new(cast: Cast) -> Self {
        Self { cast, leases: BTreeMap::new(), clock: Steady::default(), jumps_back: 0 }
    }

    fn leased(
        &mut self,
        entry: &Entry,
        request: Request,
        (lease, project): (LeaseId, Project),
        row: Option<LeaseRow>,
    ) -> Result<(), String> {
        let (age, known) = (self.clock.age(entry), self.leases.get(&lease));
        let Some(row) = row else {
            let may = known.is_some_and(|promise| !promise.holds(age));
            return if may {
                Ok(())
            } else {
                Err(format!("{project} was answered lease {lease}, which is not on the disk"))
            };
        };
        if row.project != project {
            return Err(format!("lease {lease} was answered for {project} and is written down for {}", row.project));
        }
        if let Some(promise) = known {
            return promise.same(&row);
        }
        let life = self.clock.born(entry, request, &row);
        let passing = self.cast.is_derived(project);
        let promise = Promise { row, life, unsure: false, passing, release: None, renewal: None };
        self.leases.insert(lease, promise);
        Ok(())
    }

    fn restarted(&mut self, entry: &Entry, rows: &[LeaseRow], removing: &[Project]) -> Result<(), String> {
        let age = self.clock.age(entry);
        for (lease, promise) in &mut self.leases {
            let row = rows.iter().find(|row| row.lease == *lease);
            match row {
                None if promise.holds(age) => {
                    return Err(format!("{}'s lease {lease} did not survive the restart", promise.row.project));
                }
                Some(_) if promise.release == Some(Change::Done) => {
                    return Err(format!("{}'s lease {lease} was released and is there again", promise.row.project));
                }
                Some(row) => {
                    promise.same(row)?;
                    // It was over when its project began to go, and goes with it, whatever the clock says now.
                    if promise.lasts(age) || !removing.contains(&row.project) {
                        promise.life.taken_up(entry, age, row);
                    }
                }
                None => {}
            }
        }
        Ok(())
    }

    fn released(&mut self, entry: &Entry, lease: LeaseId, change: Change) -> Result<(), String> {
        let age = self.clock.age(entry);
        let Some(promise) = self.leases.get_mut(&lease) else { return Ok(()) };
        let project = promise.row.project;
        match change {
            Change::Done if promise.release == Some(Change::Done) => {
                return Err(format!("{project}'s lease {lease} was released twice"));
            }
            // Its first release was begun with this very entry's predecessor.
            Change::Nothing if promise.release == Some(Change::Begun) && !promise.unsure && promise.lasts(age) => {
                return Err(format!("{project}'s lease {lease} was not known when it was to be released"));
            }
            _ => {}
        }
        let before = promise.release;
        promise.release = match (before, change) {
            (Some(Change::Done), _) | (Some(Change::Nothing), Change::Failed) => before,
            // A second try: how the first came out is not known.
            (Some(Change::Begun | Change::Failed | Change::Nothing), Change::Begun) => Some(Change::Nothing),
            _ => Some(change),
        };
        Ok(())
    }

    fn renewed(&mut self, entry: &Entry, lease: LeaseId, change: Change, row: Option<LeaseRow>) -> Result<(), String> {
        let (jumps, age) = (self.jumps_back, self.clock.age(entry));
        let Some(promise) = self.leases.get_mut(&lease) else { return Ok(()) };
        let project = promise.row.project;
        match (change, row) {
            (Change::Begun, _) => promise.renewal = Some((entry.wall, jumps, age)),
            (Change::Nothing, _) if promise.holds(age) => {
                return Err(format!("{project}'s lease {lease} was not known when it was to be renewed"));
            }
            (Change::Done, Some(row)) => {
                promise.same(&row)?;
                if let Some((at, then, age)) = promise.renewal.take() {
                    if then == jumps && row.renewed < at {
                        return Err(format!("{project}'s lease {lease} was renewed, and that is not on the disk"));
                    }
                    promise.life.renewed(age);
                }
                promise.row.renewed = row.renewed;
            }
            _ => {}
        }
        Ok(())
    }
}

impl Promise {
    /// Birth and end never change, and a renewal is not taken back.
    fn same(&self, row: &LeaseRow) -> Result<(), String> {
        let Self { row: before, .. } = self;
        if row.created == before.created && row.expires == before.expires && row.renewed >= before.renewed {
            return Ok(());
        }
        Err(format!("{}'s lease {} has other times: {row:?} after {before:?}", before.project, before.lease))
    }
}

impl Check for AnAnswerIsAPromise {
    fn name(&self) -> &'static str {
        "K4"
    }

    fn see(&mut self, entry: &Entry) -> Result<(), String> {
        self.clock.see(entry);
        match &entry.fact {
            Fact::KilndStarted { leases, removing, .. } => return self.restarted(entry, leases, removing),
            Fact::DatabaseLost => self.leases.clear(),
            Fact::ClockJumped { by } => {
                self.jumps_back += u32::from(*by < 0);
                let age = self.clock.age(entry);
                self.leases.values_mut().for_each(|promise| promise.life.jumped(entry, age));
            }
            Fact::Asked { verb: Verb::Remove, project, .. } => {
                for promise in self.leases.values_mut().filter(|promise| promise.row.project == *project) {
                    promise.unsure = true;
                }
            }
            Fact::Leased { request, lease, project, row, .. } => {
                return self.leased(entry, *request, (*lease, *project), *row);
            }
            Fact::Released { lease, change } => return self.released(entry, *lease, *change),
            Fact::Renewed { lease, change, row } => return self.renewed(entry, *lease, *change, *row),
            _ => {}
        }
        Ok(())
    }
}
