//! Real builds: over the daemon's own address, through the gateway, and with `kiln build`.
//!
//! The first two steps of the Dockerfile are the same in every build, so they are cached in each after the first; the third
//! is new each time and takes a while. A build over the daemon's own address has nothing to do with kilnd once it runs, and
//! so may not fail, however often kilnd dies meanwhile. One through the gateway loses its connection with kilnd; then the
//! next try finds its cache.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_wire::{Credential, ProjectView, RouteRequest};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use crate::chance::Chance;
use crate::routes::{complete, renew, request, route};
use crate::truth::Lease;
use crate::world::World;

const OWN: [&str; 2] = ["torture.example/own/leased", "torture.example/own/by-its-own-account"];
const GATEWAY: &str = "torture.example/gateway";
const CLI: &str = "torture.example/cli";
pub(crate) const REMOVED: &str = "torture.example/removed";

const ALL: [&str; 5] = [OWN[0], OWN[1], GATEWAY, CLI, REMOVED];

/// Steps that every build but the first finds in its cache.
const CACHED: usize = 2;

/// Beyond what its step takes.
const PATIENCE: Duration = Duration::from_mins(4);
const TRIES: usize = 30;
const RENEW_EVERY: Duration = Duration::from_secs(3);

pub(crate) fn spawn(world: &Arc<World>, chance: &Chance, load: &mut JoinSet<()>) {
    load.spawn(over_its_own_address(Arc::clone(world), OWN[0], true));
    load.spawn(over_its_own_address(Arc::clone(world), OWN[1], false));
    load.spawn(through_the_gateway(Arc::clone(world), chance.part("gateway")));
    load.spawn(with_the_client(Arc::clone(world), chance.part("cli")));
}

/// A build of each project.
pub(crate) async fn fill_caches(world: &World) -> io::Result<()> {
    make_context(world)?;
    for repo in ALL {
        let built = gateway_build(world, repo, 0).await;
        if built != Some(0) {
            let log = fs::read_to_string(world.log(&client(repo))).unwrap_or_default();
            return Err(io::Error::other(format!(
                "the first build of {repo}: wanted no cached step of one, {built:?}\n{log}"
            )));
        }
    }
    Ok(())
}

