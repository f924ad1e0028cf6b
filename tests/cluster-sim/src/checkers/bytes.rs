//! I3: never do committed bytes change, or are they served after failing their checksum: whatever a node
//! lists, and whatever an engine reads as cached, are the rows of that block.

use std::rc::Rc;

use super::Checker;
use crate::content::Truth;
use crate::seen::Seen;

#[derive(Debug)]
pub(super) struct Bytes {
    truth: Rc<Truth>,
}

impl Bytes {
    pub(super) fn new(truth: Rc<Truth>) -> Self {
        Bytes { truth }
    }
}

impl Checker for Bytes {
    fn name(&self) -> &'static str {
        "I3 bytes"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::PageRead { at, share, key, bytes } => {
                match self.truth.blocks.contains_key(key) && !self.truth.may_be(*key, bytes) {
                    true => Err(format!("{share} reads {key:?} on {at:?}, and has other bytes")),
                    false => Ok(()),
                }
            }
            Seen::Listing { at, blocks } => {
                let wrong =
                    blocks.iter().find(|listed| !self.truth.may_be(listed.key, &listed.bytes));
                match wrong {
                    Some(listed) => Err(format!(
                        "slot {} of {at:?} is listed as {:?}, and has other bytes",
                        listed.slot, listed.key
                    )),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}
