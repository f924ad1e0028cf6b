//! What has arrived, as attentions: parts over the same rows become one, so that the rows are read once.

use std::collections::BTreeMap;

use kvasir_attention::{Job, Partial, PartialMut, Precision, Query as Queries, Visible};
use kvasir_proto::SlotIndex;
use kvasir_transfer::memory::SharedMemory;

use super::kernels::Kernels;
use super::rows::RowShape;
use super::select;
use crate::grouping::{Attends, Member, group};
use crate::wire::{Best, Kind, Part, PartStatus, Query};

/// Slots that a session may attend.
#[derive(Debug)]
pub(super) struct Route {
    pub session: u64,
    pub pins: u64,
    /// Routes over the same slots, in the same precision, have the same.
    pub blocks: u64,
    pub slots: Vec<SlotIndex>,
    pub shape: RowShape,
    pub precision: Precision,
}

impl Route {
    /// Those of a part that was checked.
    pub(super) fn slots_of(&self, part: &Part) -> &[SlotIndex] {
        let blocks = (part.cached_rows as usize).div_ceil(self.shape.block_tokens);
        &self.slots[part.first_block as usize..][..blocks]
    }
}

/// Routes by their names.
pub(super) type Routes = BTreeMap<u64, Route>;

/// Partials of one message's parts, in their order.
pub(super) type Parts = Vec<Result<Partial, PartStatus>>;

/// What one message asked for.
#[derive(Debug)]
pub(super) enum Computed {
    Partials(Parts),
    Best(Vec<Result<Best, PartStatus>>),
}

/// Looks whether a part may be computed.
pub(super) fn check<'a>(
    routes: &'a Routes,
    query: &Query,
    part: &Part,
) -> Result<&'a Route, PartStatus> {
    let head = &query.head;
    let route = routes.get(&part.route).filter(|route| route.session == head.session);
    let route = route.ok_or(PartStatus::NoRoute)?;
    if route.pins != part.pins {
        return Err(PartStatus::OtherPins);
    }
    let width = match head.kind {
        Kind::Dense | Kind::Selected { .. } => Some(route.shape.width),
        Kind::Scores { .. } => route.shape.key_width(),
    };
    if width != Some(head.d_qk as usize) {
        return Err(PartStatus::OtherShape);
    }
    let blocks = (part.cached_rows as usize).div_ceil(route.shape.block_tokens);
    let end = (part.first_block as usize).checked_add(blocks);
    let fits = end.is_some_and(|end| end <= route.slots.len());
    if !fits || head.dispatch.layer as usize >= route.shape.layers() {
        return Err(PartStatus::OutOfRange);
    }
    Ok(route)
}

/// One attention: the rows and everybody's queries.
struct Shared<'a> {
    route: &'a Route,
    attends: Attends,
    members: Vec<Member>,
    offsets: Vec<usize>,
    values: Vec<f32>,
    partial: Partial,
    d_qk: usize,
    status: PartStatus,
}

/// Computes all parts of the messages. Answers what each asked for, and how many attentions it took.
pub(super) fn compute(
    queries: &[Query],
    routes: &Routes,
    memory: &SharedMemory,
    kernels: &mut Kernels,
) -> (Vec<Computed>, usize) {
    let mut answers: Vec<Parts> = Vec::with_capacity(queries.len());
    let mut wanted = Vec::new();
    for (message, query) in queries.iter().enumerate() {
        let mut parts = Vec::with_capacity(query.parts.len());
        let dense = query.parts.iter().filter(|_| query.head.kind == Kind::Dense);
        for (index, part) in dense.enumerate() {
            match check(routes, query, part) {
                Ok(route) => {
                    let attends = Attends {
                        blocks: route.blocks,
                        layer: query.head.dispatch.layer,
                        first_block: part.first_block,
                        cached_rows: part.cached_rows,
                        d_v: query.head.d_v,
                        scale_bits: query.head.scale.to_bits(),
                    };
                    wanted.push((attends, Member { message, part: index }));
                    parts.push(Ok(Partial::empty(0, 1)));
                }
                Err(status) => parts.push(Err(status)),
            }
        }
        answers.push(parts);
    }
    let mut groups: Vec<Shared<'_>> = group(wanted)
        .into_iter()
        .map(|(attends, members)| shared(queries, routes, attends, members))
        .collect();
    attend(&mut groups, memory, kernels);
    for group in &groups {
        scatter(group, queries, &mut answers);
    }
    let mut attentions = groups.len();
    let mut computed = |(query, dense): (&Query, Parts)| match query.head.kind {
        Kind::Dense => Computed::Partials(dense),
        Kind::Selected { heads, .. } => {
            attentions += query.parts.len();
            Computed::Partials(select::attend(query, heads, routes, memory, kernels))
        }
        Kind::Scores { heads, topk } => {
            Computed::Best(select::best(query, (heads, topk), routes, memory, kernels.exact()))
        }
    };
    let computed = queries.iter().zip(answers).map(&mut computed).collect();
    (computed, attentions)
}

fn shared<'a>(
    queries: &[Query],
    routes: &'a Routes,
    attends: Attends,
    members: Vec<Member>,
) -> Shared<'a> {
    let first = members[0];
    let query = &queries[first.message];
    let d_qk = query.head.d_qk as usize;
    let route = &routes[&query.parts[first.part].route];
    let slots = route.slots_of(&query.parts[first.part]);
    let offsets = route.shape.offsets(attends.layer as usize, slots);
    let mut values = Vec::new();
    for member in &members {
        let query = &queries[member.message];
        let rows = query.rows_of(member.part);
        values.extend_from_slice(&query.values[rows.start * d_qk..rows.end * d_qk]);
    }
    let partial = Partial::empty(values.len() / d_qk, attends.d_v as usize);
    let status = PartStatus::Computed;
    Shared { route, attends, members, offsets, values, partial, d_qk, status }
}

fn attend(groups: &mut [Shared<'_>], memory: &SharedMemory, kernels: &mut Kernels) {
    let mut jobs = Vec::with_capacity(groups.len());
    for group in groups {
        let Shared { route, attends, offsets, values, partial, d_qk, status, .. } = group;
        // SAFETY: committed slots do not change, and those of an open route stay pinned, so committed,
        // until this thread has closed it.
        let pages = unsafe { route.shape.rows(memory, offsets, attends.cached_rows as usize) };
        let Ok(pages) = pages else {
            *status = PartStatus::OtherShape;
            continue;
        };
        let query = Queries {
            values,
            d_qk: *d_qk,
            d_v: attends.d_v as usize,
            scale: f32::from_bits(attends.scale_bits),
            visible: Visible::All,
        };
        let Partial { o, m, l } = partial;
        jobs.push((route.precision, Job { query, pages, out: PartialMut { o, m, l } }));
    }
    kernels.attend_all(jobs);
}

/// Gives each member its rows of what was computed.
fn scatter(group: &Shared<'_>, queries: &[Query], answers: &mut [Parts]) {
    let d_v = group.attends.d_v as usize;
    let mut at = 0;
    for member in &group.members {
        let rows = queries[member.message].rows_of(member.part).len();
        let partial = Partial {
            o: group.partial.o[at * d_v..(at + rows) * d_v].to_vec(),
            m: group.partial.m[at..at + rows].to_vec(),
            l: group.partial.l[at..at + rows].to_vec(),
        };
        at += rows;
        answers[member.message][member.part] = match group.status {
            PartStatus::Computed => Ok(partial),
            refused => Err(refused),
        };
    }
}
