//! What to do next for a project: the rules of the product.
//!
//! ```text
//!            first request                     daemon answers
//!   Absent ───────────────▶ Provisioning ──▶ Starting ───▶ Warm ◀──────────────┐
//!     ▲                          ▲              ▲          │  │                │ a build came, or
//!     │                          │              │    quiet │  │ quiet, and     │ one still runs
//!     │      instance is gone or │              │          │  │ outdated       │
//!     │              out of date │              │          │  ▼                │
//!     │                          │              │◀──────── Rolling ────────────┤
//!     │                          │              │          ▼                   │
//!     │                          └──── Idle ────┘      Draining ───────────────┘
//!     │                                 ▲                  │
//!  Removing ◀── an admin removes it ────┴──────────────────┘ stopped; the cache stays
//!
//!   any step that fails ──▶ Failed ──▶ the next request, or the back-off, tries again
//! ```
//!
//! [`plan`] looks at one [`Situation`] and answers with at most one [`Step`], the phase that the project is in while
//! the step runs, why, and when to look again if nothing happens. The worker that owns the project carries the step
//! out, observes, and asks again. Every step names its objects from the key and is safe to repeat, so a crash between
//! any two steps costs nothing but the repetition.
//!
//! The rules, in the order in which they are tried; each is one function of `rules.rs`:
//!
//! 1. **A removal that began is finished** ([`Phase::Removing`]): there is nothing left that a build could use.
//! 2. **An admin's forced stop** is done at once, whoever uses the daemon: that is what the word is for.
//! 3. **A wedged daemon** ([`crate::health`]) is stopped by force and comes up again: no build runs in it any more. **One of
//!    untrusted builds that is not kept apart** is stopped by force, build or not (K7 goes before K2).
//! 4. **Somebody needs the daemon** ([`Demand::need`]: an open connection, a live lease, a request that waits, or the tier
//!    `hot`): it is brought up, one step at a time, and nothing below can stop it (K2). The tier alone gives way to rule 6,
//!    and to an admin's word. A start waits for its place among
//!    the starts of the host ([`Place`]). One that has never answered since its start, was waited for in vain, and that no
//!    lease and no connection counts on, is started anew.
//!    A cache that no daemon can open goes back to its newest good snapshot first, once; and one that somebody wants replaced is
//!    replaced before, while nothing runs on it.
//! 5. **An admin's stop or removal, or the storage's need of room**: it is stopped, and what was asked for is done.
//! 6. **A daemon of an old image, of old settings or with certificates that end** is replaced while it is quiet, and
//!    comes up again. Quiet is more than rule 4: a lease keeps its daemon from being replaced for an hour
//!    ([`Policy::roll_held`]), whatever becomes of its client.
//! 7. **The idle window is open** ([`crate::idle`]): what runs is left as it is, unless the host needs the room; what was
//!    stopped to be replaced comes up again, unless it would have to wait for its place; then what is only a copy goes.
//! 8. **Otherwise**: it is stopped. The volume is never touched (K3); what is only a copy ([`crate::key::Role::is_derived`]) is
//!    removed, its volume with it.
//! 9. **Where that leaves nothing to do**, something may be due for the cache: more room ([`crate::cache::size`]), or for its past: a snapshot ([`crate::cache::history`]), or the end of
//!    one. It changes nothing of the daemon.
//!
//! Rules 5, 6 and 8 ask the daemon first (one that has not answered since its start, which Kiln watched, is not asked: nobody
//! can have sent it a build; nor in rule 1, where nothing routes to it any more) whether a build runs in it ([`Step::CountBuilds`]): a build may have come by
//! another way than the gateway. One that cannot be asked is not stopped in peace: it is silent, and rule 3 decides.
//!
//! **A new rule** goes into `rules.rs`: a condition in its place in [`plan`] (or, if it is about every stop in peace, at the top
//! of `take_down`), a [`Reason`] of its own (`reason.rs`) with the words that people read, and a row in the tests. If it needs
//! to know something new, that is a field of [`Situation`], or of [`Policy`] if an admin may set it; if it does something new,
//! that is a [`Step`]. A rule that leaves things as they are for now says in `look_again` when its answer may change.

mod reason;
mod rules;
mod situation;
mod step;
mod upkeep;

pub use reason::Reason;
pub use rules::{Plan, plan};
pub use situation::{
    Counted, Demand, FilesSeen, InstanceSeen, Observed, Past, Place, Policy, Room, Setbacks, Situation, StopWish,
    VolumeSeen, bounds,
};
pub use step::{Done, Step, Stop};

#[cfg(doc)]
use crate::project::Phase;

#[cfg(test)]
mod tests;
