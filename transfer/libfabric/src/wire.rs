//! What a user of an endpoint sees of it, so that something can stand between the two:
//! [`Shuffled`](crate::shuffle::Shuffled) in tests, nothing in production.

use crate::completion::Completion;
use crate::endpoint::{Endpoint, Inject, Message, Read, Receive, Write};
use crate::error::{PostError, QueueError};

/// Posts operations and tells of completions. Nothing is ordered.
pub trait Wire {
    /// See [`Endpoint::write`].
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    fn write(&mut self, write: &Write) -> Result<(), PostError>;

    /// See [`Endpoint::inject`].
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    fn inject(&mut self, inject: &Inject<'_>) -> Result<(), PostError>;

    /// See [`Endpoint::read`].
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    fn read(&mut self, read: &Read) -> Result<(), PostError>;

    /// See [`Endpoint::send`].
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    fn send(&mut self, message: &Message) -> Result<(), PostError>;

    /// See [`Endpoint::receive`].
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    fn receive(&mut self, receive: &Receive) -> Result<(), PostError>;

    /// See [`CompletionQueue::poll`](crate::queue::CompletionQueue::poll).
    ///
    /// # Errors
    /// [`QueueError`] when the queue itself failed.
    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> Result<usize, QueueError>;

    /// See [`CompletionQueue::may_sleep`](crate::queue::CompletionQueue::may_sleep).
    ///
    /// # Errors
    /// [`QueueError`] when the queue itself failed.
    fn may_sleep(&mut self) -> Result<bool, QueueError>;
}

impl Wire for Endpoint {
    fn write(&mut self, write: &Write) -> Result<(), PostError> {
        Endpoint::write(self, write)
    }

    fn inject(&mut self, inject: &Inject<'_>) -> Result<(), PostError> {
        Endpoint::inject(self, inject)
    }

    fn read(&mut self, read: &Read) -> Result<(), PostError> {
        Endpoint::read(self, read)
    }

    fn send(&mut self, message: &Message) -> Result<(), PostError> {
        Endpoint::send(self, message)
    }

    fn receive(&mut self, receive: &Receive) -> Result<(), PostError> {
        Endpoint::receive(self, receive)
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> Result<usize, QueueError> {
        self.queue().poll(out, max)
    }

    fn may_sleep(&mut self) -> Result<bool, QueueError> {
        self.queue().may_sleep()
    }
}
