//! What every request gets: an id, a span that carries it, a line in the counters.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use rand::Rng;
use tracing::Instrument;

use super::trace::Trace;
use crate::metrics::Metrics;

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
const ID_BYTES_MAX: usize = 128;

/// The id of one request: the client's own when it is fit to be logged, else a new one.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub Arc<str>);

/// Middleware around all routes.
pub(super) async fn identify(
    State(metrics): State<Arc<Metrics>>,
    mut request: Request,
    next: Next,
) -> Response {
    let RequestId(id) =
        RequestId::of(request.headers().get(&HEADER).and_then(|id| id.to_str().ok()));
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map_or_else(|| "other".to_owned(), |path| path.as_str().to_owned());
    request.extensions_mut().insert(RequestId(Arc::clone(&id)));
    let span = tracing::info_span!("request", id = &*id, path, trace = tracing::field::Empty);
    if let Some(trace) = Trace::of(request.headers()) {
        span.record("trace", trace.id());
        request.extensions_mut().insert(trace);
    }
    let mut response = next.run(request).instrument(span).await;
    metrics.requests.with_label_values(&[path.as_str(), response.status().as_str()]).inc();
    let header = HeaderValue::from_str(&id).expect("ids are visible ASCII");
    response.headers_mut().insert(HEADER, header);
    response
}

impl RequestId {
    /// What the client calls its request, if it does.
    pub(crate) fn of(given: Option<&str>) -> RequestId {
        let fit = |text: &&str| {
            let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
            visible && !text.is_empty() && text.len() <= ID_BYTES_MAX
        };
        let new = || format!("{:032x}", rand::rng().random::<u128>()).into();
        RequestId(given.filter(fit).map_or_else(new, Arc::from))
    }
}
