//! Kiln keeps one warm, unmodified BuildKit daemon per project on one host and routes builds to it.
//!
//! The way of a request: [`api`] or [`gateway`] → [`projects`] (one worker per key decides, with the rules of
//! `kiln-domain`) → [`host`], [`pki`] and [`buildkit`] (effects) → [`store`] (what an answer promises is on disk before
//! the answer leaves) → back.
//!
//! | room | purpose |
//! |---|---|
//! | [`config`] | one typed configuration from file, environment and flags |
//! | [`clock`] | the one place that reads the wall clock |
//! | [`entropy`] | the one place that asks for randomness |
//! | [`api`] | HTTP on a unix socket and on loopback: routes, admin verbs, events |
//! | [`identity`] | who is calling: users of this host, tokens, builds by the word of their forge |
//! | [`gateway`] | reads a ClientHello, finds the daemon, relays bytes; never terminates TLS |
//! | [`projects`] | the heart: one worker task per active key |
//! | [`store`] | SQLite: one writer with group commit, readers apart |
//! | [`host`] | effects on this machine: runtimes, volumes, network |
//! | [`buildkit`] | what we say to buildkitd: its configuration, is it ready, how full is it |
//! | [`pki`] | per-project CA, daemon certificates, build credentials |
//! | [`metrics`] | what Kiln counts and measures of itself |
//! | [`image`] | making the container image |
//! | [`cli`] | the `kiln` command |
//! | [`bench`] | what this machine makes of the quality bars |
//! | [`causes`] | an error and its causes in one line |
//! | [`seldom`] | what is not said more often than once in a while |
//! | [`stdio`] | what programs say on standard error and output |
//! | [`daemon`] | `kilnd`: starts the parts, waits for a signal |

pub mod api;
pub mod bench;
pub mod buildkit;
pub mod causes;
pub mod cli;
pub mod clock;
pub mod config;
pub mod daemon;
pub mod entropy;
pub mod gateway;
pub mod host;
pub mod identity;
pub mod image;
pub mod metrics;
pub mod pki;
pub mod projects;
pub mod seldom;
pub mod stdio;
pub mod store;
