//! [`Effects`] on the real host: volumes, files, runtime and probe, tied together and nothing decided.
//!
//! | file | |
//! |---|---|
//! | `serving.rs` | whether a daemon answers, and whether one that runs untrusted code is kept apart |
//! | `caches.rs` | what is done to a cache as a whole: cloning it, going back, trying a snapshot out |

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kiln_domain::admission::HostLoad;
use kiln_domain::cache::size::{Bounds, Collection, SizePolicy};
use kiln_domain::lane::{entitlements_of, limits_of};
use kiln_domain::plan::{Done, FilesSeen, InstanceSeen, Observed, Step, Stop, VolumeSeen, bounds};
use kiln_domain::settings::HostSize;
use kiln_domain::{Key, ProjectRecord, Settings, Snapshot, SnapshotName, Timestamp, UntrustedPolicy, Verdict};
use tokio::sync::broadcast;

use super::effects::{EffectError, Effects, StepDeadlines, Survey};
use crate::buildkit::{Capacity, ClientTls, DaemonConfig, DaemonProbe, DaemonTarget, ProbeError};
use crate::clock::Clock;
use crate::host::pressure::PressureFiles;
use crate::host::volumes::{FoundVolume, Fullness, TrashName, Trashed, Usage, Volume, VolumeEngine, VolumeError};
use crate::host::{Change, InstanceEvent, InstanceSpec, InstanceState, Lane, Properties, Runtime, StopBound};
use crate::pki::{DaemonNames, Pki, PkiError};

mod caches;
mod serving;
#[cfg(test)]
mod tests;

const TOML: &str = "buildkitd.toml";

/// The property that names the pull request of a fork.
pub(super) const PULL_REQUEST: &str = "pull_request";

/// The property of a volume that says what it has grown to, in bytes.
pub(super) const SIZE: &str = "size";

/// What all daemons of this host have in common.
#[derive(Debug, Clone)]
pub struct HostEffectsConfig {
    /// Below which daemons have names; never empty.
    pub domains: Vec<String>,
    pub daemon_port: u16,
    /// Where a daemon listens that only tries a snapshot out, one at a time; `None`: none is tried out.
    pub trial_address: Option<std::net::Ipv4Addr>,
    pub growth: SizePolicy,
    /// What the volumes' file system holds, where volumes have no size of their own.
    pub shared_file_system: Option<u64>,
    /// Written into `buildkitd.toml`; empty leaves the choice to BuildKit.
    pub nameservers: Vec<IpAddr>,
    pub paths: DaemonPaths,
    pub size: HostSize,
    /// What daemons for untrusted builds may use at most.
    pub untrusted: UntrustedPolicy,
    pub deadlines: StepDeadlines,
}

/// Where a daemon finds its things.
#[derive(Debug, Clone)]
pub enum DaemonPaths {
    /// As on the host. `run` holds one directory per daemon for what does not outlive it.
    OnHost { run: PathBuf },
    /// The same in every instance.
    Inside { volume: PathBuf, files: PathBuf, run: PathBuf },
}

/// What the effects act through.
pub struct HostParts {
    pub runtime: Arc<dyn Runtime>,
    pub volumes: Arc<dyn VolumeEngine>,
    pub pki: Pki,
    pub probe: Arc<dyn DaemonProbe>,
    pub clock: Arc<dyn Clock>,
    pub pressure: PressureFiles,
}

pub struct HostEffects {
    config: HostEffectsConfig,
    parts: HostParts,
    targets: Mutex<HashMap<Key, (Timestamp, DaemonTarget)>>,
    /// The last proof of isolation of each.
    proven: Mutex<HashMap<Key, serving::Proof>>,
    /// What of copies is in the trash until it can be freed.
    held: Arc<Mutex<BTreeSet<TrashName>>>,
}

/// A probe's own credential. Renewed at half its life, so that one always lasts longer than any wait.
const PROBE_CREDENTIAL_LIFE: Duration = Duration::from_secs(3600);
const PROBE_CREDENTIAL_RENEWED: Duration = Duration::from_secs(1800);

/// Measuring walks what the last builds wrote.
const SETTLE_PATIENCE: Duration = StepDeadlines::SETTLE;

impl HostEffects {
    pub fn new(config: HostEffectsConfig, parts: HostParts) -> Self {
        Self { config, parts, targets: Mutex::default(), proven: Mutex::default(), held: Arc::default() }
    }

