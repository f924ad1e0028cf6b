//! The calls to the engines. Dropping a leg cancels it there.

use futures::future::BoxFuture;
use kvasir_proto::v1::{self, generate_event::Event};
use tonic::{Request, Response, Status, Streaming};

use crate::cluster::EngineTarget;
use crate::http::Trace;

type Opening = BoxFuture<'static, Result<Response<Streaming<v1::GenerateEvent>>, Status>>;

/// One `Generate` call, opened when it is first asked for an event.
pub(super) struct Leg {
    state: LegState,
}

enum LegState {
    Opening(Opening),
    Open(Box<Streaming<v1::GenerateEvent>>),
}

impl Leg {
    /// `trace` goes with the call, so that the engine's part of a trace is found.
    pub(super) fn new(
        target: &EngineTarget,
        request: v1::GenerateRequest,
        trace: Option<&Trace>,
    ) -> Leg {
        let mut client = target.engine.clone();
        let mut request = Request::new(request);
        // A span's name is always fit for a header.
        if let Some(Ok(parent)) = trace.map(|trace| trace.child().parse()) {
            request.metadata_mut().insert("traceparent", parent);
        }
        let opening = Box::pin(async move { client.generate(request).await });
        Leg { state: LegState::Opening(opening) }
    }

    /// The next event. A stream that ends without `Finished` has failed. Nothing is lost when the
    /// future is dropped before it is ready.
    pub(super) async fn next(&mut self) -> Result<Event, Status> {
        if let LegState::Opening(opening) = &mut self.state {
            self.state = LegState::Open(Box::new(opening.await?.into_inner()));
        }
        let LegState::Open(stream) = &mut self.state else {
            return Err(Status::internal("the engine's stream was used after it failed"));
        };
        loop {
            match stream.message().await? {
                // An event of a later version.
                Some(v1::GenerateEvent { event: None }) => {}
                Some(v1::GenerateEvent { event: Some(event) }) => return Ok(event),
                None => {
                    return Err(Status::unavailable("the engine's stream ended without a result"));
                }
            }
        }
    }
}

/// Runs a prefill leg to its end. `accepted` is called as soon as the engine has accepted it, with the tokens
/// that were cached.
pub(super) async fn prefill(mut leg: Leg, accepted: impl Fn(u32)) -> Result<v1::Finished, Status> {
    loop {
        match leg.next().await? {
            Event::Accepted(event) => accepted(event.cached_tokens),
            Event::Finished(finished) => return Ok(finished),
            // The decode side tells them.
            Event::Tokens(_) => {}
        }
    }
}
