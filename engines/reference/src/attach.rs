//! The node's end: the attachment as the scheduler's port, the model over its slots, and the loop
//! that attaches again whenever the node was lost. The model stays loaded.

use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvasir_attach::Link;
use kvasir_attach::{AttachError, AttachOptions, EngineAttachment};
use kvasir_proto::v1;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::Error;
use crate::inbox::Inbox;
use crate::metrics::Metrics;
use crate::model::{
    Cache, CacheSpec, KvDtype, Model, SequenceStep, Splice, SpliceError, StepError, Workspace,
};
use crate::ports::{CachePort, Compute, Exchanged, PortLost};
use crate::routes::RoutedHoles;
use crate::routes::exchange::{Exchange, ExchangeOptions};
use crate::worker::{Attachment, WaitPort};

pub(crate) const BACK_OFF_MIN: Duration = Duration::from_millis(100);
const BACK_OFF_MAX: Duration = Duration::from_secs(2);

/// An attachment as the scheduler sees it.
#[derive(Debug)]
pub(crate) struct NodePort {
    attachment: EngineAttachment,
}

impl From<AttachError> for PortLost {
    fn from(error: AttachError) -> Self {
        PortLost(error.to_string())
    }
}

impl CachePort for NodePort {
    fn send(&mut self, message: v1::engine_to_node::Message) -> Result<(), PortLost> {
        Ok(self.attachment.send(message)?)
    }

    fn try_recv(&mut self) -> Result<Option<v1::node_to_engine::Message>, PortLost> {
        Ok(self.attachment.try_recv()?)
    }

    fn progress(&self, step: u32, layers_done: u16) {
        self.attachment.progress(step, layers_done);
    }

    fn publish_load(&self, load: &v1::InstanceLoad) {
        self.attachment.publish_load(load);
    }

    fn is_connected(&self) -> bool {
        self.attachment.is_connected()
    }

    fn slots_total(&self) -> u32 {
        self.attachment.slots_total()
    }
}

impl WaitPort for NodePort {
    fn wait(&mut self, timeout: Duration) -> Result<(), PortLost> {
        Ok(self.attachment.wait(timeout)?)
    }
}

/// The model over one attachment's slots.
#[derive(Debug)]
pub(crate) struct ModelCompute {
    model: Arc<Model>,
    workspace: Workspace,
    cache: Cache,
    exchange: ExchangeOptions,
    step: u32,
    failed: Vec<usize>,
    exchanged: Exchanged,
    /// Keeps the slots mapped, and the attachment alive, for as long as the cache points to them.
    _link: Arc<Link>,
}

impl ModelCompute {
    fn new(
        model: Arc<Model>,
        link: Arc<Link>,
        layout: ModelLayout,
        exchange: ExchangeOptions,
    ) -> Self {
        let slots = link.slot_memory();
        let base = NonNull::new(slots.as_ptr()).expect("mapped memory is not at address 0");
        let spec = CacheSpec {
            base,
            len_bytes: slots.len(),
            layout: model.config().layout(layout.block_tokens, layout.kv_dtype),
            dtype: layout.kv_dtype,
        };
        // The scheduler names only slots that the node has bound to this engine, and writes only rows
        // behind the cached ones; the node reads a row only after the progress word said that it is
        // there.
        // SAFETY: the mapping starts on a page, is `len` bytes long and lives as long as `_link`,
        // which is dropped with the cache; nobody else uses the rows that it uses, see above.
        let cache = unsafe { Cache::new(spec) };
        let workspace = Workspace::default();
        ModelCompute {
            model,
            workspace,
            cache,
            exchange,
            step: 0,
            failed: Vec::new(),
            exchanged: Exchanged::default(),
            _link: link,
        }
    }
}