/// Until a build over each project's own address is in its step, so that the first kill finds them there.
pub(crate) async fn under_way(world: &World) {
    let start = Instant::now();
    while !OWN.iter().all(|repo| is_in_its_step(world, repo)) && start.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn is_in_its_step(world: &World, repo: &str) -> bool {
    fs::read_to_string(world.log(&client(repo))).unwrap_or_default().contains(" tick 0 ")
}

/// At the end, when kilnd stays up.
pub(crate) async fn check_caches(world: &World) {
    for repo in ALL {
        warm_build(world, repo).await;
    }
}

fn context(world: &World) -> PathBuf {
    world.arguments.home.join("context")
}

fn make_context(world: &World) -> io::Result<()> {
    const DOCKERFILE: &str = r#"FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "sh", "-c", "echo once > /once"]
ARG ROUND
ARG SECONDS
RUN ["/bin/busybox", "sh", "-c", "i=0; while [ $i -lt $SECONDS ]; do echo tick $i of $ROUND; /bin/busybox sleep 1; i=$((i+1)); done"]
"#;
    fs::create_dir_all(context(world))?;
    fs::copy(&world.arguments.busybox, context(world).join("busybox"))?;
    fs::write(context(world).join("Dockerfile"), DOCKERFILE)
}

/// A client's name, of its files.
fn client(repo: &str) -> String {
    repo.replace('/', "-")
}

// === buildx

/// A buildx of a client's own, in `home`.
fn buildx(world: &World, home: &Path) -> Command {
    let mut command = Command::new(&world.arguments.buildx);
    surroundings(&mut command, home);
    command
}

fn surroundings(command: &mut Command, home: &Path) {
    command.env("HOME", home).env("DOCKER_CONFIG", home).env("BUILDX_CONFIG", home.join("buildx"));
    command.env("XDG_CACHE_HOME", home.join("cache")).stdin(Stdio::null()).kill_on_drop(true);
}

/// What every build is given beside its builder.
fn of_build(command: &mut Command, world: &World, seconds: u32) {
    let round = world.next_build();
    command.args(["--progress=plain", "--build-arg", &format!("ROUND={round}")]);
    command.args(["--build-arg", &format!("SECONDS={seconds}")]).arg(context(world));
}

/// A builder by hand, as a client without Kiln's own would have it.
async fn make_builder(
    world: &World,
    home: &Path,
    credential: &Credential,
    endpoint: &str,
    server_name: &str,
) -> io::Result<()> {
    fs::create_dir_all(home)?;
    let mut options = vec![format!("servername={server_name}")];
    for (name, option, pem) in [
        ("ca.pem", "cacert", &credential.ca),
        ("cert.pem", "cert", &credential.cert),
        ("key.pem", "key", &credential.key),
    ] {
        fs::write(home.join(name), pem)?;
        options.push(format!("{option}={}", home.join(name).display()));
    }
    // It keeps the paths, so a later credential needs no other builder.
    if home.join("made").exists() {
        return Ok(());
    }
    let mut create = buildx(world, home);
    create.args(["create", "--name", "by-hand", "--driver", "remote"]);
    for option in options {
        create.args(["--driver-opt", &option]);
    }
    let output = create.arg(endpoint).output().await?;
    if !output.status.success() {
        return Err(io::Error::other(format!("buildx create: {}", String::from_utf8_lossy(&output.stderr))));
    }
    fs::write(home.join("made"), "")
}

fn start(world: &World, mut command: Command, log: &str) -> io::Result<Child> {
    let log = File::create(world.log(log))?;
    command.stdout(log.try_clone()?).stderr(log).spawn()
}

/// Whether it ended well.
async fn ended(world: &World, mut build: Child, seconds: u32) -> bool {
    let patience = PATIENCE + Duration::from_secs(seconds.into());
    match tokio::time::timeout(patience, build.wait()).await {
        Ok(Ok(status)) => status.success(),
        Ok(Err(error)) => {
            world.violation(format!("a build cannot be waited for: {error}"));
            false
        }
        Err(_) => {
            world.violation(format!("a build does not end within {} s", patience.as_secs()));
            false
        }
    }
}

/// `#7 CACHED` in the log of a build.
fn cached(world: &World, log: &str) -> usize {
    let text = fs::read_to_string(world.log(log)).unwrap_or_default();
    text.lines().filter(|line| line.starts_with('#') && line.ends_with(" CACHED")).count()
}

fn last_lines(world: &World, log: &str) -> String {
    let text = fs::read_to_string(world.log(log)).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(4)..].join(" | ")
}

