//! Messages as they are received: each lies in one of a bounded number of buffers, which go round. A
//! buffer is with the application while it holds the [`Message`], and is used for the next one when it
//! lets go.
//!
//! While all buffers are with the application, messages are refused: their senders are told
//! `Refused(NoRoom)`, and may try again. Writes go on meanwhile, which back pressure on a connection would
//! not let them. A message that is longer than a buffer is refused with `TooLong`. What a sender was told
//! `Ok` of was given, or is about to be given, to the receiver's handler.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvasir_mutation::{Mutation, mutated};

/// No engine has larger buffers.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// A message that was received. It keeps a buffer from going round as long as it lives.
pub struct Message {
    bytes: Vec<u8>,
    home: Arc<Pool>,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message").field("bytes", &self.bytes.len()).finish_non_exhaustive()
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.bytes);
        buffer.clear();
        self.home.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        // Last: whoever sees that there is a buffer finds it.
        self.home.lent.fetch_sub(1, Ordering::Release);
    }
}

#[derive(Debug)]
struct Pool {
    /// Of those that are not with the application; no more than there are buffers.
    free: Mutex<Vec<Vec<u8>>>,
    lent: AtomicUsize,
    buffers: usize,
}

/// The buffers of one engine. They are made on first use.
#[derive(Debug)]
pub(crate) struct Messages(Arc<Pool>);

impl Messages {
    pub(crate) fn new(buffers: usize) -> Self {
        Messages(Arc::new(Pool { free: Mutex::default(), lent: AtomicUsize::new(0), buffers }))
    }

    /// Buffers that are with the application, or on their way there.
    pub(crate) fn lent(&self) -> usize {
        self.0.lent.load(Ordering::Acquire)
    }

    pub(crate) fn is_exhausted(&self) -> bool {
        self.lent() >= self.0.buffers
    }

    /// Makes a message of what was received, and leaves an empty buffer in its place. `None` while all
    /// are with the application. Only the worker lends.
    pub(crate) fn lend(&self, received: &mut Vec<u8>) -> Option<Message> {
        if self.is_exhausted() && !mutated(Mutation::MessageBuffersUnbounded) {
            return None;
        }
        self.0.lent.fetch_add(1, Ordering::Relaxed);
        let next = self.0.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let bytes = std::mem::replace(received, next.unwrap_or_default());
        Some(Message { bytes, home: Arc::clone(&self.0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_go_round_and_are_never_more_than_there_are() {
        let messages = Messages::new(2);
        let lend = |text: &str| {
            let mut received = text.as_bytes().to_vec();
            let lent = messages.lend(&mut received);
            (lent, received)
        };
        let (first, _) = lend("first");
        let (second, _) = lend("second");
        let (none, received) = lend("third");
        assert!(none.is_none() && messages.is_exhausted());
        assert_eq!(received, b"third", "it is still the caller's");
        assert_eq!(&*first.expect("two"), b"first", "and is let go");
        assert_eq!(messages.lent(), 1);
        let (third, received) = lend("third");
        assert!(received.is_empty() && received.capacity() >= 5, "the first one's buffer");
        drop(messages);
        assert_eq!(&*third.expect("room"), b"third", "messages outlive their engine");
        assert_eq!(&*second.expect("two"), b"second");
    }
}
