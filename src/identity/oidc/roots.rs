//! Whose certificates count when an issuer is asked: the host's own list of authorities, or those of its `ca_file` and no others.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;

use crate::config::identity::Issuer;

#[derive(Debug, Error)]
pub enum RootsError {
    #[error("cannot read ca_file {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("ca_file {path} holds no certificate that can be used: give PEM, with the authority's own certificate")]
    NoCertificate { path: PathBuf },
    #[error("this host has no list of authorities{detail}: install ca-certificates, or give the issuer a ca_file")]
    NoList { detail: String },
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
}

/// The host's list is read once, and only if an issuer needs it.
#[derive(Default)]
pub(in crate::identity) struct Roots {
    host: Option<Arc<ClientConfig>>,
}

impl Roots {
    pub(super) fn for_issuer(&mut self, issuer: &Issuer) -> Result<Arc<ClientConfig>, RootsError> {
        let is_plain = issuer.jwks_host.is_none() && issuer.place().is_ok_and(|place| !place.tls);
        self.given(issuer.ca_file.as_deref(), is_plain)
    }

    pub(in crate::identity) fn given(
        &mut self,
        ca_file: Option<&Path>,
        is_plain: bool,
    ) -> Result<Arc<ClientConfig>, RootsError> {
        match (ca_file, &self.host) {
            (Some(path), _) => client(of_file(path)?),
            // One on this machine itself: nothing is asked over TLS.
            (None, _) if is_plain => client(RootCertStore::empty()),
            (None, Some(config)) => Ok(config.clone()),
            (None, None) => {
                let config = client(of_host()?)?;
                self.host = Some(config.clone());
                Ok(config)
            }
        }
    }
}

/// Every authority of the world takes a twentieth.
const MOST_BYTES: u64 = 4 << 20;

fn of_file(path: &Path) -> Result<RootCertStore, RootsError> {
    let read = |source| RootsError::Read { path: path.to_owned(), source };
    let seen = std::fs::metadata(path).map_err(read)?;
    // A pipe would be waited for, and a device has no end.
    if !seen.is_file() || seen.len() > MOST_BYTES {
        return Err(read(std::io::Error::other("it is no file of at most 4 MiB")));
    }
    let text = std::fs::read(path).map_err(read)?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let added = certificate.is_ok_and(|certificate| roots.add(certificate).is_ok());
        if !added {
            return Err(RootsError::NoCertificate { path: path.to_owned() });
        }
    }
    if roots.is_empty() { Err(RootsError::NoCertificate { path: path.to_owned() }) } else { Ok(roots) }
}

fn of_host() -> Result<RootCertStore, RootsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let detail = found.errors.first().map(|error| format!(" ({error})")).unwrap_or_default();
        return Err(RootsError::NoList { detail });
    }
    Ok(roots)
}

fn client(roots: RootCertStore) -> Result<Arc<ClientConfig>, RootsError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}
