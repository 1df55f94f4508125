//! The `kiln` command; see `kiln::cli`.

fn main() -> std::process::ExitCode {
    kiln::cli::main()
}
