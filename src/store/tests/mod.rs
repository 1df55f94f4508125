//! The store over a real file in a directory of its own.

mod durability;
mod in_memory;
mod journal;
mod migrating;
mod opening;
mod projects;
mod read_only;
mod setting_aside;
mod taking_up;
mod tokens;
mod writing;

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use kiln_domain::lease::LeasePolicy;
use kiln_domain::{AddressPool, BuildSpec, BuildTimes, Key, Lease, LeaseToken, Timestamp};
use tempfile::TempDir;

use super::{Commit, NewEvent, Store};

const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);

const POOL: AddressPool = AddressPool { first: Ipv4Addr::new(10, 83, 0, 2), last: Ipv4Addr::new(10, 83, 255, 254) };

const POLICY: LeasePolicy = LeasePolicy { grace: Duration::from_secs(600), max_build_age: Duration::from_secs(7200) };

struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { directory: TempDir::new().expect("a temporary directory") }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("kiln.db")
    }

    fn open(&self) -> Store {
        Store::open(&self.path()).expect("opens")
    }
}

fn spec(number: usize) -> BuildSpec {
    BuildSpec::new(&format!("github.com/org/repo{number}"), "", "", "amd64").expect("valid")
}

fn key(number: usize) -> Key {
    Key::of(&spec(number))
}

fn lease(number: u64) -> Lease {
    Lease::new(LeaseToken::from_random(number.to_be_bytes()).hash(), NOW, &POLICY)
}

/// A lease, and nothing to say of the builds.
fn add_lease(store: &Store, number: usize, lease: &Lease, event: Option<NewEvent>) -> Commit<()> {
    store.add_lease(&key(number), lease, &BuildTimes::default(), event)
}

fn event(text: &str) -> NewEvent {
    NewEvent::new(NOW, None, "test", text)
}
