//! See [`kiln::daemon`].

use std::process::ExitCode;

fn main() -> ExitCode {
    kiln::daemon::main()
}
