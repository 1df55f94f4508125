//! Going back to a snapshot, in an exchange that is one rename.
//!
//! 1. A whole volume with the contents of the snapshot and the properties of the live one is made under a name in the
//!    trash. Its record says what it is for: [`Returning`].
//! 2. It and the live volume change places. Now there is the new one in use, and the old one in the trash.
//! 3. The snapshots up to the one returned to move from the old to the new, and the record no longer says anything.
//!
//! After a crash before 2 there is an entry of the trash that is for a rollback: nobody had it, and it is removed. After
//! one before 3 the live volume is for a rollback: its snapshots are fetched at the next opening, and before anything else
//! happens to the volume or to that entry of the trash.

use std::path::{Path, PathBuf};

use kiln_domain::{Key, SnapshotName};
use rustix::fs::{CWD, RenameFlags};

use super::halves::{Half, What};
use super::making::Source;
use super::{Tree, blocking, retire};
use crate::host::files::{self, HALF};
use crate::host::volumes::command::Failure;
use crate::host::volumes::listing::{RECORD, SNAPSHOTS, TRASH, history, names_in};
use crate::host::volumes::medium::Medium;
use crate::host::volumes::record::{Kept, Record, Returning};
use crate::host::volumes::{TrashName, Volume, VolumeError};

impl<M: Medium> Tree<M> {
    /// Steps 1 and 2. `record` is that of the live volume, in which nobody is.
    pub(super) async fn go_back(&self, key: &Key, to: SnapshotName, record: Record) -> Result<TrashName, Failure> {
        let name = self.next_in_trash(key).await?;
        let prepared = Half::new(&self.halves, What::Prepared, self.trashed(&name));
        let made = self.prepare(key, &name, to, &record).await;
        self.exchange(key, prepared.after(made).await?, record).await?;
        Ok(name)
    }

    pub(super) async fn prepare(
        &self,
        key: &Key,
        name: &TrashName,
        to: SnapshotName,
        record: &Record,
    ) -> Result<(), Failure> {
        let known = record.clone();
        let mut kept = blocking(&self.home(key), move |live| history(live, &known)).await?;
        kept.retain(|snapshot| snapshot.name <= to);
        let kept = kept.into_iter().map(|s| (s.name.sequence(), Kept { taken: s.taken, verdict: s.verdict }));
        let fresh = Record {
            snapshots: kept.collect(),
            returning: Some(Returning { to: to.sequence(), trash: name.sequence() }),
            discarded: None,
            ..record.clone()
        };
        // With the key's lock held nobody removes it meanwhile.
        self.build(key, self.trashed(name), fresh, Source::Still(&self.snapshot_at(key, to))).await
    }

    pub(super) async fn exchange(&self, key: &Key, prepared: Half<M>, record: Record) -> Result<(), Failure> {
        let written = self.write_record(key, Record { discarded: Some(self.clock.now()), ..record }).await;
        let (prepared, live) = (prepared.after(written).await?, self.home(key));
        prepared.blocking(move |prepared| exchange(prepared, &live)).await?.whole();
        Ok(())
    }

    /// Step 3, if the volume is at it. Can be repeated.
    pub(super) async fn settle(&self, key: &Key, record: Record) -> Result<Record, Failure> {
        let Some(returning) = record.returning else { return Ok(record) };
        let name = TrashName::new(key.clone(), returning.trash);
        let (from, to) = (self.trashed(&name).join(SNAPSHOTS), self.home(key).join(SNAPSHOTS));
        let mut snapshots = blocking(&to, names_in::<SnapshotName>).await?;
        snapshots.extend(blocking(&from, names_in::<SnapshotName>).await?);
        for snapshot in snapshots.into_iter().filter(|snapshot| snapshot.sequence() <= returning.to) {
            let snapshot = snapshot.to_string();
            self.medium.carry(&from.join(&snapshot), &to.join(&snapshot)).await?;
        }
        let record = Record { returning: None, ..record };
        self.write_record(key, record.clone()).await?;
        Ok(record)
    }

    /// A volume whose history is all in its place.
    pub(super) async fn require_settled(
        &self,
        operation: &'static str,
        key: &Key,
    ) -> Result<(Volume, Record), VolumeError> {
        let (volume, record) = self.require(operation, key).await?;
        let record = self.settle(key, record).await.map_err(|e| e.during(operation, key))?;
        Ok((volume, record))
    }

