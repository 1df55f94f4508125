//! What can be set for a project: as it is asked for, and as it is shown.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

/// One field of a patch: not named, `null`, or a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Change<T> {
    /// It stays as it is.
    #[default]
    Keep,
    /// Back to the default.
    Reset,
    To(T),
}

impl<T> Change<T> {
    pub const fn is_keep(&self) -> bool {
        matches!(self, Self::Keep)
    }

    /// The field after the change.
    pub fn apply(self, field: &mut Option<T>) {
        match self {
            Self::Keep => {}
            Self::Reset => *field = None,
            Self::To(value) => *field = Some(value),
        }
    }

    /// Reads the value; `Keep` and `Reset` stay what they are.
    pub fn try_map<U, E>(self, read: impl FnOnce(T) -> Result<U, E>) -> Result<Change<U>, E> {
        Ok(match self {
            Self::Keep => Change::Keep,
            Self::Reset => Change::Reset,
            Self::To(value) => Change::To(read(value)?),
        })
    }
}

impl<T: Serialize> Serialize for Change<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::To(value) => serializer.serialize_some(value),
            // `Keep` is left out by its container.
            Self::Keep | Self::Reset => serializer.serialize_none(),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Change<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Reset, Self::To))
    }
}

/// `PATCH /v1/projects/{key}/settings`: what is not named stays; `null` goes back to the default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SettingsPatch {
    /// `warm` (stopped when idle) or `hot` (kept up).
    #[schema(value_type = Option<String>, example = "hot")]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub tier: Change<String>,
    /// How long the daemon stays up after its last activity.
    #[schema(value_type = Option<String>, example = "15m")]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub idle_window: Change<String>,
    /// The cache's first size.
    #[schema(value_type = Option<String>, example = "20GiB")]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub volume: Change<String>,
    /// What the cache may grow to; equal to `volume`: it never grows.
    #[schema(value_type = Option<String>, example = "100GiB")]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub volume_max: Change<String>,
    #[schema(value_type = Option<String>, example = "4GiB")]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub memory: Change<String>,
    #[schema(value_type = Option<u32>, example = 4)]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub cpus: Change<u32>,
    #[schema(value_type = Option<u32>, example = 4096)]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub processes: Change<u32>,
    /// Bytes per second that are read from the disk, and as many that are written.
    #[schema(value_type = Option<String>, example = "200MiB")]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub io: Change<String>,
    /// What builds may ask for beyond what all get: `security.insecure`, `network.host`. Never for untrusted builds.
    #[schema(value_type = Option<Vec<String>>, example = json!(["network.host"]))]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub entitlements: Change<Vec<String>>,
    /// Daemons beside its own that the project may have when that is saturated; 0: none.
    #[schema(value_type = Option<u16>, example = 2)]
    #[serde(skip_serializing_if = "Change::is_keep")]
    pub fan_out: Change<u16>,
}

/// Where a value comes from; the first that has one wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Set for this project alone.
    Project,
    /// The first rule of the configuration that matches its repository.
    Rule,
    /// The host's.
    Default,
}

impl Origin {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Project => "project",
            Self::Rule => "rule",
            Self::Default => "default",
        }
    }
}

/// A value that counts, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Setting {
    /// As `PATCH` takes it, as text; `null` is without limit.
    pub value: Option<String>,
    pub origin: Origin,
}

/// What counts for a project.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SettingsView {
    pub tier: Setting,
    pub idle_window: Setting,
    pub volume: Setting,
    pub volume_max: Setting,
    pub memory: Setting,
    pub cpus: Setting,
    pub processes: Setting,
    pub io: Setting,
    /// Names with commas between them, or `none`.
    pub entitlements: Setting,
    pub fan_out: Setting,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode;

    #[test]
    fn a_patch_tells_absent_from_null() {
        let patch: SettingsPatch = decode(br#"{"tier":"hot","volume":null,"cpus":4,"fanOut":0}"#).expect("reads");
        let expected = SettingsPatch {
            tier: Change::To("hot".to_owned()),
            volume: Change::Reset,
            cpus: Change::To(4),
            fan_out: Change::To(0),
            ..SettingsPatch::default()
        };
        assert_eq!(patch, expected);
        let text = serde_json::to_string(&patch).expect("serialises");
        assert_eq!(text, r#"{"tier":"hot","volume":null,"cpus":4,"fanOut":0}"#);
        for body in [
            r#"{"idle_window":"1m"}"#,
            r#"{"cpus":"4"}"#,
            r#"{"cpus":-1}"#,
            r#"{"cpus":5000000000}"#,
            r#"{"tier":1}"#,
            r#"{"fanOut":65536}"#,
        ] {
            assert!(decode::<SettingsPatch>(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn a_change_is_applied() {
        let after = |change: Change<u32>| {
            let mut field = Some(1);
            change.apply(&mut field);
            field
        };
        assert_eq!([after(Change::Keep), after(Change::Reset), after(Change::To(2))], [Some(1), None, Some(2)]);
    }
}