    pub fn runtime_name(&self) -> &'static str {
        self.parts.runtime.name()
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
    fn spec(&self, record: &ProjectRecord, settings: &Settings, volume: PathBuf) -> InstanceSpec {
        let lane = lane_of(record);
        InstanceSpec {
            key: record.key.clone(),
            lane,
            properties: properties(record),
            address: self.address(record),
            volume,
            files: self.parts.pki.daemon_directory(&record.key),
            limits: limits_of(lane, settings, &self.config.size, &self.config.untrusted),
        }
    }

    /// The spec, with the volume where the engine says that it is.
    async fn spec_on_host(&self, record: &ProjectRecord, settings: &Settings) -> Result<InstanceSpec, EffectError> {
        let volume = match self.parts.volumes.get(&record.key).await {
            // What runs on it can be stopped all the same.
            Err(VolumeError::Foreign { .. }) => None,
            found => found?,
        };
        Ok(self.spec(record, settings, volume.map(|volume| volume.path).unwrap_or_default()))
    }

    fn toml(&self, record: &ProjectRecord, settings: &Settings, volume: PathBuf) -> Result<String, EffectError> {
        let (root, files, run) = match &self.config.paths {
            DaemonPaths::Inside { volume, files, run } => (volume.clone(), files.clone(), run.clone()),
            DaemonPaths::OnHost { run } => {
                (volume, self.parts.pki.daemon_directory(&record.key), run.join(record.key.as_str()))
            }
        };
        let policy = &self.config.growth;
        let own = size_of(record, settings).zip(bounds(settings, policy));
        let capacity = match (own, self.config.shared_file_system) {
            // Where nothing enforces a volume's size, the file system is the smaller promise.
            (Some((own, _)), Some(shared)) if shared < own => Capacity::Shared(shared),
            (Some((own, bounds)), _) => Capacity::Own(Collection::of(own, &bounds, policy)),
            (None, Some(shared)) => Capacity::Shared(shared),
            (None, None) => {
                let smallest = Settings::SMALLEST_VOLUME;
                let bounds = Bounds::new(smallest, Some(smallest), policy);
                Capacity::Own(Collection::of(smallest, &bounds, policy))
            }
        };
        let config = DaemonConfig {
            root,
            address: self.address(record),
            files,
            run,
            capacity,
            resolvers: self.config.nameservers.clone(),
            max_parallelism: None,
            entitlements: entitlements_of(lane_of(record), settings),
            debug: false,
        };
        Ok(config.render()?)
    }

    /// How to probe the daemon; made once and kept, because a probe must cost no more than its call.
    async fn target(&self, record: &ProjectRecord) -> Result<DaemonTarget, EffectError> {
        let now = self.parts.clock.now();
        let kept = self.targets.lock().unwrap_or_else(PoisonError::into_inner).get(&record.key).cloned();
        if let Some((made, target)) = kept
            && now.since(made) < PROBE_CREDENTIAL_RENEWED
        {
            return Ok(target);
        }
        let (key, not_after) = (record.key.clone(), now.plus(PROBE_CREDENTIAL_LIFE));
        let mine = self.with_pki(move |pki| pki.issue_credential(&key, now, not_after)).await?;
        let tls = ClientTls::new(&mine.ca, &mine.cert, &mine.key).map_err(ProbeError::from)?;
        let server_name = record.key.server_name(&self.config.domains[0]);
        let target = DaemonTarget { address: self.address(record), server_name, tls };
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        targets.insert(record.key.clone(), (now, target.clone()));
        Ok(target)
    }

