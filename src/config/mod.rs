//! One typed configuration, from a TOML file and a few flags. Every key has a default; unknown keys are errors.
//!
//! Durations are text with units (`"15m"`, `"2h"`), sizes too (`"20GiB"`). [`Config::load`] is the only way in: what it
//! returns has been checked as a whole, and what it refuses it names, with the remedy.
//!
//! What must not be here: opening anything but the file itself.

mod caches;
pub mod identity;
mod load;
mod local;
mod units;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

pub use caches::{Eviction, FanOut, Forks, Growth, Snapshots};
pub use identity::Identity;
use kiln_domain::settings::{Rule as DomainRule, SettingsError};
use kiln_domain::{AddressRange, Entitlements, Rules, Settings, Tier, UntrustedPolicy};
pub use load::{ConfigError, Overrides};
pub use local::{Builders, Local, LocalGrant, Loopback, Who};
use serde::{Deserialize, Serialize};

use crate::gateway::TrustedSource;
use crate::host::network::Destination;
use crate::store::Retention;

/// `/etc/kiln/kiln.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Database, certificates, daemon configuration. Survives everything.
    pub state_dir: PathBuf,
    /// Sockets and process records. May be lost at a reboot.
    pub run_dir: PathBuf,
    pub api: Api,
    pub identity: Identity,
    pub local: Local,
    pub gateway: Gateway,
    pub runtime: Runtime,
    pub network: Network,
    pub volumes: Volumes,
    pub growth: Growth,
    pub snapshots: Snapshots,
    pub fan_out: FanOut,
    pub eviction: Eviction,
    pub buildkit: BuildKit,
    pub policy: Policy,
    pub admission: Admission,
    pub forks: Forks,
    /// What a daemon for untrusted builds may use at most. Absent: by the host's size, see [`kiln_domain::lane::limits_of`].
    pub untrusted: Limits,
    pub compatibility: Compatibility,
    /// `[[rules]]`: settings for the repositories that each names. The first that matches counts.
    pub rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Api {
    /// Unix socket; `None`: `<run_dir>/kiln.sock`.
    pub socket: Option<PathBuf>,
    /// TCP. Loopback only, whatever stands here: there is no TLS (K9).
    #[serde(with = "units::address")]
    pub listen: SocketAddr,
    /// How long `/route` waits for a daemon.
    #[serde(with = "units::duration")]
    pub route_wait: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gateway {
    #[serde(with = "units::address")]
    pub listen: SocketAddr,
    /// Daemons are `buildkitd-<key>.<domain>`. The first is the one that answers name.
    pub domains: Vec<String>,
    /// Whether clients can resolve names below the first domain. If not, answers carry the gateway's address, and
    /// clients ask for the daemon's name in TLS.
    pub resolvable: bool,
    /// Connections at a time.
    pub max_connections: usize,
    /// Of those, connections of one client address (an IPv6 /64), and of one project.
    pub max_per_address: usize,
    pub max_per_project: usize,
    /// Connections that wait for daemons to wake: in all, and for one project.
    pub max_parked: usize,
    pub max_parked_per_project: usize,
    /// Load balancers: what comes from them, and nothing else, has to begin with a PROXY header, version 1 or 2.
    #[serde(with = "units::sources")]
    pub proxy_protocol_from: Vec<TrustedSource>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RuntimeKind {
    /// A child process per project: no isolation, nothing to set up.
    Process,
    /// An unprivileged Incus container per project.
    Incus,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    pub kind: RuntimeKind,
    /// Where the daemons' addresses come from; nothing else on the host may use it. `None`: 127.88.0.0/16 for `process`,
    /// 10.88.0.0/16 for `incus`.
    pub addresses: Option<AddressRange>,
    pub incus: Incus,
    pub limits: Limits,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Incus {
    /// `None`: `$INCUS_DIR/unix.socket`, or `/var/lib/incus/unix.socket`.
    pub socket: Option<PathBuf>,
    pub project: String,
    /// The storage pool of the instances' root disks.
    pub pool: String,
    /// Alias of the image that `kiln image build` made.
    pub image: String,
    /// Name servers that builds may ask, on port 53. Empty: those of the host's `/etc/resolv.conf` that are not loopback.
    pub resolvers: Vec<Ipv4Addr>,
    /// The nftables table that is ours alone, family inet. Two Kilns on one host need two, and two ranges.
    pub table: String,
}

/// What builds may reach beyond public addresses, with runtime `incus`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// Registry mirrors, for trusted and untrusted builds.
    #[serde(with = "units::mirrors")]
    pub mirrors: Vec<SocketAddrV4>,
    /// Private destinations, for trusted builds only.
    #[serde(with = "units::destinations")]
    pub allow: Vec<Destination>,
}

/// For each daemon with its builds. Absent is unlimited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    #[serde(with = "units::optional_bytes")]
    pub memory: Option<u64>,
    pub cpus: Option<u32>,
    pub processes: Option<u32>,
    /// Per second, of reading and of writing.
    #[serde(with = "units::optional_bytes")]
    pub io: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    Dir,
    Btrfs,
    Zfs,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Volumes {
    pub engine: EngineKind,
    /// `None`: `<state_dir>/volumes`. Must exist; for engine `zfs` it is the mountpoint of `dataset`.
    pub path: Option<PathBuf>,
    /// What engine `zfs` keeps everything below, and no other engine has. Must exist.
    pub dataset: Option<String>,
    /// The first size of one project's cache; buildkitd's garbage collection keeps below it.
    #[serde(with = "units::bytes")]
    pub size: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BuildKit {
    /// The program that runtime `process` starts; `None`: `buildkitd` on the PATH.
    pub buildkitd: Option<PathBuf>,
    pub port: u16,
    /// Name servers in `buildkitd.toml`; empty: BuildKit's own choice (`process`), or the instance's (`incus`).
    pub nameservers: Vec<Ipv4Addr>,
    /// From the start of a daemon to its first answer.
    #[serde(with = "units::duration")]
    pub ready_within: Duration,
    /// How long a stop waits for what still runs in the daemon.
    #[serde(with = "units::duration")]
    pub drain: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// How long a daemon stays up after its last activity.
    #[serde(with = "units::duration")]
    pub idle_window: Duration,
    /// How long a lease counts that nobody connects for.
    #[serde(with = "units::duration")]
    pub lease_grace: Duration,
    /// Nothing holds a daemon longer than this.
    #[serde(with = "units::duration")]
    pub max_build_age: Duration,
    /// A project's window is `idle_window` times its builds of the last day, up to this. Below it: never adapted.
    #[serde(with = "units::duration")]
    pub idle_longest: Duration,
    #[serde(with = "units::duration")]
    pub fork_idle_window: Duration,
    /// A lease that was not released keeps its daemon from being replaced for this long.
    #[serde(with = "units::duration")]
    pub roll_held: Duration,
    /// A daemon that neither answers nor works for this long is replaced.
    #[serde(with = "units::duration")]
    pub wedged_after: Duration,
    /// Builds a project may have under way.
    pub max_leases: usize,
    /// How long a removed cache stays in the trash.
    #[serde(with = "units::duration")]
    pub trash_kept: Duration,
    /// How long an event stays in the journal, if that does not grow too large before.
    #[serde(with = "units::duration")]
    pub journal_kept: Duration,
}

/// When starts wait, and when they are refused. Percentages are whole numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admission {
    /// Starts at a time.
    pub starts: usize,
    /// Daemons at a time.
    pub running: usize,
    /// Projects that may wait for a start.
    pub queue: usize,
    /// Share of time in which some task waited for memory (`/proc/pressure/memory`, `some avg10`) from which on starts wait.
    pub pressure_waits: u8,
    /// Share in which all tasks did (`full avg10`) from which on starts are refused.
    pub pressure_refuses: u8,
    #[serde(with = "units::bytes")]
    pub memory_floor: u64,
    /// Fullness of the caches' storage from which on no new cache is made.
    pub full_for_new: u8,
    /// And from which on nothing is started.
    pub full: u8,
}

/// Habits of the reference that Kiln does not have by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Compatibility {
    /// `/complete` without a `buildId` releases the project's oldest lease, whoever's it is.
    pub nameless_complete: bool,
}

/// One of the `[[rules]]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rule {
    /// `github.com/org/repo`, `github.com/org/*`, or `*`.
    pub repo: String,
    pub tier: Option<Tier>,
    #[serde(with = "units::optional_duration", skip_serializing_if = "Option::is_none")]
    pub idle_window: Option<Duration>,
    #[serde(with = "units::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub volume: Option<u64>,
    #[serde(with = "units::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub volume_max: Option<u64>,
    #[serde(with = "units::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    pub cpus: Option<u32>,
    pub processes: Option<u32>,
    #[serde(with = "units::optional_bytes", skip_serializing_if = "Option::is_none")]
    pub io: Option<u64>,
    /// For trusted builds only.
    pub entitlements: Option<Entitlements>,
    pub fan_out: Option<u16>,
}

