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
async fn what_a_cache_has_grown_to_is_what_its_volume_and_its_daemon_have() {
    let mut lab = Lab::running().await;
    let size = async |lab: &Lab| lab.volumes.usage(&lab.record.key).await.expect("measured").size;
    lab.record.cache.size = Some(96 << 30);
    assert_eq!(lab.seen().await.files, FilesSeen::Stale);
    lab.step(Step::WriteFiles).await;
    assert_eq!((size(&lab).await, lab.seen().await.files), (Some(96 << 30), FilesSeen::Current));
    lab.settings.volume_bytes = Some(128 << 30);
    lab.step(Step::WriteFiles).await;
    assert_eq!(size(&lab).await, Some(128 << 30), "a first size that was raised");
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

/// Made smaller than what is in it, a cache is collected down to that.
#[tokio::test]
async fn what_a_cache_has_grown_to_comes_back_with_it() {
    let mut lab = Lab::new();
    let key = lab.record.key.clone();
    lab.step(Step::CreateVolume).await;
    lab.step(Step::Resize(135 << 30)).await;
    lab.effects.discard_volume(&key).await.expect("discarded");
    let trashed = lab.effects.trash().await.expect("listed").remove(0);
    let marks = lab.effects.restore(&trashed.name).await.expect("restored");
    lab.record = super::super::reconcile::record_of(&marks, Timestamp::from_millis(BEGIN)).expect("a project");
    lab.step(Step::WriteFiles).await;
    assert_eq!(lab.volumes.usage(&key).await.expect("measured").size, Some(135 << 30));
    let toml = lab.state.path().join("daemons").join(key.as_str()).join(TOML);
    let toml = std::fs::read_to_string(toml).expect("written");
    let kept = Collection::of(135 << 30, &Bounds::new(64 << 30, None, &SizePolicy::default()), &SizePolicy::default());
    assert!(toml.contains(&kept.ceiling.to_string()), "{toml}");
    // As `kiln set` does, at any time later.
    lab.effects.describe(&lab.record).await.expect("written");
    let survey = lab.effects.survey().await.expect("looked through");
    assert_eq!(survey.volumes[0].properties.get(SIZE), Some(&(135_u64 << 30).to_string()));
}

#[tokio::test]
async fn untrusted_code_is_served_to_nobody_before_its_isolation_is_proven() {
    let mut lab = Lab::running().await;
    lab.step(Step::AwaitServing).await;
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), 0, "trusted code needs none");

    lab.record.key = lab.record.key.fork();
    for step in [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance, Step::StartInstance] {
        lab.step(step).await;
    }
    let violated = |outcome: Result<Done, EffectError>| {
        let error = outcome.expect_err("it leaks");
        assert!(matches!(error, EffectError::NotIsolated { .. }) && !error.is_retryable(), "{error:?}");
        assert!(error.in_words().contains("the metadata service"), "{}", error.in_words());
    };
    let key = lab.record.key.clone();
    lab.runtime.set_leak(&key, Some("from inside it reached the metadata service"));
    violated(lab.try_step(Step::AwaitServing).await);
    violated(lab.try_step(Step::Probe).await);
    lab.runtime.set_leak(&key, None);
    lab.runtime.set_fault(Operation::Prove, Some(Fault::Fail));
    let unknown = lab.try_step(Step::AwaitServing).await.expect_err("nobody knows");
    assert!(unknown.is_retryable(), "{unknown}");
    lab.runtime.set_fault(Operation::Prove, None);
    lab.step(Step::AwaitServing).await;
    lab.record.incarnation = Some(lab.incarnation().await);

    let proofs = lab.runtime.proofs();
    lab.runtime.set_leak(&key, Some("the metadata service"));
    lab.clock.0.fetch_add(299_000, Ordering::SeqCst);
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), proofs, "a proof counts for five minutes");
    lab.clock.0.fetch_add(1_000, Ordering::SeqCst);
    violated(lab.try_step(Step::Probe).await);
    lab.runtime.set_leak(&key, None);
    lab.step(Step::Probe).await;
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), proofs + 2);
    // A clock that was set back makes no proof newer.
    lab.clock.0.fetch_sub(3_600_000, Ordering::SeqCst);
    lab.step(Step::Probe).await;
    assert_eq!(lab.runtime.proofs(), proofs + 3);
}

