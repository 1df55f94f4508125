//! Which image our alias names, remembered between looks: so that telling an older instance costs no request of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tokio::sync::Mutex;

use super::client::{ApiError, Client};

/// Events tell of a change at once; this is for one that nobody told of.
const AGE: Duration = Duration::from_mins(1);
/// A question that was not answered is soon asked again.
const AGE_OF_FAILURE: Duration = Duration::from_secs(5);
/// A look must not wait long for what it can do without.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Deserialize)]
struct Target {
    target: String,
}

struct Known {
    fingerprint: Option<String>,
    until: Instant,
    /// Of [`Alias::changes`], before it was asked.
    changes: u64,
}

pub(super) struct Alias {
    client: Client,
    path: String,
    changes: AtomicU64,
    known: Mutex<Option<Known>>,
}

impl Alias {
    pub(super) fn new(client: Client, name: &str) -> Self {
        let path = format!("/1.0/images/aliases/{name}");
        Self { client, path, changes: AtomicU64::new(0), known: Mutex::new(None) }
    }

    /// It may name another image from now on.
    pub(super) fn forget(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// `None` when there is no such alias, or when it cannot be found out now.
    pub(super) async fn fingerprint(&self) -> Option<String> {
        // Held while Incus is asked: many looks at once ask once.
        let mut known = self.known.lock().await;
        let (now, changes) = (Instant::now(), self.changes.load(Ordering::Acquire));
        if let Some(known) = known.as_ref().filter(|known| known.changes == changes && now < known.until) {
            return known.fingerprint.clone();
        }
        let asked = tokio::time::timeout(PATIENCE, self.client.get::<Target>(&self.path)).await;
        let (fingerprint, age) = match asked {
            Ok(Ok(found)) => (Some(found.target), AGE),
            Ok(Err(ApiError::NotFound(_))) => (None, AGE),
            Ok(Err(error)) => {
                tracing::debug!(%error, "which image is the current one cannot be found out");
                (None, AGE_OF_FAILURE)
            }
            Err(_) => (None, AGE_OF_FAILURE),
        };
        *known = Some(Known { fingerprint: fingerprint.clone(), until: Instant::now() + age, changes });
        fingerprint
    }
}
