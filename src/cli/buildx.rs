//! Finding buildx, and the words it is called with.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use super::CliError;
use super::private::CredentialFiles;

/// How long `buildx create` may take: it only writes a file.
const CREATE: Duration = Duration::from_secs(30);

/// A buildx that can be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Buildx {
    program: PathBuf,
    /// `docker` wants to be told which plugin.
    is_docker: bool,
}

impl Buildx {
    /// `named` (from `KILN_BUILDX`) if given, else `buildx` or `docker buildx` on `path`.
    pub(super) fn find(named: Option<OsString>, path: Option<&OsStr>) -> Result<Self, CliError> {
        if let Some(named) = named.map(PathBuf::from) {
            let program = if named.components().count() > 1 { Some(named.clone()) } else { look_up(&named, path) };
            return match program.filter(|program| is_program(program)) {
                Some(program) => Ok(Self { program, is_docker: false }),
                None => Err(CliError::BadBuildx(named)),
            };
        }
        if let Some(program) = look_up(Path::new("buildx"), path) {
            return Ok(Self { program, is_docker: false });
        }
        let docker = look_up(Path::new("docker"), path).map(|program| Self { program, is_docker: true });
        docker.filter(Self::answers).ok_or(CliError::NoBuildx)
    }

    /// Docker without the plugin takes `buildx` for a mistake.
    fn answers(&self) -> bool {
        let version = std::process::Command::new(&self.program)
            .args(["buildx", "version"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        version.is_ok_and(|status| status.success())
    }

    /// The program and its arguments, as one list.
    pub(super) fn words<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Vec<OsString> {
        let plugin = self.is_docker.then(|| OsString::from("buildx"));
        let program = self.program.clone().into_os_string();
        [program].into_iter().chain(plugin).chain(arguments.iter().map(|a| a.as_ref().to_owned())).collect()
    }

    /// Ready to run, with a configuration of its own. Registry logins stay the user's: they are Docker's configuration.
    pub(super) fn command(&self, config: &Path, arguments: &[OsString]) -> Command {
        let words = self.words(arguments);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env("BUILDX_CONFIG", config).env_remove("BUILDX_BUILDER").kill_on_drop(true);
        command
    }

    pub(super) fn name(&self) -> String {
        self.program.display().to_string()
    }

    pub(super) async fn create(&self, config: &Path, arguments: &[OsString]) -> Result<(), CliError> {
        let mut command = self.command(config, arguments);
        command.stdin(Stdio::null());
        let failed = |status: String, stderr: String| CliError::BuilderCreate { status, stderr };
        let output = match timeout(CREATE, command.output()).await {
            Ok(output) => output.map_err(|source| CliError::Spawn { program: self.name(), source })?,
            Err(_) => return Err(failed(format!("nothing after {} s", CREATE.as_secs()), String::new())),
        };
        if output.status.success() {
            return Ok(());
        }
        Err(failed(output.status.to_string(), String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

/// `buildx create` for one project's daemon.
pub(super) fn create_arguments(
    name: &str,
    endpoint: &str,
    server_name: &str,
    files: &CredentialFiles,
) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["create", "--name", name, "--driver", "remote"].map(OsString::from).into();
    let paths = [("cacert", files.ca.as_os_str()), ("cert", files.cert.as_os_str()), ("key", files.key.as_os_str())];
    for (option, value) in paths.into_iter().chain([("servername", OsStr::new(server_name))]) {
        words.push("--driver-opt".into());
        words.push(driver_option(option, value));
    }
    words.push(endpoint.into());
    words
}

/// buildx reads driver options as fields of a CSV line.
fn driver_option(option: &str, value: &OsStr) -> OsString {
    let mut field = OsString::from(option);
    field.push("=");
    field.push(value);
    match field.to_str() {
        Some(text) if text.contains([',', '"']) => format!("\"{}\"", text.replace('"', "\"\"")).into(),
        _ => field,
    }
}

/// `buildx build` on that builder.
pub(super) fn build_arguments(name: &str, given: &[OsString]) -> Vec<OsString> {
    ["build", "--builder", name].map(OsString::from).into_iter().chain(given.iter().cloned()).collect()
}

/// For a shell.
pub(super) fn quoted(words: &[OsString]) -> String {
    let quote = |word: &OsString| {
        let text = word.to_string_lossy();
        let safe = |c: char| c.is_ascii_alphanumeric() || "-_=+:,./@%".contains(c);
        if !text.is_empty() && text.chars().all(safe) {
            text.into_owned()
        } else {
            format!("'{}'", text.replace('\'', "'\\''"))
        }
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

fn look_up(name: &Path, path: Option<&OsStr>) -> Option<PathBuf> {
    std::env::split_paths(path?).map(|directory| directory.join(name)).find(|program| is_program(program))
}

fn is_program(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn program(directory: &Path, name: &str, script: &str) -> PathBuf {
        let path = directory.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("set");
        path
    }

    #[test]
    fn finds_the_best_buildx_there_is() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = Some(dir.path().as_os_str());
        assert!(matches!(Buildx::find(None, path), Err(CliError::NoBuildx)));
        assert!(matches!(Buildx::find(None, None), Err(CliError::NoBuildx)));
        let docker = program(dir.path(), "docker", "exit 1");
        assert!(matches!(Buildx::find(None, path), Err(CliError::NoBuildx)), "a docker without the plugin");
        program(dir.path(), "docker", "[ \"$1 $2\" = 'buildx version' ]");
        let found = Buildx::find(None, path).expect("found");
        assert_eq!(found.words(&["build"]), [docker.into_os_string(), "buildx".into(), "build".into()]);
        let plain = program(dir.path(), "buildx", "exit 0");
        assert_eq!(
            Buildx::find(None, path).expect("found").words(&["build"]),
            [plain.into_os_string(), "build".into()]
        );
    }

    #[test]
    fn the_one_that_was_named_and_no_other() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = Some(dir.path().as_os_str());
        program(dir.path(), "buildx", "exit 0");
        let mine = program(dir.path(), "mine", "exit 0");
        for name in [mine.clone().into_os_string(), "mine".into()] {
            assert_eq!(
                Buildx::find(Some(name), path).expect("found"),
                Buildx { program: mine.clone(), is_docker: false }
            );
        }
        for name in ["/nowhere/buildx", "absent", "/etc/passwd", "/etc"] {
            assert!(matches!(Buildx::find(Some(name.into()), path), Err(CliError::BadBuildx(_))), "{name}");
        }
    }

    #[test]
    fn words_for_buildx_and_for_a_shell() {
        let files = CredentialFiles::below(Path::new("/run/a,b"));
        let words = create_arguments("kiln-x", "tcp://127.0.0.1:1", "buildkitd-x.kiln", &files);
        assert_eq!(words[6], "\"cacert=/run/a,b/ca.pem\"");
        assert_eq!(words.last().and_then(|w| w.to_str()), Some("tcp://127.0.0.1:1"));
        assert_eq!(quoted(&["a b".into(), "it's".into(), "".into(), "--x=1,2".into()]), r"'a b' 'it'\''s' '' --x=1,2");
    }
}
