//! A whole schedule, and many of them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Once;

use kiln::pki::Pki;

use crate::checks::Checks;
use crate::history::{Fact, Failure, History};
use crate::life::live;
use crate::profile::Profile;
use crate::rng::Rng;
use crate::world::Sim;

/// What became of one schedule.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub seed: u64,
    pub profile: &'static str,
    /// Of the whole history: equal for equal seeds.
    pub hash: u64,
    /// Entries of the history.
    pub events: usize,
    /// Things that happened from outside, of which all others follow.
    pub actions: u32,
    /// Requests that were made of kilnd.
    pub requests: u64,
    pub lives: u32,
    /// Virtual time, in milliseconds.
    pub lasted: u64,
    pub faults: BTreeMap<&'static str, u64>,
    pub failure: Option<Failure>,
    /// The last entries before the failure about the same project.
    pub story: Vec<String>,
}

/// Schedules that nobody survives are cut off here: each life is one crash, and crashes are counted.
const MOST_LIVES: u32 = 100;

/// How much of the history is told with a failure.
const STORY: usize = 40;

thread_local! {
    static PANICKED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A panic in a task is swallowed by the runtime, and must not be missed.
fn listen_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICKED.with_borrow_mut(|panicked| *panicked = Some(info.to_string()));
            before(info);
        }));
    });
}

/// What schedules share: nothing that changes.
pub struct Stage {
    pki: Pki,
    _directory: tempfile::TempDir,
}

impl Stage {
    /// # Errors
    ///
    /// When there is no room for a directory.
    pub fn new() -> Result<Self, String> {
        listen_for_panics();
        let directory = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
        let path: PathBuf = directory.path().to_owned();
        let pki = Pki::new(&path).map_err(|error| format!("no certificates: {error}"))?;
        Ok(Self { pki, _directory: directory })
    }

    /// Plays the schedule of a seed. Everything in it follows from the seed, so that it can be played again.
    pub fn play(&self, seed: u64, trace: bool) -> Outcome {
        // Neighbouring seeds must not give neighbouring streams.
        let mut rng = Rng::new(Rng::new(seed).next());
        let profile = Profile::of(&mut rng);
        let (name, actions) = (profile.name, profile.actions);
        let checks = Checks::new(&profile);
        let sim = Sim::new(rng, profile, History::new(checks, trace));
        PANICKED.set(None);
        self.play_out(&sim);
        let mut world = sim.world();
        if let Some(panic) = PANICKED.take() {
            world.record(Fact::Wrong { invariant: "K10", why: format!("a task panicked: {panic}") });
        }
        let failure = world.history.failure().cloned();
        Outcome {
            seed,
            profile: name,
            hash: world.history.hash(),
            events: world.history.entries().len(),
            actions: actions - world.profile.actions,
            requests: u64::from(world.next_request() - 1),
            lives: world.life,
            lasted: world.now(),
            faults: std::mem::take(&mut world.faults),
            story: failure.as_ref().map(|failure| world.history.story(failure, STORY)).unwrap_or_default(),
            failure,
        }
    }

    fn play_out(&self, sim: &Sim) {
        loop {
            match live(sim, &self.pki) {
                Ok(true) => return,
                Ok(false) => {}
                Err(why) => return sim.world().record(Fact::Wrong { invariant: "K4", why }),
            }
            let mut world = sim.world();
            if world.history.failure().is_some() {
                return;
            }
            if world.life >= MOST_LIVES {
                world.record(Fact::Wrong { invariant: "K10", why: "kilnd died again and again".to_owned() });
                return;
            }
            let down = world.rng.pick(&[0, 50, 500, 5_000, 60_000]).unwrap_or(500);
            world.rest(down);
        }
    }
}
