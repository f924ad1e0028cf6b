//! From the tasks of the choices to the response: one bounded channel for all choices of a request.
//! A response that is not read fills it, and then the tasks wait, and with them the engines'
//! streams. A response that is dropped closes it, and then the tasks cancel.

use std::time::Duration;

use tokio::sync::mpsc;

use super::job::Progress;
use super::{Ended, Failure};

/// Pieces that wait for the response, for each choice.
const PIECES_MAX: usize = 16;

/// Something happened to one choice.
#[derive(Debug)]
pub(crate) struct Output {
    pub choice: u32,
    pub progress: Progress,
}

/// The response's end.
#[derive(Debug)]
pub(crate) struct Outputs {
    receiver: mpsc::Receiver<Output>,
    choices: usize,
}

impl Outputs {
    pub(crate) fn choices(&self) -> usize {
        self.choices
    }

    /// `None` when all tasks are gone.
    pub(crate) async fn next(&mut self) -> Option<Output> {
        self.receiver.recv().await
    }

    /// What is there already.
    pub(crate) fn try_next(&mut self) -> Option<Output> {
        self.receiver.try_recv().ok()
    }
}

/// One task's end.
#[derive(Debug)]
pub(super) struct Outlet {
    sender: mpsc::Sender<Output>,
    choice: u32,
}

pub(super) fn channel(choices: usize) -> (Vec<Outlet>, Outputs) {
    let (sender, receiver) = mpsc::channel(choices.max(1) * PIECES_MAX);
    let outlet = |choice| Outlet { sender: sender.clone(), choice };
    let outlets = (0..).take(choices).map(outlet).collect();
    (outlets, Outputs { receiver, choices })
}

impl Outlet {
    pub(super) async fn placed(&self, why: String) -> Result<(), Failure> {
        self.send(Progress::Placed(why)).await
    }

    /// Waits while the channel is full.
    pub(super) async fn tokens(&self, tokens: kvasir_proto::v1::Tokens) -> Result<(), Failure> {
        self.send(Progress::Tokens(tokens)).await
    }

    pub(super) async fn begins_anew(&self) -> Result<(), Failure> {
        self.send(Progress::Anew).await
    }

    pub(super) async fn ended(&self, text: String, ended: Ended) -> Result<(), Failure> {
        self.send(Progress::Ended { text, ended }).await
    }

    /// The last word of a choice that failed; not waited for beyond the limit, because nothing
    /// but the error depends on it any more.
    pub(super) async fn failed(&self, failure: Failure, limit: Duration) {
        let output = Output { choice: self.choice, progress: Progress::Failed(failure) };
        if self.sender.send_timeout(output, limit).await.is_err() {
            tracing::debug!("a client disconnected before it received the error");
        }
    }

    /// Returns when the response has been dropped.
    pub(super) async fn closed(&self) {
        self.sender.closed().await;
    }

    async fn send(&self, progress: Progress) -> Result<(), Failure> {
        let output = Output { choice: self.choice, progress };
        self.sender.send(output).await.map_err(|_| Failure::ClientGone)
    }
}
