//! What happens from outside, one thing after the other: clients and admins here, bad luck in `trouble.rs`.

use std::time::Duration;

use kiln::projects::{Caller, RouteOptions};
use kiln_domain::{LeaseToken, SnapshotName, Tier};
use tokio::time::sleep;

use crate::cast::PULL_REQUESTS;
use crate::client::{Way, good_or};
use crate::config::{MINUTE, SECOND};
use crate::history::{Ending, Fact, Project, Verb};
use crate::life::Life;
use crate::profile::Weights;
use crate::world::{Completes, Holder, World};

/// A crowd is let in before the next comes.
const BETWEEN_CROWDS: u64 = 30 * SECOND;

#[derive(Debug, Clone, Copy)]
enum Action {
    Client,
    Admin,
    Daemon,
    Host,
    Outsider,
    Disk,
    Load,
    Clock,
    Crash,
    Database,
    Crowd,
    Fork,
    Past,
    Damage,
    Storage,
}

impl Life {
    /// From here to the end of the schedule; a death of kilnd ends it in between.
    pub(crate) async fn play(&self) -> Result<(), String> {
        loop {
            self.let_happen();
            if self.sim.world().history.failure().is_some() {
                return Ok(());
            }
            let (now, next, left) = {
                let world = self.sim.world();
                (world.now(), world.next_action, world.profile.actions)
            };
            if left == 0 {
                return self.calm_down().await;
            }
            if now >= next {
                self.act();
                self.go_on().await;
                let mut world = self.sim.world();
                world.profile.actions -= 1;
                let gap = world.profile.gap;
                world.next_action = now + world.rng.between(0, gap * 2);
                continue;
            }
            self.wait_for(next).await;
        }
    }

    /// What is due.
    pub(crate) fn let_happen(&self) {
        let mut any = false;
        loop {
            let mut world = self.sim.world();
            let now = world.now();
            let Some((_, due)) = world.next_due(now) else { break };
            world.happen(due);
            any = true;
        }
        if any {
            self.sim.tell();
        }
    }

    /// Until something is due or planned, and at most to `until`.
    pub(crate) async fn wait_for(&self, until: u64) {
        let (now, due) = {
            let world = self.sim.world();
            (world.now(), world.next_due_at())
        };
        let until = due.map_or(until, |due| due.min(until));
        tokio::select! {
            biased;
            () = self.sim.planned() => {}
            () = sleep(Duration::from_millis(until.saturating_sub(now))) => {}
        }
    }

    fn act(&self) {
        let action = {
            let mut world = self.sim.world();
            let Weights {
                clients,
                admin,
                daemons,
                host,
                outsiders,
                disk,
                load,
                clock,
                crash,
                database,
                crowd,
                forks,
                past,
                damage,
                storage,
            } = world.profile.weights;
            let of = [
                (clients, Action::Client),
                (admin, Action::Admin),
                (daemons, Action::Daemon),
                (host, Action::Host),
                (outsiders, Action::Outsider),
                (disk, Action::Disk),
                (load, Action::Load),
                (clock, Action::Clock),
                (crash, Action::Crash),
                (database, Action::Database),
                (crowd, Action::Crowd),
                (forks, Action::Fork),
                (past, Action::Past),
                (damage, Action::Damage),
                (storage, Action::Storage),
            ];
            world.rng.weighted(&of)
        };
        match action {
            Some(Action::Client) | None => self.some_client(),
            Some(Action::Admin) => self.some_verb(),
            Some(Action::Crowd) => self.crowd(),
            Some(Action::Fork) => self.some_fork(),
            Some(Action::Past) => self.some_verb_of_caches(),
            Some(Action::Damage) => self.sim.world().damage_a_cache(),
            Some(Action::Storage) => self.sim.world().use_storage_otherwise(),
            Some(Action::Daemon) => self.sim.world().trouble_with_a_daemon(),
            Some(Action::Host) => {
                let rebooted = self.sim.world().trouble_with_the_host();
                if rebooted {
                    self.crash_if_any_is_left(false);
                }
            }
            Some(Action::Outsider) => self.sim.world().somebody_else(),
            Some(Action::Disk) => self.sim.world().trouble_with_the_disk(),
            Some(Action::Load) => self.sim.world().change_load(),
            Some(Action::Clock) => self.sim.world().jump(),
            Some(Action::Crash) => self.crash_if_any_is_left(false),
            Some(Action::Database) => self.crash_if_any_is_left(true),
        }
        self.sim.tell();
    }

