//! What has to be there before the first instance: extensions of Incus's API, the storage pool, our project.

use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{ApiError, Client};
use super::{IncusConfig, NAME, failure};
use crate::host::RuntimeError;

/// What is used beyond the first Incus's API; all of it is in Incus 6.0.
pub(super) const EXTENSIONS: [&str; 6] = [
    "container_nic_routed",
    "container_disk_shift",
    "projects",
    "event_lifecycle",
    "instances_nic_host_name",
    "event_project",
];

#[derive(Deserialize)]
struct Server {
    #[serde(default)]
    api_extensions: Vec<String>,
    #[serde(default)]
    auth: String,
}

#[derive(Deserialize)]
struct Project {
    #[serde(default)]
    config: std::collections::BTreeMap<String, String>,
}

/// Project, pool and alias become parts of URLs.
pub(crate) fn check_names(config: &IncusConfig) -> Result<(), RuntimeError> {
    for (what, name) in [("project", &config.project), ("storage pool", &config.pool), ("image alias", &config.image)] {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if name.is_empty() || !name.bytes().all(plain) || name.starts_with('.') {
            let why = format!("{name:?} is not a name for the {what}; use letters, digits, - and _");
            return Err(RuntimeError::Refused { operation: "use", instance: NAME.to_owned(), why });
        }
    }
    Ok(())
}

pub(crate) async fn prepare(client: &Client, config: &IncusConfig) -> Result<(), RuntimeError> {
    let server: Server = client.get("/1.0").await.map_err(|error| match error {
        // It answers this question to everybody; where it does not, the matter is its own, and may pass.
        ApiError::Refused { .. } | ApiError::NotFound(_) => unavailable(
            format!("{} refuses: {error}", client.socket().display()),
            "see `incus info` and `journalctl -u incus`, and run kilnd as root or in the group incus-admin".to_owned(),
        ),
        error => failure("connect to", NAME, error),
    })?;
    if server.auth != "trusted" {
        return Err(unavailable(
            format!("{} does not trust this user", client.socket().display()),
            "run kilnd as root or in the group incus-admin".to_owned(),
        ));
    }
    if let Some(missing) = EXTENSIONS.iter().find(|name| !server.api_extensions.iter().any(|e| e == *name)) {
        return Err(unavailable(
            format!("this Incus lacks the API extension {missing}"),
            "install Incus 6.0 or newer (Debian 13, or bookworm-backports on Debian 12)".to_owned(),
        ));
    }
    // The project first: without it every question about it is answered with "not found".
    project(client, config).await
}

/// The pool of the root disks; an admin makes it.
pub(super) async fn pool(client: &Client, config: &IncusConfig) -> Result<(), RuntimeError> {
    let path = format!("/1.0/storage-pools/{}", config.pool);
    match client.get::<Value>(&path).await {
        Ok(_) => Ok(()),
        Err(ApiError::NotFound(_)) => Err(unavailable(
            format!("it has no storage pool {:?}", config.pool),
            format!("make one (`incus storage create {} btrfs`) or name another in the configuration", config.pool),
        )),
        Err(error) => Err(failure("find", "the storage pool", error)),
    }
}

async fn project(client: &Client, config: &IncusConfig) -> Result<(), RuntimeError> {
    let path = format!("/1.0/projects/{}", config.project);
    let mut found = client.get::<Project>(&path).await;
    if matches!(found, Err(ApiError::NotFound(_))) {
        // Another kiln may be at it too, and Incus does not say "exists" in a way to rely on: look again, whatever it said.
        let made = client.change(Method::POST, "/1.0/projects", Some(&creation(&config.project))).await;
        found = client.get::<Project>(&path).await;
        if let (Err(error), true) = (made, found.is_err()) {
            return Err(failure("make project", &config.project, error));
        }
    }
    let found = found.map_err(|error| failure("look at project", &config.project, error))?;
    if found.config.get("features.images").is_some_and(|value| value == "true") {
        return Ok(());
    }
    let why =
        "it exists and shares its images with the default project, so it is not Kiln's; name another one".to_owned();
    Err(RuntimeError::Refused { operation: "use project", instance: config.project.clone(), why })
}

/// Images and profiles of its own, so that nothing of the admin's slips into our instances and the alias is ours; the
/// pools and networks of the host. Restricted, so that Incus itself refuses a privileged or nested container here.
fn creation(name: &str) -> Value {
    json!({
        "name": name,
        "description": "Build daemons; made and kept by Kiln",
        "config": {
            "features.images": "true",
            "features.profiles": "true",
            "features.storage.volumes": "true",
            "features.networks": "false",
            "restricted": "true",
            "restricted.containers.privilege": "unprivileged",
            "restricted.containers.nesting": "block",
            "restricted.devices.disk": "allow",
            "restricted.devices.nic": "allow",
        },
    })
}

fn unavailable(why: String, remedy: String) -> RuntimeError {
    RuntimeError::Unavailable { runtime: NAME, why, remedy }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn names_that_would_change_a_request_are_refused() {
        let of = |project: &str| {
            let mut config = IncusConfig::new(PathBuf::from("/x"), "kiln".to_owned());
            project.clone_into(&mut config.project);
            check_names(&config).map_err(|error| error.to_string())
        };
        assert_eq!(of("kiln-2"), Ok(()));
        for name in ["", "a&project=default", "a/b", "../x", "a b"] {
            assert!(of(name).expect_err("accepted").contains("not a name for the project"), "of {name:?}");
        }
    }
}
