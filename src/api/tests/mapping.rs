//! Which of the projects' errors is which answer.

use axum::body::to_bytes;
use axum::response::{IntoResponse, Response};

use super::super::answers::{JsonError, PlainError};
use super::*;
use crate::projects;
use crate::store::StoreError;

async fn told(answer: Response) -> (u16, Option<String>, String) {
    let status = answer.status().as_u16();
    let pause = answer.headers().get("retry-after").map(|value| value.to_str().expect("text").to_owned());
    let body = to_bytes(answer.into_body(), 64 << 10).await.expect("a short body");
    (status, pause, String::from_utf8(body.to_vec()).expect("text"))
}

/// The same failure of the store, wherever it is met.
fn met_everywhere(error: &StoreError) -> Vec<(&'static str, Response)> {
    let plain = |error: PlainError| error.into_response();
    let json = |error: JsonError| error.into_response();
    let error = || error.clone();
    vec![
        ("route", plain(RouteError::from(projects::RouteError::Store(error())).into())),
        ("complete", plain(CompleteError::from(error()).into())),
        ("renew", json(RenewError::from(error()).into())),
        ("verb", json(VerbError::from(projects::VerbError::Store(error())).into())),
        ("upkeep", json(VerbError::from(projects::ReconcileError::Store(error())).into())),
        ("events", json(error().into())),
    ]
}

#[tokio::test]
async fn a_disk_that_takes_nothing_is_not_now_at_every_endpoint_and_says_what_to_do() {
    let path = PathBuf::from("/var/lib/kiln/kiln.db");
    let source = || Arc::new(rusqlite::Error::InvalidQuery);
    for (error, pause, words) in [
        (StoreError::Full { path: path.clone() }, "30", "free some space on the file system of /var/lib/kiln/kiln.db"),
        (
            StoreError::Disk { doing: "begin a commit", path: path.clone(), source: source() },
            "30",
            "the disk of /var/lib/kiln/kiln.db is read-only or fails",
        ),
        (
            StoreError::Locked { doing: "begin a commit", path: path.clone(), source: source() },
            "1",
            "another program has /var/lib/kiln/kiln.db locked: a backup, or `sqlite3`?",
        ),
        (StoreError::ReadHangs { path, after: Duration::from_secs(20) }, "30", "look whether its disk hangs"),
        (StoreError::ReadsWaiting { seconds: 5 }, "1", "try again in a second"),
    ] {
        for (place, answer) in met_everywhere(&error) {
            let (status, retry_after, text) = told(answer).await;
            assert_eq!((status, retry_after.as_deref()), (503, Some(pause)), "{place}: {text}");
            assert!(text.contains(words), "{place}: {text}");
        }
    }
    for (place, answer) in met_everywhere(&StoreError::Sqlite { doing: "read the leases", source: source() }) {
        let (status, retry_after, text) = told(answer).await;
        assert_eq!((status, retry_after), (500, None), "{place}: {text}");
        assert!(text.contains("cannot read the leases: Query is not read-only"), "{place}, with its cause: {text}");
    }
    let busy = StoreError::WritesWaiting { waiting: 2048 };
    let statuses: Vec<_> = met_everywhere(&busy).into_iter().map(|(_, answer)| answer.status().as_u16()).collect();
    assert_eq!(statuses, [429, 503, 503, 503, 503, 503]);
}

#[tokio::test]
async fn a_full_disk_of_the_host_is_not_now_whatever_was_asked_for() {
    use crate::host::RuntimeError;
    use crate::host::volumes::VolumeError;
    use crate::projects::EffectError;

    let (plain, json) = (|error: PlainError| error.into_response(), |error: JsonError| error.into_response());
    let volume = || EffectError::from(VolumeError::Full { operation: "restore", name: "p1".into() });
    let disk = || {
        let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let (operation, instance, path) = ("start", "buildkitd-p1".into(), "/run/kiln/p1".into());
        EffectError::from(RuntimeError::Io { operation, instance, path, source })
    };
    let text = || disk().in_words();
    for (place, answer, words) in [
        ("upkeep", json(VerbError::from(projects::ReconcileError::Host(volume())).into()), "free some"),
        ("upkeep", json(VerbError::from(projects::ReconcileError::Host(disk())).into()), "free some"),
        ("trash", json(VerbError::from(volume()).into()), "give the volume more"),
        ("verb", json(VerbError::from(projects::VerbError::NoRoom(text())).into()), "/run/kiln/p1"),
        ("route", plain(RouteError::from(projects::RouteError::NoRoom { text: text() }).into()), "free some"),
    ] {
        let (status, retry_after, text) = told(answer).await;
        assert_eq!((status, retry_after.as_deref()), (503, Some("30")), "{place}: {text}");
        assert!(text.contains(words), "{place}: {text}");
    }
}
