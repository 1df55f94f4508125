//! Changes to the objects of one key come one after the other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kiln_domain::Key;

/// One mutex per key in use, so that changes to one object come one after the other and others need not wait.
#[derive(Default)]
pub(super) struct KeyLocks(Mutex<HashMap<Key, Weak<tokio::sync::Mutex<()>>>>);

pub(super) type KeyGuard = tokio::sync::OwnedMutexGuard<()>;

impl KeyLocks {
    pub(super) async fn lock(&self, key: &Key) -> KeyGuard {
        self.mutex(key).lock_owned().await
    }

    /// Always in the order of the keys: two clones between the same two volumes must not wait for each other.
    pub(super) async fn lock_both(&self, one: &Key, other: &Key) -> (KeyGuard, Option<KeyGuard>) {
        let (first, second) = if one <= other { (one, other) } else { (other, one) };
        let guard = self.lock(first).await;
        let second = if first == second { None } else { Some(self.lock(second).await) };
        (guard, second)
    }

    fn mutex(&self, key: &Key) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mutex) = locks.get(key).and_then(Weak::upgrade) {
            return mutex;
        }
        locks.retain(|_, mutex| mutex.strong_count() > 0);
        let mutex = Arc::new(tokio::sync::Mutex::new(()));
        locks.insert(key.clone(), Arc::downgrade(&mutex));
        mutex
    }
}
