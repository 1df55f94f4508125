//! What a person sees while a daemon gets ready.

use std::future::Future;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use kiln_domain::Key;
use tokio::sync::watch;
use tokio::time::sleep;

use super::client::Client;
use super::polling::in_words;
use super::print::plain;
use kiln_wire::{ProjectView, RouteStatus};

/// A warm route is over before anybody could read a word.
const UNSEEN: Duration = Duration::from_millis(400);
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Awaits `work` with a spinner that names the project's phase, where stderr is a terminal.
pub(super) async fn with_spinner<T>(client: &Client, key: watch::Receiver<Key>, work: impl Future<Output = T>) -> T {
    if !io::stderr().is_terminal() {
        return work.await;
    }
    let watcher = tokio::spawn(follow(client.clone(), key));
    let done = work.await;
    watcher.abort();
    // The spinner is taken away when its task is dropped, which must be before anything else is printed.
    let _ = watcher.await;
    done
}

async fn follow(client: Client, keys: watch::Receiver<Key>) {
    sleep(UNSEEN).await;
    let spinner = Spinner::start(&keys.borrow());
    loop {
        let key = keys.borrow().clone();
        if let Ok(view) = client.project(&key).await {
            spinner.0.set_message(format!("{key} is {}", plain(&in_words(&status_of(view)))));
        }
        sleep(LOOK_EVERY).await;
    }
}

fn status_of(view: ProjectView) -> RouteStatus {
    RouteStatus {
        phase: view.phase,
        reason: view.reason.replace('\n', " "),
        queue_position: view.queue.map(|place| place.position),
        queue_length: view.queue.map(|place| place.length),
    }
}

struct Spinner(ProgressBar);

impl Spinner {
    fn start(key: &Key) -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(format!("waiting for {key}"));
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
