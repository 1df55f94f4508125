//! What goes wrong by itself: daemons, caches, the host, its disk, its clock, and what somebody else does there.

use crate::config::{LONGEST_STALL, MINUTE, SECOND};
use crate::history::{Cause, Fact};
use crate::world::{Due, World};

impl World {
    pub(crate) fn trouble_with_a_daemon(&mut self) {
        let mut project = self.some_project();
        if self.profile.isolates && self.rng.chance(250) {
            project = self.some_fork(project);
        }
        let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation) else { return };
        match self.rng.below(4) {
            0 => {
                self.fault("daemon crashed");
                self.gone(project, incarnation, Cause::Crashed);
            }
            1 => {
                self.fault("daemon hung, dead");
                self.hang(project, false);
            }
            _ => {
                self.fault("daemon hung, busy");
                self.hang(project, true);
            }
        }
    }

    /// By a bad block, or by a daemon that was killed in the middle of a write.
    pub(crate) fn damage_a_cache(&mut self) {
        let project = self.some_project();
        let key = self.key(project);
        if !self.host.volumes.get(&key).is_some_and(|volume| !volume.foreign && !volume.contents.damaged) {
            return;
        }
        self.fault("cache damaged");
        self.damage(&key);
        if self.rng.chance(600)
            && let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation)
        {
            self.gone(project, incarnation, Cause::Crashed);
        }
    }

    /// Whether it rebooted.
    pub(crate) fn trouble_with_the_host(&mut self) -> bool {
        match self.rng.below(6) {
            0 => {
                self.reboot();
                return true;
            }
            1..=3 => {
                self.fault("image updated");
                self.host.image += 1;
                self.later(0, Due::Event(kiln::host::InstanceEvent::Missed));
            }
            4 => {
                self.fault("certificates about to end");
                let project = self.some_project();
                let key = self.key(project);
                if let Some(files) = self.host.files.get_mut(&key) {
                    files.old = true;
                }
            }
            _ => {
                self.fault("events missed");
                self.later(0, Due::Event(kiln::host::InstanceEvent::Missed));
            }
        }
        false
    }

    /// All daemons at once.
    pub(crate) fn reboot(&mut self) {
        self.fault("host rebooted");
        for project in 0..self.cast.everybody() {
            if let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation) {
                self.gone(project, incarnation, Cause::Rebooted);
            }
        }
    }

    pub(crate) fn somebody_else(&mut self) {
        let project = self.some_project();
        let key = self.key(project);
        match self.rng.below(4) {
            0 => {
                self.fault("a stranger on the host");
                let kind = self.rng.pick(&["instance", "volume"]).unwrap_or("volume");
                let name = format!("{kind} stranger{}", self.rng.below(5));
                self.host.strangers.insert(name);
            }
            1 if !self.host.volumes.contains_key(&key) && !self.host.instances.contains_key(&key) => {
                self.fault("somebody else's volume in a project's place");
                self.make_foreign_volume(&key);
            }
            2 => {
                let ready = self.host.instances.get(&key).is_some_and(|i| i.daemon.is_none() && !i.half_made);
                let volume = self.host.volumes.get(&key).is_some_and(|volume| !volume.foreign);
                if ready && volume && !self.host.busy.contains(&key) {
                    self.fault("somebody else started a daemon");
                    let now = self.now();
                    self.host.started_by_hand.insert(key.clone(), now);
                    self.start_daemon(&key);
                }
            }
            _ => {
                if let Some(incarnation) = self.daemon(project).map(|daemon| daemon.incarnation) {
                    self.fault("somebody else stopped a daemon");
                    self.gone(project, incarnation, Cause::Crashed);
                }
            }
        }
    }

    pub(crate) fn trouble_with_the_disk(&mut self) {
        if self.rng.chance(500) {
            self.fault("disk stalled");
            let now = self.now();
            self.disk_stalls_until = now + self.rng.between(100, LONGEST_STALL);
        } else {
            self.fault("disk full");
            self.set_disk_full(true);
            let after = self.rng.pick(&[100, 2 * SECOND, 15 * SECOND, 90 * SECOND]).unwrap_or(SECOND);
            self.later(after, Due::DiskHasRoom);
        }
    }

    pub(crate) fn set_disk_full(&mut self, full: bool) {
        self.disk_full = full;
        if let Some(disk) = &self.disk {
            disk.set_full(full);
        }
    }

    pub(crate) fn change_load(&mut self) {
        let which = self.rng.below(4);
        let load = &mut self.host.load;
        let kind = match which {
            0 => {
                load.storage = Some(96.0);
                "storage full for new volumes"
            }
            1 => {
                load.storage = Some(99.0);
                "storage full"
            }
            2 => {
                load.memory_some = Some(35.0);
                "memory pressure"
            }
            _ => {
                load.memory_full = Some(60.0);
                "host thrashes"
            }
        };
        self.fault(kind);
        let after = self.rng.between(1, 90) * SECOND;
        self.later(after, Due::LoadFalls);
    }

    pub(crate) fn jump(&mut self) {
        let spans = [SECOND, 20 * SECOND, 2 * MINUTE, 15 * MINUTE, 60 * MINUTE, 30 * 24 * 60 * MINUTE];
        let span = self.rng.pick(&spans).unwrap_or(SECOND).cast_signed();
        let by = if self.rng.chance(500) { span } else { -span };
        self.fault(if by > 0 { "clock jumped forward" } else { "clock jumped back" });
        self.record(Fact::ClockJumped { by: 0 });
        self.offset += by;
        self.record(Fact::ClockJumped { by });
    }
}
