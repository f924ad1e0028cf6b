//! What the front door adds to a stream of tokens, with everything on: keys, placement, slots on two nodes,
//! commits.
//!
//! `cargo bench -p kvasir --bench front_door [-- STREAMS TOKENS_S SECONDS]` starts a conductor and two store nodes
//! as processes. This process is two engines, attached to these nodes, that compute nothing: the one that
//! prefills announces its pages and writes none, the one that decodes says a token every so often; and it is the
//! clients, each with a connection and one stream after the other (1000 streams at 20 tokens a second, for 20
//! seconds). A prompt is 512 token ids that nobody has sent before; an answer has 100 tokens. It prints
//!
//! - *token*: from the engine handing a token to its server until the client has read it;
//! - *request*: from the client sending a request until the prefill engine has the call, its slots on both nodes
//!   reserved.
//!
//! Both contain what the engine's and the client's own sides of a connection take, and waiting for a core. So the
//! same clients are measured first with the same tokens from a server within this process: what an engine takes
//! that answers its clients itself, over as many connections, with nothing in front of it. What the front door
//! adds is the difference of the two. Expected: under 300 us at p50, under 1,000 us at p99.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]
#![allow(clippy::disallowed_methods, reason = "a bench measures time")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::HeaderMap;
use axum::routing::post;
use futures::channel::mpsc;
use futures::{SinkExt, Stream, StreamExt};
use kvasir_attach::{AttachOptions, EngineAttachment, Receiver, Sender};
use kvasir_conductor::{Config as ConductorConfig, ModelConfig};
use kvasir_proto::{BlockKey, Namespace, SlotLayout, keys, v1};
use kvasir_store_node::config::Config as NodeConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::{Request, Response, Status};
use v1::engine_server::{Engine, EngineServer};
use v1::engine_to_node::Message as ToNode;
use v1::generate_event::Event;
use v1::node_to_engine::Message as FromNode;

const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");
const MODEL: &str = "bench";
/// The conductor reads the tokenizer from here. The engines of this benchmark compute nothing.
const MODEL_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/models/tiny-deepseek-v2");
const KEY: &str = "a-key-of-this-bench";
const BLOCK_TOKENS: u32 = 64;
const PROMPT_TOKENS: u32 = 512;
const ANSWER_TOKENS: u32 = 100;
const VOCAB_SIZE: u32 = 1024;
const PATIENCE: Duration = Duration::from_secs(30);

type Failure = Box<dyn Error + Send + Sync>;

/// Microseconds since the first call.
fn now_us() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed().as_micros() as u64
}

fn main() -> Result<(), Failure> {
    now_us();
    let given = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let given = given.map(|number| number.parse()).collect::<Result<Vec<u64>, _>>()?;
    let at = |index: usize, default: u64| given.get(index).copied().unwrap_or(default);
    let (streams, tokens_s, seconds) = (at(0, 1_000), at(1, 20), at(2, 20));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure(streams, tokens_s, Duration::from_secs(seconds)))
}

async fn measure(streams: u64, tokens_s: u64, duration: Duration) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let arrivals = Arrivals::default();
    let mut nodes = Vec::new();
    for role in [v1::Role::Prefill, v1::Role::Decode] {
        nodes.push(Node::start(folder.path(), role, tokens_s, arrivals.clone()).await?);
    }
    let (conductor, address) = start_conductor(folder.path(), &nodes)?;
    until_ready(address).await?;
    let load = Load { streams, tokens_s, duration };
    let alone = start_alone(tokens_s, arrivals.clone()).await?;
    let (alone, _) = load.run(alone, &arrivals, None).await?;
    let (behind, cpu_s) = load.run(address, &arrivals, Some(conductor.0.id())).await?;

    println!("{streams} streams, {tokens_s} tokens/s each, {} s", duration.as_secs());
    println!();
    println!("| | number | p50 us | p90 us | p99 us |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    let tokens = behind.token_us.len();
    for (name, alone, behind) in [
        ("token", alone.token_us, behind.token_us),
        ("request", alone.request_us, behind.request_us),
    ] {
        let (alone, behind) = (Quantiles::of(alone), Quantiles::of(behind));
        alone.print(&format!("{name}, the server alone"));
        behind.print(&format!("{name}, behind the front door"));
        let [p50, p90, p99] = std::array::from_fn(|at| behind.us[at] as i64 - alone.us[at] as i64);
        println!("| {name}, added | | {p50} | {p90} | {p99} |");
    }
    println!();
    println!(
        "{:.0} tokens/s; the conductor used {:.0} % of a core, {:.1} us a token",
        tokens as f64 / duration.as_secs_f64(),
        100.0 * cpu_s / duration.as_secs_f64(),
        1e6 * cpu_s / tokens as f64
    );
    Ok(())
}

