//! Moves bytes both ways until both sides have finished, or one has broken.
//!
//! Each direction ends on its own: when its source has no more, its sink is told so, once, and the other direction goes
//! on (F47). Small frames are read into a buffer and written; what fills a buffer is bulk, and moves through a pipe by
//! `splice(2)`, from socket to socket inside the kernel. Either is borrowed while there is something to move, so an idle
//! connection has neither.
//!
//! ```text
//!          ┌── fill ◀── the source has something ◀──┐
//!   held ──┤                                        ├── nothing held
//!          └── drain ──▶ until all of it is gone ───┘
//! ```
//!
//! A pipe is filled only when it is empty. So "try again" from a fill always means the source and from a drain always the
//! sink: a full pipe is never taken for a socket that has nothing, and nobody spins. It is back-pressure, too: what a sink
//! does not take stays in its source.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};

use rustix::pipe::{SpliceFlags, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::live::{Live, State};
use super::sockets;

mod pools;
#[cfg(test)]
mod tests;

use pools::{BUFFER, Buffer, LentPipe, PIPE};
pub(crate) use pools::{PIPES, Pools};

/// Below this a splice costs more than a copy (benches/gateway): the next is read again.
const WORTH_A_SPLICE: usize = 16 * 1024;

/// Two fast peers must not keep their thread to themselves: after so many turns others have theirs.
const TURNS: usize = 16;

/// Both directions of one connection.
pub(super) struct Relay {
    client: TcpStream,
    daemon: TcpStream,
    pools: Arc<Pools>,
    to_daemon: Way,
    to_client: Way,
}

impl Relay {
    /// `hello` was read from the client already and goes first.
    pub(super) fn new(client: TcpStream, daemon: TcpStream, hello: Vec<u8>, pools: Arc<Pools>) -> Self {
        Self { client, daemon, pools, to_daemon: Way::that_holds(hello), to_client: Way::that_holds(Vec::new()) }
    }

    /// Ready when both directions have ended. After an error the caller resets both sides.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, live: &Live) -> Poll<io::Result<()>> {
        let Self { client, daemon, pools, to_daemon, to_client } = self;
        let up =
            to_daemon.poll(cx, pools, &Legs { from: client, to: daemon, moved: &live.to_daemon }, to_client.ended)?;
        let down =
            to_client.poll(cx, pools, &Legs { from: daemon, to: client, moved: &live.to_client }, to_daemon.ended)?;
        match (up, down) {
            (Poll::Ready(()), Poll::Ready(())) => Poll::Ready(Ok(())),
            (Poll::Pending, Poll::Pending) => Poll::Pending,
            _ => {
                live.enter(State::HalfClosed);
                Poll::Pending
            }
        }
    }

    /// Takes it apart between two bytes.
    pub(super) fn freeze(self) -> io::Result<FrozenRelay> {
        let Self { client, daemon, pools: _, to_daemon, to_client } = self;
        let (to_daemon, to_client) = (to_daemon.freeze()?, to_client.freeze()?);
        Ok(FrozenRelay { client: client.into_std()?, daemon: daemon.into_std()?, to_daemon, to_client })
    }

    /// Puts it together again, here or in another process.
    pub(super) fn thaw(frozen: FrozenRelay, pools: Arc<Pools>) -> io::Result<Self> {
        let FrozenRelay { client, daemon, to_daemon, to_client } = frozen;
        client.set_nonblocking(true)?;
        daemon.set_nonblocking(true)?;
        let way = |frozen: FrozenWay| Way { ended: frozen.ended, ..Way::that_holds(frozen.pending) };
        Ok(Self {
            client: TcpStream::from_std(client)?,
            daemon: TcpStream::from_std(daemon)?,
            pools,
            to_daemon: way(to_daemon),
            to_client: way(to_client),
        })
    }

    /// From now on both ends see a break and no end.
    pub(super) fn reset_on_close(&self) {
        sockets::reset_on_close(&self.client);
        sockets::reset_on_close(&self.daemon);
    }
}

/// A relay that nobody polls.
pub(super) struct FrozenRelay {
    pub(super) client: std::net::TcpStream,
    pub(super) daemon: std::net::TcpStream,
    pub(super) to_daemon: FrozenWay,
    pub(super) to_client: FrozenWay,
}

pub(super) struct FrozenWay {
    /// Read from the source and not yet taken by the sink.
    pub(super) pending: Vec<u8>,
    /// The source has finished, and the sink knows.
    pub(super) ended: bool,
}

/// One direction.
struct Way {
    held: Held,
    /// What came last was large.
    bulk: bool,
    /// Its source has finished, and its sink knows.
    ended: bool,
}

/// What a direction goes between, and where its bytes are counted.
struct Legs<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    moved: &'a AtomicU64,
}

enum Held {
    Nothing,
    /// Read before the relay began.
    First {
        bytes: Vec<u8>,
        start: usize,
    },
    Bytes {
        buffer: Buffer,
        start: usize,
        end: usize,
    },
    InPipe(LentPipe),
}

