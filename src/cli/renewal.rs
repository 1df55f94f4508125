//! Keeps a build's lease alive while buildx runs, and says nothing of it: a build must never fail, or be noisy, because
//! of this. What keeps the daemon up is its open connection anyway; a renewal covers a build that is between two of them.

use std::time::Duration;

use kiln_domain::LeaseToken;
use kiln_wire::{LeaseView, RouteResponse};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::client::Client;

/// A build that is over by then needs none.
const FIRST: Duration = Duration::from_secs(5);
/// The grace is kilnd's to choose, but nobody gains by asking more often, or less.
const SHORTEST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_mins(10);
/// After a renewal that did not work out.
const AGAIN: Duration = Duration::from_secs(30);

/// Ends when dropped.
#[derive(Debug)]
pub(super) struct Renewal(Option<JoinHandle<()>>);

impl Renewal {
    /// Nothing, where kilnd is too old to renew.
    pub(super) fn of(client: &Client, routed: &RouteResponse) -> Self {
        let token = routed.build_id.as_deref().and_then(|text| text.parse().ok()).filter(|_| routed.lease_id.is_some());
        Self(token.map(|token| tokio::spawn(keep(client.clone(), token))))
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

async fn keep(client: Client, token: LeaseToken) {
    let mut pause = FIRST;
    loop {
        sleep(pause).await;
        pause = match client.renew(&token).await {
            Ok(lease) => third_of_the_grace(&lease),
            Err(error) if error.is_retryable() => AGAIN,
            // It has ended, or this kilnd does not know how.
            Err(_) => return,
        };
    }
}

/// By kilnd's clock alone.
fn third_of_the_grace(lease: &LeaseView) -> Duration {
    let instant = |text: &str| text.parse::<jiff::Timestamp>().ok();
    let grace = instant(&lease.alive_until).zip(instant(&lease.renewed));
    let grace = grace.and_then(|(until, from)| Duration::try_from(until.duration_since(from)).ok());
    grace.map_or(AGAIN, |grace| (grace / 3).clamp(SHORTEST, LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_grace_within_bounds() {
        let after = |until: &str| {
            let renewed = "2026-11-29T00:00:00Z".to_owned();
            third_of_the_grace(&LeaseView { renewed, alive_until: until.to_owned(), ..LeaseView::default() }).as_secs()
        };
        assert_eq!(after("2026-11-29T00:15:00Z"), 300);
        assert_eq!(after("2026-11-29T05:00:00Z"), 600);
        assert_eq!(after("2026-11-29T00:00:01Z"), 5);
        assert_eq!(after("2026-11-28T00:00:00Z"), 30);
        assert_eq!(after("soon"), 30);
    }
}
