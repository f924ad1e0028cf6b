//! What the scheduler needs of a node and of a model, so that it can be tested without either.

#![forbid(unsafe_code)]

use std::sync::Arc;

use kvasir_proto::v1;

use crate::model::{SequenceStep, Splice, SpliceError, StepError};
use crate::routes::RoutedHoles;

/// The attachment is of no use any more: everything bound through it is void.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PortLost(pub String);

/// The node, as attached once. Dropped when it is lost; another attach is another port.
pub(crate) trait CachePort {
    /// # Errors
    /// [`PortLost`] when the node is gone or takes no more.
    fn send(&mut self, message: v1::engine_to_node::Message) -> Result<(), PortLost>;

    /// # Errors
    /// [`PortLost`] when the node broke the protocol.
    fn try_recv(&mut self) -> Result<Option<v1::node_to_engine::Message>, PortLost>;

    /// Says that the rows of the first `layers_done` layers of `step` are written.
    fn progress(&self, step: u32, layers_done: u16);

    fn publish_load(&self, load: &v1::InstanceLoad);

    /// False once the node is gone or has detached this engine. A system call: ask now and then.
    fn is_connected(&self) -> bool;

    /// Slots are numbered below this.
    fn slots_total(&self) -> u32;
}

/// The model over the node's slot memory.
pub(crate) trait Compute {
    /// Computes a step; see [`crate::model::Model::forward`]. Answers the logits of the sequences
    /// that wanted them, in batch order. `routed` says for each sequence who attends what is elsewhere.
    ///
    /// # Errors
    /// [`StepError`] before anything was written.
    fn forward(
        &mut self,
        batch: &[SequenceStep<'_>],
        routed: &[Option<&RoutedHoles>],
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Vec<&[f32]>, StepError>;

    /// Sequences of the last batch that lacked something from elsewhere: their logits mean nothing, and the
    /// rows that they wrote neither.
    fn failed(&self) -> &[usize] {
        &[]
    }

    /// Fills a hole of a sequence; see [`crate::model::Model::fill`].
    ///
    /// # Errors
    /// [`SpliceError`] before anything was written.
    fn fill(&mut self, splice: &Splice<'_>) -> Result<(), SpliceError>;

    /// Of the last batch.
    fn exchanged(&self) -> Exchanged {
        Exchanged::default()
    }
}

/// What was attended elsewhere too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Exchanged {
    pub layers: u32,
    /// From sending queries to having all that came back.
    pub us: u64,
    /// Tokens that asked, each in every layer in which it did; none under selection.
    pub queries: u64,
}

impl std::ops::AddAssign for Exchanged {
    fn add_assign(&mut self, more: Exchanged) {
        self.layers += more.layers;
        self.us += more.us;
        self.queries += more.queries;
    }
}

/// Monotonic time in microseconds, handed in so that tests decide what time it is.
#[derive(Clone)]
pub(crate) struct Clock(Arc<dyn Fn() -> u64 + Send + Sync>);

impl Clock {
    pub(crate) fn new(now_us: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Clock(Arc::new(now_us))
    }

    /// CLOCK_MONOTONIC, which is the same in all processes of a host.
    pub(crate) fn monotonic() -> Self {
        Clock::new(|| {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            // Neither part is negative on this clock.
            now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
        })
    }

    pub(crate) fn now_us(&self) -> u64 {
        (self.0)()
    }
}

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Clock")
    }
}
