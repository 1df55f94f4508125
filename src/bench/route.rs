//! Warm `/route`: the real API, heart and store on a real disk, over a model host. No host is needed, because the way of
//! a warm request asks it nothing; that is one of the points.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kiln_domain::{AddressPool, BuildSpec, Policy};
use kiln_wire::RouteRequest;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::BenchError;
use super::figures::{Spread, cpu_time, fdatasync, millis};
use crate::api::{self, Api, Listener};
use crate::clock::SystemClock;
use crate::entropy::SystemEntropy;
use crate::identity::Callers;
use crate::metrics::Metrics;
use crate::pki::Pki;
use crate::projects::model::ModelEffects;
use crate::projects::{Addressing, Foundations, Projects, ProjectsConfig, RouteOptions};
use crate::store::Store;

#[derive(Debug, Args)]
pub(super) struct RouteBench {
    /// On the disk to measure
    #[arg(long, default_value = "/var/tmp")]
    dir: PathBuf,
    /// Of each measurement
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Numbers of clients
    #[arg(long, value_delimiter = ',', default_value = "1,16,64")]
    clients: Vec<usize>,
    /// Numbers of projects
    #[arg(long, value_delimiter = ',', default_value = "1,1000")]
    projects: Vec<usize>,
}

#[derive(Debug, Serialize)]
struct Row {
    projects: usize,
    clients: usize,
    requests_per_second: f64,
    /// Of the server, for a route and its release.
    cpu_us_per_route: f64,
    latency_us: Spread,
    commits: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    fdatasync_us: Spread,
    rows: Vec<Row>,
}

impl RouteBench {
    pub(super) async fn run(&self, json: bool) -> Result<(), BenchError> {
        let dir = tempfile::Builder::new().prefix("kiln-bench-").tempdir_in(&self.dir).map_err(|e| self.disk(e))?;
        let fdatasync_us = fdatasync(dir.path(), 500).map_err(|e| self.disk(e))?;
        let mut rows = Vec::new();
        for &projects in &self.projects {
            rows.extend(self.measure(&dir.path().join(projects.to_string()), projects).await?);
        }
        let report = Report { fdatasync_us, rows };
        if json {
            let text = serde_json::to_string_pretty(&report);
            println!("{}", text.map_err(|error| BenchError::Unexpected(error.to_string()))?);
        } else {
            print(&report);
        }
        Ok(())
    }

    fn disk(&self, source: std::io::Error) -> BenchError {
        BenchError::Disk { path: self.dir.clone(), source }
    }

    async fn measure(&self, dir: &Path, known: usize) -> Result<Vec<Row>, BenchError> {
        std::fs::create_dir(dir).map_err(|e| self.disk(e))?;
        let store = Store::open(&dir.join("kiln.db"))?;
        let projects = projects(dir, store.clone())?;
        for number in 1..known {
            let spec = spec(&format!("bench/other-{number}"))?;
            store.create_project(&spec, ADDRESSES, kiln_domain::Timestamp::EPOCH).await?;
        }
        // Made and warm before the clock runs.
        drop(projects.route(spec(REPO)?, RouteOptions::default()).await?);

        let socket = dir.join("api.sock");
        let shutdown = CancellationToken::new();
        let settings = api::Settings {
            route_wait: Duration::from_secs(10),
            nameless_release: false,
            drain: Duration::ZERO,
            rates: api::Rates::DEFAULT,
        };
        let callers = Arc::new(Callers::of_one_user(store.clone()));
        let server = Api::new(Arc::new(projects), callers, store.clone(), Arc::new(Metrics::new()), settings);
        let server = tokio::spawn(api::serve(vec![Listener::unix(&socket)?], server, shutdown.clone()));
        let mut rows = Vec::new();
        for &clients in &self.clients {
            rows.push(self.run_clients(&socket, &store, known, clients).await?);
        }
        shutdown.cancel();
        // Its end is the end of the measurement, whichever way.
        let _ = server.await;
        Ok(rows)
    }

    async fn run_clients(
        &self,
        socket: &Path,
        store: &Store,
        projects: usize,
        clients: usize,
    ) -> Result<Row, BenchError> {
        let request = RouteRequest { repo: REPO.to_owned(), arch: "amd64".to_owned(), ..RouteRequest::default() };
        let body = serde_json::to_string(&request).map_err(|error| BenchError::Unexpected(error.to_string()))?;
        let program = std::env::current_exe().map_err(|e| BenchError::Load("find this program", e))?;
        let (cpu, commits) = (cpu_time(), store.figures().commits);
        let output = tokio::process::Command::new(program)
            .args(["bench", "load", "--clients", &clients.to_string(), "--seconds", &self.seconds.to_string()])
            .args(["--body", &body, "--socket"])
            .arg(socket)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .output();
        let patience = Duration::from_secs(self.seconds + 30);
        let output = tokio::time::timeout(patience, output)
            .await
            .map_err(|_| BenchError::Clients("they did not end".to_owned()))?
            .map_err(|e| BenchError::Load("start the clients", e))?;
        let cpu = cpu_time().saturating_sub(cpu);
        let latency_us: Spread =
            serde_json::from_slice(&output.stdout).map_err(|error| BenchError::Clients(error.to_string()))?;
        let count = latency_us.count.max(1) as f64;
        Ok(Row {
            projects,
            clients,
            requests_per_second: count / self.seconds as f64,
            cpu_us_per_route: cpu.as_secs_f64() * 1e6 / count,
            latency_us,
            commits: store.figures().commits - commits,
        })
    }
}

const REPO: &str = "bench/warm";
const ADDRESSES: AddressPool =
    AddressPool { first: Ipv4Addr::new(127, 88, 0, 1), last: Ipv4Addr::new(127, 88, 255, 254) };

fn spec(repo: &str) -> Result<BuildSpec, BenchError> {
    BuildSpec::new(repo, "", "", "amd64").map_err(|error| BenchError::Unexpected(error.to_string()))
}

fn projects(dir: &Path, store: Store) -> Result<Projects, BenchError> {
    let addressing = Addressing {
        domain: "kiln.internal".to_owned(),
        gateway_address: None,
        gateway_port: 1234,
        namespace: "kiln".to_owned(),
    };
    // More builds at once than a project may usually have, because that is what is measured.
    let policy = Policy { max_leases: usize::MAX, ..Policy::default() };
    let config = ProjectsConfig { policy, ..ProjectsConfig::with_defaults(ADDRESSES, addressing) };
    let foundations = Foundations {
        store,
        effects: Arc::new(ModelEffects::default()),
        pki: Pki::new(dir)?,
        clock: Arc::new(SystemClock),
        entropy: Arc::new(SystemEntropy::default()),
    };
    Ok(Projects::new(config, foundations))
}

fn print(report: &Report) {
    let disk = report.fdatasync_us;
    println!("bare fdatasync: p50 {} ms, p99 {} ms", millis(disk.p50), millis(disk.p99));
    println!(
        "{:>8} {:>8} {:>10} {:>9} {:>9} {:>16} {:>16}",
        "projects", "clients", "routes/s", "p50 ms", "p99 ms", "CPU us per route", "writes a commit"
    );
    for row in &report.rows {
        println!(
            "{:>8} {:>8} {:>10.0} {:>9} {:>9} {:>16.0} {:>16.1}",
            row.projects,
            row.clients,
            row.requests_per_second,
            millis(row.latency_us.p50),
            millis(row.latency_us.p99),
            row.cpu_us_per_route,
            // A route and its release are a write each.
            row.latency_us.count as f64 * 2.0 / row.commits.max(1) as f64,
        );
    }
}
