//! What an instance is made of, in Incus's words, and whether one that exists is that. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use kiln_domain::Key;
use serde::Deserialize;
use serde_json::{Value, json};

use super::IncusConfig;
use crate::host::{Change, InstanceSpec, Lane, Properties};

type Map = BTreeMap<String, String>;

/// Marks our instances and holds the project's identity (K5).
pub(crate) const MARK: &str = "user.kiln.";
const LANE: &str = "user.kiln.lane";
/// Where Incus notes what an instance was made from.
const BASE_IMAGE: &str = "volatile.base_image";
const RESOLVERS: &str = "environment.KILN_RESOLVERS";
const ALLOWANCE: &str = "limits.cpu.allowance";
/// Of the cache's device.
const IO_LIMITS: [&str; 2] = ["limits.read", "limits.write"];

/// As Incus lists it; the rest of its fields do not matter to us.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) status_code: u16,
    #[serde(default)]
    pub(crate) status: String,
    /// Changes at each start and at nothing else, whoever starts it, and survives a restart of Incus.
    #[serde(default)]
    pub(crate) last_used_at: String,
    #[serde(default)]
    config: Map,
    #[serde(default)]
    devices: BTreeMap<String, Map>,
    #[serde(default)]
    profiles: Vec<String>,
}

impl Found {
    /// `None` for what does not carry our mark, or under another's name.
    pub(crate) fn key(&self) -> Option<Key> {
        let key: Key = self.config.get(&format!("{MARK}key"))?.parse().ok()?;
        (key.daemon_name() == self.name).then_some(key)
    }

    /// Of one that carries no mark nobody can tell that it is trusted.
    pub(crate) fn lane(&self) -> Lane {
        Lane::of_mark(self.config.get(LANE).map(String::as_str))
    }

    pub(crate) fn address(&self) -> Option<Ipv4Addr> {
        self.devices.get("eth0")?.get("ipv4.address")?.parse().ok()
    }

    /// What is different from what would be made now. `image` is the fingerprint that the alias names, where that is known.
    pub(crate) fn compare(&self, spec: &InstanceSpec, incus: &IncusConfig, image: Option<&str>) -> Comparison {
        let mut outdated = self.changes(spec, incus);
        // One that was made from no image has none that could be older.
        if let (Some(wanted), Some(found)) = (image, self.config.get(BASE_IMAGE)) {
            outdated.extend((wanted != found).then_some(Change::Image));
        }
        outdated.sort();
        Comparison { wrong: self.wrong(spec, incus), outdated }
    }

    /// What may be different in one that is started all the same.
    fn changes(&self, spec: &InstanceSpec, incus: &IncusConfig) -> Vec<Change> {
        let wanted = config(spec, incus);
        let settings: Map = self.config.iter().filter(|(name, _)| !is_note(name)).map(own).collect();
        let differs = |kind: Change| {
            let of_kind = |map: &Map| map.iter().filter(|(name, _)| changeable(name) == Some(kind)).map(own).collect();
            let (is, should): (Map, Map) = (of_kind(&settings), of_kind(&wanted));
            is != should
        };
        let mut changes: Vec<_> =
            [Change::Limits, Change::Resolvers].into_iter().filter(|kind| differs(*kind)).collect();
        let mut devices = devices(spec, incus);
        let io = |device: Option<&Map>| IO_LIMITS.map(|name| device.and_then(|device| device.get(name)).cloned());
        if io(self.devices.get("cache")) != io(devices.get("cache")) && !changes.contains(&Change::Limits) {
            changes.push(Change::Limits);
        }
        let root = devices.remove("root").unwrap_or_default();
        if self.devices.get("root").is_some_and(|found| is_of_another_pool(found, &root)) {
            changes.push(Change::Pool);
        }
        changes
    }

