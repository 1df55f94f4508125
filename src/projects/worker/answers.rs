//! Leases, grants and refusals.

use std::time::Duration;

use kiln_domain::plan::StopWish;
use kiln_domain::{Lease, Timestamp, TokenHash};

use super::super::messages::{Granted, Held, Refusal, RefusalKind, Reply, StopRefusal, Undelivered, Waiter, Warm};
use super::Worker;
use crate::store::StoreError;

/// Between two tries to take leases from a disk that does not let itself be written to.
const FORGET_AGAIN: Duration = Duration::from_secs(10);

impl Worker {
    pub(super) fn answer_all(&mut self, warm: Warm) {
        self.prewarming = false;
        for waiter in std::mem::take(&mut self.waiters) {
            match waiter {
                Waiter::Route { token, reply } => self.grant(Some(warm), token, reply),
                Waiter::Await { reply } => drop(reply.send(Ok(warm))),
                Waiter::Connect { reply } => self.connect(warm, reply),
            }
        }
    }

    pub(super) fn refuse_all(&mut self, refusal: &Refusal) {
        self.prewarming = false;
        for waiter in std::mem::take(&mut self.waiters) {
            waiter.refuse(refusal.clone());
        }
        let retryable = matches!(refusal.kind, RefusalKind::NotNow | RefusalKind::NotAdmitted | RefusalKind::TimedOut);
        self.answer_stoppers(&Err(StopRefusal::Failed { text: refusal.text.clone(), retryable }));
    }

    pub(super) fn answer_stoppers(&mut self, answer: &Result<(), StopRefusal>) {
        for (_, stopper) in self.stoppers.drain(..) {
            drop(stopper.send(answer.clone()));
        }
    }

    /// Those who wanted it down, now that it is. Whoever wants it gone waits on.
    pub(super) fn answer_stopped(&mut self) {
        for (wish, stopper) in std::mem::take(&mut self.stoppers) {
            match wish {
                StopWish::Remove => self.stoppers.push((wish, stopper)),
                StopWish::Stop | StopWish::Force => drop(stopper.send(Ok(()))),
            }
        }
    }

    /// The lease is born here, so that a long start takes nothing of its grace, and counts from here on, in memory; the
    /// caller waits until it is on disk. Not waiting for it here is what lets the leases of many callers share one commit.
    pub(super) fn grant(&mut self, warm: Option<Warm>, token: TokenHash, reply: Reply<Granted>) {
        let (now, policy) = (self.now(), &self.shared.policy);
        // Nothing that is alive is dropped for a newcomer (C11).
        if self.leases.len() >= policy.max_leases {
            let (key, live, limit) = (self.key.clone(), self.leases.len(), policy.max_leases);
            let kind = RefusalKind::TooManyLeases { key, live, limit };
            return drop(reply.send(Err(Refusal { kind, text: "too many builds are under way".to_owned() })));
        }
        let lease = Lease::new(token.clone(), now, &policy.lease);
        self.record.builds.note(now);
        let text = match warm {
            Some(warm) => format!("a build was routed to generation {}", warm.generation.get()),
            None => "a build has its lease, and waits for the daemon".to_owned(),
        };
        let event = self.event("routed", text).by("client");
        let durable = self.shared.store.add_lease(&self.key, &lease, &self.record.builds, Some(event));
        self.leases.push(lease.clone());
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

    /// Forgets what can never count again. A clock that went back must not make a lease endless.
    pub(super) fn tidy_leases(&mut self) {
        let (now, policy) = (self.now(), self.shared.policy.lease);
        for lease in &mut self.leases {
            lease.clamp_to(now, &policy);
        }
        let expired: Vec<TokenHash> =
            self.leases.iter().filter(|lease| lease.is_expired(now)).map(|lease| lease.token.clone()).collect();
        if !expired.is_empty() {
            self.leases.retain(|lease| !lease.is_expired(now));
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
