//! Whether the OpenZFS here is one that a cache can be trusted to.

use super::super::VolumeError;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

/// The oldest that this was made for.
const FLOOR: Version = Version { major: 2, minor: 2, patch: 0 };
/// The first whose block cloning loses nothing.
const SOUND_CLONING: Version = Version { major: 2, minor: 2, patch: 3 };

/// What is said of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Installed {
    /// Of the programs.
    pub programs: Option<Version>,
    /// Of the kernel module.
    pub module: Option<Version>,
    /// `/sys/module/zfs/parameters/zfs_bclone_enabled`, which 2.2.0 does not have.
    pub block_cloning: Option<bool>,
}

impl Version {
    /// Of `zfs-2.3.9-1~deb13u1`, `zfs-kmod-2.2.2-0ubuntu9` or `2.3.9-1`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let text = text.strip_prefix("zfs-").unwrap_or(text);
        let text = text.strip_prefix("kmod-").unwrap_or(text);
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let mut numbers = text[..end].split('.').map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Self { major: next()?, minor: next()?, patch: next().unwrap_or_default() })
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Installed {
    /// `printed` by `zfs version`; the module's own word where that has none.
    pub(super) fn read(printed: &str, module: Option<&str>, block_cloning: Option<&str>) -> Self {
        let line = |prefix: &str| printed.lines().find(|line| line.starts_with(prefix)).and_then(Version::parse);
        let programs = printed.lines().find(|l| l.starts_with("zfs-") && !l.starts_with("zfs-kmod-"));
        Self {
            programs: programs.and_then(Version::parse),
            module: line("zfs-kmod-").or_else(|| module.and_then(Version::parse)),
            block_cloning: block_cloning.map(|value| value.trim() != "0"),
        }
    }

    /// The one that counts is the kernel's. A warning comes back for what works all the same.
    pub(super) fn check(&self) -> Result<Option<String>, VolumeError> {
        let refuse = |why: String, remedy: &str| {
            Err(VolumeError::Unusable { path: "OpenZFS".to_owned(), why, remedy: remedy.to_owned() })
        };
        let Some(version) = self.module else {
            let remedy = "load it (modprobe zfs), and install zfs-dkms or what your distribution has for this kernel";
            return refuse("the version of its kernel module cannot be told".to_owned(), remedy);
        };
        if version < FLOOR {
            return refuse(
                format!("it is {version}, and {FLOOR} is the oldest that Kiln works with"),
                "upgrade it, or choose the engine btrfs or dir",
            );
        }
        // 2.2.0 has no switch, and does it.
        if version < SOUND_CLONING && self.block_cloning != Some(false) {
            return refuse(
                format!("it is {version}, whose block cloning can lose data, and that is switched on"),
                "upgrade to 2.2.3 or later, or (from 2.2.1) switch it off: \
                 echo 0 > /sys/module/zfs/parameters/zfs_bclone_enabled, and in /etc/modprobe.d: options zfs zfs_bclone_enabled=0",
            );
        }
        Ok(self.programs.filter(|programs| (programs.major, programs.minor) != (version.major, version.minor)).map(
            |programs| format!("the programs of OpenZFS are {programs} and its kernel module is {version}: reboot, or upgrade the older"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(printed: &str, cloning: Option<&str>) -> Installed {
        Installed::read(printed, None, cloning)
    }

    #[test]
    fn versions_as_distributions_write_them() {
        let version = |major, minor, patch| Some(Version { major, minor, patch });
        let debian = installed("zfs-2.3.9-1~deb13u1\nzfs-kmod-2.3.9-1~deb13u1\n", Some("1\n"));
        assert_eq!((debian.programs, debian.module), (version(2, 3, 9), version(2, 3, 9)));
        assert_eq!(Version::parse("2.2.2-0ubuntu9.4"), version(2, 2, 2));
        assert_eq!(Version::parse("zfs-kmod-2.4.0-rc1"), version(2, 4, 0));
        assert_eq!(Version::parse("2.4"), version(2, 4, 0));
        for text in ["", "zfs-", "unknown", "2", "x.y"] {
            assert_eq!(Version::parse(text), None, "of {text:?}");
        }
        let unloaded = Installed::read("zfs-2.3.9-1", Some("2.3.4-1\n"), None);
        assert_eq!(unloaded.module, version(2, 3, 4));
    }

    #[test]
    fn too_old_or_with_the_cloning_that_loses_data_is_refused() {
        let said = |module: &str, cloning| {
            installed(&format!("zfs-2.2.0\nzfs-kmod-{module}"), cloning).check().map_err(|e| e.to_string())
        };
        assert!(said("2.1.11-1", None).expect_err("too old").contains("2.1.11, and 2.2.0 is the oldest"));
        assert!(said("2.2.0", None).expect_err("no switch").contains("2.2.3"));
        assert!(said("2.2.2", Some("1")).expect_err("on").contains("zfs_bclone_enabled"));
        assert_eq!(said("2.2.2", Some("0")), Ok(None));
        assert_eq!(said("2.2.3", Some("1")), Ok(None));
        assert!(said("", None).expect_err("not loaded").contains("modprobe zfs"));
    }

    #[test]
    fn programs_and_a_module_that_differ_are_told_of() {
        let warning = installed("zfs-2.4.0-1\nzfs-kmod-2.3.9-1", Some("1")).check().expect("works");
        assert!(warning.expect("told").contains("2.4.0 and its kernel module is 2.3.9"));
        assert_eq!(installed("zfs-2.3.9-1\nzfs-kmod-2.3.4-1", Some("1")).check().expect("works"), None);
    }
}
