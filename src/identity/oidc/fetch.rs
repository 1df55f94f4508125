//! One document over HTTP, of an issuer or a forge.
//!
//! No redirect is followed, nothing is decompressed, and it is asked directly, not through a proxy. Each step has a deadline and
//! the document a largest size, so somebody who is slow, or lies, costs one task for a while and nothing else.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::http::{Request, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Empty};
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
pub(in crate::identity) enum FetchError {
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
pub(in crate::identity) struct Web {
    within: Duration,
    tls: TlsConnector,
}

impl Web {
    pub(in crate::identity) fn new(tls: Arc<rustls::ClientConfig>) -> Self {
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

    async fn converse(&self, question: &Question<'_>) -> Result<Answer, FetchError> {
        let at = || question.place.authority();
        let within = CONNECT_WITHIN.min(self.within);
        let slow = |_| FetchError::Slow { at: at(), what: "take the connection", within };
        let stream = timeout(within, self.connect(question.place)).await.map_err(slow)??;
        let broken = |source: Box<dyn std::error::Error + Send + Sync>| FetchError::Broken { at: at(), source };
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MOST_HEAD_BYTES);
        let (mut sender, connection) =
            builder.handshake::<_, Empty<Bytes>>(TokioIo::new(stream)).await.map_err(|error| broken(error.into()))?;
        // It ends with this question, whatever becomes of it.
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let mut request = Request::get(&question.place.path)
            .header(header::HOST, at())
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, concat!("kiln/", env!("CARGO_PKG_VERSION")));
        if let Some(secret) = question.bearer {
            request = request.header(header::AUTHORIZATION, format!("Bearer {secret}"));
        }
        let request = request.body(Empty::new()).map_err(|error| broken(error.into()))?;
        let response = sender.send_request(request).await.map_err(|error| broken(error.into()))?;
        let status = response.status();
        let location =
            response.headers().get(header::LOCATION).and_then(|place| place.to_str().ok()).map(str::to_owned);
        let mut body = response.into_body();
        let mut text = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let Ok(part) = frame.map_err(|error| broken(error.into()))?.into_data() else { continue };
            text.extend_from_slice(&part);
            if text.len() > question.most {
                text.truncate(question.most);
                return Ok(Answer { status, location, body: text.freeze(), is_cut: true });
            }
        }
        Ok(Answer { status, location, body: text.freeze(), is_cut: false })
    }

    /// Whatever it answers, in time.
    pub(in crate::identity) async fn ask(&self, question: &Question<'_>) -> Result<Answer, FetchError> {
        let slow = |_| FetchError::Slow { at: question.place.authority(), what: "answer", within: self.within };
        timeout(self.within, self.converse(question)).await.map_err(slow)?
    }
}

#[async_trait]
impl Fetch for Web {
    async fn get(&self, place: &Place, most: usize) -> Result<Bytes, FetchError> {
        self.ask(&Question { place, bearer: None, most }).await?.document(place, most)
    }
}

/// What is asked for.
pub(in crate::identity) struct Question<'a> {
    pub(in crate::identity) place: &'a Place,
    /// A secret that says who asks.
    pub(in crate::identity) bearer: Option<&'a str>,
    /// Bytes of the answer that are read.
    pub(in crate::identity) most: usize,
}

pub(in crate::identity) struct Answer {
    pub(in crate::identity) status: StatusCode,
    /// Where it sends to, if it does.
    pub(in crate::identity) location: Option<String>,
    pub(in crate::identity) body: Bytes,
    /// There is more of it.
    pub(in crate::identity) is_cut: bool,
}

impl Answer {
    /// The whole of it, if that is what it is.
    pub(in crate::identity) fn document(self, place: &Place, most: usize) -> Result<Bytes, FetchError> {
        let at = place.authority();
        match self.status {
            StatusCode::OK if self.is_cut => Err(FetchError::TooLarge { at, most }),
            StatusCode::OK => Ok(self.body),
            status if status.is_redirection() => Err(FetchError::Redirect { at, status }),
            status => Err(FetchError::Status { at, status }),
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