    /// What a killed run left of rollbacks. One that cannot be taken up is tried again when something is done to it.
    pub(super) async fn take_up_rollbacks(&self) -> Result<(), Failure> {
        for name in blocking(&self.root.join(TRASH), names_in::<TrashName>).await? {
            if let Err(failure) = self.take_up(&name).await {
                tracing::warn!(%name, ?failure, "a rollback that was cut cannot be completed yet");
            }
        }
        Ok(())
    }

    async fn take_up(&self, name: &TrashName) -> Result<(), Failure> {
        let place = self.trashed(name);
        if is_for_a_rollback(&place).await? {
            tracing::info!(%name, "removing what was made for a rollback that did not come to be");
            return self.halves.remove(What::Prepared, &place).await;
        }
        // A live volume that cannot be read says so to whoever needs it.
        if let Ok(Some((_, record))) = self.find("look at", name.key()).await
            && record.returning.is_some_and(|returning| returning.trash == name.sequence())
        {
            tracing::info!(key = %name.key(), "completing a rollback");
            self.settle(name.key(), record).await?;
        }
        Ok(())
    }
}

/// Takes what was made for a rollback that did not come to be out of the trash, and says where it is. What has changed places
/// meanwhile is trash like any other, and stays.
pub(super) async fn call_off(place: &Path) -> Result<PathBuf, Failure> {
    let name = place.file_name().unwrap_or_default().to_string_lossy();
    let half = place.with_file_name(format!("{HALF}{name}"));
    if is_for_a_rollback(place).await? {
        retire(place, &half).await?;
    }
    Ok(half)
}

/// Whether an entry of the trash is one that is to change places with a live volume. One without a record that can be read
/// is trash.
async fn is_for_a_rollback(place: &Path) -> Result<bool, Failure> {
    let record = blocking(&place.join(RECORD), |path| Ok(files::read::<Record>(path)));
    Ok(record.await?.ok().flatten().is_some_and(|record| record.returning.is_some()))
}

