//! Who is who among the numbers that the history speaks of: first the projects of the schedule, then what is derived from each.

use kiln_domain::{BuildSpec, Key};

use crate::history::Project;

/// Of each project, that send untrusted builds.
pub(crate) const PULL_REQUESTS: usize = 5;
const MEMBERS: usize = 3;
/// One fork for all that name no pull request, and one daemon that tries snapshots out.
const DERIVED: usize = PULL_REQUESTS + MEMBERS + 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Project,
    Fork,
    /// Counted from 1.
    PullRequest(usize),
    /// Counted from 1.
    Member(usize),
    Trial,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Cast {
    pub(crate) projects: usize,
}

impl Cast {
    pub(crate) const fn everybody(self) -> usize {
        self.projects * (1 + DERIVED)
    }

    pub(crate) const fn part(self, of: Project) -> Part {
        if of < self.projects {
            return Part::Project;
        }
        match (of - self.projects) % DERIVED {
            0 => Part::Fork,
            n if n <= PULL_REQUESTS => Part::PullRequest(n),
            n if n <= PULL_REQUESTS + MEMBERS => Part::Member(n - PULL_REQUESTS),
            _ => Part::Trial,
        }
    }

    /// Itself, of a project.
    pub(crate) const fn parent(self, of: Project) -> Project {
        if of < self.projects { of } else { (of - self.projects) / DERIVED }
    }

    pub(crate) const fn is_derived(self, of: Project) -> bool {
        !matches!(self.part(of), Part::Project)
    }

    /// Whether it is one more daemon of a project.
    pub(crate) fn stands_in(self, of: Project, project: Project) -> bool {
        of < self.everybody() && matches!(self.part(of), Part::Member(_)) && self.parent(of) == project
    }

    pub(crate) const fn is_member(self, of: Project) -> bool {
        matches!(self.part(of), Part::Member(_))
    }

    pub(crate) const fn is_fork(self, of: Project) -> bool {
        matches!(self.part(of), Part::Fork | Part::PullRequest(_))
    }

    /// Of untrusted builds: of one pull request, or of those that name none, for 0.
    pub(crate) const fn fork(self, of: Project, pull_request: usize) -> Project {
        self.projects + of * DERIVED + pull_request
    }

    pub(crate) fn pull_request(self, of: Project) -> Option<String> {
        match self.part(of) {
            Part::PullRequest(number) => Some(number.to_string()),
            _ => None,
        }
    }

    pub(crate) fn key(self, of: Project, spec: &BuildSpec) -> Key {
        let key = Key::of(spec);
        match self.part(of) {
            Part::Project => key,
            Part::Fork => key.fork(),
            Part::PullRequest(number) => key.pull_request(&number.to_string()),
            Part::Member(number) => key.clone_number(number as u16),
            Part::Trial => key.trial(),
        }
    }
}
