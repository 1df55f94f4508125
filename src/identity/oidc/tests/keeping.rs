//! Keys are asked for seldom, by one at a time, and nobody waits for an issuer that is not his. On virtual time.

use futures_util::future::join_all;
use tokio::time::{Instant, advance};

use super::*;
use crate::identity::oidc::keeper::{BETWEEN, FIRST_PAUSE, KEPT, LONGEST_PAUSE, MOST_WAITING, REFRESH, WAIT};

const GITLAB: &str = "https://gitlab.example";

fn token(signer: Signer) -> String {
    signer.sign(&claims(GITHUB, &json!({})))
}

fn of(stand: &Stand) -> Verifier {
    verifier(&config(vec![github()]), std::slice::from_ref(stand))
}

/// Lets the tasks that are due do their work.
async fn pass(span: Duration) {
    tokio::time::sleep(span).await;
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn retry_after(error: Result<Verified, ProveError>) -> Duration {
    match error.expect_err("no keys").refusal() {
        Refusal::Unavailable { retry_after } => retry_after,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn many_callers_at_once_cost_one_question() {
    let stand = Stand::new(GITHUB, &[one()]);
    stand.mood(Mood::Slow(Duration::from_secs(1)));
    let verifier = of(&stand);
    let token = token(one());
    let proven = join_all((0..200).map(|_| verifier.prove(&token))).await;
    assert!(proven.iter().all(Result::is_ok));
    assert_eq!(stand.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn keys_are_read_again_before_anybody_needs_them() {
    let stand = Stand::new(GITHUB, &[one()]);
    let verifier = of(&stand);
    pass(Duration::from_secs(1)).await;
    assert_eq!(stand.asked(), 1, "at the start");
    stand.keys(&[one(), two()]);
    pass(REFRESH).await;
    assert_eq!(stand.asked(), 2);
    verifier.prove(&token(two())).await.expect("known without a question");
    assert_eq!(stand.asked(), 2);
    // A slow answer meanwhile is nobody's matter who has a key.
    stand.mood(Mood::Silent);
    pass(REFRESH).await;
    let before = Instant::now();
    verifier.prove(&token(one())).await.expect("from memory");
    assert_eq!((stand.asked(), before.elapsed()), (3, Duration::ZERO));
}

/// W9: a name that no key has is looked up once a minute, however many ask.
#[tokio::test(start_paused = true)]
async fn w9_unknown_keys_cost_one_question_a_minute() {
    let stand = Stand::new(GITHUB, &[one()]);
    let verifier = of(&stand);
    pass(BETWEEN).await;
    let bad = token(two());
    for _ in 0..5 {
        let refused = join_all((0..200).map(|_| verifier.prove(&bad))).await;
        assert!(refused.iter().all(|outcome| matches!(outcome, Err(ProveError::UnknownKey { .. }))));
    }
    assert_eq!(stand.asked(), 2, "one at the start and one for all of them");
    pass(BETWEEN).await;
    for _ in 0..200 {
        assert!(verifier.prove(&bad).await.is_err());
    }
    assert_eq!(stand.asked(), 3);
    // A signature that is wrong, and a token that could not count anyway, are no reason to ask.
    pass(BETWEEN).await;
    let forged = Signer { id: "one", key: two().key };
    assert!(verifier.prove(&token(forged)).await.is_err());
    assert!(verifier.prove(&two().sign(&claims(GITHUB, &json!({"aud": "other"})))).await.is_err());
    assert!(verifier.prove(&two().sign(&claims(GITHUB, &json!({"exp": NOW - 60})))).await.is_err());
    assert_eq!(stand.asked(), 3);
}

#[tokio::test(start_paused = true)]
async fn keys_that_are_replaced_count_no_more() {
    let stand = Stand::new(GITHUB, &[one()]);
    let verifier = of(&stand);
    verifier.prove(&token(one())).await.expect("the first key");
    stand.keys(&[two()]);
    pass(BETWEEN).await;
    verifier.prove(&token(two())).await.expect("found because the token names it");
    assert!(matches!(verifier.prove(&token(one())).await, Err(ProveError::UnknownKey { .. })));
    // All keys taken back, which is an answer too.
    stand.keys(&[]);
    pass(REFRESH).await;
    let refused = verifier.prove(&token(two())).await;
    assert!(matches!(refused, Err(ProveError::UnknownKey { .. })), "{refused:?}");
    assert_eq!(verifier.issuers()[0].keys, 0);
}

/// F18: that nobody can tell is not that there is nothing.
#[tokio::test(start_paused = true)]
async fn f18_an_issuer_that_is_down_is_told_of_at_once_and_asked_ever_less() {
    let stand = Stand::new(GITHUB, &[one()]);
    stand.mood(Mood::Down);
    let verifier = of(&stand);
    let first = verifier.prove(&token(one())).await;
    assert_eq!(retry_after(first), FIRST_PAUSE);
    let before = Instant::now();
    for _ in 0..1000 {
        assert!(retry_after(verifier.prove(&token(one())).await) <= FIRST_PAUSE);
    }
    assert_eq!((stand.asked(), before.elapsed()), (1, Duration::ZERO), "nobody waits, nobody asks");
    pass(Duration::from_hours(1)).await;
    let asked = stand.asked();
    assert!((12..=20).contains(&asked), "{asked} questions in an hour");
    assert!(retry_after(verifier.prove(&token(one())).await) <= LONGEST_PAUSE);
    assert!(verifier.issuers()[0].failure.as_ref().is_some_and(|why| why.contains("cannot be reached")));
    stand.mood(Mood::Well);
    pass(LONGEST_PAUSE).await;
    verifier.prove(&token(one())).await.expect("it is back");
    assert_eq!(verifier.issuers()[0].failure, None);
}

#[tokio::test(start_paused = true)]
async fn keys_outlive_failures_up_to_a_bound() {
    let stand = Stand::new(GITHUB, &[one()]);
    let verifier = of(&stand);
    pass(Duration::from_secs(1)).await;
    stand.mood(Mood::Down);
    pass(KEPT.saturating_sub(Duration::from_mins(1))).await;
    let before = Instant::now();
    verifier.prove(&token(one())).await.expect("the keys are not too old");
    assert_eq!(before.elapsed(), Duration::ZERO);
    // Another key may be there by now, which nobody can tell.
    assert!(retry_after(verifier.prove(&token(two())).await) <= LONGEST_PAUSE);
    pass(Duration::from_mins(2)).await;
    assert!(retry_after(verifier.prove(&token(one())).await) <= LONGEST_PAUSE);
}

/// W9: one that is slow holds up those who come with its tokens, for a bounded time, and nobody else.
#[tokio::test(start_paused = true)]
async fn w9_a_silent_issuer_keeps_nobody_of_another_waiting() {
    let (silent, well) = (Stand::new(GITHUB, &[one()]), Stand::new(GITLAB, &[two()]));
    silent.mood(Mood::Silent);
    let gitlab = issuer(&format!("kind = 'gitlab'\nissuer = '{GITLAB}'"));
    let verifier = verifier(&config(vec![github(), gitlab]), &[silent.clone(), well]);
    let of_well = two().sign(&claims(GITLAB, &json!({"project_path": "g/p"})));
    let of_silent = token(one());
    let begun = Instant::now();
    let waits = join_all((0..MOST_WAITING).map(|_| verifier.prove(&of_silent)));
    let others = async {
        // The parked ones first.
        tokio::task::yield_now().await;
        for _ in 0..100 {
            verifier.prove(&of_well).await.expect("proven at once");
        }
        assert!(retry_after(verifier.prove(&of_silent).await) <= WAIT, "one more than may wait");
        begun.elapsed()
    };
    let (waited, others) = tokio::join!(waits, others);
    assert_eq!(others, Duration::ZERO);
    assert_eq!(begun.elapsed(), WAIT);
    for outcome in waited {
        assert_eq!(retry_after(outcome), WAIT);
    }
    assert_eq!(silent.asked(), 1);
    advance(WAIT).await;
    assert!(retry_after(verifier.prove(&of_silent).await) <= WAIT, "the places are free again");
}

#[tokio::test(start_paused = true)]
async fn a_verifier_that_goes_takes_its_tasks_along() {
    let stand = Stand::new(GITHUB, &[one()]);
    drop(of(&stand));
    pass(Duration::from_hours(1)).await;
    assert!(stand.asked() <= 1);
}
