//! From a configuration to the parts of a running Kiln.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kiln_domain::Policy;
use kiln_domain::admission::AdmissionPolicy;
use kiln_domain::health::HealthPolicy;
use kiln_domain::idle::IdlePolicy;
use kiln_domain::lease::LeasePolicy;
use kiln_domain::settings::{HostSize, SettingsError};
use thiserror::Error;

use crate::api::ListenError;
use crate::buildkit::GrpcProbe;
use crate::clock::{Clock as _, SystemClock};
use crate::config::{self, Admission, Config, ConfigError, EngineKind, RuntimeKind};
use crate::entropy::SystemEntropy;
use crate::gateway::{Gateway, Limits};
use crate::host::incus::{IncusConfig, IncusRuntime};
use crate::host::network::{Network, NetworkConfig, ParseRangeError};
use crate::host::pressure::PressureFiles;
use crate::host::process::{ProcessConfig, ProcessRuntime};
use crate::host::volumes::{self, BtrfsEngine, DirEngine, VolumeEngine, VolumeError, ZfsEngine};
use crate::host::{Runtime, RuntimeError};
use crate::identity::challenge::{self, Challenges};
use crate::identity::oidc::{self, Verifier};
use crate::identity::{Callers, Local, Loopback, SystemAccounts, Tokens};
use crate::pki::{Pki, PkiError};
use crate::projects::{
    Addressing, DaemonPaths, Foundations, HostEffects, HostEffectsConfig, HostParts, Projects, ProjectsConfig,
    ReconcileError, StepDeadlines,
};
use crate::store::{NewEvent, OpenError, Opened, Retention, Store, StoreError};

