//! How hard memory is to come by on this host, and processors and memory in one control group: the kernel's own count of stalls,
//! and what it says is left.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

/// Where the kernel says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PressureFiles {
    pub pressure: PathBuf,
    pub meminfo: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPressure {
    /// `None` where the kernel does not count them (no PSI, or `psi=0`).
    pub stalls: Option<MemoryStalls>,
    /// Bytes that can be had without swapping, as the kernel estimates it.
    pub memory_available: u64,
    pub memory_total: u64,
}

/// How much of the last 10 s was lost in waiting for memory, in hundredths of a percent: 10 000 is all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct MemoryStalls {
    /// At least one task waited.
    pub some: u32,
    /// All tasks that could have run waited.
    pub full: u32,
}

#[derive(Debug, Error)]
pub enum PressureError {
    #[error("cannot read {path}")]
    Io {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("{path} does not say {what}; it is not what Linux has there")]
    Garbled { path: String, what: &'static str },
}

impl Default for PressureFiles {
    fn default() -> Self {
        Self { pressure: "/proc/pressure/memory".into(), meminfo: "/proc/meminfo".into() }
    }
}

/// `some avg10` of a control group, of its processors or of its memory, whichever is more, in percent. `None` where the kernel
/// does not count it, or there is no such group. Microseconds.
pub fn of_cgroup(group: &Path) -> Option<f64> {
    let of = |file: &str| stalls(&std::fs::read(group.join(file)).ok()?).map(|stalls| stalls.some);
    let most = of("cpu.pressure").max(of("memory.pressure"))?;
    Some(f64::from(most) / 100.0)
}

impl PressureFiles {
    /// Two small files that the kernel makes up as they are read: microseconds.
    pub fn read(&self) -> Result<HostPressure, PressureError> {
        let stalls = match std::fs::read(&self.pressure) {
            Ok(bytes) => Some(stalls(&bytes).ok_or_else(|| garbled(&self.pressure, "how long was waited for memory"))?),
            Err(error) if is_not_counted(&error) => None,
            Err(source) => return Err(unreadable(&self.pressure, source)),
        };
        let meminfo = std::fs::read(&self.meminfo).map_err(|source| unreadable(&self.meminfo, source))?;
        let bytes = |name, what| field(&meminfo, name).ok_or_else(|| garbled(&self.meminfo, what));
        let memory_total = bytes("MemTotal:", "how much memory there is")?;
        let memory_available = bytes("MemAvailable:", "how much memory is available")?;
        Ok(HostPressure { stalls, memory_available: memory_available.min(memory_total), memory_total })
    }
}

/// There is no such file without PSI; where it was switched off at boot, some kernels have it and refuse it.
fn is_not_counted(error: &io::Error) -> bool {
    let refused = error.raw_os_error().map(Errno::from_raw_os_error) == Some(Errno::OPNOTSUPP);
    refused || error.kind() == io::ErrorKind::NotFound
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and below it the same for `full`.
fn stalls(bytes: &[u8]) -> Option<MemoryStalls> {
    let text = std::str::from_utf8(bytes).ok()?;
    let of = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
        hundredths(line.split_ascii_whitespace().find_map(|pair| pair.strip_prefix("avg10="))?)
    };
    Some(MemoryStalls { some: of("some")?, full: of("full")? })
}

/// The kernel writes percents with two decimals.
fn hundredths(percent: &str) -> Option<u32> {
    let (whole, decimals) = percent.split_once('.')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(decimals) || decimals.len() != 2 {
        return None;
    }
    let value = whole.parse::<u32>().ok()?.checked_mul(100)?.checked_add(decimals.parse().ok()?)?;
    (value <= 10_000).then_some(value)
}

/// `MemTotal:       24684092 kB`, in bytes.
fn field(meminfo: &[u8], name: &str) -> Option<u64> {
    let text = std::str::from_utf8(meminfo).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut words = line.split_ascii_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    (words.next() == Some("kB") && words.next().is_none()).then(|| number.checked_mul(1024)).flatten()
}

fn unreadable(path: &Path, source: io::Error) -> PressureError {
    PressureError::Io { path: path.display().to_string(), source }
}

fn garbled(path: &Path, what: &'static str) -> PressureError {
    PressureError::Garbled { path: path.display().to_string(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded on Linux 6.18: of a busy processor, which is written the same way and is not all zeros, and of the memory.
    const PRESSURE: &[u8] = b"some avg10=96.70 avg60=78.59 avg300=67.14 total=7426238445\n\
        full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
    const CALM: &[u8] = b"some avg10=0.00 avg60=0.00 avg300=0.00 total=14186902\n\
        full avg10=0.00 avg60=0.00 avg300=0.00 total=5562224\n";
    const MEMINFO: &[u8] = b"MemTotal:       24684092 kB\nMemFree:         3064000 kB\nMemAvailable:   21072676 kB\n\
        Buffers:          272704 kB\nCached:         17688428 kB\n";

    fn files(pressure: Option<&[u8]>, meminfo: Option<&[u8]>) -> (tempfile::TempDir, PressureFiles) {
        let directory = tempfile::tempdir().expect("a directory");
        let files = PressureFiles { pressure: directory.path().join("p"), meminfo: directory.path().join("m") };
        for (path, bytes) in [(&files.pressure, pressure), (&files.meminfo, meminfo)] {
            if let Some(bytes) = bytes {
                std::fs::write(path, bytes).expect("written");
            }
        }
        (directory, files)
    }

    #[test]
    fn what_the_kernel_wrote_is_read() {
        let (_directory, files) = files(Some(PRESSURE), Some(MEMINFO));
        let expected = HostPressure {
            stalls: Some(MemoryStalls { some: 9670, full: 0 }),
            memory_available: 21_072_676 << 10,
            memory_total: 24_684_092 << 10,
        };
        assert_eq!(files.read().expect("read"), expected);
        assert_eq!(stalls(CALM), Some(MemoryStalls::default()));
        assert_eq!(stalls(b"full avg10=2.05 x=1\nsome x=1 avg10=7.40\n"), Some(MemoryStalls { some: 740, full: 205 }));
    }

    #[test]
    fn a_kernel_that_does_not_count_stalls_says_what_is_left() {
        let (_directory, files) = files(None, Some(MEMINFO));
        let read = files.read().expect("read");
        assert_eq!((read.stalls, read.memory_total), (None, 24_684_092 << 10));
    }

    #[test]
    fn of_a_group_what_it_lacks_most_counts() {
        let directory = tempfile::tempdir().expect("a directory");
        assert_eq!(of_cgroup(directory.path()), None, "there is none");
        std::fs::write(directory.path().join("memory.pressure"), CALM).expect("written");
        assert_eq!(of_cgroup(directory.path()), Some(0.0));
        std::fs::write(directory.path().join("cpu.pressure"), PRESSURE).expect("written");
        assert_eq!(of_cgroup(directory.path()), Some(96.7));
        std::fs::write(directory.path().join("memory.pressure"), b"garbage").expect("written");
        assert_eq!(of_cgroup(directory.path()), Some(96.7), "one of them is enough");
    }

    #[test]
    fn all_of_the_time_is_the_most() {
        assert_eq!(hundredths("100.00"), Some(10_000));
        assert_eq!(hundredths("0.07"), Some(7));
        for odd in ["", "1", "1.", ".10", "1.5", "1.234", "-1.00", "+1.00", "100.01", "99999999999.00", "1.0x", "nan"] {
            assert_eq!(hundredths(odd), None, "of {odd:?}");
        }
    }

    #[test]
    fn garbage_is_an_error_and_not_calm() {
        for pressure in [
            &b""[..],
            b"some",
            b"some avg10=1.00 total=1\n",
            b"full avg10=1.00 total=1\n",
            b"some avg60=1.00\nfull avg10=1.00\n",
            b"some avg10=x\nfull avg10=1.00\n",
            b"something avg10=1.00\nfull avg10=1.00\n",
            b"\xff\xfe\0",
        ] {
            let (_directory, files) = files(Some(pressure), Some(MEMINFO));
            let error = files.read().expect_err("garbage");
            assert!(matches!(error, PressureError::Garbled { .. }), "of {pressure:?}: {error:?}");
        }
        for meminfo in [
            &b""[..],
            b"MemTotal: 5 kB\n",
            b"MemAvailable: 5 kB\n",
            b"MemTotal: 5\nMemAvailable: 5 kB\n",
            b"MemTotal: -5 kB\nMemAvailable: 5 kB\n",
            b"MemTotal: 18446744073709551615 kB\nMemAvailable: 5 kB\n",
            b"MemTotal: 5 kB or so\nMemAvailable: 5 kB\n",
            b"\xff\xfe\0",
        ] {
            let (_directory, files) = files(Some(PRESSURE), Some(meminfo));
            let error = files.read().expect_err("garbage");
            assert!(matches!(error, PressureError::Garbled { .. }), "of {meminfo:?}: {error:?}");
        }
        let (_directory, files) = files(Some(PRESSURE), None);
        assert!(matches!(files.read(), Err(PressureError::Io { .. })));
    }

    #[test]
    fn this_host_says_how_it_is() {
        let read = PressureFiles::default().read().expect("a Linux");
        assert!(read.memory_total > 0 && read.memory_available <= read.memory_total, "{read:?}");
    }
}
