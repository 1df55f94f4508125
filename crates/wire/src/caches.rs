//! Caches: their past, a way back, and where the bytes are. Sizes are bytes, instants RFC 3339.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::upkeep::Trashed;

/// `GET /v1/projects/{key}/cache`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct CacheView {
    pub key: String,
    /// What there is to go back to, the oldest first.
    pub snapshots: Vec<SnapshotView>,
    /// Absent: it has no cache, it was not asked for, or `unmeasured` says why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<UsageView>,
    /// Why it could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmeasured: Option<String>,
}

/// A moment of a cache.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct SnapshotView {
    /// Of this cache only: another one may have a snapshot of the same name.
    #[schema(example = "kiln-000042")]
    pub name: String,
    pub taken: String,
    /// `good` (a daemon could work with a copy of it), `bad` (none could) or `unchecked` (nobody has looked).
    pub verdict: String,
    /// What its destruction alone would free; absent where that is not known cheaply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Where the bytes of one cache are. What cannot be told without walking through it is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct UsageView {
    /// What would be free without this cache while its snapshots stay.
    pub used: u64,
    /// What it has in common with its own snapshots, or with what it was copied from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<u64>,
    /// What its snapshots alone hold: free when all of them are gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<u64>,
    /// What it may grow to, where the storage enforces that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// What can still be written.
    pub available: u64,
    /// Files that can still be made, where that is bounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inodes_available: Option<u64>,
}

/// `POST /v1/projects/{key}/rollback`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// As the list has it; the newest good one, if none is named.
    #[schema(example = "kiln-000042")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Also if a build counts on the daemon: it is cut off.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// Where a cache has gone back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RolledBack {
    pub snapshot: String,
}

/// `POST /v1/projects/{key}/reset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Reset {
    /// Also if a build counts on the daemon: it is cut off.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// `GET /v1/caches`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct DiskUsage {
    /// The largest first.
    pub caches: Vec<CacheEntry>,
    /// Deleted ones that are still there.
    pub trash: Vec<Trashed>,
    /// Absent where it could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<Storage>,
    pub sums: Sums,
}

/// One cache on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CacheEntry {
    pub key: String,
    /// As of a project: `project`, `fork`, `pull-request` or `member`; and `trial`, a copy of a snapshot that is tried out.
    pub role: String,
    /// The project that it is derived from; absent where it is one itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Absent, as what follows but `usage`, where the database knows nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repo: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_request: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_activity: Option<String>,
    /// Absent: it went away while it was measured, or cannot be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<UsageView>,
}

/// What all caches share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct Storage {
    pub used: u64,
    /// Used and still to be had; what is kept for root is not counted.
    pub total: u64,
}

/// Over all caches that could be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct Sums {
    /// What belongs to one cache and to nothing else.
    pub unique: u64,
    /// What caches have in common with their snapshots, or with what they were copied from: counted once for each of them.
    pub shared: u64,
    /// What snapshots alone hold.
    pub snapshots: u64,
}

impl Sums {
    pub fn of(caches: &[CacheEntry]) -> Self {
        let sum = |part: fn(&UsageView) -> u64| {
            let parts = caches.iter().filter_map(|cache| cache.usage.as_ref()).map(part);
            parts.fold(0, u64::saturating_add)
        };
        Self {
            unique: sum(|usage| usage.used),
            shared: sum(|usage| usage.shared.unwrap_or(0)),
            snapshots: sum(|usage| usage.snapshots.unwrap_or(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode;

    #[test]
    fn a_way_back_needs_no_more_than_an_object() {
        assert_eq!(decode::<Rollback>(b"{}").ok(), Some(Rollback::default()));
        assert_eq!(decode::<Reset>(b"{}").ok(), Some(Reset::default()));
        let named: Rollback = decode(br#"{"snapshot":"kiln-000042","force":true}"#).expect("reads");
        assert_eq!(named, Rollback { snapshot: Some("kiln-000042".to_owned()), force: true });
        assert_eq!(serde_json::to_string(&Rollback::default()).ok().as_deref(), Some("{}"));
        for body in
            ["", "null", "[]", "[true]", r#"{"force":"yes"}"#, r#"{"force":null}"#, r#"{"force":true,"force":false}"#]
        {
            assert!(decode::<Reset>(body.as_bytes()).is_err(), "{body}");
            assert!(decode::<Rollback>(body.as_bytes()).is_err(), "{body}");
        }
        for body in [r#"{"snapshot":42}"#, r#"{"snapshot":["kiln-000042"]}"#, r#"{"to":"kiln-000042"}"#] {
            assert!(decode::<Rollback>(body.as_bytes()).is_err(), "{body}");
        }
        assert!(decode::<Reset>(br#"{"snapshot":"kiln-000042"}"#).is_err(), "a reset goes to nothing");
    }

    #[test]
    fn sums_leave_out_what_is_not_known_and_do_not_overflow() {
        let cache = |usage| CacheEntry { usage, ..CacheEntry::default() };
        let known = UsageView { used: 5, shared: Some(3), snapshots: Some(2), ..UsageView::default() };
        let bare = UsageView { used: 7, ..UsageView::default() };
        let sums = Sums::of(&[cache(Some(known)), cache(Some(bare)), cache(None)]);
        assert_eq!(sums, Sums { unique: 12, shared: 3, snapshots: 2 });
        let huge = cache(Some(UsageView { used: u64::MAX, ..UsageView::default() }));
        assert_eq!(Sums::of(&[huge.clone(), huge]).unique, u64::MAX);
    }
}