impl Way {
    fn that_holds(bytes: Vec<u8>) -> Self {
        let held = if bytes.is_empty() { Held::Nothing } else { Held::First { bytes, start: 0 } };
        Self { held, bulk: false, ended: false }
    }

    fn freeze(self) -> io::Result<FrozenWay> {
        let pending = match self.held {
            Held::Nothing => Vec::new(),
            Held::First { mut bytes, start } => bytes.split_off(start),
            Held::Bytes { buffer, start, end } => buffer.bytes.get(start..end).unwrap_or_default().to_vec(),
            Held::InPipe(pipe) => pipe.into_bytes()?,
        };
        Ok(FrozenWay { pending, ended: self.ended })
    }

    /// `is_last`: the other direction has ended.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        pools: &Arc<Pools>,
        legs: &Legs<'_>,
        is_last: bool,
    ) -> Poll<io::Result<()>> {
        let Legs { from, to, moved } = *legs;
        for _ in 0..TURNS {
            if self.ended {
                return Poll::Ready(Ok(()));
            }
            ready!(self.drain(cx, to, moved))?;
            ready!(self.fill(cx, from, pools))?;
            // After the last both are closed, which says the same.
            if self.ended && !is_last {
                sockets::finish_writing(to)?;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Ready when nothing is held.
    fn drain(&mut self, cx: &mut Context<'_>, to: &TcpStream, moved: &AtomicU64) -> Poll<io::Result<()>> {
        loop {
            let (written, left) = match &mut self.held {
                Held::Nothing => return Poll::Ready(Ok(())),
                Held::First { bytes, start } => {
                    let rest = bytes.get(*start..).unwrap_or_default();
                    let written = all_or_what_fits(to, rest.len(), || Ok(rustix::io::write(to, rest)?))?;
                    *start += written;
                    (written, bytes.len() - *start)
                }
                Held::Bytes { buffer, start, end } => {
                    let bytes = buffer.bytes.get(*start..*end).unwrap_or_default();
                    let written = all_or_what_fits(to, bytes.len(), || Ok(rustix::io::write(to, bytes)?))?;
                    *start += written;
                    (written, *end - *start)
                }
                Held::InPipe(pipe) => {
                    let (read, holds) = (pipe.ends()?.0, pipe.holds);
                    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
                    let written = all_or_what_fits(to, holds, || Ok(splice(read, None, to, None, holds, flags)?))?;
                    pipe.holds -= written;
                    (written, pipe.holds)
                }
            };
            moved.fetch_add(written as u64, Relaxed);
            if left == 0 {
                self.held = Held::Nothing;
                return Poll::Ready(Ok(()));
            }
            ready!(to.poll_write_ready(cx))?;
        }
    }

    /// Ready when something is held, or the source has ended.
    fn fill(&mut self, cx: &mut Context<'_>, from: &TcpStream, pools: &Arc<Pools>) -> Poll<io::Result<()>> {
        loop {
            ready!(from.poll_read_ready(cx))?;
            let filled = match self.bulk.then(|| pools.pipe()).flatten() {
                Some(pipe) => self.splice_in(pipe, from)?,
                None => self.read_in(from, pools)?,
            };
            if filled {
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// False: there was nothing after all.
    fn splice_in(&mut self, mut pipe: LentPipe, from: &TcpStream) -> io::Result<bool> {
        let write = pipe.ends()?.1;
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let count = match from.try_io(Interest::READABLE, || Ok(splice(from, None, write, None, PIPE, flags)?)) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.bulk = false;
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        self.bulk = count >= WORTH_A_SPLICE;
        self.ended = count == 0;
        pipe.holds = count;
        if count > 0 {
            self.held = Held::InPipe(pipe);
        }
        Ok(true)
    }

    fn read_in(&mut self, from: &TcpStream, pools: &Arc<Pools>) -> io::Result<bool> {
        let mut buffer = pools.buffer();
        let mut got = None;
        let bytes = &mut *buffer.bytes;
        let outcome = from.try_io(Interest::READABLE, || {
            let count = rustix::io::read(from, &mut *bytes)?;
            got = Some(count);
            // The socket had no more: told so, the runtime waits for the next event and not for another call to fail.
            // The end of a stream is an event of its own, which it remembers.
            if count > 0 && count < BUFFER { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
        });
        match (got, outcome) {
            (Some(0), _) => self.ended = true,
            (Some(count), _) => {
                self.bulk = count == BUFFER;
                self.held = Held::Bytes { buffer, start: 0, end: count };
            }
            (None, Err(error)) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            (None, _) => return Ok(false),
        }
        Ok(true)
    }
}

/// How much a socket took, of so many bytes. If not all, the runtime knows that it is full, and waits.
fn all_or_what_fits(to: &TcpStream, all: usize, mut write: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    let mut written = 0;
    let outcome = to.try_io(Interest::WRITABLE, || {
        written = write()?;
        if written < all { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    });
    match outcome {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(written),
    }
}
