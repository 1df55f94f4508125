//! How GitHub is asked: a run, its jobs, their logs, and the pull request of its commit.
//!
//! The credentials need no more than to read actions and pull requests of the repositories; for public ones any will do. A log is
//! somewhere else, where GitHub's answer sends to with an address that is a secret of its own: the credentials do not go there.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use axum::http::StatusCode;
use bytes::Bytes;
use kiln_domain::Timestamp;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::SetupError;
use super::forge::{Forge, ForgeError, Look};
use crate::causes::in_one_line;
use crate::config::identity::{Forge as Config, Place};
use crate::identity::oidc::fetch::{Answer, Question, Web};
use crate::identity::oidc::roots::Roots;

const MOST_BYTES: usize = 2 << 20;
/// The job that prints the words prints little else.
const MOST_LOG_BYTES: usize = 256 << 10;
/// Jobs whose logs are read at one look, those first that ended first.
const MOST_LOGS: usize = 5;

pub(super) struct GitHub {
    web: Web,
    api: Place,
    credentials: String,
}

#[derive(Deserialize)]
struct Run {
    id: u64,
    event: String,
    status: Option<String>,
    head_sha: String,
    repository: Repository,
    /// Absent where the fork is gone.
    head_repository: Option<Repository>,
}

#[derive(Deserialize)]
struct Repository {
    id: u64,
    #[serde(default)]
    full_name: String,
}

#[derive(Deserialize)]
struct Jobs {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    id: u64,
    run_id: u64,
    status: String,
    completed_at: Option<jiff::Timestamp>,
}

#[derive(Deserialize)]
struct Pull {
    number: u64,
    state: String,
    head: Side,
    base: Side,
}

#[derive(Deserialize)]
struct Side {
    sha: String,
    repo: Option<Repository>,
}

impl GitHub {
    pub(super) fn new(config: &Config, roots: &mut Roots) -> Result<Self, SetupError> {
        let api = config.place().map_err(|why| SetupError::Value(format!("api = {:?}: {why}", config.api)))?;
        let tls = roots.given(config.ca_file.as_deref(), !api.tls)?;
        Ok(Self { web: Web::new(tls), api, credentials: credentials(&config.credentials_file)? })
    }

    async fn ask(&self, path: &str) -> Result<Bytes, ForgeError> {
        let place = Place { path: format!("{}{path}", self.api.path.trim_end_matches('/')), ..self.api.clone() };
        let answer = self.send(&place, Some(&self.credentials), MOST_BYTES).await?;
        check(&answer)?;
        answer.document(&place, MOST_BYTES).map_err(|error| unavailable(&in_one_line(&error)))
    }

    async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, ForgeError> {
        let text = self.ask(path).await?;
        serde_json::from_slice(&text).map_err(|error| unavailable(&format!("{path} is not what was expected: {error}")))
    }

    async fn send(&self, place: &Place, bearer: Option<&str>, most: usize) -> Result<Answer, ForgeError> {
        let answer = self.web.ask(&Question { place, bearer, most }).await;
        answer.map_err(|error| unavailable(&in_one_line(&error)))
    }

    /// `None` where there is none yet.
    async fn log(&self, path: &str, job: u64) -> Result<Option<Bytes>, ForgeError> {
        let path = format!("{}/repos/{path}/actions/jobs/{job}/logs", self.api.path.trim_end_matches('/'));
        let place = Place { path, ..self.api.clone() };
        let mut answer = self.send(&place, Some(&self.credentials), MOST_LOG_BYTES).await?;
        if answer.status.is_redirection() {
            let there = answer.location.as_deref().and_then(|there| Place::parse(there).ok());
            let there = there.filter(|there| there.tls >= self.api.tls);
            let there = there.ok_or_else(|| unavailable("a log is to be at an address that is none"))?;
            answer = self.send(&there, None, MOST_LOG_BYTES).await?;
        }
        match answer.status {
            StatusCode::NOT_FOUND | StatusCode::GONE => Ok(None),
            _ => check(&answer).map(|()| Some(answer.body)),
        }
    }
}

#[async_trait]
impl Forge for GitHub {
    async fn look(&self, path: &str, id: u64, words: &str, since: Timestamp) -> Result<Look, ForgeError> {
        if !is_path(path) {
            return Err(ForgeError::Refused("that is no repository of GitHub's"));
        }
        let run: Run = self.read(&format!("/repos/{path}/actions/runs/{id}")).await?;
        let fork = run.check(path, id).map_err(ForgeError::Refused)?;
        let Jobs { jobs } =
            self.read(&format!("/repos/{path}/actions/runs/{id}/jobs?filter=latest&per_page=100")).await?;
        for job in ended(jobs, id, since) {
            let log = self.log(path, job).await?;
            if log.is_some_and(|log| has_line(&log, words)) {
                let pulls: Vec<Pull> =
                    self.read(&format!("/repos/{path}/commits/{}/pulls?per_page=100", run.head_sha)).await?;
                let number = pulls.iter().filter(|pull| pull.is_of(&run, fork)).map(|pull| pull.number).min();
                return Ok(Look::Printed {
                    fork: number.map_or_else(|| format!("run-{id}"), |number| number.to_string()),
                });
            }
        }
        Ok(Look::NotYet)
    }
}