    /// Certificates are files and arithmetic: off the async threads.
    async fn with_pki<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Pki) -> Result<T, PkiError> + Send + 'static,
    ) -> Result<T, EffectError> {
        let pki = self.parts.pki.clone();
        let done = tokio::task::spawn_blocking(move || work(&pki)).await;
        Ok(done.map_err(|_| EffectError::Interrupted { what: "work on certificates" })??)
    }

    async fn look_at_files(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
        volume: PathBuf,
    ) -> Result<FilesSeen, EffectError> {
        let (key, names, now) = (record.key.clone(), self.names(record), self.parts.clock.now());
        let wanted = self.toml(record, settings, volume)?;
        self.with_pki(move |pki| {
            let current = pki.read_daemon_file(&key, TOML)?.as_deref() == Some(wanted.as_str());
            if current { pki.files(&key, &names, now) } else { Ok(FilesSeen::Stale) }
        })
        .await
    }

    async fn write_files(&self, record: &ProjectRecord, settings: &Settings) -> Result<(), EffectError> {
        // What the generated garbage collection keeps below must be what the volume enforces.
        self.parts.volumes.resize(&record.key, size_of(record, settings)).await?;
        let spec = self.spec_on_host(record, settings).await?;
        let toml = self.toml(record, settings, spec.volume)?;
        let (key, names, now) = (record.key.clone(), self.names(record), self.parts.clock.now());
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).remove(&record.key);
        self.with_pki(move |pki| {
            pki.write_daemon_files(&key, &names, now)?;
            pki.write_daemon_file(&key, TOML, &toml)
        })
        .await
    }

    async fn remove_files(&self, key: &Key) -> Result<(), EffectError> {
        self.proven().remove(key);
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        let key = key.clone();
        self.with_pki(move |pki| pki.remove(&key)).await
    }

    /// Before a stop in peace. One that cannot be settled is stopped all the same.
    async fn settle(&self, record: &ProjectRecord) {
        let deadline = tokio::time::Instant::now() + SETTLE_PATIENCE;
        let settled = async {
            let target = self.target(record).await?;
            tokio::time::timeout_at(deadline, self.parts.probe.settle(&target, deadline))
                .await
                .map_err(|_| EffectError::TimedOut { step: "measure the cache", after: SETTLE_PATIENCE })??;
            Ok::<(), EffectError>(())
        };
        if let Err(error) = settled.await {
            tracing::debug!(key = %record.key, %error, "stopped without having measured its cache");
        }
    }

    /// The certificates first: what is planned again after a crash is planned for as long as there is a volume.
    async fn discard(&self, record: &ProjectRecord) -> Result<(), EffectError> {
        self.remove_files(&record.key).await?;
        self.discard_cache(&record.key).await.map(drop)
    }
}

#[async_trait]
impl Effects for HostEffects {
    async fn observe(&self, record: &ProjectRecord, settings: &Settings) -> Result<Observed, EffectError> {
        let (volume, path) = match self.parts.volumes.get(&record.key).await {
            Ok(None) => (VolumeSeen::Absent, PathBuf::new()),
            Ok(Some(volume)) if is_of(record, &volume.properties) => (VolumeSeen::Ready, volume.path),
            Ok(Some(volume)) => (VolumeSeen::Foreign { found: owner(&volume.properties) }, volume.path),
            Err(VolumeError::Foreign { found, .. }) => (VolumeSeen::Foreign { found }, PathBuf::new()),
            Err(error) => return Err(error.into()),
        };
        // The configuration names the volume: beside one that is not ours nothing can be said of it.
        let files = match volume {
            VolumeSeen::Foreign { .. } => FilesSeen::Current,
            _ => self.look_at_files(record, settings, path.clone()).await?,
        };
        let instance = match self.parts.runtime.look(&self.spec(record, settings, path)).await? {
            InstanceState::Absent => InstanceSeen::Absent,
            InstanceState::HalfMade { why } => InstanceSeen::HalfMade { why },
            InstanceState::Stopped { outdated } => InstanceSeen::Stopped { outdated: in_words(&outdated) },
            InstanceState::Running { incarnation, outdated } => {
                // K7: however it answers, one that is not proven is waited for, which proves it.
                let serving = self.may_serve(record, &incarnation) && self.is_serving(record).await?;
                InstanceSeen::Running { incarnation, serving, outdated: in_words(&outdated) }
            }
        };
        Ok(Observed { volume, files, instance })
    }

