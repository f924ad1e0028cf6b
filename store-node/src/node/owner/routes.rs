//! Routes: queries of engines elsewhere over blocks that a source share has pinned. The holder computes on
//! a thread of its own; here it is decided what it may read, and for how long: a route is a read of its share
//! for the block core, and has ended before the share gives its pins back.

use std::sync::Arc;

use kvasir_attention::Precision;
use kvasir_blocks::ShareError;
use kvasir_proto::{FieldError, Namespace, Share, Side, SlotIndex, v1};
use kvasir_route::holder::{Holder, OpenRoute, OpenSession};

use super::Owner;
use crate::clock;
use crate::node::command::{Refused, Reply};
use crate::node::inbox::{End, Post};
use crate::node::leg::Leg;

/// What the node keeps of its holder.
#[derive(Debug)]
pub(crate) struct Routing {
    holder: Holder,
    next_route: u64,
    /// Of one share.
    routes_max: usize,
}

impl Routing {
    /// Routes are named from a number on that is drawn anew each time the node starts.
    pub(crate) fn new(holder: Holder, first_route: u64, routes_max: u32) -> Self {
        Routing { holder, next_route: first_route, routes_max: routes_max as usize }
    }
}

/// Says so when the last route of a share is closed: each holds one, on whatever rank it is.
struct AllClosed {
    post: Post,
    share: Share,
}

impl Drop for AllClosed {
    fn drop(&mut self) {
        self.post.end(End::RoutesClosed { share: self.share });
    }
}

fn off() -> Refused {
    Refused::Precondition(
        "this node does not answer routed queries: fetch its blocks, or set `routes.enabled`"
            .into(),
    )
}

impl Owner {
    pub(super) fn open_route_session(
        &mut self,
        request: v1::OpenRouteSessionRequest,
        reply: Reply<v1::OpenRouteSessionReply>,
    ) {
        let Some(routing) = &self.routing else {
            drop(reply.send(Err(off())));
            return;
        };
        let open = OpenSession {
            rank: request.rank,
            endpoint: request.endpoint,
            answers_region: request.answers_region,
            answer_bytes_max: request.answer_bytes_max,
            answer_imm: request.answer_imm,
            query_bytes_max: request.query_bytes_max,
            depth: request.depth,
        };
        let post = self.post.clone();
        routing.holder.open_session(
            open,
            Box::new(move |opened| {
                let session = opened.as_ref().ok().map(|opened| opened.session);
                let opened =
                    opened.map_err(Refused::from).map(|opened| v1::OpenRouteSessionReply {
                        session: opened.session,
                        endpoint: opened.endpoint,
                        queries_region: opened.queries_region,
                        query_imm: opened.query_imm,
                    });
                // Whoever asked may have gone: then nobody knows of the session.
                if reply.send(opened).is_err()
                    && let Some(session) = session
                {
                    post.end(End::SessionUnwanted { session });
                }
            }),
        );
    }

    pub(super) fn close_route_session(&mut self, request: &v1::CloseRouteSessionRequest) {
        if let Some(routing) = &self.routing {
            routing.holder.close_session(request.session);
        }
    }

    pub(super) fn open_route(
        &mut self,
        request: &v1::OpenRouteRequest,
        reply: Reply<v1::OpenRouteReply>,
    ) {
        let open = match self.route_of(request) {
            Ok(open) => open,
            Err(refused) => {
                drop(reply.send(Err(refused)));
                return;
            }
        };
        let Some(routing) = &self.routing else {
            drop(reply.send(Err(off())));
            return;
        };
        let (route, blocks) = (open.route, open.blocks.len() as u32);
        let (block_tokens, kv_dtype) = (open.layout.block_tokens(), open.kv_dtype.clone());
        routing.holder.open_route(
            open,
            Box::new(move |opened| {
                let opened = opened.map_err(Refused::from).map(|opened| v1::OpenRouteReply {
                    route,
                    pins_digest: opened.pins,
                    blocks,
                    block_tokens,
                    d_qk: opened.d_qk,
                    kv_dtype,
                });
                let _ = reply.send(opened);
            }),
        );
    }

