//! Reads a request body within its limits: bytes of one, bytes of all together, and time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::openai::ApiError;

/// What is left of a body that is too large is read and dropped, so that the client sees the
/// answer and not a broken connection; but no more of it than this.
const DISCARD_BYTES_MAX: u64 = 64 << 20;
const DISCARD_TIME_MAX: Duration = Duration::from_secs(10);
/// What one permit stands for.
const PERMIT_BYTES: usize = 1024;

/// The bounds, shared by all requests.
#[derive(Debug, Clone)]
pub(crate) struct Bodies {
    one_bytes_max: usize,
    read_within: Duration,
    all: Arc<Semaphore>,
    all_permits: usize,
}

impl Bodies {
    pub(crate) fn new(one_bytes_max: usize, all_bytes_max: usize, read_within: Duration) -> Bodies {
        let permits = (all_bytes_max / PERMIT_BYTES).clamp(1, Semaphore::MAX_PERMITS);
        let all = Arc::new(Semaphore::new(permits));
        Bodies { one_bytes_max, read_within, all, all_permits: permits }
    }

    /// Bytes of all bodies that are held.
    pub(crate) fn held_bytes(&self) -> usize {
        (self.all_permits - self.all.available_permits().min(self.all_permits)) * PERMIT_BYTES
    }

    /// The whole body. The permits are for as long as its bytes are kept.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<(Bytes, Option<OwnedSemaphorePermit>), ApiError> {
        let mut stream = body.into_data_stream();
        let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok());
        let announced = announced.and_then(|text| text.parse::<usize>().ok());
        if announced.is_some_and(|bytes| bytes > self.one_bytes_max) {
            self.discard(&mut stream).await;
            return Err(self.too_large());
        }
        let deadline = Instant::now() + self.read_within;
        let mut bytes = BytesMut::with_capacity(announced.unwrap_or(0).min(PERMIT_BYTES));
        let mut permits: Option<OwnedSemaphorePermit> = None;
        loop {
            let piece = match tokio::time::timeout_at(deadline, stream.next()).await {
                Ok(None) => return Ok((bytes.freeze(), permits)),
                Ok(Some(Ok(piece))) => piece,
                Ok(Some(Err(error))) => {
                    let message = format!("Cannot read the request body: {error}.");
                    return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", message));
                }
                Err(_) => {
                    let message = "The body did not arrive in time.";
                    let status = StatusCode::REQUEST_TIMEOUT;
                    return Err(ApiError::new(status, "body_timeout", message));
                }
            };
            if bytes.len() + piece.len() > self.one_bytes_max {
                drop((bytes, permits));
                self.discard(&mut stream).await;
                return Err(self.too_large());
            }
            let have = permits.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
            let want = (bytes.len() + piece.len()).div_ceil(PERMIT_BYTES);
            if want > have {
                let more = u32::try_from(want - have).unwrap_or(u32::MAX);
                let more = Arc::clone(&self.all).try_acquire_many_owned(more).map_err(|_| {
                    let message = "Too many request bodies are being read; try again.";
                    ApiError { code: "overloaded", ..ApiError::unavailable(message) }
                })?;
                match &mut permits {
                    Some(permits) => permits.merge(more),
                    None => permits = Some(more),
                }
            }
            bytes.extend_from_slice(&piece);
        }
    }

    /// Refuses a request whose body nobody wants: like one that is too large, it is read and dropped.
    pub(crate) async fn refuse(&self, body: Body, error: ApiError) -> ApiError {
        self.discard(&mut body.into_data_stream()).await;
        error
    }

    fn too_large(&self) -> ApiError {
        let message = format!("The body may have at most {} bytes.", self.one_bytes_max);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    }

    async fn discard(&self, stream: &mut axum::body::BodyDataStream) {
        let drain = async {
            let mut bytes = 0;
            while let Some(Ok(piece)) = stream.next().await {
                bytes += piece.len() as u64;
                if bytes > DISCARD_BYTES_MAX {
                    break;
                }
            }
        };
        // Too slow or too much: then the connection breaks.
        let _ = tokio::time::timeout(self.read_within.min(DISCARD_TIME_MAX), drain).await;
    }
}
