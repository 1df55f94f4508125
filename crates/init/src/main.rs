//! `kiln-init`, pid 1 of the container image: makes the container ready, runs one buildkitd, and turns the runtime's
//! stop signal into a bounded drain.
//!
//! ```text
//! set up (net, cgroup, tmpfs, resolvers) ─→ run buildkitd ─┬─ it exits by itself ──→ exit 1: the instance stops
//!                                                          └─ PWR/TERM/INT ─→ TERM, wait ─→ KILL ──→ exit 0
//! ```
//!
//! * Everything said goes to the console, which the runtime keeps: it is where last words are read.
//! * buildkitd drains at SIGTERM (it waits for running builds) and exits 1 even when that went well.
//! * When pid 1 exits the kernel kills what is left, so nothing survives it.
//!
//! | environment | meaning |
//! |---|---|
//! | `KILN_RESOLVERS` | name servers' addresses, separated by blanks or commas; unset leaves `/etc/resolv.conf` alone |
//! | `KILN_DRAIN_SECONDS` | how long a drain may take before the daemon is killed; 3600 when unset |
//!
//! What must not be here: configuration of buildkitd, anything that can wait for the network.

use std::process::ExitCode;
use std::time::Duration;

mod setup;
mod supervise;

/// A build's guaranteed hour.
const DRAIN: Duration = Duration::from_hours(1);

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("kiln-init: this is pid 1 of a build container; there is no use in running it by hand");
        return ExitCode::from(64);
    }
    // From here on signals wait until they are asked for, also one that comes during the set-up.
    let signals = match supervise::Signals::block() {
        Ok(signals) => signals,
        Err(error) => return give_up(&format!("cannot block signals: {error}")),
    };
    let settings = match setup::Settings::read(|name| std::env::var(name).ok()) {
        Ok(settings) => settings,
        Err(why) => return give_up(&why),
    };
    if let Err(why) = setup::prepare(&settings) {
        return give_up(&why);
    }
    match supervise::run(&signals, settings.drain.unwrap_or(DRAIN)) {
        Ok(supervise::End::Asked) => ExitCode::SUCCESS,
        Ok(supervise::End::ByItself(status)) => give_up(&format!("buildkitd went away by itself: {status}")),
        Err(error) => give_up(&format!("cannot run {}: {error}", supervise::BUILDKITD)),
    }
}

fn give_up(why: &str) -> ExitCode {
    eprintln!("kiln-init: {why}");
    ExitCode::FAILURE
}
