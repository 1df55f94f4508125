//! The rules of Kiln, as pure functions and plain data.
//!
//! | module | what it decides |
//! |---|---|
//! | [`access`] | who may do what, and what a caller's word about itself is worth (K7, K8) |
//! | [`address`] | the range that daemons get their addresses from |
//! | [`repo`] | which spellings name the same repository |
//! | [`spec`] | what a build says of itself, and the limits on it |
//! | [`settings`] | what can be set for a project, and where each value comes from |
//! | [`cache`] | what is kept of a cache's past, how large it grows, which one goes when there is no room |
//! | [`builds`] | how busy a project was in the last day |
//! | [`key`] | which builds share a daemon (K1), and every name derived from that |
//! | [`lane`] | what follows from whose code it is |
//! | [`lease`] | how long a build may count on its daemon |
//! | [`project`] | what is remembered of a project |
//! | [`idle`] | how long a daemon stays up for nobody |
//! | [`health`] | whether a daemon that runs is well |
//! | [`admission`] | whether the host has room for one more start |
//! | [`plan`] | what to do next for a project: start, stop, wait, give up (K2, K3) |
//! | [`explain`] | why a project is as it is, in words |
//! | [`time`] | instants as data |
//!
//! What must not be here: I/O, a clock, randomness, tokio, and any knowledge of Incus, SQLite or HTTP. Whatever
//! a rule needs to know is an argument; whatever it wants done is a value it returns.

pub mod access;
pub mod address;
pub mod admission;
pub mod builds;
pub mod cache;
pub mod explain;
pub mod health;
pub mod idle;
pub mod key;
pub mod lane;
pub mod lease;
pub mod plan;
pub mod project;
pub mod repo;
pub mod settings;
pub mod spec;
pub mod time;

pub use address::{AddressPool, AddressRange};
pub use builds::BuildTimes;
pub use cache::{Snapshot, SnapshotName, Verdict};
pub use key::{Key, ParseKeyError, Role};
pub use lane::{Lane, Limits, UntrustedPolicy};
pub use lease::{Lease, LeaseToken, TokenHash};
pub use plan::{Plan, Policy, Reason, Situation, Step, plan};
pub use project::{Generation, Identity, Phase, ProjectRecord};
pub use repo::RepoName;
pub use settings::{Entitlement, Entitlements, Rules, Settings, Tier};
pub use spec::{Arch, BuildSpec, SpecError};
pub use time::Timestamp;
