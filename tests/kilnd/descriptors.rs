//! The limit of open files.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Instant;

use super::stage::{DEADLINE, Kilnd, Stage, until};

/// The soft and the hard limit.
fn limits(kilnd: &Kilnd<'_>) -> (String, String) {
    let limits = fs::read_to_string(format!("/proc/{}/limits", kilnd.pid())).expect("read");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).expect("a line");
    let mut words = line.split_whitespace().map(ToOwned::to_owned);
    (words.next().expect("soft"), words.next().expect("hard"))
}

#[test]
fn the_soft_limit_is_raised_and_a_hard_one_that_is_too_low_is_told_of() {
    let stage = Stage::new("");
    let kilnd = stage.start_limited("-Sn 200");
    let (soft, hard) = limits(&kilnd);
    let needed: u64 = 11_264;
    let at_most = hard.parse().map_or(needed, |hard: u64| hard.min(needed));
    assert_eq!(soft, at_most.to_string(), "what may be needed, and no more");
    drop(kilnd);
    let stage = Stage::new("");
    let kilnd = stage.start_limited("-n 1000");
    assert_eq!(limits(&kilnd), ("1000".to_owned(), "1000".to_owned()));
    let log = kilnd.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("LimitNOFILE=11264")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("may have 1000 files open"), "{log}");
}

#[test]
fn at_the_limit_the_log_is_not_flooded() {
    let stage = Stage::new("");
    let kilnd = stage.start_limited("-n 100");
    let begun = Instant::now();
    let mut api: Vec<TcpStream> = (0..110).map(|_| TcpStream::connect(stage.api).expect("connected")).collect();
    let _gateway: Vec<TcpStream> = (0..90).map(|_| TcpStream::connect(stage.gateway).expect("connected")).collect();
    // The newest comes last, after a failed accept for each that had to make room.
    let newest = api.last_mut().expect("one");
    newest.set_read_timeout(Some(DEADLINE)).expect("set");
    write!(newest, "GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", stage.api).expect("sent");
    let mut head = [0; 12];
    newest.read_exact(&mut head).expect("an answer");
    assert_eq!(&head, b"HTTP/1.1 200");
    let complaints = |words: &str| kilnd.log().lines().filter(|line| line.contains(words)).count() as u64;
    until("a complaint", || complaints("could not accept a connection") > 0);
    let most = 1 + begun.elapsed().as_secs() / 10;
    for words in ["could not accept a connection", "cannot accept a connection"] {
        assert!(complaints(words) <= most, "{words}: {}", kilnd.log());
    }
    assert_eq!(kilnd.terminate().1, Some(0));
}
