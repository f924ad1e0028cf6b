//! The two exchanges of a layer under selection: which rows of a holder score best, and attention over those
//! that were chosen among everybody's.

use std::sync::Arc;
use std::time::Duration;

use super::session::{DispatchError, Flight, QueryShape, Session};
use crate::wire::{Best, BestShape, Dispatch, Kind, Part, PartBody, QueryHead, WireDtype};

/// What all parts of an indexer's query have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexShape {
    pub step: u32,
    pub layer: u32,
    /// Query rows of a token, and values of each.
    pub heads: u32,
    pub width: u32,
    /// Rows that are wanted for each token.
    pub topk: u32,
}

/// A part with its indexer's queries: `query_rows × width` values, and a weight for each row.
#[derive(Debug, Clone, Copy)]
pub struct IndexRows<'a> {
    pub part: Part,
    pub values: &'a [f32],
    pub weights: &'a [f32],
}

/// A part and its query rows, and for each of its tokens the rows that it attends: at least one, in order.
#[derive(Debug, Clone, Copy)]
pub struct SelectedRows<'a> {
    pub part: Part,
    pub values: &'a [f32],
    pub selected: &'a [&'a [u32]],
}

impl<'a> IndexRows<'a> {
    fn body(&self) -> PartBody<'a> {
        PartBody { values: self.values, weights: self.weights, selected: &[] }
    }
}

impl<'a> SelectedRows<'a> {
    fn body(&self) -> PartBody<'a> {
        PartBody { values: self.values, weights: &[], selected: self.selected }
    }
}

impl Session {
    /// Asks for the rows that score best.
    ///
    /// # Errors
    /// As [`Session::dispatch`].
    pub fn dispatch_scores(
        self: &Arc<Self>,
        shape: &IndexShape,
        parts: &[IndexRows<'_>],
        deadline: Duration,
    ) -> Result<Flight<Best>, DispatchError> {
        let IndexShape { step, layer, heads, width, topk } = *shape;
        let head = QueryHead {
            session: 0,
            dispatch: Dispatch { serial: 0, step, layer },
            dtype: WireDtype::F32,
            d_qk: width,
            d_v: width,
            scale: 1.0,
            kind: Kind::Scores { heads, topk },
        };
        let list: Vec<Part> = parts.iter().map(|part| part.part).collect();
        let bodies: Vec<PartBody<'_>> = parts.iter().map(IndexRows::body).collect();
        let asked = list.iter().map(|part| BestShape::new(part, heads, topk)).collect();
        self.dispatch_parts(head, &list, &bodies, asked, deadline)
    }

    /// Sends query rows, `heads` of each token, to the rows that were chosen for it.
    ///
    /// # Errors
    /// As [`Session::dispatch`].
    pub fn dispatch_selected(
        self: &Arc<Self>,
        shape: &QueryShape,
        heads: u32,
        parts: &[SelectedRows<'_>],
        deadline: Duration,
    ) -> Result<Flight, DispatchError> {
        let lists = parts.iter().flat_map(|part| part.selected);
        let named = lists.map(|rows| rows.len() as u32).sum();
        let list: Vec<Part> = parts.iter().map(|part| part.part).collect();
        let bodies: Vec<PartBody<'_>> = parts.iter().map(SelectedRows::body).collect();
        let asked = list.iter().map(|part| shape.partial(part)).collect();
        let head = shape.head(Kind::Selected { heads, named });
        self.dispatch_parts(head, &list, &bodies, asked, deadline)
    }
}
