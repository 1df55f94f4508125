//! How many files and connections this process may have open at a time.

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::api;
use crate::config::Config;
use crate::gateway::PIPES;

/// A relayed connection is one from the client and one to the daemon.
const FOR_A_RELAY: u64 = 2;
/// Questions to a daemon, its process, its output and its control group, and what a step has open.
const FOR_A_DAEMON: u64 = 8;
/// The database with its readers, listeners, Incus, the runtime's own; and the gateway's pipes.
const FOR_THE_REST: u64 = 256 + 2 * PIPES as u64;

/// Raises the soft limit to what may be needed, and warns where that is not enough for what the configuration allows.
///
/// The daemons of the process runtime inherit it. buildkitd would raise it itself; their builds see more than they would
/// without. A child could only be given its old limit back between fork and exec, where std runs nothing of ours.
pub(super) fn raise(config: &Config) {
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    // No more than may be needed: some programs in builds close every descriptor that they might have.
    let wanted = limit.current.map(|soft| soft.max(needed(config)));
    limit.current = match (wanted, limit.maximum) {
        (Some(wanted), Some(hard)) => Some(wanted.min(hard)),
        (wanted, None) | (None, wanted) => wanted,
    };
    if limit.current != before
        && let Err(error) = setrlimit(Resource::Nofile, limit)
    {
        tracing::warn!(%error, "cannot raise the limit of open files");
        limit.current = before;
    }
    if let Some(warning) = too_few(limit.current, config) {
        tracing::warn!("{warning}");
    }
}

/// `None` is unlimited.
fn too_few(limit: Option<u64>, config: &Config) -> Option<String> {
    let (limit, needed) = (limit?, needed(config));
    (limit < needed).then(|| {
        format!(
            "this process may have {limit} files open, and needs up to {needed}: {} connections of the API, {} for \
             {} of the gateway, {} for {} daemons, {FOR_THE_REST} others; beyond the limit nobody is let in. Set \
             LimitNOFILE={needed} in kilnd's unit (or raise `ulimit -Hn`), or lower gateway.max_connections",
            api::MOST_CONNECTIONS,
            of_gateway(config),
            config.gateway.max_connections,
            of_daemons(config),
            config.admission.running,
        )
    })
}

fn needed(config: &Config) -> u64 {
    [api::MOST_CONNECTIONS, of_gateway(config), of_daemons(config), FOR_THE_REST]
        .into_iter()
        .fold(0, u64::saturating_add)
}

fn of_gateway(config: &Config) -> u64 {
    FOR_A_RELAY.saturating_mul(config.gateway.max_connections as u64)
}

fn of_daemons(config: &Config) -> u64 {
    FOR_A_DAEMON.saturating_mul(config.admission.running as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_what_the_bounds_need_is_told_of_with_its_remedy() {
        let mut config = Config::default();
        assert_eq!(needed(&config), 2 * (1024 + 64) + 2 * 4096 + 8 * 64 + 384);
        assert_eq!(too_few(Some(11_264), &config), None);
        assert_eq!(too_few(None, &config), None);
        let warning = too_few(Some(11_263), &config).expect("too few");
        for word in ["11263 files", "up to 11264", "8192 for 4096 of the gateway", "LimitNOFILE=11264"] {
            assert!(warning.contains(word), "no {word:?} in {warning}");
        }
        config.gateway.max_connections = usize::MAX;
        assert!(too_few(Some(1 << 40), &config).is_some());
    }
}
