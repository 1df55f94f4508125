//! A plain HTTP client that sends whatever it is told to, over a unix socket: there, whoever runs the tests may do everything.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longer than any answer here takes.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("no JSON ({error}): {self:?}"))
    }
}

pub(crate) fn get(to: &Path, path: &str) -> io::Result<Answer> {
    send(to, format!("GET {path} HTTP/1.1\r\nhost: kiln\r\nconnection: close\r\n\r\n").as_bytes())
}

pub(crate) fn delete(to: &Path, path: &str) -> io::Result<Answer> {
    send(to, format!("DELETE {path} HTTP/1.1\r\nhost: kiln\r\nconnection: close\r\n\r\n").as_bytes())
}

pub(crate) fn post(to: &Path, path: &str, body: &[u8]) -> io::Result<Answer> {
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nhost: kiln\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    send(to, &[head.as_bytes(), body].concat())
}

/// In one chunk, so that the length is not known before.
pub(crate) fn post_chunked(to: &Path, path: &str, body: &[u8]) -> io::Result<Answer> {
    let head = format!("POST {path} HTTP/1.1\r\nhost: kiln\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
    send(to, &[format!("{head}{:x}\r\n", body.len()).as_bytes(), body, b"\r\n0\r\n\r\n"].concat())
}

/// Writes all of it, whatever is answered meanwhile, and then reads to the end.
pub(crate) fn send(to: &Path, request: &[u8]) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(request)?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    parse(&bytes).ok_or_else(|| io::Error::other(format!("no answer: {:?}", String::from_utf8_lossy(&bytes))))
}

fn parse(bytes: &[u8]) -> Option<Answer> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}