/// How many and how fast, and for how long it is looked at.
#[derive(Clone, Copy)]
struct Load {
    streams: u64,
    tokens_s: u64,
    duration: Duration,
}

impl Load {
    /// What the clients saw, and the CPU time of the process beside it.
    async fn run(
        self,
        address: SocketAddr,
        arrivals: &Arrivals,
        pid: Option<u32>,
    ) -> Result<(Seen, f64), Failure> {
        let cpu_s = || pid.map_or(Ok(0.0), cpu_s);
        let answer = Duration::from_secs_f64(f64::from(ANSWER_TOKENS) / self.tokens_s as f64);
        let begins = Instant::now() + answer;
        let span = Span { from: begins, until: begins + self.duration };
        let clients = (0..self.streams).map(|at| {
            let arrivals = arrivals.clone();
            let wait = answer.mul_f64(at as f64 / self.streams as f64);
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                client(address, at, span, &arrivals).await
            })
        });
        let clients: Vec<_> = clients.collect();
        tokio::time::sleep_until(span.from.into()).await;
        let before = cpu_s()?;
        tokio::time::sleep_until(span.until.into()).await;
        let used_s = cpu_s()? - before;
        let mut seen = Seen::default();
        for client in clients {
            let of = client.await??;
            seen.token_us.extend(of.token_us);
            seen.request_us.extend(of.request_us);
        }
        Ok((seen, used_s))
    }
}

struct Quantiles {
    number: usize,
    /// The median, and those at 90 and at 99 %.
    us: [u64; 3],
}

impl Quantiles {
    fn of(mut us: Vec<u64>) -> Quantiles {
        us.sort_unstable();
        let at = |q: f64| us.get((us.len() as f64 * q) as usize).copied().unwrap_or(0);
        Quantiles { number: us.len(), us: [at(0.5), at(0.9), at(0.99)] }
    }

    fn print(&self, name: &str) {
        let [p50, p90, p99] = self.us;
        println!("| {name} | {} | {p50} | {p90} | {p99} |", self.number);
    }
}

/// A process that ends with this.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(folder: &Path, name: &str, command: &str, config: &str) -> Result<Process, Failure> {
    let path = folder.join(format!("{name}.toml"));
    std::fs::write(&path, config)?;
    let log = std::fs::File::create(folder.join(format!("{name}.log")))?;
    let child = Command::new(KVASIR)
        .args([command, "--config"])
        .arg(&path)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    Ok(Process(child))
}

fn free_address() -> Result<SocketAddr, Failure> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

fn start_conductor(folder: &Path, nodes: &[Node]) -> Result<(Process, SocketAddr), Failure> {
    let address = free_address()?;
    let key_file = folder.join("key");
    std::fs::write(&key_file, KEY)?;
    let keys = format!("[[tenants]]\nname = \"bench\"\nkeys = [{{ file = {key_file:?} }}]\n");
    std::fs::write(folder.join("keys.toml"), keys)?;
    let nodes: Vec<String> = nodes.iter().map(|node| node.address.to_string()).collect();
    let config = ConductorConfig {
        listen: address,
        grpc_listen: free_address()?,
        monitor_listen: free_address()?,
        nodes,
        api_keys_file: Some(folder.join("keys.toml")),
        models: vec![ModelConfig { name: MODEL.to_owned(), tokenizer_dir: MODEL_DIR.into() }],
        ..ConductorConfig::default()
    };
    let config = toml::to_string(&config)?;
    Ok((spawn(folder, "conductor", "conductor", &config)?, address))
}

