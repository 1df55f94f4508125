//! Which of a project's daemons takes a build, when one is not enough.
//!
//! A project has its own daemon, the primary, and may have members beside it, counted from 1: each on a clone of the project's
//! cache as it was. A build goes to the least loaded, one of a branch where that branch went last if there is room; when each
//! is saturated, another member is made, and takes the build that it was made for. Members go when nobody uses them, and with
//! them what they learnt: the primary's cache is the one that is kept.
//!
//! Nothing waits for a member that cannot be had: where growth is out of bounds, or fails, the least loaded takes the build.

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FanOutPolicy {
    /// Builds with which a daemon is saturated; at least 1.
    pub builds: usize,
    /// Members that a project may have; 0: no fan-out.
    pub members: u16,
    /// Members of all projects together.
    pub on_host: usize,
    /// Share of time in which something in a daemon waited for its processor or memory (PSI `some avg10`), in percent, from
    /// which on it is saturated with any build; `None`: builds alone count.
    pub pressure: Option<f64>,
}

impl Default for FanOutPolicy {
    fn default() -> Self {
        Self { builds: 4, members: 2, on_host: 8, pressure: None }
    }
}

/// How many forks may be at work at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkBounds {
    pub per_project: usize,
    /// Of all projects together.
    pub on_host: usize,
}

impl Default for ForkBounds {
    fn default() -> Self {
        Self { per_project: 16, on_host: 48 }
    }
}

/// Whether a build can be sent there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// It answers.
    Up,
    /// It is on its way, and whoever is sent there waits.
    Coming,
    /// It takes none: it failed, is going, or waits for its place among the starts.
    Away,
}

/// One of the project's daemons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// 0: the primary, which is never [`Reach::Away`] for good: it comes up for whoever is sent there.
    pub member: u16,
    /// Those that it has been given and that have not ended, whether they have begun or not.
    pub builds: usize,
    pub reach: Reach,
    /// See [`FanOutPolicy::pressure`]; `None`: not known.
    pub pressure: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    Use(u16),
    /// Make this member; if it cannot be had, [`least_loaded`] says who takes the build.
    Grow(u16),
}

impl Load {
    fn is_saturated(&self, policy: &FanOutPolicy) -> bool {
        let pressed = match (self.pressure, policy.pressure) {
            (Some(there), Some(bound)) => self.builds > 0 && there >= bound,
            _ => false,
        };
        pressed || self.builds >= policy.builds.max(1)
    }

    /// A member beyond the bounds gets nothing new, so that it goes.
    const fn takes_builds(&self, policy: &FanOutPolicy) -> bool {
        self.member == 0 || (self.member <= policy.members && !matches!(self.reach, Reach::Away))
    }
}

/// Where the next build goes. `sticky`: where the last one of its branch went. `others`: members of other projects.
pub fn choose(loads: &[Load], sticky: Option<u16>, others: usize, policy: &FanOutPolicy) -> Choice {
    let with_room = loads.iter().filter(|load| load.takes_builds(policy) && !load.is_saturated(policy));
    let is_sticky = |load: &Load| Some(load.member) == sticky;
    // The branch's own before a less loaded one, and what is up before what one would have to wait for.
    if let Some(load) =
        with_room.min_by_key(|load| (load.reach != Reach::Up, !is_sticky(load), load.builds, load.member))
    {
        return Choice::Use(load.member);
    }
    match free_number(loads, others, policy) {
        // A project of which nothing is known begins with its primary.
        Some(member) if loads.iter().any(|load| load.member == 0) => Choice::Grow(member),
        _ => Choice::Use(least_loaded(loads, sticky, policy)),
    }
}

/// Who takes a build if no more members are made, saturated or not.
pub fn least_loaded(loads: &[Load], sticky: Option<u16>, policy: &FanOutPolicy) -> u16 {
    let takes = loads.iter().filter(|load| load.takes_builds(policy));
    let up = takes.min_by_key(|load| (load.reach != Reach::Up, load.builds, Some(load.member) != sticky, load.member));
    up.map_or(0, |load| load.member)
}

