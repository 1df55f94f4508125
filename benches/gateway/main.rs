//! What the gateway costs, beside other proxies in the same run: `cargo bench --bench gateway -- --help`.
//!
//! ```text
//!   clients ──▶ the proxy, a process of its own ──▶ backend       (clients and backend are this process)
//! ```
//!
//! All that is charged is the proxy's own: its processor time from the kernel's accounts of its threads, its memory (Pss),
//! its descriptors. The proxies take turns within each round, because on a shared machine only what was measured side by
//! side can be compared.
//!
//! | file | |
//! |---|---|
//! | `proxies.rs` | what is measured: Kiln's gateway, another build of it, and what is installed of HAProxy, nginx, sniproxy |
//! | `account.rs` | what a process has used |
//! | `loads.rs` | what clients and backend do |
//! | `table.rs` | medians, in Markdown |

#![allow(clippy::disallowed_methods, reason = "it waits for other programs, which tell nobody when they are ready")]

mod account;
mod loads;
mod proxies;
mod table;

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::Parser;
use proxies::Proxy;
use table::Table;

/// Measures the gateway's costs.
#[derive(Parser)]
struct Arguments {
    /// Serve as the proxy that is measured, towards this backend.
    #[arg(long, hide = true)]
    serve: Option<std::net::SocketAddrV4>,
    /// Another build of this program, measured as "before".
    #[arg(long)]
    beside: Option<PathBuf>,
    /// Leave other proxies out, also where they are installed.
    #[arg(long)]
    alone: bool,
    /// How often each proxy has its turn.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Connections that idle at a time.
    #[arg(long, default_value_t = 2000)]
    idle: usize,
    /// Bytes per measurement of bulk.
    #[arg(long, default_value_t = 1 << 30)]
    bulk: u64,
    /// Only measurements whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Put the table into this page, between its two marks, in place of the one that is there.
    #[arg(long)]
    write: Option<PathBuf>,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments = Arguments::parse();
    if let Some(backend) = arguments.serve {
        return proxies::serve(backend);
    }
    let backend = loads::Backend::start()?;
    let mut table = Table::default();
    for round in 1..=arguments.rounds {
        // Anew in each round: what memory a process has used once it uses again.
        let proxies = start(&arguments, backend.address)?;
        let loads = loads::all(arguments.idle, arguments.bulk);
        for load in loads.iter().filter(|load| load.name.contains(&arguments.only)) {
            for proxy in &proxies {
                for (figure, value) in load.run(proxy)? {
                    table.add(&figure, proxy.name, value);
                }
            }
        }
        eprintln!("round {round} of {}", arguments.rounds);
    }
    println!("{table}");
    match &arguments.write {
        Some(page) => write(page, &arguments, &table),
        None => Ok(()),
    }
}

const MARKS: [&str; 2] = ["<!-- gateway: begin -->\n", "<!-- gateway: end -->\n"];

fn write(page: &Path, arguments: &Arguments, table: &Table) -> Outcome<()> {
    let text = std::fs::read_to_string(page)?;
    let (before, rest) = text.split_once(MARKS[0]).ok_or("the page has no mark where the table begins")?;
    let (_, after) = rest.split_once(MARKS[1]).ok_or("the page has no mark where the table ends")?;
    let processors = std::thread::available_parallelism()?;
    let Arguments { rounds, idle, bulk, .. } = arguments;
    let what = format!("{processors} processors, {rounds} rounds, {idle} idle connections, {bulk} bytes of bulk.\n\n");
    std::fs::write(page, [before, MARKS[0], &what, &table.to_string(), MARKS[1], after].concat())?;
    Ok(())
}

fn start(arguments: &Arguments, backend: std::net::SocketAddrV4) -> Outcome<Vec<Proxy>> {
    let mut proxies = vec![Proxy::kiln("kiln", &std::env::current_exe()?, backend)?];
    if let Some(other) = &arguments.beside {
        proxies.push(Proxy::kiln("before", other, backend)?);
    }
    if !arguments.alone {
        proxies.extend(Proxy::installed(backend)?);
    }
    Ok(proxies)
}
