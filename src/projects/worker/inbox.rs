//! What a worker does with each message. Nothing here waits.

use kiln_domain::plan::StopWish;
use kiln_domain::{Identity, Key, Phase, Settings, SnapshotName, Tier, TokenHash, Verdict};
use tokio::sync::oneshot;

use super::super::messages::{Message, Refusal, RefusalKind, Releasing, Renewing, SetRefusal, StopRefusal, Waiter};
use super::super::registry::Shared;
use super::{Occasion, Stopper, Thinner, Worker};
use crate::metrics::LeaseEnd;
use crate::store::StoreError;

impl Worker {
    pub(super) fn hear(&mut self, message: Message) {
        match message {
            Message::Route { identity, token, who, reply } => {
                if let Err(refusal) = self.check(&identity) {
                    return drop(reply.send(Err(refusal)));
                }
                self.touch();
                match self.routable() {
                    Some(warm) => self.grant(Some(warm), token, &who, reply),
                    None => self.waiters.push(Waiter::Route { token, who, reply }),
                }
            }
            Message::Lease { identity, token, who, reply } => {
                if let Err(refusal) = self.check(&identity) {
                    return drop(reply.send(Err(refusal)));
                }
                self.touch();
                self.grant(self.routable(), token, &who, reply);
            }
            Message::Await { reply } => match self.routable() {
                Some(warm) => drop(reply.send(Ok(warm))),
                None => self.waiters.push(Waiter::Await { reply }),
            },
            Message::Connect { reply } => {
                if let Some(warm) = self.routable() {
                    return self.connect(warm, reply);
                }
                // As a route does: a start that outlasts this client's patience is for the client's next try.
                self.touch();
                self.waiters.push(Waiter::Connect { reply });
            }
            Message::Prewarm { identity, reply } => {
                let answer = self.check(&identity).map(|()| self.routable());
                if answer.is_ok() {
                    self.touch_on_disk();
                    if !self.waiters.iter().any(|waiter| matches!(waiter, Waiter::Prewarm)) {
                        self.waiters.push(Waiter::Prewarm);
                    }
                }
                drop(reply.send(answer));
            }
            Message::Renew { token, reply } => drop(reply.send(self.renew(&token))),
            Message::Complete { token, how, reply } => {
                let released = self.complete(&token, how);
                match reply {
                    Some(reply) => self.answer_release(reply, released),
                    // Nobody would try again if it could not be written.
                    None if released.is_some() => self.forget_on_disk(vec![token]),
                    None => {}
                }
            }
            Message::CompleteOldest { reply } => {
                let oldest = self.leases.iter().min_by_key(|lease| lease.created).map(|lease| lease.token.clone());
                let released = oldest.and_then(|token| self.complete(&token, LeaseEnd::Nameless));
                self.answer_release(reply, released);
            }
            Message::StillHeld { mut lease } => {
                // The clock may have leapt while it was nobody's.
                lease.clamp_to(self.now(), &self.shared.policy.lease);
                // A worker made since then has read it from the disk.
                if !self.leases.iter().any(|known| known.token == lease.token) {
                    self.leases.push(lease);
                    self.desk.load.set_leases(self.leases.len());
                }
            }
            Message::Stop { wish, force, why, reply } => self.hear_stop(Stopper { wish, force, why, reply }),
            Message::Set { change, reply } => self.set(change, reply),
            Message::Why { reply } => match self.explanation() {
                Some(explanation) => drop(reply.send(explanation)),
                None => self.askers.push(reply),
            },
            Message::Snapshot { reply } => self.snapshot_askers.push(reply),
            Message::Thin { keep, reply } => self.thinners.push(Thinner { keep, reply }),
            Message::Judged { snapshot, verdict } => self.judged(snapshot, verdict),
            Message::HostChanged => self.something_happened(Occasion::Event),
            Message::Suspect => self.run.health.suspect(),
            Message::RoomWanted => self.run.room_wanted = true,
            Message::Nudge => {}
            Message::SetEnded { wanted, before } => self.set_ended(&wanted, before),
        }
    }

