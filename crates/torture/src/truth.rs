//! What kilnd has promised, and whether what it shows agrees.
//!
//! A lease goes one way: `asked ─▶ held ─▶ releasing ─▶ released`. What was asked and never answered may exist or not, so
//! of each project it is counted how many leases it may have that nobody knows. Everything else is certain: a lease that
//! is held is shown, one that was released never again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kiln_wire::{ProjectView, RouteResponse};

#[derive(Debug, Default)]
pub(crate) struct Truth {
    projects: BTreeMap<String, Promised>,
}

/// Of one repository.
#[derive(Debug, Clone, Default)]
struct Promised {
    leases: BTreeMap<String, Held>,
    /// Routes that were sent, and those whose answer has come, whichever it was.
    asked: usize,
    settled: usize,
    /// What its idle window may be: what was acknowledged last, and what may have been carried out since.
    idle_windows: Vec<String>,
}

#[derive(Debug, Clone)]
struct Held {
    state: State,
    /// The start of the last request that made or renewed it and was answered.
    seen: Instant,
    /// Of the answer that said that the daemon is ready.
    generation: Option<u64>,
    renewed: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Held,
    Releasing,
    Released,
}

/// A lease that its client may use.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    pub(crate) repo: String,
    pub(crate) id: String,
    pub(crate) token: String,
    pub(crate) key: String,
}

/// What was promised before a look began. The look is compared with what is promised when it is over.
pub(crate) struct Before(BTreeMap<String, Promised>);

impl Truth {
    fn of(&mut self, repo: &str) -> &mut Promised {
        self.projects.entry(repo.to_owned()).or_default()
    }

    fn lease(&mut self, lease: &Lease) -> Option<&mut Held> {
        self.of(&lease.repo).leases.get_mut(&lease.id)
    }

    // === Routes and leases

    pub(crate) fn asked(&mut self, repo: &str) {
        self.of(repo).asked += 1;
    }

    /// Somebody else asks, and asks again when an answer is cut: how many leases there are is not known.
    pub(crate) fn asked_by_others(&mut self, repo: &str) {
        self.of(repo).asked = usize::MAX / 2;
    }

    /// It was refused: there is no lease.
    pub(crate) fn refused(&mut self, repo: &str) {
        self.of(repo).settled += 1;
    }

    /// `None`: the answer names no lease, which no answer of a route may do.
    pub(crate) fn answered(&mut self, repo: &str, start: Instant, answer: &RouteResponse) -> Option<Lease> {
        let (id, token) = (answer.lease_id.clone()?, answer.build_id.clone()?);
        let project = self.of(repo);
        project.settled += 1;
        let generation = answer.ready.then_some(answer.generation);
        let held = Held { state: State::Held, seen: start, generation, renewed: None };
        project.leases.insert(id.clone(), held);
        Some(Lease { repo: repo.to_owned(), id, token, key: answer.key.to_string() })
    }

    /// A poll for a lease that is held was answered.
    pub(crate) fn polled(&mut self, lease: &Lease, start: Instant, answer: &RouteResponse) {
        if let Some(held) = self.lease(lease) {
            held.seen = start;
            held.generation = answer.ready.then_some(answer.generation).or(held.generation);
        }
    }

    pub(crate) fn renewed(&mut self, lease: &Lease, start: Instant, renewed: String) {
        if let Some(held) = self.lease(lease) {
            (held.seen, held.renewed) = (start, Some(renewed));
        }
    }

    pub(crate) fn releasing(&mut self, lease: &Lease) {
        if let Some(held) = self.lease(lease) {
            held.state = State::Releasing;
        }
    }

    pub(crate) fn released(&mut self, lease: &Lease) {
        if let Some(held) = self.lease(lease) {
            held.state = State::Released;
        }
    }

