//! The Incus runtime against a real Incus: `KILN_TEST_INCUS` names the directory of a private one (`incus_up DIR` in
//! scripts/lib/incus.sh) that holds the image `kiln` in the project `kiln`. Needs root.
//!
//! One test at a time: they share one Incus, and one of them kills it.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln::host::incus::{IncusConfig, IncusRuntime};
use kiln::host::network::{Network, NetworkConfig};
use kiln::host::{
    Change, InstanceEvent, InstanceSpec, InstanceState, Lane, Limits, Properties, Runtime, RuntimeError, StopBound,
};
use kiln_domain::Key;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Mutex, MutexGuard, broadcast};

#[path = "incus/isolation.rs"]
mod isolation;

static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
const PORT: u16 = 8372;
const STOPPED: InstanceState = InstanceState::Stopped { outdated: Vec::new() };
const PATIENCE: Duration = Duration::from_secs(30);
/// Not Kiln's own: an admin's daemons on the same host keep their table.
const TABLE: &str = "kiln-test";

struct Lab {
    _turn: MutexGuard<'static, ()>,
    incus: PathBuf,
    runtime: Arc<IncusRuntime>,
    network: Arc<Network>,
    home: tempfile::TempDir,
    made: Vec<InstanceSpec>,
}

impl Lab {
    async fn new(test: &str) -> Option<Self> {
        Self::with(test, |_| ()).await
    }

    async fn with(test: &str, change: impl FnOnce(&mut NetworkConfig)) -> Option<Self> {
        let Some(incus) = std::env::var_os("KILN_TEST_INCUS").map(PathBuf::from) else {
            eprintln!("skipped: {test}: KILN_TEST_INCUS does not name the directory of a private Incus");
            return None;
        };
        let turn = ONE_AT_A_TIME.lock().await;
        let mut firewall = NetworkConfig::new("10.79.0.0/16".parse().expect("a range"), Vec::new());
        TABLE.clone_into(&mut firewall.table);
        change(&mut firewall);
        let network = Arc::new(Network::new(firewall));
        let config = IncusConfig::new(incus.join("unix.socket"), "kiln".to_owned());
        let runtime = IncusRuntime::connect(config, Arc::clone(&network)).await.expect("a usable Incus");
        let home = tempfile::tempdir().expect("a directory");
        Some(Self { _turn: turn, incus, runtime: Arc::new(runtime), network, home, made: Vec::new() })
    }

    /// A spec of its own with a volume and a plain buildkitd.toml; whatever an earlier run left of it is removed.
    async fn spec(&mut self, number: u8) -> InstanceSpec {
        let key: Key = format!("p00000000000000{number:02x}").parse().expect("a key");
        let volume = self.home.path().join(format!("cache-{key}"));
        let files = self.home.path().join(format!("files-{key}"));
        std::fs::create_dir(&volume).expect("a volume");
        std::fs::create_dir(&files).expect("a directory");
        std::fs::write(files.join("buildkitd.toml"), format!("[grpc]\naddress = [\"tcp://0.0.0.0:{PORT}\"]\n"))
            .expect("a configuration");
        let spec = InstanceSpec {
            key,
            lane: Lane::Trusted,
            properties: Properties::from([("repo".to_owned(), "example.com/test".to_owned())]),
            address: SocketAddrV4::new(Ipv4Addr::new(10, 79, 0, number), PORT),
            volume,
            files,
            limits: Limits { memory_bytes: Some(1 << 30), cpus: Some(1), processes: Some(2000), io_bytes: None },
        };
        self.runtime.stop(&spec, StopBound::Force).await.expect("nothing runs of an earlier run");
        self.runtime.destroy(&spec).await.expect("nothing is left of an earlier run");
        self.made.push(spec.clone());
        spec
    }

    async fn started(&mut self, number: u8) -> InstanceSpec {
        let spec = self.spec(number).await;
        self.runtime.create(&spec).await.expect("created");
        self.runtime.start(&spec).await.expect("started");
        answers(&spec).await;
        spec
    }

