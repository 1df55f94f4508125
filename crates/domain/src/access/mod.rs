//! Who may do what: one table, and what a caller's word about itself is worth.
//!
//! A caller's [`Standing`] is what was proven of it; how it was proven is not known here. [`decide`] looks up the table in
//! `table.rs`: each [`Verb`] has its row, each standing its column, and what no row grants is denied. [`Standing::origin`] says
//! whose code a build runs, from what was proven and what the request says: a request can only lower the trust that was proven (K7).
//!
//! A lease's token is a capability of its own: whoever has it may renew and release that one lease (F15), so these two verbs are
//! granted to everybody, and whoever carries them out looks for the token.

use std::fmt;

use thiserror::Error;

use crate::lane::Lane;
use crate::repo::RepoName;
use crate::settings::RepoPattern;

mod table;
#[cfg(test)]
mod tests;
mod token;

pub use token::{AccessToken, Grade, ParseAccessTokenError, ParseTokenIdError, TokenId};

/// What is asked for. Every endpoint of the API is one of these, or several that differ in what they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Whether kilnd is alive, and the description of its API.
    Greet,
    /// How well kilnd is, part by part, and its figures.
    Watch,
    /// Lease a daemon for a build.
    Route,
    /// Wake a daemon.
    Prewarm,
    /// Release the lease whose token is shown.
    Release,
    /// Release the oldest lease, of which no token is shown. Only where the configuration allows it to anybody.
    ReleaseOldest,
    /// Renew the lease whose token is shown.
    Renew,
    /// Ask for a challenge, or for the answer to one, where a job has nothing else to show.
    Challenge,
    /// The list of projects; of those only that the caller may see.
    List,
    /// One project: its state, its reasons, its cache, its events.
    See,
    /// Stop a daemon that nobody needs.
    Stop,
    /// Stop one that is needed, and cut off who needs it; and whatever else is forced.
    Force,
    Snapshot,
    /// Go back to a snapshot, or to an empty cache. What is replaced goes to the trash.
    RollBack,
    Configure,
    Remove,
    /// What lies on the host: orphans, the trash, every cache, every connection.
    SeeHost,
    /// The journal of all projects.
    Follow,
    /// Give a cache in the trash back to its project.
    Restore,
    /// Adopt or remove what has lost its other half.
    Mend,
    /// Delete for good.
    Discard,
    /// Close or open a project's name at the gateway.
    Close,
    /// Make, list and revoke tokens, and issue credentials that outlast a build.
    Admit,
}

/// What was proven of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Everything.
    Admin,
    /// Sees everything and keeps the host going; deletes nothing for good, changes no settings, lets nobody in. Builds only what
    /// the scope names.
    Operator(Scope),
    /// Whatever collects figures.
    Watcher,
    /// Somebody to whom these repositories were given: by a token, or as a user of this host. Untrusted: whatever it builds is
    /// code that nobody has reviewed, and it gets no more than such a build.
    Holder { scope: Scope, lane: Lane },
    /// A build of which its forge said what it is.
    Build(Proven),
    /// Nothing.
    Stranger,
}

/// What a forge says of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proven {
    pub repo: RepoName,
    pub trust: Trust,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    Trusted,
    /// `fork` names the pull request, or whatever else it shares a daemon with, for its forge. A build cannot choose it.
    Untrusted {
        fork: String,
    },
}

/// Some repositories.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scope(Vec<RepoPattern>);

impl Scope {
    pub fn new(patterns: Vec<RepoPattern>) -> Self {
        Self(patterns)
    }

    pub fn everything() -> Self {
        Self(vec![RepoPattern::EVERYTHING])
    }

    /// A name with `.` or `..` in it is no repository's, and would read as one that it is not.
    pub fn holds(&self, repo: &RepoName) -> bool {
        let is_odd = repo.as_str().split('/').any(|part| part == "." || part == "..");
        !is_odd && self.0.iter().any(|pattern| pattern.matches(repo))
    }

    pub fn patterns(&self) -> &[RepoPattern] {
        &self.0
    }
}

/// What it is asked of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target<'a> {
    Host,
    /// A project, or one that a route would make.
    Project(&'a RepoName),
    /// A key that no project has: nobody's, so not the caller's either. Absent is never allowed (F18).
    Nothing,
}

/// Whose code a build runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Origin {
    pub untrusted: bool,
    /// What names its pull request; only of untrusted code.
    pub pull_request: Option<String>,
}

