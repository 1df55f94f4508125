//! The model of a host: files, instances, daemons and the builds in them. Nothing here waits.

use std::collections::{BTreeMap, BTreeSet};

use kiln::host::volumes::TrashName;
use kiln::host::{InstanceEvent, Limits, Properties};
use kiln_domain::admission::HostLoad;
use kiln_domain::{Key, LeaseToken, ProjectRecord, Settings, Timestamp};

use super::volumes::{Numbers, Volume};
use super::{Build, Due, World};
use crate::config::{DEADLINES, SECOND};
use crate::history::{Cause, Fact, Incarnation, LeaseId, Project};

#[derive(Debug, Default)]
pub(crate) struct Host {
    pub(crate) volumes: BTreeMap<Key, Volume>,
    pub(crate) trash: BTreeMap<TrashName, (Timestamp, Volume)>,
    pub(crate) files: BTreeMap<Key, Files>,
    pub(crate) instances: BTreeMap<Key, Instance>,
    /// What is not ours, by name.
    pub(crate) strangers: BTreeSet<String>,
    /// The number of the current image.
    pub(crate) image: u32,
    pub(crate) load: HostLoad,
    /// What of the storage is used by what is not a cache.
    pub(crate) other: u64,
    /// Keys with an operation under way: the host does one after the other.
    pub(crate) busy: BTreeSet<Key>,
    /// Daemons that somebody else started, and when: for a moment kilnd cannot know.
    pub(crate) started_by_hand: BTreeMap<Key, u64>,
    /// What a daemon said last before it went.
    pub(crate) last_words: BTreeMap<Key, &'static str>,
    incarnations: Incarnation,
    pub(super) numbers: Numbers,
}

/// What they were made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Files {
    pub(crate) volume_bytes: Option<u64>,
    /// Certificates are about to end.
    pub(crate) old: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Instance {
    pub(crate) properties: Properties,
    pub(crate) limits: Limits,
    pub(crate) image: u32,
    pub(crate) half_made: bool,
    pub(crate) daemon: Option<Daemon>,
}

#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    pub(crate) incarnation: Incarnation,
    /// It has come up.
    pub(crate) ready: bool,
    pub(crate) hung: Option<Hung>,
    /// It was asked to go, and takes nothing new.
    pub(crate) draining: bool,
    /// It cannot open its cache, and is about to go.
    broken: bool,
    cpu: u64,
    cpu_at: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hung {
    /// Too busy to answer, and not dead.
    pub(crate) works: bool,
}

/// What buildkitd says whose database is torn.
const BROKEN: &str = "panic: page 3 already freed";

impl Daemon {
    /// Whether it answers a call now.
    pub(crate) const fn answers(&self) -> bool {
        self.ready && self.hung.is_none() && !self.draining
    }

    const fn is_dead(&self) -> bool {
        matches!(self.hung, Some(Hung { works: false }))
    }
}

impl Instance {
    /// Of what a project's would be made now.
    pub(crate) fn new(record: &ProjectRecord, settings: &Settings, image: u32) -> Self {
        Self { properties: marks(record), limits: limits(settings), image, half_made: false, daemon: None }
    }

    /// Whether it has the address at which kilnd looks for it: a database that was lost may have given another.
    pub(crate) fn is_where(&self, record: &ProjectRecord) -> bool {
        self.properties.get("address") == Some(&record.address.to_string())
    }
}

pub(crate) fn limits(settings: &Settings) -> Limits {
    let Settings { memory_bytes, cpus, processes, io_bytes, .. } = *settings;
    Limits { memory_bytes, cpus, processes, io_bytes }
}

/// What a project's objects carry, so that it can be found again from them.
pub(crate) fn marks(record: &ProjectRecord) -> Properties {
    let settings = serde_json::to_string(&record.settings).unwrap_or_default();
    let (address, spec) = (record.address.to_string(), &record.spec);
    [
        ("key", record.key.as_str()),
        ("repo", spec.repo.as_str()),
        ("name", &spec.name),
        ("target", &spec.target),
        ("arch", spec.arch.as_str()),
        ("address", &address),
        ("settings", &settings),
    ]
    .into_iter()
    .chain(record.pull_request.as_deref().map(|name| ("pull_request", name)))
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect()
}

impl World {
    pub(crate) fn daemon(&self, project: Project) -> Option<&Daemon> {
        self.host.instances.get(&self.key(project))?.daemon.as_ref()
    }

