//! Volumes in use: made, found, described, measured.

use kiln_domain::Key;

use super::super::listing::{LIVE, TRASH};
use super::super::record::KEY_PROPERTY;
use super::super::{FoundVolume, Fullness, TrashName, Usage, Volume, VolumeError};
use super::cli::Below;
use super::dataset::{Birth, Found, INTENT, KEY, PROPERTIES, at_least, io, properties_setting, settings};
use super::engine::ZfsEngine;
use super::fault::Fault;
use super::rows::Facts;
use super::verbs::Setting;
use crate::host::Properties;
use crate::host::files::HALF;

const LISTED: [&str; 5] = ["type", "canmount", KEY, PROPERTIES, INTENT];

impl ZfsEngine {
    pub(super) async fn make(
        &self,
        key: &Key,
        properties: &Properties,
        size: Option<u64>,
    ) -> Result<Volume, VolumeError> {
        const OPERATION: &str = "create";
        let _locked = self.locks.lock(key).await;
        if let Some(found) = self.find(OPERATION, key).await? {
            return self.ready(OPERATION, &found).await;
        }
        let birth = Birth { key, properties, size, origin: None, last_snapshot: 0 };
        let settings = settings(&self.base, &birth).map_err(|e| io(OPERATION, &self.base, e))?;
        match self.zfs.create(&self.root.live(key), &settings).await {
            // Somebody else's, then: ours are made with the lock held.
            Ok(()) | Err(Fault::Exists) => {}
            Err(fault) => return Err(fault.during(OPERATION, key)),
        }
        let found = self.require(OPERATION, key).await?;
        self.ready(OPERATION, &found).await
    }

    pub(super) async fn lookup(&self, key: &Key) -> Result<Option<Volume>, VolumeError> {
        const OPERATION: &str = "look at";
        if let Some(facts) = self.look(OPERATION, key).await?.live
            && let Ok(found) = Found::read(key, facts)
            && self.is_ready(&found)
        {
            return Ok(Some(found.volume(&self.base)));
        }
        let _locked = self.locks.lock(key).await;
        match self.find(OPERATION, key).await? {
            None => Ok(None),
            Some(found) => self.ready(OPERATION, &found).await.map(Some),
        }
    }

    /// Mounts nothing: of thousands, those are mounted that are used.
    pub(super) async fn volumes(&self) -> Result<Vec<Volume>, VolumeError> {
        const OPERATION: &str = "list";
        let rows = self.zfs.list(&LISTED, Below::Datasets(&self.root.room(LIVE), 1)).await;
        let (mut volumes, mut halves) = (Vec::new(), Vec::new());
        for (dataset, facts) in rows.map_err(|e| e.during(OPERATION, "all"))? {
            let name = dataset.rsplit('/').next().unwrap_or_default();
            if let Some(Ok(key)) = name.strip_prefix(HALF).map(str::parse::<Key>) {
                halves.push(key);
            } else if let Ok(key) = name.parse::<Key>() {
                match Found::read(&key, facts) {
                    Ok(found) => volumes.push(found.volume(&self.base)),
                    Err(found) => tracing::warn!(%dataset, %found, "not a volume of ours"),
                }
            }
        }
        // In the middle of a rollback a name is nobody's for a moment.
        for key in halves {
            if !volumes.iter().any(|volume| volume.key == key) {
                let _locked = self.locks.lock(&key).await;
                volumes.extend(self.find(OPERATION, &key).await?.map(|found| found.volume(&self.base)));
            }
        }
        volumes.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(volumes)
    }

