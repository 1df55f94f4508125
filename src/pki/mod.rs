//! One certificate authority per project, the daemon's certificate, and credentials for builds.
//!
//! Files, below the state directory, directories 0700 and files 0600:
//!
//! ```text
//! pki/<key>/ca.pem  ca.key          the project's CA; made once
//! daemons/<key>/ca.pem cert.pem key.pem buildkitd.toml
//! ```
//!
//! Promises: a project's CA signs for that project only, so a credential of one project is worth nothing at another's
//! daemon (K8). Files are written aside and renamed, so a crash leaves the old or the new one and never half of one.
//! What is about to expire is reported as stale long before it does.
//!
//! A CA is never made anew by itself: every credential that is out and every daemon that runs would be locked out by it.
//! One that cannot be read is an error that says what to do. A daemon's own files hold nothing that cannot be made
//! again, so whatever is wrong with them makes them stale; so they are not synced to the disk either, which would cost whoever waits
//! for the daemon more than all the rest of it.
//!
//! Everything here blocks: a few system calls, four `fsync`s for a new CA, and some 50 µs for each P-256 key. Call it from
//! `spawn_blocking`. Two callers at once may ask for the same project's first CA; daemon files have one writer, the
//! project's worker.
//!
//! What must not be here: who may have a credential.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln_domain::plan::FilesSeen;
use kiln_domain::{Key, Timestamp};
use thiserror::Error;

mod authority;
mod files;
mod leaf;
#[cfg(test)]
mod tests;

use authority::Authority;

const DAY: Duration = Duration::from_hours(24);

/// The lifetimes of the reference (cert-manager: 87600 h, 8760 h, renewed 720 h before the end).
const CA_LIFETIME: Duration = Duration::from_hours(10 * 365 * 24);
const DAEMON_LIFETIME: Duration = Duration::from_hours(365 * 24);
const RENEW_BEFORE: Duration = Duration::from_hours(30 * 24);

/// How far the clock of the other side may be behind ours.
const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// What a daemon's certificate is good for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DaemonNames {
    /// What clients ask the gateway for, `buildkitd-<key>.<domain>`.
    pub server_names: Vec<String>,
    /// Where it can be dialled directly.
    pub addresses: Vec<IpAddr>,
}

/// What opens one project's daemon, until it expires. PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    pub ca: String,
    pub cert: String,
    pub key: String,
    pub expires: Timestamp,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").field("expires", &self.expires).finish_non_exhaustive()
    }
}

#[derive(Debug, Error)]
pub enum PkiError {
    #[error("cannot {operation} {path}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the certificate authority in {directory} is damaged: {why}; restore both files from a backup, or stop the project and \
         remove the directory: a new authority is made, and credentials that are out stop working"
    )]
    AuthorityDamaged { directory: PathBuf, why: String },
    #[error(
        "the certificate authority in {directory} is valid from {not_before} to {not_after} (seconds since 1970), which does not cover \
         the coming month: if the clock is right, stop the project and remove the directory to have a new one made"
    )]
    AuthorityOutOfTime { directory: PathBuf, not_before: i64, not_after: i64 },
    #[error("{0:?} cannot stand in a certificate: it is not a DNS name")]
    Name(String),
    #[error("the daemon of {0} has neither a name nor an address that a certificate could be made for")]
    NoNames(Key),
    #[error("a credential that ends at {0} would be expired already")]
    AlreadyOver(Timestamp),
    #[error("cannot make the {what} of {key}")]
    Make {
        what: &'static str,
        key: Key,
        #[source]
        source: rcgen::Error,
    },
}

/// The certificates of all projects of one state directory.
#[derive(Debug, Clone)]
pub struct Pki {
    authorities: PathBuf,
    daemons: PathBuf,
}

impl Pki {
    /// Makes the directories that are missing, and removes what a crash left half-made.
    pub fn new(state: &Path) -> Result<Self, PkiError> {
        let pki = Self { authorities: state.join("pki"), daemons: state.join("daemons") };
        files::make_directory(&pki.authorities)?;
        files::make_directory(&pki.daemons)?;
        files::sweep(&pki.authorities)?;
        Ok(pki)
    }