    /// The first difference with which it must not be started, if there is one.
    fn wrong(&self, spec: &InstanceSpec, incus: &IncusConfig) -> Option<String> {
        let wanted = config(spec, incus);
        for (name, value) in wanted.iter().filter(|(name, _)| changeable(name).is_none()) {
            match self.config.get(name) {
                Some(found) if found == value => {}
                // Incus keeps no empty values.
                None if value.is_empty() => {}
                Some(found) => return Some(format!("{name} is {found:?} and should be {value:?}")),
                None => return Some(format!("{name} is not set and should be {value:?}")),
            }
        }
        // Notes that Incus and people keep on it are fine; a setting that we do not make may open what we closed.
        let strange = |name: &str| !is_note(name) && changeable(name).is_none() && !wanted.contains_key(name);
        if let Some(name) = self.config.keys().find(|name| strange(name)) {
            return Some(format!("{name} is set and should not be"));
        }
        let devices_wanted = devices(spec, incus);
        for (name, device) in &devices_wanted {
            match self.devices.get(name) {
                Some(found) if found == device => {}
                Some(found) if name == "root" && is_of_another_pool(found, device) => {}
                Some(found) if name == "cache" && without(&IO_LIMITS, found) == without(&IO_LIMITS, device) => {}
                Some(_) => return Some(format!("its device {name} differs")),
                None => return Some(format!("its device {name} is missing")),
            }
        }
        if let Some(name) = self.devices.keys().find(|name| !devices_wanted.contains_key(*name)) {
            return Some(format!("it has a device {name} that is not ours"));
        }
        self.profiles.first().map(|profile| format!("it uses the profile {profile}"))
    }

    pub(crate) fn properties(&self) -> Properties {
        let ours = self.config.iter().filter_map(|(name, value)| Some((name.strip_prefix(MARK)?, value)));
        ours.map(|(name, value)| (name.to_owned(), value.clone())).collect()
    }
}

/// An instance beside its spec.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Comparison {
    /// With this it must not be started.
    pub(crate) wrong: Option<String>,
    pub(crate) outdated: Vec<Change>,
}

/// What Incus and people write on an instance without its being another.
fn is_note(name: &str) -> bool {
    ["volatile.", "image.", "user."].iter().any(|prefix| name.starts_with(prefix))
}

/// What kind of change another value of a setting is, where it is one and no more.
fn changeable(name: &str) -> Option<Change> {
    match name {
        RESOLVERS => Some(Change::Resolvers),
        // These only: a limit that we never set may be somebody's way around one that we do.
        "limits.memory" | "limits.cpu" | "limits.processes" => Some(Change::Limits),
        _ => None,
    }
}

/// Whether two root disks differ in their pools and in nothing else.
fn is_of_another_pool(found: &Map, wanted: &Map) -> bool {
    found.get("pool") != wanted.get("pool") && without(&["pool"], found) == without(&["pool"], wanted)
}

fn without(names: &[&str], device: &Map) -> Map {
    device.iter().filter(|(name, _)| !names.contains(&name.as_str())).map(own).collect()
}

fn own((name, value): (&String, &String)) -> (String, String) {
    (name.clone(), value.clone())
}

/// The one request that makes an instance: complete, and stopped.
pub(crate) fn creation(spec: &InstanceSpec, incus: &IncusConfig) -> Value {
    json!({
        "name": spec.key.daemon_name(),
        "type": "container",
        "start": false,
        "profiles": [],
        "source": {"type": "image", "alias": incus.image},
        "config": config(spec, incus),
        "devices": devices(spec, incus),
    })
}