impl Compute for ModelCompute {
    fn forward(
        &mut self,
        batch: &[SequenceStep<'_>],
        routed: &[Option<&RoutedHoles>],
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Vec<&[f32]>, StepError> {
        let ModelCompute { model, workspace, cache, exchange, step, failed, exchanged, .. } = self;
        *step = step.wrapping_add(1);
        let mut elsewhere = Exchange::new(*exchange, *step, routed);
        let logits = model.forward_with(workspace, cache, batch, &mut elsewhere, on_layer)?;
        *exchanged = elsewhere.exchanged();
        *failed = elsewhere.failed();
        Ok(logits.rows().collect())
    }

    fn failed(&self) -> &[usize] {
        &self.failed
    }

    fn fill(&mut self, splice: &Splice<'_>) -> Result<(), SpliceError> {
        self.model.fill(&mut self.cache, splice)
    }

    fn exchanged(&self) -> Exchanged {
        self.exchanged
    }
}

/// How the model's cache lies in slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModelLayout {
    pub block_tokens: u32,
    pub kv_dtype: KvDtype,
}

/// What the compute thread is given.
pub(crate) type NodeAttachment = Attachment<NodePort, ModelCompute>;

/// Attaches, and attaches again whenever the node was lost.
#[derive(Debug)]
pub(crate) struct AttachLoop {
    pub options: AttachOptions,
    pub model: Arc<Model>,
    pub layout: ModelLayout,
    pub exchange: ExchangeOptions,
    pub inbox: Arc<Inbox<NodeAttachment>>,
    pub lost: mpsc::Receiver<PortLost>,
    pub metrics: Metrics,
}

impl AttachLoop {
    /// Runs until `shutdown`, or until the compute thread has ended.
    ///
    /// # Errors
    /// [`Error::Refused`].
    pub(crate) async fn run(mut self, shutdown: CancellationToken) -> Result<(), Error> {
        loop {
            let Some(attachment) = shutdown.run_until_cancelled(self.connect()).await else {
                return Ok(());
            };
            self.hand_over(attachment?);
            let lost = match shutdown.run_until_cancelled(self.lost.recv()).await {
                Some(Some(lost)) => lost,
                Some(None) | None => return Ok(()),
            };
            self.metrics.attach_epoch.set(0);
            tracing::warn!(reason = %lost, "the engine lost its store node; reattaching");
        }
    }

    /// Tries until a node takes it. Each new reason is logged once.
    ///
    /// # Errors
    /// [`Error::Refused`] when it would be refused again.
    async fn connect(&self) -> Result<EngineAttachment, Error> {
        let mut back_off = BACK_OFF_MIN;
        let mut said = String::new();
        loop {
            let why = match EngineAttachment::connect(self.options.clone()).await {
                Ok(attachment) => return Ok(attachment),
                Err(AttachError::Refused(why)) => return Err(Error::Refused(why)),
                Err(why) => why.to_string(),
            };
            if why != said {
                tracing::warn!(
                    reason = why,
                    "the engine cannot attach to a store node yet; retrying"
                );
                said = why;
            }
            tokio::time::sleep(back_off).await;
            back_off = (back_off * 2).min(BACK_OFF_MAX);
        }
    }

    fn hand_over(&self, attachment: EngineAttachment) {
        let link = Arc::clone(attachment.link());
        let epoch = attachment.epoch();
        self.metrics.attach_epoch.set(epoch.into());
        self.metrics.attaches.inc();
        let instance_id = self.options.instance_id.as_str();
        tracing::info!(
            instance_id,
            epoch,
            slots = link.slots_total(),
            "the engine attached to its store node"
        );
        let waker = Arc::downgrade(&link);
        let compute = ModelCompute::new(Arc::clone(&self.model), link, self.layout, self.exchange);
        let attachment = Attachment { port: NodePort { attachment }, compute };
        self.inbox.attach(attachment, Box::new(move || wake(&waker)));
    }
}

fn wake(link: &Weak<Link>) {
    if let Some(link) = link.upgrade() {
        link.wake();
    }
}
