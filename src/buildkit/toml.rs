//! Renders `buildkitd.toml`, in the field names of BuildKit v0.34 (`cmd/buildkitd/config`).
//!
//! A cache that reaches the end of its volume is a brick: buildkitd cannot even prune, and does not start again. So
//! garbage collection always has a ceiling in absolute bytes, well below the volume's size. Percentages are of no use:
//! buildkitd rounds them up to whole gigabytes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddrV4};
use std::path::{Path, PathBuf};

use kiln_domain::Entitlements;
use kiln_domain::cache::size::Collection;
use serde::Serialize;
use thiserror::Error;

/// What one daemon is told. Paths are as the daemon sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Where the cache lives.
    pub root: PathBuf,
    /// Where it listens, with mutual TLS. There is no other listener.
    pub address: SocketAddrV4,
    /// Holds `ca.pem`, `cert.pem` and `key.pem`.
    pub files: PathBuf,
    /// For what does not outlive the daemon. Daemons that share a file system must not share it: buildkitd puts a socket
    /// for its build steps' traces there. At most 80 bytes, for a socket's path has an end.
    pub run: PathBuf,
    pub capacity: Capacity,
    /// Name servers of the build steps; empty: the daemon's own.
    pub resolvers: Vec<IpAddr>,
    /// Build steps at a time; `None` is unlimited.
    pub max_parallelism: Option<u32>,
    /// What builds may ask for beyond what all get.
    pub entitlements: Entitlements,
    pub debug: bool,
}

/// What there is to fill, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// The volume has a size of its own, which says when it is collected.
    Own(Collection),
    /// The volume shares a file system of this size with others.
    Shared(u64),
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    #[error("{bytes} bytes are too few for a cache: put the volumes where there are at least {} MiB", SMALLEST >> 20)]
    TooSmall { bytes: u64 },
    #[error("{0:?} cannot be written into buildkitd.toml: use a path of UTF-8 text")]
    NotText(PathBuf),
    #[error("{0:?} is too long to hold a socket: at most 80 bytes")]
    RunTooLong(PathBuf),
}

/// A base image and one layer; below that there is nothing to collect.
const SMALLEST: u64 = 256 << 20;

/// `sun_path` has 108 bytes (unix(7)), the socket's own name and a margin taken off.
const LONGEST_RUN: usize = 80;

impl DaemonConfig {
    pub fn render(&self) -> Result<String, ConfigError> {
        let text = |path: &Path| path.to_str().map(str::to_owned).ok_or_else(|| ConfigError::NotText(path.to_owned()));
        if self.run.as_os_str().len() > LONGEST_RUN {
            return Err(ConfigError::RunTooLong(self.run.clone()));
        }
        let file = File {
            root: text(&self.root)?,
            entitlements: self.entitlements.iter().map(|entitlement| entitlement.name()).collect(),
            log: Log { format: "text", level: if self.debug { "debug" } else { "info" } },
            grpc: Grpc {
                address: [format!("tcp://{}", self.address)],
                tls: Tls {
                    cert: text(&self.files.join("cert.pem"))?,
                    key: text(&self.files.join("key.pem"))?,
                    ca: text(&self.files.join("ca.pem"))?,
                },
            },
            otel: Otel { socket_path: text(&self.run.join("otel-grpc.sock"))? },
            cdi: Cdi { disabled: true },
            history: History { max_age: 2 * DAY, max_entries: 50 },
            dns: (!self.resolvers.is_empty())
                .then(|| Dns { nameservers: self.resolvers.iter().map(ToString::to_string).collect() }),
            worker: Workers {
                oci: Oci {
                    enabled: true,
                    snapshotter: "auto",
                    network_mode: "host",
                    max_parallelism: self.max_parallelism,
                    gc: true,
                    gcpolicy: policy(Space::of(self.capacity)?),
                    labels: BTreeMap::new(),
                },
                containerd: Containerd { enabled: false },
            },
        };
        // Strings, numbers and tables of them: there is nothing in it that TOML cannot say.
        Ok(::toml::to_string(&file).unwrap_or_default())
    }
}

const DAY: u64 = 24 * 60 * 60;

/// The three numbers that every rule of buildkitd's garbage collection knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Space {
    ceiling: u64,
    /// Never collected below this, whatever else is wanted.
    reserved: u64,
    /// Left free on the file system.
    free: u64,
}

