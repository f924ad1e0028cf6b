//! A fake store node and its fake engine, behind one gRPC server on loopback.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use kvasir_proto::v1::engine_server::{Engine, EngineServer};
use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::v1::store_node_server::{StoreNode, StoreNodeServer};
use kvasir_proto::{Side, SlotLayout, v1};
use tokio::net::TcpListener;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status};

use super::script::{Leg, Reply, Script};
use super::shelf::Shelf;
use super::world::{Happened, World};

pub(crate) const BLOCK_TOKENS: u32 = 16;
pub(crate) const VOCAB_SIZE: u32 = 1024;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Prefill,
    Decode,
    Both,
}

/// See the module. Dropping it kills it.
pub(crate) struct Pair {
    pub address: String,
    script: Arc<Mutex<Script>>,
    shelf: Arc<Mutex<Shelf>>,
    _stop: DropGuard,
}

impl Pair {
    pub(crate) async fn start(
        world: &World,
        name: &'static str,
        role: Role,
        script: Script,
    ) -> Pair {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let shelf = Arc::new(Mutex::new(Shelf::default()));
        shelf.lock().expect("no panic").has(&script.keys);
        let script = Arc::new(Mutex::new(script));
        let fake = Fake {
            world: world.clone(),
            name,
            role,
            address: address.clone(),
            script: Arc::clone(&script),
            lease_ends: Arc::default(),
            shelf: Arc::clone(&shelf),
        };
        let stop = CancellationToken::new();
        let server = tonic::transport::Server::builder()
            .add_service(StoreNodeServer::new(fake.clone()))
            .add_service(EngineServer::new(fake))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                ended = server => ended.expect("the fake serves"),
                () = stopped.cancelled() => {}
            }
        });
        Pair { address, script, shelf, _stop: stop.drop_guard() }
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script.lock().expect("no panic"));
    }

    /// What it keeps.
    pub(crate) fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().expect("no panic")
    }
}

#[derive(Clone)]
struct Fake {
    world: World,
    name: &'static str,
    role: Role,
    address: String,
    script: Arc<Mutex<Script>>,
    /// By transaction and side.
    lease_ends: Arc<Mutex<BTreeMap<(u64, i32), Instant>>>,
    shelf: Arc<Mutex<Shelf>>,
}

impl Fake {
    fn script(&self) -> Script {
        self.script.lock().expect("no panic").clone()
    }

    fn description(&self) -> v1::NodeDescription {
        let role = match self.role {
            Role::Prefill => v1::Role::Prefill,
            Role::Decode => v1::Role::Decode,
            Role::Both => v1::Role::Both,
        };
        let engine = v1::InstanceDescription {
            instance_id: format!("engine-{}", self.name),
            role: role as i32,
            model: Some(v1::ModelDescription {
                name: "tiny".to_owned(),
                fingerprint: vec![self.script().fingerprint; 32],
                kv_dtype: "f32".to_owned(),
                vocab_size: VOCAB_SIZE,
                context_tokens: self.script().context_tokens,
                routed: self.script().routes.then_some(v1::RoutedRows {
                    heads: 4,
                    query_bytes: 64,
                    partial_bytes: 64,
                }),
            }),
            engine_address: self.address.clone(),
            attach_epoch: 1,
            running_requests_max: 64,
            current_role: 0,
            role_version: 0,
            instance_type: String::new(),
        };
        let load = v1::InstanceLoad {
            running_requests: self.script().full.into(),
            ..v1::InstanceLoad::default()
        };
        v1::NodeDescription {
            node_id: self.name.to_owned(),
            incarnation: 1,
            endpoint: self.name.as_bytes().to_vec(),
            instances: vec![v1::AttachedInstance { description: Some(engine), load: Some(load) }],
            layout: Some((&SlotLayout::layer_major(BLOCK_TOKENS, 2, 64).expect("fits")).into()),
            slots_total: self.script().slots,
            slots_free: self.script().slots,
            slots_available: if self.script().full { 0 } else { self.script().slots },
            ssd: self
                .script()
                .keeps
                .then(|| v1::SsdStatus { usable: true, ..v1::SsdStatus::default() }),
            persists_contexts: self.script().keeps,
            draining: false,
            load_read_unix_ms: 0,
        }
    }

    fn next_renewal(&self) -> Reply {
        next(&mut self.script.lock().expect("no panic").renewals)
    }

    /// Whether the share was still leased; it is from now on.
    fn lease(&self, tx: u64, side: i32, lease_ms: u64) -> bool {
        let now = Instant::now();
        let end = now + Duration::from_millis(lease_ms);
        let before = self.lease_ends.lock().expect("no panic").insert((tx, side), end);
        before.is_none_or(|end| now < end)
    }

