//! The conductor's core: shadow index, cost model, selection, admission; no I/O
