//! Makes a fresh container into one that buildkitd can run in.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::net::{AddressFamily, SendFlags, SocketType, send, socket};

const CGROUP: &str = "/sys/fs/cgroup";

/// What has to be mounted from the host: without them the daemon would start with an empty, throw-away cache.
const REQUIRED_MOUNTS: [&str; 2] = ["/var/lib/buildkit", "/etc/kiln"];

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) resolvers: Vec<IpAddr>,
    pub(crate) drain: Option<Duration>,
}

impl Settings {
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let resolvers = variable("KILN_RESOLVERS").unwrap_or_default();
        let resolvers = resolvers
            .split([',', ' '])
            .filter(|part| !part.is_empty())
            .map(|part| part.parse().map_err(|_| format!("KILN_RESOLVERS: {part:?} is not an IP address")))
            .collect::<Result<_, _>>()?;
        let drain = variable("KILN_DRAIN_SECONDS")
            .map(|text| text.parse().map_err(|_| format!("KILN_DRAIN_SECONDS: {text:?} is not a number of seconds")))
            .transpose()?
            .map(Duration::from_secs);
        Ok(Self { resolvers, drain })
    }
}

/// Stops at what makes the daemon useless or unsafe, and only reports the rest.
pub(crate) fn prepare(settings: &Settings) -> Result<(), String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|e| format!("cannot read the mounts: {e}"))?;
    for path in REQUIRED_MOUNTS {
        if !is_mounted(&mounts, path) {
            return Err(format!("nothing is mounted on {path}: the instance was made without that device"));
        }
    }
    warn("bring up the loopback interface", loopback_up());
    if !fs::read_to_string("/proc/net/route").is_ok_and(|routes| has_default_route(&routes)) {
        eprintln!("kiln-init: there is no default route: the instance was made without its network device");
    }
    tmpfs("/run", c"mode=0755")?;
    tmpfs("/tmp", c"mode=1777")?;
    cgroup();
    if !settings.resolvers.is_empty() {
        // A link may lead to a place that does not exist here.
        let _ = fs::remove_file("/etc/resolv.conf");
        warn("write /etc/resolv.conf", fs::write("/etc/resolv.conf", resolv_conf(&settings.resolvers)));
    }
    Ok(())
}

fn warn(what: &str, result: io::Result<()>) {
    if let Err(error) = result {
        eprintln!("kiln-init: cannot {what}: {error}");
    }
}

/// A mount point is the fifth field of a line.
fn is_mounted(mountinfo: &str, path: &str) -> bool {
    mountinfo.lines().any(|line| line.split(' ').nth(4) == Some(path))
}

/// A line of /proc/net/route with destination and mask zero; the first line is a heading.
fn has_default_route(routes: &str) -> bool {
    routes.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        fields.get(1) == Some(&"00000000") && fields.get(7) == Some(&"00000000")
    })
}

fn resolv_conf(resolvers: &[IpAddr]) -> String {
    resolvers.iter().fold(String::new(), |mut text, address| {
        let _ = writeln!(text, "nameserver {address}");
        text
    })
}

/// Sets `IFF_UP` on the first interface of the namespace, which always is the loopback.
/// No protocol named means `NETLINK_ROUTE`, which is number 0.
fn loopback_up() -> io::Result<()> {
    let socket = socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    send(&socket, &loopback_request(), SendFlags::empty())?;
    Ok(())
}

/// An `RTM_NEWLINK` of rtnetlink(7): a header of 16 bytes, then `struct ifinfomsg`.
fn loopback_request() -> [u8; 32] {
    const RTM_NEWLINK: u16 = 16;
    const NLM_F_REQUEST: u16 = 1;
    const IFF_UP: u32 = 1;
    const LOOPBACK: u32 = 1;
    let mut request = [0; 32];
    request[0..4].copy_from_slice(&32_u32.to_ne_bytes());
    request[4..6].copy_from_slice(&RTM_NEWLINK.to_ne_bytes());
    request[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    request[20..24].copy_from_slice(&LOOPBACK.to_ne_bytes());
    request[24..28].copy_from_slice(&IFF_UP.to_ne_bytes());
    request[28..32].copy_from_slice(&IFF_UP.to_ne_bytes());
    request
}

fn tmpfs(path: &str, options: &std::ffi::CStr) -> Result<(), String> {
    let _ = fs::create_dir_all(path);
    mount("tmpfs", path, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, options)
        .map_err(|error| format!("cannot mount a tmpfs on {path}: {error}"))
}

/// Mounts cgroup2 where the runtime has not (hosts with both versions), moves this process out of the root group, since
/// a group with processes cannot hand controllers on, and hands on every one there is.
fn cgroup() {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    match mount("cgroup2", CGROUP, "cgroup2", flags, None) {
        // EBUSY: it is there already.
        Ok(()) | Err(Errno::BUSY) => {}
        Err(error) => eprintln!("kiln-init: cannot mount cgroup2, steps may not run: {error}"),
    }
    let root = Path::new(CGROUP);
    let init = root.join("init");
    if let Err(error) = rustix::fs::mkdir(&init, Mode::from_raw_mode(0o755))
        && error != Errno::EXIST
    {
        eprintln!("kiln-init: cannot make {}: {error}", init.display());
        return;
    }
    warn("move into the init group", fs::write(init.join("cgroup.procs"), "0"));
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    for controller in controllers.split_ascii_whitespace() {
        // One at a time: one that is refused must not keep the others back.
        let enabled = fs::write(root.join("cgroup.subtree_control"), format!("+{controller}"));
        warn(&format!("enable the {controller} controller"), enabled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_come_from_the_environment() {
        let of = |resolvers: Option<&str>, drain: Option<&str>| {
            Settings::read(|name| if name == "KILN_RESOLVERS" { resolvers } else { drain }.map(str::to_owned))
        };
        assert_eq!(of(None, None), Ok(Settings { resolvers: vec![], drain: None }));
        let both = of(Some("10.0.0.1, fd00::1"), Some("7")).expect("valid");
        assert_eq!(resolv_conf(&both.resolvers), "nameserver 10.0.0.1\nnameserver fd00::1\n");
        assert_eq!(both.drain, Some(Duration::from_secs(7)));
        assert!(of(Some("dns.example"), None).expect_err("a name").contains("\"dns.example\""));
        assert!(of(Some("10.0.0.1\nsearch evil"), None).is_err());
        assert!(of(None, Some("soon")).is_err());
    }

    #[test]
    fn mount_points_are_compared_whole() {
        let mounts = "36 35 98:0 /a /var/lib/buildkit rw - ext4 /dev/a rw\n37 35 0:5 / /etc/kiln2 rw - tmpfs none rw\n";
        assert!(is_mounted(mounts, "/var/lib/buildkit"));
        assert!(!is_mounted(mounts, "/etc/kiln"));
        assert!(!is_mounted(mounts, "/a"));
    }

    #[test]
    fn a_default_route_has_neither_destination_nor_mask() {
        let heading = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n";
        let link = "eth0\t0100FEA9\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n";
        let default = "eth0\t00000000\t0100FEA9\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        assert!(has_default_route(&format!("{heading}{link}{default}")));
        assert!(!has_default_route(&format!("{heading}{link}")));
        assert!(!has_default_route(""));
    }
}
