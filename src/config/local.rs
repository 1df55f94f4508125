//! `[local]`: who on this host may do what.

use kiln_domain::access::{Grade, Scope};
use kiln_domain::settings::RepoPattern;
use serde::{Deserialize, Serialize};

use super::load::value;
use super::{Config, ConfigError};

/// Users by name or number, and groups as `@name`. Who is in several lists has the most that one of them gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Local {
    pub admins: Vec<String>,
    /// They may build every repository, too.
    pub operators: Vec<String>,
    pub builders: Vec<Builders>,
    /// What a program on this host gets over TCP that proves nothing. `None`: `builder` while nothing else proves who asks, and then
    /// `nothing`.
    pub loopback: Option<Loopback>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Builders {
    pub who: Vec<String>,
    /// Patterns, as in `[[rules]]`.
    pub repositories: Vec<String>,
    /// Whatever they build is code that nobody has reviewed.
    #[serde(default)]
    pub untrusted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loopback {
    /// Builds of every repository.
    Builder,
    Nothing,
}

impl Default for Local {
    fn default() -> Self {
        Self {
            admins: vec!["root".to_owned()],
            operators: vec!["@kiln".to_owned()],
            builders: Vec::new(),
            loopback: None,
        }
    }
}

/// One line of the lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalGrant {
    pub who: Who,
    pub grade: Grade,
    pub scope: Scope,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Who {
    Uid(u32),
    User(String),
    Group(String),
}

impl Who {
    fn parse(text: &str) -> Option<Self> {
        let is_name = |name: &str| {
            !name.is_empty()
                && name.len() <= 256
                && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '$' | '@' | '\\'))
        };
        match text.strip_prefix('@') {
            Some(group) => is_name(group).then(|| Self::Group(group.to_owned())),
            // Known also where the system's lists are empty, or away.
            None if text == "root" => Some(Self::Uid(0)),
            None if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok().map(Self::Uid),
            None => is_name(text).then(|| Self::User(text.to_owned())),
        }
    }
}

impl Config {
    /// The lists of `[local]`, what gives the most first.
    pub fn local_grants(&self) -> Result<Vec<LocalGrant>, ConfigError> {
        let Local { admins, operators, builders, .. } = &self.local;
        let everything = vec!["*".to_owned()];
        let mut grants = Vec::new();
        add(&mut grants, "local.admins", admins, Grade::Admin, &[])?;
        add(&mut grants, "local.operators", operators, Grade::Operator, &everything)?;
        for Builders { who, repositories, untrusted } in builders {
            let grade = if *untrusted { Grade::UntrustedBuilder } else { Grade::Builder };
            add(&mut grants, "local.builders.who", who, grade, repositories)?;
        }
        Ok(grants)
    }
}

fn add(
    grants: &mut Vec<LocalGrant>,
    key: &'static str,
    who: &[String],
    grade: Grade,
    repositories: &[String],
) -> Result<(), ConfigError> {
    let patterns = repositories
        .iter()
        .map(|text| text.parse::<RepoPattern>().or_else(|error| value(key, text, &error.to_string())));
    let scope = Scope::new(patterns.collect::<Result<_, _>>()?);
    if grade.needs_scope() && scope.patterns().is_empty() {
        return value(key, &who.join(", "), "they have no repositories: name some in `repositories`, or \"*\"");
    }
    for text in who {
        let Some(who) = Who::parse(text) else {
            return value(key, text, "name a user, a user's number, or a group as @name");
        };
        grants.push(LocalGrant { who, grade, scope: scope.clone() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn grants(text: &str) -> Result<Vec<LocalGrant>, String> {
        let config = Config::parse(Path::new("kiln.toml"), text).map_err(|error| error.to_string())?;
        config.local_grants().map_err(|error| error.to_string())
    }

    #[test]
    fn root_rules_and_the_group_kiln_operates_if_nothing_is_said() {
        let grants = grants("").expect("is taken");
        let seen: Vec<_> = grants.iter().map(|grant| (&grant.who, grant.grade)).collect();
        assert_eq!(seen, [(&Who::Uid(0), Grade::Admin), (&Who::Group("kiln".to_owned()), Grade::Operator)]);
        assert!(grants[1].scope.holds(&kiln_domain::RepoName::parse("github.com/any/thing").expect("a name")));
    }

    #[test]
    fn the_lists_are_read_and_what_cannot_be_meant_is_refused() {
        let text = "[local]\nadmins = []\noperators = [\"1000\"]\n\
                    [[local.builders]]\nwho = [\"ci\", \"@devs\"]\nrepositories = [\"github.com/org/*\"]\nuntrusted = true";
        let seen: Vec<_> = grants(text).expect("is taken").into_iter().map(|grant| (grant.who, grant.grade)).collect();
        assert_eq!(
            seen,
            [
                (Who::Uid(1000), Grade::Operator),
                (Who::User("ci".to_owned()), Grade::UntrustedBuilder),
                (Who::Group("devs".to_owned()), Grade::UntrustedBuilder)
            ]
        );
        for bad in [
            "[local]\nadmins = [\"\"]",
            "[local]\nadmins = [\"@\"]",
            "[local]\nadmins = [\"a b\"]",
            "[local]\nadmins = [\"99999999999\"]",
            "[local]\nadmin = [\"root\"]",
            "[local]\nloopback = \"admin\"",
            "[[local.builders]]\nwho = [\"ci\"]",
            "[[local.builders]]\nwho = [\"ci\"]\nrepositories = []",
            "[[local.builders]]\nwho = [\"ci\"]\nrepositories = [\"*/x\"]",
        ] {
            assert!(grants(bad).is_err(), "{bad}");
        }
    }
}
