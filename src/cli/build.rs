//! `kiln build`.
//!
//! ```text
//!   identity → find buildx → route ─┬→ private directory → buildx create → buildx build ─┬→ release → exit code
//!                                   │                             renewing meanwhile      │
//!                                   └────────── whatever fails in between ────────────────┘
//! ```
//!
//! From the first byte of the route on, signals are ours. One that comes while buildx runs is passed on, and the build
//! is released at once: a runner that cancels a job kills what is left of it some seconds later, and as long as buildx
//! still winds up its open connection keeps the daemon busy.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use kiln_domain::{Identity, Key};
use kiln_wire::{RouteRequest, RouteResponse};
use tokio::process::Child;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::args::{self, BuildArgs};
use super::buildx::{self, Buildx};
use super::client::Client;
use super::error::chain;
use super::node_id::NodeId;
use super::polling::Asking;
use super::private::{self, CredentialFiles};
use super::renewal::Renewal;
use super::signals::{Ending, Signals};
use super::{CliError, forge, identity, split, waiting};
use crate::stdio;

/// How long a cancelled buildx may wind up before it is killed.
const WIND_UP: Duration = Duration::from_secs(20);

pub(super) async fn run(client: &Client, args: &BuildArgs) -> Result<ExitCode, CliError> {
    let meaning = split::read(&args.buildx);
    if meaning.names_a_builder {
        return Err(CliError::Builder);
    }
    let spec = identity::resolve(&args.identity, meaning.target.unwrap_or(OsStr::new("")), meaning.context)?;
    let buildx = Buildx::find(super::variable("KILN_BUILDX"), std::env::var_os("PATH").as_deref())?;
    let whose = forge::identity(spec, &args.asking.lane)?;
    if args.dry_run {
        return dry_run(&buildx, &whose, &args.buildx);
    }

    let mut signals = Signals::listen()?;
    let request = request_of(&whose, &args.asking, true);
    let mut asking = Asking::new(client, request, whose.key.clone());
    let key = asking.key();
    let routed = tokio::select! {
        routed = waiting::with_spinner(client, key, asking.until_ready(args.asking.wait)) => routed,
        // An answer on its way gets lost, which kilnd notices or ends with the lease's grace.
        ending = signals.next() => {
            asking.give_up().await;
            return Ok(ExitCode::from(ending.exit_code()));
        }
    };
    let routed = match routed {
        Ok(routed) => routed,
        Err(error) => {
            asking.give_up().await;
            return Err(error.into());
        }
    };
    // Another daemon of the same project is what kilnd is there to choose.
    if routed.key.project() != whose.key.project() {
        stdio::say(&format!(
            "kiln: kilnd takes this build for {} where this client says {}; their versions differ",
            routed.key, whose.key
        ));
    }

    let mut release = Release::of(client, &routed);
    let renewal = Renewal::of(client, &routed);
    let ended = build(&buildx, &routed, &args.buildx, &mut signals, &mut release).await;
    drop(renewal);
    release.finish().await;
    ended.map(ExitCode::from)
}

/// The request for a project. The repository goes in its normal form, without what a remote's URL may carry.
pub(super) fn request_of(whose: &Identity, asking: &args::Asking, credential: bool) -> RouteRequest {
    let spec = &whose.spec;
    RouteRequest {
        repo: spec.repo.as_str().to_owned(),
        name: spec.name.clone(),
        target: spec.target.clone(),
        arch: spec.arch.as_str().to_owned(),
        untrusted: asking.lane.untrusted,
        pull_request: whose.pull_request.clone(),
        branch: forge::branch(asking.branch.as_deref()),
        credential,
        ..RouteRequest::default()
    }
}

