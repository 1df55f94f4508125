//! On models of the host, with real certificates and a daemon that says what it is told to.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use kiln_domain::health::Probed;
use kiln_domain::{BuildSpec, Entitlement};
use tempfile::TempDir;
use tokio::time::Instant;

use super::serving::LOOK_PATIENCE;
use super::*;
use crate::buildkit::ControlError;
use crate::host::RuntimeError;
use crate::host::fake::{FakeRuntime, Fault, Operation};
use crate::host::volumes::{DirEngine, FakeVolumes, search_path};

mod caches;
mod isolation;

/// How a daemon takes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Answers,
    /// Nobody listens.
    Away,
    /// It does not take our certificate.
    Refuses,
    /// It takes the call, and that is all.
    Hangs,
}

#[derive(Debug)]
struct Daemon {
    manner: Mutex<Manner>,
    asked: Mutex<Vec<(&'static str, SocketAddrV4, String)>>,
    building: AtomicU32,
}

impl Daemon {
    fn set(&self, manner: Manner) {
        *self.manner.lock().expect("whole") = manner;
    }

    fn asked(&self, call: &str) -> usize {
        self.asked.lock().expect("whole").iter().filter(|(asked, ..)| *asked == call).count()
    }

    async fn take(&self, call: &'static str, target: &DaemonTarget, deadline: Instant) -> Result<(), ProbeError> {
        let address = target.address;
        self.asked.lock().expect("whole").push((call, address, target.server_name.clone()));
        let manner = *self.manner.lock().expect("whole");
        match manner {
            Manner::Answers => Ok(()),
            Manner::Away => {
                Err(ControlError::NotReachable { address, source: std::io::ErrorKind::ConnectionRefused.into() }.into())
            }
            Manner::Refuses => Err(ControlError::TlsRefused { address, source: rustls::Error::DecryptError }.into()),
            Manner::Hangs => {
                tokio::time::sleep_until(deadline).await;
                Err(ControlError::TimedOut { address, call }.into())
            }
        }
    }
}

#[async_trait]
impl DaemonProbe for Daemon {
    async fn serving(&self, target: &DaemonTarget, deadline: Instant) -> Result<(), ProbeError> {
        self.take("serving", target, deadline).await
    }

    async fn builds(&self, target: &DaemonTarget, deadline: Instant) -> Result<u32, ProbeError> {
        self.take("builds", target, deadline).await.map(|()| self.building.load(Ordering::SeqCst))
    }

    async fn settle(&self, target: &DaemonTarget, deadline: Instant) -> Result<(), ProbeError> {
        self.take("settle", target, deadline).await
    }
}

const BEGIN: i64 = 1_800_000_000_000;

#[derive(Debug)]
struct Watch(AtomicI64);

impl Clock for Watch {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::SeqCst))
    }
}

struct Lab {
    state: TempDir,
    runtime: Arc<FakeRuntime>,
    volumes: Arc<FakeVolumes>,
    daemon: Arc<Daemon>,
    clock: Arc<Watch>,
    effects: HostEffects,
    record: ProjectRecord,
    settings: Settings,
}

impl Lab {
    fn new() -> Self {
        let state = tempfile::tempdir().expect("a directory");
        let runtime = Arc::new(FakeRuntime::new());
        let clock = Arc::new(Watch(AtomicI64::new(BEGIN)));
        let volumes = Arc::new(FakeVolumes::with_clock(clock.clone()));
        let daemon = Arc::new(Daemon {
            manner: Mutex::new(Manner::Answers),
            asked: Mutex::default(),
            building: AtomicU32::new(0),
        });
        let at = |name: &str| state.path().join(name);
        std::fs::write(at("meminfo"), "MemTotal: 100 kB\nMemAvailable: 40 kB\n").expect("written");
        let parts = HostParts {
            runtime: runtime.clone(),
            volumes: volumes.clone(),
            pki: Pki::new(state.path()).expect("a directory for certificates"),
            probe: daemon.clone(),
            clock: clock.clone(),
            pressure: PressureFiles { pressure: at("pressure"), meminfo: at("meminfo") },
        };
        let config = HostEffectsConfig {
            growth: SizePolicy::default(),
            trial_address: Some(std::net::Ipv4Addr::new(127, 0, 0, 99)),
            domains: vec!["cache.example".to_owned(), "old.example".to_owned()],
            daemon_port: 8372,
            shared_file_system: None,
            nameservers: Vec::new(),
            paths: DaemonPaths::OnHost { run: "/run/kiln/daemons".into() },
            size: HostSize { cpus: Some(8), memory_bytes: Some(32 << 30), without_limits: false },
            untrusted: UntrustedPolicy::default(),
            deadlines: StepDeadlines {
                await_serving: Duration::from_secs(60),
                ask: Duration::from_secs(5),
                ..StepDeadlines::default()
            },
        };
        let spec = BuildSpec::new("github.com/org/repo", "", "", "amd64").expect("valid");
        let record = ProjectRecord::new(spec, Ipv4Addr::new(127, 88, 0, 5), Timestamp::from_millis(BEGIN));
        let settings = Settings { volume_bytes: Some(64 << 30), ..Settings::default() };
        Self { state, runtime, volumes, daemon, clock, effects: HostEffects::new(config, parts), record, settings }
    }

