//! The same verbs through `libzfs_core`: no process is started, and an error is a number.
//!
//! Of the crate libzetta only what calls `libzfs_core` is used. What it does with the `zfs` command loses names and errors
//! (clippy.toml forbids it), and clone and promote it does not have: those are called here.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::path::PathBuf;

use async_trait::async_trait;
use libzetta::libnv::nvpair::{NvList, Value as NvValue};
use libzetta::zfs::{DestroyTiming, Error as LzcError, ZfsEngine as _, ZfsLzc};
use libzetta_zfs_core_sys as sys;
use rustix::io::Errno;

use super::super::command::{Failure, QUICK};
use super::cli::Zfs;
use super::fault::{Fault, SUSPENDED};
use super::verbs::{Setting, Value, Verbs};

/// What comes after the errors of the system in those of ZFS (`ZFS_ERR_CHECKPOINT_EXISTS` and on).
const FIRST_OF_ZFS: i32 = 1024;
/// `ZFS_MAX_DATASET_NAME_LEN`.
const NAME: usize = 256;

pub(super) struct Lzc {
    lzc: ZfsLzc,
    /// Knows how the pool is.
    zfs: Zfs,
}

impl Lzc {
    /// Fails where there is no `/dev/zfs` to be opened.
    pub(super) fn new(zfs: &Zfs) -> Result<Self, String> {
        Ok(Self { lzc: ZfsLzc::new().map_err(|e| e.to_string())?, zfs: zfs.clone() })
    }

    /// Calls block, some until a transaction is on the disks.
    async fn call<F>(&self, verb: &'static str, name: &str, call: F) -> Result<(), Fault>
    where
        F: FnOnce(&ZfsLzc) -> Result<(), Problem> + Send + 'static,
    {
        #[cfg(test)]
        self.zfs.burn()?;
        self.zfs.check_pool()?;
        let lzc = self.lzc.clone();
        let command = || format!("{verb} {name}");
        let done = tokio::time::timeout(QUICK, tokio::task::spawn_blocking(move || call(&lzc))).await;
        match done {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(problem))) => Err(problem.fault(command)),
            Ok(Err(panic)) => Err(Fault::Failed(Failure::Command { command: command(), said: panic.to_string() })),
            Err(_) => {
                let late = Failure::TimedOut { waited_for: command(), after: QUICK };
                self.zfs.check_pool().and(Err(late.into()))
            }
        }
    }
}

/// An error of `libzfs_core`, before it is known what it was about.
enum Problem {
    Number(i32),
    Text(String),
}

impl Problem {
    fn fault(self, command: impl FnOnce() -> String) -> Fault {
        let number = match self {
            Self::Number(number) => number,
            Self::Text(said) => return Fault::Failed(Failure::Command { command: command(), said }),
        };
        match Errno::from_raw_os_error(number.min(FIRST_OF_ZFS)) {
            Errno::NOENT => Fault::Absent,
            Errno::EXIST => Fault::Exists,
            Errno::BUSY => Fault::Busy("dataset is busy".to_owned()),
            Errno::NOSPC | Errno::DQUOT => Fault::Full,
            Errno::AGAIN => Fault::unusable("its pool is suspended", SUSPENDED),
            Errno::PERM | Errno::ACCESS => Fault::unusable("permission was denied", "run kilnd as root"),
            Errno::ROFS => {
                Fault::unusable("its pool is imported read-only", "import it anew: zpool export, then zpool import")
            }
            _ => {
                let said = match number {
                    FIRST_OF_ZFS.. => format!("error {number} of ZFS"),
                    _ => std::io::Error::from_raw_os_error(number).to_string(),
                };
                Fault::Failed(Failure::Command { command: command(), said })
            }
        }
    }
}

impl From<LzcError> for Problem {
    fn from(error: LzcError) -> Self {
        match error {
            LzcError::Io(error) => error.raw_os_error().map_or_else(|| Self::Text(error.to_string()), Self::Number),
            // By name; one will do.
            LzcError::MultiOpError(errors) => match errors.values().next() {
                Some(NvValue::Int32(number)) => Self::Number(*number),
                other => Self::Text(format!("{other:?}")),
            },
            other => Self::Text(format!("{other:?}")),
        }
    }
}

fn number(code: i32) -> Result<(), Problem> {
    if code == 0 { Ok(()) } else { Err(Problem::Number(code)) }
}