/// The lowest number that no member has; `None`: there are as many as there may be.
fn free_number(loads: &[Load], others: usize, policy: &FanOutPolicy) -> Option<u16> {
    let own = loads.iter().filter(|load| load.member > 0).count();
    if own >= usize::from(policy.members) || own.saturating_add(others) >= policy.on_host {
        return None;
    }
    (1..=policy.members).find(|number| loads.iter().all(|load| load.member != *number))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: FanOutPolicy = FanOutPolicy { builds: 2, members: 3, on_host: 5, pressure: Some(60.0) };

    /// `0:1` is the primary with one build, `1:0~` member 1 on its way, `2:1-` one that takes none, `1:1!` one under pressure.
    fn loads(text: &str) -> Vec<Load> {
        text.split_whitespace()
            .map(|word| {
                let (member, rest) = word.split_once(':').expect("member:builds");
                let reach = match rest {
                    rest if rest.ends_with('~') => Reach::Coming,
                    rest if rest.ends_with('-') => Reach::Away,
                    _ => Reach::Up,
                };
                let builds = rest.trim_end_matches(['~', '-', '!']).parse().expect("builds");
                let pressure = Some(if rest.ends_with('!') { 60.0 } else { 59.0 });
                Load { member: member.parse().expect("a member"), builds, reach, pressure }
            })
            .collect()
    }

    #[test]
    fn where_a_build_goes() {
        use Choice::{Grow, Use};
        for (text, sticky, others, choice, why) in [
            ("", None, 0, Use(0), "nothing is known yet"),
            ("0:0-", None, 0, Use(0), "it comes up for whoever is sent there"),
            ("0:2-", None, 0, Grow(1), "it is down, and two wait for it"),
            ("0:1", None, 0, Use(0), "one is not too many"),
            ("0:2", None, 0, Grow(1), "saturated"),
            ("0:1!", None, 0, Grow(1), "saturated by one that is hard work"),
            ("0:0!", None, 0, Use(0), "nobody builds, whatever it does"),
            ("0:2", None, 5, Use(0), "others have all there may be"),
            ("0:2 1:0", None, 0, Use(1), "the least loaded"),
            ("0:1 1:1", None, 0, Use(0), "alike: the primary"),
            ("0:0 1:1", Some(1), 0, Use(1), "where its branch went, as long as there is room"),
            ("0:1 1:2", Some(1), 0, Use(0), "and no longer"),
            ("0:1 1:0", Some(0), 0, Use(0), "the primary has branches as well"),
            ("0:1 1:1", Some(7), 0, Use(0), "one that is gone"),
            ("0:2 1:1~", None, 0, Use(1), "one is coming, and has room"),
            ("0:1 1:0~", None, 0, Use(0), "no wait without need"),
            ("0:1 1:0~", Some(1), 0, Use(0), "not for its branch either"),
            ("0:1~ 1:1", None, 0, Use(1), "the primary itself is on its way"),
            ("0:2 1:2", None, 0, Grow(2), "the next one"),
            ("0:2 2:2", None, 0, Grow(1), "the lowest number that is free"),
            ("0:2 1:0-", None, 0, Grow(2), "one that takes none keeps its number"),
            ("0:2 1:0- 2:0- 3:0-", None, 0, Use(0), "and counts"),
            ("0:3 1:2 2:2 3:2", None, 0, Use(1), "all saturated: the least loaded"),
            ("0:3 1:2 2:2 3:2", Some(2), 0, Use(2), "alike: where its branch went"),
            ("0:2 1:2 2:2 3:2", None, 0, Use(0), "alike: the primary"),
            ("0:5 1:2~", None, 4, Use(0), "saturated, and only the primary answers"),
            ("0:2 4:0", None, 0, Grow(1), "a member from when there might be more gets nothing new"),
            ("0:2 1:2 2:2 4:0 5:0", None, 0, Use(0), "and counts as well"),
            ("0:2 1:2 2:2", None, 2, Grow(3), "the last one on the host"),
            ("0:2 1:2 2:2", None, 3, Use(0), "no more on the host"),
        ] {
            assert_eq!(choose(&loads(text), sticky, others, &POLICY), choice, "{text} {sticky:?} {others}: {why}");
        }
    }

    #[test]
    fn without_fan_out_there_is_the_primary_and_nothing_else() {
        let off = FanOutPolicy { members: 0, ..POLICY };
        for text in ["", "0:0", "0:99", "0:2~", "0:2-", "0:2 1:0"] {
            assert_eq!(choose(&loads(text), Some(1), 0, &off), Choice::Use(0), "{text}");
        }
        let zero = FanOutPolicy { builds: 0, ..POLICY };
        assert_eq!(choose(&loads("0:0"), None, 0, &zero), Choice::Use(0), "each daemon takes one build at least");
    }

    fn any_load() -> impl Strategy<Value = Load> {
        let reach = prop_oneof![Just(Reach::Up), Just(Reach::Coming), Just(Reach::Away)];
        (0..6_u16, 0..5_usize, reach, proptest::option::of(0.0..100.0_f64))
            .prop_map(|(member, builds, reach, pressure)| Load { member, builds, reach, pressure })
    }

    fn any_loads() -> impl Strategy<Value = Vec<Load>> {
        proptest::collection::vec(any_load(), 0..7).prop_map(|mut loads| {
            loads.sort_by_key(|load| load.member);
            loads.dedup_by_key(|load| load.member);
            loads
        })
    }

    proptest! {
        #[test]
        fn one_that_takes_builds_or_a_new_one_within_the_bounds(
            loads in any_loads(), sticky in proptest::option::of(0..6_u16), others in 0..7_usize, members in 0..5_u16,
        ) {
            let policy = FanOutPolicy { members, ..POLICY };
            let choice = choose(&loads, sticky, others, &policy);
            let saturated = |load: &&Load| load.is_saturated(&policy);
            match choice {
                Choice::Use(0) => {}
                Choice::Use(member) => {
                    let load = loads.iter().find(|load| load.member == member).expect("it exists");
                    prop_assert!(member <= members && load.reach != Reach::Away);
                }
                Choice::Grow(member) => {
                    let own = loads.iter().filter(|load| load.member > 0).count();
                    prop_assert!(loads.iter().all(|load| load.member != member) && (1..=members).contains(&member));
                    prop_assert!(own < usize::from(members) && own + others < policy.on_host);
                    prop_assert!(loads.iter().filter(|load| load.takes_builds(&policy)).all(|load| saturated(&load)));
                }
            }
            let mut reversed = loads.clone();
            reversed.reverse();
            prop_assert_eq!(choose(&reversed, sticky, others, &policy), choice, "the order of the list is nothing to it");
        }

        /// Builds that come and go, each to where it is sent: nobody is overloaded while another has room, what is too much is
        /// shared evenly, and when all have gone the primary is the one that the next goes to.
        #[test]
        fn builds_are_spread(arrivals in proptest::collection::vec(any::<(bool, prop::sample::Index)>(), 0..60)) {
            let mut members = vec![Load { member: 0, builds: 0, reach: Reach::Up, pressure: None }];
            for (comes, which) in arrivals {
                if comes {
                    let before = members.clone();
                    let member = match choose(&members, None, 0, &POLICY) {
                        Choice::Use(member) => member,
                        Choice::Grow(member) => {
                            members.push(Load { member, builds: 0, reach: Reach::Up, pressure: None });
                            member
                        }
                    };
                    let taken = members.iter_mut().find(|load| load.member == member).expect("it exists");
                    taken.builds += 1;
                    let most = taken.builds;
                    prop_assert!(most <= POLICY.builds || before.len() == usize::from(POLICY.members) + 1);
                    prop_assert!(before.iter().all(|load| load.builds + 1 >= most), "{before:?}");
                } else {
                    let at = which.index(members.len());
                    members[at].builds = members[at].builds.saturating_sub(1);
                }
            }
            for load in &mut members {
                load.builds = 0;
            }
            prop_assert_eq!(choose(&members, None, 0, &POLICY), Choice::Use(0));
        }
    }
}