fn config(spec: &InstanceSpec, incus: &IncusConfig) -> Map {
    let mut config: Map =
        spec.properties.iter().map(|(name, value)| (format!("{MARK}{name}"), value.clone())).collect();
    let mut set = |name: &str, value: String| config.insert(name.to_owned(), value);
    set(&format!("{MARK}key"), spec.key.to_string());
    set(LANE, spec.lane.name().to_owned());
    set("security.privileged", "false".to_owned());
    set("security.nesting", "false".to_owned());
    // Nothing in there asks Incus for anything.
    set("security.guestapi", "false".to_owned());
    // Kiln alone starts instances: two starters race.
    set("boot.autostart", "false".to_owned());
    if !incus.resolvers.is_empty() {
        let resolvers: Vec<String> = incus.resolvers.iter().map(IpAddr::to_string).collect();
        set(RESOLVERS, resolvers.join(","));
    }
    if spec.lane == Lane::Untrusted {
        // In a contest for the CPU it gets a quarter of what a trusted one gets; alone, all of it.
        set(ALLOWANCE, "25%".to_owned());
        if incus.own_ids {
            // One that breaks out is nobody whom another instance knows.
            set("security.idmap.isolated", "true".to_owned());
        }
    }
    if let Some(bytes) = spec.limits.memory_bytes {
        // Not `limits.memory.swap`: Incus takes that in no project that is restricted, and the restriction is worth more.
        set("limits.memory", format!("{bytes}B"));
    }
    if let Some(cpus) = spec.limits.cpus {
        // So many CPUs and not so much time of all: a build that starts a compiler for each CPU it sees must not see the
        // host's, or it runs out of its memory.
        set("limits.cpu", cpus.to_string());
    }
    if let Some(processes) = spec.limits.processes {
        set("limits.processes", processes.to_string());
    }
    config
}

