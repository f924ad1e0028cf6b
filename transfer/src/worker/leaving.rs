//! Writers whose shm connection has ended here while a copy of theirs was under way. The connection is
//! cut, so no further copy begins, but the sender copies with its own hands: its bytes may still land
//! until that copy has ended or its process has. Until then nobody is told that nothing more lands.

use crate::calls::Calls;
use crate::engine::PeerEvent;
use crate::shm::Copying;

#[derive(Debug, Default)]
pub(super) struct Leaving(Vec<Writer>);

#[derive(Debug)]
struct Writer {
    incarnation: u64,
    copying: Copying,
    /// To be told when it is over.
    event: Option<PeerEvent>,
}

impl Leaving {
    pub(super) fn add(&mut self, incarnation: u64, copying: Copying, event: Option<PeerEvent>) {
        self.0.push(Writer { incarnation, copying, event });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Copies into any region.
    pub(super) fn all(&self) -> Vec<Copying> {
        self.0.iter().map(|writer| writer.copying.clone()).collect()
    }

    /// Copies of one peer.
    pub(super) fn of(&self, incarnation: u64) -> Vec<Copying> {
        let of_peer = self.0.iter().filter(|writer| writer.incarnation == incarnation);
        of_peer.map(|writer| writer.copying.clone()).collect()
    }

    /// Tells of those that are over. Whether there was one.
    pub(super) fn look(&mut self, calls: &mut Calls) -> bool {
        let before = self.0.len();
        self.0.retain_mut(|writer| {
            let over = writer.copying.is_over();
            if over && let Some(event) = writer.event.take() {
                calls.peer(event);
            }
            !over
        });
        self.0.len() != before
    }
}
