//! The contract of runtimes on a real Incus: `KILN_TEST_INCUS` names the directory of a private one that holds the image
//! `kiln` in the project `kiln`. Needs root. What only Incus has is tested in `tests/incus.rs`.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_domain::Key;

use super::{IncusConfig, IncusRuntime};
use crate::host::network::{Network, NetworkConfig};
use crate::host::{InstanceSpec, Lane, Limits, Properties, contract};

const PORT: u16 = 8372;

/// One address for each of the contract's two keys.
fn spec(home: &Path, key: &Key) -> InstanceSpec {
    let last = if *key == contract::key() { 1 } else { 2 };
    let (volume, files) = (home.join(format!("cache-{key}")), home.join(format!("files-{key}")));
    for directory in [&volume, &files] {
        std::fs::create_dir_all(directory).expect("a directory");
    }
    let toml = format!("[grpc]\naddress = [\"tcp://0.0.0.0:{PORT}\"]\n");
    std::fs::write(files.join("buildkitd.toml"), toml).expect("a configuration");
    InstanceSpec {
        key: key.clone(),
        lane: Lane::Trusted,
        properties: Properties::from([("key".to_owned(), key.to_string()), ("name".to_owned(), String::new())]),
        address: SocketAddrV4::new(Ipv4Addr::new(10, 80, 0, last), PORT),
        volume,
        files,
        limits: Limits::default(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn incus_keeps_the_contract() {
    let Some(incus) = std::env::var_os("KILN_TEST_INCUS").map(PathBuf::from) else {
        eprintln!("skipped: incus_keeps_the_contract: KILN_TEST_INCUS does not name the directory of a private Incus");
        return;
    };
    // Not Kiln's own: an admin's daemons on the same host keep their table.
    let mut firewall = NetworkConfig::new("10.80.0.0/16".parse().expect("a range"), Vec::new());
    "kiln-contract".clone_into(&mut firewall.table);
    let network = Arc::new(Network::new(firewall));
    let config = IncusConfig::new(incus.join("unix.socket"), "kiln".to_owned());
    let runtime = IncusRuntime::connect(config, Arc::clone(&network)).await.expect("a usable Incus");
    let home = tempfile::tempdir().expect("a directory");
    contract::runtime(&runtime, &|key| spec(home.path(), key)).await;
    network.remove().await.expect("the table is removed");
}
