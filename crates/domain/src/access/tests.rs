//! What the table means for people, and what must hold of any table.

use proptest::prelude::*;

use super::*;

fn repo(name: &str) -> RepoName {
    RepoName::parse(name).expect("a repository")
}

fn scope(patterns: &[&str]) -> Scope {
    Scope::new(patterns.iter().map(|text| text.parse().expect("a pattern")).collect())
}

fn build(trust: Trust) -> Standing {
    Standing::Build(Proven { repo: repo("github.com/org/own"), trust })
}

fn untrusted() -> Standing {
    build(Trust::Untrusted { fork: "7".to_owned() })
}

fn holder(lane: Lane) -> Standing {
    Standing::Holder { scope: scope(&["github.com/org/own"]), lane }
}

fn everybody() -> Vec<Standing> {
    vec![
        Standing::Admin,
        Standing::Operator(scope(&["github.com/org/own"])),
        Standing::Watcher,
        holder(Lane::Trusted),
        holder(Lane::Untrusted),
        build(Trust::Trusted),
        untrusted(),
        Standing::Stranger,
    ]
}

/// Of its own project, of another's, of none, and of the host.
fn may(standing: &Standing, verb: Verb) -> [bool; 4] {
    let (own, other) = (repo("github.com/org/own"), repo("github.com/org/other"));
    [Target::Project(&own), Target::Project(&other), Target::Nothing, Target::Host]
        .map(|target| decide(standing, verb, target).is_ok())
}

#[test]
fn each_verb_is_there_once() {
    let mut names: Vec<_> = Verb::ALL.iter().map(|verb| verb.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Verb::ALL.len());
}

#[test]
fn a_stranger_gets_what_needs_no_proof_and_is_told_to_show_one() {
    for verb in Verb::ALL {
        let open = matches!(verb, Verb::Greet | Verb::Release | Verb::Renew | Verb::Challenge);
        assert_eq!(may(&Standing::Stranger, verb), [open; 4], "{verb}");
        let denied = decide(&Standing::Stranger, verb, Target::Host);
        assert_eq!(denied, if open { Ok(()) } else { Err(Denied::Unproven { verb }) });
    }
}

#[test]
fn an_admin_gets_everything() {
    for verb in Verb::ALL {
        assert_eq!(may(&Standing::Admin, verb), [true; 4], "{verb}");
    }
}

#[test]
fn a_build_gets_its_own_daemon_and_nothing_that_changes_it() {
    for standing in [build(Trust::Trusted), untrusted()] {
        for verb in [Verb::Route, Verb::Prewarm] {
            assert_eq!(may(&standing, verb), [true, false, false, false], "{standing:?} {verb}");
        }
        for verb in
            [Verb::Stop, Verb::Force, Verb::Snapshot, Verb::RollBack, Verb::Configure, Verb::Remove, Verb::Admit]
        {
            assert_eq!(may(&standing, verb), [false; 4], "{standing:?} {verb}");
        }
    }
    assert_eq!(may(&build(Trust::Trusted), Verb::See), [true, false, false, false]);
    assert_eq!(may(&untrusted(), Verb::See), [false; 4], "what a trusted project does is not for untrusted code");
}

#[test]
fn a_holder_mends_what_it_holds_and_cuts_nobody_off() {
    let holder = holder(Lane::Trusted);
    for verb in [Verb::Route, Verb::See, Verb::Stop, Verb::Snapshot, Verb::RollBack] {
        assert_eq!(may(&holder, verb), [true, false, false, false], "{verb}");
    }
    for verb in [Verb::Force, Verb::Configure, Verb::Remove, Verb::SeeHost, Verb::Follow] {
        assert_eq!(may(&holder, verb), [false; 4], "{verb}");
    }
    let odd = repo("github.com/org/own/../other");
    let all_below = Standing::Holder { scope: scope(&["github.com/org/own/*"]), lane: Lane::Trusted };
    assert!(decide(&all_below, Verb::Route, Target::Project(&odd)).is_err());
    let nobody = Standing::Holder { scope: Scope::default(), lane: Lane::Trusted };
    assert_eq!(may(&nobody, Verb::Route), [false; 4], "an empty scope holds nothing");
}

#[test]
fn an_operator_keeps_the_host_going_and_lets_nobody_in() {
    let operator = Standing::Operator(Scope::default());
    for verb in [Verb::See, Verb::Stop, Verb::Force, Verb::SeeHost, Verb::Restore, Verb::Close] {
        assert_eq!(may(&operator, verb), [true; 4], "{verb}");
    }
    for verb in [Verb::Configure, Verb::Remove, Verb::Mend, Verb::Discard, Verb::Admit] {
        assert_eq!(may(&operator, verb), [false; 4], "{verb}");
    }
    for verb in [Verb::Route, Verb::Prewarm] {
        assert_eq!(may(&operator, verb), [false; 4], "{verb}: no build of what it was not named for");
    }
}

#[test]
fn an_untrusted_build_cannot_choose_whose_it_is() {
    let claims =
        |untrusted, pull_request: Option<&str>| Origin { untrusted, pull_request: pull_request.map(str::to_owned) };
    let seven = claims(true, Some("7"));
    for claimed in [claims(false, None), claims(true, None), claims(true, Some("8"))] {
        assert_eq!(untrusted().origin(claimed), seven);
    }
    assert_eq!(build(Trust::Trusted).origin(claims(true, Some("8"))), claims(true, Some("8")), "trust can be lowered");
    assert_eq!(build(Trust::Trusted).origin(claims(false, None)), claims(false, None));
    assert!(Standing::Stranger.origin(claims(false, None)).untrusted);
    assert_eq!(holder(Lane::Untrusted).origin(claims(false, Some("8"))), claims(true, Some("8")));
    assert_eq!(may(&holder(Lane::Untrusted), Verb::Route), [true, false, false, false]);
    assert_eq!(may(&holder(Lane::Untrusted), Verb::See), [false; 4]);
}

fn any_standing() -> impl Strategy<Value = Standing> {
    prop::sample::select(everybody())
}

proptest! {
    /// Whoever is granted something of nothing is granted it of everything: nobody gets in through what is not there.
    #[test]
    fn absent_is_never_more_than_present(standing in any_standing(), verb in prop::sample::select(Verb::ALL.to_vec())) {
        let [own, other, nothing, host] = may(&standing, verb);
        prop_assert!(!nothing || (own && other && host));
        prop_assert!(!other || own);
        prop_assert_eq!(depends_on_owner(&standing, verb), own && !other);
    }
}
