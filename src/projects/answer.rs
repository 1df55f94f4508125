//! What a routed build is told.

use kiln_domain::{Key, LeaseToken};
use kiln_wire::{Credential, RouteResponse};

use super::messages::{Undelivered, Warm};

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

    pub(super) fn response(&self, key: &Key, warm: Option<Warm>) -> RouteResponse {
        RouteResponse {
            key: key.clone(),
            build_id: None,
            endpoint: self.endpoint(key),
            namespace: self.namespace.clone(),
            ready: warm.is_some(),
            server_name: key.server_name(&self.domain),
            generation: warm.map_or(0, |warm| warm.generation.get()),
            credential: None,
            lease_id: None,
            status: None,
        }
    }
}

/// A route that is durable and not yet handed out. Dropped before [`Routed::deliver`], it releases its lease.
pub struct Routed {
    pub(super) response: RouteResponse,
    pub(super) token: LeaseToken,
    pub(super) undelivered: Undelivered,
}

impl Routed {
    #[must_use]
    pub(super) fn with_credential(mut self, credential: Option<Credential>) -> Self {
        self.response.credential = credential;
        self
    }

    /// The answer, token included, before it is known whether it arrives.
    pub fn response(&self) -> RouteResponse {
        RouteResponse {
            build_id: Some(self.token.reveal().to_owned()),
            lease_id: Some(self.token.hash().as_str().to_owned()),
            ..self.response.clone()
        }
    }

    /// The answer arrived: the lease stays.
    pub fn delivered(self) {
        self.undelivered.delivered();
    }

    /// Both at once, for callers that need not wait for a socket.
    pub fn deliver(self) -> RouteResponse {
        let response = self.response();
        self.delivered();
        response
    }
}
