//! Tokens: what is kept of them, and for how long.

use kiln_domain::access::{AccessToken, Grade, Scope};
use rusqlite::Connection;

use super::super::{StoreError, TokenRecord, tokens};
use super::*;

fn token(number: u8) -> TokenRecord {
    let token = AccessToken::from_random([number; 8], [number; 32]);
    TokenRecord {
        id: token.id().clone(),
        hash: token.hash(),
        name: format!("of job {number}"),
        grade: Grade::Builder,
        scope: Scope::new(vec!["github.com/org/*".parse().expect("a pattern"), "*".parse().expect("a pattern")]),
        made_by: "uid 0".to_owned(),
        created: NOW.plus(Duration::from_secs(number.into())),
        expires: (number == 2).then(|| NOW.plus(Duration::from_hours(1))),
        last_used: None,
    }
}

#[tokio::test]
async fn a_token_outlives_a_restart_and_is_gone_when_it_is_revoked() {
    let place = Place::new();
    let store = place.open();
    assert!(!store.tokens_were_given().await.expect("reads"));
    for number in [2, 1] {
        store.add_token(&token(number), event("made")).await.expect("is written");
    }
    store.token_used(&token(1).id, NOW.plus(Duration::from_secs(9))).await.expect("is written");
    store.token_used(&token(1).id, NOW).await.expect("is written");
    drop(store);

    let store = place.open();
    let used = TokenRecord { last_used: Some(NOW.plus(Duration::from_secs(9))), ..token(1) };
    assert_eq!(store.tokens().await.expect("reads"), [used, token(2)]);
    assert!(store.remove_token(&token(1).id, event("revoked")).await.expect("is written"));
    assert!(!store.remove_token(&token(1).id, event("revoked twice")).await.expect("is written"));
    assert_eq!(store.tokens().await.expect("reads"), [token(2)]);
    assert!(store.remove_token(&token(2).id, event("revoked, too")).await.expect("is written"));
    assert!(store.tokens_were_given().await.expect("reads"), "also when all are gone");
    let told: Vec<_> = store.events(0, 9).await.expect("reads").into_iter().map(|event| event.text).collect();
    assert_eq!(told, ["made", "made", "revoked", "revoked, too"]);
}

#[tokio::test]
async fn there_are_only_so_many_and_none_twice() {
    let place = Place::new();
    let store = place.open();
    store.add_token(&token(1), event("made")).await.expect("is written");
    let twice = store.add_token(&token(1), event("again")).await;
    assert!(matches!(twice, Err(StoreError::Sqlite { .. })), "{twice:?}");
    assert!(store.remove_token(&token(1).id, event("revoked")).await.expect("is written"));
    drop(store);
    let many = format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {})
         INSERT INTO tokens SELECT printf('%016x', i + 4096), zeroblob(32), '', 'builder', '[]', '', 0, NULL, NULL FROM n",
        tokens::MOST
    );
    Connection::open(place.path()).and_then(|database| database.execute_batch(&many)).expect("writes");
    let store = place.open();
    let beyond = store.add_token(&token(1), event("made")).await;
    assert!(matches!(beyond, Err(StoreError::TooManyTokens { .. })), "{beyond:?}");
    assert_eq!(store.events(0, 9).await.expect("reads").len(), 2, "what was refused is not told of");
}

/// A damaged token opens nothing, and harms no other.
#[tokio::test]
async fn a_damaged_row_is_left_out() {
    let place = Place::new();
    let store = place.open();
    for number in [1, 2, 3] {
        store.add_token(&token(number), event("made")).await.expect("is written");
    }
    drop(store);
    let damage = "UPDATE tokens SET grade = 'god' WHERE id = '0101010101010101';
        UPDATE tokens SET hash = x'00' WHERE id = '0202020202020202';";
    Connection::open(place.path()).and_then(|database| database.execute_batch(damage)).expect("writes");
    assert_eq!(place.open().tokens().await.expect("reads"), [token(3)]);
}
