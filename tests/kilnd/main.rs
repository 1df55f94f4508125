//! kilnd, the real program, given what it should not be given: it says what is wrong and what to do, changes nothing,
//! and goes on. And its end: bounded, and not the end of its daemons.
//!
//! Everything is private to a test: directories, addresses out of 127.91.0.0/16, ports. Where no BuildKit is needed a
//! script stands in for it; the others want `KILN_TEST_BUILDKITD` (and root), and say so when it is not there.

mod bad_places;
mod callers;
mod configuration;
mod daemons;
mod damage;
mod descriptors;
mod figures;
mod hellos;
mod http;
mod incus;
mod life;
mod orphans;
mod outputs;
mod requests;
mod stage;
