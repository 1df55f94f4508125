//! Looks at kilnd and at the host: while it goes on, and when all is over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_wire::{Orphan, ProjectView, Readiness, Why};

use crate::host::Daemons;
use crate::world::World;

const EVERY: Duration = Duration::from_millis(700);

/// Beyond a lease's grace and an idle window: stops drain, and builds are asked about.
const QUIET: Duration = Duration::from_secs(90);

/// Compares until it is told to end.
pub(crate) async fn until_the_end(world: Arc<World>) {
    // Which run of a daemon a generation was.
    let mut runs = BTreeMap::new();
    while !world.watch_ends() {
        if let Some(first) = look(&world).await {
            let daemons = daemons(&world).await;
            if let (Some(daemons), Some(second)) = (daemons, look(&world).await) {
                compare_runs(&world, &first, &daemons, &second, &mut runs);
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// `None`: it could not be asked.
async fn look(world: &World) -> Option<Vec<ProjectView>> {
    let before = world.truth().before();
    let seen: Vec<ProjectView> = world.get("/v1/projects").await.json()?;
    let wrong = world.truth().compare(&before, &seen, world.sure());
    for text in wrong {
        world.violation(text);
    }
    world.count("looks at all leases, generations and settings");
    Some(seen)
}

async fn daemons(world: &World) -> Option<Daemons> {
    match world.host.daemons().await {
        Ok(daemons) => {
            for (key, runs) in daemons.iter().filter(|(_, runs)| runs.len() > 1) {
                world.violation(format!("{key} has more than one daemon: {}", runs.join(", ")));
            }
            Some(daemons)
        }
        Err(why) => {
            world.violation(format!("the host cannot be looked at: {why}"));
            None
        }
    }
}

/// A generation stands for one run of the daemon, whatever becomes of kilnd.
fn compare_runs(
    world: &World,
    first: &[ProjectView],
    daemons: &Daemons,
    second: &[ProjectView],
    runs: &mut BTreeMap<(String, String, u64), String>,
) {
    for (before, after) in first.iter().filter_map(|b| Some((b, second.iter().find(|a| a.key == b.key)?))) {
        let steady = before.phase == "warm" && after.phase == "warm" && before.generation == after.generation;
        // A project that was removed and came back counts its starts anew.
        let life = (before.key.clone(), before.created.clone(), before.generation);
        let run = daemons.get(&before.key).and_then(|runs| runs.first());
        match run {
            Some(run) if steady && before.created == after.created => {
                let known = runs.entry(life).or_insert_with(|| run.clone());
                if known != run {
                    let generation = before.generation;
                    world.violation(format!("{}: generation {generation} was {known} and is {run}", before.repo));
                }
            }
            _ => {}
        }
    }
}

/// When nobody wants anything any more: everything stops, and nothing is left over.
pub(crate) async fn the_end(world: &World) {
    let _ = look(world).await;
    let deadline = Instant::now() + QUIET + Duration::from_secs(world.arguments.grace + world.arguments.idle);
    let projects = loop {
        let seen = look(world).await.unwrap_or_default();
        let busy: Vec<_> = seen.iter().filter(|project| !matches!(project.phase.as_str(), "idle" | "absent")).collect();
        if busy.is_empty() && !seen.is_empty() {
            break seen;
        }
        if Instant::now() > deadline {
            for project in busy {
                let why: Option<Why> = world.get(&format!("/v1/projects/{}/why", project.key)).await.json();
                let why = why.map(|why| why.headline).unwrap_or_default();
                world.violation(format!("{} does not become idle: {}; {why}", project.repo, project.phase));
            }
            break seen;
        }
        tokio::time::sleep(EVERY).await;
    };
    let orphans = world.get("/v1/orphans").await;
    match orphans.json::<Vec<Orphan>>() {
        None => world.violation(format!("the orphans cannot be listed: {}", orphans.text())),
        Some(orphans) => {
            for Orphan { kind, name, why, .. } in orphans {
                world.violation(format!("an orphan is left: {kind} {name}: {why}"));
            }
        }
    }
    for (key, runs) in daemons(world).await.unwrap_or_default() {
        let repo = projects.iter().find(|project| project.key == key).map_or("no project", |p| p.repo.as_str());
        world.violation(format!("a daemon is left over, of {repo}: {key}, {}", runs.join(", ")));
    }
    if !world.get("/readyz").await.json::<Readiness>().is_some_and(|readiness| readiness.ready) {
        world.violation("kilnd is not ready at the end".to_owned());
    }
    world.count_many("projects", projects.len() as u64);
}