async fn until_ready(address: SocketAddr) -> Result<(), Failure> {
    let began = Instant::now();
    let url = format!("http://{address}/readyz");
    loop {
        let answer = reqwest::get(&url).await;
        if answer.is_ok_and(|answer| answer.status().is_success()) {
            return Ok(());
        }
        if began.elapsed() > PATIENCE {
            return Err("the conductor is not ready".into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// User and system time of a process.
fn cpu_s(pid: u32) -> Result<f64, Failure> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}

// ---- engines

/// When the prefill engine got a request, by its id.
type Arrivals = Arc<Mutex<HashMap<String, u64>>>;
type Key = (v1::TxId, i32);
type Waiting = Arc<Mutex<HashMap<(u64, u64, i32), mpsc::UnboundedSender<FromNode>>>>;

struct Node {
    address: SocketAddr,
    _process: Process,
}

impl Node {
    async fn start(
        folder: &Path,
        role: v1::Role,
        tokens_s: u64,
        arrivals: Arrivals,
    ) -> Result<Node, Failure> {
        let name = role.as_str_name().to_lowercase();
        let address = free_address()?;
        let attach_dir = folder.join(&name);
        let config = NodeConfig {
            node_id: name.clone(),
            listen: address,
            attach_dir: attach_dir.clone(),
            dram_bytes: 512 << 20,
            ..NodeConfig::default()
        };
        let config = toml::to_string(&config)?;
        let process = spawn(folder, &name, "store-node", &config)?;
        let engine = free_address()?;
        let layout = SlotLayout::layer_major(BLOCK_TOKENS, 1, 64)?;
        let began = Instant::now();
        let attachment = loop {
            let options = AttachOptions {
                attach_dir: attach_dir.clone(),
                instance_id: name.clone(),
                instance_type: String::new(),
                role,
                model: v1::ModelDescription {
                    name: MODEL.to_owned(),
                    fingerprint: vec![1; 32],
                    kv_dtype: "f32".to_owned(),
                    vocab_size: VOCAB_SIZE,
                    context_tokens: 4096,
                    routed: None,
                },
                layout: layout.clone(),
                engine_address: engine.to_string(),
                running_requests_max: 4096,
                pool: None,
            };
            match EngineAttachment::connect(options).await {
                Ok(attachment) => break attachment,
                Err(error) if began.elapsed() > PATIENCE => return Err(error.into()),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let (sender, receiver) = attachment.split();
        let waiting = Waiting::default();
        let known = Arc::clone(&waiting);
        std::thread::spawn(move || hear(receiver, &known));
        let shared = Shared { tokens_s, waiting, to_node: Arc::new(Mutex::new((sender, 0))) };
        tokio::spawn(keep_alive(shared.clone()));
        let service = EngineServer::new(Mute { arrivals, shared });
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve(engine));
        Ok(Node { address, _process: process })
    }
}

/// Renews the leases of all shares until the node has gone, as engines do after the hand-over.
async fn keep_alive(shared: Shared) {
    let mut pace = tokio::time::interval(Duration::from_millis(250));
    loop {
        pace.tick().await;
        let known: Vec<_> = shared.waiting.lock().expect("no panic").keys().copied().collect();
        let share = |(conductor_incarnation, serial, side)| v1::TxShare {
            tx: Some(v1::TxId { conductor_incarnation, serial }),
            side,
        };
        let shares = known.into_iter().map(share).collect();
        let message = ToNode::KeepAlive(v1::KeepAlive { shares });
        if shared.to_node.lock().expect("no panic").0.send(message).is_err() {
            return;
        }
    }
}

/// Hands what the node says to whoever waits for it, until the node is gone.
fn hear(mut receiver: Receiver, waiting: &Waiting) {
    while receiver.wait(Duration::from_secs(1)).is_ok() {
        while let Ok(Some(message)) = receiver.try_recv() {
            let of = match &message {
                FromNode::Bound(bound) => (bound.tx, bound.side),
                FromNode::Ready(ready) => (ready.tx, v1::Side::Decode as i32),
                FromNode::Grown(grown) => (grown.tx, grown.side),
                FromNode::Stop(stop) => (stop.tx, stop.side),
                FromNode::Got(_) | FromNode::PagesDropped(_) | FromNode::PagesFilled(_) => continue,
            };
            let (Some(tx), side) = of else { continue };
            if let Some(share) = waiting.lock().expect("no panic").get(&by((tx, side))) {
                let _ = share.unbounded_send(message);
            }
        }
    }
}

fn by((tx, side): Key) -> (u64, u64, i32) {
    (tx.conductor_incarnation, tx.serial, side)
}

/// An engine that computes nothing.
struct Mute {
    arrivals: Arrivals,
    shared: Shared,
}

type Events = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;
type EventSender = mpsc::Sender<Result<v1::GenerateEvent, Status>>;

#[tonic::async_trait]
impl Engine for Mute {
    type GenerateStream = Events;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Events>, Status> {
        let request = request.into_inner();
        let (sender, events) = mpsc::channel(4);
        let tx = request.tx.ok_or_else(|| Status::invalid_argument("no transaction"))?;
        let side = match request.phase() {
            v1::Phase::Decode => v1::Side::Decode,
            _ => v1::Side::Prefill,
        };
        if side == v1::Side::Prefill {
            let mut arrivals = self.arrivals.lock().expect("no panic");
            arrivals.insert(request.request_id.clone(), now_us());
        }
        let (notify, heard) = mpsc::unbounded();
        self.shared.waiting.lock().expect("no panic").insert(by((tx, side as i32)), notify);
        let leg = Share { tx, side, engine: self.shared.clone(), heard };
        tokio::spawn(leg.run(request, sender));
        Ok(Response::new(Box::pin(events)))
    }
}

/// What a leg needs of its engine.
#[derive(Clone)]
struct Shared {
    tokens_s: u64,
    waiting: Waiting,
    /// And the number of the last step.
    to_node: Arc<Mutex<(Sender, u32)>>,
}

/// One leg of one request.
struct Share {
    tx: v1::TxId,
    side: v1::Side,
    engine: Shared,
    heard: mpsc::UnboundedReceiver<FromNode>,
}

impl Drop for Share {
    fn drop(&mut self) {
        let key = by((self.tx, self.side as i32));
        self.engine.waiting.lock().expect("no panic").remove(&key);
    }
}

impl Share {
    async fn run(mut self, request: v1::GenerateRequest, mut events: EventSender) {
        let end = match self.side {
            v1::Side::Prefill => self.prefill(&request, &mut events).await,
            _ => self.decode(&request, &mut events).await,
        };
        self.tell(ToNode::Release(v1::Release { tx: Some(self.tx), side: self.side as i32 }));
        let last = match end {
            Ok(finished) => Ok(event(Event::Finished(finished))),
            Err(why) => Err(Status::aborted(why)),
        };
        let _ = events.send(last).await;
    }

    fn tell(&self, message: ToNode) {
        // A node that is gone is told of nothing.
        let _ = self.engine.to_node.lock().expect("no panic").0.send(message);
    }

    async fn hear<T>(&mut self, wanted: impl Fn(FromNode) -> Option<T>) -> Result<T, String> {
        loop {
            match self.heard.next().await {
                Some(FromNode::Stop(stop)) => return Err(stop.reason),
                Some(message) => {
                    if let Some(found) = wanted(message) {
                        return Ok(found);
                    }
                }
                None => return Err("the node is gone".to_owned()),
            }
        }
    }

    async fn bind(&mut self, events: &mut EventSender) -> Result<v1::Bound, String> {
        self.tell(ToNode::Bind(v1::Bind { tx: Some(self.tx), side: self.side as i32 }));
        let bound = self.hear(|message| match message {
            FromNode::Bound(bound) => Some(bound),
            _ => None,
        });
        let bound = bound.await?;
        if bound.status() != v1::BindStatus::Ok {
            return Err(format!("bound: {:?}", bound.status()));
        }
        let accepted = v1::Accepted { cached_tokens: bound.cached_tokens };
        let _ = events.send(Ok(event(Event::Accepted(accepted)))).await;
        Ok(bound)
    }

    async fn prefill(
        &mut self,
        request: &v1::GenerateRequest,
        events: &mut EventSender,
    ) -> Result<v1::Finished, String> {
        let bound = self.bind(events).await?;
        let first_page = bound.cached_tokens / BLOCK_TOKENS;
        let page_count = bound.slots.len() as u32 - first_page;
        {
            let mut to_node = self.engine.to_node.lock().expect("no panic");
            let (sender, step) = &mut *to_node;
            *step += 1;
            let pages = v1::StepPages {
                tx: Some(self.tx),
                side: self.side as i32,
                first_page,
                page_count,
                pool_pages: Vec::new(),
            };
            let plan = v1::StepPlan { step: *step, pages: vec![pages] };
            let finish = v1::FinishPrefill { tx: Some(self.tx), tail: b"first token".to_vec() };
            sender.send(ToNode::Plan(plan)).map_err(|error| error.to_string())?;
            sender.progress(*step, 1);
            sender.send(ToNode::FinishPrefill(finish)).map_err(|error| error.to_string())?;
        }
        let computed = request.prompt.len() as u32 - bound.cached_tokens;
        let mut finished =
            v1::Finished { computed_prompt_tokens: computed, prefill_us: 1, ..Default::default() };
        finished.set_reason(v1::finished::Reason::HandedOver);
        Ok(finished)
    }

    async fn decode(
        &mut self,
        request: &v1::GenerateRequest,
        events: &mut EventSender,
    ) -> Result<v1::Finished, String> {
        self.bind(events).await?;
        let ready = |message| matches!(message, FromNode::Ready(_)).then_some(());
        self.hear(ready).await?;
        let wanted = request.sampling.as_ref().map_or(0, |sampling| sampling.max_tokens);
        let namespace = <[u8; 16]>::try_from(request.namespace.as_slice())
            .map_err(|_| "a namespace has 16 bytes".to_owned())?;
        let mut tokens = request.prompt.clone();
        let (tx, side) = (Some(self.tx), self.side as i32);
        let mut pace =
            tokio::time::interval(Duration::from_secs_f64(1.0 / self.engine.tokens_s as f64));
        for _ in 0..wanted {
            if (tokens.len() as u32).is_multiple_of(BLOCK_TOKENS) {
                self.tell(ToNode::Grow(v1::Grow { tx, side, page_count: 1 }));
                let grown = |message| match message {
                    FromNode::Grown(grown) => Some(grown.slots.len()),
                    _ => None,
                };
                if self.hear(grown).await? == 0 {
                    return Err("no room for the answer".to_owned());
                }
            }
            pace.tick().await;
            let id = tokens.len() as u32 % VOCAB_SIZE;
            tokens.push(id);
            let text = format!("{} ", now_us());
            let token = v1::TokenOut { id, ..Default::default() };
            let said = v1::Tokens { tokens: vec![token], text };
            if events.send(Ok(event(Event::Tokens(said)))).await.is_err() {
                return Err("the call was given up".to_owned());
            }
            if (tokens.len() as u32).is_multiple_of(BLOCK_TOKENS) {
                let first_page = tokens.len() as u32 / BLOCK_TOKENS - 1;
                let chain = keys::chain(Namespace(namespace), &tokens, BLOCK_TOKENS as usize);
                let last = BlockKey::concat(&chain[first_page as usize..]);
                self.tell(ToNode::Commit(v1::CommitBlocks { tx, side, first_page, keys: last }));
            }
        }
        let mut finished = v1::Finished { generated_tokens: wanted, ..Default::default() };
        finished.set_reason(v1::finished::Reason::Length);
        Ok(finished)
    }
}

fn event(event: Event) -> v1::GenerateEvent {
    v1::GenerateEvent { event: Some(event) }
}

// ---- a server without a front door

/// Says the same tokens at the same pace to whoever asks, as events of the same size.
async fn start_alone(tokens_s: u64, arrivals: Arrivals) -> Result<SocketAddr, Failure> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let answer = move |headers: HeaderMap, _body: Bytes| {
        let id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
        let id = id.unwrap_or_default().to_owned();
        arrivals.lock().expect("no panic").insert(id.clone(), now_us());
        let (mut sender, events) = mpsc::channel::<Result<String, Infallible>>(4);
        tokio::spawn(async move {
            let mut pace = tokio::time::interval(Duration::from_secs_f64(1.0 / tokens_s as f64));
            for _ in 0..ANSWER_TOKENS {
                pace.tick().await;
                let event = format!(
                    "data: {{\"id\":\"cmpl-{id}\",\"object\":\"text_completion\",\"created\":1700000000,\
                     \"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,\"text\":\"{} \",\"logprobs\":null,\
                     \"finish_reason\":null,\"stop_reason\":null}}]}}\n\n",
                    now_us()
                );
                if sender.send(Ok(event)).await.is_err() {
                    return;
                }
            }
            let _ = sender.send(Ok("data: [DONE]\n\n".to_owned())).await;
        });
        std::future::ready(Body::from_stream(events))
    };
    let router = Router::new().route("/v1/completions", post(answer));
    let listener = axum::serve::ListenerExt::tap_io(listener, |stream| {
        let _ = stream.set_nodelay(true);
    });
    tokio::spawn(axum::serve(listener, router).into_future());
    Ok(address)
}

// ---- clients

/// What is looked at.
#[derive(Clone, Copy)]
struct Span {
    from: Instant,
    until: Instant,
}

#[derive(Default)]
struct Seen {
    token_us: Vec<u64>,
    request_us: Vec<u64>,
}

/// One stream after the other until the end of the span; each answer is read to its end.
async fn client(
    address: SocketAddr,
    at: u64,
    span: Span,
    arrivals: &Arrivals,
) -> Result<Seen, Failure> {
    let mut connection = TcpStream::connect(address).await?;
    connection.set_nodelay(true)?;
    let mut seen = Seen::default();
    let mut turn = 0;
    while Instant::now() < span.until {
        let id = format!("{at}-{turn}");
        let request = request(at * 1_000_003 + turn, &id);
        turn += 1;
        let began = Instant::now();
        let sent_us = now_us();
        connection.write_all(&request).await?;
        read_answer(&mut connection, span, &mut seen.token_us).await?;
        let arrived = arrivals.lock().expect("no panic").remove(&id);
        let arrived_us = arrived.ok_or("a request that the engine has not got")?;
        if began >= span.from {
            seen.request_us.push(arrived_us.saturating_sub(sent_us));
        }
    }
    Ok(seen)
}

/// A prompt that no other seed has, not even its first block.
fn request(seed: u64, id: &str) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % u64::from(VOCAB_SIZE)
    };
    let prompt: Vec<String> = (0..PROMPT_TOKENS).map(|_| draw().to_string()).collect();
    let body = format!(
        r#"{{"model":"{MODEL}","prompt":[{}],"max_tokens":{ANSWER_TOKENS},"stream":true,"ignore_eos":true}}"#,
        prompt.join(",")
    );
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
         authorization: Bearer {KEY}\r\nx-request-id: {id}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    (head + &body).into_bytes()
}

/// Reads a complete answer. Appends the delay of each token that arrives within the span.
async fn read_answer(
    connection: &mut TcpStream,
    span: Span,
    token_us: &mut Vec<u64>,
) -> Result<(), Failure> {
    const MARK: &[u8] = b"\"text\":\"";
    let mut answer: Vec<u8> = Vec::with_capacity(32 << 10);
    let (mut looked, mut tokens) = (0, 0);
    while !answer.ends_with(b"0\r\n\r\n") {
        let read = tokio::time::timeout(PATIENCE, connection.read_buf(&mut answer)).await??;
        let (at_us, now) = (now_us(), Instant::now());
        if read == 0 {
            return Err("the connection ended within an answer".into());
        }
        while let Some(at) = find(&answer[looked..], MARK) {
            let from = looked + at + MARK.len();
            let Some(length) = answer[from..].iter().position(|byte| *byte == b'"') else { break };
            let text = std::str::from_utf8(&answer[from..from + length])?;
            looked = from + length;
            // The last event has no text of its own.
            let Ok(said_us) = text.trim_end().parse::<u64>() else { continue };
            tokens += 1;
            if now >= span.from && now < span.until {
                token_us.push(at_us.saturating_sub(said_us));
            }
        }
    }
    if !answer.starts_with(b"HTTP/1.1 200") {
        return Err(String::from_utf8_lossy(&answer).into_owned().into());
    }
    if tokens != ANSWER_TOKENS {
        let end = String::from_utf8_lossy(&answer[answer.len().saturating_sub(500)..]);
        return Err(format!("{tokens} tokens instead of {ANSWER_TOKENS}; the end: {end}").into());
    }
    Ok(())
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}
