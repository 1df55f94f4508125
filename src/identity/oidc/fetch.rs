//! One document of an issuer over HTTP.
//!
//! No redirect is followed, nothing is decompressed, and it is asked directly, not through a proxy. Each step has a deadline and
//! the document a largest size, so an issuer that is slow, or lies, costs one task for a while and nothing else.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::http::{Request, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use crate::config::identity::Place;

/// For name, connection and TLS.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// For one document in all.
const DOCUMENT_WITHIN: Duration = Duration::from_secs(10);

/// Of an answer's head.
const MOST_HEAD_BYTES: usize = 32 << 10;

/// The one effect that this room has.
#[async_trait]
pub(super) trait Fetch: Send + Sync + 'static {
    /// At most `most` bytes.
    async fn get(&self, place: &Place, most: usize) -> Result<Bytes, FetchError>;
}

#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("{at} cannot be reached")]
    Connect { at: String, source: io::Error },
    #[error("{at} has no certificate that is trusted here: if its authority is your own, name it with ca_file")]
    Tls { at: String, source: io::Error },
    #[error("{at} did not {what} within {within:?}")]
    Slow { at: String, what: &'static str, within: Duration },
    #[error("{at} sends elsewhere ({status}), which is not followed")]
    Redirect { at: String, status: StatusCode },
    #[error("{at} answered {status}")]
    Status { at: String, status: StatusCode },
    #[error("{at} answered more than {most} bytes")]
    TooLarge { at: String, most: usize },
    #[error("{at} broke off")]
    Broken { at: String, source: Box<dyn std::error::Error + Send + Sync> },
}

/// The web as it is.
pub(super) struct Web {
    within: Duration,
    tls: TlsConnector,
}

impl Web {
    pub(super) fn new(tls: Arc<rustls::ClientConfig>) -> Self {
        Self { within: DOCUMENT_WITHIN, tls: tls.into() }
    }

    #[cfg(test)]
    pub(super) fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    async fn connect(&self, place: &Place) -> Result<Box<dyn Stream>, FetchError> {
        let at = || place.authority();
        let connection = TcpStream::connect((place.host.as_str(), place.port)).await;
        let connection = connection.map_err(|source| FetchError::Connect { at: at(), source })?;
        if !place.tls {
            return Ok(Box::new(connection));
        }
        let name = ServerName::try_from(place.host.clone())
            .map_err(|error| FetchError::Connect { at: at(), source: io::Error::other(error) })?;
        let stream = self.tls.connect(name, connection).await;
        Ok(Box::new(stream.map_err(|source| FetchError::Tls { at: at(), source })?))
    }

    async fn ask(&self, place: &Place, most: usize) -> Result<Bytes, FetchError> {
        let at = || place.authority();
        let within = CONNECT_WITHIN.min(self.within);
        let slow = |_| FetchError::Slow { at: at(), what: "take the connection", within };
        let stream = timeout(within, self.connect(place)).await.map_err(slow)??;
        let broken = |source: Box<dyn std::error::Error + Send + Sync>| FetchError::Broken { at: at(), source };
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MOST_HEAD_BYTES);
        let (mut sender, connection) =
            builder.handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await.map_err(|error| broken(error.into()))?;
        // It ends with this question, whatever becomes of it.
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let request = Request::get(&place.path)
            .header(header::HOST, at())
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .body(Empty::new())
            .map_err(|error| broken(error.into()))?;
        let response = sender.send_request(request).await.map_err(|error| broken(error.into()))?;
        match response.status() {
            StatusCode::OK => {}
            status if status.is_redirection() => return Err(FetchError::Redirect { at: at(), status }),
            status => return Err(FetchError::Status { at: at(), status }),
        }
        match Limited::new(response.into_body(), most).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(FetchError::TooLarge { at: at(), most }),
            Err(error) => Err(broken(error)),
        }
    }
}

#[async_trait]
impl Fetch for Web {
    async fn get(&self, place: &Place, most: usize) -> Result<Bytes, FetchError> {
        let slow = |_| FetchError::Slow { at: place.authority(), what: "answer", within: self.within };
        timeout(self.within, self.ask(place, most)).await.map_err(slow)?
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
