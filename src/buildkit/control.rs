//! A client of buildkitd's control API, over mutual TLS.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::io;
use std::net::SocketAddrV4;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bollard_buildkit_proto::moby::buildkit::v1 as proto;
use futures_util::{Stream, StreamExt as _};
use hyper_util::rt::TokioIo;
use proto::control_client::ControlClient;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

/// A record of `DiskUsage` takes some 200 bytes: tonic's default of 4 MiB would not hold those of a large cache.
const LARGEST_ANSWER: usize = 64 << 20;

/// The record of a build has its arguments, and is some KiB.
const LARGEST_RECORD: usize = 4 << 20;

/// More builds than this are as busy as so many.
pub const MOST_BUILDS: u32 = 1000;

/// The client's side of a mutual TLS connection, ready to be used many times.
#[derive(Clone)]
pub struct ClientTls(Arc<ClientConfig>);

/// Which daemon, and how to know that it is the one.
#[derive(Clone)]
pub struct DaemonTarget {
    pub address: SocketAddrV4,
    /// In the daemon's certificate.
    pub server_name: String,
    pub tls: ClientTls,
}

#[derive(Debug, Error)]
pub enum ControlError {
    /// Nobody listens there, or hung up: a daemon that starts or stops looks like this.
    #[error("buildkitd at {address} cannot be reached")]
    NotReachable {
        address: SocketAddrV4,
        #[source]
        source: io::Error,
    },
    /// One of the two does not accept the other's certificate. Waiting does not help.
    #[error(
        "no TLS connection with buildkitd at {address}: {source}; its certificates and ours are not of the same project, or have expired"
    )]
    TlsRefused { address: SocketAddrV4, source: rustls::Error },
    #[error("buildkitd at {address} answered {call} with {status}")]
    Rpc { address: SocketAddrV4, call: &'static str, status: Box<tonic::Status> },
    #[error("buildkitd at {address} did not answer {call} in time")]
    TimedOut { address: SocketAddrV4, call: &'static str },
    /// Our own side: a name or a certificate that cannot be used.
    #[error("cannot use {what}: {why}")]
    Unusable { what: &'static str, why: String },
}

impl ControlError {
    /// Whether the same call may succeed later without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotReachable { .. } | Self::Rpc { .. } | Self::TimedOut { .. })
    }
}

impl ClientTls {
    /// From PEM: whom to trust, and who we are.
    pub fn new(ca: &str, cert: &str, key: &str) -> Result<Self, ControlError> {
        let unusable = |what, why: String| ControlError::Unusable { what, why };
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(ca.as_bytes()) {
            let root = root.map_err(|e| unusable("the CA certificate", e.to_string()))?;
            roots.add(root).map_err(|e| unusable("the CA certificate", e.to_string()))?;
        }
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(cert.as_bytes()).collect();
        let chain = chain.map_err(|e| unusable("the client certificate", e.to_string()))?;
        let key =
            PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|e| unusable("the client key", e.to_string()))?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable("the TLS provider", e.to_string()))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(|e| unusable("the client certificate", e.to_string()))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self(Arc::new(config)))
    }
}

/// One of a daemon's workers; Kiln's daemons have one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    pub id: String,
    pub snapshotter: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// `linux/amd64`, with `/v2` and the like where there is a variant.
    pub platforms: Vec<String>,
    pub gc: Vec<GcRule>,
}

/// Sizes in bytes; 0 is "not set".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcRule {
    pub all: bool,
    pub filters: Vec<String>,
    pub keep: Duration,
    pub reserved: u64,
    pub max_used: u64,
    pub min_free: u64,
}

impl Worker {
    /// What the worker may use at most, whatever the age of what it holds; `None`: no rule says so.
    pub fn ceiling(&self) -> Option<u64> {
        let ageless = self.gc.iter().filter(|r| r.keep.is_zero() && r.filters.is_empty() && r.max_used > 0);
        ageless.map(|r| r.max_used).min()
    }
}

/// How full a cache is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskUsage {
    pub records: usize,
    pub total: u64,
    /// Not used by a running build.
    pub reclaimable: u64,
    /// Cache mounts, part of the total.
    pub cache_mounts: u64,
}

/// An open connection to one daemon. Closed when dropped.
pub struct Control {
    address: SocketAddrV4,
    client: ControlClient<Channel>,
    /// An alert that came after the handshake: a daemon refuses our certificate only then (TLS 1.3).
    alert: Arc<Mutex<Option<rustls::Error>>>,
}

