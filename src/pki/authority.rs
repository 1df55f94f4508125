//! A project's certificate authority: made once, in one rename, and checked each time it is read.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use kiln_domain::{Key, Timestamp};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _};
use time::OffsetDateTime;
use x509_parser::pem::parse_x509_pem;

use super::{CA_LIFETIME, DAY, PkiError, RENEW_BEFORE, earlier, files, seconds};

const CERTIFICATE: &str = "ca.pem";
const KEY: &str = "ca.key";

pub(super) struct Authority {
    pub(super) pem: String,
    /// Seconds since 1970.
    pub(super) not_after: i64,
    pub(super) issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// `None` if there is none yet.
    pub(super) fn load(directory: PathBuf, now: Timestamp) -> Result<Option<Self>, PkiError> {
        let certificate = files::read_bytes(&directory.join(CERTIFICATE))?;
        let key = files::read_bytes(&directory.join(KEY))?;
        let (pem, key) = match (certificate, key) {
            (None, None) => return Ok(None),
            (Some(certificate), Some(key)) => (certificate, key),
            (None, _) => return Err(damaged(directory, format!("{CERTIFICATE} is missing"))),
            (_, None) => return Err(damaged(directory, format!("{KEY} is missing"))),
        };
        let authority = match Self::assemble(pem, &key) {
            Ok((authority, not_before)) if covers(not_before, authority.not_after, now) => authority,
            Ok((Self { not_after, .. }, not_before)) => {
                return Err(PkiError::AuthorityOutOfTime { directory, not_before, not_after });
            }
            Err(why) => return Err(damaged(directory, why)),
        };
        Ok(Some(authority))
    }

    /// With the first second of its validity, or what is wrong with it.
    fn assemble(pem: Vec<u8>, key: &[u8]) -> Result<(Self, i64), String> {
        let pem = String::from_utf8(pem).map_err(|_| format!("{CERTIFICATE} is not text"))?;
        let key = std::str::from_utf8(key).map_err(|_| format!("{KEY} is not text"))?;
        let key = KeyPair::from_pem(key).map_err(|e| format!("{KEY} holds no private key ({e})"))?;
        let (_, block) = parse_x509_pem(pem.as_bytes()).map_err(|_| format!("{CERTIFICATE} holds no certificate"))?;
        let certificate = block.parse_x509().map_err(|e| format!("{CERTIFICATE} holds no certificate ({e})"))?;
        if certificate.public_key().raw != key.subject_public_key_info() {
            return Err(format!("{KEY} does not belong to {CERTIFICATE}"));
        }
        if !certificate.is_ca() {
            return Err(format!("{CERTIFICATE} is not a certificate authority's"));
        }
        let not_before = certificate.validity().not_before.timestamp();
        let not_after = certificate.validity().not_after.timestamp();
        let issuer = Issuer::from_ca_cert_pem(&pem, key).map_err(|e| format!("{CERTIFICATE} cannot be used ({e})"))?;
        Ok((Self { pem, not_after, issuer }, not_before))
    }

    /// Makes both files in a directory aside and renames that: either both are there or none, and of two makers one
    /// wins. Success says that there is an authority, not that it is this one.
    pub(super) fn make(authorities: &Path, key: &Key, now: Timestamp) -> Result<(), PkiError> {
        let (certificate, private) = generate(key, now).map_err(|source| PkiError::Make {
            what: "certificate authority",
            key: key.clone(),
            source,
        })?;
        let aside = tempfile::Builder::new()
            .prefix(files::UNFINISHED)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(authorities)
            .map_err(|source| PkiError::Io {
                operation: "make a directory in",
                path: authorities.to_owned(),
                source,
            })?;
        files::write_to_disk(aside.path(), KEY, &private)?;
        files::write_to_disk(aside.path(), CERTIFICATE, &certificate)?;
        files::sync_directory(aside.path())?;
        let target = authorities.join(key.as_str());
        match std::fs::rename(aside.path(), &target) {
            Ok(()) => {
                // It has moved: there is nothing to remove any more.
                let _moved = aside.keep();
                files::sync_directory(authorities)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists) => {
                Ok(())
            }
            Err(source) => Err(PkiError::Io { operation: "make", path: target, source }),
        }
    }
}

fn generate(key: &Key, now: Timestamp) -> Result<(String, String), rcgen::Error> {
    let private = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, format!("Kiln {key} authority"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = instant(earlier(now, DAY));
    params.not_after = instant(now.plus(CA_LIFETIME));
    Ok((params.self_signed(&private)?.pem(), private.serialize_pem()))
}

/// What it signs now must live for as long as a daemon's certificate has to, at least.
fn covers(not_before: i64, not_after: i64, now: Timestamp) -> bool {
    not_before <= seconds(now) && seconds(now.plus(RENEW_BEFORE)) < not_after
}

/// The year 9999 is the last that a certificate can name.
pub(super) fn instant(timestamp: Timestamp) -> OffsetDateTime {
    const LAST: i64 = 253_402_300_799;
    OffsetDateTime::from_unix_timestamp(seconds(timestamp).clamp(0, LAST)).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn damaged(directory: PathBuf, why: String) -> PkiError {
    PkiError::AuthorityDamaged { directory, why }
}
