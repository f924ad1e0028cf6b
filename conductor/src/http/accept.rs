//! The listening socket: one task for each connection, at most `connections_max` of them.
//!
//! While all are in use nobody is accepted and new ones wait in the kernel's listen queue. HTTP/1.1
//! only: one response at a time on a connection, so that a client that reads nothing can be told
//! by its socket alone.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::stall::StallGuard;
use crate::metrics::Metrics;

/// Bounds of connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HttpOptions {
    pub connections_max: usize,
    pub header_read: Duration,
    pub write_stall: Duration,
}

/// Bytes that hyper buffers for one connection, request head included.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// After a failed accept (no file descriptors left), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts until `stop`; then lets connections end when their response has, until `abandon`.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    options: HttpOptions,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    abandon: CancellationToken,
) {
    let permits = Arc::new(Semaphore::new(options.connections_max));
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &permits) => accepted,
            () = stop.cancelled() => break,
        };
        let Some((stream, permit)) = accepted else { continue };
        metrics.connections.inc();
        let task = connection(
            stream,
            router.clone(),
            options,
            Arc::clone(&metrics),
            stop.clone(),
            abandon.clone(),
        );
        let metrics = Arc::clone(&metrics);
        connections.spawn(async move {
            task.await;
            metrics.connections.dec();
            drop(permit);
        });
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = Arc::clone(permits).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Chunks of a stream are small and each is waited for.
            let _ = stream.set_nodelay(true);
            Some((stream, permit))
        }
        Err(error) => {
            tracing::warn!(%error, "cannot accept a connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

async fn connection(
    stream: TcpStream,
    router: Router,
    options: HttpOptions,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    abandon: CancellationToken,
) {
    let guarded = StallGuard::new(stream, options.write_stall, metrics.slow_readers_cut.clone());
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(options.header_read)
        .max_buf_size(BUFFER_BYTES_MAX);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection(TokioIo::new(guarded), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection => ended,
                () = abandon.cancelled() => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error, "a connection ended early");
    }
}
