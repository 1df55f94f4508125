//! Which of a project's daemons takes a build: [`kiln_domain::cache::fanout`] decides, this counts.
//!
//! What counts are builds that were sent somewhere and have not ended: leases, and requests that are on their way to one. So
//! a burst is spread before any of it has begun. The counts are kept beside the workers, and no request waits for one to be
//! read.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kiln_domain::cache::fanout::{Choice, FanOutPolicy, Load, Reach, choose, least_loaded};
use kiln_domain::{Identity, Key, LeaseToken, Phase, Role};
use tokio::time::Instant;

use super::answer::Routed;
use super::handle::{Caller, Projects, RouteError, not_ready};
use super::messages::{LeftBehind, Renewing, Undelivered};
use super::registry::WorkerHandle;

/// Branches that are remembered; whoever has more begins anew.
const BRANCHES: usize = 4096;

#[derive(Debug, Clone, Default)]
pub(super) struct Spread(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Requests on their way to a lease.
    asking: HashMap<Key, usize>,
    /// Where the last build of a branch went.
    branches: HashMap<(Key, String), u16>,
}

/// A request on its way to a lease; it counts as a build until it has one, or is gone.
#[derive(Debug)]
pub(super) struct Asking {
    spread: Spread,
    key: Key,
}

impl Drop for Asking {
    fn drop(&mut self) {
        let mut state = self.spread.state();
        if let Some(count) = state.asking.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                state.asking.remove(&self.key);
            }
        }
    }
}

impl Spread {
    fn state(&self) -> MutexGuard<'_, State> {
        // Counts are whole between any two operations.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Projects {
    /// Where a build of `identity` goes. Anything but a project itself is where it is.
    pub(super) fn place(&self, identity: Identity, branch: Option<&str>) -> (Identity, Option<Asking>) {
        let policy = self.fan_out(&identity.key);
        if policy.members == 0 || identity.key.role() != Role::Project {
            return (identity, None);
        }
        let project = identity.key.clone();
        let mut state = self.spread.state();
        let (family, others) = self.registry.family(&project);
        // Those of others whose worker is not there yet.
        let of_others = |key: &&Key| matches!(key.role(), Role::Member(_)) && key.project() != project;
        let coming = state.asking.keys().filter(of_others).filter(|key| self.registry.get(key).is_none()).count();
        let loads = self.loads(&state, &project, &family, &policy);
        let sticky = branch.and_then(|branch| state.branches.get(&(project.clone(), branch.to_owned())).copied());
        let is_up = loads.iter().any(|load| load.member == 0 && load.reach == Reach::Up);
        let member = match choose(&loads, sticky, others + coming, &policy) {
            Choice::Use(member) => member,
            Choice::Grow(member) if is_up => member,
            // A copy of a cache whose own daemon is on its way is not there sooner.
            Choice::Grow(_) => least_loaded(&loads, sticky, &policy),
        };
        if let Some(branch) = branch {
            if state.branches.len() >= BRANCHES {
                state.branches.clear();
            }
            state.branches.insert((project, branch.to_owned()), member);
        }
        let identity = if member == 0 { identity } else { Identity::member(identity.spec, member) };
        let asking = self.ask(&mut state, &identity.key);
        drop(state);
        (identity, Some(asking))
    }

    fn ask(&self, state: &mut State, key: &Key) -> Asking {
        *state.asking.entry(key.clone()).or_default() += 1;
        Asking { spread: self.spread.clone(), key: key.clone() }
    }

    /// Where a build goes for which the member `without` could not be had.
    pub(super) fn place_without(&self, without: &Identity) -> Identity {
        let project = without.key.project();
        let (family, _) = self.registry.family(&project);
        let policy = self.fan_out(&project);
        let loads: Vec<Load> = self
            .loads(&self.spread.state(), &project, &family, &policy)
            .into_iter()
            .filter(|load| load.member == 0 || project.clone_number(load.member) != without.key)
            .collect();
        match least_loaded(&loads, None, &policy) {
            0 => Identity::project(without.spec.clone()),
            member => Identity::member(without.spec.clone(), member),
        }
    }

    /// A member that cannot be had is no reason to refuse a build that the others can take.
    pub(super) async fn lease_somewhere(
        &self,
        identity: Identity,
        wait: Option<Duration>,
        caller: &Caller,
    ) -> Result<Routed, RouteError> {
        let (identity, _counted) = self.place(identity, caller.branch.as_deref());
        let (now, is_member) = (Instant::now(), matches!(identity.key.role(), Role::Member(_)));
        let deadline = now + self.config.route_wait;
        let lease = async |identity: &Identity, until: Instant| match wait {
            Some(wait) => self.lease(identity, &caller.who, wait).await,
            None => self.lease_when_ready(identity, &caller.who, until).await,
        };
        // Whoever waits for a member in vain has to have time for another.
        let first = if is_member { now + self.config.route_wait / 2 } else { deadline };
        match lease(&identity, first).await {
            Err(error) if is_member && !matches!(error, RouteError::Closing) => {
                let other = self.place_without(&identity);
                tracing::info!(key = %identity.key, instead = %other.key, %error, "a member cannot take a build");
                lease(&other, deadline).await
            }
            outcome => outcome,
        }
    }

