//! An object that was got: its bytes in the node's memory, pinned.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use kvasir_attach::words;
use kvasir_proto::v1;
use v1::client_to_node::Message as ToNode;

use crate::client::Shared;

/// The pins of one get: dropped with the last of its objects.
#[derive(Debug)]
pub(crate) struct Pins {
    pub(crate) shared: Arc<Shared>,
    pub(crate) get: u64,
}

impl Drop for Pins {
    fn drop(&mut self) {
        // Where the node is gone nothing is pinned any more.
        self.shared.calls.tell_unanswered(ToNode::Unpin(v1::UnpinObjects { get: self.get }));
    }
}

/// Bytes of an object, in the node's memory. They stay as they are while it lives.
///
/// Objects that were got together are released together, when the last of them is dropped.
#[derive(Clone)]
pub struct Object {
    pins: Arc<Pins>,
    slot: u32,
    generation: u32,
    offset: usize,
    len: usize,
}

impl Object {
    pub(crate) fn new(pins: Arc<Pins>, slot: u32, generation: u32, len: usize) -> Self {
        let offset = slot as usize * pins.shared.shape.slot_bytes;
        Object { pins, slot, generation, offset, len }
    }

    /// Where the object lies, from the start of the node's slot memory, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// How often its slot had been used before.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether the slot still holds this object. It does for as long as the pin is worth something; a
    /// client that was expelled and reads on should ask after it has read.
    pub fn is_current(&self) -> bool {
        let word = self.pins.shared.generations.atomic_u32(4 * self.slot as usize);
        word.is_ok_and(|word| words::is_generation(word, self.generation))
    }
}

impl Deref for Object {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot is committed and pinned for as long as `pins` lives, and the node lets
        // nobody write committed slots; processes that map them have agreed to that (see the crate).
        let bytes = unsafe { self.pins.shared.slots.slice(self.offset, self.len) };
        bytes.unwrap_or_default()
    }
}

impl AsRef<[u8]> for Object {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Object { slot, generation, len, .. } = self;
        write!(f, "Object {{ {len} bytes, slot {slot}, generation {generation} }}")
    }
}
