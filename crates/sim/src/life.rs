//! One life of kilnd: from its start to its death or to the end of the schedule.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kiln::pki::Pki;
use kiln::projects::{Caller, Foundations, Projects};
use kiln::store::{MemoryDisk, Store};
use kiln_domain::{BuildSpec, Key, Phase};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;

use crate::config;
use crate::history::{Fact, Project};
use crate::world::{ModelHost, Sim};

/// What a client or an admin of this life needs.
#[derive(Clone)]
pub(crate) struct Life {
    pub(crate) sim: Sim,
    pub(crate) number: u32,
    pub(crate) projects: Projects,
    pub(crate) store: Store,
}

/// Events that a listener may lag behind: as few as the real runtimes keep, so that lagging is met.
const EVENTS: usize = 64;

/// True: the schedule is over.
pub(crate) fn live(sim: &Sim, pki: &Pki) -> Result<bool, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .map_err(|error| format!("no runtime: {error}"))?;
    let over = runtime.block_on(async {
        let life = Life::begin(sim, pki)?;
        tokio::select! {
            biased;
            () = sim.died() => Ok(false),
            outcome = life.run() => {
                sim.world().freeze();
                outcome.map(|()| true)
            }
        }
    });
    drop(runtime);
    sim.world().settle_left_behind();
    over
}

impl Life {
    fn begin(sim: &Sim, pki: &Pki) -> Result<Self, String> {
        let opened = match sim.world().saved.take() {
            Some(saved) => saved.open(),
            None => Store::in_memory(),
        };
        let (store, disk) = opened.map_err(|error| format!("the database does not open: {error}"))?;
        let events = broadcast::Sender::new(EVENTS);
        let number = sim.world().begin_life(disk.clone(), events.clone());
        let effects = ModelHost { sim: sim.clone(), life: number, events };
        let foundations = Foundations {
            store: store.clone(),
            effects: Arc::new(effects),
            pki: pki.clone(),
            clock: Arc::new(sim.clone()),
            entropy: Arc::new(sim.clone()),
        };
        let config = config::projects(&sim.world().profile);
        let projects = Projects::new(config, foundations);
        tokio::spawn(turn_disk(sim.clone(), number, disk, store.clone()));
        Ok(Self { sim: sim.clone(), number, projects, store })
    }

    async fn run(&self) -> Result<(), String> {
        let rows = self.store.all_leases().await.map_err(|error| format!("the leases cannot be read: {error}"))?;
        let found = self.store.projects().await.map_err(|error| format!("the projects cannot be read: {error}"))?;
        {
            let mut world = self.sim.world();
            let leases = rows.iter().map(|(key, lease)| world.row(key, lease)).collect();
            let going = found.iter().filter(|record| record.phase == Phase::Removing);
            let removing = going.map(|record| world.project(&record.key)).collect();
            let life = self.number;
            world.record(Fact::KilndStarted { life, leases, removing });
        }
        let attending = self.projects.start(CancellationToken::new()).await;
        drop(attending.map_err(|error| format!("kilnd does not start: {error}"))?);
        let known = self.store.projects().await.map_err(|error| format!("the projects cannot be read: {error}"))?;
        {
            let mut world = self.sim.world();
            let projects = known.iter().map(|record| world.project(&record.key)).collect();
            for record in &known {
                world.numbered(record);
            }
            world.record(Fact::KilndReady { projects });
        }
        let holders: Vec<_> = self.sim.world().holders.values().cloned().collect();
        for holder in holders {
            let life = self.clone();
            tokio::spawn(async move { life.use_lease(holder).await });
        }
        self.play().await
    }

    pub(crate) fn spec(&self, project: Project) -> BuildSpec {
        self.sim.world().spec(project)
    }

    /// Who asks for its daemon.
    pub(crate) fn caller(&self, project: Project) -> Caller {
        let cast = self.sim.world().cast;
        Caller { untrusted: cast.is_fork(project), pull_request: cast.pull_request(project), ..Caller::default() }
    }

    pub(crate) fn key(&self, project: Project) -> Key {
        self.sim.world().key(project)
    }
}

/// The disk: it commits what has gathered, some of it, or nothing for a while; and kilnd may die on both sides of it.
async fn turn_disk(sim: Sim, life: u32, disk: MemoryDisk, store: Store) {
    loop {
        disk.some_waiting().await;
        let wait = sim.world().rng.pick(&[0, 1, 1, 2, 4, 20]).unwrap_or(1);
        tokio::time::sleep(Duration::from_millis(wait)).await;
        if !sim.lives(life) {
            return;
        }
        let (stall, first, crash) = {
            let mut world = sim.world();
            let stall = world.disk_stalls_until.saturating_sub(world.now());
            let waiting = disk.waiting() as u64;
            let first = if world.rng.chance(100) { world.rng.between(0, waiting) } else { waiting };
            // Most writes are in no danger: there are many of them.
            let crash = world.rng.chance(200) && world.may_crash_inside();
            (stall, first as usize, crash)
        };
        if stall > 0 {
            tokio::time::sleep(Duration::from_millis(stall)).await;
            continue;
        }
        disk.commit_first(first);
        note_forgotten(&sim, &store).await;
        if crash {
            sim.world().fault("kilnd died in a commit");
            sim.kill();
            return;
        }
    }
}

/// What a commit took the last of: nothing else tells of it.
async fn note_forgotten(sim: &Sim, store: &Store) {
    let Ok(records) = store.projects().await else { return };
    let there: BTreeSet<Key> = records.into_iter().map(|record| record.key).collect();
    let mut world = sim.world();
    let before = std::mem::replace(&mut world.rows, there);
    let gone: Vec<Key> = before.difference(&world.rows).cloned().collect();
    for key in gone {
        let project = world.project(&key);
        world.record(Fact::Forgotten { project });
    }
}
