//! The command line, as clap reads it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kiln_domain::access::{Grade, TokenId};
use kiln_domain::{Key, SnapshotName};
use kiln_wire::{OrphanKind, units};

const EXIT_CODES: &str = "\
Exit codes: 64 the command line is wrong; 69 kilnd, buildx or git is not there; 1 everything else;
`kiln build` passes buildx's own exit code on, and 128 + n after signal n.";

const BUILD_HELP: &str = "\
Every other flag is buildx's own and reaches `buildx build` untouched and in order; see `buildx build --help`.
Its --target is also part of the project's key; --builder is kiln's to choose.

Environment: KILN_BUILDX, the buildx program to use (default: `buildx` on PATH, else `docker buildx`).";

/// Routes builds to warm BuildKit daemons.
#[derive(Debug, Parser)]
#[command(name = "kiln", version, after_help = EXIT_CODES, max_term_width = 100, infer_subcommands = false)]
pub(super) struct Cli {
    #[command(flatten)]
    pub(super) connection: Connection,
    #[command(subcommand)]
    pub(super) verb: Verb,
}

/// Where kilnd is.
#[derive(Debug, Args)]
pub(super) struct Connection {
    /// kilnd's unix socket
    #[arg(long, global = true, value_name = "PATH", env = "KILN_SOCKET", default_value = "/run/kiln/kiln.sock")]
    pub(super) socket: PathBuf,
    /// kilnd's address as http://HOST:PORT; wins over --socket
    #[arg(long, global = true, value_name = "URL", env = "KILN_URL")]
    pub(super) url: Option<String>,
    /// A file with the token that proves who asks. The environment's `KILN_TOKEN`, the token itself, wins over it
    #[arg(long, global = true, value_name = "PATH", env = "KILN_TOKEN_FILE")]
    pub(super) token_file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Build on the project's warm daemon, with any flag of `buildx build`
    #[command(after_help = BUILD_HELP, override_usage = "kiln build [OPTIONS] [BUILDX FLAGS] PATH | URL | -")]
    Build(BuildArgs),
    /// Ask for a daemon, and print how to reach it
    Route(RouteArgs),
    /// Release the daemon that a route promised
    Complete(CompleteArgs),
    /// Print a project's key, without asking kilnd
    Key(NamingArgs),
    /// List the projects
    Ps(JsonArg),
    /// Show one project
    Show(KeyArg),
    /// Explain why a project stands where it stands
    Why(WhyArgs),
    /// Change what is set for one project
    Set(SetArgs),
    /// Stop a project's daemon; its cache stays
    Stop(StopArgs),
    /// Forget a project; its cache goes to the trash
    Rm(KeyArg),
    /// Show that a build is still there: its lease's grace begins anew
    Renew(RenewArgs),
    /// The past of a project's cache: list, snapshot, go back, begin anew, measure
    Cache(CacheArgs),
    /// Where the bytes are: every cache, the trash, and how full their storage is
    Du(JsonArg),
    /// What has lost its other half: list, adopt, remove
    Orphans(OrphansArgs),
    /// Deleted caches: list, give back, delete for good
    Trash(TrashArgs),
    /// What the gateway relays now: whose, since when, how much
    Gateway(JsonArg),
    /// Tokens for who else may come: make, list, revoke
    Token(TokenArgs),
    /// Print what happened, and with --follow what happens
    Events(EventsArgs),
    /// Container images that daemons run in
    Image(ImageArgs),
    /// Measure this machine
    Bench(crate::bench::BenchArgs),
    /// Print a completion script
    Completions(CompletionsArgs),
}

/// Which project a build belongs to; its target comes from elsewhere.
#[derive(Debug, Args)]
pub(super) struct Identity {
    /// The repository, in any spelling [default: the context's git remote `origin`]
    #[arg(long, env = "KILN_REPO")]
    pub(super) repo: Option<String>,
    /// A component of a monorepo
    #[arg(long, env = "KILN_NAME", default_value = "", hide_default_value = true)]
    pub(super) name: String,
    /// amd64 or arm64 [default: this machine's]
    #[arg(long, env = "KILN_ARCH")]
    pub(super) arch: Option<String>,
}

