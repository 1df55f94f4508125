//! Who on this host is on the other end of the unix socket, as the kernel says, and what that is worth.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kiln_domain::access::{Grade, Scope, Standing};
use nix::unistd::{Group, Uid, User, getgrouplist};
use thiserror::Error;

use super::Caller;
use crate::config::{LocalGrant, Who};

/// How long it is believed what the system says of a user: somebody who is taken out of a group is out after that.
const BELIEVED: Duration = Duration::from_secs(10);

/// So many users are remembered; a host has few.
const MOST: usize = 1024;

/// A user, as the system knows it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Account {
    pub name: Option<String>,
    pub groups: Vec<String>,
}

#[derive(Debug, Clone, Error)]
#[error("cannot look up user {uid}: {why}; see `getent passwd {uid}`")]
pub struct AccountError {
    pub uid: u32,
    pub why: String,
}

/// Where users and groups are looked up. Blocks.
pub trait Accounts: Send + Sync + 'static {
    fn account(&self, uid: u32) -> Result<Account, AccountError>;
}

/// `passwd` and `group` of the name service switch.
#[derive(Debug, Default)]
pub struct SystemAccounts;

impl Accounts for SystemAccounts {
    fn account(&self, uid: u32) -> Result<Account, AccountError> {
        let failed = |why: String| AccountError { uid, why };
        let Some(user) = User::from_uid(Uid::from_raw(uid)).map_err(|error| failed(error.to_string()))? else {
            return Ok(Account::default());
        };
        let name = CString::new(user.name.as_str()).map_err(|error| failed(error.to_string()))?;
        let ids = getgrouplist(&name, user.gid).map_err(|error| failed(error.to_string()))?;
        let mut groups = Vec::new();
        for id in ids {
            // A group without a name is in no list.
            groups.extend(Group::from_gid(id).map_err(|error| failed(error.to_string()))?.map(|group| group.name));
        }
        Ok(Account { name: Some(user.name), groups })
    }
}

/// The lists of `[local]`.
pub struct Local {
    grants: Vec<LocalGrant>,
    /// Whoever kilnd runs as has all that is kilnd's anyway.
    own: u32,
    accounts: Arc<dyn Accounts>,
    known: Mutex<HashMap<u32, (Instant, Caller)>>,
}

impl Local {
    pub fn new(grants: Vec<LocalGrant>, own: u32, accounts: Arc<dyn Accounts>) -> Self {
        Self { grants, own, accounts, known: Mutex::default() }
    }

    pub(super) async fn caller(&self, uid: u32) -> Result<Caller, AccountError> {
        // No lookup: an admin gets in also where the directory of users is away.
        let is_admin = |grant: &LocalGrant| grant.grade == Grade::Admin && grant.who == Who::Uid(uid);
        if uid == self.own || self.grants.iter().any(is_admin) {
            return Ok(Caller { standing: Standing::Admin, who: format!("uid {uid}") });
        }
        let now = Instant::now();
        if let Some(caller) = self.known(uid, now) {
            return Ok(caller);
        }
        let accounts = self.accounts.clone();
        let account = tokio::task::spawn_blocking(move || accounts.account(uid))
            .await
            .map_err(|error| AccountError { uid, why: error.to_string() })??;
        let caller = self.judge(uid, &account);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(uid, (now, caller.clone()));
        Ok(caller)
    }

    fn known(&self, uid: u32, now: Instant) -> Option<Caller> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (when, caller) = known.get(&uid)?;
        (now.duration_since(*when) < BELIEVED).then(|| caller.clone())
    }

    fn judge(&self, uid: u32, account: &Account) -> Caller {
        let is = |who: &Who| match who {
            Who::Uid(listed) => *listed == uid,
            Who::User(name) => account.name.as_ref() == Some(name),
            Who::Group(name) => account.groups.contains(name),
        };
        let mine = || self.grants.iter().filter(|grant| is(&grant.who));
        let grade = mine().map(|grant| grant.grade).min_by_key(|grade| rank(*grade));
        let standing = grade.map_or(Standing::Stranger, |grade| {
            let scopes = mine().filter(|grant| grant.grade == grade).flat_map(|grant| grant.scope.patterns());
            grade.standing(Scope::new(scopes.cloned().collect()))
        });
        let name = account.name.as_deref().map(|name| format!(" ({name})")).unwrap_or_default();
        Caller { standing, who: format!("uid {uid}{name}") }
    }
}

