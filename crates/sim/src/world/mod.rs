//! Everything that outlives kilnd: the host, the clock, the clients, and what is on the disk.
//!
//! One [`World`] per schedule, behind a lock that is never contended. Time is the paused clock of the runtime that the
//! present kilnd lives in, added to what its predecessors lived; while none lives, it stands still. What is to happen
//! later waits in `due`, so that an operation can end after the kilnd that asked for it.

mod effects;
mod host;
mod ops;
mod storage;
mod trials;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln::clock::Clock;
use kiln::entropy::{Entropy, NoEntropy};
use kiln::host::InstanceEvent;
use kiln::store::{MemoryDisk, Saved};
use kiln_domain::{BuildSpec, Key, Lease, Timestamp, TokenHash};
use tokio::sync::{Notify, broadcast};
use tokio::time::Instant;

pub(crate) use effects::ModelHost;
pub(crate) use host::{Daemon, Host};
pub(crate) use ops::Late;
use ops::Op;
pub(crate) use storage::OTHERWISE;

use crate::cast::Cast;
use crate::history::{Entry, Fact, History, LeaseId, LeaseRow, Project, Request};
use crate::profile::Profile;
use crate::rng::Rng;

/// Some day in 2026, so that a clock can jump back by years.
const BIRTH: i64 = 1_780_000_000_000;

/// Far more than a crowd of clients and all workers need in a millisecond.
const CIRCLES: u32 = 1_000_000;

/// Handed to everybody who acts in a schedule.
#[derive(Clone)]
pub(crate) struct Sim(Arc<Shared>);

struct Shared {
    world: Mutex<World>,
    /// kilnd has died.
    died: Notify,
    /// Something on the host changed.
    changed: Notify,
    /// Something was put into `due`.
    planned: Notify,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) profile: Profile,
    pub(crate) history: History,
    /// Milliseconds that passed before `lives_since`.
    base: u64,
    lives_since: Option<Instant>,
    /// Of kilnd's clock.
    pub(crate) offset: i64,
    pub(crate) life: u32,
    pub(crate) alive: bool,
    pub(crate) disk: Option<MemoryDisk>,
    pub(crate) disk_full: bool,
    /// Nothing is committed before.
    pub(crate) disk_stalls_until: u64,
    pub(crate) saved: Option<Saved>,
    events: Option<broadcast::Sender<InstanceEvent>>,
    due: BTreeMap<(u64, u64), Due>,
    /// Operations that were under way when kilnd died.
    left_behind: BTreeMap<Key, Option<Op>>,
    /// Whose certificates may have been written when nobody waited for that any more.
    pub(crate) late_files: BTreeSet<Key>,
    /// What the last commit left on the disk.
    pub(crate) rows: BTreeSet<Key>,
    sequence: u64,
    pub(crate) cast: Cast,
    /// Of each project and of each that is derived from one.
    names: Vec<(BuildSpec, Key)>,
    projects: BTreeMap<Key, Project>,
    pub(crate) host: Host,
    lease_ids: BTreeMap<TokenHash, LeaseId>,
    requests: Request,
    connections: u32,
    pub(crate) builds: BTreeMap<u32, Build>,
    build_ids: u32,
    /// Clients with a lease in hand: they outlive kilnd.
    pub(crate) holders: BTreeMap<LeaseId, Holder>,
    /// When the next thing happens from outside.
    pub(crate) next_action: u64,
    pub(crate) no_crowd_until: u64,
    /// Faults of each kind, for the statistics.
    pub(crate) faults: BTreeMap<&'static str, u64>,
    /// Projects that an admin made hot.
    pub(crate) ever_hot: BTreeSet<Project>,
    /// The tail has begun: nothing goes wrong any more.
    pub(crate) quiet: bool,
    /// When kilnd asked for the time last, and how often at that moment.
    asked_for_time: (u64, u32),
}

/// A build that runs in a daemon.
#[derive(Debug, Clone)]
pub(crate) struct Build {
    pub(crate) project: Project,
    pub(crate) incarnation: u64,
    pub(crate) lease: Option<(LeaseId, kiln_domain::LeaseToken)>,
    /// `None`: it was dialled at the daemon's own address.
    pub(crate) connection: Option<u32>,
    pub(crate) ends: u64,
}