impl Run {
    /// The fork that it is from, if it is a run that gets no token.
    fn check(&self, path: &str, id: u64) -> Result<u64, &'static str> {
        if self.id != id || !self.repository.full_name.eq_ignore_ascii_case(path) {
            return Err("the run is of another repository, or the repository has another name by now");
        }
        if self.event != "pull_request" {
            return Err("the run is not of a pull request: it can have a token of the forge itself");
        }
        if self.status.as_deref() != Some("in_progress") {
            return Err("the run does not go on: only one under way can ask");
        }
        if !self.head_sha.bytes().all(|b| b.is_ascii_hexdigit()) || self.head_sha.is_empty() {
            return Err("the run has no commit");
        }
        match &self.head_repository {
            Some(fork) if fork.id != self.repository.id => Ok(fork.id),
            Some(_) => {
                Err("the run is of the repository itself and not of a fork: it can have a token of the forge itself")
            }
            None => Err("the fork is gone"),
        }
    }
}

impl Pull {
    fn is_of(&self, run: &Run, fork: u64) -> bool {
        let id = |side: &Side| side.repo.as_ref().map(|repo| repo.id);
        self.state == "open"
            && self.head.sha == run.head_sha
            && id(&self.head) == Some(fork)
            && id(&self.base) == Some(run.repository.id)
    }
}

/// Those that may have printed what was given out at `since`, the first to end first.
fn ended(jobs: Vec<Job>, run: u64, since: Timestamp) -> Vec<u64> {
    let mut ended: Vec<_> = jobs
        .into_iter()
        .filter(|job| job.run_id == run && job.status == "completed")
        .filter_map(|job| job.completed_at.map(|at| (at.as_millisecond(), job.id)))
        // GitHub's clock, to the second, and ours.
        .filter(|(at, _)| *at >= since.as_millis() - 10_000)
        .collect();
    ended.sort_unstable();
    ended.into_iter().take(MOST_LOGS).map(|(_, id)| id).collect()
}

/// A line of a log is a time, a space, and what was printed.
fn has_line(log: &[u8], words: &str) -> bool {
    let said = |line: &[u8]| {
        let at = line.iter().position(|b| *b == b' ')?;
        Some(line[at + 1..].trim_ascii_end() == words.as_bytes())
    };
    log.split(|b| *b == b'\n').any(|line| said(line) == Some(true))
}

/// As `owner/name`, fit to stand in an address.
fn is_path(path: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    path.split('/').count() == 2 && path.split('/').all(is_part)
}

fn check(answer: &Answer) -> Result<(), ForgeError> {
    match answer.status {
        StatusCode::OK => Ok(()),
        StatusCode::NOT_FOUND => Err(ForgeError::Refused("there is no such run")),
        StatusCode::MOVED_PERMANENTLY => Err(ForgeError::Refused("the repository has another name by now")),
        StatusCode::UNAUTHORIZED => Err(unavailable("the credentials are refused: make new ones")),
        status => Err(unavailable(&format!("it answered {status}"))),
    }
}

fn unavailable(why: &str) -> ForgeError {
    ForgeError::Unavailable { why: kiln_token::shown_within(why, 400), retry_after: Duration::from_secs(30) }
}

const MOST_OF_CREDENTIALS: u64 = 4096;

/// F48: without the end of the line that editors put there.
pub(super) fn credentials(path: &Path) -> Result<String, SetupError> {
    let read = |source| SetupError::Read { path: path.to_owned(), source };
    let wrong = |why| SetupError::Credentials { path: path.to_owned(), why };
    let seen = std::fs::metadata(path).map_err(read)?;
    // A pipe would be waited for, and a device has no end.
    if !seen.is_file() || seen.len() > MOST_OF_CREDENTIALS {
        return Err(wrong("is no file of at most 4 KiB"));
    }
    if seen.permissions().mode() & 0o077 != 0 {
        return Err(wrong("can be read by others: chmod 0600"));
    }
    let text = std::fs::read_to_string(path).map_err(read)?;
    let secret = text.trim();
    if secret.is_empty() || !secret.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(wrong("does not hold one token and nothing else"));
    }
    Ok(secret.to_owned())
}
