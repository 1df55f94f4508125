//! A bounded number of schedules with every test run; `kiln-sim --seeds N` plays any number.

use kiln_sim::Stage;

/// Each found a fault once, which was mended: what it was stands beside it.
const FOUND_FAULTS: [(u64, &str); 30] = [
    (1, "a release that failed across a leap of the clock came back with times of before, and held for a month"),
    (22, "a daemon that worked and did not answer was taken for one that hangs"),
    (24, "an adoption that could not be recorded left its incarnation behind, and a number that was no daemon's"),
    (
        28,
        "a daemon of before a restart was taken for one that had never answered, and stopped without having been asked",
    ),
    (33, "a lease that was granted just after a leap of the clock was dated by the clock of before, and forgotten"),
    (56, "the same, and its release was told that there is none"),
    (73, "a rebuilt project began to count its starts anew"),
    (80, "a lease ended early when the clock went back for a moment"),
    (81, "a release whose client had gone before it was written stayed on the disk, and nobody knew of it"),
    (150, "the number of a start was on the disk together with the name of the run before"),
    (168, "a leap of the clock counted as silence of a daemon"),
    (469, "a write to be tried again soon was to be tried in a month after the clock went back"),
    (822, "a setback that seemed to be still to come was never over"),
    (
        872,
        "a rescue that was done and reported as failed did not count, and the cache was given up or taken back again",
    ),
    (1290, "a list that was read before a snapshot was judged took its good name away, and the only good one went"),
    (1485, "the checker took a copy for forgotten that was gone from the host, when its row was still on the disk"),
    (1514, "a daemon whose adoption could not be recorded was answered with a number that was no run's"),
    (
        1628,
        "the checker wanted a volume in a rebuilt database that landed when the host had been looked through already",
    ),
    (1810, "leases that were given after a wait for the disk, in which the clock had leapt, were forgotten"),
    (2262, "the model dated a stop by when the host took it up, and the daemon's word before it had grown old by then"),
    (2286, "the checker gave a lease back that was over when its copy went, because a start found an earlier clock"),
    (3169, "the checker gave a lease back what a start had taken from it, because the clock went back later"),
    (3267, "as 1810, with a leap of another length"),
    (3683, "the checker held a cache's eviction to a lease that came when it had begun"),
    (4194, "a rebuild gave a running daemon's address to what bore an older mark of it, and everybody another's"),
    (7575, "a way back that a removal overtook was said to be done"),
    (7602, "the checker counted a lease from its answer on, which came seconds after its birth"),
    (8332, "in the quiet end an admin brought a damaged cache back from the trash, after those had been seen to"),
    (9510, "a cache came back from the trash, and whoever had seen it go said that it was empty already"),
    (9624, "a start that was given up on landed during another step, and the cache went back under its daemon"),
];

fn assert_good(seed: u64, what: &str) {
    let outcome = Stage::new().expect("a stage").play(seed, false);
    assert!(outcome.failure.is_none(), "seed {seed} ({what}): {:?}\n{}", outcome.failure, outcome.story.join("\n"));
}

#[test]
fn what_was_found_once_is_not_found_again() {
    for (seed, what) in FOUND_FAULTS {
        assert_good(seed, what);
    }
}

#[test]
fn a_handful_of_schedules() {
    for seed in 10_000..10_060 {
        assert_good(seed, "one of a handful");
    }
}
