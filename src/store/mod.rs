//! What must survive: projects, leases, the journal of events. SQLite, one file.
//!
//! One writer thread takes writes from a channel and commits whatever has gathered together: one `fdatasync` for many
//! answers (group commit). `synchronous=FULL`, so a write that was acknowledged survives `kill -9` and power loss (K4).
//! Readers have connections of their own and never wait for the writer.
//!
//! Promises: a write is acknowledged only after its commit; writes are applied in the order of their submission; each is
//! atomic, and one that fails does not harm the others in its commit. A file from a newer Kiln, a damaged one, or one
//! that another kilnd holds is refused at opening with an error that says so.
//!
//! What must not be here: rules about leases and phases (kiln-domain), secrets in clear.
