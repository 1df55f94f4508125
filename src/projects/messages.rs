//! What a worker is told, who waits for its daemon, and what they get.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_domain::cache::HistoryPolicy;
use kiln_domain::explain::Explanation;
use kiln_domain::plan::StopWish;
use kiln_domain::{Generation, Identity, Key, Lease, Phase, Settings, Snapshot, SnapshotName, TokenHash, Verdict};
use tokio::sync::{mpsc, oneshot};

use super::handle::Who;
use crate::metrics::LeaseEnd;
use crate::store::{Commit, StoreError};

/// What a worker is told. Whoever wants an answer sends a reply along.
pub(super) enum Message {
    /// A lease with a daemon that answers: the reply comes when both are there.
    Route {
        identity: Identity,
        token: TokenHash,
        who: Who,
        reply: Reply<Granted>,
    },
    /// A lease now, with or without a daemon; whoever holds it comes back for the daemon.
    Lease {
        identity: Identity,
        token: TokenHash,
        who: Who,
        reply: Reply<Granted>,
    },
    /// Bring it up, without a lease; answers at once whether it is up already.
    Prewarm {
        identity: Identity,
        reply: oneshot::Sender<Result<Option<Warm>, Refusal>>,
    },
    /// The daemon, for somebody who has a lease.
    Await {
        reply: Reply<Warm>,
    },
    Connect {
        reply: Reply<(Warm, Held)>,
    },
    /// The client of a lease is there. The reply is `None` if there is no such lease.
    Renew {
        token: TokenHash,
        reply: oneshot::Sender<Option<Renewing>>,
    },
    /// Release a lease; the reply is `None` if there is no such lease.
    Complete {
        token: TokenHash,
        how: LeaseEnd,
        reply: Option<oneshot::Sender<Option<Releasing>>>,
    },
    /// Release the oldest lease, as the reference's nameless release does.
    CompleteOldest {
        reply: oneshot::Sender<Option<Releasing>>,
    },
    /// Its release could not be written, so it counts as before, and can be released again.
    StillHeld {
        lease: Lease,
    },
    Stop {
        wish: StopWish,
        /// Also of one that is busy.
        force: bool,
        /// What the journal says when it is done, beyond what is said of each.
        why: Option<String>,
        reply: oneshot::Sender<Result<(), StopRefusal>>,
    },
    /// Replace the project's own settings by what `change` makes of them.
    Set {
        change: Box<dyn FnOnce(&mut Settings) + Send>,
        reply: oneshot::Sender<Result<(), SetRefusal>>,
    },
    /// Settings are on the disk, and count from now on; or they could not be written, and those `before` count on.
    SetEnded {
        wanted: Settings,
        before: Option<Settings>,
    },
    Why {
        reply: oneshot::Sender<Explanation>,
    },
    /// Take a snapshot now, unless nothing was written since the newest; the reply is the newest then.
    Snapshot {
        reply: oneshot::Sender<Result<Option<Snapshot>, StopRefusal>>,
    },
    /// Look which snapshots there are, and give up those that do not have to be kept.
    Thin {
        keep: HistoryPolicy,
        reply: oneshot::Sender<Result<(), StopRefusal>>,
    },
    /// It was tried out.
    Judged {
        snapshot: SnapshotName,
        verdict: Verdict,
    },
    /// Something happened to the instance, or to the cache: look again.
    HostChanged,
    /// Somebody could not reach the daemon.
    Suspect,
    /// Others need the room, if nobody needs the daemon.
    RoomWanted,
    /// Look at your counts and your place again.
    Nudge,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StopRefusal {
    Busy(String),
    /// Somebody has to make room on a disk first.
    NoRoom(String),
    /// What it is asked of is not there.
    NoCache,
    Failed {
        text: String,
        retryable: bool,
    },
}

#[derive(Debug)]
pub(super) enum SetRefusal {
    Bad(kiln_domain::settings::SettingsError),
    Store(StoreError),
}

/// What a worker lets others see without asking it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Status {
    /// `None` until it has looked for the first time: till then its record says more.
    pub(super) phase: Option<Phase>,
    pub(super) reason: String,
    pub(super) step: Option<&'static str>,
    /// Place and length of the queue for a start.
    pub(super) queue: Option<(usize, usize)>,
    pub(super) leases: usize,
    /// What a roll would bring up to date.
    pub(super) pending: Option<String>,
}

/// A lease that counts no more in memory, and is gone from the disk when `removed` says so.
pub(super) struct Releasing {
    pub(super) lease: Lease,
    pub(super) removed: Commit<bool>,
}

/// A lease whose renewal counts in memory, and on the disk when `renewed` says so.
pub(super) struct Renewing {
    pub(super) lease: Lease,
    /// `None`: it was too late.
    pub(super) renewed: Option<Commit<bool>>,
}

/// A daemon that answers, as its worker knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Warm {
    pub(super) address: Ipv4Addr,
    pub(super) generation: Generation,
}