    /// A lease that its client has from an earlier answer.
    pub(super) async fn resume(
        &self,
        identity: &Identity,
        token: LeaseToken,
        patience: Duration,
    ) -> Result<Routed, RouteError> {
        let key = &self.holder_of(identity, &token).await?;
        // Whoever has no lease makes no project by asking for it.
        let worker = self.registry.worker(&self.shared, key, None).await?.ok_or(RouteError::Gone)?;
        let Some(Renewing { lease, renewed: Some(renewed) }) = worker.renew(&token).await else {
            return Err(RouteError::Gone);
        };
        renewed.await?;
        let (addressing, standing) = (self.config.addressing.clone(), worker.standing());
        let routed = Routed {
            addressing,
            key: key.clone(),
            lease: lease.token.clone(),
            token,
            standing,
            credential: None,
            undelivered: Undelivered::nothing(),
            left: None,
        };
        match unless_away(key, &worker, self.stay(&worker, routed, patience)).await {
            Err(error)
                if let Role::Member(number) = key.role()
                    && !matches!(error, RouteError::Closing) =>
            {
                let other = self.place_without(&Identity::member(identity.spec.clone(), number));
                tracing::info!(%key, instead = %other.key, %error, "a build moves on from a member that cannot be had");
                let routed = self.lease(&other, &None, patience).await?;
                let left = LeftBehind { mailbox: worker.mailbox.clone(), token: lease.token };
                Ok(Routed { left: Some(left), ..routed })
            }
            outcome => outcome,
        }
    }

    /// Which of a project's daemons a lease is for.
    async fn holder_of(&self, identity: &Identity, token: &LeaseToken) -> Result<Key, RouteError> {
        if identity.key.role() != Role::Project {
            return Ok(identity.key.clone());
        }
        let (key, _) = self.shared.store.lease(&token.hash()).await?.ok_or(RouteError::Gone)?;
        let own = key.project() == identity.key && matches!(key.role(), Role::Project | Role::Member(_));
        if own { Ok(key) } else { Err(RouteError::Gone) }
    }

    /// Where a copy of a cache costs as much as the cache, there is no fan-out.
    fn fan_out(&self, project: &Key) -> FanOutPolicy {
        let own = self.registry.get(project).and_then(|worker| worker.load.members());
        let members = if self.cheap { own.unwrap_or(self.config.fan_out.members) } else { 0 };
        FanOutPolicy { members, ..self.config.fan_out }
    }

    fn loads(
        &self,
        state: &State,
        project: &Key,
        family: &BTreeMap<Key, WorkerHandle>,
        policy: &FanOutPolicy,
    ) -> Vec<Load> {
        let own = family.iter().map(|(key, worker)| (key, Some(worker)));
        // Those whose worker is not there yet.
        let asked = state.asking.keys().filter(|key| key.project() == *project && !family.contains_key(*key));
        own.chain(asked.map(|key| (key, None)))
            .filter_map(|(key, worker)| {
                let member = match key.role() {
                    Role::Project => 0,
                    Role::Member(number) => number,
                    _ => return None,
                };
                let leases = worker.map_or(0, |worker| worker.load.leases().max(worker.connections.count()));
                let builds = leases + state.asking.get(key).copied().unwrap_or(0);
                // Without builds it decides nothing.
                let pressure = policy.pressure.filter(|_| builds > 0).and_then(|_| self.shared.effects.pressure(key));
                Some(Load { member, builds, reach: worker.map_or(Reach::Coming, reach), pressure })
            })
            .collect()
    }
}

fn reach(worker: &WorkerHandle) -> Reach {
    let status = worker.status.borrow();
    match status.phase {
        Some(Phase::Warm) => Reach::Up,
        // Nobody knows when it gets its place among the starts.
        _ if status.queue.is_some() => Reach::Away,
        None | Some(Phase::Absent | Phase::Provisioning | Phase::Starting | Phase::Rolling) => Reach::Coming,
        Some(Phase::Idle | Phase::Draining | Phase::Removing | Phase::Failed { .. }) => Reach::Away,
    }
}

/// A member that failed, or has to wait for its place among the starts, is not waited for: the others take its builds.
pub(super) async fn unless_away<T>(
    key: &Key,
    worker: &WorkerHandle,
    wait: impl Future<Output = Result<T, RouteError>>,
) -> Result<T, RouteError> {
    if !matches!(key.role(), Role::Member(_)) {
        return wait.await;
    }
    let began = Instant::now();
    tokio::select! {
        biased;
        () = worker.cannot_be_had() => Err(not_ready(worker, began.elapsed())),
        waited = wait => waited,
    }
}
