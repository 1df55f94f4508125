//! The heart: one worker task per active key, and the handle through which everybody asks for a daemon.
//!
//! A worker alone starts, stops and destroys what belongs to its key (K2): it observes, asks [`kiln_domain::plan`], has
//! one step carried out by [`Effects`], records, and looks again. So there is no lock to take, and no check that could go
//! stale before it is acted on. It is created at the first need and gone when its project is quiet.
//!
//! Promises: concurrent requests for one key start one daemon; a request that goes away cancels only its own wait (K6);
//! what an answer promises is committed before the answer leaves (K4); every wait ends and says what it waited for (K10).
//!
//! | file | |
//! |---|---|
//! | `handle.rs` | [`Projects`]: route, prewarm, renew, complete, connect |
//! | `admin.rs` | stop, remove, set, why, list, show |
//! | `reconcile.rs` | the start, and the database held against the host: orphans, rebuilds |
//! | `janitor.rs` | the trash, and what else grows too old |
//! | `eviction.rs` | what goes when storage or memory runs short |
//! | `fanout.rs` | which of a project's daemons takes a build |
//! | `trials.rs` | snapshots, tried out |
//! | `caches.rs` | what is asked of caches: their past, a way back, where the bytes are |
//! | `forks.rs` | how many forks may be at work |
//! | `claims.rs` | whose each address is, when the database is filled from the host |
//! | `registry.rs` | key → worker |
//! | `worker/` | the loop of one project |
//! | `admission.rs` | the door for starts |
//! | `messages.rs` | what a worker is told, who waits for its daemon, and what they get |
//! | `effects.rs` | [`Effects`]: what a worker may do to the host |
//! | `host_effects.rs` | its implementation on the real host |
//! | `model.rs` | its implementation on a model host |
//!
//! What must not be here: HTTP, SQL, and how a runtime or a volume does its work.

mod admin;
mod admission;
mod answer;
mod caches;
mod claims;
mod effects;
mod eviction;
mod fanout;
mod forks;
mod handle;
mod host_effects;
mod janitor;
mod messages;
pub mod model;
mod reconcile;
mod registry;
mod trials;
mod turned_away;
mod worker;

#[cfg(test)]
mod tests;

pub use admin::VerbError;
pub use admission::QueueFigures;
pub use answer::{Addressing, Routed};
pub use caches::CacheUsage;
pub use effects::{EffectError, Effects, StepDeadlines, Survey};
pub use handle::{Caller, Foundations, Projects, ProjectsConfig, RenewError, RouteError, RouteOptions, Who};
pub use host_effects::{DaemonPaths, HostEffects, HostEffectsConfig, HostParts};
pub use reconcile::ReconcileError;
