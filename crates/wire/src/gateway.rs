//! What the gateway relays now.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One of `GET /v1/connections`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionView {
    /// Absent: it has not said its name yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Address and port of the client, also where a load balancer speaks for it.
    pub from: String,
    /// `hello` (it has not said its name), `parked` (it waits for its daemon), `relaying`, `half_closed`.
    pub state: String,
    /// Since it was accepted, in milliseconds.
    pub age_ms: u64,
    /// Bytes, as TLS has them.
    pub to_daemon: u64,
    pub to_client: u64,
}
