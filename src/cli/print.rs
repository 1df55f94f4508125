//! Printing answers: aligned, coloured only for a terminal, JSON when asked.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};

use serde::Serialize;

use super::CliError;
use crate::stdio;

/// Where answers go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Printer {
    colour: bool,
}

impl Printer {
    pub(super) fn for_stdout() -> Self {
        let dumb = super::variable("TERM").is_some_and(|term| term == "dumb");
        Self { colour: io::stdout().is_terminal() && !dumb && super::variable("NO_COLOR").is_none() }
    }

    /// Rows below a heading; columns as wide as their widest cell.
    pub(super) fn table<const N: usize>(self, heading: [&str; N], rows: &[[String; N]]) -> Result<(), CliError> {
        out(&table(heading, rows, self.colour))
    }
}

/// To stdout. [`CliError::ReaderGone`] when nobody reads it any more.
pub(super) fn out(text: &str) -> Result<(), CliError> {
    stdio::answer(text).map_err(unwritten)
}

pub(super) fn unwritten(error: io::Error) -> CliError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => CliError::ReaderGone,
        _ => CliError::Stdout(error),
    }
}

pub(super) fn json<T: Serialize>(value: &T) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value).map_err(|error| CliError::Stdout(error.into()))?;
    out(&format!("{text}\n"))
}

pub(super) fn json_line<T: Serialize>(value: &T) -> Result<(), CliError> {
    let text = serde_json::to_string(value).map_err(|error| CliError::Stdout(error.into()))?;
    out(&format!("{text}\n"))
}

/// `name  value` lines; those without a value are left out.
pub(super) fn fields(fields: &[(&str, String)]) -> Result<(), CliError> {
    let shown = || fields.iter().filter(|(_, value)| !value.is_empty());
    let width = shown().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in shown() {
        let _ = writeln!(text, "{name:width$}  {}", plain(value).replace('\n', &format!("\n{:width$}  ", "")));
    }
    out(&text)
}

/// `3.4 GiB`, for people: three digits say enough.
pub(super) fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    // What would be shown as 1024 is 1 of the next.
    while size >= 1023.5 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    let digits = [9.995, 99.95].iter().filter(|bound| size < **bound).count();
    format!("{size:.digits$} {}", UNITS[unit])
}

fn table<const N: usize>(heading: [&str; N], rows: &[[String; N]], colour: bool) -> String {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| plain(cell)).collect()).collect();
    let mut widths = heading.map(str::len);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let heading: Vec<String> = heading.iter().map(|&cell| cell.to_owned()).collect();
    let mut text =
        line(&heading, &widths, |cell| if colour { format!("\x1b[1m{cell}\x1b[0m") } else { cell.to_owned() });
    for row in &rows {
        text += &line(row, &widths, |cell| if colour { painted(cell) } else { cell.to_owned() });
    }
    text
}

fn line(cells: &[String], widths: &[usize], paint: impl Fn(&str) -> String) -> String {
    let mut text = String::new();
    for (index, (cell, width)) in cells.iter().zip(widths).enumerate() {
        text += &paint(cell);
        if index + 1 < cells.len() {
            let _ = write!(text, "{:1$}  ", "", width - cell.chars().count());
        }
    }
    format!("{}\n", text.trim_end())
}

/// Phases carry their state in colour.
fn painted(cell: &str) -> String {
    let code = match cell {
        "warm" => "32",
        "failed" => "31",
        "provisioning" | "starting" | "draining" | "rolling" | "removing" => "33",
        _ => return cell.to_owned(),
    };
    format!("\x1b[{code}m{cell}\x1b[0m")
}

/// Text from elsewhere (a daemon's last words, say) must not steer the terminal, nor look like another text.
pub(super) fn plain(text: &str) -> String {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    let reorders = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if steers(c) || reorders(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_nothing_trails() {
        let rows = [["p1".to_owned(), "warm".to_owned()], ["p22222".to_owned(), "idle\x1b[2J".to_owned()]];
        assert_eq!(table(["KEY", "PHASE"], &rows, false), "KEY     PHASE\np1      warm\np22222  idle\u{fffd}[2J\n");
    }

    #[test]
    fn what_others_say_steers_no_terminal() {
        let hostile = "\x1b]0;title\x07\u{9b}31m github.com/x/\u{202e}gpj.exe\ttab\nline";
        let tame = "\u{fffd}]0;title\u{fffd}\u{fffd}31m github.com/x/\u{fffd}gpj.exe\ttab\nline";
        assert_eq!(plain(hostile), tame);
        let error = std::io::Error::other(hostile);
        assert_eq!(super::super::error::chain(&error), tame.replace('\n', " | "));
    }

    #[test]
    fn sizes_for_people() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (20 << 30, "20.0 GiB"),
            ((3 << 30) + (2 << 29), "4.00 GiB"),
            (105 << 20, "105 MiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (10 * 1024 - 1, "10.0 KiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(human_size(bytes), text, "of {bytes}");
        }
    }

    #[test]
    fn colour_does_not_count_as_width() {
        let rows = [["warm".to_owned(), "x".to_owned()]];
        assert_eq!(
            table(["PHASE", "B"], &rows, true),
            "\x1b[1mPHASE\x1b[0m  \x1b[1mB\x1b[0m\n\x1b[32mwarm\x1b[0m   x\n"
        );
    }
}