    /// The leases of `repo` that are held and in their grace.
    pub(crate) fn held(&self, repo: &str, grace: Duration) -> BTreeSet<String> {
        let fresh = |held: &Held| held.state == State::Held && held.seen.elapsed() < grace;
        let leases = self.projects.get(repo).map(|project| &project.leases).into_iter().flatten();
        leases.filter(|(_, held)| fresh(held)).map(|(id, _)| id.clone()).collect()
    }

    /// It is about to be removed, and its leases with it.
    pub(crate) fn forget(&mut self, repo: &str) {
        self.projects.remove(repo);
    }

    // === Settings

    /// What was asked for may have been carried out from now on.
    pub(crate) fn setting(&mut self, repo: &str, idle_window: &str) {
        self.of(repo).idle_windows.push(idle_window.to_owned());
    }

    /// What was asked for last is what counts.
    pub(crate) fn set(&mut self, repo: &str) {
        let windows = &mut self.of(repo).idle_windows;
        windows.drain(..windows.len().saturating_sub(1));
    }

    // === Comparing

    pub(crate) fn before(&self) -> Before {
        Before(self.projects.clone())
    }

    /// What is wrong with `seen`, given what was promised before the look and is promised now. `grace`: how long a lease
    /// surely keeps its daemon.
    pub(crate) fn compare(&self, before: &Before, seen: &[ProjectView], grace: Duration) -> Vec<String> {
        let by_repo: BTreeMap<&str, &ProjectView> = seen.iter().map(|view| (view.repo.as_str(), view)).collect();
        let mut wrong = Vec::new();
        for (repo, now) in &self.projects {
            let Some(then) = before.0.get(repo) else { continue };
            match by_repo.get(repo.as_str()) {
                Some(view) => now.compare(then, view, grace, &mut wrong),
                None if then.leases.is_empty() => {}
                None => wrong.push(format!("{repo}: the project is gone")),
            }
        }
        wrong
    }
}

