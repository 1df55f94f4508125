//! Wake of a stopped project through Kiln, beside the bare start of the same instance and its first `ListWorkers`, taken
//! in turns in one run.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kiln_domain::{BuildSpec, Key, ProjectRecord, Settings, Step};
use serde::Serialize;

use super::BenchError;
use super::figures::{Spread, millis};
use crate::config::{Config, Overrides};
use crate::daemon::{Assembly, assemble};
use crate::projects::{Effects, Projects, RouteOptions};

#[derive(Debug, Args)]
pub(super) struct WakeBench {
    /// A kilnd's configuration whose state directory no kilnd uses
    #[arg(long)]
    config: PathBuf,
    #[arg(long, default_value_t = 10)]
    rounds: usize,
}

#[derive(Debug, Serialize)]
struct Report {
    runtime: &'static str,
    /// The project's volume, files and instance made, and the daemon's first answer.
    first_creation_us: u64,
    kiln_us: Spread,
    bare_us: Spread,
}

impl WakeBench {
    pub(super) async fn run(&self, json: bool) -> Result<(), BenchError> {
        let mut config = Config::load(Some(&self.config), &Overrides::default())?;
        // A worker stays for the next snapshot of its cache, and a clone of one that is tried out is a second daemon.
        config.snapshots.every = Duration::ZERO;
        let Assembly { projects, effects, store, .. } = assemble(&config).await?;
        // Not started: nothing is to listen to what the runtime tells while the bare floor is measured.
        let identity = BuildSpec::new("bench/wake", "", "", "amd64");
        let identity = identity.map_err(|error| BenchError::Unexpected(error.to_string()))?;
        let key = Key::of(&identity);
        let first_creation = route(&projects, &identity).await?;
        let (mut kiln, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            down(&projects, &key).await?;
            kiln.push(route(&projects, &identity).await?);
            down(&projects, &key).await?;
            let record = store.project(&key).await?;
            let record = record.ok_or_else(|| BenchError::Unexpected("the project is gone".to_owned()))?;
            bare.push(start_bare(&*effects, &record, &projects.settings(&record)).await?);
        }
        down(&projects, &key).await?;
        let report = Report {
            runtime: effects.runtime_name(),
            first_creation_us: u64::try_from(first_creation.as_micros()).unwrap_or(u64::MAX),
            kiln_us: Spread::of(kiln),
            bare_us: Spread::of(bare),
        };
        print(&report, json)
    }
}

/// From the request to the answer, which says that `ListWorkers` was answered; then the lease is given back.
async fn route(projects: &Projects, spec: &BuildSpec) -> Result<Duration, BenchError> {
    let start = Instant::now();
    let routed = projects.route(spec.clone(), RouteOptions::default()).await?;
    let elapsed = start.elapsed();
    let answer = routed.response();
    routed.delivered();
    let token = answer.build_id.as_deref().and_then(|token| token.parse().ok());
    let token = token.ok_or_else(|| BenchError::Unexpected("a route without a token".to_owned()))?;
    projects.complete(&answer.key, &token).await?;
    Ok(elapsed)
}

/// Stopped, and its worker gone: nothing of Kiln looks at the instance while it is started behind its back.
async fn down(projects: &Projects, key: &Key) -> Result<(), BenchError> {
    projects.stop(key, false).await?;
    let patience = Instant::now() + Duration::from_secs(10);
    while projects.workers() > 0 {
        if Instant::now() > patience {
            return Err(BenchError::Unexpected("the worker of a stopped project does not go".to_owned()));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// The runtime's own start, and `ListWorkers` until it is answered.
async fn start_bare(
    effects: &dyn Effects,
    record: &ProjectRecord,
    settings: &Settings,
) -> Result<Duration, BenchError> {
    let start = Instant::now();
    effects.perform(Step::StartInstance, record, settings).await?;
    effects.perform(Step::AwaitServing, record, settings).await?;
    Ok(start.elapsed())
}

fn print(report: &Report, json: bool) -> Result<(), BenchError> {
    if json {
        let text = serde_json::to_string_pretty(report);
        println!("{}", text.map_err(|error| BenchError::Unexpected(error.to_string()))?);
        return Ok(());
    }
    let Report { runtime, first_creation_us, kiln_us, bare_us } = report;
    println!("runtime {runtime}: first creation {} ms", millis(*first_creation_us));
    println!("{:>24} {:>9} {:>9} {:>9} {:>9}", "", "min ms", "p50 ms", "p99 ms", "rounds");
    for (name, spread) in [("request to ready", kiln_us), ("bare start to answer", bare_us)] {
        let [min, median, high] = [spread.min, spread.p50, spread.p99].map(millis);
        println!("{name:>24} {min:>9} {median:>9} {high:>9} {:>9}", spread.count);
    }
    let over = kiln_us.p50 as f64 - bare_us.p50 as f64;
    println!("over the floor: {:.2} ms at p50 (bar: 50 ms)", over / 1000.0);
    Ok(())
}
