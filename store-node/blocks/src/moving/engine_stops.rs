//! Shares that the engine was told to stop and has not let go of yet, and when its time for that is
//! over. An engine hears between steps, and a step of a large model on a slow host may take long: as
//! long as the step in which it was told goes on, layer by layer, its time does not run.

use std::collections::BTreeMap;

use kvasir_proto::Share;

/// How far an engine is: the step it is in, and how many of that step's layers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Progress {
    pub step: u32,
    pub layers_done: u16,
}

/// See the module.
#[derive(Debug, Default)]
pub struct EngineStops {
    told: BTreeMap<Share, Told>,
    /// The last progress that was seen, and when it was new.
    seen: Option<(Progress, u64)>,
}

#[derive(Debug, Clone, Copy)]
struct Told {
    at_ms: u64,
    /// The last step that may have begun before it was told.
    step: u32,
}

impl EngineStops {
    /// The engine was told to stop a share, and is that far as its progress word says.
    pub fn told(&mut self, share: Share, now_ms: u64, progress: Option<Progress>) {
        self.look(now_ms, progress);
        // Between two steps the word still names the one that has ended.
        let step = progress.map_or(0, |progress| progress.step.saturating_add(1));
        self.told.insert(share, Told { at_ms: now_ms, step });
    }

    /// It has let go, or the share is over.
    pub fn let_go(&mut self, share: Share) {
        self.told.remove(&share);
    }

    /// It is not listened to any more.
    pub fn clear(&mut self) {
        *self = EngineStops::default();
    }

    /// A share that should have been let go of: the engine is to be expelled.
    pub fn late(
        &mut self,
        now_ms: u64,
        timeout_ms: u64,
        progress: Option<Progress>,
    ) -> Option<Share> {
        if self.told.is_empty() {
            return None;
        }
        self.look(now_ms, progress);
        let is_late = |told: &Told| {
            let moved_ms = match self.seen {
                Some((seen, new_ms)) if seen.step <= told.step => new_ms,
                _ => told.at_ms,
            };
            now_ms >= told.at_ms.max(moved_ms).saturating_add(timeout_ms)
        };
        self.told.iter().find(|(_, told)| is_late(told)).map(|(share, _)| *share)
    }

    fn look(&mut self, now_ms: u64, progress: Option<Progress>) {
        let Some(progress) = progress else { return };
        if self.seen.is_none_or(|(seen, _)| seen != progress) {
            self.seen = Some((progress, now_ms));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_proto::{Side, TxId};

    const TIMEOUT_MS: u64 = 100;

    fn share() -> Share {
        Share { tx: TxId { conductor_incarnation: 1, serial: 7 }, side: Side::Prefill }
    }

    /// Told at 1,000 in the third layer of step 5; then what is seen when, and whether it is late.
    fn check(seen: &[(u64, u32, u16, bool)]) {
        let mut stops = EngineStops::default();
        stops.told(share(), 1_000, Some(Progress { step: 5, layers_done: 3 }));
        for &(now_ms, step, layers_done, late) in seen {
            let progress = Some(Progress { step, layers_done });
            let found = stops.late(now_ms, TIMEOUT_MS, progress);
            assert_eq!(found, late.then(share), "{now_ms}: {seen:?}");
        }
    }

    #[test]
    fn an_engine_that_stands_still_is_late_after_its_time() {
        check(&[(1_099, 5, 3, false), (1_100, 5, 3, true)]);
    }

    #[test]
    fn the_time_does_not_run_while_the_step_goes_on() {
        check(&[
            (1_090, 5, 4, false),
            (1_180, 5, 5, false),
            (1_279, 5, 5, false),
            (1_280, 5, 5, true),
        ]);
        check(&[(1_090, 6, 1, false), (1_180, 6, 2, false), (1_280, 6, 2, true)]);
    }

    #[test]
    fn an_engine_that_goes_on_with_other_steps_is_late() {
        check(&[(1_050, 7, 1, false), (1_090, 8, 1, false), (1_100, 9, 1, true)]);
    }

    #[test]
    fn who_has_let_go_is_not_late() {
        let mut stops = EngineStops::default();
        stops.told(share(), 0, None);
        assert_eq!(stops.late(TIMEOUT_MS, TIMEOUT_MS, None), Some(share()));
        stops.let_go(share());
        assert_eq!(stops.late(TIMEOUT_MS, TIMEOUT_MS, None), None);
    }
}
