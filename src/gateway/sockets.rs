//! Socket options of both legs.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// An idle peer is asked after this long, and again at this interval.
const KEEPALIVE: Duration = Duration::from_secs(15);
const PROBES: u32 = 3;

/// A peer that acknowledges nothing for this long is dead: idle (15 s, then 3 probes) or with data under way, where
/// keepalive does not help and the kernel's own patience is a quarter of an hour. gRPC's pings are off in buildkitd, so
/// nothing else would notice a runner that lost its power, and its project would stay busy.
///
/// The price: a client that is alive but suspended with a full receive window counts as dead too.
const DEAD_AFTER: Duration = Duration::from_mins(1);

/// For both legs, before the first byte; a listener's are inherited by what it accepts (Linux).
pub(super) fn prepare(stream: impl AsFd + Copy) -> io::Result<()> {
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_user_timeout(stream, DEAD_AFTER.as_millis() as u32)?;
    Ok(())
}

/// Says "no more from here". A peer that is already gone does not need to be told.
pub(super) fn finish_writing(stream: &TcpStream) -> io::Result<()> {
    match rustix::net::shutdown(stream, rustix::net::Shutdown::Write) {
        Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// From now on closing it sends a reset: the other end must not take a broken stream for a finished one.
pub(super) fn reset_on_close(stream: &TcpStream) {
    // It fails only on a socket that is gone already.
    let _ = sockopt::set_socket_linger(stream, Some(Duration::ZERO));
}

/// On a shared reference.
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
