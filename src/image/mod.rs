//! Makes the container image: a small Debian, buildkitd, and kiln-init as pid 1.
//!
//! ```text
//! the machine's package sources ─→ base root (debootstrap; kept by the hash of its recipe), or one that is given ─┐
//! buildkitd, kiln-init (our packaging) ──────────────────────────────────────────────────────┴→ image ─→ Incus, alias
//! ```
//!
//! * Suite and mirror are the machine's own, as apt understands its sources; none is written here.
//! * Idempotent: the same parts make an image that is recognised, and only the alias is set. The image that had the alias
//!   before is removed; instances made from it are not affected.
//! * Needs root (debootstrap), `debootstrap` and `tar`.
//!
//! What must not be here: instances; how BuildKit is built.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use sha2::{Digest, Sha256};
use thiserror::Error;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::host::incus::IncusConfig;

mod base;
mod import;
mod sources;

/// A mirror that is slow, not one that hangs.
const DEBOOTSTRAP: Duration = Duration::from_mins(30);
/// Copying and packing a few hundred megabytes.
const PACK: Duration = Duration::from_mins(5);

#[derive(Debug, Clone)]
pub struct ImageRequest {
    /// The static program for `/sbin/init`.
    pub init: PathBuf,
    pub buildkitd: PathBuf,
    /// Where the base root is kept between builds: hundreds of megabytes.
    pub cache: PathBuf,
    /// Make the base root anew, for the packages' updates.
    pub refresh: bool,
    /// Begin with this base root instead.
    pub base: Option<PathBuf>,
    /// Which Incus, which project, which alias.
    pub incus: IncusConfig,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// SHA-256 of the image's bytes; its name in Incus.
    pub fingerprint: String,
    pub bytes: u64,
    /// Whether Incus had it already.
    pub known: bool,
}

