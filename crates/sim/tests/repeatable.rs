//! A schedule follows from its seed, whatever else the process does.

use kiln_sim::Stage;

#[test]
fn equal_seeds_give_equal_histories_and_others_do_not() {
    let stage = Stage::new().expect("a stage");
    let first: Vec<_> = (0..6).map(|seed| stage.play(seed, false).hash).collect();
    let again: Vec<_> = (0..6).map(|seed| Stage::new().expect("a stage").play(seed, false).hash).collect();
    assert_eq!(first, again);
    assert!(first.windows(2).all(|pair| pair[0] != pair[1]), "{first:?}");
}

/// What is counted for the whole process (tokio's tasks, say) must not show.
#[test]
fn a_schedule_beside_others_is_the_same() {
    let stage = Stage::new().expect("a stage");
    let alone: Vec<_> = (0..12).map(|seed| stage.play(seed, false).hash).collect();
    let beside: Vec<Vec<_>> = std::thread::scope(|scope| {
        let play = || (0..12).map(|seed| stage.play(seed, false).hash).collect();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(play)).collect();
        threads.into_iter().map(|thread| thread.join().expect("played")).collect()
    });
    for hashes in beside {
        assert_eq!(hashes, alone);
    }
}
