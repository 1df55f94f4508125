//! Where requests come in: a unix socket, and TCP on loopback.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use thiserror::Error;
use tokio::net::{TcpListener, UnixListener};

/// Owner and group may connect: whoever shall use Kiln without root is put in the group.
const SOCKET_MODE: u32 = 0o660;

#[derive(Debug, Error)]
pub enum ListenError {
    #[error("{path} is in use by another kilnd: stop that one first, or give this one another socket")]
    Held { path: PathBuf },
    #[error("{path} exists and is not a socket: move it away, or give kilnd another socket")]
    NotASocket { path: PathBuf },
    /// K9: without identities, closed to other hosts.
    #[error("{address} is not a loopback address: the API has no TLS, so it listens on 127.0.0.1 or [::1] only")]
    NotLoopback { address: SocketAddr },
    #[error("cannot listen on {address}: stop what listens there, or set api.listen to another port")]
    Bind {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot listen on {on}: {doing}")]
    Io {
        on: String,
        doing: &'static str,
        #[source]
        source: io::Error,
    },
}

/// A socket that listens already. Dropping one of a path removes the path.
#[derive(Debug)]
pub struct Listener(pub(super) Socket);

#[derive(Debug)]
pub(super) enum Socket {
    Unix { listener: UnixListener, _file: SocketFile },
    Tcp(TcpListener),
}

impl Listener {
    /// Whether [`Listener::unix`] may take `path`: there is nothing, or the socket of a dead kilnd. Changes nothing.
    pub fn check_free(path: &Path) -> Result<(), ListenError> {
        let io = |doing| move |source| ListenError::Io { on: path.display().to_string(), doing, source };
        match fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => Err(ListenError::NotASocket { path: path.to_owned() }),
            Ok(_) => match std::os::unix::net::UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(io("see whether somebody else does")(error)),
                Ok(_) => Err(ListenError::Held { path: path.to_owned() }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io("look at the path")(error)),
        }
    }

    /// Replaces the socket that a dead kilnd left behind; one that somebody listens on is an error. The mode is in
    /// force before anybody can connect by this path. Needs a runtime.
    pub fn unix(path: &Path) -> Result<Self, ListenError> {
        let io = |doing| move |source| ListenError::Io { on: path.display().to_string(), doing, source };
        Self::check_free(path)?;
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".new");
        let unfinished = PathBuf::from(unfinished);
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io("remove a half-made socket")(error));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&unfinished).map_err(io("bind"))?;
        fs::set_permissions(&unfinished, fs::Permissions::from_mode(SOCKET_MODE)).map_err(io("set the mode"))?;
        fs::rename(&unfinished, path).map_err(io("move the socket to its place"))?;
        let inode = fs::symlink_metadata(path).map_err(io("look at the new socket"))?.ino();
        Ok(Self(Socket::Unix { listener, _file: SocketFile { path: path.to_owned(), inode } }))
    }

    pub async fn tcp(address: SocketAddr) -> Result<Self, ListenError> {
        if !address.ip().is_loopback() {
            return Err(ListenError::NotLoopback { address });
        }
        let listener = TcpListener::bind(address).await.map_err(|source| ListenError::Bind { address, source })?;
        Ok(Self(Socket::Tcp(listener)))
    }

    /// The address with the port that was given; `None` of a unix socket.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        match &self.0 {
            Socket::Tcp(listener) => listener.local_addr().ok(),
            Socket::Unix { .. } => None,
        }
    }
}

/// Removes its path when dropped, unless a successor has taken it over meanwhile.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
