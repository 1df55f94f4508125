//! Clients that route, wait, renew and release, and an admin who stops and sets; no build among them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_wire::{Change, CompleteRequest, LeaseView, ProjectView, Renew, RouteRequest, RouteResponse, SettingsPatch};
use tokio::task::JoinSet;

use crate::chance::Chance;
use crate::truth::Lease;
use crate::world::{Reply, World};

const CLIENTS: usize = 4;
const SHARED: [&str; 3] = ["torture.example/routes/1", "torture.example/routes/2", SET];
const SET: &str = "torture.example/routes/set";

/// A daemon that is not up after so long, with kilnd up, will not come.
const READY: Duration = Duration::from_mins(3);

pub(crate) fn spawn(world: &Arc<World>, chance: &Chance, load: &mut JoinSet<()>) {
    for number in 0..CLIENTS {
        load.spawn(client(Arc::clone(world), chance.part(&format!("client {number}"))));
    }
    load.spawn(hasty(Arc::clone(world), chance.part("hasty")));
    load.spawn(stopper(Arc::clone(world), chance.part("stops")));
    load.spawn(setter(Arc::clone(world), chance.part("settings")));
}

pub(crate) fn request(repo: &str) -> RouteRequest {
    RouteRequest { repo: repo.to_owned(), arch: "amd64".to_owned(), ..RouteRequest::default() }
}

async fn client(world: Arc<World>, mut chance: Chance) {
    while !world.load_ends() {
        let repo = *chance.pick(&SHARED).unwrap_or(&SET);
        let lease = match chance.below(0..10) {
            0..=4 => route(&world, &request(repo)).await.map(|(lease, _)| lease),
            5..=8 => route_and_poll(&world, &request(repo)).await,
            _ => {
                let _ = world.post("/prewarm", &request(repo)).await;
                None
            }
        };
        if let Some(lease) = lease {
            tokio::time::sleep(chance.millis(0..3000)).await;
            if chance.one_in(2) {
                renew(&world, &lease).await;
                tokio::time::sleep(chance.millis(0..3000)).await;
            }
            // Some never say that they are done.
            if chance.one_in(25) {
                world.count("leases left behind");
            } else {
                complete(&world, &lease).await;
            }
        }
        tokio::time::sleep(chance.millis(0..1500)).await;
    }
}

/// One that builds nothing and is back at once, so that there is hardly a moment without a write under way.
async fn hasty(world: Arc<World>, mut chance: Chance) {
    while !world.load_ends() {
        if let Some((lease, _)) = route(&world, &request(SHARED[0])).await {
            complete(&world, &lease).await;
        }
        tokio::time::sleep(chance.millis(1..20)).await;
    }
}

/// Waits in the request, as the reference's clients do. `None`: refused, or the answer was cut.
pub(crate) async fn route(world: &World, request: &RouteRequest) -> Option<(Lease, RouteResponse)> {
    world.truth().asked(&request.repo);
    let start = Instant::now();
    let reply = world.post("/route", request).await;
    taken(world, request, start, &reply)
}

fn taken(world: &World, request: &RouteRequest, start: Instant, reply: &Reply) -> Option<(Lease, RouteResponse)> {
    match reply.status() {
        // Whether there is a lease is not known.
        None => return None,
        Some(200..=299) => {}
        Some(429 | 503) => world.count("routes refused for now"),
        Some(_) => world.violation(format!("a route to {}: {}", request.repo, reply.text())),
    }
    let Some(answer) = reply.json::<RouteResponse>() else {
        world.truth().refused(&request.repo);
        return None;
    };
    world.count("routes");
    let lease = world.truth().answered(&request.repo, start, &answer);
    if lease.is_none() {
        world.violation(format!("a route to {} was answered without a lease", request.repo));
    }
    Some((lease?, answer))
}

