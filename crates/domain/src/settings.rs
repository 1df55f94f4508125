//! What can be set for a project, and where each value comes from.
//!
//! A value is looked for in three places, and the first that has it wins: the project's own settings (`kiln set`), the
//! first rule of the configuration that matches its repository, the host's defaults. A change in any of them takes effect
//! at once where it is only a rule of ours (tier, idle window), and by a roll of the daemon where it is built into it
//! (limits). A cache's size is a rule of its own.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::key::Role;
use crate::repo::RepoName;

/// How eagerly a project's daemon is kept up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Stopped when its idle window has passed.
    #[default]
    Warm,
    /// Never stopped for being idle, and started again when it died.
    Hot,
}

impl Tier {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Hot => "hot",
        }
    }
}

impl FromStr for Tier {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        match text {
            "warm" => Ok(Self::Warm),
            "hot" => Ok(Self::Hot),
            _ => Err(SettingsError::new("tier", text, "it is warm or hot")),
        }
    }
}

/// What buildkitd calls an insecure entitlement: what a build may ask for beyond what every build gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Entitlement {
    /// Steps with all capabilities that the daemon has.
    #[serde(rename = "security.insecure")]
    SecurityInsecure,
    /// Steps in the daemon's own network, by name.
    #[serde(rename = "network.host")]
    NetworkHost,
}

/// Empty: none.
pub type Entitlements = BTreeSet<Entitlement>;

impl Entitlement {
    pub const fn name(self) -> &'static str {
        match self {
            Self::SecurityInsecure => "security.insecure",
            Self::NetworkHost => "network.host",
        }
    }
}

impl FromStr for Entitlement {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let known = [Self::SecurityInsecure, Self::NetworkHost].into_iter().find(|known| known.name() == text);
        known.ok_or_else(|| SettingsError::new("entitlements", text, "it is security.insecure or network.host"))
    }
}

/// Settings of one place; `None` leaves the value to the next.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// How long a daemon stays up after its last activity, as it is: an own window is not adapted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_window: Option<Duration>,
    /// The first size of its cache's volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_bytes: Option<u64>,
    /// What that may grow to; equal to the first size: it never grows. [`crate::cache::size`] says when it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_max_bytes: Option<u64>,
    /// Daemons beside its own that it may have when that is saturated; 0: none. See [`crate::cache::fanout`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fan_out: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
    /// Bytes per second that are read from the disk, and as many that are written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_bytes: Option<u64>,
    /// For trusted builds only, whatever stands here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entitlements: Option<Entitlements>,
}

/// What there is to give; `None`: it cannot be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostSize {
    pub cpus: Option<u32>,
    pub memory_bytes: Option<u64>,
    /// Its runtime sets no limits on what a daemon uses, so that none may be asked for.
    pub without_limits: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field} = {value}: {why}")]
pub struct SettingsError {
    field: &'static str,
    value: String,
    why: &'static str,
}

impl SettingsError {
    fn new(field: &'static str, value: impl fmt::Display, why: &'static str) -> Self {
        Self { field, value: value.to_string().chars().take(64).collect(), why }
    }
}

impl Settings {
    /// A window beyond this is a hot project that does not say so.
    pub const LONGEST_WINDOW: Duration = Duration::from_hours(24 * 30);
    /// A cache below this is of no use.
    pub const SMALLEST_VOLUME: u64 = 1 << 30;
    /// buildkitd and one step of a build do not fit in less.
    pub const SMALLEST_MEMORY: u64 = 256 << 20;
    /// `PID_MAX_LIMIT` of 64-bit Linux.
    pub const MOST_PROCESSES: u32 = 4 << 20;
    /// Beyond any disk that one host has.
    pub const LARGEST_VOLUME: u64 = 1 << 50;
    /// buildkitd is a Go program; it alone has dozens of threads.
    pub const FEWEST_PROCESSES: u32 = 256;
    /// Per second; with less a daemon does not even start in time.
    pub const LEAST_IO: u64 = 1 << 20;
    /// Daemons of one project on one host: with more of them each has less than a build needs.
    pub const MOST_MEMBERS: u16 = 32;