/// A client that was given a lease, and what it has in mind.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) project: Project,
    pub(crate) lease: LeaseId,
    pub(crate) token: kiln_domain::LeaseToken,
    pub(crate) gateway: bool,
    /// How long its build takes.
    pub(crate) takes: u64,
    pub(crate) renews: bool,
    pub(crate) completes: Completes,
    /// It goes away in the middle of the build.
    pub(crate) leaves: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completes {
    Once,
    Twice,
    /// The answer does not interest it.
    HangingUp,
    Never,
}

/// What happens later, whoever lives then.
pub(crate) enum Due {
    BuildEnds(u32),
    Serves { project: Project, incarnation: u64 },
    DrainEnds { project: Project, incarnation: u64 },
    Late(Box<Late>),
    Event(InstanceEvent),
    Recovers { project: Project, incarnation: u64 },
    DiskHasRoom,
    LoadFalls,
}

impl Sim {
    pub(crate) fn new(rng: Rng, profile: Profile, history: History) -> Self {
        let cast = Cast { projects: profile.projects };
        let identify = |n: Project| {
            let spec = BuildSpec::new(&format!("github.com/org/repo{}", cast.parent(n)), "", "", "amd64").ok()?;
            let key = cast.key(n, &spec);
            Some((spec, key))
        };
        let names: Vec<(BuildSpec, Key)> = (0..cast.everybody()).filter_map(identify).collect();
        let projects = names.iter().enumerate().map(|(n, (_, key))| (key.clone(), n)).collect();
        let world = World {
            rng,
            profile,
            history,
            base: 0,
            lives_since: None,
            offset: 0,
            life: 0,
            alive: false,
            disk: None,
            disk_full: false,
            disk_stalls_until: 0,
            saved: None,
            events: None,
            due: BTreeMap::new(),
            left_behind: BTreeMap::new(),
            late_files: BTreeSet::new(),
            rows: BTreeSet::new(),
            sequence: 0,
            cast,
            names,
            projects,
            host: Host::default(),
            lease_ids: BTreeMap::new(),
            requests: 0,
            connections: 0,
            builds: BTreeMap::new(),
            build_ids: 0,
            holders: BTreeMap::new(),
            next_action: 0,
            no_crowd_until: 0,
            faults: BTreeMap::new(),
            ever_hot: BTreeSet::new(),
            quiet: false,
            asked_for_time: (0, 0),
        };
        let shared =
            Shared { world: Mutex::new(world), died: Notify::new(), changed: Notify::new(), planned: Notify::new() };
        Self(Arc::new(shared))
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.0.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this life of kilnd still lasts: what is left of a dead one must not act.
    pub(crate) fn lives(&self, life: u32) -> bool {
        let world = self.world();
        world.alive && world.life == life
    }

    /// `kill -9`, this instant.
    pub(crate) fn kill(&self) {
        self.world().die();
        self.0.died.notify_one();
    }

    pub(crate) async fn died(&self) {
        while self.world().alive {
            self.0.died.notified().await;
        }
    }

    pub(crate) async fn planned(&self) {
        self.0.planned.notified().await;
    }

    /// After a change that somebody may wait for.
    pub(crate) fn tell(&self) {
        self.0.changed.notify_waiters();
        self.0.planned.notify_one();
    }
}

impl World {
    pub(crate) fn now(&self) -> u64 {
        let lived = self.lives_since.map_or(0, |since| Instant::now().duration_since(since).as_millis() as u64);
        self.base + lived
    }

    pub(crate) fn wall(&self) -> Timestamp {
        let millis = i64::try_from(self.now()).unwrap_or(i64::MAX);
        Timestamp::from_millis(BIRTH + millis + self.offset)
    }

    pub(crate) fn record(&mut self, fact: Fact) {
        let (at, wall) = (self.now(), self.wall());
        self.history.add(Entry { at, wall, fact });
    }

    pub(crate) fn fault(&mut self, kind: &'static str) {
        *self.faults.entry(kind).or_default() += 1;
        self.record(Fact::Fault(kind));
    }

    /// To be called within the runtime of the new life.
    pub(crate) fn begin_life(&mut self, disk: MemoryDisk, events: broadcast::Sender<InstanceEvent>) -> u32 {
        self.lives_since = Some(Instant::now());
        self.life += 1;
        self.alive = true;
        disk.set_full(self.disk_full);
        self.disk = Some(disk);
        self.events = Some(events);
        self.life
    }

