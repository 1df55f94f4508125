//! `kiln build`, the real program, against a stand-in kilnd on a unix socket and a stand-in buildx that writes down how
//! it was called. What is looked at: who is called in which order, that a routed build is released whatever happens,
//! the exit code, and that nothing stays behind.

mod building;
mod ending;
mod kilnd;
mod stage;
mod waiting;
mod words;
