//! One certificate authority per project, the daemon's certificate, and credentials for builds.
//!
//! Files, below the state directory, directories 0700 and keys 0600:
//!
//! ```text
//! pki/<key>/ca.pem  ca.key          the project's CA; made once
//! daemons/<key>/ca.pem cert.pem key.pem buildkitd.toml
//! ```
//!
//! Promises: a project's CA signs for that project only, so a credential of one project is worth nothing at another's
//! daemon (K8). Files are written aside and renamed, so a crash leaves the old or the new one and never half of one.
//! What is about to expire is reported as stale long before it does.
//!
//! What must not be here: who may have a credential.