    /// Whoever has gone meanwhile does not try again if it could not be written.
    fn answer_release(&self, reply: oneshot::Sender<Option<Releasing>>, released: Option<Releasing>) {
        if let Err(Some(Releasing { lease, .. })) = reply.send(released) {
            self.forget_on_disk(vec![lease.token]);
        }
    }

    /// A key that two identities share is refused, never shared (K1); and what is being removed takes nobody.
    fn check(&self, identity: &Identity) -> Result<(), Refusal> {
        if self.record.identity() != *identity {
            let stored = Box::new(self.record.spec.clone());
            let text = StoreError::OtherIdentity { key: self.key.clone(), stored }.to_string();
            return Err(Refusal { kind: RefusalKind::OtherIdentity, text });
        }
        if self.record.phase == Phase::Removing {
            let derived = self.record.key.role().is_derived();
            let kind = if derived { RefusalKind::Leaving } else { RefusalKind::NotNow };
            let text = "the project is being removed; ask again when that is done".to_owned();
            return Err(Refusal { kind, text });
        }
        Ok(())
    }

    pub(super) fn touch(&mut self) {
        self.record.last_activity = self.now();
    }

    /// Activity that no other write takes along to the disk.
    pub(super) fn touch_on_disk(&mut self) {
        self.touch();
        drop(self.shared.store.save_project(&self.record, None));
    }

    fn renew(&mut self, token: &TokenHash) -> Option<Renewing> {
        let now = self.now();
        let lease = self.leases.iter_mut().find(|lease| lease.token == *token)?;
        let in_time = lease.renew(now);
        let lease = lease.clone();
        let renewed = in_time.then(|| self.shared.store.renew_lease(token, now));
        Some(Renewing { lease, renewed })
    }

    /// It counts no more from here on; as with its making, whoever wants to waits for the disk.
    fn complete(&mut self, token: &TokenHash, how: LeaseEnd) -> Option<Releasing> {
        let at = self.leases.iter().position(|lease| lease.token == *token)?;
        let lease = self.leases.remove(at);
        self.desk.load.set_leases(self.leases.len());
        self.touch();
        let why = match how {
            LeaseEnd::Undelivered => "its answer could not be delivered",
            LeaseEnd::Nameless => "a client that names no build said so",
            LeaseEnd::Moved => "it went to another daemon of its project",
            _ => "its client said so",
        };
        self.shared.metrics.lease_ended(how);
        let event = self.event("completed", format!("a build ended: {why}")).by("client");
        Some(Releasing { lease, removed: self.shared.store.remove_lease(token, self.now(), Some(event)) })
    }

    fn hear_stop(&mut self, stopper: Stopper) {
        let Stopper { wish, force, why, reply } = stopper;
        let demand = self.demand();
        let hot = self.settings.tier == Some(Tier::Hot);
        if wish == StopWish::Evict && (hot || demand.waiters > 0) {
            drop(reply.send(Err(StopRefusal::Busy("it is hot, or somebody waits for it".to_owned()))));
        } else if wish == StopWish::Stop && hot {
            let text = format!("it is hot and would come up again: `kiln set {} --tier warm` first", self.key);
            drop(reply.send(Err(StopRefusal::Busy(text))));
        } else if !force && demand.is_busy(self.now(), &self.shared.policy) {
            let need = demand.need(&self.settings, self.now(), &self.shared.policy);
            let text = need.map(|need| need.to_string()).unwrap_or_default();
            drop(reply.send(Err(StopRefusal::Busy(text))));
        } else {
            // It is asked anew which builds run: an answer from before is not about this moment.
            self.run.counted = None;
            let (text, by) = match wish {
                StopWish::Stop => ("a stop was asked for".to_owned(), "admin"),
                StopWish::Remove => ("its removal was asked for".to_owned(), "admin"),
                StopWish::Force => ("a forced stop was asked for".to_owned(), "admin"),
                StopWish::Reset => ("an empty cache was asked for".to_owned(), "admin"),
                StopWish::Rollback(to) => (format!("its cache as of {to} was asked for"), "admin"),
                StopWish::Evict => ("its cache has to make room".to_owned(), "kiln"),
            };
            self.log_event(self.event("asked", text).by(by));
            self.stoppers.push(Stopper { wish, force, why, reply });
        }
    }