    pub(super) async fn everything(&self) -> Result<Vec<FoundVolume>, VolumeError> {
        let rows = self.zfs.list(&LISTED, Below::Datasets(self.root.as_str(), 2)).await;
        let rows = rows.map_err(|e| e.during("list", "all"))?;
        let below = rows.into_iter().filter_map(|(name, facts)| Some((self.root.relative(&name)?.to_owned(), facts)));
        let mut found: Vec<FoundVolume> = below.filter_map(|(name, facts)| describe(name, facts)).collect();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Of the pool, which is shared with others, or of the root where that has a quota of its own: whichever is fuller.
    pub(super) async fn measure_all(&self) -> Result<Fullness, VolumeError> {
        const OPERATION: &str = "measure";
        let names = [self.root.pool(), self.root.as_str()];
        let rows = self.zfs.get(&["used", "available"], &names).await.map_err(|e| e.during(OPERATION, "all"))?;
        let measured = |facts: &Facts| Some((facts.number("used")?, facts.number("available")?));
        let (used, available) =
            fuller(rows.values().filter_map(measured)).ok_or_else(|| Fault::Absent.during(OPERATION, &self.root))?;
        Ok(Fullness { bytes_used: used, bytes_total: used.saturating_add(available), ..Fullness::default() })
    }

    pub(super) async fn describe(&self, key: &Key, properties: &Properties) -> Result<(), VolumeError> {
        const OPERATION: &str = "set properties of";
        let _locked = self.locks.lock(key).await;
        let mut found = self.require(OPERATION, key).await?;
        if let Some(other) = properties.get(KEY_PROPERTY).filter(|other| *other != key.as_str()) {
            return Err(VolumeError::Foreign { operation: OPERATION, key: key.clone(), found: format!("{other:?}") });
        }
        found.properties.extend(properties.clone());
        let setting = properties_setting(&found.properties).map_err(|e| io(OPERATION, &self.base, e))?;
        self.zfs.set(&self.root.live(key), &[setting]).await.map_err(|e| e.during(OPERATION, key))
    }

    pub(super) async fn measure(&self, key: &Key) -> Result<Usage, VolumeError> {
        const OPERATION: &str = "measure";
        let found = self.peek(OPERATION, key).await?;
        found.usage().ok_or_else(|| Fault::Absent.during(OPERATION, key))
    }

    pub(super) async fn grow(&self, key: &Key, size: Option<u64>) -> Result<(), VolumeError> {
        const OPERATION: &str = "resize";
        /// A daemon may write between our look and our change.
        const ATTEMPTS: usize = 3;
        let _locked = self.locks.lock(key).await;
        for attempt in 1.. {
            let found = self.require(OPERATION, key).await?;
            let holds = found.facts.number("referenced").unwrap_or_default();
            let setting = match size {
                None => Setting::text("refquota", "none"),
                Some(size) => Setting::number("refquota", size.max(at_least(holds))),
            };
            match self.zfs.set(&self.root.live(key), &[setting]).await {
                Err(Fault::TooSmall) if attempt < ATTEMPTS => {}
                done => return done.map_err(|e| e.during(OPERATION, key)),
            }
        }
        Ok(())
    }
}

/// `None` for what is a room of ours, in the trash, or not finished.
fn describe(name: String, facts: Facts) -> Option<FoundVolume> {
    let stranger = |name| Some(FoundVolume { name, key: None, properties: Properties::new() });
    let Some((room, entry)) = name.split_once('/') else {
        return if name == LIVE || name == TRASH { None } else { stranger(name) };
    };
    match room {
        LIVE if entry.starts_with(HALF) && facts.local(INTENT).is_some() => None,
        TRASH if facts.local(KEY).is_some() => {
            let ours = entry.strip_prefix(HALF).unwrap_or(entry).parse::<TrashName>().is_ok();
            if ours { None } else { stranger(name) }
        }
        LIVE => match entry.parse::<Key>().ok().and_then(|key| Found::read(&key, facts).ok()) {
            Some(found) => Some(FoundVolume { name, key: Some(found.key), properties: found.properties }),
            None => stranger(name),
        },
        // Of somebody else's dataset the name of that is enough.
        TRASH => stranger(name),
        _ => None,
    }
}

/// Of pairs of bytes used and to be had.
fn fuller(measured: impl Iterator<Item = (u64, u64)>) -> Option<(u64, u64)> {
    let share = |(used, available): &(u64, u64)| {
        let total = u128::from(*used) + u128::from(*available);
        u128::from(*used) * 1_000_000 / total.max(1)
    };
    measured.max_by_key(share)
}

#[cfg(test)]
mod tests {
    use super::super::rows::parse;
    use super::*;

    #[test]
    fn what_is_in_the_root() {
        let ours = format!(
            "x\ttype\tfilesystem\t-\nx\t{KEY}\tpbcce5b6205652dd7\tlocal\nx\t{PROPERTIES}\t{{\"key\":\"pbcce5b6205652dd7\"}}\tlocal\n"
        );
        let nobodys = "x\ttype\tfilesystem\t-\nx\tkiln:key\tpbcce5b6205652dd7\tinherited from t\n".to_owned();
        let half = format!("{ours}x\t{INTENT}\trollback\tlocal\n");
        let seen = |name: &str, printed: &str| {
            let facts = parse(printed).0.remove("x").expect("a row");
            describe(name.to_owned(), facts).map(|found| found.key.is_some())
        };
        assert_eq!(seen("live", &nobodys), None);
        assert_eq!(seen("by-hand", &nobodys), Some(false));
        assert_eq!(seen("live/pbcce5b6205652dd7", &ours), Some(true));
        assert_eq!(seen("live/pbcce5b6205652dd7", &nobodys), Some(false));
        assert_eq!(seen("live/odd", &ours), Some(false));
        assert_eq!(seen("live/.half-pbcce5b6205652dd7", &half), None);
        assert_eq!(seen("live/.half-pbcce5b6205652dd7", &nobodys), Some(false));
        assert_eq!(seen("trash/pbcce5b6205652dd7.000007", &ours), None);
        assert_eq!(seen("trash/.half-pbcce5b6205652dd7.000007", &ours), None);
        assert_eq!(seen("trash/pbcce5b6205652dd7.000007", &nobodys), Some(false));
        assert_eq!(seen("by-hand/more", &nobodys), None);
    }

    #[test]
    fn the_fuller_one_counts() {
        assert_eq!(fuller([(10, 90), (5, 5)].into_iter()), Some((5, 5)));
        assert_eq!(fuller([(95, 5), (5, 5)].into_iter()), Some((95, 5)));
        assert_eq!(fuller([(0, 0)].into_iter()), Some((0, 0)));
        assert_eq!(fuller(std::iter::empty()), None);
    }
}
