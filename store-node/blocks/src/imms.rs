//! Immediates: each belongs to one share from its allocation until nothing of it can land.
//!
//! Drawn in sequence, so that a number comes back only after four billion others; one that is still
//! held then is passed over. 0 is never drawn: on the wire it reads as "none".

use std::collections::BTreeSet;

use kvasir_proto::Imm;

#[derive(Debug)]
pub(crate) struct Imms {
    next: u32,
    held: BTreeSet<Imm>,
}

impl Imms {
    pub(crate) fn new(first: u32) -> Self {
        Imms { next: first, held: BTreeSet::new() }
    }

    /// Ends, because fewer are held than there are numbers: each open share holds at most one.
    pub(crate) fn take(&mut self) -> Imm {
        loop {
            let imm = Imm(self.next);
            self.next = self.next.wrapping_add(1);
            if imm != Imm(0) && self.held.insert(imm) {
                return imm;
            }
        }
    }

    pub(crate) fn give_back(&mut self, imm: Imm) {
        let held = self.held.remove(&imm);
        assert!(held, "immediate {imm} was given back twice");
    }

    pub(crate) fn held(&self) -> &BTreeSet<Imm> {
        &self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_immediate_that_is_held_is_passed_over_and_zero_is_never_drawn() {
        let mut imms = Imms::new(u32::MAX);
        assert_eq!(imms.take(), Imm(u32::MAX));
        assert_eq!(imms.take(), Imm(1));
        imms.next = u32::MAX;
        assert_eq!(imms.take(), Imm(2));
        imms.give_back(Imm(1));
        imms.next = 0;
        assert_eq!(imms.take(), Imm(1));
    }
}
