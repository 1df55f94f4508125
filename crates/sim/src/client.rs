//! Clients: they route, wait, hang up, build through the gateway or at the daemon's own address, renew, complete, and
//! forget to. One that holds a lease outlives kilnd and goes on with the next.

use std::time::Duration;

use kiln::gateway::{Directory as _, Door, NoDoor};
use kiln::projects::{RenewError, RouteError, RouteOptions, Routed};
use kiln_domain::{LeaseToken, TokenHash};
use tokio::time::sleep;

use crate::config::SECOND;
use crate::history::{Change, Ending, Fact, LeaseId, LeaseRow, Project, Request, Verb};
use crate::life::Life;
use crate::world::{Completes, Holder};

/// How a client asks for a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Wait,
    /// With so much patience for the first answer and for each poll.
    Poll(u64),
}

pub(crate) fn good_or<E: std::fmt::Display>(outcome: Result<(), E>) -> Ending {
    match outcome {
        Ok(()) => Ending::Good,
        Err(error) => Ending::Bad(error.to_string()),
    }
}

impl Life {
    pub(crate) fn record(&self, fact: Fact) {
        self.sim.world().record(fact);
    }

    /// Ends here for what a dead kilnd has left behind.
    pub(crate) async fn go_on(&self) {
        if !self.sim.lives(self.number) {
            std::future::pending::<()>().await;
        }
    }

    pub(crate) async fn pause(&self, millis: u64) {
        sleep(Duration::from_millis(millis)).await;
        self.go_on().await;
    }

    /// Somebody asks, and hangs up after `patience`. `None`: it did.
    pub(crate) async fn ask<T>(
        &self,
        verb: Verb,
        project: Project,
        patience: Option<u64>,
        work: impl Future<Output = T>,
    ) -> Option<(Request, T)> {
        // Nobody asks a dead kilnd.
        self.go_on().await;
        let request = self.sim.world().next_request();
        self.record(Fact::Asked { request, verb, project });
        let bored = async {
            match patience {
                Some(millis) => sleep(Duration::from_millis(millis)).await,
                None => std::future::pending().await,
            }
        };
        let answer = tokio::select! {
            biased;
            answer = work => Some(answer),
            () = bored => None,
        };
        self.go_on().await;
        if answer.is_none() {
            self.record(Fact::HungUp { request });
        }
        answer.map(|answer| (request, answer))
    }

    pub(crate) fn ended(&self, request: Request, ending: Ending) {
        self.record(Fact::Ended { request, ending });
    }

    // === Routes

    /// A whole client. `wish` is what it does with the lease, if it gets one.
    pub(crate) async fn client(self, way: Way, patience: Option<u64>, answer_lost: bool, wish: Holder) {
        let project = wish.project;
        let spec = self.spec(project);
        let (verb, wait) = match way {
            Way::Wait => (Verb::Route, None),
            Way::Poll(wait) => (Verb::RouteOrLease { wait }, Some(Duration::from_millis(wait))),
        };
        let options = RouteOptions { caller: self.caller(project), wait, ..RouteOptions::default() };
        let asked = self.ask(verb, project, patience, self.projects.route(spec, options)).await;
        let Some((request, answer)) = asked else { return };
        let routed = match answer {
            Ok(routed) => routed,
            Err(error) => return self.ended(request, Ending::Bad(error.to_string())),
        };
        let Some((mut holder, ready)) = self.take(request, routed, answer_lost, wish).await else { return };
        if !ready && !self.poll_until_ready(&mut holder, way).await {
            // It gives up, and does not care to say so.
            self.sim.world().holders.remove(&holder.lease);
            return;
        }
        self.use_lease(holder).await;
    }

    /// The answer arrives, or is lost on its way. Whether the daemon was ready comes along.
    pub(crate) async fn take(
        &self,
        request: Request,
        routed: Routed,
        lost: bool,
        wish: Holder,
    ) -> Option<(Holder, bool)> {
        let response = routed.response();
        let token: LeaseToken = response.build_id.as_deref().and_then(|text| text.parse().ok())?;
        let row = self.row(&token.hash()).await;
        let ready = response.ready.then_some(response.generation);
        let project = self.sim.world().project(&response.key);
        let cast = self.sim.world().cast;
        if project != wish.project && !cast.stands_in(project, wish.project) {
            let why = format!("a build of {} was sent to {project}, {}", wish.project, response.key);
            self.record(Fact::Wrong { invariant: "K7", why });
            return None;
        }
        let wish = Holder { project, ..wish };
        let lease = self.sim.world().lease_id(&token.hash());
        if lost {
            self.record(Fact::Undelivered { request, lease });
            self.record(Fact::HungUp { request });
            drop(routed);
            return None;
        }
        self.record(Fact::Leased { request, lease, project, ready, row });
        routed.delivered();
        self.ended(request, Ending::Good);
        let holder = Holder { lease, token, ..wish };
        self.sim.world().holders.insert(lease, holder.clone());
        Some((holder, ready.is_some()))
    }

