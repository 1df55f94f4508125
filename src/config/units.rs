//! Values with units, as people write them.

use std::fmt;

use serde::de::{Error, Visitor};

/// Takes text only, and tells whoever writes something else, a number without its unit chiefly, what is wanted.
struct Text(&'static str);

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

/// `"127.0.0.1:8080"`.
pub(super) mod address {
    use std::net::SocketAddr;

    use serde::{Deserializer, Serialize, Serializer, de::Error};

    use super::Text;

    pub(in crate::config) fn serialize<S: Serializer>(address: &SocketAddr, serializer: S) -> Result<S::Ok, S::Error> {
        address.serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
        let text = deserializer.deserialize_str(Text("an address and a port in quotes, as \"127.0.0.1:8080\""))?;
        text.parse().map_err(|_| {
            D::Error::custom(format!("{text:?} is not an address and a port; write them as \"127.0.0.1:8080\""))
        })
    }
}

/// `["10.1.0.0/16", "192.0.2.7"]`: load balancers.
pub(super) mod sources {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    use crate::gateway::TrustedSource;

    pub(in crate::config) fn serialize<S: Serializer>(
        sources: &[TrustedSource],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        sources.iter().map(ToString::to_string).collect::<Vec<_>>().serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<TrustedSource>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}

/// `["10.1.2.3:5000"]`: registry mirrors.
pub(super) mod mirrors {
    use std::net::SocketAddrV4;

    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    use crate::host::network::parse_mirror;

    pub(in crate::config) fn serialize<S: Serializer>(
        mirrors: &[SocketAddrV4],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        mirrors.serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<SocketAddrV4>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| parse_mirror(text).map_err(D::Error::custom)).collect()
    }
}

/// `["10.1.0.0/16:443"]`.
pub(super) mod destinations {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::host::network::Destination;

    pub(in crate::config) fn serialize<S: Serializer>(
        destinations: &[Destination],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(destinations.iter().map(Destination::to_string))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Destination>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}

/// `"15m"`, `"1h 30m"`, `"500ms"`.
pub(super) mod duration {
    use std::time::Duration;

    use jiff::SignedDuration;
    use serde::{Deserializer, Serialize, Serializer, de::Error};

    use super::Text;

    pub(in crate::config) fn serialize<S: Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        let span = SignedDuration::try_from(*span).map_err(serde::ser::Error::custom)?;
        format!("{span:#}").serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = deserializer.deserialize_str(Text("a duration in quotes, as \"15m\""))?;
        let span: SignedDuration = text
            .parse()
            .map_err(|_| D::Error::custom(format!("{text:?} is not a duration; write \"15m\", \"2h\" or \"30s\"")))?;
        Duration::try_from(span).map_err(|_| D::Error::custom(format!("{text:?} is negative")))
    }
}

/// As [`duration`], or absent.
pub(super) mod optional_duration {
    use std::time::Duration;

    use serde::{Deserializer, Serializer};

    use super::duration;

    #[expect(clippy::ref_option, reason = "the signature that serde calls")]
    pub(in crate::config) fn serialize<S: Serializer>(
        span: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match span {
            Some(span) => duration::serialize(span, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        duration::deserialize(deserializer).map(Some)
    }
}

/// `"20GiB"`, `"512MiB"`, `"4096"`.
pub(super) mod bytes {
    use serde::{Deserializer, Serialize, Serializer, de::Error};

    use super::Text;

    const UNITS: [(&str, u32); 5] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("B", 0)];

    pub(in crate::config) fn parse(text: &str) -> Option<u64> {
        let text = text.trim();
        let (number, shift) = UNITS
            .iter()
            .find_map(|(unit, shift)| text.strip_suffix(unit).map(|number| (number, *shift)))
            .unwrap_or((text, 0));
        let number: u64 = number.trim().parse().ok()?;
        number.checked_mul(1 << shift)
    }

    pub(in crate::config) fn render(count: u64) -> String {
        for (unit, shift) in UNITS.iter().rev().skip(1) {
            if count != 0 && count.is_multiple_of(1 << shift) {
                return format!("{}{unit}", count >> shift);
            }
        }
        format!("{count}B")
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
    pub(in crate::config) fn serialize<S: Serializer>(count: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        render(*count).serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = deserializer.deserialize_str(Text("a size in quotes, as \"20GiB\""))?;
        parse(&text).ok_or_else(|| {
            D::Error::custom(format!("{text:?} is not a size; write \"20GiB\", \"512MiB\" or \"4096B\""))
        })
    }
}

/// As [`bytes`], where absent is a value.
pub(super) mod optional_bytes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    use super::bytes;

    #[expect(clippy::ref_option, reason = "the signature that serde calls")]
    pub(in crate::config) fn serialize<S: Serializer>(count: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
        count.map(bytes::render).serialize(serializer)
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
        let count = bytes::parse(&text);
        count.map(Some).ok_or_else(|| D::Error::custom(format!("{text:?} is not a size; write \"4GiB\" or \"512MiB\"")))
    }
}

#[cfg(test)]
mod tests {
    use super::bytes::{parse, render};

    #[test]
    fn sizes_read_as_they_are_written() {
        for (text, count) in [("20GiB", 20 << 30), ("512 MiB", 512 << 20), ("4096", 4096), ("4096B", 4096), ("0B", 0)] {
            assert_eq!(parse(text), Some(count), "of {text}");
            assert_eq!(parse(&render(count)), Some(count), "of {}", render(count));
        }
        for text in ["", "GiB", "-1GiB", "1.5GiB", "20GB", "99999999999TiB"] {
            assert_eq!(parse(text), None, "of {text}");
        }
    }
}