/// Whose code a build runs.
#[derive(Debug, Default, Args)]
pub(super) struct Lane {
    /// The build runs code that nobody has reviewed
    #[arg(long, env = "KILN_UNTRUSTED", value_parser = clap::builder::FalseyValueParser::new())]
    pub(super) untrusted: bool,
    /// With --untrusted: what names the pull request for its forge; each has a daemon of its own [default: the CI's]
    #[arg(long, value_name = "ID", env = "KILN_PULL_REQUEST")]
    pub(super) pull_request: Option<String>,
}

/// How a route is asked for.
#[derive(Debug, Args)]
pub(super) struct Asking {
    #[command(flatten)]
    pub(super) lane: Lane,
    /// Where a project has several daemons, builds of one branch go to the same one [default: the CI's]
    #[arg(long, value_name = "NAME", env = "KILN_BRANCH")]
    pub(super) branch: Option<String>,
    /// How long to wait for the daemon: 90s, 5m
    #[arg(long, value_name = "SPAN", env = "KILN_WAIT", default_value = "5m", value_parser = span)]
    pub(super) wait: Duration,
}

#[derive(Debug, Args)]
pub(super) struct BuildArgs {
    #[command(flatten)]
    pub(super) identity: Identity,
    #[command(flatten)]
    pub(super) asking: Asking,
    /// Print the commands, ask for nothing, build nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// What `buildx build` is given
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "BUILDX ARGUMENTS", hide = true)]
    pub(super) buildx: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(super) struct KeyArgs {
    #[command(flatten)]
    pub(super) identity: Identity,
    /// The Dockerfile target
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(super) target: String,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Whose git remote names the repository
    #[arg(value_name = "PATH")]
    pub(super) context: Option<OsString>,
}

/// `kiln key`.
#[derive(Debug, Args)]
pub(super) struct NamingArgs {
    #[command(flatten)]
    pub(super) project: KeyArgs,
    #[command(flatten)]
    pub(super) lane: Lane,
}

#[derive(Debug, Args)]
pub(super) struct RouteArgs {
    #[command(flatten)]
    pub(super) project: KeyArgs,
    #[command(flatten)]
    pub(super) asking: Asking,
    /// Ask for a credential, and write ca.pem, cert.pem and key.pem into this directory
    #[arg(long, value_name = "DIR")]
    pub(super) credential: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct CompleteArgs {
    pub(super) key: Key,
    /// As the route answered it
    #[arg(env = "KILN_BUILD_ID", hide_env_values = true)]
    pub(super) build_id: String,
}

#[derive(Debug, Args)]
pub(super) struct JsonArg {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct KeyArg {
    pub(super) key: Key,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct WhyArgs {
    pub(super) key: Key,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct StopArgs {
    pub(super) key: Key,
    /// Also if a build counts on it, or it does not answer
    #[arg(long)]
    pub(super) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct SetArgs {
    pub(super) key: Key,
    #[command(flatten)]
    pub(super) settings: SettingFlags,
    /// Back to the default; may be given several times
    #[arg(long, value_name = "SETTING")]
    pub(super) reset: Vec<Field>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Default, Args)]
pub(super) struct SettingFlags {
    /// warm (stopped when idle) or hot (kept up)
    #[arg(long, value_name = "TIER", value_parser = ["warm", "hot"])]
    pub(super) tier: Option<String>,
    /// How long the daemon stays up after its last activity: 30m, 1h
    #[arg(long, value_name = "SPAN", value_parser = window)]
    pub(super) idle_window: Option<String>,
    /// The cache's first size: 40GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) volume: Option<String>,
    /// What the cache may grow to; the first size: never
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) volume_max: Option<String>,
    /// For the daemon with its builds: 4GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) memory: Option<String>,
    #[arg(long, value_name = "COUNT")]
    pub(super) cpus: Option<u32>,
    #[arg(long, value_name = "COUNT")]
    pub(super) processes: Option<u32>,
    /// Bytes per second read from the disk, and as many written: 200MiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) io: Option<String>,
    /// What trusted builds may ask for: security.insecure, network.host (may be given several times), or none
    #[arg(long, value_name = "ENTITLEMENT", value_parser = ["security.insecure", "network.host", NONE])]
    pub(super) allow: Vec<String>,
    /// Daemons beside its own when that is saturated; 0: none
    #[arg(long, value_name = "COUNT")]
    pub(super) fan_out: Option<u16>,
}

/// In the place of entitlements.
pub(super) const NONE: &str = "none";

/// A setting by its flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Field {
    Tier,
    IdleWindow,
    Volume,
    VolumeMax,
    Memory,
    Cpus,
    Processes,
    Io,
    Allow,
    FanOut,
}

impl Field {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Tier => "tier",
            Self::IdleWindow => "idle-window",
            Self::Volume => "volume",
            Self::VolumeMax => "volume-max",
            Self::Memory => "memory",
            Self::Cpus => "cpus",
            Self::Processes => "processes",
            Self::Io => "io",
            Self::Allow => "allow",
            Self::FanOut => "fan-out",
        }
    }
}

