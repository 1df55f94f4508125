//! Which Debian this machine runs and where it gets its packages: asked of apt, which reads both formats of its sources.

use std::time::Duration;

use tokio::process::Command;

use super::{ImageError, run};

const APT: Duration = Duration::from_mins(1);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) mirror: String,
    pub(super) suite: String,
}

pub(super) async fn find() -> Result<Source, ImageError> {
    let release = tokio::fs::read_to_string("/etc/os-release").await.unwrap_or_default();
    let Some(suite) = codename(&release) else {
        return Err(ImageError::Sources("/etc/os-release names no release; build the image on Debian".to_owned()));
    };
    let mut apt = Command::new("apt-get");
    apt.args(["indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)", "Created-By: Packages"]);
    let listing = run(apt, APT).await?;
    let mirror = mirror(&listing, &suite);
    mirror.map(|mirror| Source { mirror, suite: suite.clone() }).ok_or_else(|| {
        ImageError::Sources(format!(
            "none offers {suite} main; run `apt-get update`, or add one to /etc/apt/sources.list"
        ))
    })
}

fn codename(os_release: &str) -> Option<String> {
    let name = os_release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="))?.trim_matches('"');
    (!name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')).then(|| name.to_owned())
}

/// The first that Debian signs and debootstrap can read.
fn mirror(listing: &str, suite: &str) -> Option<String> {
    listing.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let mirror = fields.next()?;
        let rest: Vec<&str> = fields.collect();
        let usable = ["http://", "https://", "file:"].iter().any(|scheme| mirror.starts_with(scheme));
        (usable && rest == [suite, "main", "Debian"]).then(|| mirror.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_s_own_main_is_taken() {
        let listing = "https://other.example/apt stable main Other\n\
                       cdrom://disc/ bookworm main Debian\n\
                       http://mirror.example/debian-security/ bookworm-security main Debian\n\
                       http://mirror.example/debian/ bookworm contrib Debian\n\
                       http://mirror.example/debian/ bookworm main Debian\n\
                       http://second.example/debian/ bookworm main Debian\n";
        assert_eq!(mirror(listing, "bookworm").as_deref(), Some("http://mirror.example/debian/"));
        assert_eq!(mirror(listing, "trixie"), None);
        assert_eq!(mirror("", "bookworm"), None);
    }

    #[test]
    fn the_codename_is_one_word() {
        assert_eq!(codename("ID=debian\nVERSION_CODENAME=trixie\n").as_deref(), Some("trixie"));
        assert_eq!(codename("VERSION_CODENAME=\"bookworm\"\n").as_deref(), Some("bookworm"));
        assert_eq!(codename("VERSION_CODENAME=a b\n"), None);
        assert_eq!(codename("ID=debian\n"), None);
    }
}
