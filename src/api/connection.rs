//! One connection: which stage it is in, and how long it may stay there.
//!
//! ```text
//!   Idle (60 s) ──first byte──▶ Head (5 s) ──head complete──▶ Busy ──answer handed over──▶ Idle
//! ```
//!
//! `Busy` has no bound here, because what runs in it has its own: the body is read within 15 s, each call of the heart
//! has a deadline, and a follower of the events may stay.

use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Frame, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;
use tracing::debug;

/// The reference's bounds.
const HEAD_TIME: Duration = Duration::from_secs(5);
const IDLE_TIME: Duration = Duration::from_mins(1);

/// What a request's head may take: our clients send a few hundred bytes.
const HEAD_BYTES: usize = 16 * 1024;
const HEADERS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    Head,
    Busy,
}

impl Stage {
    const fn limit(self) -> Option<Duration> {
        match self {
            Self::Idle => Some(IDLE_TIME),
            Self::Head => Some(HEAD_TIME),
            Self::Busy => None,
        }
    }
}

/// Serves requests until the client goes away, a stage takes too long, or `shutdown`: then the request under way is
/// answered and no other is taken. A client that goes away drops the handler that works for it.
pub(super) async fn serve<S>(stream: S, router: Router, shutdown: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (stage, mut stages) = watch::channel(Stage::Idle);
    let stage = Arc::new(stage);
    let watched = Watched { stream, stage: stage.clone() };
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let busy = Busy::begin(stage.clone());
        let answer = router.clone().oneshot(request.map(Body::new));
        async move {
            let response = answer.await?;
            Ok::<_, Infallible>(response.map(|body| Handing { body: UnsyncBoxBody::new(body), _busy: busy }))
        }
    });
    let connection = http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(watched), service);
    let mut connection = pin!(connection);
    let mut leaving = false;
    loop {
        let current = *stages.borrow_and_update();
        let too_long = async {
            match current.limit() {
                Some(limit) => tokio::time::sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    debug!(%error, "a connection ended early");
                }
                return;
            }
            Ok(()) = stages.changed() => {}
            () = too_long => return debug!(?current, "a connection took too long"),
            () = shutdown.cancelled(), if !leaving => {
                leaving = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// The stream, telling when the first byte of a request arrives.
struct Watched<S> {
    stream: S,
    stage: Arc<watch::Sender<Stage>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if buffer.filled().len() > before {
            self.stage.send_if_modified(|stage| {
                let begins = *stage == Stage::Idle;
                if begins {
                    *stage = Stage::Head;
                }
                begins
            });
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// From a request's head to the end of its answer.
struct Busy(Arc<watch::Sender<Stage>>);

impl Busy {
    fn begin(stage: Arc<watch::Sender<Stage>>) -> Self {
        stage.send_replace(Stage::Busy);
        Self(stage)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_replace(Stage::Idle);
    }
}

/// The answer's body, which is dropped when the last of it is in the connection's buffer.
struct Handing {
    body: UnsyncBoxBody<Bytes, axum::Error>,
    _busy: Busy,
}

impl HttpBody for Handing {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