    fn targets(&self, first_page: u32, until_page: u32) -> v1::WriteTargets {
        v1::WriteTargets {
            endpoint: self.name.as_bytes().to_vec(),
            first_page,
            slots: (first_page..until_page).collect(),
            imm: 1,
            ..v1::WriteTargets::default()
        }
    }
}

fn next(replies: &mut Vec<Reply>) -> Reply {
    if replies.is_empty() { Reply::Do } else { replies.remove(0) }
}

async fn follow(reply: Reply) -> Result<(), Status> {
    match reply {
        Reply::Do => Ok(()),
        Reply::Fail(code) => Err(Status::new(code, "as the script says")),
        Reply::Hang | Reply::Hold => std::future::pending().await,
    }
}

fn serial(tx: Option<v1::TxId>) -> u64 {
    tx.expect("an id").serial
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl StoreNode for Fake {
    type EventsStream = Events<v1::NodeEvent>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::NodeDescription>, Status> {
        if self.script().away {
            return Err(Status::unavailable("as the script says"));
        }
        Ok(Response::new(self.description()))
    }

    async fn events(
        &self,
        _: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        while self.script().silent {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let keys = self.script().keys;
        let snapshot = v1::Snapshot { sequence: 0, first: true, last: true, keys, tier: 0 };
        let event = |event| Ok(v1::NodeEvent { incarnation: 1, event: Some(event) });
        let first = stream::iter([event(v1::node_event::Event::Snapshot(snapshot))]);
        let fake = self.clone();
        let rest = stream::unfold(fake, move |fake| async move {
            for _ in 0..50 {
                if fake.script().away {
                    return None;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            let status = v1::node_event::Event::Status(fake.description());
            Some((Ok(v1::NodeEvent { incarnation: 1, event: Some(status) }), fake))
        });
        Ok(Response::new(Box::pin(first.chain(rest))))
    }

    async fn tx_allocate(
        &self,
        request: Request<v1::TxAllocateRequest>,
    ) -> Result<Response<v1::TxAllocateReply>, Status> {
        let request = request.into_inner();
        let tx = serial(request.tx);
        self.world.note(Happened::Allocate { node: self.name, tx, request: request.clone() });
        let side = Side::from_wire(request.side).expect("a side");
        while side == Side::Source && self.script().pin == Reply::Hold {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let script = self.script();
        follow(script.allocate).await?;
        self.lease(tx, request.side, request.lease_ms);
        let pages = request.prompt_tokens.div_ceil(BLOCK_TOKENS);
        let until = request.fetch_until_block;
        let held = match side {
            Side::Source => {
                follow(script.pin).await?;
                request.keys.len() as u32 / 16
            }
            Side::Prefill | Side::Decode => script.cached_blocks,
        };
        let targets = match side {
            Side::Decode => Some(self.targets(0, pages)),
            Side::Prefill if until > held => Some(self.targets(held, until)),
            Side::Prefill | Side::Source => None,
        };
        let incarnation = if script.restarted { 2 } else { 1 };
        let reply = v1::TxAllocateReply { incarnation, cached_blocks: held, targets };
        Ok(Response::new(reply))
    }

    async fn tx_push(
        &self,
        request: Request<v1::TxPushRequest>,
    ) -> Result<Response<v1::TxPushReply>, Status> {
        let request = request.into_inner();
        let side = Side::from_wire(request.side).expect("a side");
        self.world.note(Happened::Push { node: self.name, tx: serial(request.tx), side });
        while self.script().push == Reply::Hold {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let script = self.script();
        follow(script.push).await?;
        let asked = request.targets.expect("targets").slots.len() as u32;
        let valid_blocks = asked.min(script.good_blocks_max);
        Ok(Response::new(v1::TxPushReply { valid_blocks, corrupt_blocks: 0 }))
    }

    async fn tx_commit(
        &self,
        request: Request<v1::TxCommitRequest>,
    ) -> Result<Response<v1::TxCommitReply>, Status> {
        let v1::TxCommitRequest { tx, valid_blocks, source_lost, .. } = request.into_inner();
        let (node, tx) = (self.name, serial(tx));
        self.world.note(Happened::Commit { node, tx, valid_blocks, source_lost });
        follow(self.script().commit).await?;
        Ok(Response::new(v1::TxCommitReply { cached_blocks: valid_blocks }))
    }

    async fn tx_abort(
        &self,
        request: Request<v1::TxAbortRequest>,
    ) -> Result<Response<v1::TxAbortReply>, Status> {
        let request = request.into_inner();
        let side = Side::from_wire(request.side).expect("a side");
        let fails = {
            let mut script = self.script.lock().expect("no panic");
            let fails = script.aborts_to_fail > 0;
            script.aborts_to_fail = script.aborts_to_fail.saturating_sub(1);
            fails
        };
        if fails {
            return Err(Status::unavailable("as the script says"));
        }
        self.world.note(Happened::Abort { node: self.name, tx: serial(request.tx), side });
        Ok(Response::new(v1::TxAbortReply { known: true }))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewReply>, Status> {
        let v1::RenewRequest { shares, lease_ms } = request.into_inner();
        for share in shares {
            let (node, tx) = (self.name, serial(share.tx));
            let side = Side::from_wire(share.side).expect("a side");
            self.world.note(Happened::Renew { node, tx, side });
            if self.script().unrenewed == Some(side) {
                follow(Reply::Hang).await?;
            }
            follow(self.next_renewal()).await?;
            if !self.lease(tx, share.side, lease_ms) {
                self.world.note(Happened::RanOut { node, tx, side });
            }
        }
        Ok(Response::new(v1::RenewReply::default()))
    }

    async fn persist_context(
        &self,
        request: Request<v1::PersistContextRequest>,
    ) -> Result<Response<v1::PersistContextReply>, Status> {
        let request = request.into_inner();
        self.world.note(Happened::Keep { node: self.name, request: request.clone() });
        if !self.script().keeps {
            return Err(Status::failed_precondition("it has no SSD"));
        }
        let first = next(&mut self.script.lock().expect("no panic").keeps_next);
        follow(first).await?;
        follow(self.script().keep).await?;
        let blocks_max = self.script().keep_blocks_max;
        self.shelf.lock().expect("no panic").keep(&request, blocks_max).map(Response::new)
    }

    async fn holds_contexts(
        &self,
        _: Request<v1::HoldsContextsRequest>,
    ) -> Result<Response<v1::HoldsContextsReply>, Status> {
        Err(Status::unimplemented("only nodes ask nodes for that"))
    }

    async fn list_contexts(
        &self,
        request: Request<v1::ListContextsRequest>,
    ) -> Result<Response<v1::ListContextsReply>, Status> {
        follow(self.script().list).await?;
        let listed = self.shelf.lock().expect("no panic").list(&request.into_inner());
        Ok(Response::new(listed))
    }

    async fn delete_context(
        &self,
        request: Request<v1::DeleteContextRequest>,
    ) -> Result<Response<v1::DeleteContextReply>, Status> {
        let request = request.into_inner();
        self.world.note(Happened::Drop { node: self.name, request: request.clone() });
        while self.script().drop == Reply::Hold {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        follow(self.script().drop).await?;
        self.shelf.lock().expect("no panic").end(&request).map(Response::new)
    }

    async fn prefetch(
        &self,
        _: Request<v1::PrefetchRequest>,
    ) -> Result<Response<v1::PrefetchReply>, Status> {
        Err(Status::unimplemented("it has no SSD"))
    }

    async fn replicate(
        &self,
        request: Request<v1::ReplicateRequest>,
    ) -> Result<Response<v1::ReplicateReply>, Status> {
        let request = request.into_inner();
        self.world.note(Happened::Replicate { node: self.name, request: request.clone() });
        follow(self.script().replicate).await?;
        Ok(Response::new(v1::ReplicateReply { blocks: request.keys.len() as u32 / 16 }))
    }

    async fn set_role(
        &self,
        _: Request<v1::SetRoleRequest>,
    ) -> Result<Response<v1::SetRoleReply>, Status> {
        Err(Status::unimplemented("no engine of it does both"))
    }

    async fn list_blocks(
        &self,
        _: Request<v1::ListBlocksRequest>,
    ) -> Result<Response<v1::ListBlocksReply>, Status> {
        Ok(Response::new(v1::ListBlocksReply::default()))
    }
}

#[tonic::async_trait]
impl Engine for Fake {
    type GenerateStream = Events<v1::GenerateEvent>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let traceparent = request.metadata().get("traceparent");
        let traceparent = traceparent.map(|value| value.to_str().expect("text").to_owned());
        let request = request.into_inner();
        self.shelf.lock().expect("no panic").compute(&request);
        let (node, tx, leg) = (self.name, serial(request.tx), request.phase());
        let generate = Happened::Generate { node, tx, leg, request: request.clone(), traceparent };
        self.world.note(generate);
        let over = Over { world: self.world.clone(), node, tx, leg, finished: false };
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let fake = self.clone();
        tokio::spawn(async move {
            let closed = sender.clone();
            tokio::select! {
                // Dropping the leg notes that it is over.
                () = closed.closed() => {}
                () = fake.generate_leg(request, sender, over) => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

struct Over {
    world: World,
    node: &'static str,
    tx: u64,
    leg: v1::Phase,
    finished: bool,
}

impl Drop for Over {
    fn drop(&mut self) {
        let Over { world, node, tx, leg, finished } = self;
        world.note(Happened::GenerateOver { node, tx: *tx, leg: *leg, finished: *finished });
    }
}

type Sender = tokio::sync::mpsc::Sender<Result<v1::GenerateEvent, Status>>;

impl Fake {
    async fn generate_leg(&self, request: v1::GenerateRequest, sender: Sender, mut over: Over) {
        let send = async |event: Event| {
            let _ = sender.send(Ok(v1::GenerateEvent { event: Some(event) })).await;
        };
        let fail = async |code: tonic::Code| {
            let _ = sender.send(Err(Status::new(code, "as the script says"))).await;
        };
        let is_prefill = request.phase() == v1::Phase::Prefill;
        let which = |script: &Script| if is_prefill { script.prefill } else { script.decode };
        let mut plan = which(&self.script());
        if let Leg::FailFirst(_) = plan {
            let mut script = self.script.lock().expect("no panic");
            script.prefill = Leg::Do;
            script.decode = Leg::Do;
        }
        if let Leg::Fail(code) | Leg::FailFirst(code) = plan {
            return fail(code).await;
        }
        let cached_tokens = self.script().cached_blocks * BLOCK_TOKENS;
        send(Event::Accepted(v1::Accepted { cached_tokens })).await;
        while plan == Leg::Hold {
            tokio::time::sleep(Duration::from_millis(2)).await;
            plan = which(&self.script());
        }
        match plan {
            Leg::Fail(code) => return fail(code).await,
            Leg::Hang => return std::future::pending().await,
            Leg::End => return,
            _ => {}
        }
        let tx = over.tx;
        let mut finished = v1::Finished {
            computed_prompt_tokens: request.prompt.len() as u32 - cached_tokens,
            prefill_us: 1_000,
            ..v1::Finished::default()
        };
        if is_prefill {
            self.world.hand_over(tx);
            finished.set_reason(v1::finished::Reason::HandedOver);
            send(Event::Finished(finished)).await;
            over.finished = true;
            return;
        }
        if request.phase() == v1::Phase::Decode {
            self.world.handed_over(tx).await;
        }
        let sampling = request.sampling.expect("sampling");
        let script = self.script();
        for index in 0..sampling.max_tokens {
            while plan == Leg::HoldAfter(index) {
                tokio::time::sleep(Duration::from_millis(2)).await;
                plan = which(&self.script());
            }
            match plan {
                Leg::FailAfter(tokens, code) if index == tokens => return fail(code).await,
                Leg::HangAfter(tokens) if index == tokens => return std::future::pending().await,
                _ => {}
            }
            send(Event::Tokens(token(&sampling, index, &script))).await;
        }
        let reason = match script.stop_matched {
            "" => v1::finished::Reason::Length,
            _ => v1::finished::Reason::Stop,
        };
        finished.set_reason(reason);
        finished.generated_tokens = sampling.max_tokens;
        finished.text = script.held_back.to_owned();
        (finished.route_opening_us, finished.route_connection_opened) = script.opening;
        let (layers, us, queries) = script.prompt_routed;
        finished.routed_prompt_layers = layers;
        finished.routed_prompt_us = us;
        finished.routed_prompt_queries = queries;
        finished.stop_matched = script.stop_matched.to_owned();
        send(Event::Finished(finished)).await;
        over.finished = true;
    }
}

/// Each token's text names the seed and its place. Every third one's text comes with the next.
fn token(sampling: &v1::SamplingParams, index: u32, script: &Script) -> v1::Tokens {
    let word = |index: u32| format!(" s{}t{index}{}", sampling.seed, script.padding);
    let last = index + 1 == sampling.max_tokens;
    let text = match index % 3 {
        2 if !last => String::new(),
        0 if index > 0 => format!("{}{}", word(index - 1), word(index)),
        _ => word(index),
    };
    let logprob = |id: u32, logprob: f32, text: &str| v1::TokenLogprob {
        id,
        logprob,
        bytes: text.as_bytes().to_vec(),
    };
    let top = (0..sampling.top_logprobs).map(|n| logprob(n, -1.0 - n as f32, &format!("top{n}")));
    let out = v1::TokenOut {
        id: index + 100,
        logprob: sampling.logprobs.then(|| logprob(index + 100, -0.5, &word(index))),
        top: top.collect(),
    };
    v1::Tokens { tokens: vec![out], text }
}