/// Asks at once and then again and again, as clients behind a proxy do.
async fn route_and_poll(world: &World, request: &RouteRequest) -> Option<Lease> {
    world.truth().asked(&request.repo);
    let start = Instant::now();
    let reply = world.post("/route?wait=0", request).await;
    let (lease, answer) = taken(world, request, start, &reply)?;
    let mut ready = answer.ready;
    let poll = RouteRequest { build_id: Some(lease.token.clone()), ..request.clone() };
    while !ready {
        let asked = Instant::now();
        let reply = world.post("/route?wait=1", &poll).await;
        world.count("polls");
        match (reply.status(), reply.json::<RouteResponse>()) {
            (_, Some(answer)) => {
                ready = answer.ready;
                world.truth().polled(&lease, asked, &answer);
            }
            (None | Some(429 | 503), _) => {}
            (Some(_), _) => {
                world.violation(format!("a poll for lease {}: {}", lease.id, reply.text()));
                return Some(lease);
            }
        }
        if start.elapsed() > READY {
            world.violation(format!("{} is not ready after {} s of polls", lease.repo, READY.as_secs()));
            return Some(lease);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Some(lease)
}

pub(crate) async fn renew(world: &World, lease: &Lease) {
    let start = Instant::now();
    let reply = world.post(&format!("/v1/leases/{}/renew", lease.id), &Renew { build_id: lease.token.clone() }).await;
    match reply.json::<LeaseView>() {
        Some(view) => {
            world.count("renewals");
            world.truth().renewed(lease, start, view.renewed);
        }
        None if matches!(reply.status(), None | Some(429 | 503)) => {}
        None => world.violation(format!("{}: lease {} is held, its renewal: {}", lease.repo, lease.id, reply.text())),
    }
}

/// Until it is answered.
pub(crate) async fn complete(world: &World, lease: &Lease) {
    world.truth().releasing(lease);
    let request = CompleteRequest { key: lease.key.clone(), build_id: Some(lease.token.clone()) };
    loop {
        let reply = world.post("/complete", &request).await;
        match reply.status() {
            Some(204) => break,
            None | Some(429 | 503) => tokio::time::sleep(Duration::from_millis(100)).await,
            Some(_) => return world.violation(format!("{}: a release: {}", lease.repo, reply.text())),
        }
    }
    world.truth().released(lease);
    world.count("releases");
}

/// An admin who stops whatever comes to hand. A daemon with a lease may not go.
async fn stopper(world: Arc<World>, mut chance: Chance) {
    while !world.load_ends() {
        tokio::time::sleep(chance.millis(300..2500)).await;
        let Some(projects) = world.get("/v1/projects").await.json::<Vec<ProjectView>>() else { continue };
        let Some(project) = chance.pick(&projects) else { continue };
        let held = world.truth().held(&project.repo, world.sure());
        let reply = world.post(&format!("/v1/projects/{}/stop", project.key), &()).await;
        match reply.status() {
            Some(204) => {
                world.count("stops");
                let still = world.truth().held(&project.repo, world.sure());
                if let Some(id) = held.intersection(&still).next() {
                    world.violation(format!("{} was stopped, and lease {id} was held all the time", project.repo));
                }
            }
            Some(409) => world.count("stops refused under a build"),
            // One that was removed meanwhile; or not now.
            None | Some(404 | 429 | 503) => {}
            Some(_) => world.violation(format!("a stop of {}: {}", project.repo, reply.text())),
        }
    }
}

async fn setter(world: Arc<World>, mut chance: Chance) {
    while !world.load_ends() {
        tokio::time::sleep(chance.millis(500..4000)).await;
        let Some(projects) = world.get("/v1/projects").await.json::<Vec<ProjectView>>() else { continue };
        let Some(project) = projects.iter().find(|project| project.repo == SET) else { continue };
        let window = format!("{}s", chance.below(1..4));
        let mut patch = SettingsPatch { idle_window: Change::To(window.clone()), ..SettingsPatch::default() };
        // The size of its volume is in the daemon's configuration, so this rolls it.
        if chance.one_in(3) {
            patch.volume = Change::To(format!("{}GiB", chance.below(2..5)));
        }
        world.truth().setting(SET, &window);
        let reply = world.patch(&format!("/v1/projects/{}/settings", project.key), &patch).await;
        match reply.status() {
            Some(200) => {
                world.truth().set(SET);
                world.count("settings");
            }
            None | Some(429 | 503) => {}
            Some(_) => world.violation(format!("a setting of {SET}: {}", reply.text())),
        }
    }
}
