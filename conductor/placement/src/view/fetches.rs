//! What is copied to an instance's node before it computes, as it is booked: the best prefix, and chunks.

use super::{BookingId, ClusterView, HostRef};
use crate::chunks::ChunkUse;
use crate::decision::{Chosen, Fetch, Placement};

/// A copy under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct BookedFetch {
    /// Which chunk of the placement; otherwise the prefix.
    chunk: Option<usize>,
    source: HostRef,
    bytes: u64,
}

/// Where the copies of one booking go.
#[derive(Debug, Clone, Default)]
pub(super) struct Ways {
    sources: Vec<HostRef>,
    /// Nothing else was under way there when they began, and so many had begun there in all.
    begun_alone: Option<u64>,
}

/// Nothing of it lies on an SSD only.
fn is_from_memory(fetch: &Fetch) -> bool {
    fetch.source.memory_blocks >= fetch.until_block
}

impl ClusterView {
    /// Those of a placement: the prefix first.
    pub(super) fn fetches_of(&self, placement: &Placement) -> Vec<BookedFetch> {
        let host = |source: &Chosen| self.host_of(source.instance);
        let prefix = placement.fetch.as_ref().map(|fetch| BookedFetch {
            chunk: None,
            source: host(&fetch.source),
            bytes: fetch.bytes,
        });
        let chunks = placement.chunks.iter().enumerate().filter_map(|(at, chunk)| {
            let ChunkUse::Fetched(source) = &chunk.becomes else { return None };
            let (source, bytes) = (host(source), chunk.fetched_bytes);
            Some(BookedFetch { chunk: Some(at), source, bytes })
        });
        prefix.into_iter().chain(chunks).collect()
    }

    /// Counts copies on both ways. Answers with when they are predicted to be over.
    pub(super) fn begin_fetches(
        &mut self,
        placement: &Placement,
        (fetches, target): (&[BookedFetch], HostRef),
        now_us: u64,
    ) -> (u64, Ways) {
        let of_one_kind = placement.fetch.is_none() || fetches.len() == 1;
        // Chunks are only taken from memory.
        let from_memory = placement.fetch.as_ref().is_none_or(is_from_memory);
        let sources: Vec<HostRef> = fetches.iter().map(|fetch| fetch.source).collect();
        let is_free = self.bytes_under_way(&sources, target) == 0;
        fetches.iter().for_each(|fetch| self.begin_fetch(*fetch, target, now_us));
        let begun = self.fetches_begun(&sources, target);
        let begun_alone = (of_one_kind && from_memory && is_free).then_some(begun);
        let mut ready_us = now_us;
        if placement.fetch.is_some() {
            ready_us = ready_us.saturating_add(placement.transfer_us);
        }
        let fetched = placement.chunks.iter().filter(|chunk| chunk.is_fetched());
        let ready_us =
            fetched.fold(ready_us, |ready_us, chunk| ready_us.saturating_add(chunk.once_us));
        (ready_us, Ways { sources, begun_alone })
    }

    /// From these nodes, and to this one.
    fn bytes_under_way(&self, sources: &[HostRef], target: HostRef) -> u64 {
        let out = sources.iter().filter_map(|source| self.seen_host(*source));
        let out_bytes: u64 = out.map(|source| source.bytes_out).sum();
        out_bytes + self.seen_host(target).map_or(0, |target| target.bytes_in)
    }

    /// From these nodes, and to this one, ever. A node that has gone has taken its count along.
    fn fetches_begun(&self, sources: &[HostRef], target: HostRef) -> u64 {
        let out = sources.iter().filter_map(|source| self.seen_host(*source));
        let out: u64 = out.map(|source| source.fetches_out).sum();
        out + self.seen_host(target).map_or(0, |target| target.fetches_in)
    }

    fn begin_fetch(&mut self, fetch: BookedFetch, target: HostRef, now_us: u64) {
        let BookedFetch { source, bytes, .. } = fetch;
        let mut free_us = now_us;
        if let Some(source) = self.find_host(source) {
            free_us = free_us.max(now_us.saturating_add(source.out_waits_us(now_us)));
            source.bytes_out += bytes;
            source.fetches_out += 1;
        }
        if let Some(target) = self.find_host(target) {
            free_us = free_us.max(now_us.saturating_add(target.in_waits_us(now_us)));
            free_us = free_us.saturating_add(target.link.occupied_us(bytes));
            target.bytes_in += bytes;
            target.fetches_in += 1;
            target.in_free_us = free_us;
        }
        if let Some(source) = self.find_host(source) {
            source.out_free_us = free_us;
        }
    }

    /// The fetch of this request's prefix has ended: `moved` are its bytes and time when it went well.
    pub fn fetched(&mut self, id: BookingId, moved: Option<(u64, u64)>) {
        if self.end_fetch(id, None).is_some()
            && let Some((bytes, us)) = moved
        {
            self.moved(id, bytes, us);
        }
    }

    /// The copy of this chunk has ended. Answers how many bytes were to come with it.
    pub fn chunk_fetched(&mut self, id: BookingId, chunk: usize) -> u64 {
        self.end_fetch(id, Some(chunk)).map_or(0, |fetch| fetch.bytes)
    }

    /// So many bytes have come to where the prompt of this request is computed, in this time.
    pub fn moved(&mut self, id: BookingId, bytes: u64, us: u64) {
        let Some(booked) = self.bookings.get(&id) else { return };
        let (prefill, ways) = (booked.prefill_host, &booked.ways);
        let alone = ways.begun_alone == Some(self.fetches_begun(&ways.sources, prefill));
        if let Some(host) = self.find_host(prefill) {
            host.link.observe(bytes, us, alone);
        }
    }

    /// Whatever is still under way for this request is not waited for any more.
    pub(super) fn end_fetches(&mut self, id: BookingId) {
        let Some(booked) = self.bookings.get(&id) else { return };
        for fetch in booked.fetches.clone() {
            self.end_fetch(id, fetch.chunk);
        }
    }

    fn end_fetch(&mut self, id: BookingId, chunk: Option<usize>) -> Option<BookedFetch> {
        let booked = self.bookings.get_mut(&id)?;
        let at = booked.fetches.iter().position(|fetch| fetch.chunk == chunk)?;
        let (fetch, prefill) = (booked.fetches.remove(at), booked.prefill_host);
        if let Some(source) = self.find_host(fetch.source) {
            source.bytes_out -= fetch.bytes;
        }
        if let Some(target) = self.find_host(prefill) {
            target.bytes_in -= fetch.bytes;
        }
        Some(fetch)
    }
}