fn text(text: &str) -> Result<CString, Problem> {
    CString::new(text).map_err(|_| Problem::Number(Errno::INVAL.raw_os_error()))
}

/// As the kernel takes them: numbers for its own properties, strings for the mountpoint and those of users.
fn list(settings: &[Setting]) -> Result<NvList, Problem> {
    let mut list = NvList::default();
    for Setting { name, value } in settings {
        let added = match value {
            Value::Text(value) => list.insert_string(*name, text(value)?.as_c_str()),
            Value::Number(value) | Value::Word(_, value) => list.insert_u64(*name, *value),
        };
        added.map_err(|e| Problem::Text(e.to_string()))?;
    }
    Ok(list)
}

#[async_trait]
impl Verbs for Lzc {
    fn name(&self) -> &'static str {
        "libzfs_core"
    }

    async fn snapshot(&self, snapshot: &str, settings: &[Setting]) -> Result<(), Fault> {
        let (names, mut properties) = (vec![PathBuf::from(snapshot)], HashMap::new());
        for setting in settings {
            if let Value::Text(value) = &setting.value {
                properties.insert(setting.name.to_owned(), value.clone());
            }
        }
        self.call("lzc_snapshot", snapshot, move |lzc| Ok(lzc.snapshot(&names, Some(properties))?)).await
    }

    async fn destroy_snapshots(&self, dataset: &str, names: &[String]) -> Result<(), Fault> {
        if names.is_empty() {
            return Ok(());
        }
        let names: Vec<PathBuf> = names.iter().map(|name| format!("{dataset}@{name}").into()).collect();
        let done = self
            .call("lzc_destroy_snaps", dataset, move |lzc| Ok(lzc.destroy_snapshots(&names, DestroyTiming::Defer)?));
        match done.await {
            Err(Fault::Absent) => Ok(()),
            done => done,
        }
    }

    async fn clone_snapshot(&self, snapshot: &str, target: &str, settings: &[Setting]) -> Result<(), Fault> {
        let (from, to, settings) = (snapshot.to_owned(), target.to_owned(), settings.to_vec());
        self.call("lzc_clone", target, move |_| {
            let (from, to, properties) = (text(&from)?, text(&to)?, list(&settings)?);
            // SAFETY: `Lzc::new` has initialised the library, and it stays so while a `ZfsLzc` lives. Both names are C strings and
            // the list is one of libnvpair's; all three outlive the call, which keeps none of them.
            number(unsafe { sys::lzc_clone(to.as_ptr(), from.as_ptr(), properties.as_ptr()) })
        })
        .await
    }

    async fn promote(&self, clone: &str) -> Result<(), Fault> {
        let name = clone.to_owned();
        self.call("lzc_promote", clone, move |_| {
            let name = text(&name)?;
            // The name of a snapshot that is in the way is written here.
            let mut conflict = [0 as c_char; NAME];
            // SAFETY: As above; and the buffer is as long as is said, to which the library keeps.
            number(unsafe { sys::lzc_promote(name.as_ptr(), conflict.as_mut_ptr(), NAME as i32) })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_the_same_errors_as_words() {
        let fault = |code| Problem::Number(code).fault(|| "lzc_x t".to_owned());
        assert!(matches!(fault(2), Fault::Absent));
        assert!(matches!(fault(17), Fault::Exists));
        assert!(matches!(fault(16), Fault::Busy(_)));
        assert!(matches!(fault(28), Fault::Full) && matches!(fault(122), Fault::Full));
        assert!(matches!(fault(11), Fault::Unusable { remedy, .. } if remedy.contains("zpool clear")));
        assert!(matches!(fault(1), Fault::Unusable { .. }) && matches!(fault(30), Fault::Unusable { .. }));
        let said = fault(1024).during("fork", "p1").to_string();
        assert!(said.contains("lzc_x t said: error 1024 of ZFS"), "{said}");
        assert!(fault(22).during("fork", "p1").to_string().contains("Invalid argument"));
    }

    #[test]
    fn settings_as_the_kernel_takes_them() {
        let settings =
            [Setting::word("canmount", "noauto", 2), Setting::number("refquota", 5), Setting::text("kiln:key", "p1")];
        let list = list(&settings).ok().expect("a list");
        let u64_of = |name: &str| list.get_u64(name).expect("there");
        assert_eq!((u64_of("canmount"), u64_of("refquota")), (2, 5));
        assert_eq!(list.get_string("kiln:key").expect("there"), "p1");
    }
}
