//! What names a block by its slot and the slot's generation means that block: when another one lies there
//! by now, nothing happens to it (DESIGN §5, and "fence with generations").

use super::Checker;
use crate::seen::Seen;

#[derive(Debug, Default)]
pub(super) struct Generations;

impl Checker for Generations {
    fn name(&self) -> &'static str {
        "generations"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::ReportedRotten { at, slot, generation, lies_there, dropped }
                if *dropped > 0 && *lies_there != Some(*generation) =>
            {
                Err(format!(
                    "slot {slot} of {at:?} was said to be rotten in generation {generation}; \
                     {lies_there:?} lies there, and {dropped} blocks were dropped"
                ))
            }
            _ => Ok(()),
        }
    }
}
