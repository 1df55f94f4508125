//! What we say to buildkitd: its configuration, whether it answers, whether it builds, how full it is.
//!
//! [`toml`] renders `buildkitd.toml`; [`control`] is a client of its gRPC control API over mutual TLS; [`probe`] waits
//! until a daemon serves; `damage` knows what one says that cannot open its cache. "Ready" means that `ListWorkers` answered with a worker: an open port is seconds away from
//! that under load, because buildkitd listens before it has opened its databases.
//!
//! What must not be here: anything that changes what is inside BuildKit; starting or stopping it.

pub mod control;
mod damage;
pub mod probe;
pub mod toml;

#[cfg(test)]
mod real_tests;

pub use control::{ClientTls, Control, ControlError, DaemonTarget};
pub use damage::cache_damage;
pub use probe::{DaemonProbe, GrpcProbe, ProbeError, await_serving};
pub use toml::{Capacity, ConfigError, DaemonConfig};
