//! JSON that is bounded in depth and number of values, and names nothing twice.
//!
//! Two readers of one token must see the same: most JSON readers take the last of two equal names, some the first.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Number;

use crate::claims::{Claim, Claims};
use crate::shown;

/// GitHub's claims are flat, Kubernetes' three deep.
const MAX_DEPTH: usize = 8;

/// GitHub has some forty.
const MAX_VALUES: usize = 512;

/// One object and nothing after it.
pub(crate) fn object(bytes: &[u8]) -> Result<Claims, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let left = Cell::new(MAX_VALUES);
    let value = Value { depth: 0, left: &left }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    match value {
        Claim::Object(claims) => Ok(claims),
        _ => Err(Error::custom("an object is wanted")),
    }
}

#[derive(Clone, Copy)]
struct Value<'a> {
    depth: usize,
    left: &'a Cell<usize>,
}

impl Value<'_> {
    fn inner<E: Error>(self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(E::custom(format_args!("it is more than {MAX_DEPTH} levels deep")));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = Claim;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Claim, D::Error> {
        let left = self.left.get().checked_sub(1);
        let left = left.ok_or_else(|| D::Error::custom(format_args!("it has more than {MAX_VALUES} values")))?;
        self.left.set(left);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_> {
    type Value = Claim;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Claim, E> {
        Ok(Claim::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Claim, E> {
        Ok(Claim::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Claim, E> {
        Ok(Claim::Number(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Claim, E> {
        Ok(Claim::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Claim, E> {
        Number::from_f64(value).map(Claim::Number).ok_or_else(|| E::custom("a number is out of range"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Claim, E> {
        Ok(Claim::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Claim, A::Error> {
        let inner = self.inner()?;
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(inner)? {
            values.push(value);
        }
        Ok(Claim::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Claim, A::Error> {
        let inner = self.inner()?;
        let mut values = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value_seed(inner)?;
            if values.contains_key(&name) {
                return Err(A::Error::custom(format_args!("{} is there twice", shown(&name))));
            }
            values.insert(name, value);
        }
        Ok(Claim::Object(Claims(values)))
    }
}