/// Why kilnd does not start. Each text says what to do.
#[derive(Debug, Error)]
pub enum StartError {
    #[error("cannot make the directory {path}: make it, owned by the user that kilnd runs as")]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Store(#[from] OpenError),
    #[error("cannot set how long the journal is kept")]
    Journal(#[source] StoreError),
    #[error("cannot read the tokens that were given out")]
    Tokens(#[source] StoreError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Issuers(#[from] oidc::SetupError),
    #[error(transparent)]
    Challenges(#[from] challenge::SetupError),
    #[error("cannot take up the projects of the last run")]
    TakeUp(#[source] StoreError),
    #[error("{path} can be changed by others, and with it what kilnd does: {remedy}")]
    Exposed { path: PathBuf, remedy: String },
    #[error("cannot rebuild the database from the host")]
    Rebuild(#[source] ReconcileError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Volumes(#[from] VolumeError),
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot listen on {address}: stop what listens there, or set gateway.listen to another port")]
    Bind {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(
        "there is no buildkitd on the PATH: build it with packaging/buildkit/build, and name it in buildkit.buildkitd"
    )]
    NoBuildkitd,
    #[error(transparent)]
    Range(#[from] ParseRangeError),
    #[error("[[rules]]")]
    Rules(#[from] SettingsError),
    #[error("{part} ended by a fault of its own, so kilnd ends too: start it again, and report the panic in its log")]
    Broken { part: &'static str },
    #[error("cannot listen to signals")]
    Signal(#[source] io::Error),
}

/// By how much the projects give up before the gateway does: they can say what they waited for.
const SAY_WHY: Duration = Duration::from_secs(1);

/// For each connection that may wait for its daemon; a hello with a post-quantum key takes 1.8 KiB.
const PARKED_BYTES: usize = 8 << 10;

/// A whole Kiln, not listening yet.
pub struct Assembly {
    pub projects: Projects,
    pub gateway: Arc<Gateway>,
    pub store: Store,
    pub effects: Arc<HostEffects>,
    pub callers: Arc<Callers>,
}

/// Opens what there is and makes what is missing below the state and run directories. Starts no daemon.
pub async fn assemble(config: &Config) -> Result<Assembly, StartError> {
    check(config)?;
    make_directory(&config.state_dir, 0o700)?;
    check_private(&config.state_dir)?;
    // First: whoever holds the database owns the host's objects.
    let Opened { store, set_aside } = Store::open_or_set_aside(&config.database(), SystemClock.now())?;
    let retention = Retention { age: config.policy.journal_kept, ..Retention::default() };
    store.retain(retention).await.map_err(StartError::Journal)?;
    if let Some(kept) = set_aside {
        let text = format!(
            "the database was damaged; it is kept as {}, and a new one is filled from the host",
            kept.display()
        );
        drop(store.record(NewEvent::new(SystemClock.now(), None, "database-damaged", text)));
    }
    make_directory(&config.run_dir, 0o755)?;
    check_private(&config.run_dir)?;
    let effects = Arc::new(host_effects(config).await?);
    let pki = Pki::new(&config.state_dir)?;
    let foundations = Foundations {
        store: store.clone(),
        effects: effects.clone(),
        pki,
        clock: Arc::new(SystemClock),
        entropy: Arc::new(SystemEntropy::default()),
    };
    let projects = Projects::new(projects_config(config)?, foundations);
    let gateway = Gateway::new(Arc::new(projects.clone()), &config.gateway.domains, gateway_limits(config))
        .behind(config.gateway.proxy_protocol_from.clone());
    let callers = Arc::new(callers(config, &store).await?);
    Ok(Assembly { projects, gateway: Arc::new(gateway), store, effects, callers })
}

/// Who may come, and as what.
async fn callers(config: &Config, store: &Store) -> Result<Callers, StartError> {
    let own = rustix::process::getuid().as_raw();
    let local = Local::new(config.local_grants()?, own, Arc::new(SystemAccounts));
    let tokens = Tokens::load(store.clone(), Arc::new(SystemClock), Arc::new(SystemEntropy::default()));
    let tokens = tokens.await.map_err(StartError::Tokens)?;
    let loopback = match config.local.loopback {
        Some(config::Loopback::Builder) => Loopback::Builder,
        Some(config::Loopback::Nothing) => Loopback::Nothing,
        None if config.identity.proves_anything() => Loopback::Nothing,
        None => Loopback::UntilTokens,
    };
    let clock = Arc::new(SystemClock);
    let forges = config.identity.has_issuers().then(|| Verifier::start(&config.identity, clock.clone())).transpose()?;
    let forges_asked = &config.identity.challenges;
    let challenges = (!forges_asked.is_empty())
        .then(|| Challenges::new(forges_asked, clock, Arc::new(SystemEntropy::default())))
        .transpose()?;
    Ok(Callers::new(local, tokens, loopback).with_forges(forges, challenges))
}

fn gateway_limits(config: &Config) -> Limits {
    let gateway = &config.gateway;
    Limits {
        connections: gateway.max_connections,
        per_address: gateway.max_per_address,
        per_project: gateway.max_per_project,
        parked: gateway.max_parked,
        parked_per_project: gateway.max_parked_per_project,
        // Hellos of the usual size, and some of the largest.
        parked_bytes: gateway.max_parked.saturating_mul(PARKED_BYTES),
        parked_bytes_per_project: gateway
            .max_parked_per_project
            .saturating_mul(PARKED_BYTES)
            .max(kiln_hello::MAX_BYTES),
        ..Limits::default()
    }
}

/// What can be seen to be missing before anything is made.
fn check(config: &Config) -> Result<(), StartError> {
    if config.runtime.kind == RuntimeKind::Process {
        process_config(config)?;
    }
    // The directory of a dataset is made when that is mounted.
    if let Some(path) = config.volumes.path.as_ref().filter(|_| config.volumes.engine != EngineKind::Zfs) {
        volumes::check(path)?;
    }
    Ok(())
}

async fn host_effects(config: &Config) -> Result<HostEffects, StartError> {
    let volumes = volume_engine(config).await?;
    let (runtime, paths): (Arc<dyn Runtime>, _) = match config.runtime.kind {
        RuntimeKind::Process => {
            let runtime = ProcessRuntime::new(process_config(config)?).await?;
            (Arc::new(runtime), DaemonPaths::OnHost { run: config.run_dir.join("daemons") })
        }
        RuntimeKind::Incus => {
            // As kiln-init finds them; see crates/init and src/host/incus.
            let paths = DaemonPaths::Inside {
                volume: "/var/lib/buildkit".into(),
                files: "/etc/kiln".into(),
                run: "/run/buildkit".into(),
            };
            (Arc::new(incus(config)?), paths)
        }
    };
    let parts = HostParts {
        runtime,
        volumes,
        pki: Pki::new(&config.state_dir)?,
        probe: Arc::new(GrpcProbe),
        clock: Arc::new(SystemClock),
        pressure: PressureFiles::default(),
    };
    Ok(HostEffects::new(effects_config(config, paths), parts))
}

fn effects_config(config: &Config, paths: DaemonPaths) -> HostEffectsConfig {
    HostEffectsConfig {
        domains: config.gateway.domains.clone(),
        daemon_port: config.buildkit.port,
        growth: policy(config).size,
        trial_address: config.addresses().hosts().with_one_aside().1,
        shared_file_system: file_system_size(&config.volumes_path()),
        nameservers: config.buildkit.nameservers.iter().copied().map(IpAddr::V4).collect(),
        paths,
        size: host_size(),
        untrusted: config.untrusted(),
        deadlines: deadlines(config),
    }
}

fn projects_config(config: &Config) -> Result<ProjectsConfig, StartError> {
    let gateway = config.gateway.listen;
    let rules = config.rules()?;
    for shadowed in rules.shadowed() {
        tracing::warn!("[[rules]]: {}", shadowed.text);
    }
    let limited = config.defaults().has_limits() || rules.0.iter().any(|rule| rule.settings.has_limits());
    if limited && config.runtime.kind == RuntimeKind::Process {
        tracing::warn!("limits on memory, cpus or processes are configured, and the runtime `process` sets none");
    }
    Ok(ProjectsConfig {
        policy: policy(config),
        admission: admission(config),
        fan_out: config.fan_out.policy(),
        eviction: config.eviction.policy(),
        defaults: config.defaults(),
        rules,
        trash_kept: config.policy.trash_kept,
        host_size: HostSize { without_limits: config.runtime.kind == RuntimeKind::Process, ..host_size() },
        deadlines: deadlines(config),
        addresses: config.addresses().hosts().with_one_aside().0,
        addressing: Addressing {
            domain: config.gateway.domains[0].clone(),
            gateway_address: (!config.gateway.resolvable).then(|| gateway.to_string()),
            gateway_port: gateway.port(),
            namespace: "kiln".to_owned(),
        },
        daemon_port: config.buildkit.port,
        route_wait: config.api.route_wait,
        connect_wait: Limits::default().wake.saturating_sub(SAY_WHY),
        forks: config.forks.bounds(),
        untrusted: match config.runtime.kind {
            RuntimeKind::Process => Err("the process runtime cannot keep them apart from the host".to_owned()),
            RuntimeKind::Incus => Ok(()),
        },
    })
}

fn host_size() -> HostSize {
    let cpus = std::thread::available_parallelism().ok().and_then(|cpus| u32::try_from(cpus.get()).ok());
    let memory_bytes = PressureFiles::default().read().ok().map(|host| host.memory_total);
    HostSize { cpus, memory_bytes, without_limits: false }
}

fn policy(config: &Config) -> Policy {
    let policy = &config.policy;
    Policy {
        lease: LeasePolicy { grace: policy.lease_grace, max_build_age: policy.max_build_age },
        idle: IdlePolicy {
            window: policy.idle_window,
            longest: policy.idle_longest,
            fork_window: policy.fork_idle_window,
        },
        health: HealthPolicy {
            wedged_after: policy.wedged_after,
            wedged_after_connected: policy.wedged_after * 5,
            // A silence has to be seen several times within its span.
            ask_again: policy.wedged_after / 6,
            silent_at_most: policy.max_build_age,
            ..Policy::default().health
        },
        roll_held: policy.roll_held,
        max_leases: policy.max_leases,
        history: config.snapshots.policy(),
        size: config.growth.policy(),
    }
}

fn admission(config: &Config) -> AdmissionPolicy {
    let Admission { starts, running, queue, memory_floor, .. } = config.admission;
    AdmissionPolicy {
        starts,
        running,
        queue,
        memory_floor,
        pressure_waits: config.admission.pressure_waits.into(),
        pressure_refuses: config.admission.pressure_refuses.into(),
        full_for_new: config.admission.full_for_new.into(),
        full: config.admission.full.into(),
    }
}

fn deadlines(config: &Config) -> StepDeadlines {
    StepDeadlines {
        await_serving: config.buildkit.ready_within,
        drain: config.buildkit.drain,
        ..StepDeadlines::default()
    }
}

fn process_config(config: &Config) -> Result<ProcessConfig, StartError> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin".into());
    let on_path = || std::env::split_paths(&path).map(|dir| dir.join("buildkitd")).find(|program| program.is_file());
    let buildkitd = config.buildkit.buildkitd.clone().or_else(on_path).ok_or(StartError::NoBuildkitd)?;
    Ok(ProcessConfig { buildkitd, run_dir: config.run_dir.join("process"), path })
}

async fn volume_engine(config: &Config) -> Result<Arc<dyn VolumeEngine>, StartError> {
    let path = config.volumes_path();
    if config.volumes.path.is_none() && config.volumes.engine != EngineKind::Zfs {
        make_directory(&path, 0o700)?;
    }
    let (search, clock) = (volumes::search_path(), Arc::new(SystemClock));
    Ok(match config.volumes.engine {
        EngineKind::Dir => Arc::new(DirEngine::at(&path, &search, clock).await?),
        EngineKind::Btrfs => Arc::new(BtrfsEngine::at(&path, &search, clock).await?),
        EngineKind::Zfs => {
            let dataset = config.volumes.dataset.as_deref().unwrap_or_default();
            Arc::new(ZfsEngine::at(dataset, &path, &search, clock).await?)
        }
    })
}

fn make_directory(path: &Path, mode: u32) -> Result<(), StartError> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(|error| {
        let source = match error.kind() {
            // Of a directory that exists there would be no error.
            io::ErrorKind::AlreadyExists => io::ErrorKind::NotADirectory.into(),
            _ => error,
        };
        StartError::Directory { path: path.to_owned(), source }
    })
}

/// Who can write there can put another database, other certificates, or a link to any file in the place of ours.
fn check_private(path: &Path) -> Result<(), StartError> {
    let found = fs::metadata(path).map_err(|source| StartError::Directory { path: path.to_owned(), source })?;
    let (us, shown) = (rustix::process::geteuid().as_raw(), path.display());
    let remedy = if found.uid() != us && found.uid() != 0 {
        format!("it belongs to user {}: chown {us} {shown}", found.uid())
    } else if found.mode() & 0o022 != 0 {
        format!("chmod go-w {shown}")
    } else {
        return Ok(());
    };
    Err(StartError::Exposed { path: path.to_owned(), remedy })
}

/// `None` where it cannot be told: then the volume's own size is all that is known.
fn file_system_size(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    stat.f_blocks.checked_mul(stat.f_frsize)
}

/// Incus is asked when it is first needed, so that Kiln starts while it is away.
fn incus(config: &Config) -> Result<IncusRuntime, StartError> {
    let name_servers = resolvers(config);
    let mut network = NetworkConfig::new(config.addresses().to_string().parse()?, name_servers.clone());
    network.table.clone_from(&config.runtime.incus.table);
    network.mirrors.clone_from(&config.network.mirrors);
    network.allow.clone_from(&config.network.allow);
    network.services = vec![config.tcp_listen().0, config.gateway.listen];
    let incus = IncusConfig {
        socket: config.incus_socket(),
        project: config.runtime.incus.project.clone(),
        pool: config.runtime.incus.pool.clone(),
        image: config.runtime.incus.image.clone(),
        resolvers: name_servers,
        own_ids: has_ids_to_give(),
    };
    if !incus.own_ids {
        tracing::warn!(
            "/etc/subuid or /etc/subgid gives root fewer than {ENOUGH_IDS} ids: instances for untrusted builds share \
             theirs with the others; write root:1000000:1000000000 into both and restart Incus"
        );
    }
    Ok(IncusRuntime::new(incus, Arc::new(Network::new(network)))?)
}

/// Of 65536 ids each, for as many instances of untrusted builds as a host can run.
const ENOUGH_IDS: u64 = 65536 * 128;

/// Whether Incus, which runs as root, has enough user and group ids to give each untrusted instance some of its own.
fn has_ids_to_give() -> bool {
    let enough = |path| fs::read_to_string(path).is_ok_and(|text| most_ids_of_root(&text) >= ENOUGH_IDS);
    ["/etc/subuid", "/etc/subgid"].into_iter().all(enough)
}

/// The longest of root's ranges in a file like subuid(5).
fn most_ids_of_root(text: &str) -> u64 {
    let counts = text.lines().filter_map(|line| {
        let (owner, range) = line.trim().split_once(':')?;
        let (_, count) = range.split_once(':')?;
        matches!(owner, "root" | "0").then(|| count.parse().ok())?
    });
    counts.max().unwrap_or(0)
}

/// As configured, or the host's own that an instance could reach.
fn resolvers(config: &Config) -> Vec<IpAddr> {
    let configured = &config.runtime.incus.resolvers;
    if !configured.is_empty() {
        return configured.iter().copied().map(IpAddr::V4).collect();
    }
    let of_the_host = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let servers = of_the_host.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    servers.filter_map(|server| server.trim().parse().ok()).filter(|server: &IpAddr| !server.is_loopback()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether an event of two hours ago is there still when the journal has been written to since.
    async fn keeps_two_hours(journal_kept: Duration) -> bool {
        let place = tempfile::tempdir().expect("a temporary directory");
        let (state, run) = (place.path().join("state"), place.path().join("run"));
        let mut config = Config { state_dir: state, run_dir: run, ..Config::default() };
        config.policy.journal_kept = journal_kept;
        // Nothing is started.
        config.buildkit.buildkitd = Some("/bin/true".into());
        let store = assemble(&config).await.expect("assembles").store;
        let now = SystemClock.now();
        let before = kiln_domain::Timestamp::from_millis(now.as_millis() - 2 * 3_600_000);
        let old = store.record(NewEvent::new(before, None, "test", "old")).await.expect("is written");
        for _ in 0..100 {
            drop(store.record(NewEvent::new(now, None, "test", "new")));
        }
        store.ping().await.expect("writes");
        store.events(old - 1, 1).await.expect("reads").first().is_some_and(|event| event.id == old)
    }

    #[test]
    fn the_ids_of_root_are_counted() {
        for (text, count) in [
            ("", 0),
            ("root:1000000:1000000000\n", 1_000_000_000),
            ("# root:1:9\nuser:100000:65536\nroot:165536:65536\n0:300000:70000\n", 70_000),
            ("root:1000000\nroot:a:b\nroot::\n", 0),
        ] {
            assert_eq!(most_ids_of_root(text), count, "of {text:?}");
        }
    }

    #[tokio::test]
    async fn the_journal_is_kept_as_long_as_is_configured() {
        assert!(keeps_two_hours(Duration::from_hours(3)).await);
        assert!(!keeps_two_hours(Duration::from_hours(1)).await);
    }
}
