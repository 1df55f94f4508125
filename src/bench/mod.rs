//! `kiln bench`: what this machine makes of the quality bars.
//!
//! | file | |
//! |---|---|
//! | `route.rs` | warm `/route` with its durable lease, beside a bare `fdatasync` of the same disk |
//! | `load.rs` | the clients of that, as a process of their own, so that the server's CPU time is the server's alone |
//! | `wake.rs` | request to ready of a stopped project, beside the bare start of the same instance |
//! | `scale.rs` | boot, memory, latency and idle cost of a kilnd that knows thousands of projects |
//! | `served.rs` | that kilnd, a process of its own |
//! | `figures.rs` | percentiles, CPU time, the disk |
//!
//! A benchmark brings its own Kiln and needs none that runs. Compare within one run only: machines
//! are noisy.
//!
//! What must not be here: anything a build depends on.

mod figures;
mod load;
mod route;
mod scale;
mod served;
mod wake;

use std::io;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use thiserror::Error;

use crate::config::ConfigError;
use crate::daemon::StartError;

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Warm /route: latency, requests per second and CPU time, with its lease on disk
    Route(route::RouteBench),
    /// Wake of a stopped project, beside the bare start of its instance
    Wake(wake::WakeBench),
    /// Thousands of idle projects: boot, memory, latency and CPU time of a real kilnd
    Scale(scale::ScaleBench),
    /// The clients of `bench route`
    #[command(hide = true)]
    Load(load::Load),
}

#[derive(Debug, Error)]
pub enum BenchError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("cannot open the benchmark's database")]
    Open(#[from] crate::store::OpenError),
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
    #[error(transparent)]
    Pki(#[from] crate::pki::PkiError),
    #[error(transparent)]
    Listen(#[from] crate::api::ListenError),
    #[error(transparent)]
    Route(#[from] crate::projects::RouteError),
    #[error(transparent)]
    Stop(#[from] crate::projects::VerbError),
    #[error(transparent)]
    Effect(#[from] crate::projects::EffectError),
    #[error("cannot use {path}")]
    Disk {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot {0}")]
    Load(&'static str, #[source] io::Error),
    #[error("the clients of the benchmark failed: {0}")]
    Clients(String),
    #[error("{0}")]
    Unexpected(String),
}

/// Runs one benchmark and prints its figures. Needs a runtime with a thread per core.
pub async fn run(args: &BenchArgs) -> Result<(), BenchError> {
    match &args.what {
        What::Route(bench) => bench.run(args.json).await,
        What::Wake(bench) => bench.run(args.json).await,
        What::Scale(bench) => bench.run(args.json).await,
        What::Load(load) => load.run().await,
    }
}
