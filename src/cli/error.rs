//! What can go wrong for a user of the command, and the exit code it ends with.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use kiln_domain::Key;
use kiln_domain::project::PullRequestError;
use kiln_domain::spec::SpecError;
use thiserror::Error;

use super::client::ClientError;
use super::identity::IdentityError;
use crate::causes::in_one_line;

/// From sysexits.h.
pub(super) const USAGE: u8 = 64;
pub(super) const UNAVAILABLE: u8 = 69;

#[derive(Debug, Error)]
pub(super) enum CliError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Bench(Box<crate::bench::BenchError>),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    PullRequest(#[from] PullRequestError),
    #[error(
        "a pull request has a daemon of its own only for untrusted builds: say --untrusted with --pull-request (or set KILN_UNTRUSTED with KILN_PULL_REQUEST)"
    )]
    TrustedPullRequest,
    #[error(
        "--builder cannot be given: kiln makes a builder for the project's daemon; use `buildx build` for another one"
    )]
    Builder,
    #[error(
        "found no buildx: install Debian's docker-buildx or Docker's buildx plugin, or name the program in KILN_BUILDX"
    )]
    NoBuildx,
    #[error("KILN_BUILDX names {}, which is not a program that can be run", .0.display())]
    BadBuildx(PathBuf),
    #[error("nothing is to be changed: name a setting, as --tier hot, or --reset one")]
    NothingToSet,
    #[error("--{0} and --reset {0} contradict each other: give one of them")]
    SetAndReset(&'static str),
    #[error("the cache of {key} could not be measured: {why}")]
    Unmeasured { key: Key, why: String },
    #[error("a build id is the 16 hexadecimal digits that /route answered")]
    BuildId,
    #[error("cannot run {program}")]
    Spawn { program: String, source: io::Error },
    #[error("cannot make a builder: `buildx create` ended with {status}: {stderr}")]
    BuilderCreate { status: String, stderr: String },
    #[error("cannot {doing} {}", .path.display())]
    File { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error("cannot write to stdout")]
    Stdout(#[source] io::Error),
    /// `kiln ps | head`: whoever stops reading has had enough, and nothing is to be said.
    #[error("nobody reads the answer any more")]
    ReaderGone,
    #[error("kilnd answered the route without a credential: it may be older than this client")]
    NoCredential,
    #[error("kilnd answered with the endpoint {0:?}, which is not tcp://HOST:PORT")]
    Endpoint(String),
    #[error(transparent)]
    Image(#[from] crate::image::ImageError),
    #[error("neither XDG_CACHE_HOME nor HOME is set: say with --cache where to keep the packages")]
    NoHome,
}

impl From<crate::bench::BenchError> for CliError {
    fn from(error: crate::bench::BenchError) -> Self {
        Self::Bench(Box::new(error))
    }
}

impl CliError {
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::Builder
            | Self::Spec(_)
            | Self::PullRequest(_)
            | Self::TrustedPullRequest
            | Self::NothingToSet
            | Self::SetAndReset(_)
            | Self::BuildId
            | Self::Client(ClientError::BadUrl { .. }) => USAGE,
            Self::Identity(error) if error.is_usage() => USAGE,
            Self::Identity(_) | Self::NoBuildx | Self::BadBuildx(_) | Self::Spawn { .. } => UNAVAILABLE,
            Self::Client(error) if error.is_unavailable() => UNAVAILABLE,
            _ => 1,
        }
    }
}

/// The error and what caused it, on one line.
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    // Much of it is a server's or a daemon's words.
    super::print::plain(&in_one_line(error).trim_end().replace('\n', " | "))
}
