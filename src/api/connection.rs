//! One connection: which stage it is in, and how long it may stay there.
//!
//! ```text
//!   Idle (60 s) ──first byte──▶ Head (5 s) ──head complete──▶ Body ──read──▶ Busy ──answer handed over──▶ Idle
//! ```
//!
//! `Body` and `Busy` have no bound here, because what runs in them has its own: the body is read within 15 s, each call of
//! the heart has a deadline, and a follower of the events may stay. In all stages but `Busy` we wait for the client, and its
//! [`Place`] may go to another; one in the reserve is there for one short request.
//!
//! Beside that it watches over answers that carry a lease: whether they arrived is for [`Outbox`] to say.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Uri, header};
use axum::response::Response;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Frame, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;
use tracing::debug;

use super::answers;
use super::delivery::{Delivery, Outbox, Peer, Undecided};
use super::places::Place;
use crate::identity::Source;

/// The reference's bounds.
const HEAD_TIME: Duration = Duration::from_secs(5);
const IDLE_TIME: Duration = Duration::from_mins(1);

/// In the reserve: what is not answered by then is told to come again, and what is not read by then is cut off.
const SHORT: Duration = Duration::from_secs(2);
const RESERVE_TIME: Duration = Duration::from_secs(5);

/// How long a connection that ends is held to hear whether its last answer was read.
const LAST_YARD: Duration = Duration::from_secs(1);

/// What a request's head may take: our clients send a few hundred bytes.
const HEAD_BYTES: usize = 16 * 1024;
const HEADERS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    Head,
    Body,
    Busy,
}

impl Stage {
    const fn limit(self) -> Option<Duration> {
        match self {
            Self::Idle => Some(IDLE_TIME),
            Self::Head => Some(HEAD_TIME),
            Self::Body | Self::Busy => None,
        }
    }
}

/// Where a connection stands, for its deadlines and for its place.
struct Progress {
    stage: watch::Sender<Stage>,
    place: Place,
}

impl Progress {
    fn new(place: Place) -> Arc<Self> {
        Arc::new(Self { stage: watch::Sender::new(Stage::Idle), place })
    }

    fn enter(&self, stage: Stage) {
        match stage {
            Stage::Idle | Stage::Head | Stage::Body => self.place.waits(),
            Stage::Busy => self.place.works(),
        }
        self.stage.send_replace(stage);
    }

    /// Only if it is in `from`.
    fn go_on(&self, from: Stage, to: Stage) {
        if *self.stage.borrow() == from {
            self.enter(to);
        }
    }
}

