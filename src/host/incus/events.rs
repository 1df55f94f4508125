//! Lifecycle events over Incus's websocket: hints that something changed, sent on to whoever listens. Another image is a
//! change to every instance.
//!
//! The connection is made again for as long as the runtime lives. Each new one begins with [`InstanceEvent::Missed`],
//! since nobody knows what happened before it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kiln_domain::Key;
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio::sync::broadcast;
use tokio_tungstenite::tungstenite::Message;

use super::client::instance_of;
use super::image::Alias;
use crate::host::InstanceEvent;

/// First and longest pause before the next attempt; it doubles in between.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A handshake takes Incus a millisecond.
const HANDSHAKE: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    metadata: Lifecycle,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Lifecycle {
    action: String,
    source: String,
}

/// Never returns; to be aborted with the runtime.
pub(super) async fn follow(
    socket: PathBuf,
    project: String,
    image: Arc<Alias>,
    sender: broadcast::Sender<InstanceEvent>,
) {
    let mut pause = PAUSE;
    loop {
        let began = Instant::now();
        match listen(&socket, &project, &image, &sender).await {
            // One that is closed as soon as it stands is no better than none.
            Ok(()) if began.elapsed() < LONGEST_PAUSE => tracing::debug!("Incus closed its event stream at once"),
            Ok(()) => {
                tracing::info!("Incus closed its event stream; connecting again");
                pause = PAUSE;
            }
            Err(error) => tracing::debug!(%error, "no event stream from Incus"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// `Ok` when a connection that stood came to its end.
async fn listen(
    socket: &Path,
    project: &str,
    image: &Alias,
    sender: &broadcast::Sender<InstanceEvent>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let handshake = async {
        let stream = UnixStream::connect(socket).await?;
        let url = format!("ws://incus/1.0/events?type=lifecycle&project={project}");
        let (events, _) = tokio_tungstenite::client_async(url, stream).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(events)
    };
    let mut events = tokio::time::timeout(HANDSHAKE, handshake).await??;
    image.forget();
    // Nobody listening is no error.
    let _ = sender.send(InstanceEvent::Missed);
    while let Some(message) = events.next().await {
        let event = match message {
            Ok(Message::Text(text)) => understand(text.as_bytes()),
            Ok(Message::Binary(bytes)) => understand(&bytes),
            Ok(Message::Close(_)) | Err(_) => return Ok(()),
            Ok(_) => None,
        };
        let event = match event {
            Some(Heard::Instance(key)) => InstanceEvent::Changed(key),
            Some(Heard::Image) => {
                image.forget();
                InstanceEvent::Missed
            }
            None => continue,
        };
        let _ = sender.send(event);
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Heard {
    /// Something happened to the instance of this key.
    Instance(Key),
    /// An alias names another image, or none.
    Image,
}

/// Nothing for what changes neither whether an instance runs or exists, nor what it should be made from.
fn understand(message: &[u8]) -> Option<Heard> {
    const CHANGES: [&str; 8] =
        ["created", "deleted", "started", "stopped", "shutdown", "restarted", "paused", "resumed"];
    let event: Event = serde_json::from_slice(message).ok()?;
    if event.metadata.action.starts_with("image-alias-") {
        return Some(Heard::Image);
    }
    let change = event.metadata.action.strip_prefix("instance-")?;
    if !CHANGES.contains(&change) {
        return None;
    }
    let name = instance_of(&event.metadata.source)?;
    let key: Key = name.strip_prefix("buildkitd-")?.parse().ok()?;
    Some(Heard::Instance(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_of_our_instances_are_heard() {
        let of = |action: &str, source: &str| {
            let text = serde_json::json!({"type": "lifecycle", "metadata": {"action": action, "source": source}});
            understand(text.to_string().as_bytes())
        };
        let key: Key = "pbcce5b6205652dd7".parse().expect("a key");
        let ours = "/1.0/instances/buildkitd-pbcce5b6205652dd7?project=kiln";
        assert_eq!(of("instance-shutdown", ours), Some(Heard::Instance(key.clone())));
        assert_eq!(of("instance-started", ours), Some(Heard::Instance(key)));
        assert_eq!(of("instance-exec", ours), None);
        assert_eq!(of("image-created", "/1.0/images/x"), None);
        assert_eq!(of("image-alias-updated", "/1.0/images/aliases/kiln?project=kiln"), Some(Heard::Image));
        assert_eq!(of("instance-started", "/1.0/instances/web?project=kiln"), None);
        assert_eq!(understand(b"{\"metadata\": 7}"), None);
        assert_eq!(understand(b"not json"), None);
    }
}
