//! The contract with a stand-in for buildkitd, and what only processes can suffer.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process_group};

use super::record::RunFile;
use super::*;
use crate::host::{Change, Lane, Limits, Properties, contract};

/// Ends on SIGTERM, like a drained buildkitd. The child is what a build step is to a real one.
pub(super) const STAND_IN: &str = "#!/bin/sh\ntrap 'echo drained; kill -9 $! 2>/dev/null; exit 1' TERM\necho \"up with $*\"\nenv\n\
    sleep 1000 &\nwhile :; do wait $!; done\n";
/// Never drains, and its step sits in a session of its own.
const STUBBORN: &str = "#!/bin/sh\ntrap '' TERM\nsetsid sh -c 'trap \"\" TERM; sleep 1000 & echo $! >\"$1\"/step; wait' sh \"$4\" &\n\
    while :; do wait; done\n";
const STILLBORN: &str = "#!/bin/sh\nfor i in 1 2 3; do echo \"reason $i\" >&2; done\nexit 7\n";

pub(super) struct Lab {
    pub(super) directory: tempfile::TempDir,
    pub(super) config: ProcessConfig,
}

impl Lab {
    pub(super) fn new(script: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let (source, buildkitd) = (directory.path().join("script"), directory.path().join("buildkitd"));
        std::fs::write(&source, script).expect("written");
        // Copied by another process: a program that this one has open for writing can not be started, and other tests fork.
        let copied =
            Command::new("install").args(["-m", "0755"]).args([&source, &buildkitd]).status().expect("install");
        assert!(copied.success());
        let config = ProcessConfig {
            buildkitd,
            run_dir: directory.path().join("run"),
            path: "/usr/sbin:/usr/bin:/sbin:/bin".into(),
        };
        Self { directory, config }
    }

    async fn runtime(&self) -> ProcessRuntime {
        ProcessRuntime::make(self.config.clone(), false).await.expect("a runtime")
    }

    pub(super) fn spec(&self, key: &Key) -> InstanceSpec {
        let at = |kind: &str| self.directory.path().join(kind).join(key.as_str());
        for directory in [at("volume"), at("files")] {
            std::fs::create_dir_all(directory).expect("made");
        }
        std::fs::write(at("files").join("buildkitd.toml"), "").expect("written");
        InstanceSpec {
            key: key.clone(),
            lane: Lane::Trusted,
            properties: Properties::from([("repo".to_owned(), "r".to_owned())]),
            address: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8372),
            volume: at("volume"),
            files: at("files"),
            limits: Limits::default(),
        }
    }

    pub(super) fn run_file(&self, key: &Key) -> RunFile {
        files::read(&self.config.run_dir.join(key.as_str()).join("run.json")).expect("read").expect("there")
    }

    /// Everything that runs on this lab's volumes.
    fn daemons(&self) -> Vec<i32> {
        let volumes = self.directory.path().join("volume");
        let is_ours = |pid: &i32| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&format!("\0{}", volumes.display())))
        };
        let ours: Vec<i32> = proc::pids().expect("listed").into_iter().filter(is_ours).collect();
        // Until it becomes another program, a shell's child has its command line.
        let is_child = |pid: &i32| proc::stat(*pid).expect("readable").is_some_and(|stat| ours.contains(&stat.parent));
        ours.iter().copied().filter(|pid| !is_child(pid)).collect()
    }
}