/// Everything between the route and the release; the exit code to end with.
async fn build(
    buildx: &Buildx,
    routed: &RouteResponse,
    given: &[OsString],
    signals: &mut Signals,
    release: &mut Release,
) -> Result<u8, CliError> {
    let credential = routed.credential.as_ref().ok_or(CliError::NoCredential)?;
    if !routed.endpoint.starts_with("tcp://") {
        return Err(CliError::Endpoint(routed.endpoint.clone()));
    }
    let scratch = private::scratch()?;
    let files = CredentialFiles::write(scratch.path(), credential)?;
    let config = scratch.path().join("buildx");
    private::make_directory(&config)?;
    let node = NodeId::of_this_user();
    node.lend(&config);

    let name = builder_name(&routed.key, scratch.path());
    let create = buildx::create_arguments(&name, &routed.endpoint, &routed.server_name, &files);
    tokio::select! {
        created = buildx.create(&config, &create) => created?,
        ending = signals.next() => return Ok(ending.exit_code()),
    }

    let arguments = buildx::build_arguments(&name, given);
    let mut child = buildx
        .command(&config, &arguments)
        .spawn()
        .map_err(|source| CliError::Spawn { program: buildx.name(), source })?;
    let status = attend(&mut child, signals, release)
        .await
        .map_err(|source| CliError::Spawn { program: buildx.name(), source })?;
    node.keep(&config);
    let left = scratch.path().to_owned();
    if let Err(error) = scratch.close() {
        // Not worth the build's own exit code: what is in it opens nothing for long.
        stdio::say(&format!("kiln: cannot remove {}: {error}; remove it by hand", left.display()));
    }
    Ok(exit_code(status))
}

/// Waits for buildx, passing on the signals that come meanwhile.
async fn attend(child: &mut Child, signals: &mut Signals, release: &mut Release) -> std::io::Result<ExitStatus> {
    let mut patience: Option<Instant> = None;
    loop {
        let end = patience;
        let out_of_patience = async {
            match end {
                Some(end) => sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => return status,
            ending = signals.next() => {
                pass_on(ending, child);
                release.start();
                patience.get_or_insert_with(|| Instant::now() + WIND_UP);
            }
            () = out_of_patience => {
                child.kill().await?;
                return child.wait().await;
            }
        }
    }
}

fn pass_on(ending: Ending, child: &Child) {
    if let Some(pid) = child.id() {
        ending.pass_on(pid);
    }
}

/// buildx's own, or 128 + n as a shell has it.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// As unique as the directory, so that jobs beside each other never meet.
fn builder_name(key: &Key, scratch: &Path) -> String {
    let unique: String = scratch
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .rsplit('-')
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    format!("kiln-{key}-{unique}")
}

/// Gives the daemon back, once.
struct Release {
    client: Client,
    key: Key,
    build_id: Option<String>,
    running: Option<JoinHandle<()>>,
}

impl Release {
    fn of(client: &Client, routed: &RouteResponse) -> Self {
        let (key, build_id) = (routed.key.clone(), routed.build_id.clone());
        Self { client: client.clone(), key, build_id, running: None }
    }

    /// Begins, if it has not begun.
    fn start(&mut self) {
        if self.running.is_none() {
            let (client, key, build_id) = (self.client.clone(), self.key.clone(), self.build_id.clone());
            self.running = Some(tokio::spawn(async move {
                if let Err(error) = client.complete(&key, build_id.as_deref()).await {
                    let why = chain(&error);
                    stdio::say(&format!(
                        "kiln: the build of {key} was not released, its lease will end by itself: {why}"
                    ));
                }
            }));
        }
    }

    /// Has begun and ended. The client's own deadline bounds it.
    async fn finish(mut self) {
        self.start();
        if let Some(running) = self.running.take() {
            // It fails only when it panics, which the panic itself has said.
            let _ = running.await;
        }
    }
}

/// Says what would be done (nothing is asked of kilnd).
fn dry_run(buildx: &Buildx, whose: &Identity, given: &[OsString]) -> Result<ExitCode, CliError> {
    let Identity { key, spec, .. } = whose;
    let name = format!("kiln-{key}");
    let files = CredentialFiles::below(Path::new("$DIR"));
    let create = buildx::create_arguments(&name, "$ENDPOINT", "$SERVER_NAME", &files);
    let text = format!(
        "# {} {} {} {}: {key}\n# POST /route gives $ENDPOINT, $SERVER_NAME and the credential in $DIR\n{}\n{}\n# POST /complete\n",
        spec.repo,
        if spec.name.is_empty() { "-" } else { &spec.name },
        spec.target,
        spec.arch,
        buildx::quoted(&buildx.words(&create)).replace('\'', "\""),
        buildx::quoted(&buildx.words(&buildx::build_arguments(&name, given))),
    );
    super::print::out(&text)?;
    Ok(ExitCode::SUCCESS)
}