impl Space {
    fn of(capacity: Capacity) -> Result<Self, ConfigError> {
        let bytes = match capacity {
            // Where it begins to collect is less than what there is.
            Capacity::Own(Collection { ceiling, .. }) => ceiling,
            Capacity::Shared(bytes) => bytes,
        };
        if bytes < SMALLEST {
            return Err(ConfigError::TooSmall { bytes });
        }
        let percent = |share| part(bytes, share);
        Ok(match capacity {
            Capacity::Own(Collection { ceiling, reserved, free }) => Self { ceiling, reserved, free },
            // The floors of many caches add up on one file system, and together they must not reach its end.
            Capacity::Shared(_) => Self { ceiling: percent(50), reserved: percent(1).min(1 << 30), free: percent(15) },
        })
    }

    fn rule(self, share_of_ceiling: u64, filters: &[&'static str], days: Option<u64>, all: bool) -> Rule {
        let ceiling = part(self.ceiling, share_of_ceiling);
        Rule {
            all,
            filters: filters.to_vec(),
            keep_duration: days.map(|days| format!("{}s", days * DAY)),
            reserved_space: self.reserved.to_string(),
            max_used_space: ceiling.to_string(),
            min_free_space: self.free.to_string(),
        }
    }
}

/// `share` percent, at most 100 of them, without losing small sizes or overflowing on large ones.
fn part(bytes: u64, share: u64) -> u64 {
    bytes / 100 * share + bytes % 100 * share / 100
}

/// From the cheapest to lose to the dearest. `maxUsedSpace` is compared with the whole cache, not with what a rule's
/// filter selects, so a rule says: when the cache is fuller than this, such things may go.
fn policy(space: Space) -> Vec<Rule> {
    vec![
        // The client sends its context again, a checkout is fetched again.
        space.rule(25, &["type==source.local", "type==source.git.checkout"], Some(2), false),
        // Package caches are what makes a rebuild quick: kept for a week as long as half is free.
        space.rule(50, &["type==exec.cachemount"], Some(7), false),
        space.rule(75, &[], Some(30), false),
        space.rule(100, &[], None, false),
        // Internal and shared records too: the ceiling holds.
        space.rule(100, &[], None, true),
    ]
}

#[derive(Serialize)]
struct File {
    root: String,
    /// None unless they were granted: neither the daemon's network by name, nor privileged steps; devices never.
    #[serde(rename = "insecure-entitlements")]
    entitlements: Vec<&'static str>,
    log: Log,
    grpc: Grpc,
    otel: Otel,
    cdi: Cdi,
    history: History,
    #[serde(skip_serializing_if = "Option::is_none")]
    dns: Option<Dns>,
    worker: Workers,
}

#[derive(Serialize)]
struct Log {
    format: &'static str,
    level: &'static str,
}

#[derive(Serialize)]
struct Grpc {
    /// Naming one replaces the default, a unix socket.
    address: [String; 1],
    tls: Tls,
}

/// With a `ca`, buildkitd requires and verifies client certificates.
#[derive(Serialize)]
struct Tls {
    cert: String,
    key: String,
    ca: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Otel {
    socket_path: String,
}

#[derive(Serialize)]
struct Cdi {
    disabled: bool,
}

/// BuildKit's own defaults, said aloud. `max_age` in seconds.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct History {
    max_age: u64,
    max_entries: u64,
}

#[derive(Serialize)]
struct Dns {
    nameservers: Vec<String>,
}

#[derive(Serialize)]
struct Workers {
    oci: Oci,
    containerd: Containerd,
}

#[derive(Serialize)]
struct Oci {
    enabled: bool,
    snapshotter: &'static str,
    /// The instance's own network, which the host's rules are about; never CNI that happens to be configured.
    #[serde(rename = "networkMode")]
    network_mode: &'static str,
    #[serde(rename = "max-parallelism", skip_serializing_if = "Option::is_none")]
    max_parallelism: Option<u32>,
    gc: bool,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    gcpolicy: Vec<Rule>,
}

#[derive(Serialize)]
struct Containerd {
    enabled: bool,
}

/// Sizes as strings of bytes, as buildkitd's parser wants them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Rule {
    all: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    filters: Vec<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_duration: Option<String>,
    reserved_space: String,
    max_used_space: String,
    min_free_space: String,
}

#[cfg(test)]
mod tests {
    use kiln_domain::Entitlement;

    use kiln_domain::cache::size::{Bounds, SizePolicy};

    use super::*;

    /// Of a volume that does not grow.
    fn own(size: u64) -> Capacity {
        let policy = SizePolicy::default();
        Capacity::Own(Collection::of(size, &Bounds::new(size, Some(size), &policy), &policy))
    }

    fn config(capacity: Capacity) -> DaemonConfig {
        DaemonConfig {
            root: "/var/lib/buildkit".into(),
            address: "10.88.0.7:1234".parse().expect("an address"),
            files: "/etc/kiln".into(),
            run: "/run/buildkit".into(),
            capacity,
            resolvers: vec!["192.0.2.53".parse().expect("an address")],
            max_parallelism: Some(4),
            entitlements: Entitlements::new(),
            debug: false,
        }
    }

