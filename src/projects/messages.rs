//! What a worker is told, who waits for its daemon, and what they get.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_domain::{BuildSpec, Generation, Phase, TokenHash};
use tokio::sync::{mpsc, oneshot};

use crate::store::Commit;

/// What a worker is told. Whoever wants an answer sends a reply along.
pub(super) enum Message {
    Route {
        spec: BuildSpec,
        token: TokenHash,
        reply: Reply<Granted>,
    },
    /// Bring it up, without a lease; answers at once whether it is up already.
    Prewarm {
        spec: BuildSpec,
        reply: oneshot::Sender<Result<Option<Warm>, Refusal>>,
    },
    Connect {
        reply: Reply<(Warm, Held)>,
    },
    /// Release a lease; the reply is `None` if there is no such lease.
    Complete {
        token: TokenHash,
        why: &'static str,
        reply: Option<oneshot::Sender<Option<Commit<bool>>>>,
    },
    Stop {
        reply: oneshot::Sender<Result<(), StopRefusal>>,
    },
    /// Something happened to the instance: look at it again.
    InstanceChanged,
    /// Look at your counts again.
    Nudge,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StopRefusal {
    Busy(String),
    Failed(String),
}

/// What a worker lets others see without asking it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Status {
    /// `None` until it has looked for the first time: till then its record says more.
    pub(super) phase: Option<Phase>,
    pub(super) reason: String,
    pub(super) step: Option<&'static str>,
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
    /// Whether the same request may succeed later without anybody changing anything.
    pub(super) retryable: bool,
    pub(super) timed_out: bool,
    pub(super) text: String,
}

/// A lease that counts already and will be durable when `durable` resolves. It carries its own release, so that there
/// is no moment in which the caller can go away and leave it behind, not even with the answer on its way.
pub(super) struct Granted {
    pub(super) warm: Warm,
    pub(super) durable: Commit<()>,
    pub(super) undelivered: Undelivered,
}

pub(super) type Reply<T> = oneshot::Sender<Result<T, Refusal>>;

/// One request that is parked until the daemon answers. Whoever went away has closed its reply.
pub(super) enum Waiter {
    Route { token: TokenHash, reply: Reply<Granted> },
    Connect { reply: Reply<(Warm, Held)> },
}

impl Waiter {
    pub(super) fn has_gone(&self) -> bool {
        match self {
            Self::Route { reply, .. } => reply.is_closed(),
            Self::Connect { reply } => reply.is_closed(),
        }
    }

    pub(super) fn refuse(self, refusal: Refusal) {
        // A receiver that is gone needs no answer.
        match self {
            Self::Route { reply, .. } => drop(reply.send(Err(refusal))),
            Self::Connect { reply } => drop(reply.send(Err(refusal))),
        }
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

    pub(super) fn delivered(mut self) {
        self.release = None;
    }
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        let Some((mailbox, token)) = self.release.take() else { return };
        let message = Message::Complete { token, why: "its answer could not be delivered", reply: None };
        if let Err(mpsc::error::TrySendError::Full(message)) = mailbox.try_send(message) {
            // Only a full mailbox takes a task; without a runtime the process is ending and the lease's grace ends it.
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(async move { mailbox.send(message).await });
            }
        }
    }
}
