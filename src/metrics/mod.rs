//! What Kiln counts and measures of itself, for `GET /metrics`. docs/metrics.md lists it; a test compares the two.
//!
//! Events are told by methods named after what happened, and cost an atomic addition or two. Levels (how many leases, how
//! full a disk) are read when somebody looks: whoever knows one registers a closure with [`Metrics::read_level`].
//!
//! Promises: no label takes a value that is not in an enum of this room, so the number of series is bounded whatever
//! clients send; nothing global: a [`Metrics`] is made once and handed around.
//!
//! | file | |
//! |---|---|
//! | `labels.rs` | every label with its values |
//! | `levels.rs` | what is read at a scrape |
//! | `gateway.rs` | what the gateway has counted |
//!
//! What must not be here: decisions, keys of projects, a listener.

mod gateway;
mod labels;
mod levels;

use std::fmt;
use std::time::Duration;

pub use labels::{Evicted, Fault, LeaseEnd, Outcome, PhaseLabel, Refusal, Stage, StepLabel};
pub use levels::{Count, Level};
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use labels::{Label, Pair};
use levels::Readings;

use crate::gateway::Figures;

/// From a warm route (a millisecond) to the longest wait there is.
const SECONDS: [f64; 14] = [0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

type Histograms = Family<Pair, Histogram, fn() -> Histogram>;

/// How a scrape is to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    OpenMetrics,
    /// Text format 0.0.4, which everything reads.
    Prometheus,
}

impl Format {
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }
}

/// See the module.
pub struct Metrics {
    registry: Registry,
    routes: Family<Pair, Counter>,
    route_time: Histograms,
    answers_lost: Counter,
    waits: Histograms,
    projects: Family<Pair, Gauge>,
    leases_ended: Family<Pair, Counter>,
    refusals: Family<Pair, Counter>,
    step_time: Histograms,
    step_failures: Family<Pair, Counter>,
    faults: Family<Pair, Counter>,
    evictions: Family<Pair, Counter>,
    readings: Readings,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Everything at zero, and visible: a counter that appears with its first event hides that event from `rate()`.
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("kiln"),
            routes: counters::<Outcome>(),
            route_time: histograms::<Outcome>(),
            answers_lost: Counter::default(),
            waits: histograms::<Stage>(),
            projects: gauges::<PhaseLabel>(),
            leases_ended: counters::<LeaseEnd>(),
            refusals: counters::<Refusal>(),
            step_time: histograms::<StepLabel>(),
            step_failures: counters::<StepLabel>(),
            faults: counters::<Fault>(),
            evictions: counters::<Evicted>(),
            readings: Readings::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let of = &mut self.registry;
        of.register("routes", "Answers of /route, by outcome", self.routes.clone());
        let time = self.route_time.clone();
        of.register_with_unit("route", "From a request of /route to its answer, by outcome", Unit::Seconds, time);
        let lost = self.answers_lost.clone();
        of.register("answers_lost", "Routes whose answer did not reach the client; their leases were released", lost);
        let waits = self.waits.clone();
        of.register_with_unit("wait", "What routes that were not warm waited for, by stage", Unit::Seconds, waits);
        of.register("projects", "Projects, by phase", self.projects.clone());
        of.register("leases_ended", "Leases that ended, by how", self.leases_ended.clone());
        of.register("admission_refusals", "Starts that were not admitted, by reason", self.refusals.clone());
        let steps = self.step_time.clone();
        of.register_with_unit("step", "Steps on the host, failed ones too, by step", Unit::Seconds, steps);
        of.register("step_failures", "Steps on the host that failed or hung, by step", self.step_failures.clone());
        of.register("daemon_faults", "What was found wrong with a daemon, by fault", self.faults.clone());
        of.register("evictions", "What was given up for want of room, by kind", self.evictions.clone());
        of.register("build", "The version that runs", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        of.register_collector(Box::new(self.readings.clone()));
    }

