//! `kilnd`: reads its configuration, puts the parts together, waits for a signal.
//!
//! | file | |
//! |---|---|
//! | `assemble.rs` | from a [`Config`](crate::config::Config) to the parts of a running Kiln |
//! | `descriptors.rs` | how many files may be open at a time |
//! | `logging.rs` | where log lines go |
//!
//! Promises: a configuration that is wrong ends it with exit code 78 before anything is touched; what cannot be had
//! (a port, the database, the runtime) ends it with 1 and a line that says what to do. A log that cannot be
//! written loses lines and ends nothing. SIGTERM and SIGINT close the doors,
//! let open connections drain for a bound, and leave every daemon as it is. SIGHUP changes nothing.
//!
//! What must not be here: decisions about projects.

// They panic where nothing can be written; see `stdio`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod assemble;
mod descriptors;
mod logging;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

pub use assemble::{Assembly, StartError, assemble};
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::api::{self, Api};
use crate::causes;
use crate::config::{Config, Overrides, RuntimeKind};
use crate::host::pressure::{MemoryStalls, PressureFiles};
use crate::metrics::{Level, Metrics};
use crate::stdio;
use crate::store::Store;

/// As in sysexits.h: something is wrong with the configuration.
const EX_CONFIG: u8 = 78;

/// For what blocks a thread when everything else has ended.
const LAST_WORK: Duration = Duration::from_secs(5);

/// Keeps one warm BuildKit daemon per project and routes builds to it.
#[derive(Debug, Parser)]
#[command(name = "kilnd", version)]
struct Arguments {
    /// Configuration file; without it /etc/kiln/kiln.toml is read if it exists.
    #[arg(long, env = "KILN_CONFIG")]
    config: Option<PathBuf>,
    /// Where the database, certificates and volumes are.
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Where sockets and process records are.
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// What runs the daemons.
    #[arg(long, value_enum)]
    runtime: Option<RuntimeKind>,
    /// Fill the database from what is on the host before anything else, damaged rows included. Done by itself when there is none, or when it is
    /// damaged; then the damaged one is kept beside it.
    #[arg(long)]
    rebuild: bool,
    /// Check the configuration and print it with its defaults.
    #[arg(long)]
    check: bool,
}

/// Runs the daemon of this process and returns its exit code.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let overrides =
        Overrides { state_dir: arguments.state_dir, run_dir: arguments.run_dir, runtime: arguments.runtime };
    let config = match Config::load(arguments.config.as_deref(), &overrides) {
        Ok(config) => config,
        Err(error) => {
            complain(&error);
            return ExitCode::from(EX_CONFIG);
        }
    };
    if arguments.check {
        return print_config(&config);
    }
    logging::start();
    descriptors::raise(&config);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&error);
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(run(&config, arguments.rebuild));
    // What still works for a project is dropped here, and with the last of it the store is written and closed. A step
    // that hangs in a file system must not keep a stopped kilnd alive.
    runtime.shutdown_timeout(LAST_WORK);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Until a signal. The daemons are not touched at the end: they outlive Kiln.