/// A lease with a credential. Tries again until it has one; `None` when the load ends.
async fn lease(world: &World, repo: &str, also_at_the_end: bool) -> Option<(Lease, Credential, String, String)> {
    while also_at_the_end || !world.load_ends() {
        let with_credential = RouteRequest { credential: true, ..request(repo) };
        if let Some((lease, answer)) = route(world, &with_credential).await {
            let Some(credential) = answer.credential else {
                world.violation(format!("a route to {repo} was answered without its credential"));
                return None;
            };
            return Some((lease, credential, answer.endpoint, answer.server_name));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    None
}

// === Over the daemon's own address

/// `leased`: its lease is renewed to the end of the build. If not, it is released as soon as the build is under way, and
/// only buildkitd's own account tells that one runs.
async fn over_its_own_address(world: Arc<World>, repo: &'static str, leased: bool) {
    while let Some((lease, credential, _, server_name)) = lease(&world, repo, false).await {
        if let Err(error) = one_over_its_own_address(&world, &lease, &credential, &server_name, leased).await {
            world.violation(format!("a build of {repo} could not be run: {error}"));
        }
    }
}

async fn one_over_its_own_address(
    world: &World,
    lease: &Lease,
    credential: &Credential,
    server_name: &str,
    leased: bool,
) -> io::Result<()> {
    let address = loop {
        if let Some(view) = world.get(&format!("/v1/projects/{}", lease.key)).await.json::<ProjectView>() {
            break view.address;
        }
    };
    let (name, seconds) = (client(&lease.repo), world.arguments.build);
    let home = world.arguments.home.join(format!("own-{name}"));
    make_builder(world, &home, credential, &format!("tcp://{address}"), server_name).await?;
    let began = Instant::now();
    let mut command = buildx(world, &home);
    command.args(["build", "--builder", "by-hand"]);
    of_build(&mut command, world, seconds);
    let build = start(world, command, &name)?;
    let ending = ended(world, build, seconds);
    tokio::pin!(ending);
    let mut released = false;
    let well = loop {
        tokio::select! {
            well = &mut ending => break well,
            () = tokio::time::sleep(RENEW_EVERY) => {}
        }
        if leased {
            renew(world, lease).await;
        } else if !released && is_in_its_step(world, &lease.repo) {
            complete(world, lease).await;
            released = true;
        } else if !released {
            renew(world, lease).await;
        }
    };
    if well {
        world.count("builds over the daemon's own address");
        world.count_many("kills that builds over the daemon's own address lived through", world.downs.since(began));
        if cached(world, &name) < CACHED {
            world.violation(format!("a build of {} found {} cached steps", lease.repo, cached(world, &name)));
        }
    } else {
        let last = last_lines(world, &name);
        world.violation(format!("a build over the own address of {} was cut: {last}", lease.repo));
    }
    if !released {
        complete(world, lease).await;
    }
    Ok(())
}

// === Through the gateway

async fn through_the_gateway(world: Arc<World>, mut chance: Chance) {
    while !world.load_ends() {
        warm_build(&world, GATEWAY).await;
        tokio::time::sleep(chance.millis(0..1500)).await;
    }
}

/// A build whose first steps are cached.
pub(crate) async fn warm_build(world: &World, repo: &str) {
    if let Some(cached) = gateway_build(world, repo, 2).await {
        world.count("builds through the gateway");
        if cached < CACHED {
            let last = last_lines(world, &client(repo));
            world.violation(format!("a build of {repo} found {cached} cached steps, not {CACHED}: {last}"));
        }
    }
}

/// How many steps were cached; tried again when kilnd, and with it the gateway, was killed under it. `None` was told of.
async fn gateway_build(world: &World, repo: &str, seconds: u32) -> Option<usize> {
    for _ in 0..TRIES {
        let began = Instant::now();
        match try_gateway_build(world, repo, seconds).await {
            Ok(Some(cached)) => return Some(cached),
            Ok(None) if world.downs.touch(began, Instant::now()) => world.count("builds cut with their gateway"),
            Ok(None) => {
                let last = last_lines(world, &client(repo));
                world.violation(format!("a build of {repo} through the gateway failed, and kilnd was up: {last}"));
                return None;
            }
            Err(error) => {
                world.violation(format!("a build of {repo} could not be run: {error}"));
                return None;
            }
        }
    }
    world.violation(format!("a build of {repo} through the gateway failed {TRIES} times"));
    None
}

async fn try_gateway_build(world: &World, repo: &str, seconds: u32) -> io::Result<Option<usize>> {
    let Some((lease, credential, endpoint, server_name)) = lease(world, repo, true).await else { return Ok(None) };
    let name = client(repo);
    let home = world.arguments.home.join(format!("gateway-{name}"));
    make_builder(world, &home, &credential, &endpoint, &server_name).await?;
    let mut command = buildx(world, &home);
    command.args(["build", "--builder", "by-hand"]);
    of_build(&mut command, world, seconds);
    let build = start(world, command, &name)?;
    let well = ended(world, build, seconds).await;
    complete(world, &lease).await;
    Ok(well.then(|| cached(world, &name)))
}

// === With `kiln build`

async fn with_the_client(world: Arc<World>, mut chance: Chance) {
    let name = client(CLI);
    let home = world.arguments.home.join("client");
    // It has its lease for itself, and another one where its answer was cut.
    world.truth().asked_by_others(CLI);
    while !world.load_ends() {
        world.await_up().await;
        let began = Instant::now();
        let mut command = Command::new(&world.arguments.kiln);
        surroundings(&mut command, &home);
        command.arg("--socket").arg(world.socket()).args(["build", "--repo", CLI, "--arch", "amd64"]);
        command.env("KILN_BUILDX", &world.arguments.buildx);
        of_build(&mut command, &world, 1);
        let well = match start(&world, command, &name) {
            Ok(build) => ended(&world, build, 1).await,
            Err(error) => return world.violation(format!("kiln build cannot be run: {error}")),
        };
        let excused = world.downs.touch(began, Instant::now());
        if !well && excused {
            world.count("kiln builds cut");
        } else if !well {
            world.violation(format!("kiln build failed, and kilnd was up: {}", last_lines(&world, &name)));
        } else if cached(&world, &name) < CACHED {
            world.violation(format!("kiln build found {} cached steps", cached(&world, &name)));
        } else {
            world.count("kiln builds");
        }
        tokio::time::sleep(chance.millis(0..1500)).await;
    }
}