    /// `/route` was answered.
    pub fn routed(&self, outcome: Outcome, took: Duration) {
        self.routes.get_or_create(&outcome.pair()).inc();
        self.route_time.get_or_create(&outcome.pair()).observe(took.as_secs_f64());
    }

    /// An answer of `/route` did not reach its client.
    pub fn answer_lost(&self) {
        self.answers_lost.inc();
    }

    /// A route that was not warm has got past a stage of its wait.
    pub fn waited(&self, stage: Stage, span: Duration) {
        self.waits.get_or_create(&stage.pair()).observe(span.as_secs_f64());
    }

    /// A project went from one phase to another; `None`: it was not there, or is gone.
    pub fn phase_changed(&self, from: Option<PhaseLabel>, to: Option<PhaseLabel>) {
        if let Some(from) = from {
            self.projects.get_or_create(&from.pair()).dec();
        }
        if let Some(to) = to {
            self.projects.get_or_create(&to.pair()).inc();
        }
    }

    /// A lease ended.
    pub fn lease_ended(&self, how: LeaseEnd) {
        self.leases_ended.get_or_create(&how.pair()).inc();
    }

    /// A start, or a new lease, was not admitted.
    pub fn admission_refused(&self, why: Refusal) {
        self.refusals.get_or_create(&why.pair()).inc();
    }

    /// A step on the host came to its end.
    pub fn step_done(&self, step: StepLabel, took: Duration) {
        self.step_time.get_or_create(&step.pair()).observe(took.as_secs_f64());
    }

    /// A step on the host failed, or hung until its deadline.
    pub fn step_failed(&self, step: StepLabel, took: Duration) {
        self.step_done(step, took);
        self.step_failures.get_or_create(&step.pair()).inc();
    }

    /// Something was found wrong with a daemon.
    pub fn evicted(&self, kind: Evicted) {
        self.evictions.get_or_create(&kind.pair()).inc();
    }

    pub fn daemon_at_fault(&self, fault: Fault) {
        self.faults.get_or_create(&fault.pair()).inc();
    }

    /// `read` is called at each scrape, on a thread that may block; `None` leaves the level out. The last one that was
    /// registered for a level counts.
    pub fn read_level(&self, level: Level, read: impl Fn() -> Option<f64> + Send + Sync + 'static) {
        self.readings.set_level(level, Box::new(read));
    }

    /// As [`Metrics::read_level`], of something that only grows while this process lives.
    pub fn read_count(&self, count: Count, read: impl Fn() -> u64 + Send + Sync + 'static) {
        self.readings.set_count(count, Box::new(read));
    }

    /// As [`Metrics::read_level`], of all that the gateway counts; `None` of one that is gone. Whatever the closure holds lives as
    /// long as the metrics do.
    pub fn read_gateway(&self, read: impl Fn() -> Option<Figures> + Send + Sync + 'static) {
        self.readings.set_gateway(Box::new(read));
    }

    /// A scrape. Calls what was registered to be read, so it may block.
    pub fn text(&self, format: Format) -> Result<String, fmt::Error> {
        let mut text = String::new();
        match format {
            Format::OpenMetrics => text::encode(&mut text, &self.registry)?,
            Format::Prometheus => prometheus_text::encode(&mut text, &self.registry)?,
        }
        Ok(text)
    }
}

fn counters<L: Label>() -> Family<Pair, Counter> {
    let family = Family::default();
    for label in L::ALL {
        drop(family.get_or_create(&label.pair()));
    }
    family
}

fn gauges<L: Label>() -> Family<Pair, Gauge> {
    let family = Family::default();
    for label in L::ALL {
        drop(family.get_or_create(&label.pair()));
    }
    family
}

fn histograms<L: Label>() -> Histograms {
    let family: Histograms = Family::new_with_constructor(|| Histogram::new(SECONDS));
    for label in L::ALL {
        drop(family.get_or_create(&label.pair()));
    }
    family
}

#[cfg(test)]
mod tests;