#[tokio::test]
async fn untrusted_code_that_answers_is_not_seen_to_serve_without_a_proof_of_this_run() {
    let serves = async |lab: &Lab, effects: &HostEffects| {
        let seen = effects.observe(&lab.record, &lab.settings).await.expect("observed");
        matches!(seen.instance, InstanceSeen::Running { serving: true, .. })
    };
    let mut lab = Lab::running().await;
    assert!(serves(&lab, &lab.effects).await, "of trusted code nothing is asked");
    lab.record.key = lab.record.key.fork();
    for step in [Step::CreateVolume, Step::WriteFiles, Step::CreateInstance, Step::StartInstance] {
        lab.step(step).await;
    }
    // One whose proof fails without a leak.
    lab.runtime.set_fault(Operation::Prove, Some(Fault::Fail));
    lab.try_step(Step::AwaitServing).await.expect_err("nobody knows");
    assert!(!serves(&lab, &lab.effects).await);
    lab.runtime.set_fault(Operation::Prove, None);
    lab.step(Step::AwaitServing).await;
    assert!(serves(&lab, &lab.effects).await);
    lab.record.incarnation = Some(lab.incarnation().await);
    lab.step(Step::Probe).await;

    // One whose proof cannot be renewed.
    lab.clock.0.fetch_add(300_000, Ordering::SeqCst);
    lab.runtime.set_fault(Operation::Prove, Some(Fault::Fail));
    lab.try_step(Step::Probe).await.expect_err("nobody knows");
    assert!(!serves(&lab, &lab.effects).await);
    lab.runtime.set_fault(Operation::Prove, None);
    lab.step(Step::Probe).await;
    assert!(serves(&lab, &lab.effects).await);

    // One that was running when Kiln began.
    let again = lab.restarted();
    assert!(!serves(&lab, &again).await);
    again.perform(Step::AwaitServing, &lab.record, &lab.settings).await.expect("proven");
    assert!(serves(&lab, &again).await);

    // One that somebody else has started anew.
    assert!(lab.runtime.kill(&lab.record.key));
    lab.step(Step::StartInstance).await;
    assert!(!serves(&lab, &lab.effects).await);
    let proofs = lab.runtime.proofs();
    lab.record.incarnation = Some(lab.incarnation().await);
    lab.step(Step::Probe).await;
    assert_eq!((lab.runtime.proofs(), serves(&lab, &lab.effects).await), (proofs + 1, true));
}

#[tokio::test]
async fn a_fork_has_its_parent_s_limits_at_most_and_none_of_its_entitlements() {
    let mut lab = Lab::new();
    lab.settings.entitlements = Some([Entitlement::SecurityInsecure].into());
    lab.settings.memory_bytes = Some(20 << 30);
    let toml = |lab: &Lab| lab.effects.toml(&lab.record, &lab.settings, "/v".into()).expect("rendered");
    let spec = |lab: &Lab| lab.effects.spec(&lab.record, &lab.settings, "/v".into());
    let parent = spec(&lab);
    assert!(toml(&lab).contains("insecure-entitlements = [\"security.insecure\"]"), "{}", toml(&lab));
    assert_eq!((parent.lane, parent.limits.memory_bytes, parent.limits.cpus), (Lane::Trusted, Some(20 << 30), None));
    lab.record.key = lab.record.key.fork();
    let fork = spec(&lab);
    assert!(toml(&lab).contains("insecure-entitlements = []"), "{}", toml(&lab));
    assert_eq!((fork.lane, fork.limits.memory_bytes, fork.limits.cpus), (Lane::Untrusted, Some(8 << 30), Some(4)));
    assert_eq!(fork.limits.processes, Some(4096));
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
async fn the_trash_gives_back_what_it_was_given() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    lab.effects.discard_volume(&lab.record.key).await.expect("discarded");
    let trashed = lab.effects.trash().await.expect("listed").remove(0);
    assert_eq!(trashed.since, Timestamp::from_millis(BEGIN));
    let properties = lab.effects.restore(&trashed.name).await.expect("restored");
    assert_eq!(properties.get("repo").map(String::as_str), Some("github.com/org/repo"));
    assert_eq!(lab.seen().await.volume, VolumeSeen::Ready);
    let error = lab.effects.restore(&trashed.name).await.expect_err("it is not in there any more");
    assert!(matches!(error, EffectError::Volume(VolumeError::Missing { .. })), "{error}");
    lab.effects.discard_volume(&lab.record.key).await.expect("discarded");
    let trashed = lab.effects.trash().await.expect("listed").remove(0);
    lab.effects.purge(&trashed.name).await.expect("freed");
    lab.effects.purge(&trashed.name).await.expect("freed already");
    assert!(lab.effects.trash().await.expect("listed").is_empty());
}

#[tokio::test]
async fn a_cache_that_was_given_up_has_no_past() {
    let lab = Lab::new();
    let key = &lab.record.key;
    assert_eq!(lab.effects.snapshots(key).await.expect("listed"), []);
    lab.step(Step::CreateVolume).await;
    lab.step(Step::TakeSnapshot).await;
    assert_eq!(lab.effects.snapshots(key).await.expect("listed").len(), 1);
    lab.step(Step::DiscardCache).await;
    assert_eq!(lab.effects.snapshots(key).await.expect("listed"), []);
}