fn devices(spec: &InstanceSpec, incus: &IncusConfig) -> BTreeMap<String, Map> {
    let device = |settings: &[(&str, &str)]| -> Map {
        settings.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let volume = spec.volume.to_string_lossy();
    let files = spec.files.to_string_lossy();
    let address = spec.address.ip().to_string();
    let interface = Key::interface_name(*spec.address.ip());
    let mac = spec.key.mac();
    let mut cache = device(&[("type", "disk"), ("source", &volume), ("path", "/var/lib/buildkit"), ("shift", "true")]);
    if let Some(bytes) = spec.limits.io_bytes {
        cache.extend(IO_LIMITS.map(|name| (name.to_owned(), format!("{bytes}B"))));
    }
    BTreeMap::from([
        ("root".to_owned(), device(&[("type", "disk"), ("path", "/"), ("pool", &incus.pool)])),
        ("cache".to_owned(), cache),
        (
            "files".to_owned(),
            device(&[
                ("type", "disk"),
                ("source", &files),
                ("path", "/etc/kiln"),
                ("readonly", "true"),
                ("shift", "true"),
            ]),
        ),
        (
            "eth0".to_owned(),
            device(&[
                ("type", "nic"),
                ("nictype", "routed"),
                ("ipv4.address", &address),
                ("host_name", &interface),
                ("hwaddr", &mac),
            ]),
        ),
    ])
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::host::Limits;

    const IMAGE: &str = "2f1c";

    fn incus() -> IncusConfig {
        let mut config = IncusConfig::new(PathBuf::from("/x"), "kiln".to_owned());
        config.resolvers = vec!["9.9.9.9".parse().expect("an address")];
        config
    }

    fn spec() -> InstanceSpec {
        InstanceSpec {
            key: "pbcce5b6205652dd7".parse().expect("a key"),
            lane: Lane::Trusted,
            properties: Map::from([("repo".to_owned(), "h/r".to_owned())]),
            address: "10.88.0.5:8372".parse().expect("an address"),
            volume: PathBuf::from("/v"),
            files: PathBuf::from("/f"),
            limits: Limits { memory_bytes: Some(1 << 30), cpus: Some(2), ..Limits::default() },
        }
    }

    fn found() -> Found {
        let mut made = creation(&spec(), &incus());
        made["status_code"] = json!(102);
        made["config"]["volatile.uuid"] = json!("x");
        made["config"][BASE_IMAGE] = json!(IMAGE);
        made["config"]["image.os"] = json!("debian");
        serde_json::from_value(made).expect("an instance")
    }

    fn compare(change: &dyn Fn(&mut Found)) -> Comparison {
        let mut found = found();
        change(&mut found);
        found.compare(&spec(), &incus(), Some(IMAGE))
    }

    #[test]
    fn what_was_made_is_what_was_wanted() {
        assert_eq!(compare(&|_| ()), Comparison { wrong: None, outdated: Vec::new() });
        assert_eq!(found().key(), Some(spec().key));
        let carried = Map::from([
            ("key".to_owned(), spec().key.to_string()),
            ("lane".to_owned(), "trusted".to_owned()),
            ("repo".to_owned(), "h/r".to_owned()),
        ]);
        assert_eq!(found().properties(), carried);
    }

    #[test]
    fn one_of_which_nobody_says_whose_code_it_runs_is_untrusted() {
        let lane = |mark: Option<&str>| {
            let mut found = found();
            found.config.remove(LANE);
            found.config.extend(mark.map(|mark| (LANE.to_owned(), mark.to_owned())));
            found.lane()
        };
        assert_eq!(lane(Some("trusted")), Lane::Trusted);
        assert_eq!([lane(Some("untrusted")), lane(Some("Trusted")), lane(None)], [Lane::Untrusted; 3]);
    }

    #[test]
    fn everything_that_matters_is_compared() {
        let differs = |change: &dyn Fn(&mut Found)| compare(change).wrong.unwrap_or_default();
        assert!(differs(&|f| drop(f.devices.remove("cache"))).contains("cache is missing"));
        assert!(differs(&|f| drop(f.devices.remove("files"))).contains("files is missing"));
        assert!(differs(&|f| drop(f.devices.insert("sda".into(), Map::new()))).contains("sda that is not ours"));
        let address = |f: &mut Found| {
            f.devices.get_mut("eth0").map(|eth0| eth0.insert("ipv4.address".into(), "10.88.0.6".into()));
        };
        assert!(differs(&address).contains("eth0 differs"));
        assert!(
            differs(&|f| drop(f.config.insert("security.privileged".into(), "true".into()))).contains("privileged")
        );
        assert!(differs(&|f| drop(f.config.insert("raw.lxc".into(), "x".into()))).contains("raw.lxc is set"));
        let allowance = |f: &mut Found| drop(f.config.insert("limits.cpu.allowance".into(), "10%".into()));
        assert!(differs(&allowance).contains("limits.cpu.allowance is set"));
        assert!(differs(&|f| drop(f.config.remove("user.kiln.lane"))).contains("user.kiln.lane is not set"));
        assert!(differs(&|f| drop(f.config.insert("user.kiln.lane".into(), "untrusted".into()))).contains("untrusted"));
        assert!(differs(&|f| drop(f.config.remove("user.kiln.repo"))).contains("user.kiln.repo is not set"));
        let root = |f: &mut Found| {
            f.devices.get_mut("root").map(|root| root.insert("size".into(), "1GiB".into()));
        };
        assert!(differs(&root).contains("root differs"));
        assert!(differs(&|f| f.profiles.push("default".into())).contains("profile default"));
        assert_eq!(differs(&|f| drop(f.config.insert("user.note".into(), "x".into()))), "");
    }

    #[test]
    fn what_may_be_older_is_told_apart_from_what_is_wrong() {
        let changes = |change: &dyn Fn(&mut Found)| {
            let comparison = compare(change);
            assert_eq!(comparison.wrong, None);
            comparison.outdated
        };
        let set = |name: &'static str, value: &'static str| {
            move |f: &mut Found| drop(f.config.insert(name.to_owned(), value.to_owned()))
        };
        assert_eq!(changes(&set("limits.memory", "5B")), [Change::Limits]);
        assert_eq!(changes(&set("limits.processes", "7")), [Change::Limits], "a limit that is taken away");
        assert_eq!(changes(&|f| drop(f.config.remove("limits.cpu"))), [Change::Limits]);
        let io = |f: &mut Found| {
            f.devices.get_mut("cache").map(|cache| cache.insert("limits.write".into(), "5B".into()));
        };
        assert_eq!(changes(&io), [Change::Limits]);
        assert_eq!(changes(&set("environment.KILN_RESOLVERS", "1.1.1.1")), [Change::Resolvers]);
        assert_eq!(changes(&|f| drop(f.config.remove("environment.KILN_RESOLVERS"))), [Change::Resolvers]);
        let pool = |f: &mut Found| {
            f.devices.get_mut("root").map(|root| root.insert("pool".into(), "old".into()));
        };
        assert_eq!(changes(&pool), [Change::Pool]);
        let all = |f: &mut Found| {
            pool(f);
            set("volatile.base_image", "older")(f);
            set("limits.cpu", "9")(f);
        };
        assert_eq!(changes(&all), [Change::Image, Change::Limits, Change::Pool]);
    }

    #[test]
    fn an_image_that_is_not_known_is_not_older() {
        let mut found = found();
        assert_eq!(found.compare(&spec(), &incus(), None).outdated, []);
        assert_eq!(found.compare(&spec(), &incus(), Some("newer")).outdated, [Change::Image]);
        found.config.remove(BASE_IMAGE);
        assert_eq!(found.compare(&spec(), &incus(), Some("newer")).outdated, []);
    }

    #[test]
    fn a_mark_under_another_s_name_is_not_ours() {
        let mut other = found();
        other.name = "buildkitd-p0000000000000000".to_owned();
        assert_eq!(other.key(), None);
        let mut unmarked = found();
        unmarked.config.remove("user.kiln.key");
        assert_eq!(unmarked.key(), None);
    }

    #[test]
    fn the_containers_are_closed() {
        for lane in [Lane::Trusted, Lane::Untrusted] {
            let made = creation(&InstanceSpec { lane, ..spec() }, &incus());
            assert_eq!(made["config"]["security.privileged"], "false");
            assert_eq!(made["config"]["security.nesting"], "false");
            assert_eq!(made["config"]["security.guestapi"], "false");
            assert_eq!(made["devices"]["files"]["readonly"], "true");
            assert_eq!(made["start"], false);
        }
    }

    #[test]
    fn the_untrusted_stand_back_and_share_no_ids() {
        let made = |lane, own_ids| creation(&InstanceSpec { lane, ..spec() }, &IncusConfig { own_ids, ..incus() });
        let trusted = made(Lane::Trusted, true);
        assert!(trusted["config"]["security.idmap.isolated"].is_null() && trusted["config"][ALLOWANCE].is_null());
        let untrusted = made(Lane::Untrusted, true);
        assert_eq!(untrusted["config"]["security.idmap.isolated"], "true");
        assert_eq!(untrusted["config"][ALLOWANCE], "25%");
        assert!(made(Lane::Untrusted, false)["config"]["security.idmap.isolated"].is_null());
    }

    #[test]
    fn limits_are_in_incus_s_words() {
        let limits = Limits { memory_bytes: Some(9), cpus: Some(2), processes: Some(7), io_bytes: Some(5) };
        let made = creation(&InstanceSpec { limits, ..spec() }, &incus());
        for (name, value) in [("limits.memory", "9B"), ("limits.cpu", "2"), ("limits.processes", "7")] {
            assert_eq!(made["config"][name], value, "{name}");
        }
        for name in IO_LIMITS {
            assert_eq!(made["devices"]["cache"][name], "5B");
        }
        let unlimited = creation(&InstanceSpec { limits: Limits::default(), ..spec() }, &incus());
        assert!(!unlimited.to_string().contains("limits."), "{unlimited}");
    }
}
