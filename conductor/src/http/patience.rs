//! How long a connection waits for its client to ask: for the head of its first request, from when
//! it was opened; for the first byte of the next request, while nothing is asked; and for the rest of
//! a head that has begun. While a request is served this says nothing: bodies have a time of their
//! own, and so do answers that are not read.
//!
//! hyper has one time for the last two, and then client pools see connections break that they
//! believe open.
//!
//! Everything here happens in the one task that drives the connection, so that [`Patience::ended`]
//! sees what changed when it is polled after the connection.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use bytes::Bytes;
use futures::future::BoxFuture;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep_until};
use tower::{BoxError, Service};

/// The times of one connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// From the first byte of a request's head (from the start of the connection for the first) to
    /// its last.
    pub head: Duration,
    /// From the end of an answer to the first byte of the next request.
    pub idle: Duration,
}

/// What the client owes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owed {
    /// The rest of a head, until then.
    Head(Instant),
    /// Nothing, since then.
    Idle(Instant),
    /// A request is being served.
    Nothing,
}

/// Which time ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RanOut {
    Head,
    Idle,
}

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Patience {
    limits: Limits,
    owed: Arc<Mutex<Owed>>,
    scarce: watch::Receiver<bool>,
}

impl Patience {
    /// Of a connection that has just been opened. While connections are `scarce`, one that is idle is
    /// kept no longer than a head may take; when that changes, [`Patience::ended`] is to be asked anew.
    pub(super) fn new(limits: Limits, scarce: watch::Receiver<bool>) -> Patience {
        let owed = Owed::Head(Instant::now() + limits.head);
        Patience { limits, owed: Arc::new(Mutex::new(owed)), scarce }
    }

    /// Notes what is read from this stream.
    pub(super) fn watch_reads<S>(&self, stream: S) -> WatchedReads<S> {
        WatchedReads { stream, patience: self.clone() }
    }

    /// Notes when the requests of this service begin and when their answers are over.
    pub(super) fn watch_answers(&self, router: Router) -> WatchedAnswers {
        WatchedAnswers { router, patience: self.clone() }
    }

    /// The connection ends when nothing more comes: what has begun to come since has one more head's
    /// time.
    pub(super) fn end(&self) {
        let head = Instant::now() + self.limits.head;
        self.set(|owed| match owed {
            Owed::Idle(_) => Owed::Head(head),
            other => other,
        });
    }

    /// Returns when the client has been waited for long enough. To be polled after the connection.
    pub(super) async fn ended(&self) -> RanOut {
        let Limits { head, idle } = self.limits;
        let idle = if *self.scarce.borrow() { idle.min(head) } else { idle };
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            let (deadline, ran_out) = match self.get() {
                Owed::Nothing => return Poll::Pending,
                Owed::Head(deadline) => (deadline, RanOut::Head),
                Owed::Idle(since) => (since + idle, RanOut::Idle),
            };
            let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            timer.as_mut().poll(cx).map(|()| ran_out)
        })
        .await
    }

    fn get(&self) -> Owed {
        *self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, change: impl FnOnce(Owed) -> Owed) {
        let mut owed = self.owed.lock().unwrap_or_else(PoisonError::into_inner);
        *owed = change(*owed);
    }
}

/// See [`Patience::watch_answers`].
#[derive(Debug, Clone)]
pub(super) struct WatchedAnswers {
    router: Router,
    patience: Patience,
}

impl<B> Service<Request<B>> for WatchedAnswers
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // A router is always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        self.patience.set(|_| Owed::Nothing);
        let answering = Answering { patience: self.patience.clone() };
        let answer = self.router.call(request);
        Box::pin(async move {
            let response = answer.await?;
            Ok(response.map(|body| Body::new(Answer { body, _answering: answering })))
        })
    }
}

/// A request is served while this lives: at the most until the last byte of its answer was taken.
#[derive(Debug)]
struct Answering {
    patience: Patience,
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.patience.set(|_| Owed::Idle(Instant::now()));
    }
}

/// The body of an answer.
struct Answer {
    body: Body,
    _answering: Answering,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// See [`Patience::watch_reads`].
#[derive(Debug)]
pub(super) struct WatchedReads<S> {
    stream: S,
    patience: Patience,
}

impl<S> WatchedReads<S> {
    /// The end of an answer may still be on its way when nothing of it is left to be made: the client
    /// is idle from when the last of it was taken.
    fn wrote(&self, written: &Poll<io::Result<usize>>) {
        if matches!(written, Poll::Ready(Ok(_))) {
            self.patience.set(|owed| match owed {
                Owed::Idle(_) => Owed::Idle(Instant::now()),
                other => other,
            });
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedReads<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            let head = self.patience.limits.head;
            self.patience.set(|owed| match owed {
                Owed::Idle(_) => Owed::Head(Instant::now() + head),
                other => other,
            });
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedReads<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