impl Rule {
    fn settings(&self) -> Settings {
        Settings {
            tier: self.tier,
            idle_window: self.idle_window,
            volume_bytes: self.volume,
            volume_max_bytes: self.volume_max,
            memory_bytes: self.memory,
            cpus: self.cpus,
            processes: self.processes,
            io_bytes: self.io,
            entitlements: self.entitlements.clone(),
            fan_out: self.fan_out,
        }
    }
}

/// Ranges that are rarely used for anything else.
const LOOPBACK_RANGE: AddressRange = range(Ipv4Addr::new(127, 88, 0, 0));
const PRIVATE_RANGE: AddressRange = range(Ipv4Addr::new(10, 88, 0, 0));

const fn range(network: Ipv4Addr) -> AddressRange {
    match AddressRange::new(network, 16) {
        Some(range) => range,
        None => panic!("a constant that is no range"),
    }
}

const MINUTE: Duration = Duration::from_mins(1);

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: "/var/lib/kiln".into(),
            run_dir: "/run/kiln".into(),
            api: Api::default(),
            identity: Identity::default(),
            local: Local::default(),
            gateway: Gateway::default(),
            runtime: Runtime::default(),
            network: Network::default(),
            volumes: Volumes::default(),
            growth: Growth::default(),
            snapshots: Snapshots::default(),
            fan_out: FanOut::default(),
            eviction: Eviction::default(),
            buildkit: BuildKit::default(),
            policy: Policy::default(),
            admission: Admission::default(),
            forks: Forks::default(),
            untrusted: Limits::default(),
            compatibility: Compatibility::default(),
            rules: Vec::new(),
        }
    }
}

