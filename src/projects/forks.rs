//! How many forks may be at work: a thousand pull requests at once must not fill the host with their daemons, nor the
//! database with their names.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln_domain::Key;
use kiln_domain::cache::ForkBounds;

use super::handle::{Projects, RouteError};

/// Forks whose worker is on its way, and by how many requests: between the count and the worker lies a wait for the disk, in
/// which others count.
#[derive(Debug, Clone, Default)]
pub(super) struct ComingForks(Arc<Mutex<BTreeMap<Key, usize>>>);

impl ComingForks {
    fn state(&self) -> MutexGuard<'_, BTreeMap<Key, usize>> {
        // Counts are whole between any two operations.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kept until the worker is there, or will not be.
#[derive(Debug)]
pub(super) struct PlaceOfFork {
    coming: ComingForks,
    key: Key,
}

impl Drop for PlaceOfFork {
    fn drop(&mut self) {
        let mut coming = self.coming.state();
        if let Some(count) = coming.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                coming.remove(&self.key);
            }
        }
    }
}

impl Projects {
    pub(super) fn place_of_fork(&self, key: &Key) -> Result<PlaceOfFork, RouteError> {
        let mut coming = self.coming.state();
        let workers = self.registry.forks().into_iter();
        let others: BTreeSet<Key> = workers.chain(coming.keys().cloned()).filter(|other| other != key).collect();
        let project = key.project();
        let (own, all) = (others.iter().filter(|other| other.project() == project).count(), others.len());
        let ForkBounds { per_project, on_host } = self.config.forks;
        let (there, limit, of) =
            if own >= per_project { (own, per_project, "of this project") } else { (all, on_host, "here") };
        if there >= limit {
            let text = format!("{there} forks {of} are at work, and {limit} may be: try again when one has ended");
            return Err(RouteError::TooManyForks { text });
        }
        *coming.entry(key.clone()).or_default() += 1;
        drop(coming);
        Ok(PlaceOfFork { coming: self.coming.clone(), key: key.clone() })
    }
}