impl Standing {
    /// Names the column of the table.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Admin => "an admin",
            Self::Operator(_) => "an operator",
            Self::Watcher => "a watcher",
            Self::Holder { lane: Lane::Trusted, .. } => "a holder of projects",
            Self::Holder { lane: Lane::Untrusted, .. } => "a holder of projects for untrusted builds",
            Self::Build(Proven { trust: Trust::Trusted, .. }) => "a trusted build",
            Self::Build(Proven { trust: Trust::Untrusted { .. }, .. }) => "an untrusted build",
            Self::Stranger => "a stranger",
        }
    }

    /// The repository that was proven. It goes before what the request says.
    pub const fn repo(&self) -> Option<&RepoName> {
        match self {
            Self::Build(proven) => Some(&proven.repo),
            _ => None,
        }
    }

    pub const fn lane(&self) -> Lane {
        match self {
            Self::Holder { lane, .. } => *lane,
            Self::Build(Proven { trust: Trust::Untrusted { .. }, .. }) | Self::Stranger => Lane::Untrusted,
            _ => Lane::Trusted,
        }
    }

    /// Whose code the build runs: `claimed` by the request, and no more trusted than what was proven.
    pub fn origin(&self, claimed: Origin) -> Origin {
        match self {
            Self::Build(Proven { trust: Trust::Untrusted { fork }, .. }) => {
                Origin { untrusted: true, pull_request: Some(fork.clone()) }
            }
            // A holder's builds are kept apart by what it says of them, and by nothing that was proven.
            _ if self.lane() == Lane::Untrusted => Origin { untrusted: true, ..claimed },
            _ => claimed,
        }
    }

    fn owns(&self, target: Target<'_>) -> bool {
        let Target::Project(repo) = target else { return false };
        match self {
            Self::Operator(scope) | Self::Holder { scope, .. } => scope.holds(repo),
            Self::Build(proven) => proven.repo == *repo,
            Self::Admin | Self::Watcher | Self::Stranger => false,
        }
    }
}

/// Why it is denied. Each text goes to the caller, and none says whether a project exists.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Denied {
    /// It has shown nothing; something it could show may be enough.
    #[error("to {verb} takes a proof of who asks: none came that counts")]
    Unproven { verb: Verb },
    #[error("to {verb} is not for {standing}")]
    NotFor { verb: Verb, standing: &'static str },
    #[error("to {verb} takes a project of the caller's own, and this is none")]
    NotOwn { verb: Verb },
}

/// Whether the table grants it.
///
/// # Errors
/// Why not.
pub fn decide(standing: &Standing, verb: Verb, target: Target<'_>) -> Result<(), Denied> {
    match table::grant(standing, verb) {
        table::Grant::Any => Ok(()),
        table::Grant::Own if standing.owns(target) => Ok(()),
        table::Grant::Own => Err(Denied::NotOwn { verb }),
        table::Grant::No if *standing == Standing::Stranger => Err(Denied::Unproven { verb }),
        table::Grant::No => Err(Denied::NotFor { verb, standing: standing.name() }),
    }
}

/// Whether it depends on whose project it is asked of: if not, nobody has to look that up.
pub fn depends_on_owner(standing: &Standing, verb: Verb) -> bool {
    table::grant(standing, verb) == table::Grant::Own
}

impl Verb {
    pub const ALL: [Self; 23] = [
        Self::Greet,
        Self::Watch,
        Self::Route,
        Self::Prewarm,
        Self::Release,
        Self::ReleaseOldest,
        Self::Renew,
        Self::Challenge,
        Self::List,
        Self::See,
        Self::Stop,
        Self::Force,
        Self::Snapshot,
        Self::RollBack,
        Self::Configure,
        Self::Remove,
        Self::SeeHost,
        Self::Follow,
        Self::Restore,
        Self::Mend,
        Self::Discard,
        Self::Close,
        Self::Admit,
    ];

    /// As it stands in a sentence, and in the journal.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Greet => "greet",
            Self::Watch => "watch",
            Self::Route => "route",
            Self::Prewarm => "prewarm",
            Self::Release => "release",
            Self::ReleaseOldest => "release the oldest",
            Self::Renew => "renew",
            Self::Challenge => "be challenged",
            Self::List => "list",
            Self::See => "see",
            Self::Stop => "stop",
            Self::Force => "force",
            Self::Snapshot => "snapshot",
            Self::RollBack => "roll back",
            Self::Configure => "configure",
            Self::Remove => "remove",
            Self::SeeHost => "see the host",
            Self::Follow => "follow",
            Self::Restore => "restore",
            Self::Mend => "mend",
            Self::Discard => "discard",
            Self::Close => "close",
            Self::Admit => "admit",
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
