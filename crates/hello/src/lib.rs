//! Reads a TLS ClientHello from bytes as they arrive: sans-I/O, without cryptography.
//!
//! What must not be here: sockets, clocks, routing.