async fn run(config: &Config, rebuild: bool) -> Result<(), StartError> {
    let shutdown = CancellationToken::new();
    let signals = (on_signal(SignalKind::terminate())?, on_signal(SignalKind::interrupt())?);
    tokio::spawn(nothing_to_reload(on_signal(SignalKind::hangup())?));
    // Before its ports: they are taken too, and "another kilnd" says more.
    Store::check_free(&config.database())?;
    // What is taken is found out while nothing is made yet. A client that comes now waits in the kernel's queue.
    let gateway_door = bind(config.gateway.listen).await?;
    let (tcp, as_configured) = config.tcp_listen();
    let tcp_door = api::Listener::tcp(tcp).await?;
    api::Listener::check_free(&config.socket())?;
    let Assembly { projects, gateway, store, callers, .. } = assemble(config).await?;
    let doors = vec![api::Listener::unix(&config.socket())?, tcp_door];
    if !as_configured {
        tracing::warn!(configured = %config.api.listen, listening = %tcp,
            "the API has no TLS, so it listens on loopback only: let a proxy on this host stand before it");
    }

    if rebuild {
        projects.rebuild().await.map_err(StartError::Rebuild)?;
    }
    let mut heart = projects.start(shutdown.clone()).await.map_err(StartError::TakeUp)?;
    let metrics = projects.metrics();
    // The gateway has the projects, and they have the metrics: held by these, it and with it the store would never be closed.
    let figures = Arc::downgrade(&gateway);
    metrics.read_gateway(move || figures.upgrade().map(|gateway| gateway.figures()));
    let shown = Arc::clone(&gateway);
    let mut gateway = tokio::spawn(Arc::clone(&gateway).serve(gateway_door, shutdown.clone()));
    let settings = api::Settings {
        route_wait: config.api.route_wait,
        nameless_release: config.compatibility.nameless_complete,
        drain: config.buildkit.drain,
        rates: api::Rates::DEFAULT,
    };
    read_the_host(&metrics, &config.volumes_path());
    if callers.trusts_loopback() {
        tracing::info!(
            "nobody has to prove anything yet: programs of this host may build over {tcp}, and nobody else may; see local.loopback, `kiln token create`, [[identity.issuers]]"
        );
    }
    let api = Api::new(Arc::new(projects), callers, store, metrics, settings).showing(Arc::clone(&shown));
    let mut api = tokio::spawn(api::serve(doors, api, shutdown.clone()));
    tracing::info!(api = %tcp, socket = %config.socket().display(), gateway = %config.gateway.listen,
        runtime = ?config.runtime.kind, "kilnd is ready");

    let (mut terminate, mut interrupt) = signals;
    // A part that ends by itself has panicked: half a Kiln is worse than one that is started again.
    let broken = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        _ = &mut heart => Some("the projects"),
        _ = &mut gateway => Some("the gateway"),
        _ = &mut api => Some("the API"),
    };
    tracing::info!("shutting down: the daemons go on");
    shutdown.cancel();
    // Each ends within a bound of its own; a panic in one is in the log already.
    for part in [heart, gateway, api] {
        if !part.is_finished() {
            let _ = part.await;
        }
    }
    broken.map_or(Ok(()), |part| Err(StartError::Broken { part }))
}

/// What of the host is read when somebody looks at the metrics.
fn read_the_host(metrics: &Metrics, volumes: &Path) {
    let stalls = |pick: fn(MemoryStalls) -> u32| {
        move || PressureFiles::default().read().ok()?.stalls.map(|stalls| f64::from(pick(stalls)) / 10_000.0)
    };
    metrics.read_level(Level::MemoryPressureSome, stalls(|stalls| stalls.some));
    metrics.read_level(Level::MemoryPressureFull, stalls(|stalls| stalls.full));
    let of_volumes = |pick: fn(rustix::fs::StatVfs) -> (u64, u64)| {
        let volumes = volumes.to_owned();
        move || {
            let (left, total) = pick(rustix::fs::statvfs(&volumes).ok()?);
            (total > 0).then(|| 1.0 - left as f64 / total as f64)
        }
    };
    metrics.read_level(Level::VolumeBytesUsed, of_volumes(|stat| (stat.f_bavail, stat.f_blocks)));
    metrics.read_level(Level::VolumeInodesUsed, of_volumes(|stat| (stat.f_favail, stat.f_files)));
}

fn on_signal(kind: SignalKind) -> Result<tokio::signal::unix::Signal, StartError> {
    signal(kind).map_err(StartError::Signal)
}

/// SIGHUP asks a daemon to read its configuration again, and would end one that does not listen to it.
async fn nothing_to_reload(mut hangup: tokio::signal::unix::Signal) {
    while hangup.recv().await.is_some() {
        tracing::warn!("SIGHUP: nothing is read again; restart kilnd to apply a changed configuration");
    }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| StartError::Bind { address, source })
}

fn print_config(config: &Config) -> ExitCode {
    let text = match toml::to_string(config) {
        Ok(text) => text,
        Err(error) => {
            complain(&error);
            return ExitCode::from(EX_CONFIG);
        }
    };
    match stdio::answer(&text) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever stops reading has had enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            complain(&io::Error::new(error.kind(), format!("cannot write to standard output: {error}")));
            ExitCode::FAILURE
        }
    }
}

/// One line on standard error, the causes included.
fn complain(error: &(dyn std::error::Error + 'static)) {
    let text = causes::in_one_line(error);
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    stdio::say(&format!("kilnd: {}", lines.join(" ")));
}