impl Lab {
    /// What was killed may need a moment to go.
    pub(super) async fn emptied(&self) {
        let deadline = tokio::time::Instant::now() + contract::PATIENCE;
        while !self.daemons().is_empty() {
            assert!(tokio::time::Instant::now() < deadline, "still there: {:?}", self.daemons());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for pid in self.daemons() {
            let _ = Identity::of(pid, "").map(|daemon| daemon.map(|daemon| kill::tree(&daemon)));
        }
        for point in crate::host::occupancy::mounts_below(self.directory.path()).unwrap_or_default() {
            let _ = Command::new("umount").arg("-l").arg(point).status();
        }
    }
}

fn is_running(state: &InstanceState) -> bool {
    matches!(state, InstanceState::Running { .. })
}

pub(super) async fn words_with(runtime: &ProcessRuntime, spec: &InstanceSpec, wanted: &str) -> String {
    let deadline = tokio::time::Instant::now() + contract::PATIENCE;
    loop {
        let words = runtime.last_words(spec).await;
        if words.contains(wanted) {
            return words;
        }
        assert!(tokio::time::Instant::now() < deadline, "no {wanted:?} in {words:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub(super) fn gone(pid: i32) -> bool {
    Identity::of(pid, "").expect("readable").is_none()
}

#[tokio::test]
async fn it_keeps_the_contract() {
    let lab = Lab::new(STAND_IN);
    let runtime = lab.runtime().await;
    contract::runtime(&runtime, &|key| lab.spec(key)).await;
    assert!(!runtime.isolates());
    lab.emptied().await;
}

#[tokio::test]
async fn a_daemon_gets_its_arguments_and_nothing_of_our_environment() {
    let lab = Lab::new(STAND_IN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    let words = words_with(&runtime, &spec, "PATH=").await;
    let expected = format!("up with --config {}/buildkitd.toml --root {}", spec.files.display(), spec.volume.display());
    assert!(words.contains(&expected), "{words}");
    assert!(!words.contains("CARGO"), "the tests' own environment leaked: {words}");
    let pid = lab.run_file(&spec.key).daemon.expect("recorded").pid;
    assert_eq!(rustix::process::getpgid(Pid::from_raw(pid)).expect("alive").as_raw_nonzero().get(), pid);
    runtime.stop(&spec, StopBound::Graceful(contract::PATIENCE)).await.expect("stopped");
    assert!(words_with(&runtime, &spec, "[kiln]").await.ends_with("drained\n[kiln] exited with status 1"));
}

#[tokio::test]
async fn a_new_kilnd_adopts_what_runs_and_hears_of_its_death() {
    let lab = Lab::new(STAND_IN);
    let spec = lab.spec(&contract::key());
    let first = lab.runtime().await;
    first.create(&spec).await.expect("created");
    let incarnation = first.start(&spec).await.expect("started");
    drop(first);

    let second = lab.runtime().await;
    assert_eq!(second.look(&spec).await.expect("looked"), contract::running(&incarnation));
    assert_eq!(second.start(&spec).await.expect("running already"), incarnation);
    let mut events = second.events();
    let pid = lab.run_file(&spec.key).daemon.expect("recorded").pid;
    kill_process_group(Pid::from_raw(pid).expect("a pid"), Signal::KILL).expect("killed");
    contract::hear(&mut events, &spec.key).await;
    assert_eq!(second.look(&spec).await.expect("looked"), contract::STOPPED);
    // Reaped, not left as a zombie.
    let deadline = tokio::time::Instant::now() + contract::PATIENCE;
    while proc::stat(pid).expect("readable").is_some() {
        assert!(tokio::time::Instant::now() < deadline, "{pid} is still there");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_crash_between_start_and_record_neither_loses_nor_doubles_a_daemon() {
    let lab = Lab::new(STAND_IN);
    let spec = lab.spec(&contract::key());
    let first = lab.runtime().await;
    first.create(&spec).await.expect("created");
    let incarnation = first.start(&spec).await.expect("started");
    // What a crash right after the start leaves: the intent, and a daemon.
    let torn = RunFile { daemon: None, ..lab.run_file(&spec.key) };
    files::write(&lab.config.run_dir.join(spec.key.as_str()).join("run.json"), &torn).expect("written");
    drop(first);

    let second = lab.runtime().await;
    assert_eq!(second.start(&spec).await.expect("found"), incarnation);
    assert_eq!(lab.daemons().len(), 1);
    assert!(lab.run_file(&spec.key).daemon.is_some(), "it is recorded now");
    second.stop(&spec, StopBound::Graceful(contract::PATIENCE)).await.expect("stopped");
    // And right before it: the intent, and none.
    files::write(&lab.config.run_dir.join(spec.key.as_str()).join("run.json"), &torn).expect("written");
    let third = lab.runtime().await;
    assert_eq!(third.look(&spec).await.expect("looked"), contract::STOPPED);
    assert_ne!(third.start(&spec).await.expect("started"), incarnation);
}

#[tokio::test]
async fn a_number_that_was_used_again_is_not_taken_for_the_daemon() {
    let lab = Lab::new(STAND_IN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    let run = lab.run_file(&spec.key);
    let daemon = run.daemon.clone().expect("recorded");
    let us =
        Identity::of(i32::try_from(std::process::id()).expect("fits"), &daemon.boot).expect("readable").expect("alive");
    let path = lab.config.run_dir.join(spec.key.as_str()).join("run.json");
    for other in [
        Identity { start: daemon.start + 1, ..daemon.clone() },
        Identity { boot: "another".to_owned(), ..daemon.clone() },
        us,
    ] {
        files::write(&path, &RunFile { daemon: Some(other.clone()), ..run.clone() }).expect("written");
        assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED, "of {other:?}");
    }
    files::write(&path, &run).expect("written");
    assert!(is_running(&runtime.look(&spec).await.expect("looked")));
}

#[tokio::test]
async fn a_stillborn_daemon_is_seen_with_its_last_words() {
    let lab = Lab::new(STILLBORN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("a start does not wait");
    contract::until(&runtime, &spec, |state| *state == contract::STOPPED).await;
    let words = words_with(&runtime, &spec, "[kiln]").await;
    assert_eq!(words, "reason 1\nreason 2\nreason 3\n[kiln] exited with status 7");
    runtime.start(&spec).await.expect("and again");
    runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    runtime.destroy(&spec).await.expect("destroyed");
}

#[tokio::test]
async fn what_does_not_drain_is_killed_with_its_steps() {
    let lab = Lab::new(STUBBORN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    let step = {
        let deadline = tokio::time::Instant::now() + contract::PATIENCE;
        loop {
            let step = std::fs::read_to_string(spec.volume.join("step")).unwrap_or_default();
            if let Ok(step) = step.trim().parse::<i32>() {
                break step;
            }
            assert!(tokio::time::Instant::now() < deadline, "no step was started");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(!gone(step));
    let began = std::time::Instant::now();
    runtime.stop(&spec, StopBound::Graceful(Duration::from_millis(200))).await.expect("stopped");
    assert!(began.elapsed() >= Duration::from_millis(200), "it was given its time");
    assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED);
    assert!(gone(step), "the step outlived its daemon");
}

#[tokio::test]
async fn what_a_dead_daemon_left_mounted_is_unmounted() {
    let lab = Lab::new(STAND_IN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    let points = [spec.volume.join("rootfs"), spec.volume.join("rootfs/dev")];
    for point in &points {
        std::fs::create_dir(point).expect("made");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(point).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: cannot mount");
            return;
        }
    }
    let left = || crate::host::occupancy::mounts_below(&spec.volume).expect("listed");
    assert_eq!(left().len(), 2);
    runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    assert_eq!(left(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn a_drain_is_asked_for_once() {
    let lab = Lab::new("#!/bin/sh\ntrap 'echo asked' TERM\necho up\nwhile :; do sleep 0.05; done\n");
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    words_with(&runtime, &spec, "up").await;
    let stop = |runtime: ProcessRuntime| {
        let spec = spec.clone();
        async move { runtime.stop(&spec, StopBound::Graceful(contract::PATIENCE)).await }
    };
    let other = lab.runtime().await;
    let draining = tokio::spawn(stop(lab.runtime().await));
    words_with(&other, &spec, "asked").await;
    let again = tokio::spawn(stop(lab.runtime().await));
    // By the time the second is known to wait, a second signal would long have been written down.
    let forced = lab.runtime().await;
    tokio::time::timeout(Duration::from_millis(300), again).await.expect_err("it waits");
    assert_eq!(forced.last_words(&spec).await.matches("asked").count(), 1);
    forced.stop(&spec, StopBound::Force).await.expect("a forced stop does not wait for one that drains");
    draining.await.expect("ended").expect("stopped");
}

#[tokio::test]
async fn what_cannot_be_started_is_refused_with_a_remedy() {
    let lab = Lab::new(STAND_IN);
    let spec = lab.spec(&contract::key());
    let refusal = async |config: ProcessConfig| {
        let runtime = ProcessRuntime::new(config).await.expect("a runtime");
        runtime.create(&spec).await.expect("created");
        let error = runtime.start(&spec).await.expect_err("refused");
        assert!(matches!(error, RuntimeError::Refused { .. }), "{error:?}");
        assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED);
        error.to_string()
    };
    let with = |buildkitd: &Path| ProcessConfig { buildkitd: buildkitd.to_owned(), ..lab.config.clone() };
    let error = refusal(with(Path::new("/nonexistent/buildkitd"))).await;
    assert!(error.contains("no program /nonexistent/buildkitd; install kiln-buildkit"), "{error}");
    let plain = lab.directory.path().join("script");
    let error = refusal(with(&plain)).await;
    assert!(error.contains("may not be executed; chmod 0755"), "{error}");
    let garbage = lab.directory.path().join("garbage");
    std::fs::write(&garbage, [0, 1, 2, 3]).expect("written");
    assert!(Command::new("chmod").arg("755").arg(&garbage).status().expect("chmod").success());
    let error = refusal(with(&garbage)).await;
    assert!(error.contains("is no program for this machine"), "{error}");

    std::fs::remove_file(spec.files.join("buildkitd.toml")).expect("removed");
    assert!(refusal(lab.config.clone()).await.contains("buildkitd.toml is missing"));
    std::fs::write(spec.files.join("buildkitd.toml"), "").expect("written");
    std::fs::remove_dir(&spec.volume).expect("removed");
    assert!(refusal(lab.config.clone()).await.contains("is missing; an empty cache"));
    std::fs::create_dir(&spec.volume).expect("made");
    let lock = std::fs::File::create(spec.volume.join("buildkitd.lock")).expect("made");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("locked");
    assert!(refusal(lab.config.clone()).await.contains("that Kiln did not start"));
    lab.emptied().await;
}

#[tokio::test]
async fn an_instance_that_differs_is_half_made_until_it_is_made_again() {
    let lab = Lab::new(STAND_IN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    let wanted = InstanceSpec { address: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9), ..spec.clone() };
    let InstanceState::HalfMade { why } = runtime.look(&wanted).await.expect("looked") else { panic!("not half-made") };
    assert!(why.contains("its address is 127.0.0.1:8372 and should be 127.0.0.1:9"), "{why}");
    assert!(matches!(runtime.start(&wanted).await, Err(RuntimeError::Refused { .. })));
    runtime.start(&spec).await.expect("started");
    let InstanceState::Running { outdated, .. } = runtime.look(&wanted).await.expect("looked") else {
        panic!("what runs counts as running")
    };
    assert_eq!(outdated, [Change::Make]);
    assert!(matches!(runtime.create(&wanted).await, Err(RuntimeError::Refused { .. })));
    runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    runtime.create(&wanted).await.expect("made again");
    assert_eq!(runtime.look(&wanted).await.expect("looked"), contract::STOPPED);
    // A file that a crash or a hand has damaged.
    std::fs::write(lab.config.run_dir.join(spec.key.as_str()).join("spec.json"), "{").expect("written");
    assert!(matches!(runtime.look(&wanted).await, Ok(InstanceState::HalfMade { .. })));
    runtime.create(&wanted).await.expect("made again");
    assert_eq!(runtime.look(&wanted).await.expect("looked"), contract::STOPPED);
}

#[tokio::test]
async fn another_program_is_seen_until_the_next_start() {
    let lab = Lab::new(STAND_IN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    let outdated = async |runtime: &ProcessRuntime| match runtime.look(&spec).await.expect("looked") {
        InstanceState::Running { outdated, .. } => outdated,
        other => panic!("it does not run: {other:?}"),
    };
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    assert_eq!(outdated(&runtime).await, []);
    // Put in its place, as a package does it; and written over, with the same size.
    let (program, script) = (&lab.config.buildkitd, lab.directory.path().join("script"));
    let install = || {
        let mut install = Command::new("install");
        install.args(["-m", "0755"]).arg(&script).arg(program);
        assert!(install.status().expect("install").success());
    };
    install();
    assert_eq!(outdated(&runtime).await, [Change::Program]);
    assert_eq!(outdated(&lab.runtime().await).await, [Change::Program], "it is remembered");
    runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    assert_eq!(runtime.look(&spec).await.expect("looked"), contract::STOPPED, "the next start is of the new one");
    runtime.start(&spec).await.expect("started");
    assert_eq!(outdated(&runtime).await, []);
    std::fs::remove_file(program).expect("removed");
    assert_eq!(outdated(&runtime).await, [], "one that is gone is not newer");
    // Another path, in the configuration.
    let config = ProcessConfig { buildkitd: script.clone(), ..lab.config.clone() };
    let other = ProcessRuntime::make(config, false).await.expect("a runtime");
    assert_eq!(outdated(&other).await, [Change::Program]);
    // What an older kilnd wrote says nothing of the file.
    let path = lab.config.run_dir.join(spec.key.as_str()).join("run.json");
    let text = std::fs::read_to_string(&path).expect("read");
    let mut run: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    run.as_object_mut().expect("an object").remove("file").expect("it was recorded");
    std::fs::write(&path, run.to_string()).expect("written");
    install();
    assert_eq!(outdated(&runtime).await, []);
}

#[tokio::test]
async fn what_is_not_ours_is_found_and_goes_only_by_its_name() {
    let lab = Lab::new(STAND_IN);
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    let (run, other) = (&lab.config.run_dir, contract::key().clone_number(3));
    let strangers = ["a directory", "file", "link", other.as_str()];
    std::fs::create_dir_all(run.join("a directory/deep")).expect("made");
    std::fs::write(run.join("file"), "x").expect("written");
    std::os::unix::fs::symlink(lab.directory.path().join("volume"), run.join("link")).expect("made");
    // A copy of somebody else's record under a name of its own.
    std::fs::create_dir(run.join(other.as_str())).expect("made");
    std::fs::copy(run.join(spec.key.as_str()).join("spec.json"), run.join(other.as_str()).join("spec.json"))
        .expect("copied");
    let found = runtime.found().await.expect("listed");
    let mut names: Vec<_> = found.iter().filter(|found| found.key.is_none()).map(|found| found.name.clone()).collect();
    names.sort();
    let mut expected = strangers.map(str::to_owned);
    expected.sort();
    assert_eq!((names, found.len()), (expected.to_vec(), strangers.len() + 1));
    for name in strangers {
        runtime.destroy_found(name).await.expect("removed");
    }
    assert!(spec.volume.is_dir(), "what a link leads to stays");
    let left = runtime.found().await.expect("listed");
    assert_eq!(left.iter().map(|found| found.key.clone()).collect::<Vec<_>>(), [Some(spec.key.clone())]);

    // A damaged record is ours, and a damaged record of a daemon may be of one that runs.
    let ours = run.join(spec.key.as_str());
    std::fs::write(ours.join("spec.json"), "{").expect("written");
    let found = runtime.found().await.expect("listed").remove(0);
    assert_eq!((found.key, found.running, found.properties.len()), (Some(spec.key.clone()), false, 0));
    std::fs::write(ours.join("run.json"), "{").expect("written");
    assert!(runtime.found().await.expect("one does not hide the others").remove(0).running);
    let error = runtime.destroy_found(spec.key.as_str()).await.expect_err("it may run").to_string();
    assert!(error.contains("is damaged") && error.contains("see with ps"), "{error}");
}

#[tokio::test]
async fn a_mount_is_not_removed_with_what_it_is_in() {
    let lab = Lab::new(STAND_IN);
    let runtime = lab.runtime().await;
    let point = lab.config.run_dir.join("stranger");
    std::fs::create_dir(&point).expect("made");
    if !Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&point).output().is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: cannot mount");
        return;
    }
    std::fs::write(point.join("precious"), "x").expect("written");
    let error = runtime.destroy_found("stranger").await.expect_err("refused").to_string();
    assert!(error.contains("is mounted in there") && point.join("precious").exists(), "{error}");
    assert!(Command::new("umount").arg(&point).status().expect("umount").success());
    runtime.destroy_found("stranger").await.expect("removed");
    assert!(!point.exists());
}

#[tokio::test]
async fn a_step_s_cpu_time_is_its_daemon_s() {
    // The daemon sleeps; a step of it, in a session of its own, works when it is told to.
    let lab = Lab::new(
        "#!/bin/sh\nsetsid sh -c 'until test -e \"$1\"/work; do sleep 0.01; done; i=0; while test $i -lt 300000; do \
         i=$((i+1)); done; echo done >\"$1\"/done; sleep 1000' sh \"$4\" &\nwhile :; do wait $!; done\n",
    );
    let (runtime, spec) = (lab.runtime().await, lab.spec(&contract::key()));
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    let used = async || runtime.cpu_time(&spec).await.expect("measured").expect("it runs");
    let before = used().await;
    std::fs::write(spec.volume.join("work"), "").expect("told");
    let deadline = tokio::time::Instant::now() + contract::PATIENCE;
    while !spec.volume.join("done").exists() {
        assert!(tokio::time::Instant::now() < deadline, "the step does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let after = used().await;
    assert!(after > before + Duration::from_millis(50), "{before:?}, then {after:?}");
    // It has nothing to do any more.
    assert!(used().await <= after + Duration::from_millis(20));
    runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    assert_eq!(runtime.cpu_time(&spec).await.expect("measured"), None);
}

#[tokio::test]
async fn a_run_directory_that_cannot_be_used_is_said() {
    let lab = Lab::new(STAND_IN);
    for run_dir in
        [Path::new("relative"), &lab.directory.path().join("missing/run"), &lab.directory.path().join("script")]
    {
        let config = ProcessConfig { run_dir: run_dir.to_owned(), ..lab.config.clone() };
        let error = ProcessRuntime::new(config).await.err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.starts_with("process is not available")), "of {}", run_dir.display());
    }
}

#[tokio::test]
async fn a_run_directory_has_one_kilnd() {
    let lab = Lab::new(STAND_IN);
    let first = ProcessRuntime::new(lab.config.clone()).await.expect("a runtime");
    let second = ProcessRuntime::new(lab.config.clone()).await.err().map(|e| e.to_string());
    assert!(second.as_ref().is_some_and(|e| e.contains("another kilnd uses")), "{second:?}");
    drop(first);
    ProcessRuntime::new(lab.config.clone()).await.expect("it is free again");
}
