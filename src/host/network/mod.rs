//! What an instance may reach: the nftables table `inet kiln`, in force before the first instance exists.
//!
//! ```text
//! host ──→ daemon                 passes (and nobody but the host gets in)
//! instance ──→ other instance     refused
//! instance ──→ named resolver     port 53 passes
//! instance ──→ registry mirror    its port passes, on this host too
//! instance ──→ host               refused, but for resolvers and mirrors that are the host itself
//! trusted ──→ allowed private     the named ports pass
//! instance ──→ private, link-local, metadata, carrier, multicast …   refused
//! instance ──→ public IPv4        passes
//! instance ──→ IPv6               refused, but for resolvers: no instance has an address there
//! ```
//!
//! All but the resolvers is for instances that were admitted, each in its lane's set (`trusted`, `untrusted`).
//!
//! * [`rules`] renders the table from a [`NetworkConfig`]; it is replaced as a whole in one transaction, then read back
//!   and compared. A table that lost a chain, a rule or a range is an error and is never used.
//! * Interfaces are matched by name, and the name holds the address ([`kiln_domain::Key::interface_name`]), so the
//!   policy is there before the interface is. Closed by default: an interface that was never admitted is confined.
//! * A packet whose source address is not its interface's is dropped before routing.
//! * Refusing is an answer (reset, or ICMP prohibited), so a build fails at once and not after a connect timeout.
//! * That it does what it says is tried from inside an instance that runs ([`prove`]).
//! * Public egress is masqueraded, and needs the host to forward IPv4: [`Network::ensure`] turns `ip_forward` on when it
//!   is off, says so in the log, and never turns it off.
//!
//! What must not be here: which project may do what; any other table.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use kiln_domain::Key;
use thiserror::Error;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::sync::Mutex;

use super::Lane;

mod destination;
mod link;
mod netlink;
mod prove;
mod range;
pub mod rules;

pub use destination::{Destination, ParseDestinationError, ParseMirrorError, parse_mirror};
pub use prove::{DEADLINE as PROOF_DEADLINE, ProofError};
pub use range::{ParseRangeError, Range};

/// nft answers in milliseconds; this is for a host that swaps.
const NFT_TIMEOUT: Duration = Duration::from_secs(10);
const IP_FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// Equal configurations make equal tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkConfig {
    /// `kiln`; another name where two Kilns share a host, with another range.
    pub table: String,
    /// Where instances' addresses come from; nothing else on the host may use it.
    pub range: Range,
    /// Name servers that instances may ask.
    pub resolvers: Vec<IpAddr>,
    /// Registry mirrors, for both lanes; also where they are private, or this host.
    pub mirrors: Vec<SocketAddrV4>,
    /// Private destinations, for the trusted lane only; never this host.
    pub allow: Vec<Destination>,
    /// Where kilnd itself listens: a proof tries to get there.
    pub services: Vec<SocketAddr>,
    /// The nft program, by absolute path.
    pub nft: PathBuf,
}

impl NetworkConfig {
    pub fn new(range: Range, resolvers: Vec<IpAddr>) -> Self {
        Self {
            table: "kiln".to_owned(),
            range,
            resolvers,
            mirrors: Vec::new(),
            allow: Vec::new(),
            services: Vec::new(),
            nft: PathBuf::from("/usr/sbin/nft"),
        }
    }
}

