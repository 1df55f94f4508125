//! Runs the tools that engines stand on: by absolute path, with fixed arguments, in the C locale, under a deadline.

use std::ffi::OsStr;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::io::Errno;
use tokio::process::Command;

use super::VolumeError;

/// For what only touches metadata. Generous: a btrfs transaction on a busy spinning disk takes seconds.
pub(super) const QUICK: Duration = Duration::from_mins(1);
/// For what walks a whole volume, copying or removing it.
pub(super) const WALK: Duration = Duration::from_mins(30);

/// A tool that was found.
#[derive(Debug, Clone)]
pub(super) struct Program {
    path: PathBuf,
}

/// What a tool printed. `complete` is false when it ended with an error that the caller may choose to live with.
pub(super) struct Printed {
    pub stdout: String,
    pub stderr: String,
    pub complete: bool,
}

/// Why a step failed, before the engine adds what it was doing to which volume.
#[derive(Debug)]
pub enum Failure {
    Full,
    Busy { holder: String },
    Io { path: String, source: std::io::Error },
    Command { command: String, said: String },
    TimedOut { waited_for: String, after: Duration },
}

impl Program {
    /// Looks in `search` only, so that what runs as root does not depend on who started us.
    pub(super) fn find(name: &str, search: &[PathBuf], remedy: &str) -> Result<Self, VolumeError> {
        let found =
            search.iter().map(|directory| directory.join(name)).find(|path| path.is_absolute() && path.is_file());
        found.map(|path| Self { path }).ok_or_else(|| VolumeError::Unusable {
            path: name.to_owned(),
            why: format!("there is no program {name} in {}", display_all(search)),
            remedy: remedy.to_owned(),
        })
    }

    /// Success or a [`Failure`] made from what it said.
    pub(super) async fn run<A: AsRef<OsStr>>(&self, args: &[A], deadline: Duration) -> Result<String, Failure> {
        let printed = self.run_leniently(args, deadline).await?;
        if printed.complete { Ok(printed.stdout) } else { Err(self.failure(args, &printed.stderr)) }
    }

    /// Leaves it to the caller what an unsuccessful end means. A tool that is still running when this is dropped or
    /// gives up is killed.
    pub(super) async fn run_leniently<A: AsRef<OsStr>>(
        &self,
        args: &[A],
        deadline: Duration,
    ) -> Result<Printed, Failure> {
        let mut command = Command::new(&self.path);
        command.args(args).env_clear().env("LC_ALL", "C").current_dir("/").stdin(Stdio::null()).kill_on_drop(true);
        let output = match tokio::time::timeout(deadline, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(source)) => return Err(Failure::Io { path: self.path.display().to_string(), source }),
            Err(_) => return Err(Failure::TimedOut { waited_for: self.line(args), after: deadline }),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        let complete = output.status.success();
        let stderr = text(&output.stderr);
        let stderr = if stderr.is_empty() && !complete { output.status.to_string() } else { stderr };
        Ok(Printed { stdout: text(&output.stdout), stderr, complete })
    }

    pub(super) fn failure<A: AsRef<OsStr>>(&self, args: &[A], said: &str) -> Failure {
        // Both texts are the C library's: ENOSPC, and EDQUOT where a quota is what is full (host.md: the daemon sees that one).
        if said.contains("No space left on device") || said.contains("Disk quota exceeded") {
            Failure::Full
        } else if said.contains("Device or resource busy") || said.contains("Text file busy") {
            Failure::Busy { holder: shorten(said) }
        } else {
            Failure::Command { command: self.line(args), said: shorten(said) }
        }
    }

    pub(super) fn line<A: AsRef<OsStr>>(&self, args: &[A]) -> String {
        let args = args.iter().map(|arg| arg.as_ref().to_string_lossy().into_owned());
        std::iter::once(self.path.display().to_string()).chain(args).collect::<Vec<_>>().join(" ")
    }
}

impl Failure {
    pub(super) fn io(path: &Path, source: impl Into<std::io::Error>) -> Self {
        let source = source.into();
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOSPC | Errno::DQUOT) => Self::Full,
            Some(Errno::BUSY | Errno::TXTBSY) => Self::Busy { holder: format!("{} ({source})", path.display()) },
            _ => Self::Io { path: path.display().to_string(), source },
        }
    }

    pub(super) fn during(self, operation: &'static str, name: impl Display) -> VolumeError {
        let name = name.to_string();
        match self {
            Self::Full => VolumeError::Full { operation, name },
            Self::Busy { holder } => VolumeError::Busy { operation, name, holder },
            Self::Io { path, source } => VolumeError::Io { operation, path, source },
            Self::Command { command, said } => VolumeError::Command { operation, name, command, said },
            Self::TimedOut { waited_for, after } => VolumeError::TimedOut { operation, name, waited_for, after },
        }
    }
}

/// `cp` and `rm` complain once per file: the first complaints tell the story.
fn shorten(said: &str) -> String {
    const LINES: usize = 5;
    let lines: Vec<&str> = said.lines().collect();
    let mut short = lines.iter().take(LINES).copied().collect::<Vec<_>>().join("\n");
    if lines.len() > LINES {
        short.push_str("\n(and more of the same)");
    }
    short
}

fn display_all(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell() -> Program {
        Program::find("sh", &[PathBuf::from("/bin")], "install it").expect("a shell")
    }

    async fn said(script: &str) -> Failure {
        shell().run(&["-c", script], QUICK).await.expect_err("it fails")
    }

    #[tokio::test]
    async fn what_a_tool_says_becomes_a_typed_error() {
        assert!(matches!(said("echo \"cp: x: No space left on device\" >&2; exit 1").await, Failure::Full));
        assert!(matches!(said("echo \"ERROR: Disk quota exceeded\" >&2; exit 1").await, Failure::Full));
        assert!(matches!(said("echo \"rm: x: Device or resource busy\" >&2; exit 1").await, Failure::Busy { .. }));
        let Failure::Command { command, said: text } = said("echo odd >&2; exit 3").await else {
            panic!("another error")
        };
        assert!(command.starts_with("/bin/sh -c") && text == "odd", "{command}: {text}");
        let Failure::Command { said: text, .. } = said("exit 3").await else { panic!("another error") };
        assert!(text.contains('3'), "a silent tool still has a status: {text}");
    }

    #[tokio::test]
    async fn a_tool_that_hangs_is_given_up_and_named() {
        let failure = shell().run(&["-c", "sleep 60"], Duration::from_millis(50)).await.expect_err("gave up");
        assert!(matches!(failure, Failure::TimedOut { waited_for, .. } if waited_for.contains("sleep 60")));
    }

    #[test]
    fn a_missing_tool_comes_with_its_remedy() {
        let error = Program::find("no-such-tool", &[PathBuf::from("/bin")], "install it").expect_err("missing");
        assert_eq!(
            error.to_string(),
            "volume storage no-such-tool cannot be used: there is no program no-such-tool in /bin; install it"
        );
    }
}
