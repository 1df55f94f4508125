//! A schedule follows from its seed. In a process of its own: beside schedules on other threads, one in some hundred was seen
//! to take another turn, and why is not known yet.

use kiln_sim::Stage;

#[test]
fn equal_seeds_give_equal_histories_and_others_do_not() {
    let stage = Stage::new().expect("a stage");
    let first: Vec<_> = (0..6).map(|seed| stage.play(seed, false).hash).collect();
    let again: Vec<_> = (0..6).map(|seed| Stage::new().expect("a stage").play(seed, false).hash).collect();
    assert_eq!(first, again);
    assert!(first.windows(2).all(|pair| pair[0] != pair[1]), "{first:?}");
}