/// Serves requests until the client goes away, a stage takes too long, its place goes to another, or `shutdown`: then the
/// request under way is answered and no other is taken. A client that goes away drops the handler that works for it.
pub(super) async fn serve<S>(stream: S, from: Source, router: Router, place: Place, shutdown: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Peer + Unpin + Send + 'static,
{
    let (evicted, is_reserve) = (place.evicted(), place.is_reserve());
    let progress = Progress::new(place);
    let mut stages = progress.stage.subscribe();
    let outbox = Arc::new(Outbox::default());
    let watched = Watched { stream, progress: progress.clone(), outbox: outbox.clone() };
    let carried = outbox.clone();
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let busy = Busy::begin(progress.clone());
        let (outbox, uri) = (carried.clone(), request.uri().clone());
        let mut request = request.map(|body| Body::new(Arriving::new(body, progress.clone())));
        request.extensions_mut().insert(from);
        let answer = router.clone().oneshot(request);
        async move {
            let mut response = if is_reserve { in_short(&uri, answer).await? } else { answer.await? };
            let lease = response.extensions_mut().remove::<Delivery>().and_then(|delivery| delivery.take());
            let wrap = |body| Handing { body: UnsyncBoxBody::new(body), lease, outbox, _busy: busy };
            Ok::<_, Infallible>(response.map(wrap))
        }
    });
    let mut connection = http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(watched), service);
    let mut leaving = false;
    let begun = tokio::time::Instant::now();
    loop {
        let current = *stages.borrow_and_update();
        let too_long = async {
            match current.limit() {
                _ if is_reserve => tokio::time::sleep_until(begun + RESERVE_TIME).await,
                Some(limit) => tokio::time::sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = &mut connection => {
                match ended {
                    Err(error) => debug!(%error, "a connection ended early"),
                    Ok(()) => hear_the_end(connection.into_parts().io.into_inner(), &outbox).await,
                }
                return;
            }
            Ok(()) = stages.changed() => {}
            () = too_long => return debug!(?current, "a connection took too long"),
            () = evicted.cancelled() => return debug!(?current, "a connection was closed to make room for another"),
            () = shutdown.cancelled(), if !leaving => {
                leaving = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    }
}

/// One answer that comes soon, and then the end.
async fn in_short(
    uri: &Uri,
    answer: impl Future<Output = Result<Response, Infallible>>,
) -> Result<Response, Infallible> {
    let mut response = match tokio::time::timeout(SHORT, answer).await {
        Ok(response) => response?,
        Err(_) => answers::too_many(uri),
    };
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Ok(response)
}

/// Our side is closed; what the client does next tells whether it read the last answer.
async fn hear_the_end<S: AsyncRead + Unpin>(mut stream: Watched<S>, outbox: &Outbox) {
    if outbox.is_open() {
        // The outcome goes by way of the stream itself; silence is taken for a client that takes its time.
        let _ = tokio::time::timeout(LAST_YARD, stream.read(&mut [0; 1])).await;
    }
}

/// The stream, telling when the first byte of a request arrives, and what becomes of answers.
struct Watched<S> {
    stream: S,
    progress: Arc<Progress>,
    outbox: Arc<Outbox>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        self.outbox.heard(outcome.as_ref().copied());
        outcome?;
        if buffer.filled().len() > before {
            self.progress.go_on(Stage::Idle, Stage::Head);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Peer + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    /// Called when all that was in the connection's buffer is written.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.outbox.flushed(&self.stream);
        Poll::Ready(Ok(()))
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
struct Busy(Arc<Progress>);

impl Busy {
    fn begin(progress: Arc<Progress>) -> Self {
        progress.enter(Stage::Body);
        Self(progress)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.enter(Stage::Idle);
    }
}

/// The request's body. When it has been read, or nobody wants it, the client waits for us.
struct Arriving<B> {
    body: B,
    progress: Arc<Progress>,
}

impl<B: HttpBody> Arriving<B> {
    fn new(body: B, progress: Arc<Progress>) -> Self {
        let arriving = Self { body, progress };
        arriving.note(arriving.body.is_end_stream());
        arriving
    }
}

impl<B> Arriving<B> {
    fn note(&self, is_all: bool) {
        if is_all {
            self.progress.go_on(Stage::Body, Stage::Busy);
        }
    }
}

impl<B> Drop for Arriving<B> {
    fn drop(&mut self) {
        self.note(true);
    }
}

impl<B: HttpBody + Unpin> HttpBody for Arriving<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.note(frame.is_none() || self.body.is_end_stream());
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The answer's body, which is dropped when the last of it is in the connection's buffer, or when it will never be.
struct Handing {
    body: UnsyncBoxBody<Bytes, axum::Error>,
    lease: Option<Undecided>,
    outbox: Arc<Outbox>,
    _busy: Busy,
}

impl Drop for Handing {
    fn drop(&mut self) {
        if let Some(answer) = self.lease.take().filter(|_| self.body.is_end_stream()) {
            self.outbox.answered(answer);
        }
    }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use kiln_wire::RouteResponse;
    use tokio::io::DuplexStream;

    use super::super::places::{Room, Size};
    use super::*;
    use crate::api::heart::Routed;
    use crate::metrics::Metrics;

    struct Lease(Arc<AtomicBool>);

    impl Routed for Lease {
        fn response(&self) -> RouteResponse {
            unreachable!("nobody asks")
        }

        fn delivered(self: Box<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// Whether an answer counts as delivered of which so many frames were taken before its body was dropped and the
    /// connection flushed.
    async fn delivered(frames: usize) -> bool {
        let delivered = Arc::new(AtomicBool::new(false));
        let outbox = Arc::new(Outbox::default());
        let progress = Progress::new(Room::new(Size { places: 1, reserve: 0 }).enter());
        let lease = Delivery::of(Box::new(Lease(delivered.clone())), Arc::new(Metrics::new())).take();
        let body = UnsyncBoxBody::new(Body::from("an answer"));
        let mut handing = Handing { body, lease, outbox: outbox.clone(), _busy: Busy::begin(progress) };
        for _ in 0..frames {
            std::future::poll_fn(|cx| Pin::new(&mut handing).poll_frame(cx)).await.expect("a frame").expect("is well");
        }
        drop(handing);
        let (peer, _other): (DuplexStream, _) = tokio::io::duplex(1);
        outbox.flushed(&peer);
        delivered.load(Ordering::SeqCst)
    }

    #[tokio::test]
    async fn an_answer_is_delivered_as_a_whole_or_not() {
        assert!(!delivered(0).await, "its body was never taken");
        assert!(delivered(1).await);
    }
}
