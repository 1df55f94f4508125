//! The rules about caches: what is kept of their past, how large they grow, which of them goes when there is no room.
//!
//! | module | what it decides |
//! |---|---|
//! | [`snapshot`] | names and verdicts: what a moment of a cache is called, and whether it is known to be sound |
//! | [`history`] | when a moment is worth keeping, and for how long |
//! | [`size`] | how large a cache may be, and what its daemon is told of that |
//! | [`fanout`] | which of a project's daemons takes a build, when one is not enough |
//! | [`eviction`] | which caches go when their storage is nearly full |
//!
//! What must not be here: which kind of storage there is, and how it does it.

pub mod eviction;
pub mod fanout;
pub mod history;
pub mod size;
pub mod snapshot;

pub use eviction::EvictionPolicy;
pub use fanout::{FanOutPolicy, ForkBounds};
pub use history::HistoryPolicy;
pub use size::SizePolicy;
pub use snapshot::{ParseSnapshotError, Snapshot, SnapshotName, Verdict};