impl Default for Api {
    fn default() -> Self {
        Self { socket: None, listen: SocketAddr::from(([127, 0, 0, 1], 8080)), route_wait: 3 * MINUTE }
    }
}

impl Default for Gateway {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 1234)),
            domains: vec!["kiln.internal".to_owned()],
            resolvable: false,
            max_connections: 4096,
            max_per_address: 2048,
            max_per_project: 1024,
            max_parked: 2048,
            max_parked_per_project: 256,
            proxy_protocol_from: Vec::new(),
        }
    }
}

impl Default for Runtime {
    fn default() -> Self {
        Self { kind: RuntimeKind::Process, addresses: None, incus: Incus::default(), limits: Limits::default() }
    }
}

impl Default for Incus {
    fn default() -> Self {
        Self {
            socket: None,
            project: "kiln".to_owned(),
            pool: "default".to_owned(),
            image: "kiln".to_owned(),
            resolvers: Vec::new(),
            table: "kiln".to_owned(),
        }
    }
}

impl Default for Volumes {
    fn default() -> Self {
        // The reference's default size of a cache volume.
        Self { engine: EngineKind::Dir, path: None, dataset: None, size: 60 << 30 }
    }
}

impl Default for BuildKit {
    fn default() -> Self {
        Self { buildkitd: None, port: 8372, nameservers: Vec::new(), ready_within: MINUTE, drain: MINUTE / 2 }
    }
}

