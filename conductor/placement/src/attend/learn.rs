//! Constants that the running cluster has measured replace those of the profile.

use super::{Congestion, Constants};
use crate::cost::DecodeProfile;
use crate::cost::fit::Fit;

/// What a layer asks of those that it waits for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerDemand {
    /// Of queries and partials.
    pub bytes: f64,
    /// Of the span.
    pub tokens: f64,
    /// Query rows.
    pub rows: f64,
}

impl LayerDemand {
    /// Bytes, tokens and rows.
    pub(crate) fn numbers(&self) -> [f64; 3] {
        let LayerDemand { bytes, tokens, rows } = *self;
        [bytes, tokens, rows]
    }
}

/// What routed layers take, the opening of a route, and steps over rows that are here: fits that begin with
/// the profile.
#[derive(Debug, Clone)]
pub struct RouteModel {
    /// A layer: `fixed + bytes + tokens + tokens x rows beyond the flat ones`, what is on the way of it
    /// prolonged by the flows beside it.
    layer: Fit<4>,
    /// A step: `fixed + sequences + tokens x layers`.
    step: Fit<3>,
    /// Until its holders answer, once for each request.
    open: Fit<1>,
    congestion: Congestion,
    /// Of what is fixed, which part is on the way.
    way_share: f64,
    flat_rows: f64,
    has_steps: bool,
}

/// What a [`RouteModel`] has learned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LearnedRoutes {
    pub layer: [f64; 4],
    pub step: [f64; 3],
    pub open_us: f64,
    pub has_steps: bool,
}

impl RouteModel {
    pub fn new(constants: &Constants) -> Self {
        let Constants { fabric, holder, local } = constants;
        let way_us = fabric.probe_us + fabric.turnaround_us;
        let fixed_us = fixed_us(constants);
        let layer = [fixed_us, 1.0 / fabric.bytes_per_us, holder.token_us, holder.row_token_us];
        let DecodeProfile { base_us, sequence_us, .. } = DecodeProfile::default();
        RouteModel {
            layer: Fit::new(layer),
            step: Fit::new([base_us, sequence_us, local.token_us]),
            // One call, there and back.
            open: Fit::new([way_us]),
            congestion: fabric.congestion,
            way_share: if fixed_us > 0.0 { way_us / fixed_us } else { 0.0 },
            flat_rows: holder.flat_rows as f64,
            has_steps: false,
        }
    }

    /// A layer took `measured_us` in the mean, beside so many flows of others.
    pub fn observe_layer(&mut self, demand: LayerDemand, flows: u32, measured_us: f64) {
        if measured_us.is_finite() && measured_us > 0.0 {
            self.layer.observe(self.features(demand, flows), measured_us);
        }
    }

    /// What such a layer takes by what is known.
    pub fn layer_us(&self, demand: LayerDemand, flows: u32) -> f64 {
        self.layer.predict(self.features(demand, flows))
    }

    fn features(&self, LayerDemand { bytes, tokens, rows }: LayerDemand, flows: u32) -> [f64; 4] {
        let beyond = (rows - self.flat_rows).max(0.0);
        let factor = self.congestion.factor(flows);
        let fixed = 1.0 + self.way_share * (factor - 1.0);
        [fixed, bytes * factor, tokens, tokens * beyond]
    }

    /// A step of so many sequences, with so many rows in each layer, all of them here.
    pub fn observe_step(&mut self, sequences: f64, row_layers: f64, measured_us: u64) {
        if measured_us > 0 {
            self.step.observe([1.0, sequences, row_layers], measured_us as f64);
            self.has_steps = true;
        }
    }

    /// All that a request has elsewhere was opened after `measured_us`.
    pub fn observe_opening(&mut self, measured_us: u64) {
        if measured_us > 0 {
            self.open.observe([1.0], measured_us as f64);
        }
    }

    /// What a request waits until its routes are open.
    pub fn open_us(&self) -> f64 {
        self.open.predict([1.0])
    }

    /// With what is known by now in place of the profile.
    pub fn constants(&self, profile: &Constants) -> Constants {
        let mut known = *profile;
        let [layer_us, byte_us, token_us, row_token_us] = self.layer.coefficients();
        // Which part of it is whose is not measured: they keep their shares.
        let scale = layer_us / fixed_us(profile).max(1e-9);
        let Constants { fabric, holder, local } = &mut known;
        fabric.probe_us *= scale;
        fabric.turnaround_us *= scale;
        fabric.merge.base_us *= scale;
        fabric.merge.part_us *= scale;
        holder.launch_us *= scale;
        // So fast that it no longer counts, rather than infinitely.
        fabric.bytes_per_us = 1.0 / byte_us.max(1e-12);
        holder.token_us = token_us;
        holder.row_token_us = row_token_us;
        if self.has_steps {
            // What does not depend on the span is in every step.
            local.launch_us = 0.0;
            local.row_token_us = 0.0;
            local.token_us = self.step.coefficients()[2];
        }
        known
    }

    pub(crate) fn profile(&self) -> LearnedRoutes {
        LearnedRoutes {
            layer: self.layer.coefficients(),
            step: self.step.coefficients(),
            open_us: self.open_us(),
            has_steps: self.has_steps,
        }
    }

    /// One that has learned this.
    pub(crate) fn learned(profile: &Constants, learned: LearnedRoutes) -> Self {
        let LearnedRoutes { layer, step, open_us, has_steps } = learned;
        RouteModel {
            layer: Fit::learned(layer),
            step: Fit::learned(step),
            open: Fit::learned([open_us]),
            has_steps,
            ..RouteModel::new(profile)
        }
    }
}

/// Of a layer with two parts, whatever is asked.
fn fixed_us(constants: &Constants) -> f64 {
    let Constants { fabric, holder, .. } = constants;
    fabric.probe_us + fabric.turnaround_us + fabric.merge.us(2) + holder.launch_us
}
