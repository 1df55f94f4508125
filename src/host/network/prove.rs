//! Tries, from inside an instance's network namespace, what the table must refuse.
//!
//! The table is verified before an instance starts; this is the evidence that it does what it says, whatever else stands
//! in the host's ruleset. A connection that opens is a violation; one that is refused, prohibited, without a route or
//! without an answer is as it should be. The probes are TCP. The table's refusals know no protocol but for what it lets
//! through.
//!
//! * Nobody listens on most of the host's ports, and what nobody listens on is refused anyway. So a listener is opened
//!   on the host for the time of the proof, and seen to answer, before it is tried from inside.
//! * A namespace without the instance's own address, or without its interface, proves nothing: that is an error.
//! * What leaves the namespace must do so by the interface whose name the table goes by: another one that leads to the
//!   host's namespace, or a piece of hardware, is a violation. With that one way out, closed for IPv6 as a whole, no
//!   address or route inside can open another.
//!
//! It runs on a thread of its own, which enters the namespace and ends in it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use kiln_domain::Key;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, ipproto, socket_with, sockopt};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use thiserror::Error;

use super::NetworkConfig;
use super::netlink::{self, Address, Link};
use crate::host::Lane;

/// For the whole proof. Where the table is in force it takes a few milliseconds.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// What is on this host answers within microseconds or not at all; IPv6 between two ends of one cable is not even refused,
/// for nobody tells the neighbour where to send its refusal.
const NEARBY: Duration = Duration::from_millis(40);
/// The host's end of a routed interface, as Incus sets it up.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 1);
/// How many other daemons are tried.
const NEIGHBOURS: usize = 3;

/// Far places, none of which a build has business with.
const FAR: [(&str, &str); 9] = [
    ("the metadata service", "169.254.169.254:80"),
    ("the metadata service of containers", "169.254.170.2:80"),
    ("the metadata service", "168.63.129.16:80"),
    ("the metadata service over IPv6", "[fd00:ec2::254]:80"),
    ("a private address", "10.0.0.1:80"),
    ("a private address", "172.16.0.1:80"),
    ("a private address", "192.168.0.1:80"),
    ("a carrier's address", "100.64.0.1:80"),
    ("a private address over IPv6", "[fd00::1]:80"),
];

#[derive(Debug, Error)]
pub enum ProofError {
    #[error("it reached {0}")]
    Reached(String),
    #[error("cannot {what}")]
    Impossible {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("gave up after {} s", DEADLINE.as_secs())]
    TimedOut,
}

impl ProofError {
    fn impossible(what: &str, source: impl Into<io::Error>) -> Self {
        Self::Impossible { what: what.to_owned(), source: source.into() }
    }
}

/// What is tried.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    what: String,
    address: SocketAddr,
    /// It is this host, or an instance on it.
    nearby: bool,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.what, self.address)
    }
}

/// Of an instance that runs: `pid` is a process in it, `address` where its daemon listens. Blocks; to be called on a thread
/// that ends afterwards, for it has left the host's network.
pub(super) fn prove(config: &NetworkConfig, pid: u32, address: SocketAddrV4, lane: Lane) -> Result<(), ProofError> {
    let deadline = Instant::now() + DEADLINE;
    let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net"));
    let namespace = namespace.map_err(|e| ProofError::impossible("open its network namespace", e))?;
    let bait = Bait::new().map_err(|e| ProofError::impossible("open a listener on this host", e))?;
    let host = Host::look().map_err(|e| ProofError::impossible("list this host's addresses", e))?;
    let cable = host
        .links
        .iter()
        .find(|link| link.name == Key::interface_name(*address.ip()))
        .ok_or_else(|| ProofError::impossible("find its interface on this host", io::ErrorKind::NotFound))?;
    let mut targets = host.targets(config, cable, address, &bait);
    targets.retain(|target| !is_open(config, lane, target.address));

    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|e| ProofError::impossible("enter its network namespace", e))?;
    let inside = netlink::links().map_err(|e| ProofError::impossible("list its interfaces", e))?;
    let way_out = way_out(&inside, cable.index)?;
    is_there(*address.ip())?;
    for target in &mut targets {
        if let SocketAddr::V6(v6) = &mut target.address
            && v6.ip().is_unicast_link_local()
        {
            v6.set_scope_id(way_out);
        }
    }
    attempt(&targets, deadline)
}

/// Whether the table lets this lane through to it.
fn is_open(config: &NetworkConfig, lane: Lane, address: SocketAddr) -> bool {
    let SocketAddr::V4(v4) = address else { return address.port() == 53 && config.resolvers.contains(&address.ip()) };
    (v4.port() == 53 && config.resolvers.contains(&address.ip()))
        || config.mirrors.contains(&v4)
        || (lane == Lane::Trusted && config.allow.iter().any(|destination| destination.covers(v4)))
}

/// Listeners on every address of this host, each seen to answer.
struct Bait {
    v4: TcpListener,
    /// Where this host has IPv6.
    v6: Option<TcpListener>,
}

impl Bait {
    fn new() -> io::Result<Self> {
        let v4 = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        answers(SocketAddr::from((Ipv4Addr::LOCALHOST, v4.local_addr()?.port())))?;
        let v6 = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)) {
            Ok(v6) => Some(v6),
            Err(error) if error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { v4, v6 })
    }

    fn port(&self, ip: IpAddr) -> Option<u16> {
        let listener = if ip.is_ipv4() { Some(&self.v4) } else { self.v6.as_ref() };
        Some(listener?.local_addr().ok()?.port())
    }
}

