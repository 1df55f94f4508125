//! The one place that reads the wall clock, and how an instant is written.

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

/// RFC 3339 in UTC; the epoch for what no calendar holds.
pub fn rfc3339(at: Timestamp) -> String {
    jiff::Timestamp::from_millisecond(at.as_millis()).unwrap_or(jiff::Timestamp::UNIX_EPOCH).to_string()
}
