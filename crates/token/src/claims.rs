//! What a token says.

use std::collections::BTreeMap;

use serde_json::Number;

use crate::TokenError;

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub enum Claim {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Claim>),
    Object(Claims),
}

/// Named values.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Claims(pub(crate) BTreeMap<String, Claim>);

/// The last second of the year 9999; later ones are a mistake of units.
const LAST_DATE: f64 = 253_402_300_799.0;

impl Claim {
    /// As forges mean it who write one thing as text here and as a number there: a switch as `true` or `false`, `42.0` as `42`,
    /// nothing as the empty text. `None` of lists and objects.
    pub fn as_text(&self) -> Option<String> {
        match self {
            Self::Null => Some(String::new()),
            Self::Bool(value) => Some(value.to_string()),
            Self::Text(text) => Some(text.clone()),
            Self::Number(number) => Some(match number.as_f64() {
                Some(value) if number.is_f64() && value.fract() == 0.0 && value.abs() < 1e15 => format!("{value:.0}"),
                _ => number.to_string(),
            }),
            Self::List(_) | Self::Object(_) => None,
        }
    }
}

impl Claims {
    pub fn get(&self, name: &str) -> Option<&Claim> {
        self.0.get(name)
    }

    /// Of objects within objects: the claim that these names lead to.
    pub fn at(&self, names: &[String]) -> Option<&Claim> {
        let (first, rest) = names.split_first()?;
        match (self.get(first)?, rest) {
            (claim, []) => Some(claim),
            (Claim::Object(inner), rest) => inner.at(rest),
            _ => None,
        }
    }

    /// As [`Claim::as_text`]; what is not there is the empty text.
    pub fn text(&self, name: &str) -> Option<String> {
        self.get(name).map_or_else(|| Some(String::new()), Claim::as_text)
    }

    /// Milliseconds since 1970; `None` if there is none.
    pub fn date(&self, name: &'static str) -> Result<Option<i64>, TokenError> {
        let Some(claim) = self.get(name) else { return Ok(None) };
        let seconds = match claim {
            Claim::Number(number) => number.as_f64(),
            _ => None,
        };
        match seconds {
            Some(seconds) if (0.0..=LAST_DATE).contains(&seconds) => Ok(Some((seconds * 1000.0) as i64)),
            _ => Err(TokenError::Date(name)),
        }
    }

    /// Whom it is for: one name, or a list of them.
    pub fn audiences(&self) -> Vec<&str> {
        let named = match self.get("aud") {
            Some(Claim::List(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None => &[],
        };
        named
            .iter()
            .filter_map(|claim| if let Claim::Text(name) = claim { Some(name.as_str()) } else { None })
            .collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Claim)> {
        self.0.iter().map(|(name, claim)| (name.as_str(), claim))
    }
}