    /// What of it counts for one of this role: how eagerly a copy is kept up is nobody's to set, or it would never go.
    #[must_use]
    pub fn for_role(self, role: Role) -> Self {
        if role.is_derived() { Self { tier: None, idle_window: None, fan_out: None, ..self } } else { self }
    }

    /// Whether nothing is set that [`Settings::for_role`] leaves out.
    pub fn check_for(&self, role: Role) -> Result<(), SettingsError> {
        let why = "is the project's to have: a copy of its cache goes when nobody uses it";
        match (self.tier, self.idle_window, self.fan_out) {
            _ if !role.is_derived() => Ok(()),
            (Some(tier), ..) => Err(SettingsError::new("tier", tier.name(), why)),
            (_, Some(window), _) => Err(SettingsError::new("idle_window", format!("{} s", window.as_secs()), why)),
            (_, _, Some(members)) => Err(SettingsError::new("fan_out", members, why)),
            (None, None, None) => Ok(()),
        }
    }

    pub fn check(&self) -> Result<(), SettingsError> {
        let bad = |field, value: &dyn fmt::Display, why| Err(SettingsError::new(field, value, why));
        if let Some(window) = self.idle_window {
            if window > Self::LONGEST_WINDOW {
                return bad("idle window", &format!("{} s", window.as_secs()), "at most 30 days; a project can be hot");
            }
            if self.tier == Some(Tier::Hot) {
                return bad(
                    "idle window",
                    &format!("{} s", window.as_secs()),
                    "a hot project has none: it is never idle",
                );
            }
        }
        if let Some(bytes) = self.volume_bytes.filter(|bytes| *bytes < Self::SMALLEST_VOLUME) {
            return bad("volume", &bytes, "a cache below 1 GiB is of no use");
        }
        if let Some(bytes) = self.volume_max_bytes.filter(|bytes| *bytes < Self::SMALLEST_VOLUME) {
            return bad("volume max", &bytes, "a cache below 1 GiB is of no use");
        }
        if let (Some(first), Some(max)) = (self.volume_bytes, self.volume_max_bytes)
            && max < first
        {
            return bad("volume max", &max, "it is less than the first size; set volume to less as well");
        }
        if let Some(count) = self.fan_out.filter(|count| *count > Self::MOST_MEMBERS) {
            return bad("fan out", &count, "at most 32 daemons beside its own");
        }
        if let Some(bytes) = self.memory_bytes.filter(|bytes| *bytes < Self::SMALLEST_MEMORY) {
            return bad("memory", &bytes, "a daemon needs at least 256 MiB");
        }
        if self.cpus == Some(0) {
            return bad("cpus", &0, "a daemon needs at least one");
        }
        if let Some(count) = self.processes.filter(|count| *count < Self::FEWEST_PROCESSES) {
            return bad("processes", &count, "a daemon needs at least 256");
        }
        if let Some(bytes) = self.io_bytes.filter(|bytes| *bytes < Self::LEAST_IO) {
            return bad("io", &bytes, "a daemon needs at least 1 MiB a second");
        }
        Ok(())
    }

    /// Whether a host of this size can give what is asked.
    pub fn check_against(&self, host: &HostSize) -> Result<(), SettingsError> {
        let bad = |field, value: &dyn fmt::Display, why| Err(SettingsError::new(field, value, why));
        if let (Some(wanted), Some(there)) = (self.cpus, host.cpus)
            && wanted > there
        {
            return bad("cpus", &wanted, "the host has fewer");
        }
        if let (Some(wanted), Some(there)) = (self.memory_bytes, host.memory_bytes)
            && wanted > there
        {
            return bad("memory", &wanted, "the host has less");
        }
        if let Some(wanted) = self.processes.filter(|wanted| *wanted > Self::MOST_PROCESSES) {
            return bad("processes", &wanted, "the kernel counts to 4194304");
        }
        if let Some(wanted) = self.volume_bytes.filter(|wanted| *wanted > Self::LARGEST_VOLUME) {
            return bad("volume", &wanted, "at most 1 PiB");
        }
        if let Some(wanted) = self.volume_max_bytes.filter(|wanted| *wanted > Self::LARGEST_VOLUME) {
            return bad("volume max", &wanted, "at most 1 PiB");
        }
        Ok(())
    }

