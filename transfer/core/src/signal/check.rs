//! Says which signals could have been seen before their data. It knows neither how the plan came to be
//! nor how it was executed: it looks at when things landed.

use std::collections::BTreeMap;

use super::nic::Run;
use super::{SignalWord, Work};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlySignal {
    pub transfer: usize,
    pub signal: SignalWord,
    pub landed_ps: u64,
    /// None: its put was never sent.
    pub put_landed_ps: Option<u64>,
}

/// Signals that landed when their put had not.
pub fn early_signals(run: &Run) -> Vec<EarlySignal> {
    let puts: BTreeMap<usize, u64> = run
        .sent
        .iter()
        .filter(|sent| matches!(sent.request.work, Work::Put { .. }))
        .map(|sent| (sent.request.transfer, sent.landed_ps))
        .collect();
    let signals = run.sent.iter().filter_map(|sent| {
        let Work::Signal(signal) = sent.request.work else { return None };
        let transfer = sent.request.transfer;
        let put_landed_ps = puts.get(&transfer).copied();
        // In the same picosecond is not after it.
        let early = put_landed_ps.is_none_or(|put| sent.landed_ps <= put);
        early.then_some(EarlySignal { transfer, signal, landed_ps: sent.landed_ps, put_landed_ps })
    });
    signals.collect()
}