impl Control {
    /// Connects; `deadline` covers the TCP connection and the handshake.
    pub async fn connect(target: &DaemonTarget, deadline: Instant) -> Result<Self, ControlError> {
        let address = target.address;
        let stream = timeout_at(deadline, handshake(target))
            .await
            .map_err(|_| ControlError::TimedOut { address, call: "the TLS handshake" })??;
        let alert = Arc::default();
        let watched = watch::Watched { stream, alert: Arc::clone(&alert) };
        let not_reachable =
            |e: tonic::transport::Error| ControlError::NotReachable { address, source: io::Error::other(e) };
        // The scheme says nothing here: the stream is encrypted already. The name becomes `:authority`.
        let uri = format!("http://{}", target.server_name);
        let endpoint = Endpoint::from_shared(uri)
            .map_err(|e| ControlError::Unusable { what: "the server name", why: e.to_string() })?;
        let mut once = Some(TokioIo::new(watched));
        let connector = tower::service_fn(move |_| {
            let stream = once.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
            async move { stream }
        });
        let channel = timeout_at(deadline, endpoint.connect_with_connector(connector))
            .await
            .map_err(|_| ControlError::TimedOut { address, call: "the HTTP/2 preface" })?
            .map_err(not_reachable)?;
        let client = ControlClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
        Ok(Self { address, client, alert })
    }

    pub async fn workers(&mut self, deadline: Instant) -> Result<Vec<Worker>, ControlError> {
        let call = "ListWorkers";
        let mut client = self.client.clone();
        let answer = self.within(deadline, call, client.list_workers(proto::ListWorkersRequest::default())).await?;
        Ok(answer.record.into_iter().map(worker).collect())
    }

    pub async fn disk_usage(&mut self, deadline: Instant) -> Result<DiskUsage, ControlError> {
        let mut client = self.client.clone();
        let answer = self.within(deadline, "DiskUsage", client.disk_usage(proto::DiskUsageRequest::default())).await?;
        // A record that shares its data with another is counted at the other.
        let own = answer.record.iter().filter(|r| !r.shared);
        Ok(own.fold(DiskUsage::default(), |sum, record| {
            let size = bytes(record.size);
            DiskUsage {
                records: sum.records + 1,
                total: sum.total.saturating_add(size),
                reclaimable: sum.reclaimable.saturating_add(if record.in_use { 0 } else { size }),
                cache_mounts: sum.cache_mounts.saturating_add(if record.record_type == "exec.cachemount" {
                    size
                } else {
                    0
                }),
            }
        }))
    }

    /// How many builds are going on now; at [`MOST_BUILDS`] the counting ends.
    ///
    /// buildkitd counts a build from its request to its last word. One that a client keeps out of the history (`internal`)
    /// is not among them, nor is a client that is connected and has not asked for anything yet.
    pub async fn builds(&mut self, deadline: Instant) -> Result<u32, ControlError> {
        let call = "ListenBuildHistory";
        let mut client = self.client.clone().max_decoding_message_size(LARGEST_RECORD);
        let question = proto::BuildHistoryRequest { active_only: true, early_exit: true, ..Default::default() };
        let answers = self.within(deadline, call, client.listen_build_history(question)).await?;
        match timeout_at(deadline, count(answers)).await {
            Err(_) => Err(ControlError::TimedOut { address: self.address, call }),
            Ok(Err(status)) => Err(self.failed(call, status)),
            Ok(Ok(builds)) => Ok(builds),
        }
    }

    /// BuildKit's version, as it was built: `v0.34.2`.
    pub async fn version(&mut self, deadline: Instant) -> Result<String, ControlError> {
        let mut client = self.client.clone();
        let answer = self.within(deadline, "Info", client.info(proto::InfoRequest {})).await?;
        Ok(answer.buildkit_version.map(|v| v.version).unwrap_or_default())
    }

    async fn within<T>(
        &self,
        deadline: Instant,
        call: &'static str,
        answer: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, ControlError> {
        let address = self.address;
        let answer = timeout_at(deadline, answer).await.map_err(|_| ControlError::TimedOut { address, call })?;
        answer.map(tonic::Response::into_inner).map_err(|status| self.failed(call, status))
    }

    fn failed(&self, call: &'static str, status: tonic::Status) -> ControlError {
        let address = self.address;
        if let Some(source) = self.alert.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return ControlError::TlsRefused { address, source };
        }
        // The connection failed under the call: buildkitd itself said nothing.
        if StdError::source(&status).is_some() {
            return ControlError::NotReachable { address, source: io::Error::other(status) };
        }
        ControlError::Rpc { address, call, status: Box::new(status) }
    }
}