    /// L18: a limit that nothing enforces is refused when somebody asks for it. One from `before`, of another runtime, may stay.
    pub fn check_limits(&self, before: &Self, host: &HostSize) -> Result<(), SettingsError> {
        let why = "the runtime `process` sets no limits: they need runtime `incus`";
        let new = |now: Option<u64>, before: Option<u64>| now.filter(|_| host.without_limits && now != before);
        let limits = [
            ("cpus", new(self.cpus.map(u64::from), before.cpus.map(u64::from))),
            ("memory", new(self.memory_bytes, before.memory_bytes)),
            ("processes", new(self.processes.map(u64::from), before.processes.map(u64::from))),
            ("io", new(self.io_bytes, before.io_bytes)),
        ];
        match limits.into_iter().find_map(|(field, limit)| Some((field, limit?))) {
            Some((field, limit)) => Err(SettingsError::new(field, limit, why)),
            None => Ok(()),
        }
    }

    /// Whether any of what a daemon may use is bounded.
    pub const fn has_limits(&self) -> bool {
        self.cpus.is_some() || self.memory_bytes.is_some() || self.processes.is_some() || self.io_bytes.is_some()
    }

    /// These, and what they leave open from `next`.
    #[must_use]
    pub fn or(&self, next: &Self) -> Self {
        let tier = self.tier.or(next.tier);
        // A window that was made for another tier does not come along.
        let inherits_window = self.tier.is_none() || self.tier == Some(Tier::Warm);
        Self {
            tier,
            idle_window: self.idle_window.or(next.idle_window.filter(|_| inherits_window)),
            volume_bytes: self.volume_bytes.or(next.volume_bytes),
            volume_max_bytes: self.volume_max_bytes.or(next.volume_max_bytes),
            fan_out: self.fan_out.or(next.fan_out),
            memory_bytes: self.memory_bytes.or(next.memory_bytes),
            cpus: self.cpus.or(next.cpus),
            processes: self.processes.or(next.processes),
            io_bytes: self.io_bytes.or(next.io_bytes),
            entitlements: self.entitlements.clone().or_else(|| next.entitlements.clone()),
        }
    }
}

/// Which repositories a rule is for: one, all at and below a path, or all. `github.com/org/*` is `github.com/org` too, as the
/// reference has it: so one name can stand for a group and for the repository of that name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoPattern {
    /// Lower case, without the `*`.
    stem: String,
    below: bool,
}

impl FromStr for RepoPattern {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let bad = |why| SettingsError::new("repo", text, why);
        if text == "*" {
            return Ok(Self::EVERYTHING);
        }
        let (stem, below) = match text.strip_suffix("/*") {
            Some(stem) => (stem, true),
            None => (text, false),
        };
        if stem.contains('*') {
            return Err(bad("a * stands at the end only, after a slash"));
        }
        let stem = RepoName::parse(stem).map_err(|_| bad("it is a repository, or a path that ends in /*"))?;
        Ok(Self { stem: stem.as_str().to_owned(), below })
    }
}

impl fmt::Display for RepoPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.stem.as_str(), self.below) {
            ("", _) => f.write_str("*"),
            (stem, true) => write!(f, "{stem}/*"),
            (stem, false) => f.write_str(stem),
        }
    }
}

impl RepoPattern {
    /// `*`.
    pub const EVERYTHING: Self = Self { stem: String::new(), below: true };

    pub fn matches(&self, repo: &RepoName) -> bool {
        self.covers(repo.as_str(), false)
    }

    fn covers(&self, stem: &str, below: bool) -> bool {
        if !self.below {
            return !below && self.stem == stem;
        }
        self.stem.is_empty()
            || stem.strip_prefix(&self.stem).is_some_and(|rest| rest.starts_with('/') || rest.is_empty())
    }
}

/// Settings for the repositories that a pattern names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub repo: RepoPattern,
    pub settings: Settings,
}

/// The rules of the configuration, in their order. The first that matches is the one that counts, as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules(pub Vec<Rule>);

/// A rule that no repository can ever reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shadowed {
    /// Counted from 1, as a reader of the file counts.
    pub rule: usize,
    pub by: usize,
    pub text: String,
}

impl Rules {
    /// What counts for a project: its own settings, then the first rule that matches, then the host's defaults.
    pub fn settings(&self, own: &Settings, repo: &RepoName, defaults: &Settings) -> Settings {
        match self.first(repo) {
            Some(rule) => own.or(&rule.settings).or(defaults),
            None => own.or(defaults),
        }
    }

