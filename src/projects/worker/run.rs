//! One run of a daemon, from its start to its end: what is known of it goes with it.

use kiln_domain::Phase;
use kiln_domain::health::Health;
use kiln_domain::plan::Counted;

/// What is known of this run of the daemon.
#[derive(Default)]
pub(super) struct Run {
    pub(super) health: Health,
    pub(super) first_answer: FirstAnswer,
    pub(super) counted: Option<Counted>,
    /// What it was found to reach, and must not.
    pub(super) leaks: Option<String>,
    /// The incarnation whose first answer was waited for in vain.
    pub(super) gave_up_on: Option<String>,
    /// Others need the room.
    pub(super) room_wanted: bool,
    /// Its volume was full, and has been given more since: of no use to this run.
    pub(super) was_full: bool,
}

impl Run {
    /// That Kiln's last life has left.
    pub(super) fn of(phase: &Phase) -> Self {
        let served = matches!(phase, Phase::Warm | Phase::Draining);
        Self { first_answer: if served { FirstAnswer::Given } else { FirstAnswer::Unknown }, ..Self::default() }
    }
}

/// What is known of a run's first answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum FirstAnswer {
    /// Somebody else started it, or it must not be asked.
    #[default]
    Unknown,
    /// It was started by this worker, and has not answered yet.
    Due,
    Given,
}