impl Promised {
    fn compare(&self, then: &Self, view: &ProjectView, grace: Duration, wrong: &mut Vec<String>) {
        let repo = &view.repo;
        let shown: BTreeMap<&str, &kiln_wire::LeaseView> = view.leases.iter().map(|l| (l.id.as_str(), l)).collect();
        for (id, held) in &self.leases {
            let was = then.leases.get(id).map(|lease| lease.state);
            match (was, held.state, shown.get(id.as_str())) {
                (Some(State::Held), State::Held, None) => wrong.push(format!("{repo}: lease {id} is lost")),
                (Some(State::Released), _, Some(_)) => wrong.push(format!("{repo}: lease {id} came back")),
                (Some(State::Held), State::Held, Some(lease)) => {
                    Self::compare_held(id, held, then, lease, view, grace, wrong);
                }
                _ => {}
            }
        }
        let unknown = shown.keys().filter(|id| !self.leases.contains_key(**id)).count();
        let may_be = self.asked.saturating_sub(self.settled);
        if unknown > may_be {
            wrong.push(format!("{repo}: {unknown} leases that nobody asked for, at most {may_be} answers were cut"));
        }
        // Nothing was set in the meantime.
        if let Some(settings) = view.settings.as_ref().filter(|_| then.idle_windows == self.idle_windows) {
            let allowed: BTreeSet<_> = self.idle_windows.iter().map(String::as_str).collect();
            let value = settings.idle_window.value.as_deref().unwrap_or_default();
            if !allowed.is_empty() && !allowed.contains(value) {
                wrong.push(format!("{repo}: its idle window is {value:?}, and what was set is {allowed:?}"));
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one row of a comparison, with what both sides know of it")]
    fn compare_held(
        id: &str,
        held: &Held,
        then: &Self,
        lease: &kiln_wire::LeaseView,
        view: &ProjectView,
        grace: Duration,
        wrong: &mut Vec<String>,
    ) {
        let repo = &view.repo;
        let instant = |text: &str| text.parse::<jiff::Timestamp>().ok();
        if let Some(renewed) = then.leases.get(id).and_then(|was| was.renewed.as_deref())
            && instant(&lease.renewed) < instant(renewed)
        {
            wrong.push(format!("{repo}: lease {id} was renewed at {renewed}, and shows {}", lease.renewed));
        }
        let was = then.leases.get(id).and_then(|was| was.generation);
        // From its answer on a lease keeps its daemon, this very run of it.
        if let Some(generation) = was.filter(|_| held.seen.elapsed() < grace) {
            if view.generation != generation {
                let now = view.generation;
                wrong.push(format!("{repo}: lease {id} was given generation {generation}, and it is {now} now"));
            }
            if view.phase != "warm" {
                wrong.push(format!("{repo}: lease {id} is held, and the phase is {}: {}", view.phase, view.reason));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kiln_wire::LeaseView;

    use super::*;

    const GRACE: Duration = Duration::from_secs(60);
    const REPO: &str = "example.com/o/r";

    fn answer(id: &str, generation: u64) -> RouteResponse {
        let text = format!(
            r#"{{"key":"pbcce5b6205652dd7","buildId":"t","leaseId":"{id}","endpoint":"e","namespace":"n","ready":true,
            "serverName":"s","generation":{generation}}}"#
        );
        serde_json::from_str(&text).expect("an answer")
    }

    fn view(generation: u64, phase: &str, leases: &[&str]) -> ProjectView {
        let leases = leases.iter().map(|id| LeaseView { id: (*id).to_owned(), ..LeaseView::default() }).collect();
        ProjectView { repo: REPO.to_owned(), generation, phase: phase.to_owned(), leases, ..ProjectView::default() }
    }

    fn held() -> (Truth, Lease) {
        let mut truth = Truth::default();
        truth.asked(REPO);
        let lease = truth.answered(REPO, Instant::now(), &answer("a", 3)).expect("a lease");
        (truth, lease)
    }

    fn wrong(truth: &Truth, view: ProjectView) -> String {
        truth.compare(&truth.before(), &[view], GRACE).join("; ")
    }

    #[test]
    fn what_was_promised_is_there() {
        let (truth, _) = held();
        assert_eq!(wrong(&truth, view(3, "warm", &["a"])), "");
        for (view, words) in [
            (view(3, "warm", &[]), "lease a is lost"),
            (view(4, "warm", &["a"]), "given generation 3, and it is 4"),
            (view(3, "draining", &["a"]), "the phase is draining"),
            (view(3, "warm", &["a", "b"]), "1 leases that nobody asked for"),
        ] {
            assert!(wrong(&truth, view).contains(words), "{words}");
        }
        assert_eq!(truth.compare(&truth.before(), &[], GRACE), [format!("{REPO}: the project is gone")]);
    }

    #[test]
    fn a_released_lease_never_comes_back_and_an_uncertain_one_may_be_either() {
        let (mut truth, lease) = held();
        truth.releasing(&lease);
        assert_eq!(wrong(&truth, view(3, "warm", &["a"])) + &wrong(&truth, view(3, "idle", &[])), "");
        let before = truth.before();
        truth.released(&lease);
        assert!(truth.compare(&before, &[view(3, "warm", &["a"])], GRACE).is_empty(), "the look may be older");
        assert!(wrong(&truth, view(3, "warm", &["a"])).contains("came back"));
    }

    #[test]
    fn an_answer_that_was_cut_may_have_left_one() {
        let (mut truth, _) = held();
        truth.asked(REPO);
        assert_eq!(wrong(&truth, view(3, "warm", &["a", "b"])), "");
        assert!(wrong(&truth, view(3, "warm", &["a", "b", "c"])).contains("2 leases that nobody asked for"));
        truth.refused(REPO);
        assert!(wrong(&truth, view(3, "warm", &["a", "b"])).contains("nobody asked for"));
    }

    #[test]
    fn a_lease_out_of_its_grace_keeps_nothing_up() {
        let (truth, _) = held();
        let nothing = truth.compare(&truth.before(), &[view(5, "idle", &["a"])], Duration::ZERO);
        assert!(nothing.is_empty(), "{nothing:?}");
    }
}
