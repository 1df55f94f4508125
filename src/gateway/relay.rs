//! Moves bytes both ways until both sides have finished, or one has broken.
//!
//! Each direction ends on its own: when its source has no more, its sink is told so, once, and the other direction goes
//! on (F47). A buffer is held only while there is something to move, so an idle connection has none.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use tokio::net::TcpStream;

use super::live::{Live, State};
use super::sockets;

/// As much as a socket usually gives at once on loopback; larger ones showed nothing.
const BUFFER: usize = 64 * 1024;

/// Kept for the next one that has something to move; more than this many at a time are given back to the allocator.
const KEPT: usize = 64;

/// Buffers that nobody uses now.
#[derive(Default)]
pub(super) struct Buffers(Mutex<Vec<Box<[u8]>>>);

impl Buffers {
    fn take(&self) -> Lent<'_> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Lent { bytes: kept.unwrap_or_else(|| vec![0; BUFFER].into_boxed_slice()), home: self }
    }
}

/// Goes home when dropped, also when the task that has it is.
struct Lent<'a> {
    bytes: Box<[u8]>,
    home: &'a Buffers,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut kept = self.home.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// Returns when both directions have ended. After an error the caller resets both sides.
pub(super) async fn relay(client: &TcpStream, daemon: &TcpStream, buffers: &Buffers, live: &Live) -> io::Result<()> {
    tokio::try_join!(
        one_way(client, daemon, buffers, live, &live.to_daemon),
        one_way(daemon, client, buffers, live, &live.to_client),
    )?;
    Ok(())
}

async fn one_way(
    from: &TcpStream,
    to: &TcpStream,
    buffers: &Buffers,
    live: &Live,
    moved: &AtomicU64,
) -> io::Result<()> {
    loop {
        from.readable().await?;
        let mut buffer = buffers.take();
        loop {
            match from.try_read(&mut buffer.bytes) {
                Ok(0) => {
                    live.enter(State::HalfClosed);
                    return sockets::finish_writing(to);
                }
                Ok(count) => {
                    write_all(to, buffer.bytes.get(..count).unwrap_or_default()).await?;
                    moved.fetch_add(count as u64, Relaxed);
                    // Two fast peers must not keep this thread to themselves.
                    tokio::task::consume_budget().await;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
    }
}

/// On a shared reference, so that both directions can have the stream.
pub(super) async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.try_write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => to.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
