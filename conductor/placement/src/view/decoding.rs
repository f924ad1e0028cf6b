//! What an answer is decoded beside: as it is expected when a request is placed, as it is when its
//! prefill has ended, and as it was in the end.

use super::{Begun, Booked, BookingId, ClusterView, Instance};
use crate::cost::DecodeLoad;
use crate::decision::Admission;
use crate::queue::DecodeBooking;

/// A request is let in when it is so likely to meet its objective between tokens. Fixed on the first
/// half of the published conversations, where less let more prefill be wasted and more let fewer
/// requests in.
const LIKELY: f64 = 0.85;

/// Tokens of the prompts whose answers were sent to an instance, fading with the time of one answer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Sent {
    pub(super) tokens: f64,
    pub(super) at_us: u64,
}

impl Sent {
    fn tokens_at(&self, now_us: u64, answer_s: f64) -> f64 {
        let since_s = now_us.saturating_sub(self.at_us) as f64 / 1e6;
        self.tokens * (-since_s / answer_s).exp()
    }
}

impl Instance {
    /// What an answer to a prompt of so many tokens would be decoded beside.
    pub(crate) fn decode_load(
        &self,
        admission: Admission,
        prompt_tokens: u32,
        at_us: u64,
        now_us: u64,
    ) -> DecodeLoad {
        let answer_s = self.answer_s();
        let mean_tokens = self.decodes.mean_tokens().unwrap_or(prompt_tokens.into());
        let others = f64::from(self.other_answers);
        // What is there has joined within the time of one answer.
        let (running, tokens) = match admission {
            Admission::Late | Admission::Early => {
                let (begun, begun_tokens) = self.decodes.begun();
                (begun as f64 + others, begun_tokens as f64 + others * mean_tokens)
            }
            Admission::Predicted => {
                let later = self.decodes.begin_after(at_us) as f64;
                let running = (self.answers_at(at_us, now_us) - later).max(0.0);
                (running, running * mean_tokens)
            }
            Admission::Calibrated => {
                return self.sent_load(prompt_tokens, at_us, now_us, now_us);
            }
        };
        let prompt_tokens = f64::from(prompt_tokens);
        DecodeLoad {
            running: running + 1.0,
            joining: (tokens + prompt_tokens) / answer_s,
            prompt_tokens,
        }
    }

    /// The same by what runs at one time, and by what will have been sent for the last time at another one.
    fn sent_load(
        &self,
        prompt_tokens: u32,
        at_us: u64,
        sent_at_us: u64,
        now_us: u64,
    ) -> DecodeLoad {
        let answer_s = self.answer_s();
        let mean_tokens = self.decodes.mean_tokens().unwrap_or(prompt_tokens.into());
        let others = f64::from(self.other_answers) * mean_tokens;
        let prompt_tokens = f64::from(prompt_tokens);
        let sent = self.sent.tokens_at(sent_at_us, answer_s);
        DecodeLoad {
            running: self.answers_at(at_us, now_us) + 1.0,
            joining: (sent + others + prompt_tokens) / answer_s,
            prompt_tokens,
        }
    }

    /// How long until a request is let in by the time between tokens, if nothing else is sent here before:
    /// when what was sent joins no more, or, at the latest, when nothing is left that it would be beside.
    pub(crate) fn in_step_in_us(
        &self,
        admission: Admission,
        prompt_tokens: u32,
        objective_us: u64,
        now_us: u64,
    ) -> u64 {
        let idle_us = self.answers_left_in_us(0, now_us);
        let is_known = admission == Admission::Calibrated && {
            let load = self.sent_load(prompt_tokens, now_us, now_us, now_us);
            self.in_time(load, objective_us).is_some()
        };
        if !is_known {
            let context = self.decodes.mean_tokens().unwrap_or(prompt_tokens.into());
            let step_us =
                |running| self.decode_model.predict_step_us(running, context * f64::from(running));
            let in_time = |running: &u32| step_us(*running) <= objective_us;
            let running = (1..=self.report.running_requests_max).rev().find(in_time).unwrap_or(1);
            return self.answers_left_in_us(running - 1, now_us);
        }
        let quarters = (1..=16).map(|quarters| self.decode_model.answer_us() / 4 * quarters);
        let in_time = |in_us: &u64| {
            let later_us = now_us.saturating_add(*in_us);
            let load = self.sent_load(prompt_tokens, later_us, later_us, now_us);
            !self.misses_tbt(admission, load, objective_us)
        };
        quarters.take_while(|in_us| *in_us < idle_us).find(in_time).unwrap_or(idle_us)
    }

    /// The time between tokens that an answer sees which is decoded beside this.
    pub(crate) fn predict_tbt_us(&self, load: DecodeLoad) -> u64 {
        let step_us = self.step_us(load);
        self.tbt_model.predict_us(load, step_us).unwrap_or(step_us)
    }

