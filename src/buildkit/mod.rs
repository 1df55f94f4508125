//! What we say to buildkitd: its configuration, whether it answers, how full it is.
//!
//! [`toml`] renders `buildkitd.toml`; [`control`] is a client of its gRPC control API over mutual TLS.
//! "Ready" means that `ListWorkers` answered with a worker: an open port is seconds away from that under load.
//!
//! What must not be here: anything that changes what is inside BuildKit; starting or stopping it.
