//! `kiln-torture`: a real kilnd is killed with SIGKILL at random moments and started again at once, again and again, while
//! routes, builds, releases, renewals, stops, settings and removals go on. What it answered must stay true.
//!
//! ```text
//!            ┌─ routes, polls, renewals, releases ─┐
//!   load ────┼─ builds: gateway, own address, CLI ─┼──▶ kilnd ◀── kill -9, start again (`kilnd`)
//!            └─ stops, settings, removals ─────────┘      │
//!                       │ answers                         │ /v1/projects, processes or instances
//!                       ▼                                 ▼
//!                    `truth` ◀──────── compared ──────▶ `watch`
//! ```
//!
//! | file | |
//! |---|---|
//! | `world.rs` | what all parts share; requests, and whether a cut one had an excuse |
//! | `kilnd.rs` | starting, killing, and when it was down |
//! | `truth.rs` | what was promised, and what a look at kilnd says of it |
//! | `host.rs` | the daemons, as the host has them |
//! | `watch.rs` | the looks while it goes on, and the last one |
//! | `routes.rs` | clients that route, wait, renew and release; an admin who stops and sets |
//! | `builds.rs` | real builds with buildx and with `kiln build` |
//! | `removals.rs` | a project that is removed and comes back out of the trash |
//! | `chance.rs` | randomness from a seed |
//!
//! The moments of the kills come from the seed; what a kill meets does not, because processes are real. So a seed makes a
//! finding likely to come again, not certain. The simulator is for certainty.
//!
//! What must not be here: anything of Kiln's own but its wire format. It sees what a client and an admin see.

mod builds;
mod chance;
mod host;
mod kilnd;
mod removals;
mod routes;
mod truth;
mod watch;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use tokio::task::JoinSet;

use crate::chance::Chance;
use crate::world::World;

/// Kill kilnd at random moments under a mixed load, and look for broken promises.
#[derive(Debug, Parser)]
#[command(name = "kiln-torture", version)]
struct Arguments {
    /// Holds kiln.toml; its state and run directories are below it
    #[arg(long)]
    home: PathBuf,
    #[arg(long)]
    kilnd: PathBuf,
    #[arg(long)]
    kiln: PathBuf,
    #[arg(long)]
    buildx: PathBuf,
    /// A static busybox, which builds are made of
    #[arg(long)]
    busybox: PathBuf,
    /// What kiln.toml says
    #[arg(long, value_enum)]
    runtime: Runtime,
    /// Incus's directory, for runtime incus
    #[arg(long, required_if_eq("runtime", "incus"))]
    incus: Option<PathBuf>,
    #[arg(long, default_value_t = 100)]
    kills: u32,
    /// Seconds that a build over the daemon's own address takes at least
    #[arg(long, default_value_t = 20)]
    build: u32,
    /// `policy.lease_grace` of kiln.toml, in seconds
    #[arg(long, default_value_t = 20)]
    grace: u64,
    /// `policy.idle_window` and `idle_longest` of kiln.toml, in seconds
    #[arg(long, default_value_t = 2)]
    idle: u64,
    /// Of the moments of the kills and of what the load does [default: from the process id]
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Runtime {
    Process,
    Incus,
}

/// Beyond the kills themselves: the end of the builds, and what has to become quiet.
const PATIENCE: Duration = Duration::from_mins(15);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("kiln-torture: cannot start: {error}");
            return ExitCode::from(2);
        }
    };
    runtime.block_on(async {
        let long = PATIENCE + Duration::from_secs(10) * arguments.kills;
        match tokio::time::timeout(long, run(arguments)).await {
            Ok(Ok(true)) => ExitCode::SUCCESS,
            Ok(Ok(false)) => ExitCode::FAILURE,
            Ok(Err(error)) => {
                eprintln!("kiln-torture: {error}");
                ExitCode::from(2)
            }
            Err(_) => {
                eprintln!("kiln-torture: not at its end after {} s", long.as_secs());
                ExitCode::from(2)
            }
        }
    })
}

/// Whether every promise was kept.
async fn run(arguments: Arguments) -> std::io::Result<bool> {
    let seed = arguments.seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("torture ({}): seed: {seed}", name(arguments.runtime));
    let (kills, runtime) = (arguments.kills, arguments.runtime);
    let chance = Chance::of(seed);
    let world = World::new(arguments)?;
    let mut kilnd = kilnd::Kilnd::start(Arc::clone(&world)).await?;

    // Every cache is filled before the first kill, so that what comes later can be held to be warm.
    builds::fill_caches(&world).await?;
    let mut load = JoinSet::new();
    routes::spawn(&world, &chance, &mut load);
    builds::spawn(&world, &chance, &mut load);
    removals::spawn(&world, &chance, &mut load);
    let watcher = tokio::spawn(watch::until_the_end(Arc::clone(&world)));

    builds::under_way(&world).await;
    let mut moments = chance.part("kills");
    for number in 1..=kills {
        // While it starts, or while it works.
        let wait = if moments.one_in(4) { moments.millis(0..200) } else { moments.millis(300..3500) };
        let from_its_start = wait < Duration::from_millis(200);
        kilnd.kill_after(wait, from_its_start).await?;
        if number % 10 == 0 {
            eprintln!("torture: {number} of {kills} kills, {}", world.tally());
        }
    }
    kilnd.await_up().await?;
    world.end_load();
    while let Some(ended) = load.join_next().await {
        if let Err(error) = ended {
            world.violation(format!("a part of the load ended by a fault of its own: {error}"));
        }
    }
    builds::check_caches(&world).await;
    world.end_watch();
    let _ = watcher.await;
    watch::the_end(&world).await;
    let down = kilnd.stop().await?;
    Ok(world.tell(name(runtime), &down))
}

const fn name(runtime: Runtime) -> &'static str {
    match runtime {
        Runtime::Process => "process",
        Runtime::Incus => "incus",
    }
}
