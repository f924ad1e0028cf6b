//! An engine without a thread of its own. Whoever holds its [`Driver`] gives the worker its turns, beside other
//! work: what the engine was asked for leaves in the next turn, and callbacks run in turns. That saves waking one thread from
//! another at both ends of each transfer, and costs the holder the time that transfers take, copies over `tcp` and
//! `shm` included.
//!
//! ```
//! # use kvasir_transfer::{Completion, Handlers, TransferConfig, TransferEngine};
//! # let config = || TransferConfig { tcp_listen: Some(([127, 0, 0, 1], 0).into()), ..TransferConfig::default() };
//! # let registry = prometheus::Registry::new();
//! let (sender, mut of_sender) = TransferEngine::start_driven(config(), Handlers::default(), &registry)?;
//! # let registry = prometheus::Registry::new();
//! let (receiver, mut of_receiver) = TransferEngine::start_driven(config(), Handlers::default(), &registry)?;
//! let peer = sender.connect(&receiver.endpoint())?;
//! let (done, flag) = Completion::flag();
//! sender.send(peer, b"hello".to_vec(), std::time::Duration::from_secs(5), done)?;
//! while flag.get().is_none() {
//!     of_sender.turn();
//!     of_receiver.turn();
//! }
//! assert_eq!(flag.get(), Some(Ok(())));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use kvasir_transfer_core::WriteError;

use crate::shared::Shared;
use crate::worker::Worker;

/// See the module. Dropped, it ends the engine: what is under way ends with `Cancelled`.
#[derive(Debug)]
pub struct Driver {
    shared: Arc<Shared>,
    /// Until the engine has ended.
    worker: Option<Worker>,
    /// Still set after a turn that a callback has broken off by a panic.
    in_turn: bool,
}

impl Driver {
    pub(crate) fn new(shared: Arc<Shared>, worker: Worker) -> Self {
        Driver { shared, worker: Some(worker), in_turn: false }
    }

    /// Does what there is to do and never waits. Whether there was anything: if so, there may be more.
    /// When the engine's handle was dropped it ends the engine, once; so does a turn after one that a callback has
    /// broken off by a panic.
    pub fn turn(&mut self) -> bool {
        if self.in_turn {
            self.abandon();
        }
        match &mut self.worker {
            Some(worker) if !worker.is_asked_to_stop() => {
                self.in_turn = true;
                let busy = worker.turn();
                self.in_turn = false;
                busy
            }
            Some(_) => {
                self.end();
                true
            }
            None => false,
        }
    }

    /// How long a thread that found nothing to do should look for more before it sleeps, as the engine is
    /// configured.
    pub fn spin(&self) -> Duration {
        Duration::from_micros(self.shared.config.spin_us)
    }

    /// The next turn may be late from now on, until [`Driver::awake`]. Whoever has work for the engine makes
    /// [`Driver::wake_fd`] readable. Before the thread sleeps it asks for [`Driver::patience`].
    pub fn announce_sleep(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.announce_sleep();
        }
    }

    /// How long the thread may sleep at most, once it has announced it and asks for nothing more: `Some(0)` when
    /// there is something to do, `None` when nothing will be before somebody wakes it.
    pub fn patience(&mut self) -> Option<Duration> {
        self.worker.as_mut().and_then(Worker::patience)
    }

    /// Can be read when the engine has something to do; taking a turn is the only answer to it. `None` when the engine has
    /// ended.
    pub fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.worker.as_ref().map(Worker::wake_fd)
    }

    /// The thread is there again, and takes turns.
    pub fn awake(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.awake();
            worker.look_at_once();
        }
    }

    fn end(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        self.shared.ask_to_stop();
        // Callbacks run here too.
        let stopped = catch_unwind(AssertUnwindSafe(|| worker.stop()));
        self.shared.close();
        self.shared.ended(if stopped.is_ok() { Ok(()) } else { Err(WriteError::Cancelled) });
        if let Err(panic) = stopped {
            resume_unwind(panic);
        }
    }

    /// The worker was in the middle of something: what it owns is only let go.
    fn abandon(&mut self) {
        self.in_turn = false;
        if self.worker.take().is_some() {
            self.shared.close();
            self.shared.ended(Err(WriteError::Cancelled));
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        match self.in_turn {
            true => self.abandon(),
            false => self.end(),
        }
    }
}