    async fn row(&self, token: &TokenHash) -> Option<LeaseRow> {
        let (key, lease) = self.store.lease(token).await.ok().flatten()?;
        Some(self.sim.world().row(&key, &lease))
    }

    /// False: it will not be. The lease may be another afterwards, where a member could not be had.
    async fn poll_until_ready(&self, holder: &mut Holder, way: Way) -> bool {
        let Way::Poll(wait) = way else { return true };
        for _ in 0..30 {
            self.pause(SECOND).await;
            let options = RouteOptions {
                caller: self.caller(holder.project),
                wait: Some(Duration::from_millis(wait)),
                resume: Some(holder.token.clone()),
                ..RouteOptions::default()
            };
            self.record(Fact::Renewed { lease: holder.lease, change: Change::Begun, row: None });
            let poll = self.projects.route(self.spec(holder.project), options);
            let Some((request, answer)) = self.ask(Verb::Poll { wait }, holder.project, None, poll).await else {
                return false;
            };
            match answer {
                Ok(routed) => {
                    let response = routed.response();
                    let (lease, project) = (holder.lease, holder.project);
                    let ready = response.ready.then_some(response.generation);
                    let row = self.row(&holder.token.hash()).await;
                    self.record(Fact::Renewed { lease, change: Change::Done, row });
                    if response.build_id.as_deref() != Some(holder.token.reveal()) {
                        match self.move_on(request, routed, holder).await {
                            Some(true) => return true,
                            Some(false) => continue,
                            None => return false,
                        }
                    }
                    self.record(Fact::Leased { request, lease, project, ready, row });
                    routed.delivered();
                    self.ended(request, Ending::Good);
                    if ready.is_some() {
                        return true;
                    }
                }
                Err(error) => {
                    if matches!(error, RouteError::Gone) {
                        self.record(Fact::Renewed { lease: holder.lease, change: Change::Nothing, row: None });
                    }
                    self.ended(request, Ending::Bad(error.to_string()));
                    if matches!(error, RouteError::Gone) {
                        return false;
                    }
                }
            }
        }
        false
    }

    /// To the lease of an answer that is about another daemon of the project; the one before ends with it. Whether the other is
    /// ready; `None`: it was not right.
    async fn move_on(&self, request: Request, routed: Routed, holder: &mut Holder) -> Option<bool> {
        let before = holder.lease;
        self.record(Fact::Released { lease: before, change: Change::Begun });
        let cast = self.sim.world().cast;
        let project = if cast.is_member(holder.project) { cast.parent(holder.project) } else { holder.project };
        let (taken, ready) = self.take(request, routed, false, Holder { project, ..holder.clone() }).await?;
        self.sim.world().holders.remove(&before);
        *holder = taken;
        Some(ready)
    }

    // === Builds

    /// From the lease to its end, also one that another kilnd gave.
    pub(crate) async fn use_lease(&self, holder: Holder) {
        let wait = self.sim.world().rng.between(0, 1500);
        self.pause(wait).await;
        let done =
            if holder.gateway { self.build_through_gateway(&holder).await } else { self.build_direct(&holder).await };
        if done && holder.completes != Completes::Never {
            self.complete(&holder).await;
        }
        self.sim.world().holders.remove(&holder.lease);
    }

    /// False: the client has gone away without a word.
    async fn build_direct(&self, holder: &Holder) -> bool {
        let running = {
            let world = self.sim.world();
            let of_it =
                world.builds.iter().find(|(_, build)| build.lease.as_ref().is_some_and(|(id, _)| *id == holder.lease));
            of_it.map(|(id, _)| *id)
        };
        if let Some(build) = running {
            return self.watch(build, holder).await;
        }
        for _ in 0..4 {
            let lease = Some((holder.lease, holder.token.clone()));
            let begun = self.sim.world().begin_build(holder.project, lease, None, holder.takes);
            self.sim.tell();
            match begun {
                Some(build) => return self.watch(build, holder).await,
                None => self.pause(3 * SECOND).await,
            }
        }
        true
    }

    async fn build_through_gateway(&self, holder: &Holder) -> bool {
        for _ in 0..3 {
            let Some((connection, door)) = self.open(holder.project, None).await else {
                self.pause(2 * SECOND).await;
                continue;
            };
            let lease = Some((holder.lease, holder.token.clone()));
            let begun = self.dial(holder.project, lease, connection, holder.takes).await;
            let stays = match begun {
                Some(build) => self.watch(build, holder).await,
                None => true,
            };
            self.close(holder.project, connection, door);
            if begun.is_some() || !stays {
                return stays;
            }
            self.pause(SECOND).await;
        }
        true
    }