    /// Checks what is asked and begins a read of the share, if it has none for routes yet.
    fn route_of(&mut self, request: &v1::OpenRouteRequest) -> Result<OpenRoute, Refused> {
        let share = Share { tx: request.tx.try_into()?, side: Side::Source };
        let namespace = Namespace::try_from(request.namespace.as_slice())?;
        let precision = match v1::Precision::try_from(request.precision) {
            Ok(v1::Precision::Unspecified | v1::Precision::F32) => Precision::F32,
            Ok(v1::Precision::Bf16) => Precision::Bf16,
            Err(_) => {
                let (field, got) = ("precision", request.precision);
                return Err(FieldError::Unknown { field, got }.into());
            }
        };
        let view = self.blocks.share(share).filter(|view| !view.aborting);
        let view = view.ok_or_else(|| Refused::from(ShareError::Unknown))?;
        if view.request.namespace != namespace {
            let why = "the share belongs to another namespace";
            return Err(Refused::Precondition(why.into()));
        }
        let routing = self.routing.as_mut().ok_or_else(off)?;
        let leg = self.legs.get_mut(&share).ok_or_else(|| Refused::from(ShareError::Unknown))?;
        if leg.routes.len() >= routing.routes_max {
            let why = format!("the share already has {} routes", routing.routes_max);
            return Err(Refused::NoSpace(why));
        }
        if leg.cached_pages < leg.held_pages {
            let why = "blocks of the share are being read from the SSD; try again later";
            return Err(Refused::Unavailable(why.into()));
        }
        if leg.cached_pages == 0 {
            return Err(Refused::Precondition("the share holds no block".into()));
        }
        let shape = self.cache.as_ref();
        let shape = shape.ok_or_else(|| Refused::Precondition("the node has no blocks".into()))?;
        let generation = |page| {
            let slot: SlotIndex = leg.pages.slot(page);
            self.blocks.generation(slot).map(|generation| (slot, generation))
        };
        let blocks: Option<Vec<_>> = (0..leg.cached_pages).map(generation).collect();
        let blocks = blocks.ok_or_else(|| Refused::from(ShareError::Ending))?;
        if leg.routes.is_empty() {
            self.blocks.read_begin(share)?;
        }
        let route = routing.holder.route_name(request.session, routing.next_route);
        routing.next_route = route.wrapping_add(1);
        leg.routes.push(route);
        Ok(OpenRoute {
            session: request.session,
            route,
            namespace,
            blocks,
            layout: Arc::clone(&shape.layout),
            kv_dtype: shape.kv_dtype.clone(),
            precision,
        })
    }

    /// The share ends: its routes first, then its pushes. Answers whether there were routes; then
    /// [`Owner::routes_closed`] follows.
    pub(super) fn close_routes(&mut self, share: Share) -> bool {
        let Some(leg) = self.legs.get_mut(&share) else { return false };
        let routes = std::mem::take(&mut leg.routes);
        let Some(routing) = self.routing.as_ref().filter(|_| !routes.is_empty()) else {
            return false;
        };
        let all = Arc::new(AllClosed { post: self.post.clone(), share });
        for route in routes {
            let all = Arc::clone(&all);
            routing.holder.close_route(route, Box::new(move |()| drop(all)));
        }
        true
    }

    /// Nobody reads the share's slots for queries any more.
    pub(super) fn routes_closed(&mut self, share: Share) {
        self.stop_pages(share);
    }

    /// A block has failed its checksum: no query is answered from it, nor from what follows it.
    pub(super) fn end_routes_over(&mut self, slot: SlotIndex) {
        let over = |(share, leg): (&Share, &Leg)| {
            let reads = (0..leg.cached_pages).any(|page| leg.pages.slot(page) == slot);
            (!leg.routes.is_empty() && reads).then_some(*share)
        };
        let shares: Vec<Share> = self.legs.iter().filter_map(over).collect();
        for share in shares {
            self.blocks.abort(clock::now_ms(), share, kvasir_blocks::AbortReason::Corrupt);
        }
    }
}
