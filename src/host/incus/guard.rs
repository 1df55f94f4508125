//! Keeps the network policy in force for as long as instances may run: somebody else's `nft flush ruleset`, as a reload
//! of a host's firewall does it, takes every table along.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use kiln_domain::Key;
use tokio::sync::OnceCell;

use super::client::Client;
use super::wanted::Found;
use super::{NAME, closed, failure, is_up};
use crate::host::network::Network;
use crate::host::{Lane, RuntimeError};

/// How long a table that was taken away stays away at most. One listing of one table each time: a few milliseconds.
const ROUND: Duration = Duration::from_secs(10);

/// Looks again and again, from the first time that the policy was put in force.
pub(super) async fn stand(client: Client, network: Arc<Network>, prepared: Arc<OnceCell<()>>) {
    loop {
        tokio::time::sleep(ROUND).await;
        if !prepared.initialized() {
            continue;
        }
        let Err(damage) = network.check().await else { continue };
        match put_in_force(&client, &network).await {
            Ok(()) => tracing::warn!(%damage, "the network policy was damaged from outside and is in force again"),
            Err(error) => tracing::error!(%damage, %error, "the network policy is damaged and cannot be put back"),
        }
    }
}

/// The whole table, and who of those that run may reach what.
pub(super) async fn put_in_force(client: &Client, network: &Network) -> Result<(), RuntimeError> {
    network.ensure().await.map_err(|e| closed("prepare", NAME, &e))?;
    for found in all(client).await? {
        if let (Some(key), Some(address), true) = (found.key(), found.address(), is_up(found.status_code)) {
            admit(network, &key, address, found.lane()).await?;
        }
    }
    Ok(())
}

pub(super) async fn admit(network: &Network, key: &Key, address: Ipv4Addr, lane: Lane) -> Result<(), RuntimeError> {
    network.admit(address, lane).await.map_err(|e| closed("start", &key.daemon_name(), &e))
}

pub(super) async fn all(client: &Client) -> Result<Vec<Found>, RuntimeError> {
    let found = client.get("/1.0/instances?recursion=1").await;
    found.map_err(|error| failure("list", "instances", error))
}
