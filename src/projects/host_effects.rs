//! [`Effects`] on the real host: volumes, files, runtime and probe, tied together and nothing decided.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::plan::{FilesSeen, InstanceSeen, Observed, Step, Stop, VolumeSeen};
use kiln_domain::{Key, ProjectRecord, Timestamp};
use tokio::sync::broadcast;

use super::effects::{EffectError, Effects, StepDeadlines};
use crate::buildkit::toml::DaemonConfig;
use crate::buildkit::{DaemonProbe, DaemonTarget};
use crate::clock::Clock;
use crate::host::network::Firewall;
use crate::host::volumes::VolumeEngine;
use crate::host::{InstanceEvent, InstanceSpec, InstanceState, Limits, Properties, Runtime, StopBound};
use crate::pki::{DaemonNames, Pki};

/// What all daemons of this host have in common.
#[derive(Debug, Clone)]
pub struct HostEffectsConfig {
    pub domains: Vec<String>,
    pub daemon_port: u16,
    pub volume_bytes: u64,
    pub limits: Limits,
    /// Written into `buildkitd.toml`; empty leaves the choice to BuildKit.
    pub nameservers: Vec<Ipv4Addr>,
    /// Where the daemon finds its root and its files, if not at their paths on the host.
    pub inside: Option<InsidePaths>,
    pub deadlines: StepDeadlines,
}

/// Paths as an instance sees them.
#[derive(Debug, Clone)]
pub struct InsidePaths {
    pub volume: PathBuf,
    pub files: PathBuf,
}

pub struct HostEffects {
    config: HostEffectsConfig,
    runtime: Arc<dyn Runtime>,
    volumes: Arc<dyn VolumeEngine>,
    /// In force before anything is started; `None` where the runtime isolates nothing.
    firewall: Option<Firewall>,
    pki: Pki,
    probe: Arc<dyn DaemonProbe>,
    clock: Arc<dyn Clock>,
    targets: Mutex<HashMap<Key, (Timestamp, DaemonTarget)>>,
}

/// Between two looks at a daemon that does not answer yet.
const PROBE_CREDENTIAL_LIFE: Duration = Duration::from_secs(3600);
const PROBE_CREDENTIAL_RENEWED: Duration = Duration::from_secs(1800);

impl HostEffects {
    pub fn new(
        config: HostEffectsConfig,
        (runtime, volumes): (Arc<dyn Runtime>, Arc<dyn VolumeEngine>),
        firewall: Option<Firewall>,
        (pki, probe): (Pki, Arc<dyn DaemonProbe>),
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self { config, runtime, volumes, firewall, pki, probe, clock, targets: Mutex::default() }
    }

    fn address(&self, record: &ProjectRecord) -> SocketAddrV4 {
        SocketAddrV4::new(record.address, self.config.daemon_port)
    }

    fn names(&self, record: &ProjectRecord) -> DaemonNames {
        DaemonNames {
            server_names: self.config.domains.iter().map(|domain| record.key.server_name(domain)).collect(),
            addresses: vec![IpAddr::V4(record.address)],
        }
    }

    /// The spec of an instance whose volume is at `volume`.
    fn spec(&self, record: &ProjectRecord, volume: PathBuf) -> InstanceSpec {
        InstanceSpec {
            key: record.key.clone(),
            properties: properties(record),
            address: self.address(record),
            volume,
            files: self.pki.daemon_dir(&record.key),
            limits: self.config.limits,
        }
    }

    /// The spec, with the volume where the engine says that it is.
    async fn spec_on_host(&self, record: &ProjectRecord) -> Result<InstanceSpec, EffectError> {
        let volume = self.volumes.get(&record.key).await?.map(|volume| volume.path).unwrap_or_default();
        Ok(self.spec(record, volume))
    }

    fn toml(&self, record: &ProjectRecord, volume: PathBuf) -> DaemonConfig {
        let files = self.pki.daemon_dir(&record.key);
        let inside = self.config.inside.clone().unwrap_or(InsidePaths { volume, files });
        DaemonConfig {
            root: inside.volume,
            address: self.address(record),
            files: inside.files,
            volume_bytes: record.settings.volume_bytes.unwrap_or(self.config.volume_bytes),
            nameservers: self.config.nameservers.clone(),
        }
    }

    /// How to probe the daemon; made once and kept, because a probe must cost no more than its call.
    async fn target(&self, record: &ProjectRecord) -> Result<DaemonTarget, EffectError> {
        let now = self.clock.now();
        let kept = self.targets.lock().unwrap_or_else(PoisonError::into_inner).get(&record.key).cloned();
        if let Some((made, target)) = kept
            && now.since(made) < PROBE_CREDENTIAL_RENEWED
        {
            return Ok(target);
        }
        let credential = self.pki.issue_credential(&record.key, now, now.plus(PROBE_CREDENTIAL_LIFE)).await?;
        let server_name = record.key.server_name(&self.config.domains[0]);
        let target = DaemonTarget::new(self.address(record), &server_name, &credential)?;
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        targets.insert(record.key.clone(), (now, target.clone()));
        Ok(target)
    }

    fn forget_target(&self, key: &Key) {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}