    /// Whether a call at the address of the record is answered now; `None`: it does not run.
    pub(super) fn answers_at(&self, record: &ProjectRecord) -> Option<bool> {
        let instance = self.host.instances.get(&record.key)?;
        instance.daemon.as_ref().map(|daemon| daemon.answers() && instance.is_where(record))
    }

    fn daemon_mut(&mut self, project: Project, incarnation: Incarnation) -> Option<&mut Daemon> {
        let key = self.key(project);
        let daemon = self.host.instances.get_mut(&key)?.daemon.as_mut()?;
        (daemon.incarnation == incarnation).then_some(daemon)
    }

    // === Daemons

    pub(crate) fn start_daemon(&mut self, key: &Key) -> Incarnation {
        let project = self.project(key);
        let volume = self.host.volumes.get(key).map(|volume| (volume.lineage, volume.contents));
        let (lineage, version) = volume.map_or((0, 0), |(lineage, contents)| (lineage, contents.version));
        let broken = volume.is_some_and(|(_, contents)| contents.damaged);
        self.host.incarnations += 1;
        let incarnation = self.host.incarnations;
        let now = self.now();
        let daemon = Daemon { incarnation, ready: false, hung: None, draining: false, broken, cpu: 0, cpu_at: now };
        let mut address = String::new();
        if let Some(instance) = self.host.instances.get_mut(key) {
            instance.daemon = Some(daemon);
            address = instance.properties.get("address").cloned().unwrap_or_default();
        }
        self.host.last_words.remove(key);
        self.record(Fact::Started { project, incarnation, lineage, version, address });
        let latency = self.profile.latency;
        let takes = self.rng.about(latency * 2);
        self.later(takes, Due::Serves { project, incarnation });
        self.announce(key);
        incarnation
    }

    pub(super) fn serves(&mut self, project: Project, incarnation: Incarnation) {
        if let Some(daemon) = self.daemon_mut(project, incarnation)
            && !daemon.ready
        {
            if daemon.broken {
                return self.breaks(project, incarnation);
            }
            daemon.ready = true;
            self.record(Fact::Serving { project, incarnation });
        }
    }

    fn breaks(&mut self, project: Project, incarnation: Incarnation) {
        let key = self.key(project);
        self.host.last_words.insert(key, BROKEN);
        self.gone(project, incarnation, Cause::Crashed);
    }

    pub(crate) fn hang(&mut self, project: Project, works: bool) {
        let now = self.now();
        self.account(project, now);
        let key = self.key(project);
        let Some(daemon) = self.host.instances.get_mut(&key).and_then(|instance| instance.daemon.as_mut()) else {
            return;
        };
        if daemon.hung.is_some() {
            return;
        }
        daemon.hung = Some(Hung { works });
        let incarnation = daemon.incarnation;
        self.record(Fact::Hung { project, incarnation, works });
        // One that is only busy is through with it some time.
        if works || self.rng.chance(300) {
            let after = self.rng.between(2, 240) * SECOND;
            self.later(after, Due::Recovers { project, incarnation });
        }
    }

    pub(super) fn recovers(&mut self, project: Project, incarnation: Incarnation) {
        let now = self.now();
        self.account(project, now);
        if let Some(daemon) = self.daemon_mut(project, incarnation)
            && daemon.hung.take().is_some()
        {
            self.record(Fact::Recovered { project, incarnation });
        }
    }

