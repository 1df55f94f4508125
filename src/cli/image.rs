//! `kiln image build`.

use std::path::PathBuf;

use serde::Serialize;

use super::args::ImageBuildArgs;
use super::error::CliError;
use super::{print, variable};
use crate::host::incus::IncusConfig;
use crate::image::{self, Image, ImageRequest};
use crate::stdio;

#[derive(Serialize)]
struct Built<'a> {
    fingerprint: &'a str,
    alias: &'a str,
    bytes: u64,
    known: bool,
}

/// Progress goes to stderr, the result to stdout.
pub(super) async fn build(args: &ImageBuildArgs) -> Result<(), CliError> {
    // No instance is made here, so the pool is never looked at.
    let mut incus = IncusConfig::new(args.incus_socket.clone(), "default".to_owned());
    incus.project.clone_from(&args.incus_project);
    incus.image.clone_from(&args.alias);
    let request = ImageRequest {
        init: args.init.clone(),
        buildkitd: args.buildkitd.clone(),
        cache: args.cache.clone().map_or_else(default_cache, Ok)?,
        refresh: args.refresh,
        base: args.base.clone(),
        incus,
    };
    let Image { fingerprint, bytes, known } = image::build(&request, stdio::say).await?;
    let alias = args.alias.as_str();
    if args.json {
        return print::json(&Built { fingerprint: &fingerprint, alias, bytes, known });
    }
    print::fields(&[
        ("image", fingerprint),
        ("alias", alias.to_owned()),
        ("size", format!("{} MiB", bytes >> 20)),
        ("new", if known { "no, Incus had it already" } else { "yes" }.to_owned()),
    ])
}

/// Where the user's caches are, as the XDG base directory specification says.
fn default_cache() -> Result<PathBuf, CliError> {
    let home = || variable("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let caches = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).ok_or(CliError::NoHome)?;
    Ok(caches.join("kiln").join("image"))
}