    fn crash_if_any_is_left(&self, without_database: bool) {
        {
            let mut world = self.sim.world();
            if world.profile.crashes == 0 {
                return;
            }
            world.profile.crashes -= 1;
        }
        self.sim.kill();
        if without_database {
            let mut world = self.sim.world();
            world.saved = None;
            world.rows.clear();
            world.fault("database lost");
            world.record(Fact::DatabaseLost);
        }
    }

    // === Clients

    fn some_client(&self) {
        let mut world = self.sim.world();
        let project = world.some_project();
        let wish = world.wish(project);
        let rng = &mut world.rng;
        let patience = rng.chance(150).then(|| rng.pick(&[0, 1, 5, 50, 500, 5000, 20_000]).unwrap_or(0));
        let lost = rng.chance(50);
        let life = self.clone();
        match rng.below(100) {
            0..=54 => drop(tokio::spawn(life.client(Way::Wait, patience, lost, wish))),
            55..=69 => {
                let wait = rng.pick(&[0, 0, 1000, 5000]).unwrap_or(0);
                drop(tokio::spawn(life.client(Way::Poll(wait), patience, lost, wish)));
            }
            70..=79 => drop(tokio::spawn(life.plain_gateway(project, patience, wish.takes))),
            80..=85 => drop(tokio::spawn(life.prewarm(project))),
            86..=89 => {
                // It knows the address from before, and asks nobody.
                let _ = world.begin_build(project, None, None, wish.takes);
            }
            90..=93 if !world.profile.isolates => drop(tokio::spawn(life.untrusted(project))),
            90..=96 => drop(tokio::spawn(life.complete_wrongly(project))),
            _ => drop(tokio::spawn(life.complete_again(project))),
        }
    }

    /// An untrusted build, of a pull request or of nobody in particular.
    fn some_fork(&self) {
        let mut world = self.sim.world();
        let parent = world.some_project();
        let life = self.clone();
        if !world.profile.isolates {
            return drop(tokio::spawn(life.untrusted(parent)));
        }
        let project = world.some_fork(parent);
        let wish = world.wish(project);
        let rng = &mut world.rng;
        let patience = rng.chance(150).then(|| rng.pick(&[0, 5, 500, 5000, 20_000]).unwrap_or(0));
        let lost = rng.chance(50);
        match rng.below(10) {
            0..=5 => drop(tokio::spawn(life.client(Way::Wait, patience, lost, wish))),
            6..=7 => {
                let wait = rng.pick(&[0, 1000, 5000]).unwrap_or(0);
                drop(tokio::spawn(life.client(Way::Poll(wait), patience, lost, wish)));
            }
            8 => drop(tokio::spawn(life.plain_gateway(project, patience, wish.takes))),
            _ => drop(tokio::spawn(life.prewarm(project))),
        }
    }

    fn crowd(&self) {
        let (count, project) = {
            let mut world = self.sim.world();
            let now = world.now();
            if now < world.no_crowd_until {
                drop(world);
                return self.some_client();
            }
            world.no_crowd_until = now + BETWEEN_CROWDS;
            (world.profile.crowd, world.some_project())
        };
        for _ in 0..count {
            let mut world = self.sim.world();
            let wish = Holder { takes: world.rng.between(10, 20_000), renews: false, ..world.wish(project) };
            let patience = world.rng.chance(100).then(|| world.rng.between(0, 3000));
            let lost = world.rng.chance(20);
            drop(tokio::spawn(self.clone().client(Way::Wait, patience, lost, wish)));
        }
    }

    async fn prewarm(self, project: Project) {
        let caller = self.caller(project);
        let work = self.projects.prewarm(self.spec(project), &caller);
        let Some((request, answer)) = self.ask(Verb::Prewarm, project, None, work).await else { return };
        self.ended(request, good_or(answer.map(drop)));
    }

    /// To be refused, whatever it asks for.
    async fn untrusted(self, project: Project) {
        let options = RouteOptions { caller: Caller::untrusted(), ..RouteOptions::default() };
        let work = async {
            let routed = self.projects.route(self.spec(project), options).await.map(drop);
            routed.and(self.projects.prewarm(self.spec(project), &Caller::untrusted()).await.map(drop))
        };
        let Some((request, answer)) = self.ask(Verb::Untrusted, project, None, work).await else { return };
        self.ended(request, good_or(answer));
    }

