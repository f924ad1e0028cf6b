//! Requests and their answers over one line, for any number of threads.
//!
//! Each caller waits for its own answer. One of them at a time, the one that has the receiver, takes
//! answers off the ring, its own and those of others, and hands the receiver on when it has its own.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use kvasir_attach::line::{LineReceiver, LineSender};
use kvasir_proto::v1;
use kvasir_transfer::spin::Spin;
use prost::Message;
use v1::client_to_node::Message as ToNode;
use v1::node_to_client::Message as FromNode;

use crate::error::Error;

/// A thread that waits for another one's receiving looks again after so long.
const HANDED_ON: Duration = Duration::from_millis(5);
/// On a host with so few cores a caller that polls keeps one of them from the nodes that bring it what it waits for.
const FEW_CORES: usize = 4;
/// How long one sleep of the receiving thread takes at most.
const SLEEP: Duration = Duration::from_millis(500);

/// See the module.
#[derive(Debug)]
pub(crate) struct Calls {
    sender: Mutex<Sending>,
    receiver: Mutex<LineReceiver>,
    /// Answers that another thread has taken off the ring.
    answers: Mutex<HashMap<u64, FromNode>>,
    arrived: Condvar,
    next_request: AtomicU64,
    polling: Duration,
    /// For what comes from another node.
    polling_far: Duration,
}

#[derive(Debug)]
struct Sending {
    line: LineSender,
    record: Vec<u8>,
    /// What is not answered and found no room: it is sent before whatever comes next. Of each get there is one.
    unsent: VecDeque<ToNode>,
}

impl Sending {
    fn send(&mut self, request: u64, message: ToNode) -> Result<(), Error> {
        let message = v1::ClientToNode { request, message: Some(message) };
        self.record.clear();
        message.encode(&mut self.record).map_err(|error| Error::Protocol(error.to_string()))?;
        Ok(self.line.send(&self.record)?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Calls {
    pub(crate) fn new(line: LineSender, receiver: LineReceiver, polling: Duration) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Calls {
            sender: Mutex::new(Sending { line, record: Vec::new(), unsent: VecDeque::new() }),
            receiver: Mutex::new(receiver),
            answers: Mutex::new(HashMap::new()),
            arrived: Condvar::new(),
            next_request: AtomicU64::new(1),
            polling,
            polling_far: if cores <= FEW_CORES { Duration::ZERO } else { polling },
        }
    }

    pub(crate) fn is_connected(&self) -> bool {
        lock(&self.sender).line.line().is_connected()
    }

    /// Asks, and waits for the answer. Answers with the number of the request, too.
    pub(crate) fn ask(&self, message: ToNode) -> Result<(u64, FromNode), Error> {
        self.ask_polling(message, self.polling)
    }

    /// The same for what another node has to send first.
    pub(crate) fn ask_far(&self, message: ToNode) -> Result<(u64, FromNode), Error> {
        self.ask_polling(message, self.polling_far)
    }

    fn ask_polling(&self, message: ToNode, polling: Duration) -> Result<(u64, FromNode), Error> {
        let request = self.tell(message)?;
        match self.answer(request, polling)? {
            FromNode::Refused(refused) => Err(refused.into()),
            answer => Ok((request, answer)),
        }
    }

    /// Says something whose answer is taken by [`Self::ask`].
    fn tell(&self, message: ToNode) -> Result<u64, Error> {
        let mut sending = lock(&self.sender);
        self.catch_up(&mut sending)?;
        let request = self.number();
        sending.send(request, message)?;
        Ok(request)
    }

    /// Says something that is not answered: now, or before what is said next. Where the node is gone, never.
    pub(crate) fn tell_unanswered(&self, message: ToNode) {
        let mut sending = lock(&self.sender);
        sending.unsent.push_back(message);
        // It is tried again.
        let _ = self.catch_up(&mut sending);
    }

    fn catch_up(&self, sending: &mut Sending) -> Result<(), Error> {
        while let Some(message) = sending.unsent.pop_front() {
            if let Err(error) = sending.send(self.number(), message.clone()) {
                sending.unsent.push_front(message);
                return Err(error);
            }
        }
        Ok(())
    }

    fn number(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    fn answer(&self, request: u64, polling: Duration) -> Result<FromNode, Error> {
        let mut spin = Spin::new(polling);
        loop {
            if let Some(answer) = lock(&self.answers).remove(&request) {
                return Ok(answer);
            }
            let mut receiver = match self.receiver.try_lock() {
                Ok(receiver) => receiver,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    let answers = lock(&self.answers);
                    if !answers.contains_key(&request) {
                        let _ = self.arrived.wait_timeout(answers, HANDED_ON);
                    }
                    continue;
                }
            };
            let received = self.receive(&mut receiver, request, &mut spin);
            drop(receiver);
            // Somebody else receives from now on.
            self.arrived.notify_all();
            if let Some(answer) = received? {
                return Ok(answer);
            }
        }
    }

    /// Takes answers until this request's is among them. `None` when another thread has had it.
    fn receive(
        &self,
        receiver: &mut LineReceiver,
        request: u64,
        spin: &mut Spin,
    ) -> Result<Option<FromNode>, Error> {
        loop {
            while let Some(record) = receiver.try_recv()? {
                let decoded = v1::NodeToClient::decode(record);
                let decoded = decoded.map_err(|error| Error::Protocol(error.to_string()))?;
                let Some(answer) = decoded.message else {
                    return Err(Error::Protocol("the message is empty".into()));
                };
                if decoded.request == request {
                    return Ok(Some(answer));
                }
                lock(&self.answers).insert(decoded.request, answer);
                self.arrived.notify_all();
            }
            // Another one may have received it before this one became the receiver.
            if let Some(answer) = lock(&self.answers).remove(&request) {
                return Ok(Some(answer));
            }
            if !spin.wait() {
                receiver.wait(SLEEP)?;
            }
        }
    }
}
