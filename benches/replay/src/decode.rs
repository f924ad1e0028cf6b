//! A node that decodes: sequences join at the next step, all advance by one token a step.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::model::DecodeTime;

/// A sequence that has its first token from its prefill.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    pub(crate) request: usize,
    pub(crate) context_tokens: u32,
    /// Tokens that are to come.
    pub(crate) tokens: u32,
    pub(crate) first_token_us: u64,
}

/// A sequence that has all its tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finished {
    pub(crate) request: usize,
    /// The mean of the longest tenth of its intervals.
    pub(crate) tbt_us: u64,
    /// The mean of all of them.
    pub(crate) interval_us: u64,
}

#[derive(Debug, Clone, Copy)]
struct Running {
    sequence: Sequence,
    first_step: u64,
    first_interval_us: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct DecodeNode {
    waiting: VecDeque<Sequence>,
    running: Vec<Option<Running>>,
    free: Vec<usize>,
    /// (its last step, its place in `running`).
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    context_tokens: u64,
    /// How long each step took.
    steps_us: Vec<u32>,
    step_began_us: u64,
    stepping: bool,
}

impl DecodeNode {
    pub(crate) fn is_busy(&self) -> bool {
        self.stepping
    }

    /// A sequence comes. Answers with when a step ends that it causes, if it does.
    pub(crate) fn join(
        &mut self,
        sequence: Sequence,
        now_us: u64,
        time: &DecodeTime,
        running_requests_max: u32,
    ) -> Option<u64> {
        self.waiting.push_back(sequence);
        if self.stepping { None } else { self.begin_step(now_us, time, running_requests_max) }
    }

    /// The step is over. Answers with the sequences that it finished, and when the next one ends.
    pub(crate) fn step_ended(
        &mut self,
        now_us: u64,
        time: &DecodeTime,
        running_requests_max: u32,
    ) -> (Vec<Finished>, Option<u64>) {
        let took_us = now_us - self.step_began_us;
        self.steps_us.push(u32::try_from(took_us).unwrap_or(u32::MAX));
        let step = self.steps_us.len() as u64;
        self.context_tokens += self.ends.len() as u64;
        let mut finished = Vec::new();
        while let Some(&Reverse((last, place))) = self.ends.peek() {
            if last > step {
                break;
            }
            self.ends.pop();
            if let Some(running) = self.running[place].take() {
                self.free.push(place);
                let Sequence { context_tokens, tokens, .. } = running.sequence;
                self.context_tokens -= u64::from(context_tokens) + u64::from(tokens);
                finished.push(self.finished(&running, step));
            }
        }
        (finished, self.begin_step(now_us, time, running_requests_max))
    }

    fn begin_step(
        &mut self,
        now_us: u64,
        time: &DecodeTime,
        running_requests_max: u32,
    ) -> Option<u64> {
        let mut joined_tokens = 0;
        let mut joined = Vec::new();
        while (self.ends.len() as u32) < running_requests_max {
            let Some(sequence) = self.waiting.pop_front() else { break };
            joined_tokens += u64::from(sequence.context_tokens);
            self.context_tokens += u64::from(sequence.context_tokens);
            let first_step = self.steps_us.len() as u64;
            let place = self.free.pop().unwrap_or_else(|| {
                self.running.push(None);
                self.running.len() - 1
            });
            self.running[place] = Some(Running { sequence, first_step, first_interval_us: 0 });
            self.ends.push(Reverse((first_step + u64::from(sequence.tokens), place)));
            joined.push(place);
        }
        self.stepping = !self.ends.is_empty();
        if !self.stepping {
            return None;
        }
        let running = self.ends.len() as u32;
        let ends_us = now_us + time.step_us(running, self.context_tokens, joined_tokens).max(1);
        for place in joined {
            if let Some(running) = &mut self.running[place] {
                running.first_interval_us = ends_us - running.sequence.first_token_us;
            }
        }
        self.step_began_us = now_us;
        Some(ends_us)
    }

    fn finished(&self, running: &Running, step: u64) -> Finished {
        let steps = &self.steps_us[running.first_step as usize..step as usize];
        let mut intervals: Vec<u64> = steps.iter().map(|us| u64::from(*us)).collect();
        intervals[0] = running.first_interval_us;
        let interval_us = intervals.iter().sum::<u64>() / intervals.len() as u64;
        let longest = intervals.len().div_ceil(10);
        let at = intervals.len() - longest;
        intervals.select_nth_unstable(at);
        let tbt_us = intervals[at..].iter().sum::<u64>() / longest as u64;
        Finished { request: running.sequence.request, tbt_us, interval_us }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_join_at_the_next_step_and_share_it() {
        let time = DecodeTime {
            base_us: 10.0,
            weights_us: 0.0,
            sequence_us: 1.0,
            context_us: 0.0,
            join_us: 1.0,
        };
        let sequence = |request, tokens, first_token_us| Sequence {
            request,
            context_tokens: 100,
            tokens,
            first_token_us,
        };
        let mut node = DecodeNode::default();
        assert_eq!(node.join(sequence(0, 2, 0), 5, &time, 2), Some(116));
        assert_eq!(node.join(sequence(1, 2, 10), 20, &time, 2), None);
        assert_eq!(node.join(sequence(2, 1, 20), 30, &time, 2), None);
        let (finished, next) = node.step_ended(116, &time, 2);
        assert_eq!((finished.len(), next), (0, Some(116 + 112)));
        let (finished, next) = node.step_ended(228, &time, 2);
        assert_eq!(finished.len(), 1);
        // From its first token on, the step before it joined included.
        assert_eq!((finished[0].request, finished[0].tbt_us), (0, 116));
        assert_eq!(finished[0].interval_us, (116 + 112) / 2);
        assert_eq!(next, Some(228 + 112), "there was room for two");
        let (finished, next) = node.step_ended(340, &time, 2);
        assert_eq!(finished.iter().map(|f| f.request).collect::<Vec<_>>(), [2, 1], "by place");
        assert_eq!(finished[1].tbt_us, 228 - 10);
        assert_eq!(next, None);
        assert_eq!(node.context_tokens, 0);
    }
}
