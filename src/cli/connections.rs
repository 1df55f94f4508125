//! `kiln gateway`: what it relays now.

use std::time::Duration;

use kiln_wire::ConnectionView;
use kiln_wire::units::show_span;

use super::CliError;
use super::args::JsonArg;
use super::client::Client;
use super::print::{Printer, human_size, json};

pub(super) async fn list(client: &Client, args: &JsonArg) -> Result<(), CliError> {
    let open = client.connections().await?;
    if args.json { json(&open) } else { table(&open) }
}

fn table(open: &[ConnectionView]) -> Result<(), CliError> {
    let row = |one: &ConnectionView| {
        let key = one.key.clone().unwrap_or_else(|| "-".to_owned());
        let age = show_span(Duration::from_secs(one.age_ms / 1000));
        [key, one.from.clone(), one.state.clone(), age, human_size(one.to_daemon), human_size(one.to_client)]
    };
    let rows: Vec<_> = open.iter().map(row).collect();
    Printer::for_stdout().table(["KEY", "FROM", "STATE", "AGE", "TO DAEMON", "TO CLIENT"], &rows)
}