/// Whatever was damaged before it was taken, all later snapshots have as well.
#[tokio::test]
async fn a_snapshot_of_what_was_damaged_while_its_daemon_ran_is_not_good() {
    const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    let lab = Lab::new();
    let root = lab.state.path().join("volumes");
    std::fs::create_dir(&root).expect("made");
    let volumes = Arc::new(DirEngine::at(&root, &search_path(), lab.clock.clone()).await.expect("opened"));
    let effects = lab.with_volumes(volumes.clone());
    let (key, step) = (&lab.record.key, |step| effects.perform(step, &lab.record, &lab.settings));
    step(Step::CreateVolume).await.expect("made");
    let blobs = volumes.get(key).await.expect("found").expect("there").path.join("runc-overlayfs/content/blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("made");
    for (text, verdict) in [("hello", Verdict::Good), ("hell", Verdict::Bad), ("hello", Verdict::Good)] {
        std::fs::write(blobs.join(HELLO), text).expect("written");
        let taken = step(Step::TakeSnapshot).await.expect("taken");
        let Done::Snapshots { all, .. } = taken else { panic!("no snapshots: {taken:?}") };
        let newest = all.last().expect("one").name;
        let found = effects.try_out(&lab.record, &lab.settings, newest).await.expect("tried");
        assert_eq!(found, verdict, "{text}");
        effects.judge(key, newest, found).await.expect("written down");
    }
    assert_eq!(effects.survey().await.expect("looked through").volumes.len(), 1, "nothing is left of the trials");
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

/// Killed between the two halves of a copy's end, Kiln plans no other: there is no volume any more.
#[tokio::test]
async fn a_copy_that_got_no_further_than_the_trash_goes_with_the_last_of_it() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    let (project, fork) = (lab.record.key.clone(), lab.record.key.fork());
    let trial = project.trial();
    for copy in [&fork, &trial] {
        lab.volumes.fork(&project, copy, &Properties::new()).await.expect("a copy");
        lab.volumes.discard(copy).await.expect("on its way");
    }
    lab.volumes.discard(&project).await.expect("an admin's");
    let left = async || lab.effects.trash().await.expect("listed").into_iter().map(|entry| entry.name.key().clone());
    lab.effects.forget(&fork).await.expect("forgotten");
    assert_eq!(left().await.collect::<Vec<_>>(), [project.clone(), trial]);
    lab.effects.sweep_trials().await.expect("swept");
    lab.effects.forget(&project).await.expect("forgotten");
    assert_eq!(left().await.collect::<Vec<_>>(), [project], "a project's own stays");
}

#[tokio::test]
async fn no_snapshot_is_tried_out_where_another_trial_still_runs() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    let taken = lab.step(Step::TakeSnapshot).await;
    let Done::Snapshots { all, .. } = taken else { panic!("no snapshots: {taken:?}") };
    let spec = BuildSpec::new("github.com/org/other", "", "", "amd64").expect("valid");
    let left = ProjectRecord { key: Key::of(&spec).trial(), spec, ..lab.record.clone() };
    lab.volumes.fork(&lab.record.key, &left.key, &described(&left)).await.expect("a copy");
    for step in [Step::WriteFiles, Step::CreateInstance, Step::StartInstance] {
        lab.effects.perform(step, &left, &lab.settings).await.expect("done");
    }
    let refused = lab.effects.try_out(&lab.record, &lab.settings, all[0].name).await.expect_err("its address is taken");
    assert!(refused.in_words().contains("an earlier trial has left"), "{refused:?}");
    lab.effects.sweep_trials().await.expect("swept");
    assert_eq!(lab.effects.try_out(&lab.record, &lab.settings, all[0].name).await.expect("tried"), Verdict::Good);
}

/// A snapshot of a tool's own on it, as it may be: nobody waits for that, and it goes when it can.
#[tokio::test]
async fn a_copy_that_cannot_be_freed_keeps_nobody_waiting() {
    let lab = Lab::new();
    lab.step(Step::CreateVolume).await;
    let project = lab.record.key.clone();
    let fork = ProjectRecord { key: project.fork(), ..lab.record.clone() };
    let other: Key = "p1111111111111111".parse().expect("a key");
    let trials = [project.trial(), other.trial()];
    for copy in [&fork.key, &trials[0], &trials[1]] {
        lab.volumes.fork(&project, copy, &described(&fork)).await.expect("a copy");
    }
    lab.volumes.set_held(&fork.key, true);
    lab.volumes.set_held(&trials[0], true);
    lab.effects.perform(Step::DestroyVolume, &fork, &lab.settings).await.expect("out of sight");
    lab.effects.forget(&fork.key).await.expect("forgotten");
    lab.effects.sweep_trials().await.expect("swept");
    let left = async || {
        let trash = lab.effects.trash().await.expect("listed");
        trash.into_iter().map(|entry| entry.name.key().clone()).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(left().await, [fork.key.clone(), trials[0].clone()].into());
    assert_eq!(lab.effects.volumes().await.expect("found").len(), 1, "the project's own");
    lab.volumes.set_held(&fork.key, false);
    tokio::time::pause();
    while left().await.contains(&fork.key) {
        tokio::time::sleep(Duration::from_mins(1)).await;
    }
    assert_eq!(left().await, [trials[0].clone()].into());
}
