//! From a file and flags to a checked [`Config`].

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln_domain::{Settings, UntrustedPolicy};
use thiserror::Error;

use super::{Config, EngineKind, RuntimeKind};

/// What the command line says over the file.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    pub state_dir: Option<PathBuf>,
    pub run_dir: Option<PathBuf>,
    pub runtime: Option<RuntimeKind>,
}

#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {path}: name an existing file with --config, or leave the flag out")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} holds a secret ({key}) and others may read it: chmod 0600 {path}")]
    Exposed { path: PathBuf, key: String },
    #[error("{path} can be changed by others: chmod go-w {path}")]
    Writable { path: PathBuf },
    #[error("{path}: {detail}")]
    Syntax { path: PathBuf, detail: String },
    #[error("{key} = {value}: {why}")]
    Value { key: &'static str, value: String, why: String },
}

/// Words in a key's name that mark its value as secret.
const SECRET_WORDS: [&str; 4] = ["token", "secret", "password", "private"];

impl Config {
    /// `path: None` takes the default file if there is one, and the defaults if not.
    pub fn load(path: Option<&Path>, overrides: &Overrides) -> Result<Self, ConfigError> {
        let file = path.unwrap_or(Path::new("/etc/kiln/kiln.toml"));
        let mut config = match fs::read_to_string(file) {
            Ok(text) => {
                check_mode(file, &text)?;
                Self::parse(file, &text)?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_none() => Self::default(),
            Err(source) => return Err(ConfigError::Read { path: file.to_owned(), source }),
        };
        if let Some(dir) = &overrides.state_dir {
            config.state_dir.clone_from(dir);
        }
        if let Some(dir) = &overrides.run_dir {
            config.run_dir.clone_from(dir);
        }
        if let Some(kind) = overrides.runtime {
            config.runtime.kind = kind;
        }
        config.check()?;
        Ok(config)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| {
            // The parser would print the whole line, and there may be a secret in it.
            let place = error.span().map(|span| place(text, span.start)).unwrap_or_default();
            ConfigError::Syntax { path: path.to_owned(), detail: format!("{place}{}", error.message()) }
        })
    }

    /// What each value alone cannot tell.
    fn check(&self) -> Result<(), ConfigError> {
        self.check_places()?;
        self.check_addresses()?;
        self.check_policy()?;
        self.identity.check()?;
        self.check_what_is_given()
    }

    fn check_places(&self) -> Result<(), ConfigError> {
        for (key, path) in [
            ("state_dir", Some(&self.state_dir)),
            ("run_dir", Some(&self.run_dir)),
            ("api.socket", self.api.socket.as_ref()),
            ("runtime.incus.socket", self.runtime.incus.socket.as_ref()),
            ("volumes.path", self.volumes.path.as_ref()),
            ("buildkit.buildkitd", self.buildkit.buildkitd.as_ref()),
        ] {
            if let Some(path) = path.filter(|path| !path.is_absolute()) {
                return value(key, path, "give an absolute path");
            }
        }
        if self.run_dir.as_os_str().len() > LONGEST_RUN_DIR {
            return value("run_dir", &self.run_dir, "is too long to hold the daemons' sockets: at most 48 bytes");
        }
        Ok(())
    }

    fn check_addresses(&self) -> Result<(), ConfigError> {
        let addresses = self.addresses();
        match self.runtime.kind {
            RuntimeKind::Process if !addresses.is_loopback() => {
                return value("runtime.addresses", &addresses.to_string(), "runtime process needs part of 127.0.0.0/8");
            }
            RuntimeKind::Incus if !addresses.is_private() => {
                return value("runtime.addresses", &addresses.to_string(), "runtime incus needs a private network");
            }
            _ => {}
        }
        self.check_mirrors()?;
        if self.gateway.listen.ip().is_unspecified() && !self.gateway.resolvable {
            let why = "clients are told this address: give one that they can reach, or names that they can resolve \
                       (gateway.domains and gateway.resolvable)";
            return value("gateway.listen", &self.gateway.listen, why);
        }
        if self.gateway.domains.is_empty() {
            return value("gateway.domains", &self.gateway.domains, "name at least one domain");
        }
        if let Some(domain) = self.gateway.domains.iter().find(|domain| !is_domain(domain)) {
            return value("gateway.domains", domain, "is not a DNS name");
        }
        for (key, count) in [
            ("gateway.max_connections", self.gateway.max_connections),
            ("gateway.max_per_address", self.gateway.max_per_address),
            ("gateway.max_per_project", self.gateway.max_per_project),
            ("gateway.max_parked", self.gateway.max_parked),
            ("gateway.max_parked_per_project", self.gateway.max_parked_per_project),
        ] {
            if count == 0 {
                return value(key, &count, "nobody would be let in: give at least 1");
            }
        }
        Ok(())
    }