    /// What `docker buildx` does that was given the gateway's name and nothing else.
    pub(crate) async fn plain_gateway(self, project: Project, patience: Option<u64>, takes: u64) {
        let Some((connection, door)) = self.open(project, patience).await else { return };
        if let Some(build) = self.dial(project, None, connection, takes).await {
            while self.sim.world().builds.contains_key(&build) {
                self.pause(SECOND).await;
            }
        }
        self.close(project, connection, door);
    }

    async fn open(&self, project: Project, patience: Option<u64>) -> Option<(u32, Door)> {
        let key = self.key(project);
        let (request, answer) = self.ask(Verb::Connect, project, patience, self.projects.open(&key)).await?;
        match answer {
            Ok(door) => {
                let connection = self.sim.world().next_connection();
                self.record(Fact::Opened { connection, project });
                self.ended(request, Ending::Good);
                Some((connection, door))
            }
            // A project that nobody has routed to yet.
            Err(NoDoor::Unknown) => {
                self.ended(request, Ending::Bad("unknown".to_owned()));
                None
            }
            Err(error) => {
                self.ended(request, Ending::Bad(error.to_string()));
                None
            }
        }
    }

    fn close(&self, project: Project, connection: u32, door: Door) {
        self.record(Fact::Closed { connection, project });
        drop(door);
    }

    /// As the gateway dials: twice, and then it says so.
    async fn dial(
        &self,
        project: Project,
        lease: Option<(LeaseId, LeaseToken)>,
        connection: u32,
        takes: u64,
    ) -> Option<u32> {
        for _ in 0..2 {
            let begun = self.sim.world().begin_build(project, lease.clone(), Some(connection), takes);
            self.sim.tell();
            if begun.is_some() {
                return begun;
            }
            self.pause(200).await;
        }
        self.projects.unreachable(&self.key(project));
        None
    }

    /// Until the build is over. False: its client goes away first.
    async fn watch(&self, build: u32, holder: &Holder) -> bool {
        let mut renewed = self.sim.world().now();
        let half = holder.takes / 2;
        let began = renewed;
        loop {
            let (now, ends) = {
                let world = self.sim.world();
                let Some(build) = world.builds.get(&build) else { return true };
                (world.now(), build.ends)
            };
            if holder.leaves && now >= began + half {
                self.sim.world().holders.remove(&holder.lease);
                self.sim.world().end_build(build, false);
                self.sim.tell();
                return false;
            }
            if holder.renews && now >= renewed + 40 * SECOND {
                renewed = now;
                self.renew(holder).await;
            }
            self.pause((ends.saturating_sub(now)).clamp(1, 5 * SECOND)).await;
        }
    }

    async fn renew(&self, holder: &Holder) {
        let lease = holder.lease;
        self.record(Fact::Renewed { lease, change: Change::Begun, row: None });
        let asked = self.ask(Verb::Renew, holder.project, None, self.projects.renew(&holder.token)).await;
        let Some((request, answer)) = asked else { return };
        let change = match &answer {
            Ok(_) => Change::Done,
            Err(RenewError::Unknown | RenewError::Ended) => Change::Nothing,
            Err(RenewError::Store(_)) => Change::Failed,
        };
        let row = self.row(&holder.token.hash()).await;
        self.record(Fact::Renewed { lease, change, row });
        self.ended(request, good_or(answer.map(drop)));
    }

    async fn complete(&self, holder: &Holder) {
        let patience = (holder.completes == Completes::HangingUp).then_some(1);
        let times = if holder.completes == Completes::Twice { 2 } else { 1 };
        for _ in 0..times {
            for _ in 0..4 {
                match self.complete_once(holder, patience).await {
                    Some(Change::Failed) => self.pause(2 * SECOND).await,
                    _ => break,
                }
            }
        }
    }

    pub(crate) async fn complete_once(&self, holder: &Holder, patience: Option<u64>) -> Option<Change> {
        self.go_on().await;
        let (lease, key) = (holder.lease, self.key(holder.project));
        self.record(Fact::Released { lease, change: Change::Begun });
        let work = self.projects.complete(&key, &holder.token);
        let (request, answer) = self.ask(Verb::Complete, holder.project, patience, work).await?;
        let change = match &answer {
            Ok(true) => Change::Done,
            Ok(false) => Change::Nothing,
            Err(_) => Change::Failed,
        };
        self.record(Fact::Released { lease, change });
        self.ended(request, good_or(answer.map(drop)));
        Some(change)
    }
}
