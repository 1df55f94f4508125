//! `[[identity.challenges]]`: forges that are asked about runs to which they give no token.

use std::path::PathBuf;

use kiln_domain::settings::{RepoPattern, SettingsError};
use serde::{Deserialize, Serialize};

use super::Place;
use super::check::wrong;
use crate::config::ConfigError;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forge {
    pub kind: ForgeKind,
    #[serde(default = "default_api")]
    pub api: String,
    /// What stands before the name of a repository. `None`: the API's host, without `api.`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Holds a token of the forge, and can be read by nobody else.
    pub credentials_file: PathBuf,
    /// PEM: the authorities that may have signed its certificate, instead of the host's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// Those whose runs may ask; there is no "all".
    pub repositories: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ForgeKind {
    Github,
}

fn default_api() -> String {
    "https://api.github.com".to_owned()
}

impl Forge {
    /// Where it is asked, read.
    pub fn place(&self) -> Result<Place, &'static str> {
        Place::parse(&self.api)
    }

    pub fn repo_host(&self) -> Option<String> {
        let own = || self.place().ok().map(|place| place.host.strip_prefix("api.").unwrap_or(&place.host).to_owned());
        self.host.clone().or_else(own)
    }

    /// `repositories`, read.
    pub fn patterns(&self) -> Result<Vec<RepoPattern>, SettingsError> {
        self.repositories.iter().map(|text| text.parse()).collect()
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if let Err(why) = self.place() {
            return wrong("identity.challenges.api", &self.api, why);
        }
        let host = self.repo_host().unwrap_or_default();
        if host.contains('/') || kiln_domain::RepoName::parse(&host).map_or(true, |name| name.as_str() != host) {
            let why = "give a host's name in lower case, as it stands before owner/repository";
            return wrong("identity.challenges.host", &host, why);
        }
        for (key, path) in [
            ("identity.challenges.credentials_file", Some(&self.credentials_file)),
            ("identity.challenges.ca_file", self.ca_file.as_ref()),
        ] {
            if let Some(path) = path.filter(|path| !path.is_absolute()) {
                return wrong(key, path.display(), "give an absolute path");
            }
        }
        let key = "identity.challenges.repositories";
        match self.patterns() {
            Ok(patterns) if patterns.is_empty() => wrong(key, "[]", "name those whose runs may ask"),
            Ok(_) => Ok(()),
            Err(error) => wrong(key, format!("{:?}", self.repositories), &error.to_string()),
        }
    }
}
