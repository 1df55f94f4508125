//! A daemon's last words: the end of its console, which holds what kiln-init and buildkitd said.

use std::time::{Duration, Instant};

use reqwest::Method;

use super::client::{ApiError, Client};
use crate::host::stack::without_stack;

/// Enough for a refusal and what led to it.
const BYTES: usize = 16 * 1024;
const LINES: usize = 40;

/// The console of one that has just died is written to disk a moment after that.
const WRITTEN: Duration = Duration::from_secs(2);

/// Empty when there is none, or when it cannot be had: this is for error messages.
pub(crate) async fn last(client: &Client, instance: &str) -> String {
    let deadline = Instant::now() + WRITTEN;
    loop {
        let log = client.text(&format!("{instance}/console"), BYTES).await;
        match log {
            Ok(log) if !log.trim().is_empty() => return tidy(&log),
            Err(ApiError::Unreachable { .. } | ApiError::NotFound(_)) => return String::new(),
            // Between the death and its record, asking the dead one's console is an error.
            _ if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(50)).await,
            _ => return String::new(),
        }
    }
}

/// Empties the console of an instance that is down. Best effort.
pub(crate) async fn forget(client: &Client, instance: &str) {
    if let Err(error) = client.change(Method::DELETE, &format!("{instance}/console"), None).await {
        tracing::debug!(%error, instance, "the console's log stays");
    }
}

/// The last lines without what a terminal makes of them.
fn tidy(log: &str) -> String {
    let mut plain = String::with_capacity(log.len());
    let mut characters = log.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\u{1b}' => {
                // A control sequence: `[`, parameters, one letter.
                if characters.next_if_eq(&'[').is_some() {
                    while characters.next_if(|c| !c.is_ascii_alphabetic()).is_some() {}
                    characters.next();
                }
            }
            '\n' => plain.push('\n'),
            c if c.is_control() => {}
            c => plain.push(c),
        }
    }
    let lines: Vec<&str> = plain.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let lines = without_stack(lines);
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_and_blank_lines_go_and_the_end_stays() {
        assert_eq!(tidy("\u{1b}[33mWARN\u{1b}[0m[2026] x \r\n\r\nlast\r\n"), "WARN[2026] x\nlast");
        assert_eq!(tidy("\u{1b}"), "");
        assert_eq!(tidy("\u{1b}[31"), "");
        let many = (0..100).map(|n| n.to_string()).collect::<Vec<_>>().join("\n");
        assert_eq!(tidy(&many).lines().count(), LINES);
        assert!(tidy(&many).ends_with("99"));
    }
}
