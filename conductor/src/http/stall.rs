//! A stream whose writes fail once the peer has taken no byte for too long. That is what bounds
//! how long a client that reads nothing can keep its connection, its request and the slots of the
//! nodes: the connection fails, its response is dropped, and with it the request.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use prometheus::IntCounter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Wraps a stream; `cut` counts the peers that were given up.
#[derive(Debug)]
pub(super) struct StallGuard<S> {
    stream: S,
    limit: Duration,
    /// Runs from the first write that had to wait.
    stalled: Option<Pin<Box<Sleep>>>,
    cut: IntCounter,
}

impl<S> StallGuard<S> {
    pub(super) fn new(stream: S, limit: Duration, cut: IntCounter) -> StallGuard<S> {
        StallGuard { stream, limit, stalled: None, cut }
    }

    /// Passes on what a write said, and keeps the time while it says "not yet".
    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.limit;
        let sleep = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        ready!(sleep.as_mut().poll(cx));
        self.stalled = None;
        self.cut.inc();
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read its response",
        )))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.watch(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn guarded(limit_ms: u64) -> (StallGuard<tokio::io::DuplexStream>, tokio::io::DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(4);
        let cut = IntCounter::new("cut", "cut").expect("a counter");
        (StallGuard::new(ours, Duration::from_millis(limit_ms), cut), theirs)
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_peer_that_takes_nothing_is_given_up() {
        let (mut guard, _theirs) = guarded(20);
        let error = guard.write_all(b"more than four").await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(guard.cut.get(), 1);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_peer_that_takes_a_little_at_a_time_is_not() {
        let (mut guard, mut theirs) = guarded(400);
        let reader = tokio::spawn(async move {
            let mut got = Vec::new();
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_millis(80)).await;
                let mut piece = [0; 4];
                theirs.read_exact(&mut piece).await.expect("reads");
                got.extend(piece);
            }
            got
        });
        // Longer together than the limit, but each wait is shorter.
        guard.write_all(&[7; 32]).await.expect("all is taken");
        assert_eq!(reader.await.expect("ends"), [7; 32]);
        assert_eq!(guard.cut.get(), 0);
    }
}
