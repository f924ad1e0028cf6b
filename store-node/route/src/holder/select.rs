//! Parts under selection: which rows score best, and attention over those that were chosen. Each token has
//! rows of its own, so nothing is shared between parts.

use kvasir_attention::index::IndexQuery;
use kvasir_attention::{Attention, Job, Partial, PartialMut, Precision, Query as Queries, Visible};
use kvasir_transfer::memory::SharedMemory;

use super::batch::{Route, Routes, check};
use super::kernels::Kernels;
use crate::wire::{Best, Part, PartStatus, Query};

/// Which rows of each part score best.
pub(super) fn best(
    query: &Query,
    (heads, topk): (u32, u32),
    routes: &Routes,
    memory: &SharedMemory,
    kernels: &Attention,
) -> Vec<Result<Best, PartStatus>> {
    let (heads, width) = (heads as usize, query.head.d_qk as usize);
    let of_part = |(n, part): (usize, &Part)| {
        let route = check(routes, query, part)?;
        let offsets =
            route.shape.key_offsets(query.head.dispatch.layer as usize, route.slots_of(part));
        // SAFETY: committed slots do not change, and those of an open route stay pinned, so committed,
        // until this thread has closed it.
        let keys = unsafe { route.shape.keys(memory, &offsets, part.cached_rows as usize) };
        let keys = keys.map_err(|_| PartStatus::OtherShape)?;
        let rows = query.rows_of(n);
        let asked = IndexQuery {
            values: &query.values[rows.start * width..rows.end * width],
            weights: &query.weights[rows],
            heads,
            width,
            visible: Visible::All,
        };
        Ok(Best(kernels.candidates(&asked, &keys, topk as usize)))
    };
    query.parts.iter().enumerate().map(of_part).collect()
}

/// The partial of each part over its chosen rows.
pub(super) fn attend(
    query: &Query,
    heads: u32,
    routes: &Routes,
    memory: &SharedMemory,
    kernels: &mut Kernels,
) -> Vec<Result<Partial, PartStatus>> {
    let layer = query.head.dispatch.layer as usize;
    let pages_of = |part: &Part| -> Result<(&Route, Vec<usize>), PartStatus> {
        let route = check(routes, query, part)?;
        Ok((route, route.shape.offsets(layer, route.slots_of(part))))
    };
    let pages: Vec<_> = query.parts.iter().map(pages_of).collect();
    let d_v = query.head.d_v as usize;
    let empty = |part: &Part| Partial::empty(part.query_rows as usize, d_v);
    let mut partials: Vec<Partial> = query.parts.iter().map(empty).collect();
    let mut jobs = Vec::new();
    let mut statuses = Vec::with_capacity(pages.len());
    for (n, (pages, partial)) in pages.iter().zip(&mut partials).enumerate() {
        let done = match pages {
            Ok((route, offsets)) => {
                of_part(query, (n, heads as usize), (route, offsets), memory, partial, &mut jobs)
            }
            Err(refused) => Err(*refused),
        };
        statuses.push(done);
    }
    kernels.attend_all(jobs);
    statuses.into_iter().zip(partials).map(|(status, partial)| status.map(|()| partial)).collect()
}

/// Adds a job for each token of a part.
fn of_part<'a>(
    query: &'a Query,
    (n, heads): (usize, usize),
    (route, offsets): (&Route, &'a [usize]),
    memory: &'a SharedMemory,
    partial: &'a mut Partial,
    jobs: &mut Vec<(Precision, Job<'a>)>,
) -> Result<(), PartStatus> {
    let (d_qk, d_v) = (query.head.d_qk as usize, query.head.d_v as usize);
    // SAFETY: committed slots do not change, and those of an open route stay pinned, so committed, until
    // this thread has closed it.
    let pages = unsafe { route.shape.rows(memory, offsets, query.parts[n].cached_rows as usize) };
    let pages = pages.map_err(|_| PartStatus::OtherShape)?;
    let rows = query.rows_of(n);
    let tokens = rows.start / heads..rows.end / heads;
    let values = query.values[rows.start * d_qk..rows.end * d_qk].chunks_exact(heads * d_qk);
    let out = (partial.o.chunks_exact_mut(heads * d_v))
        .zip(partial.m.chunks_exact_mut(heads))
        .zip(partial.l.chunks_exact_mut(heads));
    for ((token, values), ((o, m), l)) in tokens.zip(values).zip(out) {
        let selected = pages.select(query.selected.of(token));
        let pages = selected.map_err(|_| PartStatus::OutOfRange)?;
        let scale = query.head.scale;
        let query = Queries { values, d_qk, d_v, scale, visible: Visible::All };
        jobs.push((route.precision, Job { query, pages, out: PartialMut { o, m, l } }));
    }
    Ok(())
}