    async fn perform(&self, step: Step, record: &ProjectRecord, settings: &Settings) -> Result<Done, EffectError> {
        let HostParts { runtime, volumes, .. } = &self.parts;
        let spec = || self.spec_on_host(record, settings);
        match step {
            Step::CreateVolume => {
                volumes.create(&record.key, &described(record), size_of(record, settings)).await?;
            }
            Step::CloneVolume => return self.clone_volume(record, settings).await,
            Step::WriteFiles => self.write_files(record, settings).await?,
            Step::CreateInstance => runtime.create(&spec().await?).await?,
            Step::DestroyInstance => runtime.destroy(&spec().await?).await?,
            Step::StartInstance => {
                self.describe(record).await?;
                self.check_cache(record).await?;
                return Ok(Done::Started { incarnation: runtime.start(&spec().await?).await? });
            }
            // The worker has taken its note; the host is as it is.
            Step::AdoptInstance => {}
            Step::AwaitServing => self.await_isolated_and_serving(record, settings).await?,
            Step::Probe => return self.probe(record, settings).await,
            Step::CountBuilds => return self.count_builds(record, settings).await,
            Step::Discard => self.discard(record).await?,
            Step::DiscardCache => self.discard_cache(&record.key).await.map(drop)?,
            Step::DestroyVolume => self.destroy_volume(&record.key).await?,
            Step::Rollback(to) => self.rollback(record, to).await?,
            Step::ListSnapshots => {
                return Ok(Done::Snapshots { all: volumes.snapshots(&record.key).await?, taken: false });
            }
            Step::TakeSnapshot => return self.take_snapshot(record).await,
            Step::Measure => return Ok(Done::Measured(volumes.fill(&record.key).await?)),
            Step::Resize(to) => self.resize(record, to).await?,
            Step::DestroySnapshot(name) => volumes.destroy_snapshot(&record.key, name).await?,
            Step::StopInstance(how) => {
                let bound = match how {
                    Stop::Graceful => StopBound::Graceful(self.config.deadlines.drain),
                    Stop::Force => StopBound::Force,
                };
                runtime.stop(&spec().await?, bound).await?;
            }
        }
        Ok(Done::Plain)
    }

    async fn last_words(&self, record: &ProjectRecord, settings: &Settings) -> String {
        match self.spec_on_host(record, settings).await {
            Ok(spec) => self.parts.runtime.last_words(&spec).await,
            Err(_) => String::new(),
        }
    }

    async fn describe(&self, record: &ProjectRecord) -> Result<(), EffectError> {
        let wanted = described(record);
        let differs = |volume: &Volume| wanted.iter().any(|(name, value)| volume.properties.get(name) != Some(value));
        if self.parts.volumes.get(&record.key).await?.as_ref().is_some_and(differs) {
            self.parts.volumes.set_properties(&record.key, &wanted).await?;
        }
        Ok(())
    }

    fn events(&self) -> broadcast::Receiver<InstanceEvent> {
        self.parts.runtime.events()
    }

    fn snapshots_are_cheap(&self) -> bool {
        self.parts.volumes.copies_are_instant()
    }

    async fn snapshots(&self, key: &Key) -> Result<Vec<Snapshot>, EffectError> {
        match self.parts.volumes.snapshots(key).await {
            // A cache that is not there has no past.
            Err(VolumeError::Missing { .. }) => Ok(Vec::new()),
            snapshots => Ok(snapshots?),
        }
    }

    async fn try_out(
        &self,
        record: &ProjectRecord,
        settings: &Settings,
        snapshot: SnapshotName,
    ) -> Result<Verdict, EffectError> {
        self.try_snapshot(record, settings, snapshot).await
    }

    async fn judge(&self, key: &Key, snapshot: SnapshotName, verdict: Verdict) -> Result<(), EffectError> {
        Ok(self.parts.volumes.judge(key, snapshot, verdict).await?)
    }

    async fn sweep_trials(&self) -> Result<(), EffectError> {
        self.sweep().await
    }

