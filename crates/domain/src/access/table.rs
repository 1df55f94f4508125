//! The table.

use super::{Proven, Standing, Trust, Verb};
use crate::lane::Lane;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grant {
    No,
    /// Of projects that are the caller's.
    Own,
    /// Whatever it is asked of.
    Any,
}

/// What one verb grants to each standing but an admin, who has them all.
struct Row {
    operator: Grant,
    watcher: Grant,
    holder: Grant,
    trusted: Grant,
    untrusted: Grant,
    stranger: Grant,
}

const fn row(grants: [Grant; 6]) -> Row {
    let [operator, watcher, holder, trusted, untrusted, stranger] = grants;
    Row { operator, watcher, holder, trusted, untrusted, stranger }
}

/// Somebody who holds a project may throw its cache away but not cut off its builds, which others may have under way.
#[expect(clippy::match_same_arms, reason = "a table has a row for each")]
const fn row_of(verb: Verb) -> Row {
    use Grant::{Any, No, Own};
    //                      operator watcher holder trusted untrusted stranger
    match verb {
        Verb::Greet => row([Any, Any, Any, Any, Any, Any]),
        Verb::Watch => row([Any, Any, No, No, No, No]),
        Verb::Route => row([Own, No, Own, Own, Own, No]),
        Verb::Prewarm => row([Own, No, Own, Own, Own, No]),
        Verb::Release => row([Any, Any, Any, Any, Any, Any]),
        Verb::ReleaseOldest => row([Any, No, Own, Own, No, No]),
        Verb::Renew => row([Any, Any, Any, Any, Any, Any]),
        Verb::Challenge => row([Any, Any, Any, Any, Any, Any]),
        Verb::List => row([Any, No, Any, Any, No, No]),
        Verb::See => row([Any, No, Own, Own, No, No]),
        Verb::Stop => row([Any, No, Own, No, No, No]),
        Verb::Force => row([Any, No, No, No, No, No]),
        Verb::Snapshot => row([Any, No, Own, No, No, No]),
        Verb::RollBack => row([Any, No, Own, No, No, No]),
        Verb::Configure => row([No, No, No, No, No, No]),
        Verb::Remove => row([No, No, No, No, No, No]),
        Verb::SeeHost => row([Any, No, No, No, No, No]),
        Verb::Follow => row([Any, No, No, No, No, No]),
        Verb::Restore => row([Any, No, No, No, No, No]),
        Verb::Mend => row([No, No, No, No, No, No]),
        Verb::Discard => row([No, No, No, No, No, No]),
        Verb::Close => row([Any, No, No, No, No, No]),
        Verb::Admit => row([No, No, No, No, No, No]),
    }
}

#[expect(clippy::match_same_arms, reason = "a column for each")]
pub(super) const fn grant(standing: &Standing, verb: Verb) -> Grant {
    let row = row_of(verb);
    match standing {
        Standing::Admin => Grant::Any,
        Standing::Operator(_) => row.operator,
        Standing::Watcher => row.watcher,
        Standing::Holder { lane: Lane::Trusted, .. } => row.holder,
        Standing::Holder { lane: Lane::Untrusted, .. } => row.untrusted,
        Standing::Build(Proven { trust: Trust::Trusted, .. }) => row.trusted,
        Standing::Build(Proven { trust: Trust::Untrusted { .. }, .. }) => row.untrusted,
        Standing::Stranger => row.stranger,
    }
}