    async fn state(&self, spec: &InstanceSpec) -> InstanceState {
        self.runtime.look(spec).await.expect("looked")
    }

    async fn incarnation(&self, spec: &InstanceSpec) -> String {
        match self.state(spec).await {
            InstanceState::Running { incarnation, .. } => incarnation,
            other => panic!("it does not run: {other:?}"),
        }
    }

    fn incus(&self, arguments: &[&str]) -> std::process::Output {
        let mut command = Command::new("incus");
        command.env("INCUS_DIR", &self.incus).args(arguments).arg("--project=kiln");
        command.output().expect("the incus program")
    }

    /// Runs a shell line inside; whether it succeeded.
    fn inside(&self, spec: &InstanceSpec, line: &str) -> bool {
        let mut command = Command::new("incus");
        command.env("INCUS_DIR", &self.incus);
        command.args(["exec", "--project=kiln", &spec.key.daemon_name(), "--", "bash", "-c", line]);
        command.output().expect("the incus program").status.success()
    }

    /// Whether a TCP connection from inside comes about.
    fn reaches(&self, from: &InstanceSpec, address: impl std::fmt::Display, port: u16) -> bool {
        self.inside(from, &format!("timeout 2 bash -c '</dev/tcp/{address}/{port}'"))
    }

    fn shell(&self, line: &str) {
        let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/lib/incus.sh");
        let line = format!(". {}; _incus_dir={}; {line}", library.display(), self.incus.display());
        let status = Command::new("bash").args(["-c", &line]).status().expect("bash");
        assert!(status.success(), "{line}");
    }

    async fn done(self) {
        for spec in &self.made {
            self.runtime.stop(spec, StopBound::Force).await.expect("stopped");
            self.runtime.destroy(spec).await.expect("destroyed");
            assert_eq!(self.state(spec).await, InstanceState::Absent);
            self.runtime.destroy(spec).await.expect("destroyed twice");
            assert!(spec.volume.is_dir(), "the volume went with the instance");
        }
        self.network.remove().await.expect("the table is removed");
    }
}

