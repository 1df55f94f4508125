//! Keeping a client's name among builds, so that only changed files of a context travel.
//!
//! BuildKit finds the last copy of a context by a shared key that ends in the client's node id, which buildx keeps in
//! its configuration directory as `.buildNodeID` (buildx v0.38, util/confutil). Each of our builds has a fresh
//! directory; with a fresh id as well every build would send its whole context again. All of this is only speed, so
//! what fails here is passed over.

use std::fs;
use std::path::{Path, PathBuf};

const FILE: &str = ".buildNodeID";

/// Where an id may be kept, best first: buildx's own, then ours.
#[derive(Debug)]
pub(super) struct NodeId {
    buildx: Option<PathBuf>,
    ours: Option<PathBuf>,
}

impl NodeId {
    pub(super) fn of_this_user() -> Self {
        let home = || super::variable("HOME").map(PathBuf::from);
        let docker = super::variable("DOCKER_CONFIG").map(PathBuf::from).or_else(|| Some(home()?.join(".docker")));
        let config = super::variable("BUILDX_CONFIG").map(PathBuf::from).or_else(|| Some(docker?.join("buildx")));
        let cache = super::variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(home()?.join(".cache")));
        Self { buildx: config.map(|dir| dir.join(FILE)), ours: cache.map(|dir| dir.join("kiln/buildx-node-id")) }
    }

    /// Gives the id to a new configuration directory; without one buildx makes it up.
    pub(super) fn lend(&self, config: &Path) {
        let known = [&self.buildx, &self.ours].into_iter().flatten().find(|path| path.is_file());
        if let Some(path) = known {
            let _ = fs::copy(path, config.join(FILE));
        }
    }

    /// Keeps the id that buildx made up.
    pub(super) fn keep(&self, config: &Path) {
        let known = [&self.buildx, &self.ours].into_iter().flatten().any(|path| path.is_file());
        if let (false, Some(ours)) = (known, &self.ours) {
            let kept = ours.parent().map(fs::create_dir_all);
            let _ = kept.map(|_| fs::copy(config.join(FILE), ours));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_made_up_once_is_lent_again_and_buildx_s_own_goes_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let config = |name: &str, id: Option<&str>| {
            let config = dir.path().join(name);
            fs::create_dir(&config).expect("made");
            if let Some(id) = id {
                fs::write(config.join(FILE), id).expect("written");
            }
            config
        };
        let ids = NodeId { buildx: Some(dir.path().join("own")), ours: Some(dir.path().join("c/kiln/id")) };
        let first = config("first", None);
        ids.lend(&first);
        assert!(!first.join(FILE).exists());
        ids.keep(&config("built", Some("made-up")));
        ids.lend(&first);
        assert_eq!(fs::read_to_string(first.join(FILE)).expect("lent"), "made-up");
        fs::write(dir.path().join("own"), "own").expect("written");
        ids.lend(&first);
        assert_eq!(fs::read_to_string(first.join(FILE)).expect("lent"), "own");
    }
}
