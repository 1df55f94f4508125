//! Keys and signatures: the one file that knows the library for them.
//!
//! Of a key set only keys that can check are taken: with a name, for signatures, of an algorithm that is configured. A symmetric
//! key is never one. What a token's own header offers as a key is never looked at.

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{AlgorithmFamily, DecodingKey};
use kiln_token::{Algorithm, Token};
use serde::Deserialize;

/// GitHub has a handful; a set of more is a mistake, or worse.
const MOST_KEYS: usize = 128;

/// An issuer's keys.
#[derive(Debug, Default)]
pub(super) struct KeySet(Vec<Key>);

#[derive(Debug)]
struct Key {
    id: String,
    /// What it may be used with: one kind of key, and what its entry says.
    algorithms: Vec<Algorithm>,
    public: DecodingKey,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum KeySetError {
    #[error("it is no set of keys")]
    Json(#[from] serde_json::Error),
    #[error("it has {0} keys, at most {MOST_KEYS} are taken")]
    TooMany(usize),
}

#[derive(Deserialize)]
struct Document {
    keys: Vec<serde_json::Value>,
}

impl KeySet {
    pub(super) fn parse(bytes: &[u8], algorithms: &[Algorithm]) -> Result<Self, KeySetError> {
        let Document { keys } = serde_json::from_slice(bytes)?;
        if keys.len() > MOST_KEYS {
            return Err(KeySetError::TooMany(keys.len()));
        }
        Ok(Self(keys.into_iter().filter_map(|entry| Key::read(entry, algorithms)).collect()))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is a key that the token may be signed with.
    pub(super) fn has(&self, token: &Token<'_>) -> bool {
        self.of(token).next().is_some()
    }

    /// Whether one of the keys that the token names made its signature.
    pub(super) fn verify(&self, token: &Token<'_>) -> bool {
        self.of(token).any(|key| key.verify(token))
    }

    fn of(&self, token: &Token<'_>) -> impl Iterator<Item = &Key> {
        self.0.iter().filter(|key| key.id == token.key_id && key.algorithms.contains(&token.algorithm))
    }
}

impl Key {
    /// `None` of what cannot be used here: a set may hold keys for other purposes.
    fn read(entry: serde_json::Value, wanted: &[Algorithm]) -> Option<Self> {
        let named = entry.get("alg").filter(|name| !name.is_null()).cloned();
        let jwk: Jwk = serde_json::from_value(entry).ok()?;
        let common = &jwk.common;
        let is_for_signatures = matches!(common.public_key_use, None | Some(PublicKeyUse::Signature))
            && common.key_operations.as_ref().is_none_or(|uses| uses.contains(&KeyOperations::Verify));
        let fitting: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => &RSA,
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => &[Algorithm::ES256],
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P384 => &[Algorithm::ES384],
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => &[Algorithm::EdDSA],
            _ => &[],
        };
        let is_named = |algorithm: &Algorithm| named.as_ref().is_none_or(|name| name == algorithm.name());
        let algorithms: Vec<_> =
            fitting.iter().copied().filter(|algorithm| wanted.contains(algorithm) && is_named(algorithm)).collect();
        let id = common.key_id.clone().filter(|id| !id.is_empty())?;
        if !is_for_signatures || algorithms.is_empty() {
            return None;
        }
        let public = DecodingKey::from_jwk(&jwk).ok().filter(|key| key.family() != AlgorithmFamily::Hmac)?;
        Some(Self { id, algorithms, public })
    }

    fn verify(&self, token: &Token<'_>) -> bool {
        let algorithm = library(token.algorithm);
        jsonwebtoken::crypto::verify(token.signature, token.signed.as_bytes(), &self.public, algorithm).unwrap_or(false)
    }
}

const RSA: [Algorithm; 6] =
    [Algorithm::RS256, Algorithm::RS384, Algorithm::RS512, Algorithm::PS256, Algorithm::PS384, Algorithm::PS512];

const fn library(algorithm: Algorithm) -> jsonwebtoken::Algorithm {
    match algorithm {
        Algorithm::RS256 => jsonwebtoken::Algorithm::RS256,
        Algorithm::RS384 => jsonwebtoken::Algorithm::RS384,
        Algorithm::RS512 => jsonwebtoken::Algorithm::RS512,
        Algorithm::PS256 => jsonwebtoken::Algorithm::PS256,
        Algorithm::PS384 => jsonwebtoken::Algorithm::PS384,
        Algorithm::PS512 => jsonwebtoken::Algorithm::PS512,
        Algorithm::ES256 => jsonwebtoken::Algorithm::ES256,
        Algorithm::ES384 => jsonwebtoken::Algorithm::ES384,
        Algorithm::EdDSA => jsonwebtoken::Algorithm::EdDSA,
    }
}
