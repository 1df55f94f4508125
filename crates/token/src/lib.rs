//! Reads a JSON web token in its compact form (RFC 7519, RFC 7515), before anything is known of who signed it.
//!
//! [`parse`] is the only way in. What it returns has the shape of a token and says things; that any of it is true is for whoever
//! checks the signature. It is stricter than the RFCs where those leave a second reading open: a name may come once in an
//! object, a key must be named, nothing may be declared critical, and only signatures with a public key are known at all, so
//! that neither "none" nor a shared secret can be asked for.
//!
//! | module | what is in it |
//! |---|---|
//! | here | the three parts and the header |
//! | `claims` | what the payload says |
//! | `json` | JSON of bounded size and depth, without repeated names |
//!
//! What must not be here: cryptography, clocks, I/O, knowledge of any issuer.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use thiserror::Error;

mod claims;
mod json;

pub use claims::{Claim, Claims};

/// Longest accepted token. Those of forges have one to three thousand bytes.
pub const MAX_TOKEN_BYTES: usize = 16 << 10;

/// RSA with 8192 bits has 1024.
const MAX_SIGNATURE_BYTES: usize = 1024;

const MAX_KEY_ID_BYTES: usize = 256;

/// A token that nobody has checked yet.
#[derive(Clone, PartialEq)]
pub struct Token<'a> {
    pub algorithm: Algorithm,
    /// Names the key that it claims to be signed with.
    pub key_id: String,
    /// Who it claims to be from. Not empty.
    pub issuer: String,
    pub claims: Claims,
    /// What the signature is over.
    pub signed: &'a str,
    /// In base64url.
    pub signature: &'a str,
}

/// The signatures that can be asked for. All take a public key to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Algorithm {
    RS256,
    RS384,
    RS512,
    PS256,
    PS384,
    PS512,
    ES256,
    ES384,
    EdDSA,
}

/// Why it is no token. No text shows more of one than a short piece, made printable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenError {
    #[error("the token is too long: {0} bytes, at most {MAX_TOKEN_BYTES} are accepted")]
    TooLong(usize),
    #[error("it is no JSON web token: that has three parts with dots between, each in base64url without padding")]
    Shape,
    #[error("the token's {part} is not what a JSON web token has there: {why}")]
    Json { part: &'static str, why: String },
    #[error("the token's {part} lacks {name:?}, or it is no text, or empty, or too long")]
    Text { part: &'static str, name: &'static str },
    #[error("the token is of type {0}, and not a JWT")]
    Type(String),
    #[error("the token is signed with {0}: one of RS, PS, ES (256, 384, 512 bits) or EdDSA is wanted")]
    Algorithm(String),
    #[error("the token declares something critical (\"crit\"), which is not supported")]
    Critical,
    #[error("the token's {0:?} is no date: a number of seconds since 1970 is wanted")]
    Date(&'static str),
}

/// Reads a token. Spaces around it are for the caller to take off.
pub fn parse(token: &str) -> Result<Token<'_>, TokenError> {
    if token.len() > MAX_TOKEN_BYTES {
        return Err(TokenError::TooLong(token.len()));
    }
    let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Shape)?;
    let (header, payload) = signed.split_once('.').filter(|(_, rest)| !rest.contains('.')).ok_or(TokenError::Shape)?;
    let signature_bytes = decode(signature)?.len();
    if signature_bytes == 0 || signature_bytes > MAX_SIGNATURE_BYTES {
        return Err(TokenError::Shape);
    }
    let header = object("header", header)?;
    let algorithm = check_header(&header)?;
    let key_id = text("header", &header, "kid", MAX_KEY_ID_BYTES)?;
    let claims = object("payload", payload)?;
    let issuer = text("payload", &claims, "iss", MAX_TOKEN_BYTES)?;
    Ok(Token { algorithm, key_id, issuer, claims, signed, signature })
}

fn check_header(header: &Claims) -> Result<Algorithm, TokenError> {
    if header.get("crit").is_some() {
        return Err(TokenError::Critical);
    }
    match header.get("typ") {
        None => {}
        Some(Claim::Text(name)) if name.eq_ignore_ascii_case("JWT") => {}
        Some(other) => return Err(TokenError::Type(shown(&other.as_text().unwrap_or_default()))),
    }
    let name = text("header", header, "alg", 64)?;
    name.parse()
}

fn decode(part: &str) -> Result<Vec<u8>, TokenError> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Shape)
}

fn object(part: &'static str, encoded: &str) -> Result<Claims, TokenError> {
    let bytes = decode(encoded)?;
    json::object(&bytes).map_err(|error| TokenError::Json { part, why: shown(&error.to_string()) })
}

fn text(part: &'static str, object: &Claims, name: &'static str, longest: usize) -> Result<String, TokenError> {
    match object.get(name) {
        Some(Claim::Text(text)) if !text.is_empty() && text.len() <= longest => Ok(text.clone()),
        _ => Err(TokenError::Text { part, name }),
    }
}

impl fmt::Debug for Token<'_> {
    /// Without what could be used.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("algorithm", &self.algorithm)
            .field("key_id", &shown(&self.key_id))
            .field("issuer", &shown(&self.issuer))
            .finish_non_exhaustive()
    }
}

impl Algorithm {
    pub const ALL: [Self; 9] = [
        Self::RS256,
        Self::RS384,
        Self::RS512,
        Self::PS256,
        Self::PS384,
        Self::PS512,
        Self::ES256,
        Self::ES384,
        Self::EdDSA,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::RS256 => "RS256",
            Self::RS384 => "RS384",
            Self::RS512 => "RS512",
            Self::PS256 => "PS256",
            Self::PS384 => "PS384",
            Self::PS512 => "PS512",
            Self::ES256 => "ES256",
            Self::ES384 => "ES384",
            Self::EdDSA => "EdDSA",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = TokenError;

    fn from_str(name: &str) -> Result<Self, TokenError> {
        let known = Self::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        known.ok_or_else(|| TokenError::Algorithm(shown(name)))
    }
}

/// What somebody else wrote, fit to be shown on a line: printable ASCII, at most 100 characters.
pub fn shown(text: &str) -> String {
    shown_within(text, 100)
}

/// As [`shown`], and at most so many characters, and dots where there were more.
pub fn shown_within(text: &str, longest: usize) -> String {
    let mut line = String::new();
    for c in text.chars() {
        let written = match c {
            ' '..='~' => c.to_string(),
            _ => c.escape_default().to_string(),
        };
        if line.len() + written.len() > longest {
            return line + "...";
        }
        line += &written;
    }
    line
}

#[cfg(test)]
mod tests;
