//! What programs say on standard error and standard output.
//!
//! `eprintln!` and `println!` panic where nothing can be written (a full disk, a closed pipe); nothing here does.

use std::io::{self, Write as _};

/// A line on standard error, in one write. Where it cannot be written there is nobody to tell.
pub fn say(line: &str) {
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// To standard output, all of it before this returns.
pub fn answer(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
