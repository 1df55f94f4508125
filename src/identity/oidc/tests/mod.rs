//! Issuers of ours: their keys, their tokens, and the ways in which they are bad.

use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use kiln_domain::Timestamp;
use kiln_domain::access::{Proven, Standing, Trust};
use rcgen::{KeyPair, PublicKeyData as _, SigningKey as _};
use serde_json::{Value, json};

use super::fetch::{Fetch, FetchError};
use super::*;
use crate::config::identity::{Issuer as IssuerConfig, Place};

mod hostile;
mod keeping;
mod lanes;
mod tls;
mod vectors;

const NOW: i64 = 1_900_000_000;
const GITHUB: &str = "https://token.actions.githubusercontent.com";
const AUDIENCE: &str = "https://kiln.example";

/// A clock that stands still until it is set.
struct Still(AtomicI64);

impl Clock for Still {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::SeqCst))
    }
}

fn clock() -> Arc<Still> {
    Arc::new(Still(AtomicI64::new(NOW * 1000)))
}

/// A key with a name, and what it signs.
#[derive(Clone, Copy)]
struct Signer {
    id: &'static str,
    key: &'static KeyPair,
}

static RSA: LazyLock<[KeyPair; 2]> =
    LazyLock::new(|| [(); 2].map(|()| KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).expect("a key")));

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn one() -> Signer {
    Signer { id: "one", key: &RSA[0] }
}

fn two() -> Signer {
    Signer { id: "two", key: &RSA[1] }
}

impl Signer {
    fn jwk(&self) -> Value {
        let spki = self.key.subject_public_key_info();
        let (_, spki) = x509_parser::x509::SubjectPublicKeyInfo::from_der(&spki).expect("a key");
        let Ok(x509_parser::public_key::PublicKey::RSA(key)) = spki.parsed() else { panic!("no RSA key") };
        let modulus = key.modulus.strip_prefix(&[0]).unwrap_or(key.modulus);
        json!({"kty": "RSA", "use": "sig", "alg": "RS256", "kid": self.id, "n": encode(modulus), "e": encode(key.exponent)})
    }

    fn sign(&self, claims: &Value) -> String {
        self.sign_as(&json!({"alg": "RS256", "typ": "JWT", "kid": self.id}), &claims.to_string())
    }

    fn sign_as(&self, header: &Value, payload: &str) -> String {
        let signed = format!("{}.{}", encode(header.to_string()), encode(payload));
        let signature = self.key.sign(signed.as_bytes()).expect("signed");
        format!("{signed}.{}", encode(signature))
    }
}

use x509_parser::prelude::FromDer as _;

/// A run of `SocialGouv/Foo` on its main branch; `change` has what differs, and `null` takes a claim away.
fn claims(issuer: &str, change: &Value) -> Value {
    let mut claims = json!({
        "iss": issuer, "aud": AUDIENCE, "sub": "repo:SocialGouv/Foo:ref:refs/heads/main", "jti": "run-1-token-1",
        "iat": NOW - 5, "nbf": NOW - 5, "exp": NOW + 120, "run_id": "4711",
        "repository": "SocialGouv/Foo", "ref": "refs/heads/main",
    });
    let all = claims.as_object_mut().expect("an object");
    for (name, value) in change.as_object().expect("an object") {
        match value {
            Value::Null => all.remove(name),
            value => all.insert(name.clone(), value.clone()),
        };
    }
    claims
}

/// As it would be read from a file.
fn issuer(text: &str) -> IssuerConfig {
    toml::from_str(&format!("audience = '{AUDIENCE}'\n{text}")).expect("an issuer")
}

fn github() -> IssuerConfig {
    issuer(&format!("kind = 'github'\nissuer = '{GITHUB}'"))
}

fn config(issuers: Vec<IssuerConfig>) -> config::Identity {
    config::Identity { issuers, ..config::Identity::default() }
}

/// An issuer without a network, for tests on virtual time.
#[derive(Clone)]
struct Stand(Arc<StandState>);

struct StandState {
    issuer: String,
    keys: Mutex<Vec<Value>>,
    mood: Mutex<Mood>,
    asked: AtomicUsize,
}

#[derive(Clone, Copy)]
enum Mood {
    Well,
    Down,
    /// Answers after so long.
    Slow(Duration),
    Silent,
}

impl Stand {
    fn new(issuer: &str, keys: &[Signer]) -> Self {
        let stand = Self(Arc::new(StandState {
            issuer: issuer.to_owned(),
            keys: Mutex::default(),
            mood: Mutex::new(Mood::Well),
            asked: AtomicUsize::new(0),
        }));
        stand.keys(keys);
        stand
    }

    fn keys(&self, keys: &[Signer]) {
        *self.0.keys.lock().expect("sound") = keys.iter().map(Signer::jwk).collect();
    }

    fn mood(&self, mood: Mood) {
        *self.0.mood.lock().expect("sound") = mood;
    }

    fn asked(&self) -> usize {
        self.0.asked.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Fetch for Stand {
    async fn get(&self, place: &Place, _most: usize) -> Result<Bytes, FetchError> {
        let is_first = place.path.ends_with("/.well-known/openid-configuration");
        if is_first {
            self.0.asked.fetch_add(1, Ordering::SeqCst);
        }
        let mood = *self.0.mood.lock().expect("sound");
        match mood {
            Mood::Well => {}
            Mood::Down => {
                return Err(FetchError::Connect { at: place.authority(), source: std::io::Error::other("down") });
            }
            Mood::Slow(span) => tokio::time::sleep(span).await,
            Mood::Silent => std::future::pending().await,
        }
        let body = if is_first {
            json!({"issuer": self.0.issuer, "jwks_uri": format!("{}/keys", self.0.issuer)})
        } else {
            json!({"keys": *self.0.keys.lock().expect("sound")})
        };
        Ok(body.to_string().into())
    }
}

/// A verifier of these issuers, each with its stand.
fn verifier(config: &config::Identity, stands: &[Stand]) -> Verifier {
    Verifier::with(config, clock(), |issuer| {
        let stand = stands.iter().find(|stand| stand.0.issuer == issuer.issuer).expect("a stand");
        Ok(Box::new(stand.clone()))
    })
    .expect("sound")
}

/// One with GitHub's issuer, which signs with the first key.
fn of_github() -> Verifier {
    verifier(&config(vec![github()]), &[Stand::new(GITHUB, &[one()])])
}

/// For the tests of those who ask: GitHub's word, and what has it say something.
pub(crate) fn github_at_the_door() -> (Verifier, impl Fn(&Value) -> String) {
    (of_github(), |change: &Value| one().sign(&claims(GITHUB, change)))
}

fn build(verified: Result<Verified, ProveError>) -> (String, Trust) {
    match verified.expect("proven").standing {
        Standing::Build(Proven { repo, trust }) => (repo.as_str().to_owned(), trust),
        other => panic!("{other:?}"),
    }
}

fn untrusted(fork: &str) -> Trust {
    Trust::Untrusted { fork: fork.to_owned() }
}

fn temporary(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("ca.pem");
    std::fs::write(&path, text).expect("written");
    (dir, path)
}
