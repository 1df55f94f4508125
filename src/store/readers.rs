//! Connections that only read. They see every acknowledged write and never wait for the writer.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{OpenError, StoreError, schema};

/// One for the requests of people and machines, and one that is free while the other reads something long.
const CONNECTIONS: usize = 2;

/// A read takes milliseconds: whoever waits this long is told so.
const PATIENCE: Duration = Duration::from_secs(5);

/// And the read itself, over whatever an admin's `sqlite3` does meanwhile: a disk that gives nothing back hangs in the
/// kernel, where nothing ends it.
const READ_TIME: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub(super) struct Readers {
    /// For messages.
    path: Arc<PathBuf>,
    free: Arc<Mutex<Vec<Connection>>>,
    permits: Arc<Semaphore>,
}

impl Readers {
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let connections = (0..CONNECTIONS).map(|_| schema::open_reader(path)).collect::<Result<Vec<_>, _>>()?;
        let (path, permits) = (Arc::new(path.to_owned()), Arc::new(Semaphore::new(CONNECTIONS)));
        Ok(Self { path, free: Arc::new(Mutex::new(connections)), permits })
    }

    /// Runs `read` off the runtime's threads.
    pub(super) async fn read<T, F>(&self, read: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    {
        let permit = tokio::time::timeout(PATIENCE, self.permits.clone().acquire_owned())
            .await
            .map_err(|_| StoreError::ReadsWaiting { seconds: PATIENCE.as_secs() })?
            .map_err(|_| StoreError::Closed)?;
        let borrowed = Borrowed::take(self.free.clone(), permit).ok_or(StoreError::Closed)?;
        // The connection goes along, so that it comes back even when the caller does not wait for the end.
        let reading =
            tokio::task::spawn_blocking(move || borrowed.connection.as_ref().map_or(Err(StoreError::Closed), read));
        let read = tokio::time::timeout(READ_TIME, reading).await;
        let read = read.map_err(|_| StoreError::ReadHangs { path: self.path.to_path_buf(), after: READ_TIME })?;
        read.unwrap_or(Err(StoreError::Closed)).map_err(|error| error.of_database(&self.path))
    }
}

struct Borrowed {
    connection: Option<Connection>,
    home: Arc<Mutex<Vec<Connection>>>,
    /// After the connection: whoever gets the permit finds it.
    _permit: OwnedSemaphorePermit,
}

impl Borrowed {
    fn take(home: Arc<Mutex<Vec<Connection>>>, permit: OwnedSemaphorePermit) -> Option<Self> {
        let connection = home.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Self { connection: Some(connection), home, _permit: permit })
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.home.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
    }
}
