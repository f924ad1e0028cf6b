//! What the caller of `Generate` hears. The compute thread never waits for a slow caller: the queue
//! has room for every event that the request can cause, which its token limit bounds.

#![forbid(unsafe_code)]

use kvasir_proto::v1::{self, generate_event::Event};
use tokio::sync::mpsc;
use tonic::Status;

/// Accepted, and Finished or an error.
const OTHER_EVENTS: usize = 2;

pub(crate) type EventResult = Result<v1::GenerateEvent, Status>;

/// The sending end, for the compute thread.
#[derive(Debug)]
pub(crate) struct EventSink {
    events: mpsc::Sender<EventResult>,
}

/// A queue for a request of at most so many tokens. Its blocks are allocated as they are used.
pub(crate) fn channel(tokens_max: u32) -> (EventSink, mpsc::Receiver<EventResult>) {
    let (events, receiver) = mpsc::channel(tokens_max as usize + OTHER_EVENTS);
    (EventSink { events }, receiver)
}

impl EventSink {
    pub(crate) fn send(&self, event: Event) {
        self.give(Ok(v1::GenerateEvent { event: Some(event) }));
    }

    pub(crate) fn fail(&self, status: Status) {
        self.give(Err(status));
    }

    /// The caller has gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    fn give(&self, event: EventResult) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.events.try_send(event) {
            unreachable!("a request causes no more events than its queue has room for");
        }
    }
}