fn answers(address: SocketAddr) -> io::Result<()> {
    TcpStream::connect_timeout(&address, DEADLINE / 4).map(drop)
}

/// What this host has.
struct Host {
    links: Vec<Link>,
    addresses: Vec<Address>,
}

impl Host {
    fn look() -> io::Result<Self> {
        Ok(Self { links: netlink::links()?, addresses: netlink::addresses()? })
    }

    fn targets(&self, config: &NetworkConfig, cable: &Link, own: SocketAddrV4, bait: &Bait) -> Vec<Target> {
        let mut found: Vec<Target> = Vec::new();
        let mut add = |what: &str, address: SocketAddr, nearby: bool| {
            if found.iter().all(|target| target.address != address) {
                found.push(Target { what: what.to_owned(), address, nearby });
            }
        };
        // Of link-local ones, only what is at the other end of its own cable can be addressed.
        let here = |address: &&Address| match address.ip {
            IpAddr::V4(ip) => !ip.is_loopback(),
            IpAddr::V6(ip) if ip.is_unicast_link_local() => address.index == cable.index,
            IpAddr::V6(ip) => !ip.is_loopback(),
        };
        for ip in self.addresses.iter().filter(here).map(|address| address.ip).chain([GATEWAY.into()]) {
            if let Some(port) = bait.port(ip) {
                add("this host", SocketAddr::new(ip, port), true);
            }
        }
        for service in &config.services {
            let ip =
                if service.ip().is_loopback() || service.ip().is_unspecified() { GATEWAY.into() } else { service.ip() };
            add("kilnd", SocketAddr::new(ip, service.port()), true);
        }
        let others = self.links.iter().filter_map(|link| config.range.address_of(&link.name));
        let others: Vec<_> = others.filter(|other| other != own.ip()).take(NEIGHBOURS).collect();
        // With no other about, one that there might be.
        let made_up = others.is_empty().then(|| Ipv4Addr::from_bits(own.ip().to_bits() ^ 1));
        for other in others.into_iter().chain(made_up) {
            add("another daemon", SocketAddrV4::new(other, own.port()).into(), true);
        }
        for (what, address) in FAR {
            // A constant, which a test reads.
            if let Ok(address) = address.parse() {
                add(what, address, false);
            }
        }
        found
    }
}

/// The number of the interface that leads to the host; whatever else leads out is a violation.
fn way_out(links: &[Link], cable: u32) -> Result<u32, ProofError> {
    let missing = || ProofError::impossible("find its interface inside", io::ErrorKind::NotFound);
    let own =
        links.iter().find(|link| link.peer == Some(cable) && link.peer_namespace.is_some()).ok_or_else(missing)?;
    let other = links.iter().find(|link| {
        let leads_to_host = link.peer_namespace == own.peer_namespace;
        // Interfaces that the kernel makes up say what they are; but for the loopback, what does not is hardware.
        link.index != own.index && !link.loopback && (leads_to_host || link.kind.is_none())
    });
    match other {
        None => Ok(own.index),
        Some(link) => {
            Err(ProofError::Reached(format!("the interface {}, which leads out past the firewall", link.name)))
        }
    }
}

/// Whether the calling thread is where `address` is.
fn is_there(address: Ipv4Addr) -> Result<(), ProofError> {
    let failed = |e: Errno| ProofError::impossible("find its address inside", e);
    let probe = stream(AddressFamily::INET).map_err(failed)?;
    bind(&probe, &SocketAddrV4::new(address, 0)).map_err(failed)
}

fn stream(family: AddressFamily) -> Result<OwnedFd, Errno> {
    socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, Some(ipproto::TCP))
}

/// One connection for each target, all at once.
fn attempt(targets: &[Target], deadline: Instant) -> Result<(), ProofError> {
    let begun = Instant::now();
    let mut pending = Vec::new();
    for target in targets {
        if let Some(socket) = begin(target)? {
            pending.push((target, socket));
        }
    }
    loop {
        let nearby_only = pending.iter().all(|(target, _)| target.nearby);
        let until = if nearby_only { deadline.min(begun + NEARBY) } else { deadline };
        let left = until.saturating_duration_since(Instant::now());
        // What was not answered in that time is closed.
        if pending.is_empty() || left.is_zero() {
            return Ok(());
        }
        let answered: Vec<bool> = {
            let mut set: Vec<_> = pending.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::OUT)).collect();
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut set, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => set.iter().map(|one| !one.revents().is_empty()).collect(),
                Err(error) => return Err(ProofError::impossible("wait for its connections", error)),
            }
        };
        let mut answered = answered.into_iter();
        let mut outcome = Ok(());
        pending.retain(|(target, socket)| {
            if answered.next() != Some(true) {
                return true;
            }
            if let Ok(Ok(())) = sockopt::socket_error(socket) {
                outcome = Err(ProofError::Reached(target.to_string()));
            }
            false
        });
        outcome?;
    }
}

/// `None` when it is refused at once.
fn begin(target: &Target) -> Result<Option<OwnedFd>, ProofError> {
    let family = if target.address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let failed = |e: Errno| ProofError::impossible(&format!("try {target}"), e);
    let socket = match stream(family) {
        Ok(socket) => socket,
        // Without IPv6 there is no way over it.
        Err(Errno::AFNOSUPPORT) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    match connect(&socket, &target.address) {
        Ok(()) => Err(ProofError::Reached(target.to_string())),
        Err(Errno::INPROGRESS) => Ok(Some(socket)),
        Err(error @ (Errno::NOMEM | Errno::NOBUFS | Errno::INVAL)) => Err(failed(error)),
        Err(_) => Ok(None),
    }
}
