//! Is it ready? Asked with a real call, until it is or time is up.

use std::time::Duration;

use async_trait::async_trait;
use thiserror::Error;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::control::{Control, ControlError, DaemonTarget};

#[derive(Debug, Error)]
pub enum ProbeError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("buildkitd answers but has no worker: its log says why (runc is missing, for one)")]
    NoWorker,
    #[error("gave up after {} s waiting for buildkitd to answer ListWorkers", .after.as_secs())]
    GaveUp {
        after: Duration,
        #[source]
        last: Option<Box<ProbeError>>,
    },
}

impl ProbeError {
    /// Whether it is worth asking again.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Control(error) => error.is_retryable(),
            Self::NoWorker => true,
            Self::GaveUp { .. } => false,
        }
    }
}

/// One question; tests bring their own answers.
#[async_trait]
pub trait DaemonProbe: Send + Sync + 'static {
    /// `Ok` when the daemon can build now. Waits for an answer until `deadline` at most.
    async fn serving(&self, target: &DaemonTarget, deadline: Instant) -> Result<(), ProbeError>;

    /// How many builds are going on in the daemon; see [`Control::builds`]. Asked, not assumed: before a stop, whatever
    /// leases and connections say.
    async fn builds(&self, target: &DaemonTarget, deadline: Instant) -> Result<u32, ProbeError>;

    /// Has the daemon measure what it has not measured yet; to be called before it is stopped.
    ///
    /// buildkitd forgets the size of a record that a build has written to. Its garbage collection, a second after the
    /// next start, measures such records and locks them meanwhile; and a build that finds its cache mount locked gets an
    /// empty one (BuildKit v0.34, `cache/manager.go`). Sizes that are known before the stop are kept.
    async fn settle(&self, target: &DaemonTarget, deadline: Instant) -> Result<(), ProbeError>;
}

/// Asks buildkitd itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct GrpcProbe;

#[async_trait]
impl DaemonProbe for GrpcProbe {
    async fn serving(&self, target: &DaemonTarget, deadline: Instant) -> Result<(), ProbeError> {
        let mut control = Control::connect(target, deadline).await?;
        if control.workers(deadline).await?.is_empty() { Err(ProbeError::NoWorker) } else { Ok(()) }
    }

    async fn builds(&self, target: &DaemonTarget, deadline: Instant) -> Result<u32, ProbeError> {
        Ok(Control::connect(target, deadline).await?.builds(deadline).await?)
    }

    async fn settle(&self, target: &DaemonTarget, deadline: Instant) -> Result<(), ProbeError> {
        // Asking for it makes it measure.
        Control::connect(target, deadline).await?.disk_usage(deadline).await?;
        Ok(())
    }
}

/// Between two attempts: a refused connection costs next to nothing, and each millisecond is one of somebody's wait.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Returns as soon as the daemon serves, or with the last reason when `patience` is over. A certificate that one side
/// refuses ends it at once.
///
/// An attempt may take all the time that is left: buildkitd listens before it can serve, and a connection that waits in
/// its queue is answered in the very moment that it can. A daemon that dies meanwhile resets it.
pub async fn await_serving(
    probe: &dyn DaemonProbe,
    target: &DaemonTarget,
    patience: Duration,
) -> Result<(), ProbeError> {
    let deadline = Instant::now() + patience;
    let mut pause = FIRST_PAUSE;
    let mut last = None;
    loop {
        match timeout_at(deadline, probe.serving(target, deadline)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) if !error.is_retryable() => return Err(error),
            Ok(Err(error)) => last = Some(Box::new(error)),
            Err(_) => {}
        }
        let next = Instant::now() + pause;
        if next >= deadline {
            return Err(ProbeError::GaveUp { after: patience, last });
        }
        sleep_until(next).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::control::ClientTls;
    use super::*;
    use crate::pki::Pki;
    use kiln_domain::Timestamp;

    struct Scripted {
        asked: AtomicUsize,
        answer: fn(usize) -> Result<(), ProbeError>,
    }

    #[async_trait]
    impl DaemonProbe for Scripted {
        async fn serving(&self, _: &DaemonTarget, _: Instant) -> Result<(), ProbeError> {
            (self.answer)(self.asked.fetch_add(1, Ordering::SeqCst))
        }

        async fn builds(&self, _: &DaemonTarget, _: Instant) -> Result<u32, ProbeError> {
            Ok(0)
        }

        async fn settle(&self, _: &DaemonTarget, _: Instant) -> Result<(), ProbeError> {
            Ok(())
        }
    }

    fn target() -> DaemonTarget {
        let state = tempfile::tempdir().expect("a directory");
        let key = "pbcce5b6205652dd7".parse().expect("a key");
        let now = Timestamp::from_millis(1_800_000_000_000);
        let pki = Pki::new(state.path()).expect("pki");
        let mine = pki.issue_credential(&key, now, now.plus(Duration::from_mins(1))).expect("issued");
        let tls = ClientTls::new(&mine.ca, &mine.cert, &mine.key).expect("usable");
        DaemonTarget { address: "127.0.0.1:1".parse().expect("an address"), server_name: "d.example".to_owned(), tls }
    }

    async fn ask(answer: fn(usize) -> Result<(), ProbeError>) -> (Result<(), ProbeError>, usize) {
        let probe = Scripted { asked: AtomicUsize::new(0), answer };
        let outcome = await_serving(&probe, &target(), Duration::from_secs(1)).await;
        (outcome, probe.asked.load(Ordering::SeqCst))
    }

    #[tokio::test(start_paused = true)]
    async fn asks_until_it_serves() {
        let (outcome, asked) = ask(|n| if n < 5 { Err(ProbeError::NoWorker) } else { Ok(()) }).await;
        assert!(outcome.is_ok());
        assert_eq!(asked, 6);
    }

    #[tokio::test(start_paused = true)]
    async fn gives_up_with_the_last_reason() {
        let start = Instant::now();
        let (outcome, asked) = ask(|_| Err(ProbeError::NoWorker)).await;
        assert!(
            matches!(outcome, Err(ProbeError::GaveUp { last: Some(last), .. }) if matches!(*last, ProbeError::NoWorker))
        );
        assert!(start.elapsed() <= Duration::from_secs(1), "{:?}", start.elapsed());
        assert!((40..=60).contains(&asked), "asked {asked} times");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_certificate_is_not_waited_for() {
        let refused = |_| {
            let address = "127.0.0.1:1".parse().expect("an address");
            Err(ControlError::TlsRefused { address, source: rustls::Error::DecryptError }.into())
        };
        let (outcome, asked) = ask(refused).await;
        assert!(matches!(outcome, Err(ProbeError::Control(ControlError::TlsRefused { .. }))));
        assert_eq!(asked, 1);
    }

    #[tokio::test]
    async fn nobody_there_is_not_reachable() {
        let outcome = GrpcProbe.serving(&target(), Instant::now() + Duration::from_secs(5)).await;
        assert!(matches!(outcome, Err(ProbeError::Control(ControlError::NotReachable { .. }))), "{outcome:?}");
    }
}