fn exchange(one: &Path, other: &Path) -> Result<(), Failure> {
    rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).map_err(|e| Failure::io(other, e))?;
    for directory in [one.parent(), other.parent()].into_iter().flatten() {
        files::sync_directory(directory).map_err(|e| Failure::io(directory, e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::volumes::contract::{clock, key};
    use crate::host::volumes::mounts::BtrfsMount;
    use crate::host::volumes::{BtrfsEngine, DirEngine, Snapshot, VolumeEngine, search_path};

    /// What a project has when it goes back: three snapshots, and the text in them.
    async fn project<M: Medium>(engine: &Tree<M>) -> [Snapshot; 3] {
        let volume = engine.create(&key(), &crate::host::Properties::new(), None).await.expect("created");
        let mut taken = Vec::new();
        for text in ["one", "two", "three"] {
            std::fs::write(volume.path.join("file"), text).expect("written");
            taken.push(engine.snapshot(&key()).await.expect("a snapshot"));
        }
        std::fs::write(volume.path.join("file"), "four").expect("written");
        taken.try_into().expect("three")
    }

    async fn text<M: Medium>(engine: &Tree<M>) -> String {
        let volume = engine.get(&key()).await.expect("looked").expect("there is a volume at each moment");
        std::fs::read_to_string(volume.path.join("file")).expect("read")
    }

    async fn history_of<M: Medium>(engine: &Tree<M>) -> Vec<Snapshot> {
        engine.snapshots(&key()).await.expect("listed")
    }

    async fn prepared<M: Medium>(engine: &Tree<M>, to: SnapshotName) -> (TrashName, Record) {
        let (_, record) = engine.require("roll back", &key()).await.expect("there");
        let name = engine.next_in_trash(&key()).await.expect("a name");
        engine.prepare(&key(), &name, to, &record).await.expect("prepared");
        (name, record)
    }

    async fn exchanged<M: Medium>(engine: &Tree<M>, to: SnapshotName) -> TrashName {
        let (name, record) = prepared(engine, to).await;
        let prepared = Half::new(&engine.halves, What::Prepared, engine.trashed(&name));
        engine.exchange(&key(), prepared, record).await.expect("exchanged");
        name
    }

    /// A crash at each point, and who opens the volumes afterwards goes on.
    async fn survives_crashes<M: Medium>(open: impl AsyncFn() -> Tree<M>) {
        let engine = open().await;
        let [first, second, third] = project(&engine).await;
        let (name, _) = prepared(&engine, second.name).await;
        assert!(engine.trash().await.expect("trash").is_empty(), "nobody discarded anything");
        let nothing = engine.restore(&name).await;
        assert!(matches!(nothing, Err(VolumeError::Missing { .. })), "{nothing:?}");
        drop(engine);
        let engine = open().await;
        assert!(!engine.trashed(&name).exists(), "it was for nothing");
        assert_eq!((text(&engine).await, history_of(&engine).await), ("four".into(), vec![first, second, third]));

        let name = exchanged(&engine, second.name).await;
        assert_eq!(text(&engine).await, "two");
        drop(engine);
        let engine = open().await;
        assert_eq!((text(&engine).await, history_of(&engine).await), ("two".into(), vec![first, second]));
        let trash = engine.trash().await.expect("trash");
        assert_eq!(trash.iter().map(|trashed| &trashed.name).collect::<Vec<_>>(), [&name]);

        // Cut in the middle of moving a snapshot: it is at its place, and a btrfs one can be written to.
        let again = exchanged(&engine, second.name).await;
        let (from, to) = (engine.trashed(&again).join(SNAPSHOTS), engine.home(&key()).join(SNAPSHOTS));
        let first_name = first.name.to_string();
        engine.medium.carry(&from.join(&first_name), &to.join(&first_name)).await.expect("carried");
        if engine.name() == "btrfs" {
            let path = to.join(&first_name);
            let args: [&std::ffi::OsStr; 6] =
                ["property".as_ref(), "set".as_ref(), "-ts".as_ref(), path.as_ref(), "ro".as_ref(), "false".as_ref()];
            crate::host::volumes::mounts::run("btrfs", &args);
        }
        drop(engine);
        let engine = open().await;
        assert_eq!(history_of(&engine).await, [first, second]);
        if engine.name() == "btrfs" {
            let path = engine.snapshot_path(&key(), first.name).await.expect("a path");
            std::fs::write(path.join("file"), "x").expect_err("read-only again");
        }

        engine.discard(&key()).await.expect("discarded");
        engine.restore(&name).await.expect("restored");
        assert_eq!((text(&engine).await, history_of(&engine).await), ("four".into(), vec![third]));
    }

    #[tokio::test]
    async fn a_rollback_of_dir_that_is_cut_loses_nothing() {
        let root = tempfile::tempdir().expect("a directory");
        survives_crashes(async || DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened")).await;
    }

    #[tokio::test]
    async fn a_rollback_of_btrfs_that_is_cut_loses_nothing() {
        let Some(mount) = BtrfsMount::new() else { return };
        survives_crashes(async || BtrfsEngine::at(&mount.path, &search_path(), clock()).await.expect("opened")).await;
    }

    /// Moving the snapshots failed, and nobody opened the volumes again.
    #[tokio::test]
    async fn whatever_is_done_after_an_exchange_completes_it_first() {
        let root = tempfile::tempdir().expect("a directory");
        let engine = DirEngine::at(root.path(), &search_path(), clock()).await.expect("opened");
        let [first, second, third] = project(&engine).await;
        let name = exchanged(&engine, second.name).await;
        engine.purge(&name).await.expect("purged");
        assert_eq!(history_of(&engine).await, [first, second], "they did not go with the trash");
        let fourth = engine.snapshot(&key()).await.expect("a snapshot");
        assert!(fourth.name > third.name);

        exchanged(&engine, second.name).await;
        let fifth = engine.snapshot(&key()).await.expect("a snapshot");
        assert_eq!(history_of(&engine).await, [first, second, fifth]);
        exchanged(&engine, second.name).await;
        engine.destroy_snapshot(&key(), first.name).await.expect("destroyed");
        assert_eq!(history_of(&engine).await, [second]);
        exchanged(&engine, second.name).await;
        let trashed = engine.discard(&key()).await.expect("discarded");
        engine.restore(&trashed).await.expect("restored");
        assert_eq!(history_of(&engine).await, [second]);

        // What it should have come from was removed by hand.
        let name = exchanged(&engine, second.name).await;
        std::fs::remove_dir_all(engine.trashed(&name)).expect("removed");
        engine.snapshot(&key()).await.expect("goes on");
    }
}