    async fn complete_wrongly(self, project: Project) {
        let token = LeaseToken::from_random(self.sim.world().rng.next().to_be_bytes());
        let key = self.key(project);
        let work = self.projects.complete(&key, &token);
        let Some((request, answer)) = self.ask(Verb::CompleteWrong, project, None, work).await else { return };
        let ending = match answer {
            Ok(false) | Err(_) => Ending::Good,
            Ok(true) => Ending::Bad("a lease was released by a token that nobody was given".to_owned()),
        };
        self.ended(request, ending);
    }

    /// Somebody's lease, in the middle of its build or before: its client changed its mind.
    async fn complete_again(self, project: Project) {
        let holder = {
            let world = self.sim.world();
            world.holders.values().find(|holder| holder.project == project && holder.leaves).cloned()
        };
        if let Some(holder) = holder {
            self.complete_once(&holder, None).await;
        }
    }

    // === Admins

    fn some_verb(&self) {
        let mut world = self.sim.world();
        let mut project = world.some_project();
        let patience = world.rng.chance(100).then(|| world.rng.between(0, 3000));
        let of = [
            (10, Verb::Stop),
            (4, Verb::Force),
            (20, Verb::Set),
            (6, Verb::Remove),
            (5, Verb::Restore),
            (2, Verb::Purge),
            (1, Verb::EmptyTrash),
            (6, Verb::Why),
            (4, Verb::List),
            (2, Verb::Orphans),
            (4, Verb::Adopt),
            (2, Verb::Trash),
        ];
        let verb = world.rng.weighted(&of).unwrap_or(Verb::Why);
        let of_a_fork = matches!(verb, Verb::Stop | Verb::Force | Verb::Remove | Verb::Why);
        if of_a_fork && world.profile.isolates && world.rng.chance(200) {
            project = world.some_fork(project);
        }
        drop(tokio::spawn(self.clone().administer(verb, project, patience)));
    }

    fn some_verb_of_caches(&self) {
        let mut world = self.sim.world();
        let mut project = world.some_project();
        if world.profile.isolates && world.rng.chance(100) {
            project = world.some_fork(project);
        }
        let patience = world.rng.chance(100).then(|| world.rng.between(0, 3000));
        let (force, to) = (world.rng.chance(250), world.some_snapshot(project));
        let of = [
            (30, Verb::Snapshot),
            (20, Verb::Rollback { to, force }),
            (5, Verb::Reset { force }),
            (6, Verb::CacheLog),
            (4, Verb::CacheUsage),
        ];
        let verb = world.rng.weighted(&of).unwrap_or(Verb::CacheLog);
        drop(tokio::spawn(self.clone().see_to_a_cache(verb, project, patience)));
    }

    pub(crate) async fn see_to_a_cache(self, verb: Verb, project: Project, patience: Option<u64>) {
        let (key, projects) = (self.key(project), &self.projects);
        let work = async {
            match verb {
                Verb::Snapshot => projects.snapshot(&key).await.map(|taken| Some(taken.name)),
                Verb::Rollback { to, force } => {
                    projects.rollback(&key, to.map(SnapshotName::new), force).await.map(Some)
                }
                Verb::Reset { force } => projects.reset(&key, force).await.map(|()| None),
                Verb::CacheUsage => projects.cache_usages().await.map(|_| None),
                _ => projects.cache_log(&key).await.map(|_| None),
            }
        };
        let Some((request, answer)) = self.ask(verb, project, patience, work).await else { return };
        if let Ok(Some(name)) = &answer {
            self.record(Fact::Told { request, sequence: name.sequence() });
        }
        self.ended(request, good_or(answer.map(drop)));
    }

    async fn administer(self, verb: Verb, project: Project, patience: Option<u64>) {
        let key = self.key(project);
        let work = async {
            match verb {
                Verb::Stop => self.projects.stop(&key, false).await.map_err(|e| e.to_string()),
                Verb::Force => self.projects.stop(&key, true).await.map_err(|e| e.to_string()),
                Verb::Remove => self.projects.remove(&key).await.map_err(|e| e.to_string()),
                Verb::Set => self.set(project).await,
                Verb::List => self.projects.list().await.map(drop).map_err(|e| e.to_string()),
                Verb::Orphans => self.projects.orphans().await.map(drop).map_err(|e| e.to_string()),
                Verb::Adopt => {
                    self.projects.adopt(None, &format!("live/{key}")).await.map(drop).map_err(|e| e.to_string())
                }
                Verb::Trash => self.projects.trash().await.map(drop).map_err(|e| e.to_string()),
                Verb::EmptyTrash => self.projects.empty_trash().await.map(drop).map_err(|e| e.to_string()),
                Verb::Restore | Verb::Purge => self.with_trash(verb, project).await,
                _ => self.projects.why(&key).await.map(drop).map_err(|e| e.to_string()),
            }
        };
        let Some((request, answer)) = self.ask(verb, project, patience, work).await else { return };
        self.ended(request, good_or(answer));
    }