    fn check_policy(&self) -> Result<(), ConfigError> {
        if self.buildkit.port == 0 {
            return value("buildkit.port", &self.buildkit.port, "give a port number");
        }
        for (key, span) in [
            ("api.route_wait", self.api.route_wait),
            ("buildkit.ready_within", self.buildkit.ready_within),
            ("policy.max_build_age", self.policy.max_build_age),
            ("policy.lease_grace", self.policy.lease_grace),
        ] {
            if span < Duration::from_secs(1) {
                return value(key, &span, "give at least 1s");
            }
        }
        if self.policy.journal_kept < SHORTEST_JOURNAL {
            let why = "what happened is told from it: at least 1h";
            return value("policy.journal_kept", &self.policy.journal_kept, why);
        }
        if self.policy.lease_grace > self.policy.max_build_age {
            return value("policy.lease_grace", &self.policy.lease_grace, "is longer than policy.max_build_age");
        }
        for (key, percent) in [
            ("admission.pressure_waits", self.admission.pressure_waits),
            ("admission.pressure_refuses", self.admission.pressure_refuses),
            ("admission.full_for_new", self.admission.full_for_new),
            ("admission.full", self.admission.full),
        ] {
            if !(1..=100).contains(&percent) {
                return value(key, &percent, "give a percentage, 1 to 100");
            }
        }
        for (key, count) in [
            ("admission.starts", self.admission.starts),
            ("admission.running", self.admission.running),
            ("policy.max_leases", self.policy.max_leases),
        ] {
            if count == 0 {
                return value(key, &count, "give at least 1");
            }
        }
        if self.admission.full_for_new > self.admission.full {
            return value("admission.full_for_new", &self.admission.full_for_new, "is more than admission.full");
        }
        if self.policy.wedged_after < SHORTEST_SILENCE {
            return value(
                "policy.wedged_after",
                &self.policy.wedged_after,
                "a loaded daemon is silent for that long: at least 10s",
            );
        }
        Ok(())
    }

    /// To projects, by default and by rule.
    fn check_what_is_given(&self) -> Result<(), ConfigError> {
        if let Err(error) = self.rules() {
            return value("rules", &self.rules.len(), &error.to_string());
        }
        self.check_caches()?;
        self.local_grants()?;
        match (self.volumes.engine, &self.volumes.dataset) {
            (EngineKind::Zfs, None) => {
                return value("volumes.dataset", &"", "engine zfs needs one: name a dataset, as tank/kiln/cache");
            }
            (EngineKind::Dir | EngineKind::Btrfs, Some(dataset)) => {
                return value(
                    "volumes.dataset",
                    dataset,
                    "only engine zfs has one: set volumes.engine, or leave it out",
                );
            }
            _ => {}
        }
        self.check_caches()?;
        if self.volumes.size < MIN_VOLUME {
            return value("volumes.size", &self.volumes.size, "a cache below 1GiB is of no use");
        }
        if let Err(error) = self.defaults().check() {
            return value("runtime.limits", &self.runtime.limits, &error.to_string());
        }
        self.check_untrusted()
    }

    fn check_mirrors(&self) -> Result<(), ConfigError> {
        let own = [self.gateway.listen, self.api.listen];
        for mirror in &self.network.mirrors {
            let why = if self.addresses().contains(*mirror.ip()) {
                "is among the daemons' own addresses (runtime.addresses)"
            } else if own.contains(&SocketAddr::V4(*mirror)) {
                "is where kilnd itself listens"
            } else {
                continue;
            };
            return Err(ConfigError::Value { key: "network.mirrors", value: mirror.to_string(), why: why.to_owned() });
        }
        Ok(())
    }

    fn check_untrusted(&self) -> Result<(), ConfigError> {
        let UntrustedPolicy { memory_bytes, cpus, processes, io_bytes } = self.untrusted();
        let most = Settings { memory_bytes, cpus, processes, io_bytes, ..Settings::default() };
        most.check().map_err(|error| ConfigError::Value {
            key: "untrusted",
            value: format!("{:?}", self.untrusted),
            why: error.to_string(),
        })
    }
}

