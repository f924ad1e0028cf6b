//! I1: never is a block read before every byte of it has arrived and it is committed. Places are filled
//! with a pattern when they are given out; whoever then reads the pattern reads too early.

use std::rc::Rc;

use super::Checker;
use crate::content::{PageBytes, SLOT_BYTES, Truth};
use crate::seen::Seen;

/// What a slot is filled with when it is given out.
pub const UNWRITTEN: PageBytes = [0xee; SLOT_BYTES];
/// So many bytes in a row are no accident.
const RUN: usize = 8;

#[derive(Debug)]
pub(super) struct Unwritten {
    truth: Rc<Truth>,
}

impl Unwritten {
    pub(super) fn new(truth: Rc<Truth>) -> Self {
        Unwritten { truth }
    }
}

fn has_gap(bytes: &PageBytes) -> bool {
    bytes.chunks(RUN).any(|run| run == &UNWRITTEN[..RUN])
}

impl Checker for Unwritten {
    fn name(&self) -> &'static str {
        "I1 unwritten"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::PageRead { at, share, key, bytes } if has_gap(bytes) => {
                Err(format!("{share} reads {key:?} on {at:?}, of which not every byte has arrived"))
            }
            Seen::Listing { at, blocks } => {
                let early = blocks.iter().find(|block| {
                    has_gap(&block.bytes) && self.truth.blocks.contains_key(&block.key)
                });
                match early {
                    Some(block) => Err(format!(
                        "{at:?} lists {:?} in slot {}, of which not every byte has arrived",
                        block.key, block.slot
                    )),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}