    async fn set(&self, project: Project) -> Result<(), String> {
        let (which, number) = {
            let mut world = self.sim.world();
            let (which, number) = (world.rng.below(7), world.rng.between(1, 4));
            // As many hot projects as daemons may be up would leave no place for another's build.
            let hot = which == 0 && world.may_be_hot(project);
            if hot {
                world.record(Fact::MadeHot { project });
            }
            (if which == 0 && !hot { 1 } else { which }, number)
        };
        let key = self.key(project);
        let changed = self.projects.set(&key, move |settings| match which {
            0 => (settings.tier, settings.idle_window) = (Some(Tier::Hot), None),
            1 => settings.tier = Some(Tier::Warm),
            2 => settings.tier = None,
            3 => settings.idle_window = Some(Duration::from_secs(number * 20)),
            4 => settings.cpus = Some(number as u32),
            5 => settings.memory_bytes = Some(number << 30),
            _ => settings.volume_bytes = Some(number << 32),
        });
        changed.await.map_err(|error| error.to_string())
    }

    async fn with_trash(&self, verb: Verb, project: Project) -> Result<(), String> {
        let name = {
            let world = self.sim.world();
            let key = world.key(project);
            world.host.trash.keys().find(|name| *name.key() == key).map(ToString::to_string)
        };
        let Some(name) = name else { return Ok(()) };
        if verb == Verb::Restore {
            self.projects.restore(&name).await.map(drop).map_err(|error| error.to_string())
        } else {
            self.projects.purge(&name).await.map(drop).map_err(|error| error.to_string())
        }
    }
}

impl World {
    pub(crate) fn some_project(&mut self) -> Project {
        // Some are more popular than others.
        let count = self.cast.projects as u64;
        let (one, other) = (self.rng.below(count), self.rng.below(count));
        one.min(other) as usize
    }

    pub(crate) fn some_fork(&mut self, of: Project) -> Project {
        let pull_request = self.rng.below(PULL_REQUESTS as u64 + 1) as usize;
        self.cast.fork(of, pull_request)
    }

    /// That an admin could mean; `None`: the newest good one.
    fn some_snapshot(&mut self, project: Project) -> Option<u64> {
        let key = self.key(project);
        let known: Vec<u64> =
            self.host.volumes.get(&key).map_or(Vec::new(), |volume| {
                volume.list().into_iter().map(|snapshot| snapshot.name.sequence()).collect()
            });
        match self.rng.below(10) {
            0..=3 => None,
            4..=8 => self.rng.pick(&known),
            _ => Some(self.rng.between(1, 30)),
        }
    }

    /// Whoever was hot once counts: its marks on the host may still say so.
    fn may_be_hot(&mut self, project: Project) -> bool {
        let room = self.profile.admission.running.saturating_sub(1);
        self.ever_hot.contains(&project) || (self.ever_hot.len() < room && self.ever_hot.insert(project))
    }

    /// What a client means to do.
    pub(crate) fn wish(&mut self, project: Project) -> Holder {
        let rng = &mut self.rng;
        let takes = match rng.below(10) {
            0..=5 => rng.between(100, 20 * SECOND),
            6..=8 => rng.between(20 * SECOND, 3 * MINUTE),
            _ => rng.between(3 * MINUTE, 12 * MINUTE),
        };
        let completes =
            [(60, Completes::Once), (10, Completes::Twice), (10, Completes::HangingUp), (15, Completes::Never)];
        Holder {
            project,
            lease: 0,
            token: LeaseToken::from_random([0; 8]),
            gateway: rng.chance(500),
            takes,
            renews: rng.chance(400),
            completes: rng.weighted(&completes).unwrap_or(Completes::Once),
            leaves: rng.chance(80),
        }
    }
}
