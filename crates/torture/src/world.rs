//! What all parts share. A request that is cut has an excuse only while kilnd was down.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::sync::watch;

use crate::Arguments;
use crate::host::Host;
use crate::kilnd::{Down, Downs};
use crate::truth::Truth;

/// Longer than kilnd lets anybody wait.
const ANSWER: Duration = Duration::from_secs(200);

/// So many of a kind are printed in full.
const SHOWN: usize = 20;

pub(crate) struct World {
    pub(crate) arguments: Arguments,
    pub(crate) host: Host,
    pub(crate) downs: Downs,
    pub(crate) up: watch::Sender<bool>,
    truth: Mutex<Truth>,
    violations: Mutex<Vec<String>>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
    load_ends: AtomicBool,
    watch_ends: AtomicBool,
    builds: AtomicU64,
}

/// What became of a request.
#[derive(Debug)]
pub(crate) enum Reply {
    Answer {
        status: u16,
        body: Bytes,
    },
    /// Whether it was carried out is not known.
    Cut,
}

impl Reply {
    pub(crate) fn json<T: DeserializeOwned>(&self) -> Option<T> {
        match self {
            Self::Answer { status: 200..=299, body } => serde_json::from_slice(body).ok(),
            _ => None,
        }
    }

    pub(crate) fn status(&self) -> Option<u16> {
        match self {
            Self::Answer { status, .. } => Some(*status),
            Self::Cut => None,
        }
    }

    pub(crate) fn text(&self) -> String {
        match self {
            Self::Answer { status, body } => format!("{status}: {}", String::from_utf8_lossy(body).trim()),
            Self::Cut => "cut".to_owned(),
        }
    }
}

impl World {
    pub(crate) fn new(arguments: Arguments) -> std::io::Result<Arc<Self>> {
        let home = arguments.home.canonicalize()?;
        let arguments = Arguments { home: home.clone(), ..arguments };
        std::fs::create_dir_all(home.join("logs"))?;
        Ok(Arc::new(Self {
            host: Host::new(home, arguments.incus.clone()),
            arguments,
            downs: Downs::default(),
            up: watch::Sender::new(false),
            truth: Mutex::default(),
            violations: Mutex::default(),
            counts: Mutex::default(),
            load_ends: AtomicBool::new(false),
            watch_ends: AtomicBool::new(false),
            builds: AtomicU64::new(0),
        }))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.arguments.home.join("run/kiln.sock")
    }

    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.arguments.home.join("logs").join(name)
    }

    pub(crate) fn truth(&self) -> MutexGuard<'_, Truth> {
        self.truth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // === Ends

    pub(crate) fn end_load(&self) {
        self.load_ends.store(true, Ordering::Release);
    }

    pub(crate) fn load_ends(&self) -> bool {
        self.load_ends.load(Ordering::Acquire)
    }

    pub(crate) fn end_watch(&self) {
        self.watch_ends.store(true, Ordering::Release);
    }

    pub(crate) fn watch_ends(&self) -> bool {
        self.watch_ends.load(Ordering::Acquire)
    }

    /// A number that no other build has.
    pub(crate) fn next_build(&self) -> u64 {
        self.builds.fetch_add(1, Ordering::AcqRel)
    }

    // === What was seen

    /// Told of once, however often it is seen.
    pub(crate) fn violation(&self, text: String) {
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        if !violations.contains(&text) {
            eprintln!("torture: BROKEN: {text}");
            violations.push(text);
        }
    }

    pub(crate) fn count(&self, what: &'static str) {
        self.count_many(what, 1);
    }

    pub(crate) fn count_many(&self, what: &'static str, many: u64) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += many;
    }

    /// How long a lease surely keeps its daemon up. Less than its grace, because nobody's clock is exact.
    pub(crate) fn sure(&self) -> Duration {
        Duration::from_secs(self.arguments.grace.saturating_sub(4))
    }

    pub(crate) fn tally(&self) -> String {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let counts: Vec<_> = counts.iter().map(|(what, count)| format!("{count} {what}")).collect();
        counts.join(", ")
    }

    /// Prints it all; whether every promise was kept.
    pub(crate) fn tell(&self, runtime: &str, down: &Down) -> bool {
        for (what, count) in self.counts.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            println!("torture ({runtime}): {what}: {count}");
        }
        println!("torture ({runtime}): kills: {}", down.kills);
        println!("torture ({runtime}): kill to answering again, median: {} ms", down.median.as_millis());
        println!("torture ({runtime}): kill to answering again, worst: {} ms", down.worst.as_millis());
        let violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        for text in violations.iter().take(SHOWN) {
            println!("torture ({runtime}): BROKEN: {text}");
        }
        println!("torture ({runtime}): broken promises: {}", violations.len());
        violations.is_empty()
    }

    // === Asking kilnd

    /// Until it answers, as far as is known.
    pub(crate) async fn await_up(&self) {
        // The sender is this world's own.
        let _ = self.up.subscribe().wait_for(|up| *up).await;
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.ask(Method::GET, path, Bytes::new()).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Reply {
        self.ask(Method::DELETE, path, Bytes::new()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &impl Serialize) -> Reply {
        self.ask(Method::POST, path, json(body)).await
    }

    pub(crate) async fn patch(&self, path: &str, body: &impl Serialize) -> Reply {
        self.ask(Method::PATCH, path, json(body)).await
    }

    /// On a connection of its own. An answer that no client should get, and a cut without a kill, are broken promises.
    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Reply {
        self.await_up().await;
        let (start, shown) = (Instant::now(), format!("{method} {path}"));
        let outcome = tokio::time::timeout(ANSWER, self.send(method, path, body)).await;
        let excused = self.downs.touch(start, Instant::now());
        match outcome {
            Ok(Ok((status, body))) => {
                let reply = Reply::Answer { status, body };
                if matches!(status, 500 | 504 | 400) && !excused {
                    self.violation(format!("{shown}: {}", reply.text()));
                }
                reply
            }
            Ok(Err(error)) => {
                if !excused {
                    self.violation(format!("{shown}: {error}, and nobody had killed kilnd"));
                }
                self.count("requests cut");
                Reply::Cut
            }
            Err(_) => {
                self.violation(format!("{shown}: no answer in {} s", ANSWER.as_secs()));
                Reply::Cut
            }
        }
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<(u16, Bytes), String> {
        let shown = |error: &dyn std::fmt::Display| error.to_string();
        let stream = UnixStream::connect(self.socket()).await.map_err(|error| shown(&error))?;
        let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| shown(&error))?;
        // Ends with its sender; an error in it is an error of the request.
        let connection = tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header("host", "kiln").body(Full::new(body));
        let answered = async {
            let answer = sender.send_request(request.map_err(|error| shown(&error))?).await.map_err(|e| shown(&e))?;
            let status = answer.status().as_u16();
            let body = answer.into_body().collect().await.map_err(|error| shown(&error))?.to_bytes();
            Ok((status, body))
        };
        let answered = answered.await;
        drop(sender);
        // Not left behind: a client that has its answer closes.
        let _ = connection.await;
        answered
    }
}

fn json(body: &impl Serialize) -> Bytes {
    // Plain structs of text and numbers cannot fail to serialise.
    serde_json::to_vec(body).unwrap_or_default().into()
}
