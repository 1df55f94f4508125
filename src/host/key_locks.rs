//! Changes to the objects of one key come one after the other.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kiln_domain::Key;

/// One mutex per key in use, so that changes to one object come one after the other and others need not wait.
pub(super) struct KeyLocks<K = Key>(Mutex<HashMap<K, Weak<tokio::sync::Mutex<()>>>>);

impl<K> Default for KeyLocks<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

pub(super) type KeyGuard = tokio::sync::OwnedMutexGuard<()>;

impl<K: Clone + Eq + Hash + Ord> KeyLocks<K> {
    pub(super) async fn lock(&self, key: &K) -> KeyGuard {
        self.mutex(key).lock_owned().await
    }

    /// Always in the order of the keys: two clones between the same two volumes must not wait for each other. Answers with the
    /// lock of `one`, and with that of `other` if it is another.
    pub(super) async fn lock_both(&self, one: &K, other: &K) -> (KeyGuard, Option<KeyGuard>) {
        let (first, second) = if one <= other { (one, other) } else { (other, one) };
        let guard = self.lock(first).await;
        if first == second {
            return (guard, None);
        }
        let next = self.lock(second).await;
        if first == one { (guard, Some(next)) } else { (next, Some(guard)) }
    }

    fn mutex(&self, key: &K) -> Arc<tokio::sync::Mutex<()>> {
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
