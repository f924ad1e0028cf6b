//! A mixture of experts: tokens of the whole batch are grouped by expert, so that each expert's
//! weights are read once a step.

#![forbid(unsafe_code)]

use super::config::{ExpertsConfig, Groups, Weighting};
use super::math::{Matrix, scratch};
use super::mlp::{Mlp, MlpScratch};

#[derive(Debug)]
pub(super) struct Moe {
    pub config: ExpertsConfig,
    pub gate: Matrix,
    pub experts: Vec<Mlp>,
    pub shared: Option<Mlp>,
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(super) struct MoeScratch {
    scores: Vec<f32>,
    routes: Vec<Route>,
    x: Vec<f32>,
    y: Vec<f32>,
    mlp: MlpScratch,
}

/// One token's use of one expert.
#[derive(Debug, Clone, Copy)]
struct Route {
    expert: usize,
    token: usize,
    weight: f32,
}

impl Moe {
    /// `target += moe(x)` for `rows` rows.
    pub(super) fn apply_add(
        &self,
        x: &[f32],
        rows: usize,
        target: &mut [f32],
        memory: &mut MoeScratch,
        threads: usize,
    ) {
        let hidden = self.gate.inputs;
        let scores = scratch(&mut memory.scores, rows * self.config.experts);
        self.gate.apply(x, rows, scores, threads);
        memory.routes.clear();
        for (token, scores) in scores.chunks_exact_mut(self.config.experts).enumerate() {
            route(&self.config, token, scores, &mut memory.routes);
        }
        // Experts in order, and tokens in order within each: the order of every sum is fixed.
        memory.routes.sort_unstable_by_key(|route| (route.expert, route.token));

        for routes in memory.routes.chunk_by(|a, b| a.expert == b.expert) {
            let gathered = scratch(&mut memory.x, routes.len() * hidden);
            for (route, row) in routes.iter().zip(gathered.chunks_exact_mut(hidden)) {
                row.copy_from_slice(&x[route.token * hidden..][..hidden]);
            }
            let y = scratch(&mut memory.y, routes.len() * hidden);
            y.fill(0.0);
            let expert = &self.experts[routes[0].expert];
            expert.apply_add(gathered, routes.len(), y, &mut memory.mlp, threads);
            for (route, row) in routes.iter().zip(y.chunks_exact(hidden)) {
                let target = &mut target[route.token * hidden..][..hidden];
                for (target, value) in target.iter_mut().zip(row) {
                    *target += route.weight * value;
                }
            }
        }
        if let Some(shared) = &self.shared {
            shared.apply_add(x, rows, target, &mut memory.mlp, threads);
        }
    }
}

/// Chooses one token's experts from its gate logits, which become probabilities in place.
fn route(config: &ExpertsConfig, token: usize, scores: &mut [f32], routes: &mut Vec<Route>) {
    softmax(scores);
    if let Some(groups) = config.groups {
        keep_best_groups(groups, scores);
    }
    let from = routes.len();
    for _ in 0..config.experts_per_token {
        let expert = best(scores);
        routes.push(Route { expert, token, weight: scores[expert] });
        // Below every probability: not chosen again.
        scores[expert] = -1.0;
    }
    let chosen = &mut routes[from..];
    let factor = match config.weighting {
        Weighting::Scaled(factor) => factor,
        Weighting::Normalised => {
            1.0 / (chosen.iter().map(|route| route.weight).sum::<f32>() + 1e-20)
        }
    };
    chosen.iter_mut().for_each(|route| route.weight *= factor);
}

fn softmax(scores: &mut [f32]) {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}

/// The place of the largest score; the first of equals.
fn best(scores: &[f32]) -> usize {
    let better = |best: usize, i: usize| if scores[i] > scores[best] { i } else { best };
    (1..scores.len()).fold(0, better)
}

/// Zeroes all scores but those of the groups whose best score is among the best.
fn keep_best_groups(groups: Groups, scores: &mut [f32]) {
    let size = scores.len() / groups.groups;
    let best_of = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // A group is kept when fewer than `groups_used` groups are better, the first of equals first.
    let better = |scores: &[f32], group: usize| {
        let own = best_of(&scores[group * size..][..size]);
        let ahead = |(other, scores): (usize, &[f32])| {
            let theirs = best_of(scores);
            theirs > own || (theirs == own && other < group)
        };
        scores.chunks_exact(size).enumerate().filter(|other| ahead(*other)).count()
    };
    // Largest first would change what later groups compare with, so the verdicts come first.
    let mut dropped = [false; GROUPS_MAX];
    for (group, dropped) in dropped.iter_mut().enumerate().take(groups.groups) {
        *dropped = better(scores, group) >= groups.groups_used;
    }
    for (scores, dropped) in scores.chunks_exact_mut(size).zip(dropped) {
        if dropped {
            scores.fill(0.0);
        }
    }
}

/// Groups that a gate may have; published models have 8.
pub(super) const GROUPS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn check(config: &ExpertsConfig, logits: &[f32], want: &[(usize, f32)]) {
        let mut routes = Vec::new();
        route(config, 5, &mut logits.to_vec(), &mut routes);
        assert_eq!(routes.len(), want.len());
        for (got, want) in routes.iter().zip(want) {
            assert_eq!((got.expert, got.token), (want.0, 5));
            assert!((got.weight - want.1).abs() < 1e-6, "{got:?}, not {want:?}");
        }
    }

    #[test]
    fn experts_are_chosen_and_weighted_as_the_configuration_says() {
        let logits: Vec<f32> = [4.0f32, 1.0, 3.0, 2.0].iter().map(|p| (p / 10.0).ln()).collect();
        let mut config = ExpertsConfig {
            experts: 4,
            experts_per_token: 2,
            intermediate: 1,
            shared_intermediate: 0,
            groups: None,
            weighting: Weighting::Scaled(2.0),
        };
        check(&config, &logits, &[(0, 0.8), (2, 0.6)]);
        config.weighting = Weighting::Normalised;
        check(&config, &logits, &[(0, 4.0 / 7.0), (2, 3.0 / 7.0)]);
        // In pairs, the best pair alone: the second expert is its weaker one.
        config.weighting = Weighting::Scaled(1.0);
        config.groups = Some(Groups { groups: 2, groups_used: 1 });
        check(&config, &logits, &[(0, 0.4), (1, 0.1)]);
        config.groups = Some(Groups { groups: 4, groups_used: 3 });
        check(&config, &logits, &[(0, 0.4), (2, 0.3)]);
        // Equal scores: the first wins.
        config.groups = None;
        check(&config, &[1.0; 4], &[(0, 0.25), (1, 0.25)]);
    }
}