    /// The point of no return of a stop.
    pub(crate) fn terminate(&mut self, project: Project, force: bool, phase: &'static str) {
        let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation) else { return };
        self.record(Fact::Terminated { project, incarnation, force, phase });
        if force {
            self.gone(project, incarnation, Cause::Stopped);
        } else if let Some(daemon) = self.daemon_mut(project, incarnation) {
            daemon.draining = true;
            self.later(DEADLINES.drain.as_millis() as u64, Due::DrainEnds { project, incarnation });
            self.drain(project);
        }
    }

    /// A daemon that drains goes with its last build.
    fn drain(&mut self, project: Project) {
        let Some(Daemon { incarnation, draining: true, .. }) = self.daemon(project) else { return };
        let incarnation = *incarnation;
        if !self.builds.values().any(|build| build.incarnation == incarnation) {
            let after = self.rng.between(0, 100);
            self.later(after, Due::DrainEnds { project, incarnation });
        }
    }

    pub(super) fn drained(&mut self, project: Project, incarnation: Incarnation) {
        if self.daemon(project).is_some_and(|daemon| daemon.incarnation == incarnation && daemon.draining) {
            self.gone(project, incarnation, Cause::Stopped);
        }
    }

    pub(crate) fn gone(&mut self, project: Project, incarnation: Incarnation, cause: Cause) {
        let key = self.key(project);
        let Some(instance) = self.host.instances.get_mut(&key) else { return };
        if instance.daemon.as_ref().is_none_or(|daemon| daemon.incarnation != incarnation) {
            return;
        }
        instance.daemon = None;
        let of_it: Vec<u32> =
            self.builds.iter().filter(|(_, build)| build.incarnation == incarnation).map(|(id, _)| *id).collect();
        for build in of_it {
            self.end_build(build, true);
        }
        let announced = self.announce(&key);
        self.record(Fact::Gone { project, incarnation, cause, announced });
    }

    /// Tells kilnd, as well as the schedule lets it. False: it will never hear of it.
    pub(crate) fn announce(&mut self, key: &Key) -> bool {
        let event = InstanceEvent::Changed(key.clone());
        let (lost, odd) = (self.profile.lost_events, self.profile.event_faults);
        if !self.quiet && self.rng.chance(lost) {
            self.fault("event lost");
            return false;
        }
        if !self.quiet && self.rng.chance(odd) {
            match self.rng.below(3) {
                0 => {
                    self.fault("event late");
                    let after = self.rng.between(1, 5 * SECOND);
                    self.later(after, Due::Event(event));
                }
                1 => {
                    self.fault("event twice");
                    self.later(0, Due::Event(event.clone()));
                    let after = self.rng.between(0, 2 * SECOND);
                    self.later(after, Due::Event(event));
                }
                _ => {
                    self.fault("events missed");
                    let after = self.rng.between(0, SECOND);
                    self.later(after, Due::Event(InstanceEvent::Missed));
                }
            }
            return true;
        }
        self.later(0, Due::Event(event));
        true
    }

    /// Processor time up to now: what a build uses, and the bookkeeping of one that idles.
    fn account(&mut self, project: Project, now: u64) {
        let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation) else { return };
        let works = self.builds.values().any(|build| build.incarnation == incarnation);
        if let Some(daemon) = self.daemon_mut(project, incarnation) {
            let busy = works && !daemon.is_dead();
            let span = (now - daemon.cpu_at) * 1000;
            daemon.cpu += if busy { span } else { span / 1000 };
            daemon.cpu_at = now;
        }
    }

    /// In milliseconds.
    pub(crate) fn cpu(&mut self, project: Project) -> Option<u64> {
        let now = self.now();
        self.account(project, now);
        self.daemon(project).map(|daemon| daemon.cpu / 1000)
    }

    // === Builds

    /// `None`: the daemon does not answer.
    pub(crate) fn begin_build(
        &mut self,
        project: Project,
        lease: Option<(LeaseId, LeaseToken)>,
        connection: Option<u32>,
        takes: u64,
    ) -> Option<u32> {
        let daemon = self.daemon(project).filter(|daemon| daemon.answers())?;
        let incarnation = daemon.incarnation;
        let now = self.now();
        self.account(project, now);
        self.build_ids += 1;
        let build = self.build_ids;
        let key = self.key(project);
        self.write_to(&key);
        let of = lease.as_ref().map(|(id, _)| *id);
        self.builds.insert(build, Build { project, incarnation, lease, connection, ends: now + takes });
        self.record(Fact::BuildBegan { build, project, incarnation, lease: of, connection });
        self.later(takes, Due::BuildEnds(build));
        Some(build)
    }

    /// One in a daemon that hangs for good does not come to its end.
    pub(super) fn build_is_due(&mut self, id: u32) {
        let Some(build) = self.builds.get(&id) else { return };
        let stuck = self.daemon(build.project).is_some_and(Daemon::is_dead);
        if stuck {
            let again = self.now() + 5 * SECOND;
            if let Some(build) = self.builds.get_mut(&id) {
                build.ends = again;
            }
            self.later(5 * SECOND, Due::BuildEnds(id));
        } else {
            self.end_build(id, false);
        }
    }

    /// `cut`: not by itself.
    pub(crate) fn end_build(&mut self, id: u32, cut: bool) {
        let Some(project) = self.builds.get(&id).map(|build| build.project) else { return };
        let now = self.now();
        self.account(project, now);
        self.builds.remove(&id);
        let key = self.key(project);
        self.write_to(&key);
        self.record(Fact::BuildEnded { build: id, cut });
        self.drain(project);
    }
}