    /// Takes effect at once where it is a rule of ours, and by a roll where the daemon has to be made anew.
    fn set(&mut self, change: Box<dyn FnOnce(&mut Settings) + Send>, reply: oneshot::Sender<Result<(), SetRefusal>>) {
        let mut own = self.record.settings.clone();
        change(&mut own);
        // Together with what it inherits: a window on a hot project is a contradiction wherever each comes from.
        let before = std::mem::replace(&mut self.record.settings, own.clone());
        let effective = self.shared.settings(&self.record);
        let sound = own.check().and_then(|()| own.check_for(self.key.role())).and_then(|()| effective.check());
        let host = &self.shared.host_size;
        let sound = sound.and_then(|()| own.check_against(host)).and_then(|()| own.check_limits(&before, host));
        if let Err(error) = sound {
            self.record.settings = before;
            return drop(reply.send(Err(SetRefusal::Bad(error))));
        }
        let tier = effective.tier.unwrap_or(Tier::Warm).name();
        let event = self.event("set", format!("its settings were changed; it is {tier}")).by("admin");
        let saved = self.shared.store.save_project(&self.record, Some(event));
        self.sets += 1;
        let (shared, key, mailbox) = (self.shared.clone(), self.key.clone(), self.desk.own_mailbox.clone());
        tokio::spawn(async move {
            let outcome = saved.await;
            // Before the reply: whoever has it finds the settings in force.
            let before = outcome.is_err().then_some(before);
            drop(mailbox.send(Message::SetEnded { wanted: own, before }).await);
            if outcome.is_ok() {
                describe(&shared, &key).await;
            }
            drop(reply.send(outcome.map_err(SetRefusal::Store)));
        });
    }

    /// They count only once they are on the disk. Of several changes at a time the last is the one that counts.
    fn set_ended(&mut self, wanted: &Settings, before: Option<Settings>) {
        self.sets = self.sets.saturating_sub(1);
        if self.record.settings != *wanted {
            return;
        }
        if let Some(before) = before {
            self.record.settings = before;
        }
        self.settings = self.shared.settings(&self.record);
        self.desk.load.set_members(self.settings.fan_out);
        // What bounds it may be another now.
        self.room.measured = None;
        // What of it is out of date now is seen by looking.
        self.something_happened(Occasion::Routine);
    }

    fn judged(&mut self, name: SnapshotName, verdict: Verdict) {
        self.judged = Some((name, verdict));
        let known = self.snapshots.iter_mut().flatten().find(|snapshot| snapshot.name == name);
        if let Some(snapshot) = known {
            snapshot.verdict = verdict;
        }
        if verdict == Verdict::Bad {
            let text = format!("{name} is no good: it is damaged");
            self.log_event(self.event("snapshot-bad", text));
        }
    }

    /// The end of a connection is activity: the idle window starts there.
    pub(super) fn note_connections(&mut self) {
        let count = self.desk.connections.count();
        if count < self.last_connections {
            self.touch_on_disk();
        }
        self.last_connections = count;
    }
}

/// Writes the settings that the disk has beside the cache, so that the last of several is the last there, too. What fails here
/// is made good by the next start.
async fn describe(shared: &Shared, key: &Key) {
    let written = async {
        match shared.store.project(key).await {
            Ok(Some(record)) => shared.effects.describe(&record).await.map_err(|error| error.to_string()),
            Ok(None) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    };
    let written = tokio::time::timeout(shared.deadlines.observe, written).await;
    if let Err(error) = written.unwrap_or_else(|_| Err("it took too long".to_owned())) {
        tracing::warn!(%key, error, "its settings are not written beside its cache");
    }
}