/// A daemon listens: the same milestone that a connecting client sees.
async fn answers(spec: &InstanceSpec) {
    let deadline = Instant::now() + PATIENCE;
    while tokio::net::TcpStream::connect(spec.address).await.is_err() {
        assert!(Instant::now() < deadline, "nothing listens on {} after {PATIENCE:?}", spec.address);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits for an event about this key; others are passed over.
async fn hear(events: &mut broadcast::Receiver<InstanceEvent>, key: &Key) {
    let heard = async {
        loop {
            match events.recv().await {
                Ok(InstanceEvent::Changed(heard)) if heard == *key => return,
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => panic!("the events ended"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.expect("no event came");
}

fn drain(events: &mut broadcast::Receiver<InstanceEvent>) {
    while events.try_recv().is_ok() {}
}

#[tokio::test(flavor = "multi_thread")]
async fn from_absent_to_running_and_back() {
    let Some(mut lab) = Lab::new("from_absent_to_running_and_back").await else { return };
    let mut events = lab.runtime.events();
    let spec = lab.spec(1).await;
    assert_eq!(lab.state(&spec).await, InstanceState::Absent);
    let begun = Instant::now();
    lab.runtime.create(&spec).await.expect("created");
    eprintln!("create {:?}", begun.elapsed());
    assert_eq!(lab.state(&spec).await, STOPPED);
    assert_eq!(lab.runtime.pressure(&spec.key), None, "nothing runs");
    lab.runtime.create(&spec).await.expect("created twice");
    assert!(lab.runtime.found().await.expect("a list").iter().any(|found| found.key.as_ref() == Some(&spec.key)));

    let begun = Instant::now();
    let first = lab.runtime.start(&spec).await.expect("started");
    let started = begun.elapsed();
    answers(&spec).await;
    let counted = Path::new("/proc/pressure/cpu").exists();
    assert_eq!(lab.runtime.pressure(&spec.key).is_some(), counted, "where the kernel counts it, it is known");
    eprintln!("start {started:?}, then it listened after {:?}", begun.elapsed());
    assert_eq!(lab.runtime.start(&spec).await.expect("started twice"), first);
    assert_eq!(lab.incarnation(&spec).await, first);
    hear(&mut events, &spec.key).await;

    let begun = Instant::now();
    lab.runtime.stop(&spec, StopBound::Graceful(Duration::from_secs(20))).await.expect("stopped");
    eprintln!("graceful stop {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(15), "an idle daemon did not stop by itself");
    assert!(lab.runtime.last_words(&spec).await.contains("asked to stop"), "kiln-init was not asked");
    assert_eq!(lab.state(&spec).await, STOPPED);
    lab.runtime.stop(&spec, StopBound::Force).await.expect("stopped twice");

    let second = lab.runtime.start(&spec).await.expect("started again");
    assert_ne!(first, second, "a new start is a new incarnation");
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_is_heard_of_and_leaves_words() {
    let Some(mut lab) = Lab::new("a_daemon_that_dies_is_heard_of_and_leaves_words").await else { return };
    let spec = lab.started(2).await;
    let mut events = lab.runtime.events();
    drain(&mut events);
    lab.inside(&spec, "kill -9 $(cat /proc/1/task/1/children)");
    hear(&mut events, &spec.key).await;
    let deadline = Instant::now() + PATIENCE;
    while lab.state(&spec).await != STOPPED {
        assert!(Instant::now() < deadline, "it is still there");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let words = lab.runtime.last_words(&spec).await;
    assert!(words.contains("buildkitd went away by itself: killed by signal 9"), "{words}");

    // One that cannot even begin says why.
    std::fs::write(spec.files.join("buildkitd.toml"), "this is no toml").expect("written");
    let words = match lab.runtime.start(&spec).await {
        Err(RuntimeError::Exited { log, .. }) => log,
        Ok(_) => {
            let deadline = Instant::now() + PATIENCE;
            while lab.state(&spec).await != STOPPED {
                assert!(Instant::now() < deadline, "a daemon without a configuration runs");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            lab.runtime.last_words(&spec).await
        }
        Err(other) => panic!("{other}"),
    };
    assert!(words.contains("toml"), "{words}");
    assert!(words.contains("exit status 1"), "{words}");
    lab.done().await;
}

/// Incus reads from a new connection before it accepts the next: one that says nothing shuts everybody out.
#[tokio::test(flavor = "multi_thread")]
async fn many_requests_at_once_shut_nobody_out() {
    let Some(mut lab) = Lab::new("many_requests_at_once_shut_nobody_out").await else { return };
    let spec = lab.spec(8).await;
    for _ in 0..20 {
        let looks = (0..16).map(|_| {
            let (runtime, spec) = (Arc::clone(&lab.runtime), spec.clone());
            tokio::spawn(async move { runtime.look(&spec).await.expect("looked") })
        });
        futures_util::future::join_all(looks.collect::<Vec<_>>()).await;
        let other = async {
            let mut stream = tokio::net::UnixStream::connect(lab.incus.join("unix.socket")).await.expect("connected");
            stream.write_all(b"GET /1.0 HTTP/1.0\r\nHost: incus\r\n\r\n").await.expect("asked");
            stream.read_u8().await.expect("an answer")
        };
        tokio::time::timeout(Duration::from_secs(5), other).await.expect("somebody else is not let in");
    }
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_half_made_is_never_started() {
    let Some(mut lab) = Lab::new("what_is_half_made_is_never_started").await else { return };
    let spec = lab.spec(3).await;
    let name = spec.key.daemon_name();
    lab.runtime.create(&spec).await.expect("created");
    assert!(lab.incus(&["config", "device", "remove", &name, "cache"]).status.success());
    let state = lab.state(&spec).await;
    assert!(matches!(&state, InstanceState::HalfMade { why } if why.contains("cache is missing")), "{state:?}");
    let refused = lab.runtime.start(&spec).await.expect_err("started without its cache");
    assert!(matches!(refused, RuntimeError::Refused { .. }) && !refused.is_retryable(), "{refused}");
    lab.runtime.create(&spec).await.expect_err("a different one is no success");
    lab.runtime.destroy(&spec).await.expect("destroyed");
    lab.runtime.create(&spec).await.expect("created");

    // Incus starts it by hand's order; kiln-init stops it before a daemon can fill a throw-away cache.
    assert!(lab.incus(&["config", "device", "remove", &name, "cache"]).status.success());
    lab.incus(&["start", &name]);
    let deadline = Instant::now() + PATIENCE;
    while !lab.runtime.last_words(&spec).await.contains("nothing is mounted on /var/lib/buildkit") {
        assert!(Instant::now() < deadline, "{}", lab.runtime.last_words(&spec).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    let mut other = spec.clone();
    other.limits.memory_bytes = Some(2 << 30);
    lab.runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    // Of one that died by itself Incus may say for a moment that it runs. Whoever is refused asks again, as a worker does.
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = lab.runtime.destroy(&spec).await {
        assert!(error.is_retryable() || matches!(error, RuntimeError::Refused { .. }), "{error}");
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    lab.runtime.create(&spec).await.expect("created");
    assert_eq!(lab.state(&other).await, InstanceState::Stopped { outdated: vec![Change::Limits] });
    std::fs::remove_dir_all(&spec.volume).expect("the volume is taken away");
    let refused = lab.runtime.start(&spec).await.expect_err("started without a volume");
    assert!(refused.to_string().contains("issing source"), "{refused}");
    std::fs::create_dir(&spec.volume).expect("put back");
    lab.done().await;
}

/// An image that no container can be made to work from, but that an alias can name.
fn import_other_image(lab: &Lab) -> String {
    let home = lab.home.path();
    std::fs::create_dir_all(home.join("other/rootfs")).expect("made");
    let machine = Command::new("uname").arg("-m").output().expect("uname");
    let machine = String::from_utf8_lossy(&machine.stdout).trim().to_owned();
    let metadata = format!("architecture: {machine}\ncreation_date: 1\n");
    std::fs::write(home.join("other/metadata.yaml"), metadata).expect("written");
    let tar = home.join("other.tar");
    let made = Command::new("tar")
        .arg("-cf")
        .arg(&tar)
        .args(["-C"])
        .arg(home.join("other"))
        .args(["metadata.yaml", "rootfs"])
        .status();
    assert!(made.expect("tar").success());
    let sum = Command::new("sha256sum").arg(&tar).output().expect("sha256sum");
    let sum = String::from_utf8_lossy(&sum.stdout).split_whitespace().next().expect("a sum").to_owned();
    lab.incus(&["image", "delete", &sum]);
    let imported = lab.incus(&["image", "import", tar.to_str().expect("text")]);
    assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
    sum
}

#[tokio::test(flavor = "multi_thread")]
async fn another_image_is_seen_at_once_and_a_missing_one_is_not_newer() {
    let Some(mut lab) = Lab::new("another_image_is_seen_at_once_and_a_missing_one_is_not_newer").await else { return };
    let spec = lab.started(15).await;
    let before = lab.state(&spec).await;
    let image = lab.incus(&["image", "alias", "list", "kiln", "--format=csv", "--columns=f"]);
    let image = String::from_utf8_lossy(&image.stdout).trim().to_owned();
    let other = import_other_image(&lab);
    let point = |to: &str| {
        lab.incus(&["image", "alias", "delete", "kiln"]);
        assert!(lab.incus(&["image", "alias", "create", "kiln", to]).status.success());
    };
    let mut events = lab.runtime.events();
    drain(&mut events);
    point(&other);
    let heard =
        tokio::time::timeout(PATIENCE, async { while !matches!(events.recv().await, Ok(InstanceEvent::Missed)) {} });
    let heard = heard.await;
    // The event of the creation may be on its way yet.
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut newer = lab.state(&spec).await;
    while newer == before && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(10)).await;
        newer = lab.state(&spec).await;
    }
    lab.runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    let stopped = lab.state(&spec).await;
    lab.incus(&["image", "alias", "delete", "kiln"]);
    drain(&mut events);
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut missing = lab.state(&spec).await;
    while missing != STOPPED && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(10)).await;
        missing = lab.state(&spec).await;
    }
    point(&image);
    lab.incus(&["image", "delete", &other]);
    heard.expect("nobody was told that the image is another");
    let InstanceState::Running { outdated, .. } = &before else { panic!("it does not run: {before:?}") };
    assert_eq!(*outdated, []);
    let InstanceState::Running { outdated, .. } = newer else { panic!("it does not run: {newer:?}") };
    assert_eq!(outdated, [Change::Image]);
    assert_eq!(stopped, InstanceState::Stopped { outdated: vec![Change::Image] });
    assert_eq!(missing, STOPPED);
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_made_is_found_and_goes_only_by_its_name() {
    let Some(mut lab) = Lab::new("what_others_made_is_found_and_goes_only_by_its_name").await else { return };
    let spec = lab.started(16).await;
    lab.incus(&["delete", "--force", "stranger"]);
    assert!(lab.incus(&["init", "--empty", "stranger", "--storage=kiln"]).status.success());
    let used = lab.runtime.cpu_time(&spec).await.expect("measured").expect("it runs");
    assert!(used > Duration::ZERO && used < Duration::from_secs(600), "{used:?}");
    let found = lab.runtime.found().await.expect("listed");
    let of = |name: &str| found.iter().find(|found| found.name == name).expect("listed").clone();
    assert_eq!((of("stranger").key, of("stranger").running), (None, false));
    let ours = of(&spec.key.daemon_name());
    assert_eq!((ours.key.as_ref(), ours.running), (Some(&spec.key), true));
    assert_eq!(ours.properties.get("repo").map(String::as_str), Some("example.com/test"));
    let refused = lab.runtime.destroy_found(&ours.name).await.expect_err("it runs");
    assert!(matches!(refused, RuntimeError::Refused { .. }), "{refused}");
    lab.runtime.destroy_found("stranger").await.expect("destroyed");
    lab.runtime.destroy_found("stranger").await.expect("destroyed already");
    assert!(lab.runtime.found().await.expect("listed").iter().all(|found| found.name != "stranger"));
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stray_interface_keeps_nothing_from_starting() {
    let Some(mut lab) = Lab::new("a_stray_interface_keeps_nothing_from_starting").await else { return };
    let spec = lab.spec(7).await;
    lab.runtime.create(&spec).await.expect("created");
    let name = Key::interface_name(*spec.address.ip());
    // Of a run that was killed.
    let _ = Command::new("ip").args(["link", "delete", &name]).output();
    let made = Command::new("ip").args(["link", "add", &name, "type", "veth", "peer", "name", "kilnstray"]).status();
    assert!(made.expect("ip").success());
    lab.runtime.start(&spec).await.expect("started");
    answers(&spec).await;
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_creators_make_one() {
    let Some(mut lab) = Lab::new("two_creators_make_one").await else { return };
    for number in 10..14 {
        let spec = lab.spec(number).await;
        let (a, b) = tokio::join!(lab.runtime.create(&spec), lab.runtime.create(&spec));
        a.expect("one created it");
        b.expect("the other found it");
        let (a, b) = tokio::join!(lab.runtime.start(&spec), lab.runtime.start(&spec));
        assert_eq!(a.expect("one started it"), b.expect("the other found it running"));
    }
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storage_pool_that_is_not_there_is_named_with_its_remedy() {
    let Some(lab) = Lab::new("a_storage_pool_that_is_not_there_is_named_with_its_remedy").await else { return };
    let config = IncusConfig::new(lab.incus.join("unix.socket"), "no-such-pool".to_owned());
    let error = IncusRuntime::connect(config, Arc::clone(&lab.network)).await.err().expect("refused").to_string();
    assert!(error.contains("no-such-pool") && error.contains("incus storage create"), "{error}");
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_outlive_incus() {
    let Some(mut lab) = Lab::new("instances_outlive_incus").await else { return };
    let spec = lab.started(4).await;
    let before = lab.incarnation(&spec).await;
    let mut events = lab.runtime.events();
    drain(&mut events);
    let mut connection = tokio::net::TcpStream::connect(spec.address).await.expect("a connection");
    lab.shell("kill -9 $(_incus_pid); while _incus_pid >/dev/null; do sleep 0.05; done");
    let away = lab.runtime.look(&spec).await.expect_err("Incus is away");
    assert!(matches!(away, RuntimeError::Unavailable { .. }) && away.is_retryable(), "{away}");
    assert!(lab.runtime.found().await.is_err() && lab.runtime.destroy(&spec).await.is_err());
    lab.shell("incus_start $_incus_dir");
    assert_eq!(lab.incarnation(&spec).await, before, "nothing was started, so nothing has changed");
    // The very connection still stands: HTTP/2's preface is answered with the server's settings.
    connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("written");
    let mut answer = [0; 9];
    tokio::time::timeout(PATIENCE, connection.read_exact(&mut answer)).await.expect("in time").expect("an answer");
    let missed = async { while !matches!(events.recv().await, Ok(InstanceEvent::Missed)) {} };
    tokio::time::timeout(PATIENCE, missed).await.expect("nobody said that events were missed");
    drain(&mut events);
    lab.runtime.stop(&spec, StopBound::Graceful(Duration::from_secs(20))).await.expect("stopped by the new one");
    hear(&mut events, &spec.key).await;
    lab.done().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_reaches_nothing_of_ours() {
    let Some(mut lab) = Lab::new("an_instance_reaches_nothing_of_ours").await else { return };
    let (one, two) = (lab.started(5).await, lab.started(6).await);
    let service = std::net::TcpListener::bind("0.0.0.0:0").expect("a service of the host");
    let port = service.local_addr().expect("its address").port();
    // The way the instance's own router looks to it, and an address that only this host has.
    let gateway = Ipv4Addr::new(169, 254, 0, 1);
    let metadata = Ipv4Addr::new(169, 254, 169, 254);
    let local =
        |verb: &str| Command::new("ip").args(["addr", verb, "169.254.169.254/32", "dev", "lo"]).status().expect("ip");
    local("add");
    let open = |lab: &Lab| {
        [
            lab.reaches(&one, gateway, port),
            lab.reaches(&one, metadata, port),
            lab.reaches(&one, *two.address.ip(), PORT),
        ]
    };
    let closed = open(&lab);
    // Without the table the same ways are open, so it is the table that closes them.
    let control = loop {
        lab.network.remove().await.expect("removed");
        let control = open(&lab);
        // Unless the runtime's guard was there in the meantime.
        if lab.network.check().await.is_err() {
            break control;
        }
    };
    let deadline = Instant::now() + PATIENCE;
    while lab.network.check().await.is_err() {
        assert!(Instant::now() < deadline, "nobody put the table back");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let again = open(&lab);
    local("del");
    assert_eq!(closed, [false; 3], "host, metadata, other instance");
    assert_eq!(control, [true; 3], "the test cannot fail: these ways are closed without the table too");
    assert_eq!(again, [false; 3], "after the runtime put the table back by itself");
    answers(&one).await;
    lab.done().await;
}
