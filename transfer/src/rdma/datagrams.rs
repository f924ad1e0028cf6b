//! The queue pair by which a card shakes hands (`handshake`): its buffers, and the ways to peers. It is
//! made when it is first needed. What finds no receive, or no free buffer, is lost, and said again.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_transfer_verbs::{
    AddressHandle, Buffer, CompletionQueue, CompletionQueues, LocalPath, LocalSlice, MemoryRegion,
    Payload, ProtectionDomain, QKey, QpNum, QueuePairOptions, Receive, RegionOptions, Side,
    Traffic, UD_HEADER_BYTES, UdQueuePair, WorkCompletion, WorkTag,
};

use super::handshake::{DATAGRAM_BYTES_MAX, Datagram, Ticket};
use super::nic::{CardError, PipeId};

/// Datagrams that may come before this process has looked at them.
const RECEIVES: u32 = 32;
/// That may be on their way out.
const SENDS: u32 = 16;
pub(crate) const COMPLETIONS: u32 = RECEIVES + SENDS + 2;
/// Room for whatever a stranger may send: the largest MTU there is. One that did not fit could cost the queue
/// pair.
const SLOT_BYTES: usize = (UD_HEADER_BYTES + 4096).next_multiple_of(64);
const _: () = assert!(DATAGRAM_BYTES_MAX <= 1024, "datagrams fit small MTUs, too");

#[derive(Debug)]
pub(crate) struct Datagrams {
    qp: UdQueuePair,
    /// Receives first, then sends.
    buffer: Arc<Buffer>,
    region: MemoryRegion,
    free_sends: Vec<u32>,
    /// To the peers of pipes. They last longer than any datagram of the pipe.
    ways: BTreeMap<PipeId, AddressHandle>,
}

fn failed(what: &'static str) -> impl FnOnce(kvasir_transfer_verbs::VerbsError) -> CardError {
    move |error| CardError::because(what, error)
}

impl Datagrams {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        path: &LocalPath,
        queue: &CompletionQueue,
    ) -> Result<Self, CardError> {
        let options = QueuePairOptions {
            send_depth: SENDS,
            receive_depth: RECEIVES,
            ..QueuePairOptions::default()
        };
        // The upper half is for privileged users.
        let key = QKey(rand::random::<u32>() >> 1);
        let queues = CompletionQueues { send: queue, receive: queue };
        let qp = UdQueuePair::new(pd, path, queues, key, options)
            .map_err(failed("cannot create a queue pair for datagrams"))?;
        let bytes = (RECEIVES + SENDS) as usize * SLOT_BYTES;
        let buffer = Buffer::new(bytes)
            .map_err(|error| CardError::because("cannot allocate memory for datagrams", error))?;
        let buffer = Arc::new(buffer);
        let owner = Arc::clone(&buffer) as Arc<dyn kvasir_transfer_verbs::Memory>;
        let options = RegionOptions { local_write: true, ..RegionOptions::SOURCE };
        let region = pd
            .register(owner, 0..bytes, options)
            .map_err(failed("cannot register memory for datagrams"))?;
        let free_sends = (RECEIVES..RECEIVES + SENDS).collect();
        let mut made = Datagrams { qp, buffer, region, free_sends, ways: BTreeMap::new() };
        for slot in 0..RECEIVES {
            made.receive(slot)?;
        }
        Ok(made)
    }

    pub(crate) fn number(&self) -> QpNum {
        self.qp.number()
    }

    pub(crate) fn key(&self) -> QKey {
        self.qp.key()
    }

    /// It is to be replaced. Whoever has a ticket for it tries another way, and then again.
    pub(crate) fn is_broken(&self) -> bool {
        self.qp.is_broken()
    }

    fn slice(&self, slot: u32, bytes: usize) -> Result<LocalSlice, CardError> {
        let slice = self.region.slice(slot as usize * SLOT_BYTES, bytes);
        slice.map_err(|error| CardError::because("a datagram is too long", error))
    }

    fn receive(&mut self, slot: u32) -> Result<(), CardError> {
        let into = [self.slice(slot, SLOT_BYTES)?];
        let posted = self.qp.post_receives(&[Receive { into: &into, tag: WorkTag(slot) }]);
        posted.map_err(|error| CardError::because("cannot post receives", error))
    }

    /// The way to the peer of a pipe, which is made once.
    pub(crate) fn learn_way(
        &mut self,
        pipe: PipeId,
        (pd, path): (&ProtectionDomain, &LocalPath),
        (peer, traffic): (&Ticket, Traffic),
    ) -> Result<(), CardError> {
        let way = AddressHandle::new(pd, path, peer.gid, peer.lid, traffic)
            .map_err(failed("cannot create an address handle for datagrams to the peer"))?;
        self.ways.insert(pipe, way);
        Ok(())
    }

    pub(crate) fn forget(&mut self, pipe: PipeId) {
        self.ways.remove(&pipe);
    }

    /// It may get lost, here as well.
    pub(crate) fn send(&mut self, pipe: PipeId, to: &Ticket, datagram: &Datagram) {
        let (Some(slot), Some(way)) = (self.free_sends.last().copied(), self.ways.get(&pipe))
        else {
            return;
        };
        let bytes = datagram.encode();
        if self.buffer.write(slot as usize * SLOT_BYTES, &bytes).is_err() {
            return;
        }
        let Ok(slice) = self.slice(slot, bytes.len()) else { return };
        let posted = self.qp.post(&[kvasir_transfer_verbs::Datagram {
            from: Payload::Slices(&[slice]),
            imm: None,
            to: way,
            to_number: to.number,
            to_key: to.key,
            tag: WorkTag(slot),
        }]);
        match posted {
            Ok(()) => drop(self.free_sends.pop()),
            Err(error) => tracing::debug!(%error, "the transfer engine cannot send a datagram"),
        }
    }

    /// Whose datagram it is and what it says, when one has come.
    pub(crate) fn take(&mut self, completion: &WorkCompletion) -> Option<(Option<QpNum>, Vec<u8>)> {
        if self.qp.retire(completion) == 0 {
            return None;
        }
        let slot = completion.tag()?.0;
        match completion.side() {
            Side::Send => {
                self.free_sends.push(slot);
                None
            }
            Side::Receive => {
                let bytes = (completion.bytes() as usize).saturating_sub(UD_HEADER_BYTES);
                let at = slot as usize * SLOT_BYTES + UD_HEADER_BYTES;
                let said = self.buffer.read(at, bytes).ok().filter(|_| completion.is_success());
                if let Err(error) = self.receive(slot) {
                    tracing::debug!(%error, "the transfer engine cannot post a receive for datagrams again");
                }
                Some((completion.source_qp(), said?))
            }
        }
    }
}