/// Why a wait ended without a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) kind: RefusalKind,
    pub(super) text: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RefusalKind {
    /// The key is somebody else's (K1).
    OtherIdentity,
    /// What is there is going; whoever asks again gets the next.
    Leaving,
    /// The same request may succeed later without anybody changing anything.
    NotNow,
    TimedOut,
    /// The project has as many leases as it may have.
    TooManyLeases {
        key: Key,
        live: usize,
        limit: usize,
    },
    /// The host takes no more starts.
    NotAdmitted,
    /// A disk or a volume is full.
    NoRoom,
    /// Somebody has to change something first.
    Broken,
}

/// A lease that counts already and will be durable when `durable` resolves. It carries its own release, so that there
/// is no moment in which the caller can go away and leave it behind, not even with the answer on its way.
pub(super) struct Granted {
    /// `None`: the daemon is on its way.
    pub(super) warm: Option<Warm>,
    pub(super) lease: Lease,
    pub(super) durable: Commit<()>,
    pub(super) undelivered: Undelivered,
}

pub(super) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// One request that is parked until the daemon answers. Whoever went away has closed its reply.
pub(super) enum Waiter {
    Route {
        token: TokenHash,
        who: Who,
        reply: Reply<Granted>,
    },
    Await {
        reply: Reply<Warm>,
    },
    Connect {
        reply: Reply<(Warm, Held)>,
    },
    /// A prewarm counts as a request until the daemon answers or fails; it has had its answer.
    Prewarm,
}

impl Waiter {
    pub(super) fn has_gone(&self) -> bool {
        match self {
            Self::Route { reply, .. } => reply.is_closed(),
            Self::Await { reply } => reply.is_closed(),
            Self::Connect { reply } => reply.is_closed(),
            Self::Prewarm => false,
        }
    }

    pub(super) fn refuse(self, refusal: Refusal) {
        // A receiver that is gone needs no answer.
        match self {
            Self::Route { reply, .. } => drop(reply.send(Err(refusal))),
            Self::Await { reply } => drop(reply.send(Err(refusal))),
            Self::Connect { reply } => drop(reply.send(Err(refusal))),
            Self::Prewarm => {}
        }
    }
}

/// What a worker has to do, for whoever spreads builds over several. Written by the worker alone.
#[derive(Debug, Clone, Default)]
pub(super) struct WorkerLoad(Arc<LoadCells>);

#[derive(Debug, Default)]
struct LoadCells {
    leases: AtomicUsize,
    /// One more than the members that its project may have beside it; 0: nothing of its own was set.
    members: AtomicUsize,
}

impl WorkerLoad {
    pub(super) fn leases(&self) -> usize {
        self.0.leases.load(Ordering::Acquire)
    }

    pub(super) fn set_leases(&self, count: usize) {
        self.0.leases.store(count, Ordering::Release);
    }

    pub(super) fn members(&self) -> Option<u16> {
        self.0.members.load(Ordering::Acquire).checked_sub(1).and_then(|members| u16::try_from(members).ok())
    }

    pub(super) fn set_members(&self, members: Option<u16>) {
        self.0.members.store(members.map_or(0, |members| usize::from(members) + 1), Ordering::Release);
    }
}

/// Open data-plane connections of one project. The worker reads it at each decision.
#[derive(Debug, Clone, Default)]
pub(super) struct Connections(Arc<AtomicUsize>);

impl Connections {
    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn hold(&self, mailbox: mpsc::Sender<Message>) -> Held {
        self.0.fetch_add(1, Ordering::AcqRel);
        Held { connections: self.clone(), mailbox }
    }
}

/// Keeps a project connected until dropped.
#[derive(Debug)]
pub(super) struct Held {
    connections: Connections,
    mailbox: mpsc::Sender<Message>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.connections.0.fetch_sub(1, Ordering::AcqRel);
        // A full mailbox needs no nudge: the worker reads the count again with each message it takes out.
        let _ = self.mailbox.try_send(Message::Nudge);
    }
}

/// Releases a lease unless its answer was delivered (F2): a client that never learnt its token cannot.
pub(super) struct Undelivered {
    release: Option<(mpsc::Sender<Message>, TokenHash)>,
}

impl Undelivered {
    pub(super) fn new(mailbox: mpsc::Sender<Message>, token: TokenHash) -> Self {
        Self { release: Some((mailbox, token)) }
    }

    /// Of a lease that its client knows already.
    pub(super) const fn nothing() -> Self {
        Self { release: None }
    }

    pub(super) fn delivered(mut self) {
        self.release = None;
    }
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        if let Some((mailbox, token)) = self.release.take() {
            release(mailbox, token, LeaseEnd::Undelivered);
        }
    }
}

/// A lease that its build has left for another daemon of its project; it ends when its client knows of the other.
pub(super) struct LeftBehind {
    pub(super) mailbox: mpsc::Sender<Message>,
    pub(super) token: TokenHash,
}

impl LeftBehind {
    pub(super) fn end(self) {
        release(self.mailbox, self.token, LeaseEnd::Moved);
    }
}

fn release(mailbox: mpsc::Sender<Message>, token: TokenHash, how: LeaseEnd) {
    let message = Message::Complete { token, how, reply: None };
    if let Err(mpsc::error::TrySendError::Full(message)) = mailbox.try_send(message) {
        // Only a full mailbox takes a task; without a runtime the process is ending and the lease's grace ends it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { mailbox.send(message).await });
        }
    }
}
