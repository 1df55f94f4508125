//! The one place that reads the wall clock.

use kiln_domain::Timestamp;

/// Where the present comes from; tests bring their own.
pub trait Clock: Send + Sync + 'static {
    fn now(&self) -> Timestamp;
}

/// The host's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(jiff::Timestamp::now().as_millisecond())
    }
}