    /// As Kiln would have them after a restart, on the same host.
    fn restarted(&self) -> HostEffects {
        self.with_volumes(self.volumes.clone())
    }

    fn with_volumes(&self, volumes: Arc<dyn VolumeEngine>) -> HostEffects {
        let HostParts { runtime, pki, probe, clock, pressure, .. } = &self.effects.parts;
        let parts = HostParts {
            runtime: runtime.clone(),
            volumes,
            pki: pki.clone(),
            probe: probe.clone(),
            clock: clock.clone(),
            pressure: pressure.clone(),
        };
        HostEffects::new(self.effects.config.clone(), parts)
    }

    /// With a daemon that runs.
    async fn running() -> Self {
        let lab = Self::new();
        for step in [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance, Step::StartInstance] {
            lab.step(step).await;
        }
        lab
    }

    async fn step(&self, step: Step) -> Done {
        self.try_step(step).await.unwrap_or_else(|error| panic!("{step:?}: {error:?}"))
    }

    async fn try_step(&self, step: Step) -> Result<Done, EffectError> {
        self.effects.perform(step, &self.record, &self.settings).await
    }

    async fn seen(&self) -> Observed {
        self.effects.observe(&self.record, &self.settings).await.expect("observed")
    }

    async fn incarnation(&self) -> String {
        match self.seen().await.instance {
            InstanceSeen::Running { incarnation, .. } => incarnation,
            other => panic!("it does not run: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_life_in_steps_each_of_which_may_be_taken_twice() {
    let lab = Lab::new();
    let nothing = Observed { volume: VolumeSeen::Absent, files: FilesSeen::Stale, instance: InstanceSeen::Absent };
    assert_eq!(lab.seen().await, nothing);
    for step in [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance] {
        assert_eq!((lab.step(step).await, lab.step(step).await), (Done::Plain, Done::Plain));
    }
    let made = Observed { volume: VolumeSeen::Ready, files: FilesSeen::Current, instance: InstanceSeen::STOPPED };
    assert_eq!(lab.seen().await, made);
    let started = lab.step(Step::StartInstance).await;
    assert_eq!(lab.step(Step::StartInstance).await, started, "what runs is not started again");
    assert_eq!(lab.step(Step::AwaitServing).await, Done::Plain);
    assert_eq!(started, Done::Started { incarnation: lab.incarnation().await });
    let called = lab.daemon.asked.lock().expect("whole").last().cloned().expect("it was asked");
    assert_eq!(called.1, SocketAddrV4::new(lab.record.address, 8372));
    assert_eq!(called.2, lab.record.key.server_name("cache.example"), "by its name in the first domain");

    for step in [Step::StopInstance(Stop::Graceful), Step::StopInstance(Stop::Force), Step::DestroyInstance] {
        assert_eq!((lab.step(step).await, lab.step(step).await), (Done::Plain, Done::Plain));
    }
    assert_eq!(lab.seen().await, Observed { instance: InstanceSeen::Absent, ..made });
    assert_eq!((lab.step(Step::Discard).await, lab.step(Step::Discard).await), (Done::Plain, Done::Plain));
    assert_eq!(lab.seen().await, nothing);
    assert_eq!(lab.effects.trash().await.expect("listed").len(), 1);
    assert!(!lab.state.path().join("pki").join(lab.record.key.as_str()).exists(), "its CA goes with it");
}

#[tokio::test]
async fn a_discard_that_a_crash_cut_short_is_finished() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    lab.step(Step::WriteFiles).await;
    lab.volumes.set_busy(&lab.record.key, true);
    let error = lab.try_step(Step::Discard).await.expect_err("a daemon is in there");
    assert!(matches!(error, EffectError::Volume(VolumeError::Busy { .. })) && error.is_retryable(), "{error}");
    assert_eq!(lab.seen().await.volume, VolumeSeen::Ready, "so that it is tried again");
    lab.volumes.set_busy(&lab.record.key, false);
    lab.step(Step::Discard).await;
    assert!(!lab.state.path().join("pki").join(lab.record.key.as_str()).exists());
}

#[tokio::test]
async fn what_is_set_reaches_the_instance_and_its_files() {
    let mut lab = Lab::running().await;
    lab.settings.cpus = Some(2);
    let outdated = async |lab: &Lab| match lab.seen().await.instance {
        InstanceSeen::Running { outdated, serving: true, .. } => outdated,
        other => panic!("it does not run: {other:?}"),
    };
    assert_eq!(outdated(&lab).await.as_deref(), Some("the limits"));
    lab.runtime.replace_image();
    lab.runtime.replace_program();
    let all = "the image, the buildkitd program, the limits";
    assert_eq!(outdated(&lab).await.as_deref(), Some(all));
    assert_eq!(lab.seen().await.files, FilesSeen::Current, "limits are not in the files");
    lab.settings.volume_bytes = Some(32 << 30);
    assert_eq!(lab.seen().await.files, FilesSeen::Stale, "the cache's size is");
    lab.step(Step::WriteFiles).await;
    assert_eq!(lab.seen().await.files, FilesSeen::Current);
    lab.step(Step::StopInstance(Stop::Force)).await;
    let older = InstanceSeen::Stopped { outdated: Some("the image, the limits".to_owned()) };
    assert_eq!(lab.seen().await.instance, older);
    lab.step(Step::DestroyInstance).await;
    lab.step(Step::CreateInstance).await;
    assert_eq!(lab.seen().await.instance, InstanceSeen::STOPPED);
}

#[tokio::test]
async fn files_are_old_when_time_or_a_hand_says_so() {
    let lab = Lab::running().await;
    let toml = lab.state.path().join("daemons").join(lab.record.key.as_str()).join(TOML);
    let text = std::fs::read_to_string(&toml).expect("written");
    std::fs::write(&toml, text.replace("127.88.0.5", "127.88.0.6")).expect("written");
    assert_eq!(lab.seen().await.files, FilesSeen::Stale);
    lab.step(Step::WriteFiles).await;
    assert_eq!(lab.seen().await.files, FilesSeen::Current);
    // Nine years on, the daemon's certificate is old; its CA is not.
    lab.clock.0.fetch_add(9 * 365 * 86_400_000, Ordering::SeqCst);
    assert_eq!(lab.seen().await.files, FilesSeen::Stale);
    lab.step(Step::WriteFiles).await;
    assert_eq!(lab.seen().await.files, FilesSeen::Current);
}

#[tokio::test]
async fn a_volume_of_somebody_else_is_foreign_and_says_whose() {
    let mut lab = Lab::new();
    let key = lab.record.key.clone();
    lab.step(Step::CreateVolume).await;
    lab.record.address = Ipv4Addr::new(127, 88, 0, 9);
    assert_eq!(lab.seen().await.volume, VolumeSeen::Ready, "an address is no identity");
    let theirs = Properties::from([("repo".to_owned(), "github.com/other/repo".to_owned())]);
    lab.volumes.set_properties(&key, &theirs).await.expect("set");
    let VolumeSeen::Foreign { found } = lab.seen().await.volume else { panic!("taken for ours") };
    assert!(found.contains("github.com/other/repo") && found.contains(key.as_str()), "{found}");
}

#[tokio::test]
async fn a_look_that_fails_is_an_error() {
    let lab = Lab::running().await;
    lab.runtime.set_fault(Operation::Look, Some(Fault::Fail));
    let error = lab.effects.observe(&lab.record, &lab.settings).await.expect_err("it cannot be looked at");
    assert!(error.is_retryable() && !error.timed_out(), "{error}");
    lab.runtime.set_fault(Operation::Look, None);
    // And so is a change whose answer is lost, which may be made again.
    lab.step(Step::StopInstance(Stop::Force)).await;
    lab.step(Step::DestroyInstance).await;
    lab.runtime.set_fault(Operation::Create, Some(Fault::LoseAnswer));
    assert!(lab.try_step(Step::CreateInstance).await.expect_err("lost").is_retryable());
    lab.runtime.set_fault(Operation::Create, None);
    lab.step(Step::CreateInstance).await;
    assert_eq!(lab.seen().await.instance, InstanceSeen::STOPPED);
    lab.volumes.set_full(true);
    let spec = BuildSpec::new("github.com/org/another", "", "", "amd64").expect("valid");
    let other = ProjectRecord::new(spec, Ipv4Addr::new(127, 88, 0, 6), Timestamp::from_millis(BEGIN));
    let error = lab.effects.perform(Step::CreateVolume, &other, &lab.settings).await.expect_err("full");
    assert!(matches!(error, EffectError::Volume(VolumeError::Full { .. })) && !error.is_retryable(), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_dies_while_it_is_waited_for_ends_the_wait() {
    let lab = Lab::running().await;
    lab.daemon.set(Manner::Away);
    let began = Instant::now();
    let (waited, ()) = tokio::join!(lab.try_step(Step::AwaitServing), async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(lab.runtime.kill(&lab.record.key));
    });
    let error = waited.expect_err("it died");
    assert!(matches!(&error, EffectError::Exited { log, .. } if log.contains("running as")), "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    // One that was dead before anybody waited for it.
    let error = lab.try_step(Step::AwaitServing).await.expect_err("it is dead");
    assert!(matches!(error, EffectError::Exited { .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_does_not_answer_is_given_up_in_time_with_its_last_words() {
    let lab = Lab::running().await;
    for manner in [Manner::Away, Manner::Hangs] {
        lab.daemon.set(manner);
        let began = Instant::now();
        // Events of others, and events that were missed, are no reason to give up.
        let (waited, ()) = tokio::join!(lab.try_step(Step::AwaitServing), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            lab.runtime.miss_events();
        });
        let error = waited.expect_err("it does not answer");
        assert!(matches!(&error, EffectError::NotServing { log, .. } if log.contains("running as")), "{error:?}");
        assert!(error.timed_out() && error.is_retryable());
        let waited = began.elapsed();
        assert!(waited >= Duration::from_secs(59) && waited < Duration::from_secs(65), "{manner:?}: {waited:?}");
    }
    // Another's certificate does not change by waiting.
    lab.daemon.set(Manner::Refuses);
    let began = Instant::now();
    lab.try_step(Step::AwaitServing).await.expect_err("it is refused");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn before_it_says_that_no_build_runs_its_cache_is_measured_and_it_is_asked_again() {
    let lab = Lab::running().await;
    let asked = || (lab.daemon.asked("builds"), lab.daemon.asked("settle"));
    assert_eq!(lab.step(Step::CountBuilds).await, Done::Builds { count: Some(0), cpu: None });
    assert_eq!(asked(), (2, 1));
    lab.daemon.building.store(3, Ordering::SeqCst);
    assert_eq!(lab.step(Step::CountBuilds).await, Done::Builds { count: Some(3), cpu: None });
    assert_eq!(asked(), (3, 1), "one that builds is left in peace");
    for how in [Stop::Graceful, Stop::Force] {
        lab.daemon.set(Manner::Hangs);
        let before = (asked(), Instant::now());
        lab.step(Step::StopInstance(how)).await;
        assert_eq!((asked(), Instant::now()), before, "a stop asks nothing");
    }
    assert_eq!(lab.seen().await.instance, InstanceSeen::STOPPED);
}

#[tokio::test(start_paused = true)]
async fn a_silent_daemon_is_described_by_its_processor_time() {
    let lab = Lab::running().await;
    assert_eq!(lab.step(Step::Probe).await, Done::Probed(Probed { answered: true, cpu: None }));
    lab.daemon.building.store(3, Ordering::SeqCst);
    assert_eq!(lab.step(Step::CountBuilds).await, Done::Builds { count: Some(3), cpu: None });
    let used = Duration::from_secs(7);
    assert!(lab.runtime.use_cpu(&lab.record.key, used));
    for manner in [Manner::Hangs, Manner::Away] {
        lab.daemon.set(manner);
        let began = Instant::now();
        assert_eq!(lab.step(Step::Probe).await, Done::Probed(Probed { answered: false, cpu: Some(used) }));
        assert_eq!(lab.step(Step::CountBuilds).await, Done::Builds { count: None, cpu: Some(used) });
        assert!(began.elapsed() <= 2 * lab.effects.config.deadlines.ask, "{manner:?}: {:?}", began.elapsed());
    }
    lab.runtime.set_fault(Operation::Look, Some(Fault::Fail));
    assert_eq!(lab.step(Step::Probe).await, Done::Probed(Probed { answered: false, cpu: None }), "not told");
    lab.runtime.set_fault(Operation::Look, None);
    lab.runtime.kill(&lab.record.key);
    assert_eq!(lab.step(Step::CountBuilds).await, Done::Builds { count: None, cpu: None }, "nothing runs");
}

#[tokio::test(start_paused = true)]
async fn a_running_daemon_that_does_not_answer_is_seen_as_not_serving_and_soon() {
    let lab = Lab::running().await;
    for (manner, expected) in [(Manner::Answers, true), (Manner::Away, false), (Manner::Hangs, false)] {
        lab.daemon.set(manner);
        let began = Instant::now();
        let InstanceSeen::Running { serving, .. } = lab.seen().await.instance else { panic!("it does not run") };
        assert_eq!(serving, expected, "{manner:?}");
        assert!(began.elapsed() <= LOOK_PATIENCE, "a look has 15 s for everything: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn what_is_set_outlives_the_database() {
    let mut lab = Lab::new();
    lab.effects.describe(&lab.record).await.expect("without a cache there is nowhere to write it");
    lab.step(Step::CreateVolume).await;
    lab.record.settings.cpus = Some(3);
    lab.effects.describe(&lab.record).await.expect("written");
    let survey = lab.effects.survey().await.expect("looked through");
    let written = survey.volumes[0].properties.get("settings").expect("it is there");
    assert_eq!(serde_json::from_str::<Settings>(written).expect("readable"), lab.record.settings);
    assert_eq!(lab.seen().await.volume, VolumeSeen::Ready, "and is no part of the identity");
}

#[tokio::test]
async fn a_survey_shows_everything_and_what_runs_is_not_removed() {
    let lab = Lab::running().await;
    lab.runtime.add_stranger("web", false);
    lab.volumes.add_stranger("live/by-hand");
    let survey = lab.effects.survey().await.expect("looked through");
    let keys = |keys: Vec<Option<Key>>| keys.into_iter().flatten().count();
    assert_eq!((survey.instances.len(), keys(survey.instances.iter().map(|i| i.key.clone()).collect())), (2, 1));
    assert_eq!((survey.volumes.len(), keys(survey.volumes.iter().map(|v| v.key.clone()).collect())), (2, 1));
    let error = lab.effects.remove_instance(&lab.record.key.daemon_name()).await.expect_err("it runs");
    assert!(matches!(error, EffectError::Runtime(RuntimeError::Refused { .. })), "{error}");
    lab.effects.remove_instance("web").await.expect("removed");
    lab.runtime.set_fault(Operation::Found, Some(Fault::Fail));
    lab.effects.survey().await.expect_err("half a survey is none");
}

#[tokio::test]
async fn the_load_is_what_can_be_read() {
    let lab = Lab::new();
    let close = |found: Option<f64>, wanted: f64| found.is_some_and(|found| (found - wanted).abs() < 1e-9);
    lab.volumes.set_fullness(Fullness { bytes_used: 1, bytes_total: 4, inodes_used: 9, inodes_total: 10 });
    let load = lab.effects.load().await;
    assert!(close(load.storage, 90.0), "whichever is fuller: {load:?}");
    assert_eq!((load.memory_some, load.memory_full, load.memory_available), (None, None, Some(40 << 10)));
    let stalls = "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=1\n";
    std::fs::write(lab.state.path().join("pressure"), stalls).expect("written");
    lab.volumes.set_fullness(Fullness { bytes_used: 3, bytes_total: 4, ..Fullness::default() });
    let load = lab.effects.load().await;
    assert!(close(load.memory_some, 12.5) && close(load.memory_full, 0.25), "{load:?}");
    assert!(close(load.storage, 75.0), "{load:?}");
    std::fs::write(lab.state.path().join("pressure"), "garbage").expect("written");
    let load = lab.effects.load().await;
    assert_eq!((load.memory_some, load.memory_available), (None, None), "what cannot be read holds nothing back");
}
