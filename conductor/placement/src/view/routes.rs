//! Which nodes attend what for which instances, as it is booked.

use super::{BookingId, ClusterView, HostRef, InstanceRef};
use crate::attend::LayerDemand;
use crate::decision::{Chosen, Placement};

/// A part of a prompt that is attended elsewhere.
#[derive(Debug, Clone, Copy)]
pub(super) struct BookedRoute {
    /// Which chunk of the placement; otherwise the prefix.
    chunk: Option<usize>,
    pub(super) source: HostRef,
    /// What a layer of it asks.
    layer: LayerDemand,
    /// How many of its instance the source had beside it when it came.
    pub(super) companions: u32,
    /// What it would take where the request decodes.
    slots: u32,
}

impl ClusterView {
    /// Those of a placement: the prefix first.
    pub(super) fn routes_of(&self, placement: &Placement) -> Vec<BookedRoute> {
        let host = |source: &Chosen| self.host_of(source.instance);
        let parts = placement.route.iter().flat_map(|route| &route.parts);
        let prefix = parts.map(|part| BookedRoute {
            chunk: None,
            source: host(&part.source),
            layer: part.layer,
            companions: 0,
            slots: part.blocks,
        });
        let chunks = placement.chunks.iter().enumerate().filter(|(_, chunk)| chunk.is_routed());
        let chunks = chunks.filter_map(|(at, chunk)| {
            Some(BookedRoute {
                chunk: Some(at),
                source: host(chunk.source()?),
                layer: chunk.layer?,
                companions: 0,
                slots: chunk.blocks,
            })
        });
        prefix.chain(chunks).collect()
    }

    /// Its prefix is not attended elsewhere after all: it takes slots where the request decodes.
    pub fn unrouted(&mut self, id: BookingId) {
        self.end_route_of(id, None);
    }

    /// The same of one of its chunks.
    pub fn unrouted_chunk(&mut self, id: BookingId, chunk: usize) {
        self.end_route_of(id, Some(chunk));
    }

    fn end_route_of(&mut self, id: BookingId, chunk: Option<usize>) {
        let Some(mut booked) = self.bookings.remove(&id) else { return };
        let of_it = |route: &mut BookedRoute| route.chunk == chunk;
        let ended: Vec<BookedRoute> = booked.routes.extract_if(.., of_it).collect();
        for route in ended {
            self.end_route(route.source, booked.decode);
            booked.decode_slots = booked.decode_slots.saturating_add(route.slots);
            if let Some(host) = self.find_host(booked.decode_host) {
                host.take_slots(&mut booked.decode_taken, route.slots);
            }
        }
        self.bookings.insert(id, booked);
    }

    /// What it has elsewhere was opened after so long.
    pub fn opened(&mut self, opening_us: u64) {
        if let Some(learned) = &mut self.routes {
            learned.observe_opening(opening_us);
        }
    }

    /// So many layers of decode steps were attended elsewhere, and took so long.
    pub fn routed(&mut self, id: BookingId, layers: u32, routed_us: u64) {
        self.learn_layer(id, None, routed_us as f64 / f64::from(layers));
    }

    /// The same of layers of its prompt, for which no other request of its instance asked; `queries` are those of all these
    /// layers. What no prompt asks is not learned from.
    pub fn prompt_routed(&mut self, id: BookingId, layers: u32, queries: u64, routed_us: u64) {
        let Some(booked) = self.bookings.get(&id) else { return };
        let layers = f64::from(layers);
        let queries = queries as f64 / layers;
        if queries > 0.0 && queries <= f64::from(booked.prompt_tokens) {
            self.learn_layer(id, Some(queries), routed_us as f64 / layers);
        }
    }

    fn learn_layer(&mut self, id: BookingId, queries: Option<f64>, layer_us: f64) {
        let Some(booked) = self.bookings.get(&id) else { return };
        let (routes, requester) = (&booked.routes, booked.decode);
        let asked = |route: &BookedRoute| self.asked_of(route.source, routes, requester, queries);
        let asked: Vec<(LayerDemand, u32)> = routes.iter().map(asked).collect();
        if let Some(learned) = &mut self.routes {
            // All holders are asked at once: a layer waits for the one that takes longest.
            let takes_us = |(demand, flows): &(LayerDemand, u32)| learned.layer_us(*demand, *flows);
            let slowest = asked.into_iter().max_by(|a, b| takes_us(a).total_cmp(&takes_us(b)));
            if let Some((demand, flows)) = slowest {
                learned.observe_layer(demand, flows, layer_us);
            }
        }
    }

    /// What a layer asks of one holder: these parts of one request that it has, by so many queries, or by one for each
    /// request that was there of that instance at either end; and the flows of others there. Who comes or goes
    /// between is not counted.
    fn asked_of(
        &self,
        holder: HostRef,
        routes: &[BookedRoute],
        requester: InstanceRef,
        queries: Option<f64>,
    ) -> (LayerDemand, u32) {
        let parts = || routes.iter().filter(|route| route.source == holder);
        let now = self.hosts.iter().find(|host| host.reference == holder);
        let (flows, beside) = now.map_or((0, 0), |holder| {
            (holder.flows_beside(requester), holder.requests_beside(requester))
        });
        let now = now.map_or(1, |holder| holder.routes_of(requester));
        let before = parts().map(|part| part.companions + 1).max().unwrap_or(1);
        let count = parts().count().max(1) as f64;
        // Others are taken to ask what these do in the mean.
        let together = queries.unwrap_or(f64::from(now.max(before)) / count);
        let sum = |of: fn(&LayerDemand) -> f64| parts().map(|part| of(&part.layer)).sum::<f64>();
        let rows = sum(|layer| layer.rows) / count;
        let demand = LayerDemand {
            bytes: together * sum(|layer| layer.bytes),
            tokens: sum(|layer| layer.tokens),
            // Each part is attended by queries of its own.
            rows: (together + f64::from(beside)) * rows,
        };
        (demand, flows)
    }

    /// Answers with how many parts of requests of that instance the source attends already.
    pub(super) fn begin_route(&mut self, source: HostRef, requester: InstanceRef) -> u32 {
        if let Some(requester) = self.find(requester) {
            requester.routes_in += 1;
        }
        let Some(source) = self.find_host(source) else { return 0 };
        match source.routes_out.iter_mut().find(|(of, _)| *of == requester) {
            Some((_, count)) => {
                *count += 1;
                *count - 1
            }
            None => {
                source.routes_out.push((requester, 1));
                0
            }
        }
    }

    pub(super) fn end_route(&mut self, source: HostRef, requester: InstanceRef) {
        if let Some(requester) = self.find(requester) {
            requester.routes_in = requester.routes_in.saturating_sub(1);
        }
        let Some(source) = self.find_host(source) else { return };
        for (of, count) in &mut source.routes_out {
            *count -= u32::from(*of == requester);
        }
        source.routes_out.retain(|(_, count)| *count > 0);
    }
}