#[derive(Debug, Error)]
pub enum NetworkError {
    #[error("cannot run {path}: install nftables")]
    Nft {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("nft refused to {operation}: {said}")]
    Refused { operation: &'static str, said: String },
    #[error("nft did not {operation} within {} s", NFT_TIMEOUT.as_secs())]
    TimedOut { operation: &'static str },
    #[error("table inet {table} is not what Kiln put there: {why}; it is put back at the next start of an instance")]
    Damaged { table: String, why: String },
    #[error("cannot let the host forward IPv4: write 1 to {path}")]
    Forwarding {
        path: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot remove the stray interface {interface}: try `ip link delete {interface}`")]
    Link {
        interface: String,
        #[source]
        source: io::Error,
    },
    #[error("{address} is not in Kiln's range {range}")]
    Foreign { address: Ipv4Addr, range: Range },
}

/// The owner of the table.
pub struct Network {
    config: NetworkConfig,
    /// One change at a time: replacing the table carries its members over.
    changing: Mutex<()>,
}

impl Network {
    pub fn new(config: NetworkConfig) -> Self {
        Self { config, changing: Mutex::new(()) }
    }

    pub fn config(&self) -> &NetworkConfig {
        &self.config
    }

    /// Puts the table in force, keeping who was admitted, and reads it back.
    pub async fn ensure(&self) -> Result<(), NetworkError> {
        let _changing = self.changing.lock().await;
        self.replace().await
    }

    /// Says in which lane the instance with this address is; to be called before it starts. The table is verified on
    /// the way and put back if it is damaged or gone.
    pub async fn admit(&self, address: Ipv4Addr, lane: Lane) -> Result<(), NetworkError> {
        if !self.config.range.contains(address) {
            return Err(NetworkError::Foreign { address, range: self.config.range });
        }
        let _changing = self.changing.lock().await;
        if let Err(error) = self.check().await {
            tracing::warn!(%error, "putting the firewall table back");
            self.replace().await?;
        }
        let change = rules::admission(&self.config.table, &Key::interface_name(address), Some(lane));
        self.nft("admit an instance", &["-f", "-"], &change).await?;
        Ok(())
    }

    /// Takes it out of its lane, for an instance that is gone: whoever gets the address next is closed in until it is
    /// admitted. Never admitted is success.
    pub async fn dismiss(&self, address: Ipv4Addr) -> Result<(), NetworkError> {
        let _changing = self.changing.lock().await;
        let change = rules::admission(&self.config.table, &Key::interface_name(address), None);
        self.nft("dismiss an instance", &["-f", "-"], &change).await.map(drop)
    }

    /// Tries from inside the instance that process `pid` is in what it must not reach. `address` is where its daemon listens.
    /// See [`prove`]; it takes some milliseconds, and never longer than [`PROOF_DEADLINE`] and a moment.
    pub async fn prove(&self, pid: u32, address: SocketAddrV4, lane: Lane) -> Result<(), ProofError> {
        let (config, (sender, outcome)) = (self.config.clone(), tokio::sync::oneshot::channel());
        let thread = std::thread::Builder::new().name("kiln-proof".to_owned());
        let work = move || {
            // Nobody waits any more: then nobody needs to know.
            let _ = sender.send(prove::prove(&config, pid, address, lane));
        };
        thread.spawn(work).map_err(|source| ProofError::Impossible { what: "start a thread".to_owned(), source })?;
        match tokio::time::timeout(PROOF_DEADLINE * 2, outcome).await {
            Ok(Ok(outcome)) => outcome,
            _ => Err(ProofError::TimedOut),
        }
    }

    /// Removes the interface that a start which failed half-way has left; with it no other start succeeds. To be called
    /// only for an instance that is down. `false` when there was none.
    pub fn clear(&self, address: Ipv4Addr) -> Result<bool, NetworkError> {
        let interface = Key::interface_name(address);
        let removed = link::remove(&interface);
        if matches!(removed, Ok(true)) {
            tracing::warn!(interface, "removed an interface that an earlier start left behind");
        }
        removed.map_err(|source| NetworkError::Link { interface, source })
    }

    /// Whether the table is there and whole.
    pub async fn check(&self) -> Result<(), NetworkError> {
        let listing = self.list().await?;
        rules::verify(&listing, &self.config)
            .map_err(|why| NetworkError::Damaged { table: self.config.table.clone(), why })
    }

    /// Takes the table away; for tests and uninstalling. Absent already is success.
    pub async fn remove(&self) -> Result<(), NetworkError> {
        let table = &self.config.table;
        // Adding first makes the deletion succeed also when there is none.
        let text = format!("table inet {table}\ndelete table inet {table}\n");
        self.nft("remove the table", &["-f", "-"], &text).await.map(drop)
    }

    async fn replace(&self) -> Result<(), NetworkError> {
        let admitted = self.list().await.map(|listing| rules::admitted(&listing)).unwrap_or_default();
        self.nft("load the table", &["-f", "-"], &rules::render(&self.config, &admitted)).await?;
        self.check().await?;
        forward(Path::new(IP_FORWARD)).await
    }

    async fn list(&self) -> Result<String, NetworkError> {
        self.nft("list the table", &["-j", "list", "table", "inet", &self.config.table], "").await
    }

    async fn nft(&self, operation: &'static str, arguments: &[&str], input: &str) -> Result<String, NetworkError> {
        let failed = |source| NetworkError::Nft { path: self.config.nft.display().to_string(), source };
        let mut child = Command::new(&self.config.nft)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let mut stdin = child.stdin.take();
        let talk = async {
            if let Some(mut pipe) = stdin.take()
                && !input.is_empty()
            {
                // A program that does not read to the end says why on its stderr.
                let _ = pipe.write_all(input.as_bytes()).await;
            }
            child.wait_with_output().await
        };
        let output = tokio::time::timeout(NFT_TIMEOUT, talk)
            .await
            .map_err(|_| NetworkError::TimedOut { operation })?
            .map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().chars().take(2000).collect();
        Err(NetworkError::Refused { operation, said })
    }
}

async fn forward(path: &'static Path) -> Result<(), NetworkError> {
    let failed = |source| NetworkError::Forwarding { path: IP_FORWARD, source };
    if tokio::fs::read_to_string(path).await.map_err(failed)?.trim() == "0" {
        tokio::fs::write(path, "1").await.map_err(failed)?;
        tracing::info!("turned on {IP_FORWARD}: instances reach public addresses through this host");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
