//! Lives of a real buildkitd: `KILN_TEST_BUILDKITD`, or the one on the path. Needs root and runc.

use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal};

use super::tests::{Lab, STAND_IN, gone, words_with};
use super::*;
use crate::host::contract;

#[tokio::test]
async fn a_real_buildkitd_lives_dies_and_is_adopted() {
    let Some(buildkitd) = find_buildkitd() else {
        eprintln!("skipped: no buildkitd in $KILN_TEST_BUILDKITD or on $PATH, or not root");
        return;
    };
    let lab = Lab::new(STAND_IN);
    let config = ProcessConfig { buildkitd, ..lab.config.clone() };
    let (runtime, spec) =
        (ProcessRuntime::make(config.clone(), false).await.expect("a runtime"), lab.spec(&contract::key()));
    let socket = lab.directory.path().join("socket");
    let toml = format!("[grpc]\naddress = [\"unix://{}\"]\n[worker.containerd]\nenabled = false\n", socket.display());
    std::fs::write(spec.files.join("buildkitd.toml"), toml).expect("written");
    runtime.create(&spec).await.expect("created");
    let began = std::time::Instant::now();
    let incarnation = runtime.start(&spec).await.expect("started");
    let started = began.elapsed();
    words_with(&runtime, &spec, "running server").await;
    eprintln!("buildkitd: start returned after {started:?}, serving after {:?}", began.elapsed());
    assert!(socket.exists() && spec.volume.join("buildkitd.lock").exists(), "it has the volume as its root");

    let adopted = ProcessRuntime::make(config, false).await.expect("a runtime");
    assert_eq!(adopted.start(&spec).await.expect("running"), incarnation);
    let began = std::time::Instant::now();
    adopted.stop(&spec, StopBound::Graceful(contract::PATIENCE)).await.expect("stopped");
    eprintln!("buildkitd: drained in {:?}", began.elapsed());
    assert_ne!(runtime.start(&spec).await.expect("started"), incarnation);
    words_with(&runtime, &spec, "running server").await;
    runtime.stop(&spec, StopBound::Force).await.expect("killed");
    lab.emptied().await;
    assert!(crate::host::occupancy::mounts_below(&spec.volume).expect("listed").is_empty());
    runtime.destroy(&spec).await.expect("destroyed");
    assert!(spec.volume.join("buildkitd.lock").exists(), "the cache stays");
}

/// What runc notes of containers whose root lies in this cache, and whether the container's first process lives.
fn steps_on(cache: &Path) -> Vec<(serde_json::Value, bool)> {
    let notes = std::fs::read_dir("/run/runc").into_iter().flatten().flatten();
    let states = notes.filter_map(|note| std::fs::read(note.path().join("state.json")).ok());
    let states = states.filter_map(|state| serde_json::from_slice::<serde_json::Value>(&state).ok());
    let ours = states
        .filter(|state| state["config"]["rootfs"].as_str().is_some_and(|root| Path::new(root).starts_with(cache)));
    ours.map(|state| {
        let pid = state["init_process_pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a pid");
        (state, !gone(pid))
    })
    .collect()
}

#[tokio::test]
async fn nothing_is_left_of_the_steps_of_a_daemon_that_was_killed() {
    let Some(buildkitd) = find_buildkitd() else {
        eprintln!("skipped: no buildkitd in $KILN_TEST_BUILDKITD or on $PATH, or not root");
        return;
    };
    let (Some(buildx), Some(busybox)) = (find("KILN_TEST_BUILDX", "buildx"), find("KILN_TEST_BUSYBOX", "busybox"))
    else {
        eprintln!("skipped: no buildx or no (static) busybox: set KILN_TEST_BUILDX and KILN_TEST_BUSYBOX");
        return;
    };
    let lab = Lab::new(STAND_IN);
    let config = ProcessConfig { buildkitd, ..lab.config.clone() };
    let runtime = ProcessRuntime::make(config, false).await.expect("a runtime");
    let (spec, at) = (lab.spec(&contract::key()), |name: &str| lab.directory.path().join(name));
    let toml = format!("[grpc]\naddress = [\"unix://{}\"]\n", at("socket").display());
    std::fs::write(spec.files.join("buildkitd.toml"), toml).expect("written");
    runtime.create(&spec).await.expect("created");
    runtime.start(&spec).await.expect("started");
    words_with(&runtime, &spec, "running server").await;

    std::fs::create_dir(at("context")).expect("made");
    std::fs::copy(busybox, at("context/busybox")).expect("copied");
    let dockerfile = "FROM scratch\nCOPY busybox /bin/busybox\nRUN [\"/bin/busybox\", \"sleep\", \"1000\"]\n";
    std::fs::write(at("context/Dockerfile"), dockerfile).expect("written");
    let client = |arguments: &[&std::ffi::OsStr]| {
        let mut command = Command::new(&buildx);
        command.args(arguments).env("BUILDX_CONFIG", at("buildx"));
        command
    };
    let address = format!("unix://{}", at("socket").display());
    let created =
        client(&["create".as_ref(), "--name=kiln".as_ref(), "--driver=remote".as_ref(), address.as_ref()]).output();
    assert!(created.is_ok_and(|created| created.status.success()));
    let output = std::fs::File::create(at("client")).expect("made");
    let mut build = client(&["build".as_ref(), "--builder=kiln".as_ref(), at("context").as_os_str()]);
    let mut build = build.stdout(std::process::Stdio::null()).stderr(output).spawn().expect("buildx");
    let deadline = tokio::time::Instant::now() + contract::PATIENCE;
    while !steps_on(&spec.volume).iter().any(|(_, lives)| *lives) {
        let said = || std::fs::read_to_string(at("client")).unwrap_or_default();
        assert!(tokio::time::Instant::now() < deadline, "no step was started: {}", said());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Killed by somebody else, and only the daemon: its step goes on.
    let pid = lab.run_file(&spec.key).daemon.expect("recorded").pid;
    rustix::process::kill_process(Pid::from_raw(pid).expect("a pid"), Signal::KILL).expect("killed");
    contract::until(&runtime, &spec, |state| *state == contract::STOPPED).await;
    build.wait().expect("the client ends with its daemon");
    let left = steps_on(&spec.volume);
    assert!(left.iter().any(|(_, lives)| *lives), "nothing was left, so nothing is shown");
    let cgroups: Vec<PathBuf> = left
        .iter()
        .flat_map(|(state, _)| state["cgroup_paths"].as_object().into_iter().flatten())
        .filter_map(|(_, path)| path.as_str().map(PathBuf::from))
        .collect();
    let are_there = |cgroups: &[PathBuf]| cgroups.iter().filter(|path| path.exists()).count();
    eprintln!("left by a killed daemon: {} steps, {} cgroups", left.len(), are_there(&cgroups));

    runtime.start(&spec).await.expect("started again");
    assert!(steps_on(&spec.volume).is_empty() && are_there(&cgroups) == 0, "{:?}", steps_on(&spec.volume));
    words_with(&runtime, &spec, "running server").await;
    runtime.stop(&spec, StopBound::Force).await.expect("stopped");
    lab.emptied().await;
}

fn find(variable: &str, program: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|directory| directory.join(program));
    named.into_iter().chain(on_path).find(|program| program.is_absolute() && program.is_file())
}

fn find_buildkitd() -> Option<PathBuf> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    find("KILN_TEST_BUILDKITD", "buildkitd")
}
