//! `kiln events`: server-sent events, line by line.

use std::time::Duration;

use kiln_wire::EventView;
use tokio::time::timeout;

use super::CliError;
use super::args::EventsArgs;
use super::client::Client;
use super::print::{json_line, out, plain};
use super::signals::Signals;

/// Without `--follow`, a stream that says nothing for so long has said all.
const QUIET: Duration = Duration::from_secs(1);
/// A line longer than this is not an event of ours.
const MAX_LINE_BYTES: usize = 1 << 20;

pub(super) async fn print(client: &Client, args: &EventsArgs) -> Result<(), CliError> {
    let mut signals = Signals::listen()?;
    let mut response = client.events(args.follow, args.key.as_ref()).await?;
    let mut lines = Lines::default();
    loop {
        let quiet = if args.follow { Duration::MAX } else { QUIET };
        let chunk = tokio::select! {
            chunk = timeout(quiet, response.chunk()) => chunk,
            _ = signals.next() => return Ok(()),
        };
        let Ok(chunk) = chunk else { return Ok(()) };
        let Some(chunk) = chunk.map_err(|error| client.broken_stream(error))? else { return Ok(()) };
        for event in lines.feed(&chunk) {
            if args.json {
                json_line(&event)?;
            } else {
                out(&format!("{}\n", line(&event)))?;
            }
        }
    }
}

/// For people, on one line as long as its text is.
pub(super) fn line(event: &EventView) -> String {
    plain(&format!("{:<24}  {:<17}  {}", event.at, event.key.as_deref().unwrap_or("-"), matter(event)))
}

/// Without its project, where that is clear.
pub(super) fn line_of_one(event: &EventView) -> String {
    plain(&format!("{:<24}  {}", event.at, matter(event)))
}

fn matter(event: &EventView) -> String {
    let by = event.by.as_ref().map(|by| format!("by {by}"));
    let rule = event.rule.as_ref().map(|rule| format!("rule: {rule}"));
    let whence: Vec<String> = by.into_iter().chain(rule).collect();
    let whence = if whence.is_empty() { String::new() } else { format!(" ({})", whence.join("; ")) };
    format!("{:<10}  {}{whence}", event.kind, event.text)
}

/// Puts chunks together to lines, and `data:` lines to events. What is no event of ours is passed over: a newer kilnd
/// may send more.
#[derive(Debug, Default)]
struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    fn feed(&mut self, chunk: &[u8]) -> Vec<EventView> {
        let mut events = Vec::new();
        for &byte in chunk {
            if byte == b'\n' {
                events.extend(event(&self.rest));
                self.rest.clear();
            } else if self.rest.len() < MAX_LINE_BYTES {
                self.rest.push(byte);
            }
        }
        events
    }
}

fn event(line: &[u8]) -> Option<EventView> {
    serde_json::from_slice(line.strip_prefix(b"data:")?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_however_the_stream_is_cut() {
        let stream = "id: 1\r\nevent: phase\r\ndata: {\"id\":1,\"at\":\"t\",\"kind\":\"phase\",\"text\":\"warm\"}\r\n\r\n\
                      : keep-alive\n\ndata: {\"nonsense\":1}\n\ndata:{\"id\":2,\"at\":\"t\",\"kind\":\"step\",\"text\":\"x\"}\n\n";
        for size in [1, 2, 7, 64, stream.len()] {
            let mut lines = Lines::default();
            let events: Vec<i64> =
                stream.as_bytes().chunks(size).flat_map(|chunk| lines.feed(chunk)).map(|event| event.id).collect();
            assert_eq!(events, [1, 2], "in chunks of {size}");
        }
    }
}