    /// `daemons/<key>`: everything that a daemon gets to read.
    pub fn daemon_directory(&self, key: &Key) -> PathBuf {
        self.daemons.join(key.as_str())
    }

    /// Whether the daemon's certificates are there, fit together, are made for exactly these names, and last for
    /// another month.
    pub fn files(&self, key: &Key, names: &DaemonNames, now: Timestamp) -> Result<FilesSeen, PkiError> {
        let Some(authority) = Authority::load(self.authority_directory(key), now)? else { return Ok(FilesSeen::Stale) };
        let directory = self.daemon_directory(key);
        let read = |name: &str| files::read(&directory.join(name));
        let (Some(ca), Some(cert), Some(private)) = (read("ca.pem")?, read("cert.pem")?, read("key.pem")?) else {
            return Ok(FilesSeen::Stale);
        };
        let good = ca == authority.pem && leaf::is_good_daemon(&authority, &cert, &private, names, now);
        Ok(if good { FilesSeen::Current } else { FilesSeen::Stale })
    }

    /// Makes the CA if there is none, and a new certificate for the daemon.
    pub fn write_daemon_files(&self, key: &Key, names: &DaemonNames, now: Timestamp) -> Result<(), PkiError> {
        let authority = self.authority(key, now)?;
        let (cert, private) = leaf::daemon(&authority, key, names, now)?;
        self.write_daemon_file(key, "key.pem", &private)?;
        self.write_daemon_file(key, "cert.pem", &cert)?;
        self.write_daemon_file(key, "ca.pem", &authority.pem)
    }

    /// One more file that the daemon gets to read, `buildkitd.toml` for one.
    pub fn write_daemon_file(&self, key: &Key, name: &str, contents: &str) -> Result<(), PkiError> {
        let directory = self.daemon_directory(key);
        files::make_directory(&directory)?;
        files::write(&directory, name, contents)
    }

    /// `None` when there is no such file, or when what is there is not text.
    pub fn read_daemon_file(&self, key: &Key, name: &str) -> Result<Option<String>, PkiError> {
        files::read(&self.daemon_directory(key).join(name))
    }

    /// For a client, named after its project, valid until `not_after` (or the CA's own end). Makes the CA if there is
    /// none.
    pub fn issue_credential(&self, key: &Key, now: Timestamp, not_after: Timestamp) -> Result<Credential, PkiError> {
        if not_after <= now {
            return Err(PkiError::AlreadyOver(not_after));
        }
        let authority = self.authority(key, now)?;
        let expires = Timestamp::from_millis(not_after.as_millis().min(authority.not_after.saturating_mul(1000)));
        let (cert, private) = leaf::client(&authority, key, now, expires)?;
        Ok(Credential { ca: authority.pem, cert, key: private, expires })
    }

    /// Removes a project's CA and its daemon's files; absent already is success. All its credentials end with it.
    pub fn remove(&self, key: &Key) -> Result<(), PkiError> {
        files::remove_directory(&self.daemon_directory(key))?;
        files::remove_directory(&self.authority_directory(key))
    }

    fn authority(&self, key: &Key, now: Timestamp) -> Result<Authority, PkiError> {
        let directory = self.authority_directory(key);
        if let Some(authority) = Authority::load(directory.clone(), now)? {
            return Ok(authority);
        }
        Authority::make(&self.authorities, key, now)?;
        // Read back: if somebody else was faster, his is the one.
        Authority::load(directory.clone(), now)?.ok_or_else(|| PkiError::Io {
            operation: "read back",
            path: directory,
            source: io::ErrorKind::NotFound.into(),
        })
    }

    fn authority_directory(&self, key: &Key) -> PathBuf {
        self.authorities.join(key.as_str())
    }
}

/// Certificates count in whole seconds; fractions are cut off, so nothing lives longer than it was said to.
fn seconds(timestamp: Timestamp) -> i64 {
    timestamp.as_millis().div_euclid(1000)
}

fn earlier(timestamp: Timestamp, by: Duration) -> Timestamp {
    Timestamp::from_millis(timestamp.as_millis().saturating_sub(by.as_millis() as i64))
}
