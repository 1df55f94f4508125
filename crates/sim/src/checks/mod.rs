//! The invariants, each as code over the history.
//!
//! A checker sees every entry in its order, keeps what it needs, and answers with words as soon as its invariant is
//! broken. It trusts nothing that kilnd says of itself but what a client could hold it to: answers that arrived, and rows
//! that were on the disk.

use crate::history::{Entry, Fact};
use crate::profile::Profile;

mod builds;
mod caches;
mod identity;
mod leases;
mod requests;
mod steady;

pub(crate) struct Checks(Vec<Box<dyn Check + Send>>);

pub(crate) trait Check {
    /// As the design calls it.
    fn name(&self) -> &'static str;

    fn see(&mut self, entry: &Entry) -> Result<(), String>;
}

impl Checks {
    pub(crate) fn new(profile: &Profile) -> Self {
        Self(vec![
            Box::new(identity::OneDaemonPerVolume::default()),
            Box::new(builds::NoBuildIsCut::default()),
            Box::new(caches::NoCacheIsLost::default()),
            Box::new(leases::AnAnswerIsAPromise::default()),
            Box::new(identity::AnAnswerNamesADaemon::default()),
            Box::new(caches::TheHostIsTheTruth::default()),
            Box::new(requests::AHangUpHarmsNobody::new(profile.calm)),
            Box::new(requests::UntrustedIsRefused::default()),
            Box::new(requests::EveryWaitEnds::default()),
        ])
    }

    pub(crate) fn see(&mut self, entry: &Entry) -> Result<(), (&'static str, String)> {
        if let Fact::Wrong { invariant, why } = &entry.fact {
            return Err((invariant, why.clone()));
        }
        self.0.iter_mut().try_for_each(|check| check.see(entry).map_err(|why| (check.name(), why)))
    }
}
