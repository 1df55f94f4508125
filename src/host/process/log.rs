//! A daemon's output: one file per run, the run before it kept, both bounded.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;

use super::record::Desk;
use crate::host::stack::without_stack;

/// A log that has grown beyond this is set aside. A week of an idle daemon is a few KiB; this is a month of a busy one.
const MAX_BYTES: u64 = 8 << 20;
const LAST_LINES: usize = 20;
const LAST_BYTES: u64 = 8 << 10;

/// Sets the last run's log aside and begins a new one.
pub(super) fn begin(desk: &Desk) -> io::Result<File> {
    match std::fs::rename(desk.log(), desk.old_log()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().append(true).create(true).mode(0o600).open(desk.log())
}

/// Cuts a log that a long run has made too long. The daemon has it open for appending and goes on at its new end; a line
/// written between the copy and the cut is lost.
pub(super) fn bound(desk: &Desk) -> io::Result<()> {
    if std::fs::metadata(desk.log())?.len() <= MAX_BYTES {
        return Ok(());
    }
    std::fs::copy(desk.log(), desk.old_log())?;
    OpenOptions::new().write(true).open(desk.log())?.set_len(0)
}

/// Adds a line of ours.
pub(super) fn note(desk: &Desk, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).open(desk.log())?;
    file.write_all(format!("[kiln] {text}\n").as_bytes())
}

/// The last lines of this run, without what could drive a terminal.
pub(super) fn last_words(desk: &Desk) -> io::Result<String> {
    let mut file = match File::open(desk.log()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        opened => opened?,
    };
    let start = file.metadata()?.len().saturating_sub(LAST_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(LAST_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<String> =
        text.lines().map(|line| line.chars().filter(|c| !c.is_control() || *c == '\t').collect()).collect();
    // The first of a longer log was cut somewhere.
    let lines = if start > 0 { lines.get(1..).unwrap_or_default() } else { &lines[..] };
    let lines = without_stack(lines.to_vec());
    Ok(lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk(directory: &tempfile::TempDir) -> Desk {
        let desk = Desk::new(directory.path(), &"pbcce5b6205652dd7".parse().expect("a key"));
        std::fs::create_dir(desk.directory()).expect("made");
        desk
    }

    #[test]
    fn the_last_lines_are_of_this_run_and_harmless() {
        let directory = tempfile::tempdir().expect("a directory");
        let desk = desk(&directory);
        assert_eq!(last_words(&desk).expect("no log is no error"), "");
        begin(&desk).expect("begun").write_all(b"of an earlier run\n").expect("written");
        let mut file = begin(&desk).expect("begun");
        assert_eq!(last_words(&desk).expect("read"), "");
        for line in 0..3000 {
            writeln!(file, "line {line}").expect("written");
        }
        file.write_all(b"\x1b[31mred\xff\n").expect("written");
        note(&desk, "exited").expect("written");
        let words = last_words(&desk).expect("read");
        assert!(
            words.starts_with("line 2982\n") && words.ends_with("line 2999\n[31mred\u{fffd}\n[kiln] exited"),
            "{words}"
        );
        assert_eq!(words.lines().count(), LAST_LINES);
    }

    #[test]
    fn a_long_log_is_cut_under_the_daemon() {
        let directory = tempfile::tempdir().expect("a directory");
        let desk = desk(&directory);
        let mut file = begin(&desk).expect("begun");
        file.write_all(&vec![b'x'; usize::try_from(MAX_BYTES).expect("fits") + 1]).expect("written");
        bound(&desk).expect("cut");
        file.write_all(b"after\n").expect("written");
        bound(&desk).expect("nothing to do");
        assert_eq!(last_words(&desk).expect("read"), "after");
        assert_eq!(std::fs::metadata(desk.old_log()).expect("kept").len(), MAX_BYTES + 1);
    }
}
