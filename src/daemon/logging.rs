//! Where log lines go: standard error, readable; `KILN_LOG` sets how much (`info`, `kiln=debug`, …), and
//! `KILN_LOG_FORMAT=json` makes each line a JSON object.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

pub(super) fn start() {
    // rustls warns of every odd hello, and the internet is full of them; the gateway counts them.
    let filter = EnvFilter::try_from_env("KILN_LOG").unwrap_or_else(|_| EnvFilter::new("info,rustls=error"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    if std::env::var_os("KILN_LOG_FORMAT").is_some_and(|format| format == "json") {
        lines.json().init();
    } else {
        lines.with_ansi(std::io::stderr().is_terminal()).init();
    }
}