impl Default for Policy {
    fn default() -> Self {
        // Idle window and maximum age are the reference's. Its leases have no grace: a lost answer pins for 2 h there.
        Self {
            idle_window: 15 * MINUTE,
            lease_grace: 30 * MINUTE,
            max_build_age: 120 * MINUTE,
            idle_longest: 360 * MINUTE,
            fork_idle_window: 5 * MINUTE,
            roll_held: 60 * MINUTE,
            wedged_after: MINUTE,
            max_leases: 1024,
            trash_kept: 7 * 24 * 60 * MINUTE,
            journal_kept: Retention::default().age,
        }
    }
}

impl Default for Admission {
    fn default() -> Self {
        Self {
            starts: 4,
            running: 64,
            queue: 1000,
            pressure_waits: 20,
            pressure_refuses: 40,
            memory_floor: 256 << 20,
            full_for_new: 95,
            full: 98,
        }
    }
}

impl Config {
    /// What counts for a project that no rule and no `kiln set` says more of.
    pub fn defaults(&self) -> Settings {
        let limits = &self.runtime.limits;
        Settings {
            tier: Some(Tier::Warm),
            idle_window: None,
            volume_bytes: Some(self.volumes.size),
            // Left open: `growth.max` may be less than the first size of some project, which then stays as it is.
            volume_max_bytes: None,
            memory_bytes: limits.memory,
            cpus: limits.cpus,
            processes: limits.processes,
            io_bytes: limits.io,
            // Only by a rule or for a project: not for all at once.
            entitlements: None,
            fan_out: Some(self.fan_out.members),
        }
    }

    /// The `[[rules]]`, read. [`Config::load`] has read them once already.
    pub fn rules(&self) -> Result<Rules, SettingsError> {
        let read = |rule: &Rule| {
            let settings = rule.settings();
            settings.check()?;
            Ok(DomainRule { repo: rule.repo.parse()?, settings })
        };
        Ok(Rules(self.rules.iter().map(read).collect::<Result<_, SettingsError>>()?))
    }

    /// What daemons for untrusted builds may use at most.
    pub fn untrusted(&self) -> UntrustedPolicy {
        let Limits { memory, cpus, processes, io } = self.untrusted;
        UntrustedPolicy { memory_bytes: memory, cpus, processes, io_bytes: io }
    }

    pub fn socket(&self) -> PathBuf {
        self.api.socket.clone().unwrap_or_else(|| self.run_dir.join("kiln.sock"))
    }

    pub fn database(&self) -> PathBuf {
        self.state_dir.join("kiln.db")
    }

    pub fn volumes_path(&self) -> PathBuf {
        self.volumes.path.clone().unwrap_or_else(|| self.state_dir.join("volumes"))
    }

    /// Where the daemons' addresses come from.
    pub fn addresses(&self) -> AddressRange {
        self.runtime.addresses.unwrap_or(match self.runtime.kind {
            RuntimeKind::Process => LOOPBACK_RANGE,
            RuntimeKind::Incus => PRIVATE_RANGE,
        })
    }

    /// `runtime.incus.socket`, or where Incus puts it.
    pub fn incus_socket(&self) -> PathBuf {
        let default = || {
            let directory = std::env::var_os("INCUS_DIR").unwrap_or_else(|| "/var/lib/incus".into());
            PathBuf::from(directory).join("unix.socket")
        };
        self.runtime.incus.socket.clone().unwrap_or_else(default)
    }

    /// Where TCP listens: as configured if that is loopback, else loopback with the configured port, and `false`.
    pub fn tcp_listen(&self) -> (SocketAddr, bool) {
        if self.api.listen.ip().is_loopback() {
            return (self.api.listen, true);
        }
        (SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.api.listen.port()).into(), false)
    }
}
