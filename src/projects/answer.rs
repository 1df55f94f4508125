//! What a routed build is told.

use kiln_domain::{Generation, Key, LeaseToken, TokenHash};
use kiln_wire::{Credential, RouteResponse};

use super::messages::{LeftBehind, Undelivered, Warm};

/// How clients reach daemons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addressing {
    /// Daemons are `buildkitd-<key>.<domain>` in certificates and hellos.
    pub domain: String,
    /// `host:port` of the gateway for clients that cannot resolve the daemon's name; `None`: they can.
    pub gateway_address: Option<String>,
    /// The port clients dial when they resolve the daemon's name.
    pub gateway_port: u16,
    /// Answered as `namespace`, for clients of the reference system.
    pub namespace: String,
}

impl Addressing {
    pub(super) fn endpoint(&self, key: &Key) -> String {
        match &self.gateway_address {
            Some(address) => format!("tcp://{address}"),
            None => format!("tcp://{}:{}", key.server_name(&self.domain), self.gateway_port),
        }
    }

    /// `generation`: of a daemon that answers.
    pub(super) fn response(&self, key: &Key, generation: Option<Generation>) -> RouteResponse {
        RouteResponse {
            key: key.clone(),
            endpoint: self.endpoint(key),
            namespace: self.namespace.clone(),
            ready: generation.is_some(),
            server_name: key.server_name(&self.domain),
            generation: generation.map_or(0, Generation::get),
            build_id: None,
            lease_id: None,
            status: None,
            credential: None,
        }
    }

    pub(super) fn of_warm(&self, key: &Key, warm: Option<Warm>) -> RouteResponse {
        self.response(key, warm.map(|warm| warm.generation))
    }
}

/// A daemon that answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    pub(super) generation: Generation,
}

/// Where a routed build's daemon stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    Ready(Ready),
    Coming { phase: &'static str, reason: String, queue: Option<(usize, usize)> },
}

/// A route that is durable and not yet handed out. Dropped before [`Routed::delivered`], it releases its lease, unless
/// its client had that before.
pub struct Routed {
    pub(super) addressing: Addressing,
    pub(super) key: Key,
    pub(super) lease: TokenHash,
    pub(super) token: LeaseToken,
    pub(super) standing: Standing,
    pub(super) credential: Option<Credential>,
    pub(super) undelivered: Undelivered,
    pub(super) left: Option<LeftBehind>,
}

impl Routed {
    #[must_use]
    pub(super) fn with_credential(mut self, credential: Option<Credential>) -> Self {
        self.credential = credential;
        self
    }

    /// The answer, token included.
    pub fn response(&self) -> RouteResponse {
        let (generation, status) = match &self.standing {
            Standing::Ready(Ready { generation }) => (Some(*generation), None),
            Standing::Coming { phase, reason, queue } => {
                let place = |pick: fn(&(usize, usize)) -> usize| queue.as_ref().map(|queue| pick(queue) as u64);
                let status = kiln_wire::RouteStatus {
                    phase: (*phase).to_owned(),
                    reason: reason.clone(),
                    queue_position: place(|queue| queue.0),
                    queue_length: place(|queue| queue.1),
                };
                (None, Some(status))
            }
        };
        RouteResponse {
            build_id: Some(self.token.reveal().to_owned()),
            lease_id: Some(self.lease.as_str().to_owned()),
            status,
            credential: self.credential.clone(),
            ..self.addressing.response(&self.key, generation)
        }
    }

    /// The answer is with its client.
    pub fn delivered(self) {
        self.undelivered.delivered();
        if let Some(left) = self.left {
            left.end();
        }
    }
}
