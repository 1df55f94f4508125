//! The simulator: Kiln's real workers, plan and store against a model host, on virtual time and one thread.
//!
//! A **schedule** follows from its seed, to the last bit: who asks for what, how long everything takes, what goes wrong and
//! when. kilnd lives in a runtime of its own with a paused clock; its death is the end of that runtime, with everything in
//! it, and of every write that was not committed. The host, the clients and the disk outlive it (`world`).
//!
//! What happens is recorded as [`history`] and read, entry by entry, by the **checkers** (`checks`), each of which states one
//! invariant of Kiln as code. They know nothing of the workers: only what was asked, answered, and done to the host.
//!
//! | module | |
//! |---|---|
//! | `cast` | who is who: projects, and what is derived from them |
//! | `profile` | what kind of bad luck a schedule has |
//! | `scenario` | what happens from outside, and when |
//! | `trouble` | what goes wrong by itself |
//! | `client` | what clients do |
//! | `life` | one life of kilnd, and its disk |
//! | `world` | the model of the host, and everything else that outlives kilnd |
//! | `history` | what happened, as data |
//! | `checks` | the invariants |
//! | `tail` | the quiet end, in which everything has to come to rest |
//! | `run` | a schedule from its seed to its outcome |
//!
//! What must not be here: a real clock, a thread inside a schedule, randomness but the seed's, maps without an order, and
//! whatever follows from the order in which a runtime drops its tasks.

mod cast;
mod checks;
mod client;
mod config;
mod history;
mod life;
mod profile;
mod rng;
mod run;
mod scenario;
mod tail;
mod trouble;
mod world;

pub use history::Failure;
pub use run::{Outcome, Stage};