    /// The end of a life: from here on, time stands still for what is left of it.
    pub(crate) fn freeze(&mut self) {
        self.base = self.now();
        self.lives_since = None;
        self.alive = false;
    }

    fn die(&mut self) {
        if !self.alive {
            return;
        }
        self.freeze();
        self.events = None;
        self.saved = self.disk.take().and_then(|disk| disk.crash());
        self.record(Fact::KilndDied);
        *self.faults.entry("kilnd died").or_default() += 1;
        // The gateway is part of kilnd: what went through it is cut.
        let through: Vec<u32> =
            self.builds.iter().filter(|(_, build)| build.connection.is_some()).map(|(id, _)| *id).collect();
        for id in through {
            self.end_build(id, true);
        }
    }

    /// Time passes while no kilnd lives.
    pub(crate) fn rest(&mut self, millis: u64) {
        let until = self.base + millis;
        while let Some((at, due)) = self.next_due(until) {
            self.base = self.base.max(at);
            self.happen(due);
        }
        self.base = until;
    }

    pub(crate) fn later(&mut self, after: u64, due: Due) {
        self.sequence += 1;
        self.due.insert((self.now() + after, self.sequence), due);
    }

    pub(crate) fn next_due_at(&self) -> Option<u64> {
        self.due.keys().next().map(|(at, _)| *at)
    }

    pub(crate) fn next_due(&mut self, until: u64) -> Option<(u64, Due)> {
        let first = self.due.first_entry()?;
        let at = first.key().0;
        (at <= until).then(|| (at, first.remove()))
    }

    pub(crate) fn happen(&mut self, due: Due) {
        match due {
            Due::BuildEnds(build) => self.build_is_due(build),
            Due::Serves { project, incarnation } => self.serves(project, incarnation),
            Due::DrainEnds { project, incarnation } => self.drained(project, incarnation),
            Due::Late(late) => self.finish_late(*late),
            Due::Event(event) => self.deliver(&event),
            Due::Recovers { project, incarnation } => self.recovers(project, incarnation),
            Due::DiskHasRoom => {
                self.record(Fact::Fault("disk has room"));
                self.set_disk_full(false);
            }
            Due::LoadFalls => self.host.load = kiln_domain::admission::HostLoad::default(),
        }
    }

    /// Nobody may be listening.
    fn deliver(&self, event: &InstanceEvent) {
        if let Some(events) = &self.events {
            let _ = events.send(event.clone());
        }
    }

    /// A worker that asks for the time again and again while none passes will do so for ever.
    fn notice_circles(&mut self) {
        let now = self.now();
        if self.asked_for_time.0 == now {
            self.asked_for_time.1 += 1;
        } else {
            self.asked_for_time = (now, 0);
        }
        assert!(self.asked_for_time.1 < CIRCLES, "a worker turns in circles");
    }

    // === Names

    /// A key of the schedule's: there are no others.
    pub(crate) fn project(&self, key: &Key) -> Project {
        self.projects.get(key).copied().unwrap_or(usize::MAX)
    }

    pub(crate) fn key(&self, project: Project) -> Key {
        self.names[project].1.clone()
    }

    pub(crate) fn spec(&self, project: Project) -> BuildSpec {
        self.names[project].0.clone()
    }

    pub(crate) fn lease_id(&mut self, token: &TokenHash) -> LeaseId {
        let next = self.lease_ids.len() as LeaseId;
        *self.lease_ids.entry(token.clone()).or_insert(next)
    }

    pub(crate) fn row(&mut self, key: &Key, lease: &Lease) -> LeaseRow {
        LeaseRow {
            lease: self.lease_id(&lease.token),
            project: self.project(key),
            created: lease.created,
            renewed: lease.renewed,
            expires: lease.expires,
        }
    }

    pub(crate) const fn next_request(&mut self) -> Request {
        self.requests += 1;
        self.requests
    }

    pub(crate) const fn next_connection(&mut self) -> u32 {
        self.connections += 1;
        self.connections
    }
}

impl Clock for Sim {
    fn now(&self) -> Timestamp {
        let mut world = self.world();
        world.notice_circles();
        world.wall()
    }
}

impl Entropy for Sim {
    fn token(&self) -> Result<[u8; 8], NoEntropy> {
        Ok(self.world().rng.next().to_be_bytes())
    }
}
