//! Puts an image file into Incus and points the alias at it.

use std::path::Path;
use std::time::Duration;

use reqwest::Method;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Image, ImageError, io_error};
use crate::host::incus::IncusConfig;
use crate::host::incus::client::{ApiError, Client};
use crate::host::incus::ready;

/// Writing some hundred megabytes to Incus's disk.
const UPLOAD: Duration = Duration::from_mins(5);
const DELETE: Duration = Duration::from_mins(1);

#[derive(Deserialize)]
struct Alias {
    target: String,
}

pub(super) async fn import(
    incus: &IncusConfig,
    file: &Path,
    fingerprint: &str,
    say: &mut impl FnMut(&str),
) -> Result<Image, ImageError> {
    let client = ready(incus).await.map_err(|error| ImageError::Incus(error.to_string()))?;
    let bytes = tokio::fs::metadata(file).await.map_err(io_error("read", file))?.len();
    let known = exists(&client, &format!("/1.0/images/{fingerprint}")).await?;
    if known {
        say("Incus has this very image already");
    } else {
        say(&format!("giving it to Incus ({} MB)", bytes / 1_000_000));
        upload(&client, file).await?;
    }
    let replaced = point(&client, &incus.image, fingerprint).await?;
    if let Some(old) = replaced.filter(|old| old != fingerprint) {
        say("removing the image that it replaces");
        let path = format!("/1.0/images/{old}");
        match client.operate(Method::DELETE, &path, None, DELETE).await {
            Ok(_) | Err(ApiError::NotFound(_)) => {}
            Err(error) => return Err(failed(&error)),
        }
    }
    Ok(Image { fingerprint: fingerprint.to_owned(), bytes, known })
}

async fn upload(client: &Client, file: &Path) -> Result<(), ImageError> {
    let opened = tokio::fs::File::open(file).await.map_err(io_error("open", file))?;
    let body = reqwest::Body::wrap_stream(tokio_util::io::ReaderStream::with_capacity(opened, 1 << 18));
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert("X-Incus-filename", HeaderValue::from_static("kiln.tar"));
    client.upload("/1.0/images", headers, body, UPLOAD).await.map(drop).map_err(|e| failed(&e))
}

/// Makes or moves the alias; the image that it named before.
async fn point(client: &Client, alias: &str, fingerprint: &str) -> Result<Option<String>, ImageError> {
    let path = format!("/1.0/images/aliases/{alias}");
    match client.get::<Alias>(&path).await {
        Ok(found) => {
            let body = json!({"target": fingerprint, "description": "Kiln's build daemon"});
            client.change(Method::PUT, &path, Some(&body)).await.map_err(|e| failed(&e))?;
            Ok(Some(found.target))
        }
        Err(ApiError::NotFound(_)) => {
            let body = json!({"name": alias, "target": fingerprint, "description": "Kiln's build daemon"});
            client.change(Method::POST, "/1.0/images/aliases", Some(&body)).await.map_err(|e| failed(&e))?;
            Ok(None)
        }
        Err(error) => Err(failed(&error)),
    }
}

async fn exists(client: &Client, path: &str) -> Result<bool, ImageError> {
    match client.get::<Value>(path).await {
        Ok(_) => Ok(true),
        Err(ApiError::NotFound(_)) => Ok(false),
        Err(error) => Err(failed(&error)),
    }
}

fn failed(error: &ApiError) -> ImageError {
    ImageError::Incus(error.to_string())
}