#[derive(Debug, Error)]
pub enum ImageError {
    #[error("{what} {path} cannot be used: {why}")]
    Part { what: &'static str, path: String, why: String },
    #[error("cannot {operation} {path}")]
    Io {
        operation: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot run {program}: install it")]
    Program {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("{program} failed ({status}); its last lines:\n{said}")]
    Failed { program: String, status: String, said: String },
    #[error("{program} was not done after {} s", .after.as_secs())]
    TimedOut { program: String, after: Duration },
    #[error("no Debian mirror among this machine's package sources: {0}")]
    Sources(String),
    #[error("cannot put the image into Incus: {0}")]
    Incus(String),
}

/// Builds and imports. `say` gets a line at each step.
pub async fn build(request: &ImageRequest, mut say: impl FnMut(&str) + Send) -> Result<Image, ImageError> {
    check_program("kiln-init", &request.init).await?;
    check_program("buildkitd", &request.buildkitd).await?;
    tokio::fs::create_dir_all(&request.cache).await.map_err(io_error("make", &request.cache))?;
    let base = match &request.base {
        Some(base) => {
            base::check(base).await?;
            base.clone()
        }
        None => base::provide(&request.cache, request.refresh, &mut say).await?,
    };
    let work = tempfile::tempdir_in(&request.cache).map_err(io_error("make a directory in", &request.cache))?;
    say("adding buildkitd and kiln-init");
    let image = assemble(request, &base, work.path()).await?;
    let fingerprint = sha256(&image).await?;
    import::import(&request.incus, &image, &fingerprint, &mut say).await
}

/// The base root, and on top of it our two programs and the metadata that Incus asks for.
async fn assemble(request: &ImageRequest, base: &Path, work: &Path) -> Result<PathBuf, ImageError> {
    let image = work.join("image.tar");
    tokio::fs::copy(base, &image).await.map_err(io_error("copy", base))?;
    let staging = work.join("staging");
    let metadata = metadata(std::env::consts::ARCH, age(base).await?);
    let metadata_path = staging.join("metadata.yaml");
    for (source, target) in
        [(&request.init, "rootfs/usr/sbin/init"), (&request.buildkitd, "rootfs/usr/local/bin/buildkitd")]
    {
        let target = staging.join(target);
        let parent = target.parent().unwrap_or(&staging);
        tokio::fs::create_dir_all(parent).await.map_err(io_error("make", parent))?;
        tokio::fs::copy(source, &target).await.map_err(io_error("copy", source))?;
    }
    tokio::fs::write(&metadata_path, metadata).await.map_err(io_error("write", &metadata_path))?;
    let mut tar = Command::new("tar");
    // The same parts make the same bytes, whoever builds them: no times, no names, no process ids.
    tar.args(["--append", "--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX", "--mtime=@0"]);
    tar.arg("--pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime");
    tar.arg("--file").arg(&image).arg("--directory").arg(&staging);
    tar.args(["metadata.yaml", "rootfs/usr/sbin/init", "rootfs/usr/local/bin/buildkitd"]);
    run(tar, PACK).await?;
    Ok(image)
}

/// Only what Incus requires. The date is the base root's: a part of the image, so that equal parts make equal images.
fn metadata(architecture: &str, created: u64) -> String {
    format!(
        "architecture: {architecture}\ncreation_date: {created}\nproperties:\n  description: Kiln's build daemon\n  \
         kiln: image\n"
    )
}

/// When a file was written, in seconds since 1970; never 0, which Incus takes for missing.
async fn age(path: &Path) -> Result<u64, ImageError> {
    let written = tokio::fs::metadata(path).await.and_then(|meta| meta.modified()).map_err(io_error("read", path))?;
    Ok(written.duration_since(std::time::UNIX_EPOCH).map_or(1, |since| since.as_secs().max(1)))
}

/// A dynamic program would not find its libraries in the image, and that is only seen when a daemon fails to start.
async fn check_program(what: &'static str, path: &Path) -> Result<(), ImageError> {
    let part = |why: &str| ImageError::Part { what, path: path.display().to_string(), why: why.to_owned() };
    let bytes = tokio::fs::read(path).await.map_err(|error| part(&error.to_string()))?;
    if !bytes.starts_with(b"\x7fELF") {
        return Err(part("it is not a program for Linux"));
    }
    if is_dynamic(&bytes) {
        return Err(part("it is linked dynamically; build it static"));
    }
    Ok(())
}

/// Whether a 64-bit ELF names an interpreter: a program header (elf(5)) of the type `PT_INTERP`.
fn is_dynamic(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let half = |at: usize| elf.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_le_bytes);
    let start = elf.get(32..40).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    let (size, count) = (half(54), half(56));
    (0..u64::from(count)).any(|index| {
        let at = start.saturating_add(index * u64::from(size));
        let kind = usize::try_from(at).ok().and_then(|at| elf.get(at..at.checked_add(4)?)?.try_into().ok());
        kind.map(u32::from_le_bytes) == Some(PT_INTERP)
    })
}

async fn sha256(path: &Path) -> Result<String, ImageError> {
    let mut file = tokio::fs::File::open(path).await.map_err(io_error("open", path))?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut chunk).await.map_err(io_error("read", path))?;
        if length == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&chunk[..length]);
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Runs a program to its end and returns what it printed; its last lines are in the error.
async fn run(mut command: Command, patience: Duration) -> Result<String, ImageError> {
    const LINES: usize = 15;
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive").kill_on_drop(true);
    let output = tokio::time::timeout(patience, command.output())
        .await
        .map_err(|_| ImageError::TimedOut { program: program.clone(), after: patience })?
        .map_err(|source| ImageError::Program { program: program.clone(), source })?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = printed.lines().chain(complaint.lines()).collect();
    let said = lines[lines.len().saturating_sub(LINES)..].join("\n");
    Err(ImageError::Failed { program, status: output.status.to_string(), said })
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImageError + use<> {
    let path = path.display().to_string();
    move |source| ImageError::Io { operation, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn parts_that_would_not_run_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let script = directory.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").expect("written");
        let error = check_program("kiln-init", &script).await.expect_err("a script");
        assert!(error.to_string().contains("not a program"), "{error}");
        let error = check_program("buildkitd", Path::new("/nonexistent")).await.expect_err("nothing");
        assert!(error.to_string().contains("/nonexistent"), "{error}");
        // This very test is linked dynamically.
        let own = std::env::current_exe().expect("a path");
        let error = check_program("buildkitd", &own).await.expect_err("a dynamic one");
        assert!(error.to_string().contains("static"), "{error}");
    }

    #[tokio::test]
    async fn a_failing_program_is_quoted() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; exit 3"]);
        let error = run(command, PACK).await.expect_err("it fails").to_string();
        assert!(error.contains("exit status: 3") && error.ends_with("one\ntwo"), "{error}");
    }

    #[test]
    fn a_cut_program_is_not_read_beyond_its_end() {
        let mut elf = vec![0; 64];
        elf[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        elf[54..56].copy_from_slice(&u16::MAX.to_le_bytes());
        elf[56..58].copy_from_slice(&u16::MAX.to_le_bytes());
        assert!(!is_dynamic(&elf));
        assert!(!is_dynamic(&[]));
    }
}
