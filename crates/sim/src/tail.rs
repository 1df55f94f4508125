//! The quiet end of a schedule: nothing goes wrong any more, and everything has to come to rest (K10).

use std::fmt::Write as _;
use std::time::Duration;

use kiln::projects::{RouteError, RouteOptions};
use kiln_domain::Tier;
use kiln_domain::admission::HostLoad;

use crate::config::{MINUTE, SECOND};
use crate::history::{Change, Ending, Fact, Project, Verb};
use crate::life::Life;
use crate::world::{Completes, Daemon, Due, Holder};

/// By then every lease is over, every window closed, every daemon looked at by the hour.
const PATIENCE: u64 = 180 * MINUTE;
const LOOK_EVERY: u64 = 20 * SECOND;

impl Life {
    pub(crate) async fn calm_down(&self) -> Result<(), String> {
        {
            let mut world = self.sim.world();
            world.quiet = true;
            world.set_disk_full(false);
            world.disk_stalls_until = 0;
            world.host.load = HostLoad::default();
            world.storage_calms_down();
            world.host.volumes.retain(|_, volume| !volume.foreign);
            world.later(0, Due::Event(kiln::host::InstanceEvent::Missed));
            world.record(Fact::FaultsEnd);
        }
        self.mend_caches().await;
        self.settle("after the faults").await;
        // What an admin was about to bring back from the trash may be damaged, too.
        if self.is_any_damaged() {
            self.mend_caches().await;
            self.settle("after the last cache was begun anew").await;
        }
        let known = self.store.projects().await.map_err(|error| format!("the projects cannot be read: {error}"))?;
        let projects = known.iter().map(|record| self.sim.world().project(&record.key)).collect();
        self.record(Fact::Rested { projects });
        for project in self.last_builds() {
            if self.failed() {
                return Ok(());
            }
            self.try_out(project).await;
        }
        self.settle("after a last build of each project").await;
        let after = self.sim.world().now();
        self.record(Fact::Settled { after });
        Ok(())
    }

    /// One more of each project, and of a pull request of each. Where what runs cannot be copied, that would be refused now.
    fn last_builds(&self) -> Vec<Project> {
        let mut world = self.sim.world();
        let projects = 0..world.cast.projects;
        if !world.profile.isolates || !world.profile.cheap {
            return projects.collect();
        }
        projects.flat_map(|project| [project, world.some_fork(project)]).collect()
    }

    fn is_any_damaged(&self) -> bool {
        let world = self.sim.world();
        (0..world.cast.projects).any(|project| world.is_damaged(&world.key(project)))
    }

    /// What no daemon opens and Kiln cannot take back by itself is begun anew by an admin, as Kiln tells him to.
    async fn mend_caches(&self) {
        let count = self.sim.world().cast.projects;
        for project in 0..count {
            for _ in 0..5 {
                let key = self.key(project);
                if self.failed() || !self.sim.world().is_damaged(&key) {
                    break;
                }
                let life = self.clone();
                let reset = tokio::spawn(life.see_to_a_cache(Verb::Reset { force: true }, project, None));
                while !reset.is_finished() && !self.failed() {
                    self.pass(SECOND).await;
                }
                self.pass(30 * SECOND).await;
            }
            // One that nobody knows is nobody's to be begun anew.
            self.sim.world().mend(project);
        }
    }

    fn failed(&self) -> bool {
        self.sim.world().history.failure().is_some()
    }

    async fn settle(&self, when: &str) {
        let deadline = self.sim.world().now() + PATIENCE;
        loop {
            let until = self.sim.world().now() + LOOK_EVERY;
            self.pass_time(until).await;
            if self.failed() {
                return;
            }
            let Err(why) = self.at_rest().await else { return };
            if self.sim.world().now() >= deadline {
                let why = format!("three hours {when} it has not come to rest: {why}{}", self.explanations().await);
                self.record(Fact::Wrong { invariant: "K10", why });
                return;
            }
        }
    }

    /// What kilnd itself says of each project that has a worker.
    async fn explanations(&self) -> String {
        let mut all = String::new();
        // Not in the loop's head: the world would stay locked through all of it.
        let count = self.sim.world().cast.everybody();
        for project in 0..count {
            let asked = tokio::time::timeout(Duration::from_secs(20), self.projects.why(&self.key(project))).await;
            if let Ok(Ok((explanation, _))) = asked {
                let _ = write!(all, "; {project} is {}: {}", explanation.headline, explanation.because.join(", "));
            }
        }
        all
    }

