//! The `Engine` service: checks a request, admits it and streams what the compute thread says.

#![forbid(unsafe_code)]

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use kvasir_proto::refusal::{REFUSAL, UNROUTED};
use kvasir_proto::v1;
use kvasir_proto::v1::engine_server::Engine;
use tokio::sync::mpsc;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status};

use crate::events::{self, EventResult};
use crate::inbox::Inbox;
use crate::request::Limits;
use crate::routes::{RoutedHoles, Router};
use crate::scheduler::sequence::Leg;
use crate::scheduler::{CheckedRequest, Job, Shared};

/// How long a call waits for an attachment that is being made.
const ATTACH_PATIENCE: Duration = Duration::from_secs(1);

/// See the module. `A` is an attachment, of which the service knows nothing.
#[derive(Debug)]
pub(crate) struct EngineService<A> {
    pub limits: Limits,
    pub shared: Shared,
    pub inbox: Arc<Inbox<A>>,
    /// Asks holders; none in tests of the service alone.
    pub router: Option<Arc<Router>>,
}

#[tonic::async_trait]
impl<A: Send + 'static> Engine for EngineService<A> {
    type GenerateStream = GenerateStream<A>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        self.inbox.wait_attached(ATTACH_PATIENCE).await;
        let mut admitted = self.admit(request.into_inner())?;
        admitted.job.places = admitted.job.request.places(self.limits.block_tokens);
        admitted.job.routed = self.open_routes(&mut admitted.job.request).await?;
        self.hand_over(admitted).map(Response::new)
    }
}

impl<A> EngineService<A> {
    fn refused(&self, reason: &str) {
        self.shared.metrics.requests_refused.with_label_values(&[reason]).inc();
    }

    fn admit(&self, request: v1::GenerateRequest) -> Result<LetIn, Status> {
        let received_us = self.shared.clock.now_us();
        let request = self.limits.check(request).inspect_err(|_| self.refused("invalid"))?;
        let prompt_tokens = match request.leg {
            Leg::Decode => 0,
            Leg::Prefill | Leg::Whole => request.prompt.len() as u32,
        };
        let Some(admitted) = self.shared.admission.try_admit(prompt_tokens) else {
            self.refused("full");
            return Err(Status::resource_exhausted("the engine has reached its request limit"));
        };
        let (sink, events) = events::channel(request.answer.max_tokens);
        let (routed, places) = (None, Vec::new());
        let job = Job { request, events: sink, admitted, received_us, routed, places };
        Ok(LetIn { job, events })
    }

    /// Asks holders for what the request attends elsewhere.
    async fn open_routes(
        &self,
        request: &mut CheckedRequest,
    ) -> Result<Option<RoutedHoles>, Status> {
        let wanted = request.take_routed();
        let (Some(namespace), false) = (request.namespace, wanted.is_empty()) else {
            return Ok(None);
        };
        let opened = match &self.router {
            Some(router) => router.open(namespace, wanted).await,
            None => Err(Status::failed_precondition("this engine does not route queries")),
        };
        opened.map(Some).map_err(|mut status| {
            self.refused("unrouted");
            status.metadata_mut().insert(REFUSAL, MetadataValue::from_static(UNROUTED));
            status
        })
    }

    fn hand_over(&self, admitted: LetIn) -> Result<GenerateStream<A>, Status> {
        let LetIn { job, events } = admitted;
        if self.inbox.put(job).is_err() {
            self.refused("unattached");
            return Err(Status::unavailable("the engine is not attached to a store node"));
        }
        Ok(GenerateStream { events, inbox: Arc::clone(&self.inbox) })
    }
}

/// A request that was let in, and what its caller hears.
#[derive(Debug)]
struct LetIn {
    job: Job,
    events: mpsc::Receiver<EventResult>,
}

/// The events of one call. Dropping it cancels the request.
#[derive(Debug)]
pub(crate) struct GenerateStream<A> {
    events: mpsc::Receiver<EventResult>,
    inbox: Arc<Inbox<A>>,
}

impl<A> Stream for GenerateStream<A> {
    type Item = EventResult;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<EventResult>> {
        self.events.poll_recv(context)
    }
}

impl<A> Drop for GenerateStream<A> {
    fn drop(&mut self) {
        // A call that has ended needs no cancelling.
        let cancels = !self.events.is_closed() || !self.events.is_empty();
        self.events.close();
        if cancels {
            self.inbox.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use prometheus::Registry;
    use tonic::Code;

    use super::*;
    use crate::admission::Admission;
    use crate::config::Role;
    use crate::fakes::{VOCAB, vocabulary};
    use crate::metrics::Metrics;
    use crate::ports::Clock;

    /// A service of one request at most, and how often its compute thread was woken.
    fn service() -> (EngineService<()>, Arc<AtomicU32>) {
        let limits = Limits {
            role: Role::Both,
            vocab: VOCAB,
            context_tokens: 64,
            end_tokens: Vec::new(),
            block_tokens: 8,
            selects: false,
        };
        let shared = Shared {
            vocabulary: vocabulary(),
            admission: Arc::new(Admission::new(1)),
            metrics: Metrics::new(&Registry::new()),
            clock: Clock::new(|| 1),
            layer_log: None,
        };
        let woken = Arc::new(AtomicU32::new(0));
        let inbox = Arc::new(Inbox::default());
        let wakes = Arc::clone(&woken);
        inbox.attach(
            (),
            Box::new(move || {
                wakes.fetch_add(1, Ordering::Relaxed);
            }),
        );
        (EngineService { limits, shared, inbox, router: None }, woken)
    }

    fn request() -> v1::GenerateRequest {
        v1::GenerateRequest {
            tx: Some(v1::TxId { conductor_incarnation: 1, serial: 2 }),
            phase: v1::Phase::Prefill.into(),
            prompt: vec![5; 20],
            sampling: Some(v1::SamplingParams {
                top_p: 1.0,
                max_tokens: 8,
                ..v1::SamplingParams::default()
            }),
            ..v1::GenerateRequest::default()
        }
    }

    fn call(service: &EngineService<()>) -> Result<GenerateStream<()>, Status> {
        service.admit(request()).and_then(|admitted| service.hand_over(admitted))
    }

    #[test]
    fn a_dropped_call_closes_its_job_and_wakes_the_compute_thread() {
        let (service, woken) = service();
        let stream = call(&service).expect("room");
        let job = service.inbox.take_job().expect("a job");
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        assert!(!job.events.is_closed());
        drop(stream);
        assert!(job.events.is_closed());
        assert_eq!(woken.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_call_that_has_ended_wakes_nobody() {
        let (service, woken) = service();
        let stream = call(&service).expect("room");
        drop(service.inbox.take_job());
        drop(stream);
        assert_eq!(woken.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_full_engine_says_so_until_a_request_has_ended() {
        let (service, _) = service();
        let _stream = call(&service).expect("room");
        let refused = call(&service).expect_err("full");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        drop(service.inbox.take_job());
        assert!(call(&service).is_ok());
    }
}