    fn parsed(config: &DaemonConfig) -> ::toml::Table {
        config.render().expect("rendered").parse().expect("valid TOML")
    }

    fn rules(config: &DaemonConfig) -> Vec<::toml::Table> {
        let rules = parsed(config)["worker"]["oci"]["gcpolicy"].as_array().expect("an array").clone();
        rules.into_iter().map(|r| r.as_table().expect("a table").clone()).collect()
    }

    fn bytes(rule: &::toml::Table, field: &str) -> u64 {
        rule[field].as_str().expect("text").parse().expect("bytes")
    }

    #[test]
    fn says_where_and_with_what_to_listen_and_nothing_more() {
        let file = parsed(&config(own(10 << 30)));
        assert_eq!(file["root"].as_str(), Some("/var/lib/buildkit"));
        assert_eq!(file["grpc"]["address"].as_array().map(Vec::len), Some(1));
        assert_eq!(file["grpc"]["address"][0].as_str(), Some("tcp://10.88.0.7:1234"));
        assert_eq!(file["grpc"]["tls"]["ca"].as_str(), Some("/etc/kiln/ca.pem"));
        assert_eq!(file["cdi"]["disabled"].as_bool(), Some(true));
        assert_eq!(file["insecure-entitlements"].as_array().map(Vec::len), Some(0));
        assert_eq!(file["dns"]["nameservers"][0].as_str(), Some("192.0.2.53"));
        assert_eq!(file["worker"]["oci"]["max-parallelism"].as_integer(), Some(4));
        assert_eq!(file["worker"]["containerd"]["enabled"].as_bool(), Some(false));
        assert!(!file["grpc"].as_table().expect("a table").contains_key("debugAddress"));
    }

    #[test]
    fn only_what_was_granted_is_an_entitlement() {
        let entitlements = Entitlements::from([Entitlement::NetworkHost]);
        let file = parsed(&DaemonConfig { entitlements, ..config(own(10 << 30)) });
        let names = file["insecure-entitlements"].as_array().expect("a list");
        assert_eq!(names.iter().map(|name| name.as_str()).collect::<Vec<_>>(), [Some("network.host")]);
    }

    #[test]
    fn what_is_not_set_is_left_out() {
        let plain =
            DaemonConfig { resolvers: Vec::new(), max_parallelism: None, ..config(Capacity::Shared(100 << 30)) };
        let file = parsed(&plain);
        assert!(!file.contains_key("dns"));
        assert!(!file["worker"]["oci"].as_table().expect("a table").contains_key("max-parallelism"));
    }

    #[test]
    fn every_rule_has_a_ceiling_below_the_volume_and_the_last_knows_no_age() {
        for (capacity, size) in [
            (own(2 * SMALLEST), 2 * SMALLEST),
            (own(1 << 42), 1 << 42),
            (Capacity::Shared(SMALLEST), SMALLEST),
            (Capacity::Shared(1 << 42), 1 << 42),
        ] {
            let rules = rules(&config(capacity));
            for rule in &rules {
                let ceiling = bytes(rule, "maxUsedSpace");
                assert!(ceiling > 0 && ceiling <= size / 4 * 3, "{rule:?}");
                assert!(bytes(rule, "reservedSpace") < ceiling, "{rule:?}");
                assert!(ceiling + bytes(rule, "minFreeSpace") < size, "{rule:?}");
            }
            let last = rules.last().expect("rules");
            assert!(
                !last.contains_key("keepDuration")
                    && !last.contains_key("filters")
                    && last["all"].as_bool() == Some(true)
            );
        }
    }

    #[test]
    fn what_cannot_work_is_refused() {
        assert!(matches!(config(own(SMALLEST)).render(), Err(ConfigError::TooSmall { .. })));
        let shared = Capacity::Shared(SMALLEST - 1);
        assert_eq!(config(shared).render(), Err(ConfigError::TooSmall { bytes: SMALLEST - 1 }));
        let long = PathBuf::from(format!("/{}", "x".repeat(100)));
        assert_eq!(
            DaemonConfig { run: long.clone(), ..config(own(1 << 40)) }.render(),
            Err(ConfigError::RunTooLong(long))
        );
    }

    #[test]
    fn odd_paths_survive() {
        let odd = "/srv/a \"b\"\\\n[c]";
        let file = parsed(&DaemonConfig { root: odd.into(), ..config(own(1 << 40)) });
        assert_eq!(file["root"].as_str(), Some(odd));
    }
}