#[derive(Debug, Args)]
#[command(allow_missing_positional = true)]
pub(super) struct RenewArgs {
    /// Only printed: the build id says it all
    pub(super) key: Option<Key>,
    /// As the route answered it
    #[arg(env = "KILN_BUILD_ID", hide_env_values = true)]
    pub(super) build_id: String,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct CacheArgs {
    /// Print JSON
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[command(subcommand)]
    pub(super) verb: CacheVerb,
}

#[derive(Debug, Subcommand)]
pub(super) enum CacheVerb {
    /// List what there is to go back to
    Log { key: Key },
    /// Take a snapshot, unless nothing was written since the newest
    Snapshot { key: Key },
    /// Put a cache back to a snapshot; what it holds now goes to the trash
    Rollback {
        key: Key,
        /// As the log has it, with or without @ [default: the newest good one]
        #[arg(value_name = "SNAPSHOT")]
        to: Option<SnapshotName>,
        /// Also if a build counts on the daemon: it is cut off
        #[arg(long)]
        force: bool,
    },
    /// Begin anew with an empty cache; what it holds now goes to the trash
    Reset {
        key: Key,
        /// Also if a build counts on the daemon: it is cut off
        #[arg(long)]
        force: bool,
    },
    /// Where the bytes of a cache are
    Usage { key: Key },
}

#[derive(Debug, Args)]
pub(super) struct OrphansArgs {
    /// Print JSON
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[command(subcommand)]
    pub(super) verb: Option<OrphansVerb>,
}

#[derive(Debug, Subcommand)]
pub(super) enum OrphansVerb {
    /// List them [default]
    Ls,
    /// Make a project of one again
    Adopt {
        #[arg(value_parser = orphan_name)]
        name: String,
        /// Where one name stands for more than one: instance, volume or record
        #[arg(long)]
        kind: Option<OrphanKind>,
    },
    /// Remove one; a volume goes to the trash
    Rm {
        /// instance, volume or record
        kind: OrphanKind,
        #[arg(value_parser = orphan_name)]
        name: String,
    },
}

#[derive(Debug, Args)]
pub(super) struct TrashArgs {
    /// Print JSON
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[command(subcommand)]
    pub(super) verb: Option<TrashVerb>,
}

#[derive(Debug, Subcommand)]
pub(super) enum TrashVerb {
    /// List it [default]
    Ls,
    /// Give a cache back to its project
    Restore {
        #[arg(value_parser = name)]
        name: String,
    },
    /// Delete one cache for good
    Rm {
        #[arg(value_parser = name)]
        name: String,
    },
    /// Delete all of it for good
    Empty,
}

#[derive(Debug, Args)]
pub(super) struct TokenArgs {
    /// Print JSON
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[command(subcommand)]
    pub(super) verb: TokenVerb,
}

#[derive(Debug, Subcommand)]
pub(super) enum TokenVerb {
    /// Make a token, and print it this once
    Create {
        /// What it is for
        #[arg(long)]
        name: String,
        /// What it makes of whoever shows it
        #[arg(long, value_enum, default_value_t = GradeName::Builder)]
        grade: GradeName,
        /// A repository that it builds, or a pattern: github.com/org/*, or *
        #[arg(long = "project", value_name = "PATTERN")]
        repositories: Vec<String>,
        /// How long it counts: 12h, 90d; never
        #[arg(long, value_name = "SPAN")]
        expires: String,
    },
    /// List them
    Ls,
    /// Revoke one: it counts for nothing from now on
    Revoke {
        /// As the list shows it
        id: TokenId,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum GradeName {
    Builder,
    UntrustedBuilder,
    Watcher,
    Operator,
    Admin,
}

impl GradeName {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Builder => Grade::Builder.name(),
            Self::UntrustedBuilder => Grade::UntrustedBuilder.name(),
            Self::Watcher => Grade::Watcher.name(),
            Self::Operator => Grade::Operator.name(),
            Self::Admin => Grade::Admin.name(),
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct EventsArgs {
    /// Only those of this project
    #[arg(long)]
    pub(super) key: Option<Key>,
    /// Stay, and print what comes
    #[arg(long, short)]
    pub(super) follow: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct ImageArgs {
    #[command(subcommand)]
    pub(super) verb: ImageVerb,
}

#[derive(Debug, Subcommand)]
pub(super) enum ImageVerb {
    /// Make the image from Debian's packages, buildkitd and kiln-init, and give it to Incus
    Build(ImageBuildArgs),
}

/// What `kiln image build` makes the image from, and where it puts it.
#[derive(Debug, Args)]
pub(super) struct ImageBuildArgs {
    /// The buildkitd to put into it
    #[arg(long, value_name = "PATH")]
    pub(super) buildkitd: PathBuf,
    /// The kiln-init to put into it
    #[arg(long, value_name = "PATH")]
    pub(super) init: PathBuf,
    /// Incus's unix socket
    #[arg(long, value_name = "PATH", default_value = "/var/lib/incus/unix.socket")]
    pub(super) incus_socket: PathBuf,
    /// The Incus project that gets the image
    #[arg(long, value_name = "NAME", default_value = "kiln")]
    pub(super) incus_project: String,
    /// The image's alias
    #[arg(long, value_name = "NAME", default_value = "kiln")]
    pub(super) alias: String,
    /// Where packages and finished images are kept between runs
    #[arg(long, value_name = "DIR")]
    pub(super) cache: Option<PathBuf>,
    /// Fetch the packages anew, for their updates
    #[arg(long)]
    pub(super) refresh: bool,
    /// A root file system to begin with in place of Debian's: a tar with everything below rootfs/, runc and git in it
    #[arg(long, value_name = "TAR", conflicts_with = "refresh")]
    pub(super) base: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    pub(super) shell: Shell,
}

/// What names have in common; kilnd has the same rule.
const OF_THE_LIST: &str = "it is a name that the list has";

/// Checked here, so that a slip is a usage error, and passed on as it is.
fn window(text: &str) -> Result<String, String> {
    units::parse_span(text).map(|_| text.to_owned()).ok_or_else(|| "write it as 30s, 15m or 1h30m".to_owned())
}

fn name(text: &str) -> Result<String, String> {
    if kiln_wire::is_name(text) { Ok(text.to_owned()) } else { Err(OF_THE_LIST.to_owned()) }
}

fn orphan_name(text: &str) -> Result<String, String> {
    if kiln_wire::is_orphan_name(text) { Ok(text.to_owned()) } else { Err(OF_THE_LIST.to_owned()) }
}

fn size(text: &str) -> Result<String, String> {
    units::parse_size(text).map(|_| text.to_owned()).ok_or_else(|| "write it as 40GiB or 512MiB".to_owned())
}

/// `90`, `90s`, `5m`, `1h`: at least a second, at most a day.
fn span(text: &str) -> Result<Duration, String> {
    let (digits, factor) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(digits) if text.ends_with('m') => (digits, 60),
        Some(digits) if text.ends_with('h') => (digits, 3600),
        Some(digits) => (digits, 1),
        None => (text, 1),
    };
    let seconds = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
    match seconds {
        Some(seconds @ 1..=86_400) => Ok(Duration::from_secs(seconds)),
        _ => Err("write it as 90s, 5m or 1h, between 1s and 24h".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn spans() {
        assert_eq!(span("90"), Ok(Duration::from_secs(90)));
        assert_eq!(span("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(span("5m"), Ok(Duration::from_mins(5)));
        assert_eq!(span("24h"), Ok(Duration::from_hours(24)));
        for text in ["", "s", "-1s", "0", "1.5m", "25h", "5 m", "99999999999999999999h", "5M"] {
            assert!(span(text).is_err(), "{text:?} was taken");
        }
    }
}