/// Of the builds that have begun; at [`MOST_BUILDS`] it has seen enough.
async fn count(
    events: impl Stream<Item = Result<proto::BuildHistoryEvent, tonic::Status>>,
) -> Result<u32, tonic::Status> {
    let mut events = std::pin::pin!(events);
    let mut builds = 0;
    while let Some(event) = events.next().await {
        builds += u32::from(event?.r#type == proto::BuildHistoryEventType::Started as i32);
        if builds == MOST_BUILDS {
            break;
        }
    }
    Ok(builds)
}

async fn handshake(target: &DaemonTarget) -> Result<tokio_rustls::client::TlsStream<TcpStream>, ControlError> {
    let address = target.address;
    let name = ServerName::try_from(target.server_name.clone())
        .map_err(|e| ControlError::Unusable { what: "the server name", why: e.to_string() })?;
    let not_reachable = |source| ControlError::NotReachable { address, source };
    let stream = TcpStream::connect(address).await.map_err(not_reachable)?;
    stream.set_nodelay(true).map_err(not_reachable)?;
    TlsConnector::from(Arc::clone(&target.tls.0)).connect(name, stream).await.map_err(|error| match tls_error(&error) {
        Some(source) => ControlError::TlsRefused { address, source },
        None => not_reachable(error),
    })
}

/// The rustls error in an I/O error of its stream.
fn tls_error(error: &io::Error) -> Option<rustls::Error> {
    error.get_ref()?.downcast_ref::<rustls::Error>().cloned()
}

fn worker(record: proto::types::WorkerRecord) -> Worker {
    let labels: BTreeMap<_, _> = record.labels.into_iter().collect();
    Worker {
        id: record.id,
        snapshotter: labels.get("org.mobyproject.buildkit.worker.snapshotter").cloned(),
        labels,
        platforms: record.platforms.iter().map(platform).collect(),
        gc: record.gc_policy.into_iter().map(rule).collect(),
    }
}

fn platform(platform: &bollard_buildkit_proto::pb::Platform) -> String {
    let parts = [&platform.os, &platform.architecture, &platform.variant];
    parts.into_iter().filter(|p| !p.is_empty()).map(String::as_str).collect::<Vec<_>>().join("/")
}

fn rule(policy: proto::types::GcPolicy) -> GcRule {
    GcRule {
        all: policy.all,
        filters: policy.filters,
        keep: Duration::from_nanos(bytes(policy.keep_duration)),
        reserved: bytes(policy.reserved_space),
        max_used: bytes(policy.max_used_space),
        min_free: bytes(policy.min_free_space),
    }
}

/// Go's sizes are signed; a negative one means nothing.
fn bytes(signed: i64) -> u64 {
    u64::try_from(signed).unwrap_or(0)
}

mod watch {
    //! A stream that remembers the TLS error it broke with: the layers above lose it.

    use std::io;
    use std::pin::Pin;
    use std::sync::{Arc, Mutex, PoisonError};
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    pub(super) struct Watched<S> {
        pub(super) stream: S,
        pub(super) alert: Arc<Mutex<Option<rustls::Error>>>,
    }

    impl<S> Watched<S> {
        fn note<T>(&self, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
            if let Poll::Ready(Err(error)) = &outcome
                && let Some(error) = super::tls_error(error)
            {
                *self.alert.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
            outcome
        }
    }

    impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            let outcome = Pin::new(&mut self.stream).poll_read(cx, buf);
            self.note(outcome)
        }
    }

    impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            let outcome = Pin::new(&mut self.stream).poll_write(cx, buf);
            self.note(outcome)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            let outcome = Pin::new(&mut self.stream).poll_flush(cx);
            self.note(outcome)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            let outcome = Pin::new(&mut self.stream).poll_shutdown(cx);
            self.note(outcome)
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    fn event(kind: proto::BuildHistoryEventType) -> proto::BuildHistoryEvent {
        proto::BuildHistoryEvent { r#type: kind as i32, record: None }
    }

    #[tokio::test]
    async fn only_builds_that_go_on_are_counted() {
        use proto::BuildHistoryEventType::{Complete, Deleted, Started};
        let events = [Started, Complete, Started, Deleted].map(|kind| Ok(event(kind)));
        assert_eq!(count(stream::iter(events)).await.expect("counted"), 2);
        assert_eq!(count(stream::empty()).await.expect("counted"), 0);
    }

    #[tokio::test]
    async fn the_counting_has_an_end_where_the_builds_have_none() {
        let endless = stream::repeat_with(|| Ok(event(proto::BuildHistoryEventType::Started)));
        assert_eq!(count(endless).await.expect("counted"), MOST_BUILDS);
    }

    #[tokio::test]
    async fn a_count_that_breaks_off_is_none() {
        let events = [Ok(event(proto::BuildHistoryEventType::Started)), Err(tonic::Status::unavailable("gone"))];
        assert!(count(stream::iter(events)).await.is_err());
    }
}