    async fn pass(&self, millis: u64) {
        let until = self.sim.world().now() + millis;
        self.pass_time(until).await;
    }

    async fn pass_time(&self, until: u64) {
        while self.sim.world().now() < until && !self.failed() {
            self.let_happen();
            self.wait_for(until).await;
        }
        self.let_happen();
    }

    /// One more build of each: it gets its daemon, and its release is known.
    async fn try_out(&self, project: Project) {
        let wish = Holder {
            completes: Completes::Once,
            leaves: false,
            renews: false,
            takes: SECOND,
            gateway: true,
            ..self.sim.world().wish(project)
        };
        let life = self.clone();
        let route = tokio::spawn(async move {
            let options = RouteOptions { caller: life.caller(project), ..RouteOptions::default() };
            let work = life.projects.route(life.spec(project), options);
            let (request, answer) = life.ask(Verb::Route, project, None, work).await?;
            let routed = match answer {
                Ok(routed) => routed,
                Err(error) => {
                    life.ended(request, Ending::Bad(error.to_string()));
                    // Those of the projects before have not gone yet.
                    if matches!(error, RouteError::TooManyForks { .. }) {
                        return None;
                    }
                    let why = format!("after the faults a route to {project} failed: {error}");
                    life.record(Fact::Wrong { invariant: "K10", why });
                    return None;
                }
            };
            let token = routed.response().build_id.and_then(|text| text.parse().ok())?;
            let (holder, _) = life.take(request, routed, false, Holder { token, ..wish }).await?;
            if life.complete_once(&holder, None).await != Some(Change::Done) {
                let why = format!("after the faults a build of {project} could not be completed");
                life.record(Fact::Wrong { invariant: "K10", why });
            }
            life.sim.world().holders.remove(&holder.lease);
            Some(())
        });
        let deadline = self.sim.world().now() + 5 * MINUTE;
        while !route.is_finished() && self.sim.world().now() < deadline && !self.failed() {
            let until = self.sim.world().now() + SECOND;
            self.pass_time(until).await;
        }
        if !route.is_finished() && !self.failed() {
            let why = format!("after the faults a route to {project} did not end");
            self.record(Fact::Wrong { invariant: "K10", why });
        }
    }

    /// Nothing is left to do: or what is.
    async fn at_rest(&self) -> Result<(), String> {
        let queue = self.projects.queue();
        if queue.starting + queue.queued > 0 {
            return Err(format!("{queue:?} at the door for starts"));
        }
        let leases = self.store.all_leases().await.map_err(|error| error.to_string())?;
        if let Some((key, lease)) = leases.first() {
            return Err(format!("a lease of {} is still there: {lease:?}", self.sim.world().project(key)));
        }
        let records = self.store.projects().await.map_err(|error| error.to_string())?;
        let (mut hot, mut up) = (0, 0);
        self.sim.world().nothing_derived_is_left()?;
        self.sim.world().storage_has_room()?;
        for record in &records {
            let project = self.sim.world().project(&record.key);
            if record.key.role().is_derived() {
                return Err(format!("{project}, which is only a copy, is still known: {}", record.phase));
            }
            let is_hot = record.settings.tier == Some(Tier::Hot);
            let (runs, answers, current) = {
                let world = self.sim.world();
                let daemon = world.daemon(project);
                let image = world.host.instances.get(&record.key).is_none_or(|i| i.image == world.host.image);
                (daemon.is_some(), daemon.is_some_and(Daemon::answers), image)
            };
            hot += usize::from(is_hot);
            up += usize::from(runs);
            match (is_hot, runs) {
                (true, _) if !answers => return Err(format!("the hot project {project} is not up: {}", record.phase)),
                (true, _) if !current => return Err(format!("the hot project {project} was not rolled")),
                (false, true) => return Err(format!("the idle project {project} is still up: {}", record.phase)),
                _ => {}
            }
            let shown = self.projects.show(&record.key).await.map_err(|error| error.to_string())?;
            if let Some(view) = shown.filter(|view| view.connections > 0) {
                return Err(format!("{} connection(s) are counted at {project}, and none is open", view.connections));
            }
        }
        if queue.running != up {
            return Err(format!("{} daemons are counted, and {up} run", queue.running));
        }
        let workers = self.projects.workers();
        if workers > hot {
            return Err(format!("{workers} workers live, for {hot} hot projects"));
        }
        Ok(())
    }
}
