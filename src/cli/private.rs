//! A directory that only we can read, gone when we are.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use kiln_wire::Credential;
use tempfile::TempDir;

use super::CliError;

/// Where the files of a credential are.
#[derive(Debug)]
pub(super) struct CredentialFiles {
    pub(super) ca: PathBuf,
    pub(super) cert: PathBuf,
    pub(super) key: PathBuf,
}

impl CredentialFiles {
    /// The names they have in any directory.
    pub(super) fn below(directory: &Path) -> Self {
        let path = |name| directory.join(name);
        Self { ca: path("ca.pem"), cert: path("cert.pem"), key: path("key.pem") }
    }

    /// Writes them, each readable by its owner only from the moment it exists. Files of an earlier run are replaced.
    pub(super) fn write(directory: &Path, credential: &Credential) -> Result<Self, CliError> {
        let files = Self::below(directory);
        for (path, text) in
            [(&files.ca, &credential.ca), (&files.cert, &credential.cert), (&files.key, &credential.key)]
        {
            write_new(path, text).map_err(|source| CliError::File { doing: "write", path: path.clone(), source })?;
        }
        Ok(files)
    }
}

/// A new file in place of an old one, never an old one's permissions.
fn write_new(path: &Path, text: &str) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(text.as_bytes())
}

/// Makes `directory` (0700) if it is not there.
pub(super) fn make_directory(directory: &Path) -> Result<(), CliError> {
    let made = match fs::create_dir(directory) {
        Ok(()) => fs::set_permissions(directory, Permissions::from_mode(0o700)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    };
    made.map_err(|source| CliError::File { doing: "make the directory", path: directory.to_owned(), source })
}

/// In the user's runtime directory (memory, gone at logout) where there is one, else among the temporary files.
pub(super) fn scratch() -> Result<TempDir, CliError> {
    let make = |base: &Path| {
        tempfile::Builder::new().prefix("kiln-build-").permissions(Permissions::from_mode(0o700)).tempdir_in(base)
    };
    if let Some(made) = super::variable("XDG_RUNTIME_DIR").and_then(|base| make(Path::new(&base)).ok()) {
        return Ok(made);
    }
    let base = std::env::temp_dir();
    make(&base).map_err(|source| CliError::File { doing: "make a private directory in", path: base, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_reads_a_credential_whatever_was_there_before() {
        let dir = tempfile::tempdir().expect("a directory");
        let loose = dir.path().join("key.pem");
        fs::write(&loose, "old").expect("written");
        fs::set_permissions(&loose, Permissions::from_mode(0o644)).expect("set");
        let credential = Credential { ca: "a".into(), cert: "b".into(), key: "c".into(), expires: String::new() };
        let files = CredentialFiles::write(dir.path(), &credential).expect("written");
        for (path, text) in [(files.ca, "a"), (files.cert, "b"), (files.key, "c")] {
            assert_eq!(fs::read_to_string(&path).expect("read"), text);
            assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600, "{}", path.display());
        }
    }
}
