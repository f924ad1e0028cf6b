//! Constants that the running cluster has measured replace those of the profile.

use super::{FabricProfile, KernelProfile};
use crate::cost::fit::Fit;
use crate::cost::weight;

/// One fabric: the line over a dispatch's bytes, fitted to what dispatches took.
#[derive(Debug, Clone)]
pub struct FabricModel {
    profile: FabricProfile,
    line: Fit<3>,
}

impl FabricModel {
    pub fn new(profile: FabricProfile) -> Self {
        let fixed_us = profile.probe_us + profile.turnaround_us;
        FabricModel { profile, line: Fit::new([fixed_us, 1.0 / profile.bytes_per_us, 0.0]) }
    }

    /// A dispatch of so many bytes, there and back, beside `flows` others was on the way for
    /// `measured_us`: without the holder's computing and the merge.
    pub fn observe(&mut self, bytes: u64, flows: u32, measured_us: f64) {
        if measured_us.is_finite() && measured_us > 0.0 {
            let alone_us = measured_us / self.profile.congestion.factor(flows);
            self.line.observe([1.0, bytes as f64, 0.0], alone_us);
        }
    }

    /// What is known by now.
    pub fn profile(&self) -> FabricProfile {
        let [fixed_us, byte_us, _] = self.line.coefficients();
        let known_us = self.profile.probe_us + self.profile.turnaround_us;
        // Which part of it is whose is not measured: they keep their shares.
        let factor = if known_us > 0.0 { fixed_us / known_us } else { 0.0 };
        FabricProfile {
            probe_us: self.profile.probe_us * factor,
            turnaround_us: self.profile.turnaround_us * factor,
            // So fast that it no longer counts, rather than infinitely.
            bytes_per_us: 1.0 / byte_us.max(1e-12),
            ..self.profile
        }
    }
}

/// One kernel on one device: how much slower it is than its profile says.
#[derive(Debug, Clone)]
pub struct KernelModel {
    profile: KernelProfile,
    scale: f64,
    samples: u32,
}

impl KernelModel {
    pub fn new(profile: KernelProfile) -> Self {
        KernelModel { profile, scale: 1.0, samples: 0 }
    }

    /// It took `measured_us` over so many rows and tokens, all in a row.
    pub fn observe(&mut self, rows: u64, tokens: u64, measured_us: f64) {
        let sample = measured_us / self.profile.dense_us(rows, tokens);
        if sample.is_finite() && sample > 0.0 {
            let sample = sample.clamp(1e-3, 1e3);
            self.scale *= (sample / self.scale).powf(weight(&mut self.samples));
        }
    }

    /// What is known by now.
    pub fn profile(&self) -> KernelProfile {
        let KernelProfile { launch_us, token_us, row_token_us, .. } = self.profile;
        KernelProfile {
            launch_us: launch_us * self.scale,
            token_us: token_us * self.scale,
            row_token_us: row_token_us * self.scale,
            ..self.profile
        }
    }
}
