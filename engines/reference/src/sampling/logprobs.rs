//! Log probabilities as clients ask for them: of the raw logits, before penalties and temperature.

/// The log probability of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Logprob {
    pub id: u32,
    pub logprob: f32,
}

/// The chosen token's log probability and those of the `top` likeliest tokens, best first, of equal
/// ones the lowest id.
pub(crate) fn logprobs(logits: &[f32], chosen: u32, top: usize) -> (Logprob, Vec<Logprob>) {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - best).exp()).sum();
    let normaliser = f64::from(best) + sum.ln();
    let of = |id: u32| {
        let logprob = (f64::from(logits[id as usize]) - normaliser) as f32;
        Logprob { id, logprob }
    };
    let likeliest = likeliest(logits, top).into_iter().map(of).collect();
    (of(chosen), likeliest)
}

fn likeliest(logits: &[f32], top: usize) -> Vec<u32> {
    let top = top.min(logits.len());
    if top == 0 {
        return Vec::new();
    }
    let order =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.select_nth_unstable_by(top - 1, order);
    ids.truncate(top);
    ids.sort_unstable_by(order);
    ids
}
