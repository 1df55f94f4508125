//! Tokens that an admin gives out, for whoever has no forge to prove what it is.
//!
//! `kiln_<16 digits>_<64 digits>`, hexadecimal: a name, which may be known, and a secret, of which only the SHA-256 of the whole is
//! kept (F17). The beginning is for programs that look for secrets where none should be.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};
use thiserror::Error;

use super::{Scope, Standing};
use crate::key::hex;
use crate::lane::Lane;

const PREFIX: &str = "kiln_";
const ID_DIGITS: usize = 16;
const SECRET_DIGITS: usize = 64;

/// What a token makes of whoever shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grade {
    Admin,
    Operator,
    Watcher,
    /// Builds the repositories of its scope.
    Builder,
    /// The same, of code that nobody has reviewed.
    UntrustedBuilder,
}

impl Grade {
    pub const ALL: [Self; 5] = [Self::Admin, Self::Operator, Self::Watcher, Self::Builder, Self::UntrustedBuilder];

    /// As it is stored, asked for and shown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Operator => "operator",
            Self::Watcher => "watcher",
            Self::Builder => "builder",
            Self::UntrustedBuilder => "untrusted-builder",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|grade| grade.name() == name)
    }

    /// Whether it is worth anything only with repositories.
    pub const fn needs_scope(self) -> bool {
        matches!(self, Self::Builder | Self::UntrustedBuilder)
    }

    /// Whether repositories change anything about it.
    pub const fn takes_scope(self) -> bool {
        self.needs_scope() || matches!(self, Self::Operator)
    }

    pub fn standing(self, scope: Scope) -> Standing {
        match self {
            Self::Admin => Standing::Admin,
            Self::Operator => Standing::Operator(scope),
            Self::Watcher => Standing::Watcher,
            Self::Builder => Standing::Holder { scope, lane: Lane::Trusted },
            Self::UntrustedBuilder => Standing::Holder { scope, lane: Lane::Untrusted },
        }
    }
}

/// Names a token, and opens nothing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenId(String);

impl TokenId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("this is no token's id: `kiln token list` shows them, 16 hexadecimal digits each")]
pub struct ParseTokenIdError;

impl FromStr for TokenId {
    type Err = ParseTokenIdError;

    fn from_str(text: &str) -> Result<Self, ParseTokenIdError> {
        is_hex(text, ID_DIGITS).then(|| Self(text.to_owned())).ok_or(ParseTokenIdError)
    }
}

/// A token as its holder has it. Not shown by `Debug`.
#[derive(Clone)]
pub struct AccessToken {
    id: TokenId,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("this is no token of Kiln's: one begins with {PREFIX} and has 86 characters")]
pub struct ParseAccessTokenError;

impl AccessToken {
    /// From random bytes; the caller brings the randomness.
    pub fn from_random(id: [u8; ID_DIGITS / 2], secret: [u8; SECRET_DIGITS / 2]) -> Self {
        let id = hex(&id);
        let text = format!("{PREFIX}{id}_{}", hex(&secret));
        Self { id: TokenId(id), text }
    }

    /// Whether it is meant to be one, well-formed or not.
    pub fn looks_like(text: &str) -> bool {
        text.starts_with(PREFIX)
    }

    pub const fn id(&self) -> &TokenId {
        &self.id
    }

    /// The text to hand over, once.
    pub fn reveal(&self) -> &str {
        &self.text
    }

    /// What is kept. The secret has 256 random bits, so nothing is gained by a slower hash.
    pub fn hash(&self) -> [u8; 32] {
        Sha256::digest(self.text.as_bytes()).into()
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AccessToken({}, ..)", self.id)
    }
}

impl FromStr for AccessToken {
    type Err = ParseAccessTokenError;

    fn from_str(text: &str) -> Result<Self, ParseAccessTokenError> {
        let (id, secret) =
            text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('_')).ok_or(ParseAccessTokenError)?;
        let id = id.parse().map_err(|_| ParseAccessTokenError)?;
        is_hex(secret, SECRET_DIGITS).then(|| Self { id, text: text.to_owned() }).ok_or(ParseAccessTokenError)
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_back_and_not_shown() {
        let token = AccessToken::from_random([0xab; 8], [0x17; 32]);
        assert_eq!(token.reveal().len(), 86);
        let read: AccessToken = token.reveal().parse().expect("a token");
        assert_eq!((read.id().as_str(), read.hash()), ("abababababababab", token.hash()));
        assert!(!format!("{token:?}").contains("1717"), "{token:?}");
    }

    #[test]
    fn what_is_not_one_is_refused() {
        let good = AccessToken::from_random([0xab; 8], [0x17; 32]).reveal().to_owned();
        for bad in [
            String::new(),
            "kiln_".to_owned(),
            good.to_uppercase(),
            good.replace("kiln_", "kiln-"),
            good[..85].to_owned(),
            format!("{good}0"),
            format!(" {good}"),
            good.replace("17", "1g"),
            good.replacen("ab", "a", 1),
        ] {
            assert!(bad.parse::<AccessToken>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_grade_is_found_by_its_name_and_a_builder_without_repositories_builds_nothing() {
        for grade in Grade::ALL {
            assert_eq!(Grade::named(grade.name()), Some(grade));
        }
        assert_eq!(Grade::named("Admin"), None);
        assert_eq!(Grade::UntrustedBuilder.standing(Scope::default()).lane(), Lane::Untrusted);
    }
}
