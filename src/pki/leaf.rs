//! Certificates that a project's authority signs: the daemon's, and clients'.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kiln_domain::{Key, Timestamp};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose, SanType};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use x509_parser::extensions::GeneralName;

use super::authority::{Authority, instant};
use super::{CLOCK_SKEW, DAEMON_LIFETIME, DaemonNames, PkiError, RENEW_BEFORE, earlier, seconds};

/// Certificate and private key, PEM.
type Pair = (String, String);

pub(super) fn daemon(authority: &Authority, key: &Key, names: &DaemonNames, now: Timestamp) -> Result<Pair, PkiError> {
    if names.server_names.is_empty() && names.addresses.is_empty() {
        return Err(PkiError::NoNames(key.clone()));
    }
    let mut params = params(key.daemon_name(), ExtendedKeyUsagePurpose::ServerAuth);
    for name in &names.server_names {
        let Ok(ServerName::DnsName(_)) = ServerName::try_from(name.as_str()) else {
            return Err(PkiError::Name(name.clone()));
        };
        let dns = name.clone().try_into().map_err(|_| PkiError::Name(name.clone()))?;
        params.subject_alt_names.push(SanType::DnsName(dns));
    }
    params.subject_alt_names.extend(names.addresses.iter().copied().map(SanType::IpAddress));
    params.not_before = instant(earlier(now, CLOCK_SKEW));
    params.not_after = instant(now.plus(DAEMON_LIFETIME)).min(authority_end(authority));
    sign(authority, &params).map_err(|source| PkiError::Make { what: "daemon certificate", key: key.clone(), source })
}

/// `expires` does not lie behind the authority's own end.
pub(super) fn client(authority: &Authority, key: &Key, now: Timestamp, expires: Timestamp) -> Result<Pair, PkiError> {
    let mut params = params(format!("client of {key}"), ExtendedKeyUsagePurpose::ClientAuth);
    params.not_before = instant(earlier(now, CLOCK_SKEW));
    params.not_after = instant(expires);
    sign(authority, &params).map_err(|source| PkiError::Make { what: "credential", key: key.clone(), source })
}

fn params(name: String, usage: ExtendedKeyUsagePurpose) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    params
}

fn sign(authority: &Authority, params: &CertificateParams) -> Result<Pair, rcgen::Error> {
    let private = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
    Ok((params.signed_by(&private, &authority.issuer)?.pem(), private.serialize_pem()))
}

fn authority_end(authority: &Authority) -> time::OffsetDateTime {
    instant(Timestamp::from_millis(authority.not_after.saturating_mul(1000)))
}

/// Judged as a client would, today and in a month.
pub(super) fn is_good_daemon(
    authority: &Authority,
    certificate: &str,
    private: &str,
    names: &DaemonNames,
    now: Timestamp,
) -> bool {
    let Ok(leaf) = CertificateDer::from_pem_slice(certificate.as_bytes()) else { return false };
    let Ok(private) = PrivateKeyDer::from_pem_slice(private.as_bytes()) else { return false };
    let provider = aws_lc_rs::default_provider();
    // Fails if the two do not belong together.
    if CertifiedKey::from_der(vec![leaf.clone()], private, &provider).is_err() {
        return false;
    }
    names_in(&leaf).is_some_and(|found| found == wanted(names)) && is_trusted(authority, &leaf, names, now)
}

fn is_trusted(authority: &Authority, leaf: &CertificateDer<'_>, names: &DaemonNames, now: Timestamp) -> bool {
    let mut roots = RootCertStore::empty();
    let Ok(root) = CertificateDer::from_pem_slice(authority.pem.as_bytes()) else { return false };
    if roots.add(root).is_err() {
        return false;
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let Ok(verifier) = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build() else {
        return false;
    };
    let by_name = names.server_names.first().and_then(|name| ServerName::try_from(name.as_str()).ok());
    let Some(name) = by_name.or_else(|| names.addresses.first().map(|a| ServerName::IpAddress((*a).into()))) else {
        return false;
    };
    [now, now.plus(RENEW_BEFORE)].into_iter().all(|when| {
        let when = UnixTime::since_unix_epoch(Duration::from_secs(seconds(when).max(0).unsigned_abs()));
        verifier.verify_server_cert(leaf, &[], &name, &[], when).is_ok()
    })
}

fn wanted(names: &DaemonNames) -> BTreeSet<String> {
    names.server_names.iter().cloned().chain(names.addresses.iter().map(ToString::to_string)).collect()
}

/// `None` if one of them is none of ours.
fn names_in(leaf: &CertificateDer<'_>) -> Option<BTreeSet<String>> {
    let (_, certificate) = x509_parser::parse_x509_certificate(leaf).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    names.value.general_names.iter().map(spelled).collect()
}

fn spelled(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => {
            let address = match <[u8; 4]>::try_from(*bytes) {
                Ok(v4) => IpAddr::from(v4),
                Err(_) => IpAddr::from(<[u8; 16]>::try_from(*bytes).ok()?),
            };
            Some(address.to_string())
        }
        _ => None,
    }
}