    /// How long a step takes then, by the step model.
    fn step_us(&self, load: DecodeLoad) -> u64 {
        let running_max = f64::from(self.report.running_requests_max.max(1));
        let running = load.running.min(running_max).ceil();
        let mean_tokens = self.decodes.mean_tokens().unwrap_or(load.prompt_tokens);
        self.decode_model.predict_step_us(running as u32, running * mean_tokens)
    }

    /// How likely it meets the objective; nothing while there is little to tell it from.
    pub(crate) fn in_time(&self, load: DecodeLoad, objective_us: u64) -> Option<f64> {
        match objective_us {
            u64::MAX => None,
            _ => self.tbt_model.in_time(load, self.step_us(load), objective_us),
        }
    }

    /// Whether an answer that is decoded beside this is too slow, or makes too many others so: it is
    /// to meet the objective likely, and more likely than it is for others to miss it for its sake.
    pub(crate) fn misses_tbt(
        &self,
        admission: Admission,
        load: DecodeLoad,
        objective_us: u64,
    ) -> bool {
        let likely =
            self.in_time(load, objective_us).filter(|_| admission == Admission::Calibrated);
        let Some(likely) = likely else {
            return self.predict_tbt_us(load) > objective_us;
        };
        let mean_tokens = self.decodes.mean_tokens().unwrap_or(load.prompt_tokens);
        let with = DecodeLoad { prompt_tokens: mean_tokens, ..load };
        let others = (load.running - 1.0).max(0.0);
        let joining = (load.joining - load.prompt_tokens / self.answer_s()).max(0.0);
        let without = DecodeLoad { running: others, joining, ..with };
        let in_time = |load| self.in_time(load, objective_us).unwrap_or(0.0);
        likely < LIKELY || likely < others * (in_time(without) - in_time(with))
    }

    /// A request was placed here to decode.
    pub(super) fn is_sent(&mut self, prompt_tokens: u32, now_us: u64) {
        let answer_s = self.answer_s();
        let tokens = self.sent.tokens_at(now_us, answer_s) + f64::from(prompt_tokens);
        self.sent = Sent { tokens, at_us: now_us.max(self.sent.at_us) };
    }

    fn answer_s(&self) -> f64 {
        (self.decode_model.answer_us() as f64 / 1e6).max(1e-3)
    }
}

impl Booked {
    pub(super) fn decode_booking(&self) -> DecodeBooking {
        DecodeBooking {
            begins_us: self.handed_over_us.is_none().then_some(self.prefill_end_us),
            end_us: self.end_us,
            prompt_tokens: self.prompt_tokens,
        }
    }
}

impl ClusterView {
    /// The time between tokens that this request is predicted to see where it is to decode, by what
    /// decodes there now: for those that were placed without looking, or that look twice.
    pub fn look_again(&mut self, id: BookingId, now_us: u64) -> Option<u64> {
        let booked = self.bookings.get(&id)?;
        let (decode, prompt_tokens) = (booked.decode, booked.prompt_tokens);
        let instance = self.find(decode)?;
        let load = instance.decode_load(Admission::Late, prompt_tokens, now_us, now_us);
        let tbt_us = instance.predict_tbt_us(load);
        self.bookings.get_mut(&id)?.decode_load = Some(load);
        Some(tbt_us)
    }

    /// This request saw so much between its tokens: the mean of the longest tenth of its intervals.
    pub fn paced(&mut self, id: BookingId, tbt_us: u64, now_us: u64) {
        let Some(booked) = self.bookings.get(&id) else { return };
        let (decode, prompt_tokens) = (booked.decode, f64::from(booked.prompt_tokens));
        let (Some(expected), Some(begun), Some(since_us)) =
            (booked.decode_load, booked.begun, booked.handed_over_us)
        else {
            return;
        };
        let half_life_us = self.half_life_us;
        let Some(instance) = self.find(decode) else { return };
        let lasted_s = now_us.saturating_sub(since_us).max(1_000) as f64 / 1e6;
        let Begun { joined_tokens, running, others } = begun;
        // Of the work of others only the number is known, now and then. What they bring is taken to be
        // like ours, as it was when this request was placed.
        let others = f64::from(others + instance.other_answers) / 2.0;
        let mean_tokens = instance.decodes.mean_tokens().unwrap_or(prompt_tokens);
        let joined = instance.joined_tokens.saturating_sub(joined_tokens) as f64;
        let load = DecodeLoad {
            running: (running + instance.decodes.begun().0) as f64 / 2.0 + others,
            joining: joined / lasted_s + others * mean_tokens / instance.answer_s(),
            prompt_tokens,
        };
        if let Some(half_life_us) = half_life_us {
            let since_us = now_us.saturating_sub(instance.paced_us) as f64;
            instance.tbt_model.forget((-since_us / half_life_us as f64).exp2());
        }
        instance.paced_us = now_us;
        let predicted_us = instance.tbt_model.predict_us(expected, instance.step_us(expected));
        instance.tbt_model.observe(predicted_us, load, tbt_us);
    }
}
