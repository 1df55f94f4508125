//! Which project a build belongs to.
//!
//! Only the normal form of a repository leaves this room: a git remote may carry a token in its URL.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;
use std::process::Command;

use kiln_domain::BuildSpec;
use kiln_domain::spec::SpecError;
use thiserror::Error;

use super::args::Identity;

#[derive(Debug, Error)]
pub(super) enum IdentityError {
    #[error("{flag} is not text (UTF-8): {value:?}")]
    NotText { flag: &'static str, value: OsString },
    #[error("cannot tell which repository {} belongs to: {why}; name it with --repo or KILN_REPO", .context.display())]
    NoRepository { context: PathBuf, why: String },
    #[error("cannot ask git which repository {} belongs to; install git, or name it with --repo or KILN_REPO", .context.display())]
    Git { context: PathBuf, source: io::Error },
    #[error("the git remote `origin` of {} names no repository; name it with --repo or KILN_REPO", .context.display())]
    Remote { context: PathBuf, source: SpecError },
    #[error("this machine is a {0}, and daemons are amd64 or arm64: choose one with --arch")]
    Machine(&'static str),
}

impl IdentityError {
    /// Whether the command line is to be corrected, rather than the machine.
    pub(super) fn is_usage(&self) -> bool {
        !matches!(self, Self::Git { .. })
    }
}

/// `context` is what buildx builds from: a directory, a URL, or `-`; `target` is empty for the default one.
pub(super) fn resolve(
    identity: &Identity,
    target: &OsStr,
    context: Option<&OsStr>,
) -> Result<BuildSpec, super::CliError> {
    let target =
        target.to_str().ok_or_else(|| IdentityError::NotText { flag: "--target", value: target.to_owned() })?;
    let arch = match identity.arch.as_deref().filter(|arch| !arch.is_empty()) {
        Some(arch) => arch,
        None => machine_arch()?,
    };
    if let Some(repo) = identity.repo.as_deref().filter(|repo| !repo.is_empty()) {
        return Ok(BuildSpec::new(repo, &identity.name, target, arch)?);
    }
    let (repo, from) = repository_of(context.unwrap_or(OsStr::new(".")))?;
    BuildSpec::new(&repo, &identity.name, target, arch).map_err(|error| match error {
        SpecError::Repo(_) => IdentityError::Remote { context: from, source: error }.into(),
        other => other.into(),
    })
}

fn machine_arch() -> Result<&'static str, IdentityError> {
    match std::env::consts::ARCH {
        arch @ ("x86_64" | "aarch64") => Ok(arch),
        other => Err(IdentityError::Machine(other)),
    }
}

/// The repository's spelling, and the directory that named it.
fn repository_of(context: &OsStr) -> Result<(String, PathBuf), IdentityError> {
    if let Some(url) = context.to_str().filter(|context| is_remote(context)) {
        return remote_context(url).map(|repo| (repo, PathBuf::from(url)));
    }
    // A context from stdin says nothing of itself; it was most likely made where the command runs.
    let directory = PathBuf::from(if context == "-" { OsStr::new(".") } else { context });
    if !directory.is_dir() {
        let why = "it is not a directory".to_owned();
        return Err(IdentityError::NoRepository { context: directory, why });
    }
    origin_of(directory)
}

/// As BuildKit tells a URL from a directory.
fn is_remote(context: &str) -> bool {
    let schemes = ["http://", "https://", "git://", "ssh://", "git@", "github.com/"];
    schemes.iter().any(|scheme| context.starts_with(scheme))
}

/// A git context names its repository itself; `#ref:dir` is not part of it.
fn remote_context(url: &str) -> Result<String, IdentityError> {
    let repo = url.split(['#', '?']).next().unwrap_or(url);
    let is_http = repo.starts_with("http://") || repo.starts_with("https://");
    if is_http && repo.strip_suffix(".git").is_none() {
        let why = "it is an archive on the web".to_owned();
        return Err(IdentityError::NoRepository { context: url.into(), why });
    }
    Ok(repo.to_owned())
}

fn origin_of(directory: PathBuf) -> Result<(String, PathBuf), IdentityError> {
    // The configured value and not `git remote get-url`: rewriting rules of one machine must not move a project.
    let (ok, url, _) = git(&directory, &["config", "--get", "remote.origin.url"])?;
    if ok && !url.is_empty() {
        return Ok((url, directory));
    }
    let (inside, _, complaint) = git(&directory, &["rev-parse", "--git-dir"])?;
    let why = match complaint.lines().next() {
        Some(line) if !inside => line.trim_start_matches("fatal: ").to_owned(),
        _ => "it has no git remote `origin`".to_owned(),
    };
    Err(IdentityError::NoRepository { context: directory, why })
}

fn git(directory: &PathBuf, arguments: &[&str]) -> Result<(bool, String, String), IdentityError> {
    let output = Command::new("git")
        .arg("-C")
        .arg(directory)
        .args(arguments)
        .env("LC_ALL", "C")
        .output()
        .map_err(|source| IdentityError::Git { context: directory.clone(), source })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Ok((output.status.success(), text(&output.stdout), text(&output.stderr)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::error::chain;
    use super::*;

    fn identity(repo: Option<&str>) -> Identity {
        Identity { repo: repo.map(str::to_owned), name: String::new(), arch: Some("amd64".to_owned()) }
    }

    fn repo_in(context: &Path) -> Result<String, String> {
        resolve(&identity(None), OsStr::new(""), Some(context.as_os_str()))
            .map(|spec| spec.repo.to_string())
            .map_err(|error| chain(&error))
    }

    fn repository(remote: Option<&str>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        let run = |arguments: &[&str]| assert!(git(&dir.path().to_path_buf(), arguments).expect("git").0);
        run(&["init", "-q"]);
        if let Some(remote) = remote {
            run(&["remote", "add", "origin", remote]);
        }
        dir
    }

    #[test]
    fn the_origin_names_the_repository_and_its_token_stays_here() {
        let dir = repository(Some("https://ci:s3cret@github.com/Org/Repo.git"));
        assert_eq!(repo_in(dir.path()).as_deref(), Ok("github.com/org/repo"));
        let inner = dir.path().join("a/b");
        std::fs::create_dir_all(&inner).expect("directories");
        assert_eq!(repo_in(&inner).as_deref(), Ok("github.com/org/repo"));
    }

    #[test]
    fn without_an_origin_the_flag_is_named() {
        let no_remote = repository(None);
        let error = repo_in(no_remote.path()).expect_err("no origin");
        assert!(error.contains("no git remote `origin`") && error.contains("--repo"), "{error}");
        let plain = tempfile::tempdir().expect("a directory");
        let error = repo_in(plain.path()).expect_err("no repository");
        assert!(error.contains("not a git repository") && error.contains("--repo"), "{error}");
        let error = repo_in(&plain.path().join("absent")).expect_err("nothing there");
        assert!(error.contains("not a directory") && error.contains("--repo"), "{error}");
        let odd = repository(Some("https://"));
        let error = repo_in(odd.path()).expect_err("no name in it");
        assert!(error.contains("origin") && error.contains("repo is required"), "{error}");
    }

    #[test]
    fn a_flag_wins_and_an_empty_one_is_none() {
        let dir = repository(Some("git@h.example:a/b.git"));
        let of = |repo| resolve(&identity(repo), OsStr::new("T"), Some(dir.path().as_os_str())).expect("a project");
        assert_eq!(of(Some("h/r")).repo.as_str(), "h/r");
        assert_eq!(of(Some("")).repo.as_str(), "h.example/a/b");
        assert_eq!(of(Some("h/r")).target, "t");
    }

    #[test]
    fn a_remote_context_names_itself() {
        for url in [
            "https://github.com/org/repo.git#main:dir",
            "git@github.com:org/repo.git",
            "git://github.com/org/repo",
            "ssh://git@github.com/org/repo.git",
            "github.com/org/repo",
        ] {
            assert_eq!(repo_in(Path::new(url)).as_deref(), Ok("github.com/org/repo"), "of {url}");
        }
        assert!(repo_in(Path::new("https://h.example/context.tar.gz")).is_err());
    }
}
