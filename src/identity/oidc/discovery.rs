//! From an issuer's address to its keys (OpenID Connect Discovery 1.0).
//!
//! Both documents are read at each refresh: where the keys are may change, and a request more every ten minutes is nothing. The
//! keys must be where the issuer is, or at `jwks_host`: what an issuer writes into its document sends Kiln nowhere else.

use kiln_token::{Algorithm, shown};
use serde::Deserialize;

use super::fetch::{Fetch, FetchError};
use super::signature::{KeySet, KeySetError};
use crate::config::identity::{Issuer, Place};

const MOST_DISCOVERY_BYTES: usize = 64 << 10;
const MOST_KEY_BYTES: usize = 256 << 10;

/// Where an issuer's keys come from.
pub(super) struct Source {
    issuer: String,
    /// Of the discovery document.
    place: Place,
    /// Where the keys may be.
    keys_at: String,
    algorithms: Vec<Algorithm>,
    fetch: Box<dyn Fetch>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SourceError {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error("its discovery document is not one")]
    Discovery(#[source] serde_json::Error),
    #[error("its discovery document is of another issuer, {0}: write that as issuer if it is the one that tokens name")]
    Other(String),
    #[error("its keys are to be at {0}, and not where it is itself: if that is right, name the host with jwks_host")]
    Elsewhere(String),
    #[error("its keys cannot be read")]
    Keys(#[from] KeySetError),
}

#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

impl Source {
    pub(super) fn new(config: &Issuer, place: &Place, fetch: Box<dyn Fetch>) -> Self {
        let path = format!("{}/.well-known/openid-configuration", place.path.trim_end_matches('/'));
        Self {
            issuer: config.issuer.clone(),
            keys_at: config.jwks_host.as_ref().map_or_else(|| place.authority(), |host| bare(host)),
            place: Place { path, ..place.clone() },
            algorithms: config.algorithms.clone(),
            fetch,
        }
    }

    pub(super) async fn keys(&self) -> Result<KeySet, SourceError> {
        let text = self.fetch.get(&self.place, MOST_DISCOVERY_BYTES).await?;
        let found: Discovery = serde_json::from_slice(&text).map_err(SourceError::Discovery)?;
        if found.issuer != self.issuer {
            return Err(SourceError::Other(shown(&found.issuer)));
        }
        let place = self.check(&found.jwks_uri).ok_or_else(|| SourceError::Elsewhere(shown(&found.jwks_uri)))?;
        let text = self.fetch.get(&place, MOST_KEY_BYTES).await?;
        Ok(KeySet::parse(&text, &self.algorithms)?)
    }

    fn check(&self, address: &str) -> Option<Place> {
        Place::parse(address).ok().filter(|place| place.authority() == self.keys_at && place.tls >= self.place.tls)
    }
}

/// As [`Place::authority`] writes it.
fn bare(host: &str) -> String {
    host.strip_suffix(":443").unwrap_or(host).to_ascii_lowercase()
}
