//! Who is calling: from what a request came with to a [`Standing`].
//!
//! ```text
//!   where it came from ─┐
//!                       ├─▶ Callers::identify ─▶ Caller { standing, who } ─▶ kiln_domain::access::decide
//!   what it shows ──────┘
//! ```
//!
//! Promises: what is shown counts and nothing else: a proof that does not hold is refused, never passed over for a weaker one; who
//! shows nothing is whoever the kernel says is on the other end of the socket, or nobody; what cannot be looked up is an error and
//! never an absence (F18). `who` is for the journal: it names the caller and opens nothing.
//!
//! | file | what is in it |
//! |---|---|
//! | `callers` | which proof counts |
//! | `local` | users of this host |
//! | `tokens` | tokens that an admin gave out |
//! | [`oidc`] | builds, by the word of their forge |
//! | [`challenge`] | builds to which their forge gives no token |
//!
//! What must not be here: what a standing may do (`kiln_domain::access`), HTTP.

mod callers;
pub mod challenge;
mod local;
pub mod oidc;
mod tokens;

use kiln_domain::access::Standing;

pub use callers::{Callers, IdentifyError, Loopback, Source};
pub use local::{Account, AccountError, Accounts, Local, SystemAccounts};
pub use tokens::{Issued, TokenError, Tokens, Wanted};

/// Somebody who asks for something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub standing: Standing,
    /// For the journal and the log. At most [`LONGEST_WHO`] bytes, printable.
    pub who: String,
}

/// In bytes.
pub const LONGEST_WHO: usize = 256;

impl Caller {
    /// What programs of this host are called that come over TCP and show nothing.
    pub const THIS_HOST: &str = "this host";

    pub fn stranger(who: impl Into<String>) -> Self {
        Self { standing: Standing::Stranger, who: who.into() }
    }
}
