//! A project that is removed, and comes back out of the trash with its cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_wire::{ProjectView, Trashed};
use tokio::task::JoinSet;

use crate::builds::{REMOVED, warm_build};
use crate::chance::Chance;
use crate::world::World;

/// For one removal or one return, kills included.
const PATIENCE: Duration = Duration::from_mins(3);

pub(crate) fn spawn(world: &Arc<World>, chance: &Chance, load: &mut JoinSet<()>) {
    load.spawn(again_and_again(Arc::clone(world), chance.part("removals")));
}

async fn again_and_again(world: Arc<World>, mut chance: Chance) {
    let projects = world.get("/v1/projects").await.json::<Vec<ProjectView>>().unwrap_or_default();
    let Some(key) = projects.into_iter().find(|project| project.repo == REMOVED).map(|project| project.key) else {
        return world.violation(format!("{REMOVED} is not among the projects"));
    };
    while !world.load_ends() {
        tokio::time::sleep(chance.millis(200..3000)).await;
        world.truth().forget(REMOVED);
        if !remove(&world, &key).await {
            return;
        }
        tokio::time::sleep(chance.millis(0..500)).await;
        if !restore(&world, &key).await {
            return;
        }
        world.count("removals and returns");
        // Not always: a removal right behind a return is another case.
        if chance.one_in(2) {
            warm_build(&world, REMOVED).await;
        }
    }
}

/// Until the project is gone.
async fn remove(world: &World, key: &str) -> bool {
    let start = Instant::now();
    loop {
        let reply = world.delete(&format!("/v1/projects/{key}")).await;
        match reply.status() {
            Some(204 | 404) => return true,
            // Its last connection may not have been noticed yet, or a connection that was cut.
            None | Some(409 | 429 | 503) if start.elapsed() < PATIENCE => {}
            _ => {
                world.violation(format!("{REMOVED} cannot be removed: {}", reply.text()));
                return false;
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Until the project is there again. Whoever's request was cut sends it again, as it was.
async fn restore(world: &World, key: &str) -> bool {
    let start = Instant::now();
    let (mut said, mut name) = (String::new(), None);
    while start.elapsed() < PATIENCE {
        if world.get(&format!("/v1/projects/{key}")).await.status() == Some(200) {
            return true;
        }
        let Some(trash) = world.get("/v1/trash").await.json::<Vec<Trashed>>() else { continue };
        let mut ours = trash.into_iter().filter(|entry| entry.key.as_deref() == Some(key));
        name = ours.next().map(|entry| entry.name).or(name);
        if ours.next().is_some() {
            world.violation(format!("{REMOVED} is in the trash more than once"));
        }
        if let Some(name) = &name {
            let reply = world.post(&format!("/v1/trash/{name}/restore"), &()).await;
            said = reply.text();
            if !matches!(reply.status(), None | Some(200 | 404 | 409 | 429 | 503)) {
                world.violation(format!("{name} cannot be restored: {said}"));
                return false;
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let orphans = world.get("/v1/orphans").await.text();
    world.violation(format!("{REMOVED} does not come back out of the trash: {said}; orphans: {orphans}"));
    false
}