pub(super) fn value<T>(key: &'static str, value: &dyn std::fmt::Debug, why: &str) -> Result<T, ConfigError> {
    Err(ConfigError::Value { key, value: format!("{value:?}"), why: why.to_owned() })
}

const MIN_VOLUME: u64 = 1 << 30;

const SHORTEST_SILENCE: Duration = Duration::from_secs(10);

const SHORTEST_JOURNAL: Duration = Duration::from_hours(1);

/// What buildkitd's own socket leaves of `sun_path`'s 108 bytes (see `buildkit::toml`), less `/daemons/` and the longest
/// key.
const LONGEST_RUN_DIR: usize = 48;

/// `line 3, idle_window: `, of a byte's offset.
fn place(text: &str, at: usize) -> String {
    let before = text.get(..at).unwrap_or(text);
    let number = before.matches('\n').count() + 1;
    let line = text.lines().nth(number - 1).unwrap_or_default();
    match line.split_once('=') {
        Some((key, _)) => format!("line {number}, {}: ", key.trim()),
        None => format!("line {number}: "),
    }
}

/// At most 63 bytes a label (RFC 1035), and short enough that a daemon's label fits in front (253 in all).
fn is_domain(text: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= 200 && text.split('.').all(label)
}

fn check_mode(path: &Path, text: &str) -> Result<(), ConfigError> {
    let metadata = fs::metadata(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let mode = metadata.permissions().mode();
    if mode & 0o022 != 0 {
        return Err(ConfigError::Writable { path: path.to_owned() });
    }
    match secret_key(text) {
        Some(key) if mode & 0o004 != 0 => Err(ConfigError::Exposed { path: path.to_owned(), key }),
        _ => Ok(()),
    }
}

/// The first key whose name says that its value is a secret. Looks at lines and not at the parsed file, so that a
/// secret in a file that does not parse is noticed too.
fn secret_key(text: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.split_once('='))
        .map(|(key, _)| key.trim())
        .filter(|key| !key.starts_with('#'))
        .find(|key| SECRET_WORDS.iter().any(|word| key.to_ascii_lowercase().contains(word)))
        .map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), text).expect("written");
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).expect("chmod");
        file
    }

    fn error(text: &str, mode: u32) -> String {
        let file = written(text, mode);
        Config::load(Some(file.path()), &Overrides::default())
            .map_or_else(|e| e.to_string(), |config| format!("accepted as {config:?}"))
    }

    #[test]
    fn the_defaults_are_whole_and_survive_a_round_trip() {
        let text = toml::to_string(&Config::default()).expect("renders");
        assert_eq!(Config::parse(Path::new("x"), &text).expect("parses"), Config::default(), "{text}");
        Config::default().check().expect("valid");
    }

    #[test]
    fn every_key_is_documented() {
        fn keys(table: &toml::Table, prefix: &str, found: &mut Vec<String>) {
            for (name, value) in table {
                match value {
                    toml::Value::Table(inner) => keys(inner, &format!("{prefix}{name}."), found),
                    _ => found.push(format!("`{prefix}{name}`")),
                }
            }
        }
        let text = toml::to_string(&Config::default()).expect("renders");
        let mut found = Vec::new();
        keys(&text.parse().expect("parses"), "", &mut found);
        let page = include_str!("../../docs/configuration.md");
        let missing: Vec<_> = found.iter().filter(|key| !page.contains(*key)).collect();
        assert!(found.len() > 15 && missing.is_empty(), "docs/configuration.md lacks {missing:?}");
    }

    #[test]
    fn an_unknown_key_is_named() {
        for text in ["sate_dir = '/x'", "[api]\nlisten_on = 'x'", "[gatway]", "[runtime.incus]\nimages = 'x'"] {
            let error = error(text, 0o600);
            assert!(error.contains("unknown field") && error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named_with_its_remedy() {
        let error =
            Config::load(Some(Path::new("/nonexistent/kiln.toml")), &Overrides::default()).expect_err("missing");
        assert!(error.to_string().contains("/nonexistent/kiln.toml") && error.to_string().contains("--config"));
        assert!(Config::load(Some(Path::new("/")), &Overrides::default()).is_err());
    }

    #[test]
    fn a_secret_that_others_can_read_is_refused_even_in_a_broken_file() {
        assert!(error("[api]\nadmin_token = 'x'", 0o644).contains("chmod 0600"));
        assert!(!error("[api]\n# admin_token = 'x'", 0o644).contains("chmod"));
        assert!(error("", 0o666).contains("go-w"));
    }

    #[test]
    fn a_line_is_named_and_its_value_is_not_repeated() {
        let error = error("\n[api]\nadmin_token = 'hunter2'", 0o600);
        assert!(error.contains("line 3, admin_token: unknown field") && !error.contains("hunter2"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }

    #[test]
    fn contradictions_are_named() {
        for (text, key) in [
            ("state_dir = 'relative'", "state_dir"),
            ("run_dir = '/run/a/directory/whose/name/is/so/long/that/no/socket/fits'", "run_dir"),
            ("[buildkit]\nbuildkitd = 'buildkitd'", "buildkit.buildkitd"),
            ("[runtime]\naddresses = '127.0.0.9'", "addresses"),
            ("[runtime]\naddresses = '10.0.0.0/16'", "runtime.addresses"),
            ("[runtime]\nkind = 'incus'\naddresses = '127.88.0.0/16'", "runtime.addresses"),
            ("[network]\nmirrors = ['10.1.2.3']", "mirrors"),
            ("[network]\nmirrors = ['mirror.example.com:5000']", "that is a name"),
            ("[network]\nmirrors = ['10.1.2.3:5000', '169.254.169.254:80']", "metadata service"),
            ("[network]\nmirrors = [5000]", "mirrors"),
            ("[network]\nmirrors = ['10.88.0.9:5000']\n[runtime]\nkind = 'incus'", "network.mirrors"),
            ("[network]\nmirrors = ['10.1.2.3:1234']\n[gateway]\nlisten = '10.1.2.3:1234'", "network.mirrors"),
            ("[network]\nallow = ['registry.internal:443']", "that is a name"),
            ("[network]\nallow = ['169.254.169.254:80']", "metadata service"),
            ("[network]\nallow = ['10.0.0.0/8:443']", "as a whole"),
            ("[network]\nallow = ['0.0.0.0/0:443']", "allow"),
            ("[network]\nallow = ['10.1.2.3']", "allow"),
            ("[gateway]\ndomains = []", "gateway.domains"),
            ("[gateway]\ndomains = ['a_b.example']", "gateway.domains"),
            ("[gateway]\nmax_parked = 0", "gateway.max_parked"),
            ("[gateway]\nproxy_protocol_from = ['lb.example.com']", "that is no address"),
            ("[gateway]\nproxy_protocol_from = ['10.1.0.0/8']", "bits set after the prefix"),
            ("[policy]\nlease_grace = '3h'", "policy.lease_grace"),
            ("[policy]\nmax_build_age = '0s'", "policy.max_build_age"),
            ("[policy]\nidle_window = 'soon'", "idle_window"),
            ("[volumes]\nsize = '1MiB'", "volumes.size"),
            ("[volumes]\nengine = 'zfs'", "volumes.dataset"),
            ("[volumes]\ndataset = 'tank/kiln'", "volumes.dataset"),
            ("[volumes]\nsize = '60GB'", "size"),
            ("[buildkit]\nport = 0", "buildkit.port"),
            ("[gateway]\nlisten = '0.0.0.0:1234'", "gateway.listen"),
            ("[runtime]\nlimits = { memory = '1MiB' }", "runtime.limits"),
            ("[untrusted]\nmemory = '1MiB'", "untrusted"),
            ("[untrusted]\ncpus = 0", "untrusted"),
            ("[untrusted]\nio = '1B'", "untrusted"),
            ("[untrusted]\nentitlements = ['network.host']", "unknown field"),
            ("[[rules]]\nrepo = '*'\nentitlements = ['device']", "security.insecure"),
            ("[[rules]]\nrepo = '*'\nio = '1B'", "rules"),
            ("[policy]\nmax_leases = 0", "policy.max_leases"),
            ("[policy]\nwedged_after = '1s'", "policy.wedged_after"),
            ("[policy]\njournal_kept = '59m'", "policy.journal_kept"),
            ("[admission]\nstarts = 0", "admission.starts"),
            ("[admission]\nfull = 101", "admission.full"),
            ("[admission]\nfull_for_new = 99", "admission.full_for_new"),
            ("[growth]\nthreshold = 96", "growth.threshold"),
            ("[growth]\nfactor = 0.9", "growth.factor"),
            ("[growth]\nfactor = nan", "growth.factor"),
            ("[growth]\nmax = '1MiB'", "growth.max"),
            ("[fan_out]\nbuilds = 0", "fan_out.builds"),
            ("[fan_out]\nmembers = 33", "fan_out.members"),
            ("[fan_out]\npressure = 0", "fan_out.pressure"),
            ("[forks]\non_host = 0", "forks.on_host"),
            ("[eviction]\nbegin = 75", "eviction.end"),
            ("[eviction]\nend = 0", "eviction.end"),
            ("[eviction]\nurgent = 79", "eviction.urgent"),
            ("[eviction]\nkeep_newer = 'long'", "keep_newer"),
            ("[snapshots]\nevery = '59s'", "snapshots.every"),
            ("[snapshots]\nkeep = 0", "snapshots.keep"),
            ("[snapshots]\nkeep_for = '0s'", "snapshots.keep_for"),
            ("[[rules]]\nrepo = '*'\nvolume = '20GiB'\nvolume_max = '10GiB'", "rules"),
            ("[[rules]]\nrepo = '*'\nfan_out = 33", "rules"),
            ("[[rules]]\nrepo = 'github.com/*/x'", "rules"),
            ("[[rules]]\ntier = 'hot'", "rules"),
            ("[[rules]]\nrepo = '*'\ntier = 'cold'", "tier"),
            ("[[rules]]\nrepo = '*'\ntier = 'hot'\nidle_window = '1h'", "rules"),
            ("[[rules]]\nrepo = '*'\nprocesses = 1", "rules"),
        ] {
            let error = error(text, 0o600);
            assert!(error.contains(key) && !error.starts_with("accepted"), "of {text}: {error}");
        }
    }

    #[test]
    fn rules_are_read_in_their_order() {
        let file = written(
            "[[rules]]\nrepo = 'github.com/org/a'\ntier = 'hot'\nfan_out = 0\nvolume_max = '9GiB'\n\
             [[rules]]\nrepo = '*'\nidle_window = '1h'",
            0o600,
        );
        let config = Config::load(Some(file.path()), &Overrides::default()).expect("valid");
        let rules = config.rules().expect("read");
        assert_eq!(rules.0.iter().map(|rule| rule.repo.to_string()).collect::<Vec<_>>(), ["github.com/org/a", "*"]);
        assert_eq!(rules.0[1].settings.idle_window, Some(Duration::from_hours(1)));
        let first = &rules.0[0].settings;
        assert_eq!((first.fan_out, first.volume_max_bytes), (Some(0), Some(9 << 30)));
        let text = toml::to_string(&config).expect("renders");
        assert_eq!(Config::parse(Path::new("x"), &text).expect("parses"), config, "{text}");
    }

    #[test]
    fn what_builds_may_reach_survives_a_round_trip() {
        let text = "[network]\nmirrors = ['10.1.2.3:5000']\nallow = ['10.9.0.0/16:443', '192.168.7.1:5432']";
        let config = Config::load(Some(written(text, 0o600).path()), &Overrides::default()).expect("valid");
        assert_eq!((config.network.mirrors.len(), config.network.allow.len()), (1, 2));
        let rendered = toml::to_string(&config).expect("renders");
        assert_eq!(Config::parse(Path::new("x"), &rendered).expect("parses"), config, "{rendered}");
    }

    #[test]
    fn flags_go_before_the_file() {
        let file = written("state_dir = '/a'\n[runtime]\nkind = 'incus'", 0o600);
        let overrides = Overrides { state_dir: Some("/b".into()), ..Overrides::default() };
        let config = Config::load(Some(file.path()), &overrides).expect("valid");
        assert_eq!((config.state_dir, config.runtime.kind), (PathBuf::from("/b"), RuntimeKind::Incus));
    }

    #[test]
    fn without_identity_tcp_is_loopback_whatever_the_config_says() {
        let config = Config::parse(Path::new("x"), "[api]\nlisten = '0.0.0.0:9000'").expect("parses");
        assert_eq!(config.tcp_listen(), ("127.0.0.1:9000".parse().expect("address"), false));
    }
}
