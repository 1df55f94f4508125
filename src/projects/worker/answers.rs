//! Leases, grants and refusals.

use std::time::Duration;

use kiln_domain::plan::{InstanceSeen, Observed, StopWish, VolumeSeen};
use kiln_domain::{Lease, Timestamp, TokenHash};

use super::super::handle::Who;
use super::super::messages::{Granted, Held, Refusal, RefusalKind, Reply, StopRefusal, Undelivered, Waiter, Warm};
use super::{StopReply, Stopper, Worker};
use crate::metrics::{self, LeaseEnd};
use crate::store::StoreError;

/// Between two tries to take leases from a disk that does not let itself be written to.
const FORGET_AGAIN: Duration = Duration::from_secs(10);

/// Those who wanted it down, from when it is until that is recorded: what they read then says so, too.
#[derive(Default)]
pub(super) struct Stopped(Vec<StopReply>);

impl Stopped {
    /// Whoever wants it gone waits on.
    pub(super) fn take_from(&mut self, stoppers: &mut Vec<Stopper>, seen: &Observed) {
        let empty = seen.volume == VolumeSeen::Absent;
        let gone = empty && seen.instance == InstanceSeen::Absent;
        for stopper in std::mem::take(stoppers) {
            match stopper.wish {
                StopWish::Stop | StopWish::Force => self.0.push(stopper.reply),
                StopWish::Reset if empty => self.0.push(stopper.reply),
                StopWish::Evict if gone => self.0.push(stopper.reply),
                _ => stoppers.push(stopper),
            }
        }
    }

    pub(super) fn answer(&mut self) {
        for stopper in self.0.drain(..) {
            drop(stopper.send(Ok(())));
        }
    }
}

impl Worker {
    pub(super) fn answer_all(&mut self, warm: Warm) {
        for waiter in std::mem::take(&mut self.waiters) {
            match waiter {
                Waiter::Route { token, who, reply } => self.grant(Some(warm), token, &who, reply),
                Waiter::Await { reply } => drop(reply.send(Ok(warm))),
                Waiter::Prewarm => {}
                Waiter::Connect { reply } => self.connect(warm, reply),
            }
        }
    }

    pub(super) fn refuse_all(&mut self, refusal: &Refusal) {
        for waiter in std::mem::take(&mut self.waiters) {
            waiter.refuse(refusal.clone());
        }
        let text = refusal.text.clone();
        let refusal = match refusal.kind {
            RefusalKind::NoRoom => StopRefusal::NoRoom(text),
            RefusalKind::NotNow | RefusalKind::NotAdmitted | RefusalKind::TimedOut => {
                StopRefusal::Failed { text, retryable: true }
            }
            _ => StopRefusal::Failed { text, retryable: false },
        };
        self.answer_stoppers(&Err(refusal));
    }

    pub(super) fn answer_stoppers(&mut self, answer: &Result<(), StopRefusal>) {
        for stopper in self.stoppers.drain(..) {
            drop(stopper.reply.send(answer.clone()));
        }
    }

    /// The lease is born here, so that a long start takes nothing of its grace, and counts from here on, in memory; the
    /// caller waits until it is on disk. Not waiting for it here is what lets the leases of many callers share one commit.
    pub(super) fn grant(&mut self, warm: Option<Warm>, token: TokenHash, who: &Who, reply: Reply<Granted>) {
        let (now, policy) = (self.now(), &self.shared.policy);
        // Nothing that is alive is dropped for a newcomer (C11).
        let connected = self.desk.connections.count() > 0;
        let live = self.leases.iter().filter(|lease| lease.is_alive(now, connected, &policy.lease)).count();
        if live >= policy.max_leases {
            let (key, limit) = (self.key.clone(), policy.max_leases);
            self.shared.metrics.admission_refused(metrics::Refusal::Leases);
            let kind = RefusalKind::TooManyLeases { key, live, limit };
            return drop(reply.send(Err(Refusal { kind, text: "too many builds are under way".to_owned() })));
        }
        let lease = Lease::new(token.clone(), now, &policy.lease);
        self.record.builds.note(now);
        let text = match warm {
            Some(warm) => format!("a build was routed to generation {}", warm.generation.get()),
            None => "a build has its lease, and waits for the daemon".to_owned(),
        };
        let event = self.event("routed", text).by(who.as_deref().map_or_else(|| "client".to_owned(), str::to_owned));
        let durable = self.shared.store.add_lease(&self.key, &lease, &self.record.builds, Some(event));
        self.leases.push(lease.clone());
        self.desk.load.set_leases(self.leases.len());
        let undelivered = Undelivered::new(self.desk.own_mailbox.clone(), token);
        // A caller that has gone drops the grant, and that releases the lease.
        drop(reply.send(Ok(Granted { warm, lease, durable, undelivered })));
    }

    pub(super) fn connect(&mut self, warm: Warm, reply: Reply<(Warm, Held)>) {
        let held = self.desk.connections.hold(self.desk.own_mailbox.clone());
        // A caller that has gone drops the hold with the answer.
        drop(reply.send(Ok((warm, held))));
        self.note_connections();
    }

    /// Forgets what can never count again.
    pub(super) fn tidy_leases(&mut self) {
        let now = self.now();
        let expired: Vec<TokenHash> =
            self.leases.iter().filter(|lease| lease.is_expired(now)).map(|lease| lease.token.clone()).collect();
        if !expired.is_empty() {
            self.leases.retain(|lease| !lease.is_expired(now));
            self.desk.load.set_leases(self.leases.len());
            for _ in &expired {
                self.shared.metrics.lease_ended(LeaseEnd::Expired);
            }
            let text = format!("{} lease(s) reached the maximum build age", expired.len());
            self.forget_on_disk(expired);
            let event = self.event("expired", text);
            self.log_event(event);
        }
    }

    /// From the disk as well, and not only if it has room at this moment. Nobody waits for it, this worker neither.
    pub(super) fn forget_on_disk(&self, tokens: Vec<TokenHash>) {
        let store = self.shared.store.clone();
        tokio::spawn(async move {
            loop {
                match store.forget_leases(tokens.clone()).await {
                    Ok(_) | Err(StoreError::Closed) => return,
                    Err(error) => tracing::debug!(%error, "leases that are over are still on the disk"),
                }
                tokio::time::sleep(FORGET_AGAIN).await;
            }
        });
    }

    pub(super) fn next_expiry(&self) -> Option<Timestamp> {
        self.leases.iter().map(|lease| lease.expires).min()
    }
}
