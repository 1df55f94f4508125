//! Places for connections: so many at a time on each door, and one for every newcomer.
//!
//! ```text
//!   newcomer ──▶ a free place ─ none ─▶ that of the client that keeps us waiting longest ─ none ─▶ the reserve
//! ```
//!
//! A connection on which a request is carried out is never closed for another. One on which we wait for the client (for a
//! request, its head or its body) may be: an honest client is done with that within moments, so that it is hit only if as
//! many connections as there are places came after it meanwhile. Whoever opens many and says nothing closes his own first.
//!
//! If something is carried out on all of them (a thousand routes that wait, say), there is the reserve, for what is short:
//! `/healthz`, a release, a route that is warm. What takes longer there is told to come again (`connection`). So nobody can
//! keep others from being answered; a flood can only make them try again.
//!
//! Each door has a room of its own: what happens on TCP takes nothing away from the unix socket.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// How many connections a door takes at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub(super) places: usize,
    pub(super) reserve: usize,
}

/// Clones are the same room.
#[derive(Clone)]
pub(super) struct Room {
    state: Arc<Mutex<State>>,
    freed: Arc<Notify>,
}

struct State {
    places: Part,
    reserve: Part,
    /// Grows with every turn of a connection to its client.
    next: u64,
}

struct Part {
    size: usize,
    taken: usize,
    /// The connections that wait for their client, the longest first.
    waiting: BTreeMap<u64, CancellationToken>,
}

impl Part {
    fn new(size: usize) -> Self {
        Self { size, taken: 0, waiting: BTreeMap::new() }
    }

    fn may_be_entered(&self) -> bool {
        self.taken < self.size || !self.waiting.is_empty()
    }

    /// One more is in it; where all places are taken, the one that waits longest has to go. False: there is none.
    fn enter(&mut self) -> bool {
        if self.taken < self.size {
            self.taken += 1;
            return true;
        }
        let longest = self.waiting.pop_first();
        if let Some((_, evicted)) = &longest {
            evicted.cancel();
        }
        longest.is_some()
    }
}

impl State {
    fn part(&mut self, is_reserve: bool) -> &mut Part {
        if is_reserve { &mut self.reserve } else { &mut self.places }
    }
}

impl Room {
    pub(super) fn new(size: Size) -> Self {
        let state = State { places: Part::new(size.places), reserve: Part::new(size.reserve), next: 0 };
        Self { state: Arc::new(Mutex::new(state)), freed: Arc::new(Notify::new()) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until a newcomer would get a place. For the one task that lets them in.
    pub(super) async fn has_place(&self) {
        loop {
            {
                let state = self.state();
                if state.places.may_be_entered() || state.reserve.may_be_entered() {
                    return;
                }
            }
            self.freed.notified().await;
        }
    }

    /// A place for a client that is there. After [`Room::has_place`]; whoever began a request in between is not closed for
    /// it, and the reserve holds one more.
    pub(super) fn enter(&self) -> Place {
        let mut state = self.state();
        let is_reserve = !state.places.enter();
        if is_reserve && !state.reserve.enter() {
            state.reserve.taken += 1;
        }
        drop(state);
        let place = Place { room: self.clone(), is_reserve, evicted: CancellationToken::new(), turn: Mutex::new(None) };
        place.waits();
        place
    }

    /// Closes the connection that waits longest: the process has no room for another.
    pub(super) fn make_room(&self) {
        let mut state = self.state();
        let State { places, reserve, .. } = &mut *state;
        for part in [places, reserve] {
            if let Some((_, evicted)) = part.waiting.pop_first() {
                part.taken -= 1;
                return evicted.cancel();
            }
        }
    }
}

/// A connection's own. Given back when dropped.
pub(super) struct Place {
    room: Room,
    is_reserve: bool,
    evicted: CancellationToken,
    /// Under which it waits for its client.
    turn: Mutex<Option<u64>>,
}

impl Place {
    /// Whether it is for short requests only.
    pub(super) fn is_reserve(&self) -> bool {
        self.is_reserve
    }

    /// Cancelled when another has got this place.
    pub(super) fn evicted(&self) -> CancellationToken {
        self.evicted.clone()
    }

    /// From now on it is the client that we wait for.
    pub(super) fn waits(&self) {
        let mut turn = self.turn();
        let mut state = self.room.state();
        // One whose place has gone to another already stays on its way out.
        if self.evicted.is_cancelled() {
            return;
        }
        let next = state.next;
        state.next += 1;
        let part = state.part(self.is_reserve);
        if let Some(before) = turn.replace(next) {
            part.waiting.remove(&before);
        }
        part.waiting.insert(next, self.evicted.clone());
        drop(state);
        self.room.freed.notify_one();
    }

    /// From now on the client waits for us.
    pub(super) fn works(&self) {
        if let Some(turn) = self.turn().take() {
            self.room.state().part(self.is_reserve).waiting.remove(&turn);
        }
    }

    fn turn(&self) -> MutexGuard<'_, Option<u64>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let turn = self.turn().take();
        let mut state = self.room.state();
        let part = state.part(self.is_reserve);
        if let Some(turn) = turn {
            part.waiting.remove(&turn);
        }
        // Else its place is somebody else's already.
        if !self.evicted.is_cancelled() {
            part.taken -= 1;
        }
        drop(state);
        self.room.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(places: usize, reserve: usize) -> Room {
        Room::new(Size { places, reserve })
    }

    fn has_place(room: &Room) -> bool {
        use futures_util::FutureExt as _;
        room.has_place().now_or_never().is_some()
    }

    #[test]
    fn a_newcomer_gets_the_place_of_whoever_keeps_us_waiting_longest() {
        let room = room(3, 1);
        let (first, second, third) = (room.enter(), room.enter(), room.enter());
        first.works();
        third.waits();
        second.waits();
        let newcomer = room.enter();
        let gone = [&first, &second, &third, &newcomer].map(|place| place.evicted().is_cancelled());
        assert_eq!(gone, [false, false, true, false], "the second has shown itself since");
        drop(third);
        assert!(!newcomer.is_reserve() && has_place(&room));
        first.waits();
        drop(room.enter());
        assert!(second.evicted().is_cancelled() && !first.evicted().is_cancelled(), "it waits since just now");
        // One that is on its way out takes no place again.
        second.waits();
        second.works();
        drop((first, second, newcomer));
        let state = room.state();
        assert_eq!((state.places.taken, state.places.waiting.len(), state.reserve.taken), (0, 0, 0));
    }

    #[test]
    fn where_all_work_there_is_the_reserve_and_then_a_wait() {
        let room = room(2, 1);
        let busy = [room.enter(), room.enter()];
        busy.iter().for_each(Place::works);
        let short = room.enter();
        assert!(short.is_reserve() && has_place(&room), "it keeps us waiting");
        short.works();
        assert!(!has_place(&room));
        assert!(busy.iter().all(|place| !place.evicted().is_cancelled()));
        busy[1].waits();
        assert!(has_place(&room));
        let next = room.enter();
        assert!(busy[1].evicted().is_cancelled() && !next.is_reserve());
        drop(short);
        assert!(has_place(&room));
    }

    #[test]
    fn a_process_without_descriptors_closes_one_that_waits() {
        let room = room(2, 1);
        let (busy, idle) = (room.enter(), room.enter());
        busy.works();
        room.make_room();
        room.make_room();
        assert_eq!((busy.evicted().is_cancelled(), idle.evicted().is_cancelled()), (false, true));
        drop((busy, idle));
        assert_eq!(room.state().places.taken, 0);
    }
}