    async fn usage(&self, key: &Key) -> Result<Option<Usage>, EffectError> {
        match self.parts.volumes.usage(key).await {
            Ok(usage) => Ok(Some(usage)),
            Err(VolumeError::Missing { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn fullness(&self) -> Result<Option<Fullness>, EffectError> {
        Ok(Some(self.parts.volumes.fullness().await?))
    }

    fn pressure(&self, key: &Key) -> Option<f64> {
        self.parts.runtime.pressure(key)
    }

    async fn freed(&self) -> Result<(), EffectError> {
        Ok(self.parts.volumes.freed().await?)
    }

    async fn load(&self) -> HostLoad {
        // What cannot be read holds nothing back.
        let pressure = self.parts.pressure.read().ok();
        let stalls = pressure.and_then(|pressure| pressure.stalls);
        let percent_of = |hundredths: u32| f64::from(hundredths) / 100.0;
        let storage = self.parts.volumes.fullness().await.ok().map(percent);
        HostLoad {
            memory_some: stalls.map(|stalls| percent_of(stalls.some)),
            memory_full: stalls.map(|stalls| percent_of(stalls.full)),
            memory_available: pressure.map(|pressure| pressure.memory_available),
            storage,
            ..HostLoad::default()
        }
    }

    async fn check(&self) -> Result<(), EffectError> {
        self.parts.runtime.found().await?;
        self.parts.volumes.fullness().await?;
        Ok(())
    }

    async fn survey(&self) -> Result<Survey, EffectError> {
        Ok(Survey { instances: self.parts.runtime.found().await?, volumes: self.parts.volumes.found().await? })
    }

    async fn volumes(&self) -> Result<Vec<FoundVolume>, EffectError> {
        Ok(self.parts.volumes.found().await?)
    }

    async fn forget(&self, key: &Key) -> Result<(), EffectError> {
        self.clear_out(key).await?;
        self.remove_files(key).await
    }

    async fn remove_instance(&self, name: &str) -> Result<(), EffectError> {
        Ok(self.parts.runtime.destroy_found(name).await?)
    }

    async fn discard_volume(&self, key: &Key) -> Result<(), EffectError> {
        self.parts.volumes.discard(key).await?;
        self.remove_files(key).await
    }

    async fn trash(&self) -> Result<Vec<Trashed>, EffectError> {
        Ok(self.parts.volumes.trash().await?)
    }

    async fn restore(&self, name: &TrashName) -> Result<Properties, EffectError> {
        Ok(self.parts.volumes.restore(name).await?.properties)
    }

    async fn purge(&self, name: &TrashName) -> Result<(), EffectError> {
        Ok(self.parts.volumes.purge(name).await?)
    }
}

/// A fork runs code that nobody of the project has vouched for.
fn lane_of(record: &ProjectRecord) -> Lane {
    if record.key.is_fork() { Lane::Untrusted } else { Lane::Trusted }
}

/// What a volume is to hold: what was set, or what it has grown to.
pub(super) fn size_of(record: &ProjectRecord, settings: &Settings) -> Option<u64> {
    settings.volume_bytes.map(|first| record.cache.size.unwrap_or(first).max(first))
}

/// Of bytes or inodes, whichever is fuller.
fn percent(fullness: Fullness) -> f64 {
    let share = |used: u64, total: u64| if total == 0 { 0.0 } else { used as f64 * 100.0 / total as f64 };
    share(fullness.bytes_used, fullness.bytes_total).max(share(fullness.inodes_used, fullness.inodes_total))
}

/// `the image, the limits`.
fn in_words(outdated: &[Change]) -> Option<String> {
    let words: Vec<String> = outdated.iter().map(ToString::to_string).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// What volumes and instances carry, so that the database can be rebuilt from them (K5).
pub(super) fn properties(record: &ProjectRecord) -> Properties {
    let spec = &record.spec;
    [
        ("key", record.key.as_str()),
        ("repo", spec.repo.as_str()),
        ("name", &spec.name),
        ("target", &spec.target),
        ("arch", spec.arch.as_str()),
        ("address", &record.address.to_string()),
    ]
    .into_iter()
    .chain(record.pull_request.as_deref().map(|name| (PULL_REQUEST, name)))
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect()
}

/// What a volume carries beyond that: what was set for the project, and what its cache has grown to. Nothing else on the host
/// tells of either, and a cache that comes back smaller than what is in it is collected down to that.
fn described(record: &ProjectRecord) -> Properties {
    let mut properties = properties(record);
    // A struct of plain values always has a JSON form.
    properties.insert("settings".to_owned(), serde_json::to_string(&record.settings).unwrap_or_default());
    properties.extend(record.cache.size.map(|size| (SIZE.to_owned(), size.to_string())));
    properties
}

/// Whether a volume is this project's. The address is no identity: it may have changed with the database.
fn is_of(record: &ProjectRecord, found: &Properties) -> bool {
    properties(record).iter().all(|(name, value)| name == "address" || found.get(name) == Some(value))
}

fn owner(found: &Properties) -> String {
    let part = |name: &str| found.get(name).map_or("?", String::as_str).to_owned();
    format!("project {} ({} {} {} {})", part("key"), part("repo"), part("name"), part("target"), part("arch"))
}
