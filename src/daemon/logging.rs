//! Where log lines go: standard error, readable; `KILN_LOG` sets how much (`info`, `kiln=debug`, …), and
//! `KILN_LOG_FORMAT=json` makes each line a JSON object.
//!
//! An event is one line. What daemons, builds and clients say is part of some events, and must not pass for others. One that
//! cannot be written is lost: kilnd is worth more than its log.

use std::io::{self, IsTerminal as _, Write};

use tracing_subscriber::EnvFilter;

pub(super) fn start() {
    // rustls warns of every odd hello, and the internet is full of them; the gateway counts them.
    let filter = EnvFilter::try_from_env("KILN_LOG").unwrap_or_else(|_| EnvFilter::new("info,rustls=error"));
    let colours = io::stderr().is_terminal();
    let writer = move || OneLine { to: io::stderr(), colours };
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_target(false);
    // Else the subscriber tells of what it could not write with an `eprintln!`, which panics where stderr is at fault.
    let lines = lines.log_internal_errors(false);
    if std::env::var_os("KILN_LOG_FORMAT").is_some_and(|format| format == "json") {
        lines.json().init();
    } else {
        lines.with_ansi(colours).init();
    }
}

/// Takes a whole event with each write, as the subscriber gives it, and writes it as one line. Never an error: see above.
struct OneLine<W> {
    to: W,
    /// Whether there are colours of the subscriber's own.
    colours: bool,
}

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let _ = self.to.write_all(in_one_line(&String::from_utf8_lossy(event), self.colours).as_bytes());
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.to.flush();
        Ok(())
    }
}

/// The subscriber makes some of what could drive a terminal harmless, and not in every place. Where there are colours,
/// a value can have some too.
fn in_one_line(event: &str, colours: bool) -> String {
    let (text, end) = event.strip_suffix('\n').map_or((event, ""), |text| (text, "\n"));
    let mut line = String::with_capacity(event.len());
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        let colour = if colours { length_of_colour(rest) } else { None };
        let (kept, next) = rest.split_at(colour.unwrap_or(character.len_utf8()));
        if colour.is_some() || !character.is_control() {
            line.push_str(kept);
        } else {
            line.extend(character.escape_default());
        }
        rest = next;
    }
    line + end
}

/// `ESC [ 1;31 m` at the beginning, and nothing else that begins so.
fn length_of_colour(text: &str) -> Option<usize> {
    let parameters = text.strip_prefix("\u{1b}[")?;
    let end = parameters.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    parameters[end..].starts_with('m').then_some("\u{1b}[".len() + end + 1)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, PoisonError};

    use super::*;

    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl Write for Paper {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(json: bool, act: impl FnOnce()) -> String {
        let paper = Paper::default();
        let to = paper.clone();
        let writer = move || OneLine { to: to.clone(), colours: false };
        let lines = tracing_subscriber::fmt().with_writer(writer).with_target(false);
        if json {
            tracing::subscriber::with_default(lines.json().finish(), act);
        } else {
            tracing::subscriber::with_default(lines.with_ansi(false).finish(), act);
        }
        let bytes = paper.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        String::from_utf8(bytes).expect("text")
    }

    #[test]
    fn what_a_daemon_says_makes_no_line_of_its_own() {
        let forged = "bye\n2026-01-01T00:00:00Z  INFO all is well\r\n\u{1b}[2J\u{9b}1mx";
        for json in [false, true] {
            let text = written(json, || {
                tracing::warn!(words = %forged, quoted = ?forged, "it died: {forged}");
                tracing::info!("the next");
            });
            let lines: Vec<&str> = text.split('\n').collect();
            assert_eq!((lines.len(), lines[2]), (3, ""), "{text:?}");
            assert!(lines[0].contains("all is well") && lines[1].contains("the next"), "{text:?}");
            assert!(!text.replace('\n', "").contains(char::is_control), "{text:?}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_no_error() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }

            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let mut line = OneLine { to: Full, colours: false };
        assert_eq!(line.write(b"an event\n").expect("is lost"), 9);
        line.flush().expect("is lost");
    }

    #[test]
    fn colours_stay_where_there_are_some_and_nothing_else_does() {
        let painted = "\u{1b}[1;31mred\u{1b}[0m\u{1b}[2J\u{1b}]0;title\u{7}\u{1b}[\u{1b}\n";
        let kept = "\u{1b}[1;31mred\u{1b}[0m\\u{1b}[2J\\u{1b}]0;title\\u{7}\\u{1b}[\\u{1b}\n";
        assert_eq!(in_one_line(painted, true), kept);
        assert_eq!(in_one_line("\u{1b}[31mred", false), "\\u{1b}[31mred");
        assert_eq!(in_one_line("a\nb\n", true), "a\\nb\n");
    }
}
