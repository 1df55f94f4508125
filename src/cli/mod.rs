//! The `kiln` command: a client of kilnd's API, and the front of `buildx build`.
//!
//! * `split`, `identity` and `forge` are pure or nearly so: which words belong to kiln and which to buildx, which project a
//!   build belongs to, and which pull request.
//! * `client` speaks HTTP to kilnd; every call has a deadline and every error names a remedy.
//! * `polling` asks for a route by short polls; `renewal` keeps its lease alive while buildx runs.
//! * `build` is `kiln build`: route → credential in a `private` directory → `buildx` → release, whatever happens.
//! * `show`, `caches` and `admin` ask and print: tables for people, `--json` for programs.
//!
//! Promises: the exit code of buildx is passed through; a routed build is always released, also after a signal; no key
//! is ever written where others could read it, and none stays behind; answers go to stdout, everything else to stderr.
//!
//! | exit code | meaning |
//! |---|---|
//! | 64 | the command line is wrong |
//! | 69 | kilnd, buildx or git is not there |
//! | 1 | everything else |
//! | 128 + n | ended by signal n |
//!
//! What must not be here: decisions about daemons, anything that only works on the machine kilnd runs on.

// They panic where nothing can be written; see `stdio`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

mod admin;
mod args;
mod build;
mod buildx;
mod caches;
mod client;
mod connections;
mod error;
mod events;
mod forge;
mod identity;
mod image;
mod node_id;
mod polling;
mod print;
mod private;
mod renewal;
mod show;
mod signals;
mod split;
mod tokens;
mod waiting;

use args::{Cli, ImageVerb, Verb};
use client::Client;
use error::{CliError, USAGE};
use print::Printer;

use crate::stdio;

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    let words = split::arrange(std::env::args_os().collect());
    match Cli::try_parse_from(words) {
        Ok(cli) => run(cli),
        Err(error) => {
            let usage = error.use_stderr();
            match error.print().map_err(print::unwritten) {
                _ if usage => ExitCode::from(USAGE),
                // Help and version come as errors too.
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => ended_with(&error),
            }
        }
    }
}

fn run(cli: Cli) -> ExitCode {
    // A benchmark brings a server of its own; everything else waits for one that runs elsewhere.
    let mut runtime = match cli.verb {
        Verb::Bench(_) => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = match runtime.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            stdio::say(&format!("kiln: cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(dispatch(cli)) {
        Ok(code) => code,
        Err(error) => ended_with(&error),
    }
}

fn ended_with(error: &CliError) -> ExitCode {
    if matches!(error, CliError::ReaderGone) {
        return ExitCode::SUCCESS;
    }
    stdio::say(&format!("kiln: {}", error::chain(error)));
    ExitCode::from(error.exit_code())
}

async fn dispatch(cli: Cli) -> Result<ExitCode, CliError> {
    let client = || Client::new(&cli.connection);
    match cli.verb {
        Verb::Build(args) => return build::run(&client()?, &args).await,
        Verb::Route(args) => return show::route(&client()?, &args).await,
        Verb::Complete(args) => client()?.complete(&args.key, Some(&args.build_id)).await?,
        Verb::Key(args) => show::key(&args)?,
        Verb::Ps(args) => show::projects(&client()?, Printer::for_stdout(), args.json).await?,
        Verb::Show(args) => show::project(&client()?, &args).await?,
        Verb::Why(args) => admin::why(&client()?, &args).await?,
        Verb::Set(args) => admin::set(&client()?, &args).await?,
        Verb::Stop(args) => show::stop(&client()?, &args).await?,
        Verb::Rm(args) => admin::remove(&client()?, &args).await?,
        Verb::Renew(args) => admin::renew(&client()?, &args).await?,
        Verb::Cache(args) => caches::run(&client()?, &args).await?,
        Verb::Du(args) => caches::du(&client()?, Printer::for_stdout(), args.json).await?,
        Verb::Orphans(args) => admin::orphans(&client()?, &args).await?,
        Verb::Trash(args) => admin::trash(&client()?, &args).await?,
        Verb::Gateway(args) => connections::list(&client()?, &args).await?,
        Verb::Token(args) => tokens::run(&client()?, &args).await?,
        Verb::Events(args) => events::print(&client()?, &args).await?,
        Verb::Image(args) => match args.verb {
            ImageVerb::Build(args) => image::build(&args).await?,
        },
        Verb::Bench(args) => crate::bench::run(&args).await?,
        Verb::Completions(args) => print::out(&completions(args.shell))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "kiln", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// A variable that is set and not empty.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