/// What gives the most comes first.
const fn rank(grade: Grade) -> u8 {
    match grade {
        Grade::Admin => 0,
        Grade::Operator => 1,
        Grade::Builder => 2,
        Grade::UntrustedBuilder => 3,
        Grade::Watcher => 4,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// User 7 is `ann`, in `devs`; 8 cannot be looked up; nobody else is known.
    #[derive(Default)]
    struct FewAccounts(AtomicUsize);

    impl Accounts for FewAccounts {
        fn account(&self, uid: u32) -> Result<Account, AccountError> {
            self.0.fetch_add(1, Ordering::SeqCst);
            match uid {
                7 => Ok(Account { name: Some("ann".to_owned()), groups: vec!["devs".to_owned()] }),
                8 => Err(AccountError { uid, why: "the directory is away".to_owned() }),
                _ => Ok(Account::default()),
            }
        }
    }

    fn grant(who: Who, grade: Grade) -> LocalGrant {
        LocalGrant { who, grade, scope: Scope::default() }
    }

    fn local(grants: Vec<LocalGrant>) -> (Local, Arc<FewAccounts>) {
        let accounts = Arc::new(FewAccounts::default());
        (Local::new(grants, 5, accounts.clone()), accounts)
    }

    #[tokio::test]
    async fn a_user_has_the_most_that_a_list_gives_and_of_that_everything() {
        let (local, _) = local(vec![
            grant(Who::Group("devs".to_owned()), Grade::Operator),
            grant(Who::User("ann".to_owned()), Grade::Builder),
            grant(Who::Uid(9), Grade::Watcher),
        ]);
        let ann = local.caller(7).await.expect("is known");
        assert_eq!((ann.standing, ann.who.as_str()), (Standing::Operator(Scope::default()), "uid 7 (ann)"));
        assert_eq!(local.caller(9).await.expect("by number").standing, Standing::Watcher);
        let of = |text: &str| Scope::new(vec![text.parse().expect("a pattern")]);
        let builder = |grade, text| LocalGrant { who: Who::Uid(11), grade, scope: of(text) };
        let (several, _) = self::local(vec![
            builder(Grade::UntrustedBuilder, "h/a"),
            builder(Grade::Builder, "h/b"),
            builder(Grade::Builder, "h/c/*"),
        ]);
        let all = Scope::new(vec!["h/b".parse().expect("a pattern"), "h/c/*".parse().expect("a pattern")]);
        let seen = several.caller(11).await.expect("by number").standing;
        assert_eq!(seen, Standing::Holder { scope: all, lane: kiln_domain::Lane::Trusted });
        assert_eq!(local.caller(10).await.expect("unknown").standing, Standing::Stranger);
        assert_eq!(local.caller(5).await.expect("kilnd's own").standing, Standing::Admin);
        assert_eq!(local.caller(0).await.expect("root is in no list here").standing, Standing::Stranger);
    }

    #[tokio::test]
    async fn a_lookup_that_fails_is_an_error_and_not_a_stranger() {
        let (one, _) = local(vec![grant(Who::Uid(8), Grade::Operator)]);
        assert!(one.caller(8).await.expect_err("away").to_string().contains("the directory is away"));
        let (one, _) = local(vec![grant(Who::Uid(8), Grade::Admin)]);
        assert_eq!(one.caller(8).await.expect("needs no lookup").standing, Standing::Admin);
    }

    #[tokio::test]
    async fn a_user_is_looked_up_once_in_a_while() {
        let (local, accounts) = local(Vec::new());
        for _ in 0..3 {
            local.caller(7).await.expect("is known");
        }
        assert_eq!(accounts.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn the_system_knows_root() {
        let root = SystemAccounts.account(0).expect("is looked up");
        assert_eq!(root.name.as_deref(), Some("root"));
        assert!(root.groups.contains(&"root".to_owned()), "{root:?}");
        assert_eq!(SystemAccounts.account(3_999_999_999).expect("is looked up"), Account::default());
    }
}
