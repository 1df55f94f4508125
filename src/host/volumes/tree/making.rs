//! Volumes and snapshots are made aside, and moved into their place when they are whole.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_domain::Key;

use super::super::command::Failure;
use super::super::listing::{CACHE, LIVE, RECORD, SNAPSHOTS};
use super::super::medium::{Copy, Medium};
use super::super::record::Record;
use super::halves::{Half, What};
use super::newcomers::Newcomers;
use super::{Tree, exists, move_to};
use crate::host::files::{self, HALF};

/// Of the whole process: what one engine has given up is not to be taken for what another makes.
static NEXT_HALF: AtomicU64 = AtomicU64::new(0);

/// What a volume is made of.
pub(super) enum Source<'a> {
    Nothing,
    /// What nobody changes meanwhile, or a copy of which is one instant.
    Still(&'a Path),
    /// A snapshot, which somebody may remove meanwhile.
    Snapshot(&'a Path),
    /// A cache that nobody was in, and that somebody may enter meanwhile.
    Watched(&'a Path, Newcomers),
}

impl<M: Medium> Tree<M> {
    /// Makes a whole volume aside and moves it into its place. When somebody else was quicker, theirs stands.
    pub(super) async fn build(
        &self,
        key: &Key,
        place: PathBuf,
        record: Record,
        from: Source<'_>,
    ) -> Result<(), Failure> {
        let number = NEXT_HALF.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join(LIVE).join(format!("{HALF}{key}-{}-{number}", std::process::id()));
        let (size, cache) = (record.size, path.join(CACHE));
        let half = Half::new(&self.halves, What::Home, path);
        let half = half.blocking(move |half| {
            files::make_private_directory(half).map_err(|e| Failure::io(half, e))?;
            files::make_private_directory(&half.join(SNAPSHOTS)).map_err(|e| Failure::io(half, e))?;
            files::write_unseen(&half.join(RECORD), &record).map_err(|e| Failure::io(half, e))
        });
        let half = half.await?;
        let made = self.fill_with(from, &cache, size).await;
        let half = half.after(made).await?;
        let moved = half.blocking(move |half| {
            let private = std::fs::Permissions::from_mode(0o700);
            std::fs::set_permissions(&cache, private).map_err(|e| Failure::io(&cache, e))?;
            move_to(half, &place)
        });
        moved.await?.whole();
        Ok(())
    }

    async fn fill_with(&self, from: Source<'_>, cache: &Path, size: Option<u64>) -> Result<(), Failure> {
        let copy = async |from: &Path| self.medium.copy(from, cache, Copy::Volume { size }).await;
        match from {
            Source::Nothing => self.medium.make(cache, size).await,
            Source::Still(from) => copy(from).await,
            Source::Snapshot(from) => {
                copy(from).await?;
                // What goes loses its name before anything of it goes.
                if exists(from).await? { Ok(()) } else { Err(Failure::io(from, io::ErrorKind::NotFound)) }
            }
            Source::Watched(from, newcomers) => newcomers.keep_away_from(copy(from)).await,
        }
    }

    /// Makes a snapshot aside and moves it into its place.
    pub(super) async fn copy_aside(&self, from: &Path, place: &Path) -> Result<(), Failure> {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let path = place.with_file_name(format!("{HALF}{name}"));
        let half = Half::new(&self.halves, What::Copy, path.clone());
        let copied = self.medium.copy(from, &path, Copy::Snapshot).await;
        let (half, place) = (half.after(copied).await?, place.to_owned());
        half.blocking(move |half| move_to(half, &place)).await?.whole();
        Ok(())
    }
}
