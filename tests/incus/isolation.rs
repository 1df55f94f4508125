//! What an instance can reach, tried from inside of real ones.

use std::fs::File;
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::os::fd::AsFd as _;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::*;

fn run(line: &str) -> bool {
    Command::new("sh").args(["-ec", line]).status().expect("sh").success()
}

impl Lab {
    async fn started_in(&mut self, lane: Lane, number: u8) -> InstanceSpec {
        let spec = InstanceSpec { lane, ..self.spec(number).await };
        self.runtime.create(&spec).await.expect("created");
        self.runtime.start(&spec).await.expect("started");
        spec
    }

    /// The host's number of its first process.
    fn pid(&self, spec: &InstanceSpec) -> String {
        let listed = self.incus(&["list", "--format=csv", "--columns=p", &spec.key.daemon_name()]);
        String::from_utf8_lossy(&listed.stdout).trim().to_owned()
    }

    /// Undoes `damage` and does it again until a proof has failed without the runtime's guard having mended the table.
    async fn violation(&self, spec: &InstanceSpec, damage: &str) -> String {
        for _ in 0..5 {
            assert!(run(damage), "{damage}");
            let outcome = self.runtime.prove_isolation(spec).await;
            let mended = self.network.check().await.is_ok();
            self.network.ensure().await.expect("mended");
            match outcome {
                Err(error @ RuntimeError::NotIsolated { .. }) => return error.to_string(),
                Ok(()) if mended => {}
                other => panic!("{damage}: {other:?}"),
            }
        }
        panic!("{damage}: the guard was always there first")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_isolated_is_proven_and_what_is_not_is_named() {
    let Some(mut lab) = Lab::new("what_is_isolated_is_proven_and_what_is_not_is_named").await else { return };
    let spec = lab.started_in(Lane::Untrusted, 20).await;
    let other = lab.started_in(Lane::Trusted, 21).await;
    // Right after its start, when nothing listens in it yet, and again.
    lab.runtime.prove_isolation(&spec).await.expect("isolated from the start");
    answers(&spec).await;
    answers(&other).await;
    for _ in 0..3 {
        let begun = Instant::now();
        lab.runtime.prove_isolation(&spec).await.expect("isolated");
        eprintln!("proof {:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(1), "a proof takes {:?}", begun.elapsed());
    }
    lab.runtime.prove_isolation(&other).await.expect("the trusted are isolated too");

    let accepted = |chain: &str, rule: &str| format!("nft insert rule inet {TABLE} {chain} {rule} accept");
    let reached = lab.violation(&spec, &accepted("to_host", "tcp dport 1024-65535")).await;
    assert!(reached.contains("this host (") && reached.contains("nft list ruleset"), "{reached}");
    let daemon = format!("another daemon ({})", other.address);
    let reached = lab.violation(&spec, &accepted("from_instance", "oifname kiln*")).await;
    assert!(reached.contains(&daemon), "{reached}");
    let reached = lab.violation(&spec, &format!("nft flush table inet {TABLE}")).await;
    assert!(reached.contains("from inside it reached"), "{reached}");

    // A metadata service, and a way to it.
    assert!(run("ip addr add 169.254.169.254/32 dev lo"));
    let service = TcpListener::bind("169.254.169.254:80");
    let reached = lab.violation(&spec, &accepted("to_host", "tcp dport 80")).await;
    drop(service.expect("a service"));
    assert!(run("ip addr del 169.254.169.254/32 dev lo"));
    assert!(reached.contains("the metadata service (169.254.169.254:80)"), "{reached}");

    // A second way out, of which the table knows nothing.
    let pid = lab.pid(&spec);
    assert!(run(&format!("ip link add kilntestout type veth peer name out netns {pid}")));
    let reached = lab.runtime.prove_isolation(&spec).await;
    assert!(run("ip link delete kilntestout"));
    let reached = reached.expect_err("there is a way out").to_string();
    assert!(reached.contains("the interface out, which leads out past the firewall"), "{reached}");

    lab.runtime.prove_isolation(&spec).await.expect("isolated again");
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_lane_when_its_instance_is_gone() {
    let Some(mut lab) = Lab::new("nothing_is_left_of_a_lane_when_its_instance_is_gone").await else { return };
    let members = || {
        let listed = Command::new("nft").args(["list", "table", "inet", TABLE]).output().expect("nft");
        String::from_utf8_lossy(&listed.stdout).matches("kiln0a4f00").count()
    };
    let specs = [lab.started_in(Lane::Untrusted, 22).await, lab.started_in(Lane::Trusted, 23).await];
    assert_eq!(members(), 2);
    for spec in &specs {
        lab.runtime.stop(spec, StopBound::Force).await.expect("stopped");
    }
    lab.runtime.destroy(&specs[0]).await.expect("destroyed");
    lab.runtime.destroy_found(&specs[1].key.daemon_name()).await.expect("destroyed by its name");
    assert_eq!(members(), 0);
    lab.done().await;
}

/// First host id and count of a map in `/proc/PID`.
fn ids(pid: &str, map: &str) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/{map}")).expect("a map");
    let numbers: Vec<u64> = text.split_whitespace().map(|number| number.parse().expect("a number")).collect();
    assert_eq!((numbers.len(), numbers[0]), (3, 0), "{text}");
    (numbers[1], numbers[2])
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_root_of_the_host_and_the_untrusted_share_no_ids() {
    let Some(mut lab) = Lab::new("nobody_is_root_of_the_host_and_the_untrusted_share_no_ids").await else { return };
    let trusted = lab.started_in(Lane::Trusted, 26).await;
    let untrusted = [lab.started_in(Lane::Untrusted, 27).await, lab.started_in(Lane::Untrusted, 28).await];
    for spec in [&trusted, &untrusted[0], &untrusted[1]] {
        // With ids of its own it has its cache and its files all the same.
        answers(spec).await;
        assert!(
            lab.inside(spec, "touch /var/lib/buildkit/x && test -O /var/lib/buildkit/x"),
            "the cache is not its own"
        );
        let name = spec.key.daemon_name();
        let privileged = lab.incus(&["config", "get", "--expanded", &name, "security.privileged"]);
        assert_eq!(String::from_utf8_lossy(&privileged.stdout).trim(), "false");
        for map in ["uid_map", "gid_map"] {
            assert!(ids(&lab.pid(spec), map).0 >= 65536, "{map} of {name} begins among the host's own");
        }
    }
    for map in ["uid_map", "gid_map"] {
        let [(one, count), (other, _)] = [0, 1].map(|at| ids(&lab.pid(&untrusted[at]), map));
        assert!(one.abs_diff(other) >= count && count >= 65536, "{map}: {one} and {other}, {count} each");
        // Nobody in a trusted one with an id below 65536 is anybody in an untrusted one.
        let (shared, _) = ids(&lab.pid(&trusted), map);
        assert!(one >= shared + 65536 && other >= shared + 65536, "{map}: {one}, {other} and {shared}");
    }
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_the_untrusted_are_in_force() {
    let Some(mut lab) = Lab::new("limits_of_the_untrusted_are_in_force").await else { return };
    let limits = Limits { memory_bytes: Some(1 << 30), cpus: Some(1), processes: Some(300), io_bytes: Some(50 << 20) };
    let spec = InstanceSpec { lane: Lane::Untrusted, limits, ..lab.spec(29).await };
    lab.runtime.create(&spec).await.expect("created");
    lab.runtime.start(&spec).await.expect("started");
    answers(&spec).await;
    assert!(lab.inside(&spec, "test $(nproc) = 1"), "it sees more CPUs than it has");
    for (controller, file, value) in [
        ("memory", ["memory.limit_in_bytes", "memory.max"], "1073741824"),
        ("pids", ["pids.max"; 2], "300"),
        ("blkio", ["blkio.throttle.read_bps_device", "io.max"], "52428800"),
        ("blkio", ["blkio.throttle.write_bps_device", "io.max"], "52428800"),
    ] {
        // As the first version of cgroups has it, and the second.
        let payload = format!("lxc.payload.kiln_{}", spec.key.daemon_name());
        let places = [format!("{controller}/{payload}/{}", file[0]), format!("{payload}/{}", file[1])];
        let read = |place: &String| std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(place)).ok();
        let found = places.iter().find_map(read).unwrap_or_else(|| panic!("none of {places:?} is there"));
        assert!(found.contains(value), "{places:?}: {found}");
    }
    lab.done().await;
}

/// Another network namespace that plays everything beyond this host; removed with it. Its cable must not be named like
/// Kiln's own, all of which are closed.
struct Internet {
    forwards_v6: String,
}

const PUBLIC: &str = "11.99.0.2";
const PRIVATE: &str = "10.66.0.2";
const V6_FORWARDING: &str = "/proc/sys/net/ipv6/conf/all/forwarding";

impl Internet {
    const SETUP: &str = "
        ip netns add kilntest
        ip link add ktestwan type veth peer name wan netns kilntest
        ip addr add 11.99.0.1/24 dev ktestwan; ip -6 addr add 2a11:99::1/64 dev ktestwan nodad
        ip link set ktestwan up
        ip -n kilntest link set lo up; ip -n kilntest link set wan up
        for a in 11.99.0.2/24 10.66.0.2/32 192.168.66.2/32 172.16.66.2/32 100.64.66.2/32; do
            ip -n kilntest addr add $a dev wan; done
        for a in 2a11:99::2/64 fd66::2/128; do ip -n kilntest -6 addr add $a dev wan nodad; done
        ip -n kilntest route add default via 11.99.0.1; ip -n kilntest -6 route add default via 2a11:99::1
        for a in 10.66.0.2 192.168.66.2 172.16.66.2 100.64.66.2; do ip route add $a via 11.99.0.2; done
        ip -6 route add fd66::2 via 2a11:99::2";

    fn new() -> Self {
        Self::remove();
        assert!(run(Self::SETUP), "no network to test with");
        let forwards_v6 = std::fs::read_to_string(V6_FORWARDING).expect("read");
        std::fs::write(V6_FORWARDING, "1").expect("IPv6 is forwarded");
        let (sender, listening) = std::sync::mpsc::channel();
        for port in [80, 5000, 7000] {
            let listens = sender.clone();
            // Its sockets stay in the namespace; the thread ends with the test.
            std::thread::spawn(move || {
                let namespace = File::open("/run/netns/kilntest").expect("the namespace");
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("entered");
                let service = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).expect("a service");
                listens.send(()).expect("waited for");
                for connection in service.incoming() {
                    drop(connection);
                }
            });
        }
        for _ in 0..3 {
            listening.recv_timeout(PATIENCE).expect("nothing listens there");
        }
        Self { forwards_v6 }
    }

    fn remove() {
        let _ = Command::new("ip").args(["link", "delete", "ktestwan"]).output();
        let _ = Command::new("ip").args(["netns", "delete", "kilntest"]).output();
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        Self::remove();
        let _ = std::fs::write(V6_FORWARDING, self.forwards_v6.trim());
    }
}

/// An address of IPv6 and a way out, as nobody gives it to an instance: closed all the same.
fn give_v6(lab: &Lab, spec: &InstanceSpec) {
    let (pid, cable) = (lab.pid(spec), Key::interface_name(*spec.address.ip()));
    let last = spec.address.ip().octets()[3];
    assert!(run(&format!(
        "ip -6 addr add fd79::1/128 dev {cable} nodad 2>/dev/null || true
         ip -6 route add fd79::{last}/128 dev {cable}
         nsenter -t {pid} -n sh -ec '
            ip -6 addr add fd79::{last}/128 dev eth0 nodad
            ip -6 route add fd79::1/128 dev eth0
            ip -6 route add default via fd79::1 dev eth0'"
    )));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_each_lane_reaches_of_the_world() {
    let open = |firewall: &mut NetworkConfig| {
        firewall.mirrors = vec![format!("{PRIVATE}:5000").parse().expect("an address")];
        firewall.allow = vec![format!("{PRIVATE}:7000").parse().expect("a destination")];
    };
    let Some(mut lab) = Lab::with("what_each_lane_reaches_of_the_world", open).await else { return };
    let internet = Internet::new();
    let untrusted = lab.started_in(Lane::Untrusted, 24).await;
    let trusted = lab.started_in(Lane::Trusted, 25).await;
    for spec in [&untrusted, &trusted] {
        answers(spec).await;
        give_v6(&lab, spec);
    }
    let service = TcpListener::bind("[::]:0").expect("a service of the host");
    let host = service.local_addr().expect("its address").port();
    let places: [(&str, u16, bool, bool); 14] = [
        // Where, and whether the untrusted and the trusted reach it.
        (PUBLIC, 80, true, true),
        (PRIVATE, 5000, true, true),
        (PRIVATE, 7000, false, true),
        (PRIVATE, 80, false, false),
        ("192.168.66.2", 80, false, false),
        ("172.16.66.2", 80, false, false),
        ("100.64.66.2", 80, false, false),
        ("fd66::2", 80, false, false),
        ("fd66::2", 5000, false, false),
        ("2a11:99::2", 80, false, false),
        ("11.99.0.1", host, false, false),
        ("169.254.0.1", host, false, false),
        ("2a11:99::1", host, false, false),
        ("fd79::1", host, false, false),
    ];
    let reached = |spec: &InstanceSpec| {
        let reach = |(address, port, ..): &(&str, u16, bool, bool)| {
            lab.reaches(spec, address.parse::<IpAddr>().expect("an address"), *port)
        };
        places.iter().map(reach).collect::<Vec<_>>()
    };
    let (of_untrusted, of_trusted) = (reached(&untrusted), reached(&trusted));
    let proofs = [lab.runtime.prove_isolation(&untrusted).await, lab.runtime.prove_isolation(&trusted).await];
    // Without the table each of these places is there to be reached, so it is the table that closes them.
    let control = loop {
        lab.network.remove().await.expect("removed");
        let control = reached(&untrusted);
        if lab.network.check().await.is_err() {
            break control;
        }
    };
    drop(internet);
    for (at, (address, port, by_untrusted, by_trusted)) in places.into_iter().enumerate() {
        assert_eq!(of_untrusted[at], by_untrusted, "{address}:{port} from the untrusted");
        assert_eq!(of_trusted[at], by_trusted, "{address}:{port} from the trusted");
        assert!(control[at], "{address}:{port} is closed without the table too");
    }
    for proof in proofs {
        proof.expect("an address of IPv6 opens nothing");
    }
    lab.done().await;
}
