//! The listening socket: one task for each connection, at most `connections_max` of them.
//!
//! While all are in use nobody is accepted and new ones wait in the kernel's listen queue. HTTP/1.1
//! only: one response at a time on a connection, so that a client that reads nothing can be told
//! by its socket alone. While more than half are in use, idle connections are kept no longer than a
//! head may take, so that those who ask find room.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use prometheus::{IntCounter, IntGauge};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::patience::{Limits, Patience, RanOut};
use super::places::{Place, Places};
use super::stall::StallGuard;
use super::tls::Tls;

/// Bounds of connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HttpOptions {
    pub connections_max: usize,
    pub header_read: Duration,
    pub keep_alive: Duration,
    pub write_stall: Duration,
}

/// Bytes that hyper buffers for one connection, request head included.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// After a failed accept (no file descriptors left), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Door {
    pub router: Router,
    pub options: HttpOptions,
    /// Absent where HTTP is spoken in the clear.
    pub tls: Option<Arc<Tls>>,
    /// Open connections.
    pub places: IntGauge,
    pub slow_readers_cut: IntCounter,
    /// No more connections; open ones end when their response has.
    pub stop: CancellationToken,
    /// Open ones end at once.
    pub abandon: CancellationToken,
}

/// Accepts until `stop`; then lets connections end when their response has, until `abandon`.
pub(crate) async fn serve(listener: TcpListener, door: Door) {
    let door = Arc::new(door);
    let places = Places::new(door.options.connections_max, door.places.clone());
    let places = Arc::new(places);
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            () = door.stop.cancelled() => break,
        };
        let Some((stream, place)) = accepted else { continue };
        let door = Arc::clone(&door);
        connections.spawn(async move { connection(stream, &door, &place).await });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn accept(listener: &TcpListener, places: &Arc<Places>) -> Option<(TcpStream, Place)> {
    let room = places.room().await?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Chunks of a stream are small and each is waited for.
            let _ = stream.set_nodelay(true);
            Some((stream, Place::take(places, room)))
        }
        Err(error) => {
            tracing::warn!(%error, "the conductor cannot accept a connection; retrying");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

async fn connection(stream: TcpStream, door: &Door, place: &Place) {
    let cut = door.slow_readers_cut.clone();
    let guarded = StallGuard::new(stream, door.options.write_stall, cut);
    let Some(tls) = &door.tls else { return drive(guarded, door, place.scarce()).await };
    let shaken = door.stop.run_until_cancelled(tls.accept(guarded)).await;
    if let Some(Some(stream)) = shaken {
        drive(stream, door, place.scarce()).await;
    }
}

/// Serves requests on a stream until one side has enough.
async fn drive<S>(stream: S, door: &Door, mut scarce: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Door { router, options, stop, abandon, .. } = door;
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    // The times of heads are kept here: hyper has one for heads and for idle connections.
    builder.http1().header_read_timeout(None).max_buf_size(BUFFER_BYTES_MAX);
    let limits = Limits { head: options.header_read, idle: options.keep_alive };
    let patience = Patience::new(limits, scarce.clone());
    let service = TowerToHyperService::new(patience.watch_answers(router.clone()));
    let stream = TokioIo::new(patience.watch_reads(stream));
    let mut connection = pin!(builder.serve_connection(stream, service));
    let mut ending = false;
    let ended = loop {
        tokio::select! {
            // What is owed is known after the connection has done what it can.
            biased;
            ended = connection.as_mut() => break ended,
            () = stop.cancelled(), if !ending => {
                ending = true;
                connection.as_mut().graceful_shutdown();
            }
            () = abandon.cancelled(), if ending => return,
            // How long it is waited for is another matter now.
            Ok(()) = scarce.changed() => {}
            ran_out = patience.ended() => match ran_out {
                RanOut::Head => return,
                RanOut::Idle => {
                    patience.end();
                    connection.as_mut().graceful_shutdown();
                }
            },
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error, "a connection of a client ended early");
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::task::JoinHandle;

    use super::*;

    const NEVER: Duration = Duration::from_secs(3_600);
    const SHORT: Duration = Duration::from_millis(50);
    const LONGER: Duration = Duration::from_millis(150);
    const ASK: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    const ANSWER: &str = "answered";

    /// A connection on which `first` has been sent before it is looked at for the first time.
    async fn open(head: Duration, idle: Duration, first: &[u8]) -> (DuplexStream, JoinHandle<()>) {
        open_while(watch::Sender::new(false).subscribe(), head, idle, first).await
    }

    async fn open_while(
        scarce: watch::Receiver<bool>,
        head: Duration,
        idle: Duration,
        first: &[u8],
    ) -> (DuplexStream, JoinHandle<()>) {
        let answer = || async {
            tokio::time::sleep(LONGER).await;
            ANSWER
        };
        let router = Router::new().route("/", get(answer));
        let (ours, mut theirs) = duplex(1 << 16);
        theirs.write_all(first).await.expect("sends");
        let options = HttpOptions {
            connections_max: 1,
            header_read: head,
            keep_alive: idle,
            write_stall: NEVER,
        };
        let never = CancellationToken::new();
        let door = Door {
            router,
            options,
            tls: None,
            places: IntGauge::new("open", "for a test").expect("a gauge"),
            slow_readers_cut: IntCounter::new("cut", "for a test").expect("a counter"),
            stop: never.clone(),
            abandon: never,
        };
        let driven = async move { drive(ours, &door, scarce).await };
        (theirs, tokio::spawn(driven))
    }

    /// Reads one answer, which took longer than [`SHORT`] to make.
    async fn take(theirs: &mut DuplexStream) {
        let mut got = Vec::new();
        while !got.ends_with(ANSWER.as_bytes()) {
            let byte = theirs.read_u8().await.expect("the connection is open");
            got.push(byte);
        }
    }

    #[tokio::test]
    async fn a_connection_is_kept_for_longer_than_a_head_may_take() {
        let (mut theirs, driven) = open(SHORT, NEVER, ASK).await;
        take(&mut theirs).await;
        for _ in 0..2 {
            tokio::time::sleep(LONGER).await;
            theirs.write_all(ASK).await.expect("sends");
            take(&mut theirs).await;
        }
        // A head that has begun has its time, and no more.
        theirs.write_all(&ASK[..9]).await.expect("sends");
        driven.await.expect("no panic");
        assert_eq!(theirs.read(&mut [0; 9]).await.expect("an end"), 0);
    }

    #[tokio::test]
    async fn a_first_head_that_does_not_come_ends_the_connection() {
        let (_theirs, driven) = open(SHORT, NEVER, b"").await;
        driven.await.expect("no panic");
    }

    #[tokio::test]
    async fn an_idle_connection_ends_after_a_time_of_its_own() {
        let (mut theirs, driven) = open(NEVER, SHORT, b"").await;
        // The first head is waited for.
        tokio::time::sleep(LONGER).await;
        theirs.write_all(ASK).await.expect("sends");
        take(&mut theirs).await;
        driven.await.expect("no panic");
        assert_eq!(theirs.read(&mut [0; 9]).await.expect("an end"), 0);
    }

    #[tokio::test]
    async fn an_idle_connection_is_kept_for_less_while_connections_are_scarce() {
        let scarce = watch::Sender::new(false);
        let (mut theirs, driven) = open_while(scarce.subscribe(), SHORT, NEVER, ASK).await;
        take(&mut theirs).await;
        scarce.send_replace(true);
        scarce.send_replace(false);
        tokio::time::sleep(LONGER).await;
        theirs.write_all(ASK).await.expect("it is kept");
        take(&mut theirs).await;
        scarce.send_replace(true);
        driven.await.expect("no panic");
        assert_eq!(theirs.read(&mut [0; 9]).await.expect("an end"), 0);
    }
}