    pub fn first(&self, repo: &RepoName) -> Option<&Rule> {
        self.0.iter().find(|rule| rule.repo.matches(repo))
    }

    pub fn shadowed(&self) -> Vec<Shadowed> {
        let mut found = Vec::new();
        for (at, Rule { repo, .. }) in self.0.iter().enumerate() {
            if let Some(by) = self.0[..at].iter().position(|earlier| earlier.repo.covers(&repo.stem, repo.below)) {
                let text = format!(
                    "rule {} ({repo}) can never match: rule {} ({}) takes all of it",
                    at + 1,
                    by + 1,
                    self.0[by].repo
                );
                found.push(Shadowed { rule: at + 1, by: by + 1, text });
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> RepoPattern {
        text.parse().expect("a pattern")
    }

    fn repo(text: &str) -> RepoName {
        RepoName::parse(text).expect("a repository")
    }

    fn rules(patterns: &[&str]) -> Rules {
        let rule = |(at, text): (usize, &&str)| Rule {
            repo: pattern(text),
            settings: Settings { cpus: Some(u32::try_from(at + 1).expect("small")), ..Settings::default() },
        };
        Rules(patterns.iter().enumerate().map(rule).collect())
    }

    #[test]
    fn patterns() {
        for (text, matching, other) in [
            ("*", "github.com/org/repo", None),
            ("github.com/org/repo", "https://github.com/Org/Repo.git", Some("github.com/org/repo2")),
            ("github.com/org/*", "github.com/org/repo", Some("github.com/org2/repo")),
            ("gitlab.com/group/*", "gitlab.com/group/sub/repo", Some("gitlab.com/groups/repo")),
            ("github.com/org/*", "github.com/org", Some("github.com")),
        ] {
            assert!(pattern(text).matches(&repo(matching)), "{text} and {matching}");
            assert!(other.is_none_or(|other| !pattern(text).matches(&repo(other))), "{text} and {other:?}");
            assert_eq!(pattern(text).to_string(), text);
        }
        for text in ["", "github.com/*/repo", "github.com/org*", "*/repo", "/*"] {
            assert!(text.parse::<RepoPattern>().is_err(), "{text} was taken");
        }
    }

    #[test]
    fn a_rule_that_can_never_match_is_named_with_the_one_before_it() {
        let shadows = |patterns: &[&str]| rules(patterns).shadowed().iter().map(|s| (s.rule, s.by)).collect::<Vec<_>>();
        assert_eq!(shadows(&["github.com/org/repo", "github.com/org/*", "*"]), []);
        assert_eq!(shadows(&["*", "github.com/org/*"]), [(2, 1)]);
        assert_eq!(shadows(&["github.com/org/*", "github.com/org/repo", "github.com/org/sub/*"]), [(2, 1), (3, 1)]);
        assert_eq!(shadows(&["github.com/a/b", "github.com/a/b", "github.com/a/b/*"]), [(2, 1)]);
        assert_eq!(shadows(&["github.com/org/*", "github.com/org/*"]), [(2, 1)]);
        assert_eq!(shadows(&["github.com/org/*", "github.com/org"]), [(2, 1)]);
    }

    #[test]
    fn the_nearest_place_wins() {
        let rules = rules(&["github.com/org/repo", "github.com/org/*"]);
        let defaults = Settings { cpus: Some(9), memory_bytes: Some(1 << 30), ..Settings::default() };
        let cpus = |own: Option<u32>, of: &str| {
            rules.settings(&Settings { cpus: own, ..Settings::default() }, &repo(of), &defaults).cpus
        };
        assert_eq!(cpus(Some(7), "github.com/org/repo"), Some(7));
        assert_eq!(cpus(None, "github.com/org/repo"), Some(1));
        assert_eq!(cpus(None, "github.com/org/other"), Some(2));
        assert_eq!(cpus(None, "github.com/other/repo"), Some(9));
        let own = Settings::default();
        assert_eq!(rules.settings(&own, &repo("github.com/org/repo"), &defaults).memory_bytes, Some(1 << 30));
    }

    #[test]
    fn out_of_range_or_contradicting() {
        let set = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.check().map_err(|error| error.to_string())
        };
        assert_eq!(set(|_| {}), Ok(()));
        assert_eq!(set(|s| s.idle_window = Some(Duration::ZERO)), Ok(()));
        assert_eq!(set(|s| (s.volume_bytes, s.volume_max_bytes) = (Some(1 << 30), Some(1 << 30))), Ok(()));
        assert_eq!(set(|s| s.fan_out = Some(0)), Ok(()));
        for (field, outcome) in [
            ("idle window", set(|s| s.idle_window = Some(Duration::from_hours(721)))),
            ("idle window", set(|s| (s.tier, s.idle_window) = (Some(Tier::Hot), Some(Duration::ZERO)))),
            ("volume", set(|s| s.volume_bytes = Some(1 << 29))),
            ("memory", set(|s| s.memory_bytes = Some(1))),
            ("cpus", set(|s| s.cpus = Some(0))),
            ("processes", set(|s| s.processes = Some(10))),
            ("io", set(|s| s.io_bytes = Some(1))),
            ("volume max", set(|s| s.volume_max_bytes = Some(1 << 29))),
            ("volume max", set(|s| (s.volume_bytes, s.volume_max_bytes) = (Some(2 << 30), Some(1 << 30)))),
            ("fan out", set(|s| s.fan_out = Some(33))),
        ] {
            assert!(outcome.as_ref().is_err_and(|text| text.starts_with(field)), "{field}: {outcome:?}");
        }
    }

    #[test]
    fn more_than_the_host_has_is_refused() {
        let host = HostSize { cpus: Some(2), memory_bytes: Some(4 << 30), without_limits: false };
        let check = |settings: Settings| settings.check_against(&host).is_ok();
        assert!(check(Settings { cpus: Some(2), memory_bytes: Some(4 << 30), ..Settings::default() }));
        assert!(!check(Settings { cpus: Some(3), ..Settings::default() }));
        assert!(!check(Settings { memory_bytes: Some(u64::MAX), ..Settings::default() }));
        assert!(!check(Settings { processes: Some(u32::MAX), ..Settings::default() }));
        assert!(!check(Settings { volume_bytes: Some(u64::MAX), ..Settings::default() }));
        assert!(!check(Settings { volume_max_bytes: Some(u64::MAX), ..Settings::default() }));
    }

    #[test]
    fn no_entitlement_is_a_setting_and_an_unknown_one_is_refused() {
        let all: Entitlements = ["security.insecure", "network.host"].map(|t| t.parse().expect("known")).into();
        let rule = Settings { entitlements: Some(all.clone()), ..Settings::default() };
        assert_eq!(Settings::default().or(&rule).entitlements, Some(all.clone()));
        let none = Settings { entitlements: Some(Entitlements::new()), ..Settings::default() };
        assert_eq!(none.or(&rule).entitlements, Some(Entitlements::new()));
        assert!("device".parse::<Entitlement>().expect_err("unknown").to_string().contains("network.host"));
    }

    #[test]
    fn a_project_made_hot_leaves_a_window_of_the_defaults_behind() {
        let hot = Settings { tier: Some(Tier::Hot), ..Settings::default() };
        let defaults = Settings { idle_window: Some(Duration::from_secs(900)), ..Settings::default() };
        assert_eq!(hot.or(&defaults).idle_window, None);
        assert_eq!(hot.or(&defaults).check(), Ok(()));
    }

    #[test]
    fn a_limit_that_nothing_enforces_is_refused_and_one_from_before_stays() {
        let limited = Settings { memory_bytes: Some(1 << 30), ..Settings::default() };
        let host = HostSize { without_limits: true, ..HostSize::default() };
        let refused = limited.check_limits(&Settings::default(), &host).expect_err("refused");
        assert!(refused.to_string().contains("memory = 1073741824: the runtime `process` sets no limits"), "{refused}");
        let other = Settings { tier: Some(Tier::Hot), ..limited.clone() };
        assert_eq!(other.check_limits(&limited, &host), Ok(()));
        assert_eq!(Settings::default().check_limits(&limited, &host), Ok(()), "it can be taken away");
        assert_eq!(limited.check_limits(&Settings::default(), &HostSize::default()), Ok(()));
    }
}
