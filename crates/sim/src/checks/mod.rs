//! The invariants, each as code over the history.
//!
//! A checker sees every entry in its order, keeps what it needs, and answers with words as soon as its invariant is
//! broken. It trusts nothing that kilnd says of itself but what a client could hold it to: answers that arrived, and rows
//! that were on the disk.

use crate::cast::Cast;
use crate::history::{Entry, Fact};
use crate::profile::Profile;

mod builds;
mod caches;
mod eviction;
mod forks;
mod identity;
mod leases;
mod past;
mod requests;
mod rescue;
mod steady;
mod wishes;

pub(crate) struct Checks(Vec<Box<dyn Check + Send>>);

pub(crate) trait Check {
    /// As the design calls it.
    fn name(&self) -> &'static str;

    fn see(&mut self, entry: &Entry) -> Result<(), String>;
}

impl Checks {
    pub(crate) fn new(profile: &Profile) -> Self {
        let cast = Cast { projects: profile.projects };
        let mut checks: Vec<Box<dyn Check + Send>> = vec![
            Box::new(identity::OneDaemonPerVolume::default()),
            Box::new(builds::NoBuildIsCut::new(cast)),
            Box::new(caches::NoCacheIsLost::new(cast)),
            Box::new(leases::AnAnswerIsAPromise::new(cast)),
            Box::new(identity::AnAnswerNamesADaemon::default()),
            Box::new(caches::TheHostIsTheTruth::new(cast)),
            Box::new(requests::AHangUpHarmsNobody::new(profile.calm)),
            Box::new(requests::EveryWaitEnds::default()),
            Box::new(forks::CopiesAreKeptApart::new(cast, profile.forks, profile.fan_out)),
            Box::new(past::ThePastIsTrue::default()),
            Box::new(eviction::WhatIsWorthLeastGoes::new(cast)),
            Box::new(rescue::RescueServesWhoWaits::new(profile.op_faults == 0)),
        ];
        if !profile.isolates {
            checks.push(Box::new(requests::UntrustedIsRefused::default()));
        }
        Self(checks)
    }

    pub(crate) fn see(&mut self, entry: &Entry) -> Result<(), (&'static str, String)> {
        if let Fact::Wrong { invariant, why } = &entry.fact {
            return Err((invariant, why.clone()));
        }
        self.0.iter_mut().try_for_each(|check| check.see(entry).map_err(|why| (check.name(), why)))
    }
}
