//! Engines on real store nodes, with this test in the conductor's place: what they generate is
//! compared with reference vectors, whole and handed over, computed and cached.

use std::net::{Ipv4Addr, SocketAddr};

use kvasir_proto::v1::engine_client::EngineClient;
use kvasir_proto::v1::finished::Reason;
use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::v1::store_node_client::StoreNodeClient;
use kvasir_proto::{BlockKey, Namespace, keys};
use tokenizers::tokenizer::Tokenizer;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::*;
use crate::config::Role;

pub(super) const BLOCK: usize = 64;
/// No lease runs out by itself here, however slow the machine is.
pub(super) const LEASE_MS: u64 = 600_000;

#[derive(serde::Deserialize)]
struct Vectors {
    cases: Vec<Case>,
}

#[derive(serde::Deserialize, Clone)]
pub(super) struct Case {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
}

pub(super) fn file(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub(super) fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(file("tests/data/deepseek_v2/plain/expected.json"));
    let vectors: Vectors =
        serde_json::from_str(&text.expect("the reference vectors")).expect("as they were made");
    vectors.cases
}

/// One node with its engine.
pub(super) struct Host {
    pub node: kvasir_store_node::Running,
    pub node_client: StoreNodeClient<Channel>,
    node_config: kvasir_store_node::config::Config,
    engine: SocketAddr,
    engine_client: EngineClient<Channel>,
    pub metrics: Metrics,
    pub router: Arc<Router>,
    pub namespace: Namespace,
    shutdown: CancellationToken,
    running: JoinHandle<Result<(), Error>>,
    _dir: tempfile::TempDir,
}

/// An address of the loopback network (all of 127.0.0.0/8) that nobody else is given.
fn own_loopback() -> Ipv4Addr {
    let [a, b, c] = rand::random();
    Ipv4Addr::new(127, 1 + a % 127, b, c)
}

impl Host {
    pub(super) async fn start(role: Role) -> Self {
        // No wait for partials here ends by the time that is over.
        Host::start_with(role, 600_000).await
    }

    /// With so long a wait for partials of holders.
    pub(super) async fn start_with(role: Role, deadline_ms: u32) -> Self {
        Host::start_model(role, deadline_ms, file("configs/models/tiny-deepseek-v2")).await
    }

    /// With another model.
    pub(super) async fn start_model(
        role: Role,
        deadline_ms: u32,
        model: std::path::PathBuf,
    ) -> Self {
        Host::start_changed(role, |_, engine| {
            engine.model_dir = model;
            engine.routes.answer_timeout_ms = deadline_ms;
        })
        .await
    }

    /// With configurations that are changed before they are used.
    pub(super) async fn start_changed(
        role: Role,
        change: impl FnOnce(&mut kvasir_store_node::config::Config, &mut Config),
    ) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut node_config = kvasir_store_node::config::Config {
            // One of its own: no other test of this host gets a port there while the node is away.
            listen: SocketAddr::from((own_loopback(), 0)),
            attach_dir: dir.path().join("node"),
            dram_bytes: 256 << 20,
            lease_max_ms: LEASE_MS,
            ..kvasir_store_node::config::Config::default()
        };
        let mut config = Config {
            role,
            model_dir: file("configs/models/tiny-deepseek-v2"),
            attach_dir: node_config.attach_dir.clone(),
            listen: any,
            prefill_chunk_tokens: 100,
            // Nor is a node or a holder ever too slow to answer.
            slot_wait_timeout_ms: 600_000,
            routes: crate::config::Routes {
                answer_timeout_ms: 600_000,
                call_timeout_ms: 600_000,
                ..Default::default()
            },
            ..Config::default()
        };
        change(&mut node_config, &mut config);
        let node = kvasir_store_node::start(node_config.clone()).await.expect("a node");
        let listener = TcpListener::bind(any).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let loaded = load(&config).await.expect("the default model");
        let fingerprint =
            config.attention_precision.fingerprint_of_rows(loaded.model.fingerprint());
        let namespace = keys::namespace(&fingerprint, config.kv_dtype.name(), "", "");
        let shutdown = CancellationToken::new();
        let engine = Engine::start(config, loaded).expect("it starts");
        let (metrics, router) = (engine.shared.metrics.clone(), Arc::clone(&engine.router));
        let running = tokio::spawn(engine.serve(listener, address.to_string(), shutdown.clone()));
        let endpoint = |address: SocketAddr| format!("http://{address}");
        let node_client = StoreNodeClient::connect(endpoint(node.address())).await.expect("a node");
        let engine_client = EngineClient::connect(endpoint(address)).await.expect("an engine");
        let host = Host {
            node,
            node_client,
            node_config,
            engine: address,
            engine_client,
            metrics,
            router,
            namespace,
            shutdown,
            running,
            _dir: dir,
        };
        host.attached(1).await;
        host
    }

    /// Waits until the engine has attached so often, and the node knows.
    async fn attached(&self, times: u64) {
        while self.metrics.attaches.get() < times
            || self
                .node_client
                .clone()
                .describe(v1::DescribeRequest {})
                .await
                .is_ok_and(|reply| reply.into_inner().instances.is_empty())
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn endpoint(&self) -> Vec<u8> {
        let describe = self.node_client.clone().describe(v1::DescribeRequest {}).await;
        describe.expect("described").into_inner().endpoint
    }

    async fn allocate(&self, ask: &Ask, side: v1::Side, writer: Vec<u8>) -> v1::TxAllocateReply {
        let keys = keys::chain(self.namespace, &ask.prompt, BLOCK);
        let request = v1::TxAllocateRequest {
            tx: Some(ask.tx()),
            side: side.into(),
            namespace: self.namespace.0.to_vec(),
            keys: BlockKey::concat(&keys),
            prompt_tokens: ask.prompt.len() as u32,
            lease_ms: LEASE_MS,
            fetch_until_block: 0,
            writer_endpoint: writer,
            generated_tokens_max: ask.max_tokens,
            cache_class: v1::CacheClass::Unspecified.into(),
            replica: false,
            skip_promotion: false,
        };
        self.node_client.clone().tx_allocate(request).await.expect("room").into_inner()
    }

    async fn call(
        &self,
        ask: &Ask,
        leg: v1::Phase,
    ) -> Result<Streaming<v1::GenerateEvent>, Status> {
        self.call_routed(ask, leg, Vec::new()).await
    }

    pub(super) async fn call_routed(
        &self,
        ask: &Ask,
        leg: v1::Phase,
        routed: Vec<v1::RoutedSpan>,
    ) -> Result<Streaming<v1::GenerateEvent>, Status> {
        self.call_with(ask, leg, routed, Vec::new()).await
    }

    pub(super) async fn call_with(
        &self,
        ask: &Ask,
        leg: v1::Phase,
        routed: Vec<v1::RoutedSpan>,
        chunks: Vec<v1::Chunk>,
    ) -> Result<Streaming<v1::GenerateEvent>, Status> {
        let request = v1::GenerateRequest {
            tx: Some(ask.tx()),
            phase: leg.into(),
            request_id: format!("request {}", ask.serial),
            prompt: ask.prompt.clone(),
            sampling: Some(v1::SamplingParams {
                top_p: 1.0,
                max_tokens: ask.max_tokens,
                ignore_eos: true,
                ..v1::SamplingParams::default()
            }),
            namespace: self.namespace.0.to_vec(),
            priority_delay_us: 0,
            routed,
            chunks,
        };
        Ok(self.engine_client.clone().generate(request).await?.into_inner())
    }

    async fn generate(&self, ask: &Ask, leg: v1::Phase) -> Result<Answered, Status> {
        let events = self.call(ask, leg).await?;
        Answered::of(events, async || ()).await
    }

    /// Computed here, and answered by `decode`.
    pub(super) async fn hand_over(&self, decode: &Host, ask: &Ask) -> Vec<u32> {
        self.allocate(ask, v1::Side::Prefill, Vec::new()).await;
        let writer = self.endpoint().await;
        let targets = decode.allocate(ask, v1::Side::Decode, writer).await.targets;
        let push =
            v1::TxPushRequest { tx: Some(ask.tx()), side: v1::Side::Prefill.into(), targets };
        self.node_client.clone().tx_push(push).await.expect("armed");
        let legs =
            (self.generate(ask, v1::Phase::Prefill), decode.generate(ask, v1::Phase::Decode));
        let (prefilled, decoded) = futures::future::join(legs.0, legs.1).await;
        assert_eq!(prefilled.expect("handed over").reason(), Reason::HandedOver);
        decoded.expect("an answer").tokens
    }

    /// A whole leg with its allocation.
    pub(super) async fn whole(&self, ask: &Ask) -> Answered {
        self.allocate(ask, v1::Side::Prefill, Vec::new()).await;
        self.generate(ask, v1::Phase::Full).await.expect("an answer")
    }

    pub(super) async fn end(mut self) {
        self.shutdown.cancel();
        drop(self.engine_client);
        self.running.await.expect("no panic").expect("it stops as asked");
        drop(self.node_client);
        self.node.shut_down().await;
    }
}

#[derive(Clone)]
pub(super) struct Ask {
    pub serial: u64,
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
}

impl Ask {
    pub(super) fn tx(&self) -> v1::TxId {
        v1::TxId { conductor_incarnation: 77, serial: self.serial }
    }
}

#[derive(Debug, Default)]
pub(super) struct Answered {
    pub cached: u32,
    pub tokens: Vec<u32>,
    text: String,
    pub finished: Option<v1::Finished>,
}

impl Answered {
    /// All of it, with `meanwhile` after the first tokens.
    pub(super) async fn of(
        mut events: Streaming<v1::GenerateEvent>,
        meanwhile: impl AsyncFnOnce(),
    ) -> Result<Answered, Status> {
        let (mut answered, mut meanwhile) = (Answered::default(), Some(meanwhile));
        while let Some(event) = events.message().await? {
            match event.event.expect("an event") {
                Event::Accepted(accepted) => answered.cached = accepted.cached_tokens,
                Event::Tokens(tokens) => {
                    answered.tokens.extend(tokens.tokens.iter().map(|token| token.id));
                    answered.text.push_str(&tokens.text);
                    if let Some(meanwhile) = meanwhile.take() {
                        meanwhile().await;
                    }
                }
                Event::Finished(finished) => {
                    answered.text.push_str(&finished.text);
                    answered.finished = Some(finished);
                }
            }
        }
        Ok(answered)
    }

    fn reason(&self) -> Reason {
        self.finished.as_ref().expect("finished").reason()
    }
}

fn asks(cases: &[Case], first_serial: u64) -> Vec<Ask> {
    (first_serial..)
        .zip(cases)
        .map(|(serial, case)| Ask {
            serial,
            prompt: case.prompt.clone(),
            max_tokens: case.greedy.len() as u32,
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_answers_are_the_reference_s_in_one_batch_and_from_the_cache() {
    let host = Host::start(Role::Both).await;
    let tokenizer = Tokenizer::from_file(file("configs/models/tiny-deepseek-v2/tokenizer.json"));
    let tokenizer = tokenizer.expect("the default model's tokenizer");
    let cases = cases();
    let computed = || host.metrics.computed_prompt_tokens.get();
    let mut expected_computed = 0;
    for round in 0..2 {
        let asks = asks(&cases, 100 * round + 1);
        let answers = futures::future::join_all(asks.iter().map(|ask| host.whole(ask))).await;
        for (case, answered) in cases.iter().zip(&answers) {
            let tokens = case.prompt.len();
            assert_eq!(answered.tokens, case.greedy, "round {round}, {tokens} tokens");
            assert_eq!(answered.text, tokenizer.decode(&case.greedy, true).expect("text"));
            assert_eq!(answered.reason(), Reason::Length);
            if round == 1 {
                let cached = (tokens - 1) / BLOCK * BLOCK;
                assert_eq!(answered.cached as usize, cached, "{tokens} tokens");
            }
            expected_computed += tokens as u64 - u64::from(answered.cached);
        }
        assert_eq!(computed(), expected_computed);
    }

    // The next turn of a conversation finds the blocks that the answer before it filled.
    let case = cases.iter().find(|case| case.prompt.len() == 257).expect("there is one").clone();
    let first = Ask { serial: 301, prompt: case.prompt, max_tokens: 100 };
    let answer = host.whole(&first).await.tokens;
    let mut prompt = first.prompt.clone();
    prompt.extend(&answer[..99]);
    let again = host.whole(&Ask { serial: 302, prompt, max_tokens: 1 }).await;
    assert_eq!((again.cached, again.tokens), (320, answer[99..].to_vec()));
    host.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handed_over_answers_are_the_reference_s_and_decoding_computes_no_prompt() {
    let prefill = Host::start(Role::Prefill).await;
    let decode = Host::start(Role::Decode).await;
    let cases = cases();
    let asks = asks(&cases, 1);
    let hand_over = async |ask: &Ask| prefill.hand_over(&decode, ask).await;
    let answers = futures::future::join_all(asks.iter().map(hand_over)).await;
    for (case, tokens) in cases.iter().zip(answers) {
        assert_eq!(tokens, case.greedy, "{} tokens", case.prompt.len());
    }
    assert_eq!(decode.metrics.computed_prompt_tokens.get(), 0);
    assert!(prefill.metrics.computed_prompt_tokens.get() > 0);
    assert_eq!(prefill.metrics.generated_tokens.get(), 0);
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_comes_back_is_attached_to_again() {
    let mut host = Host::start(Role::Both).await;
    let case = cases().swap_remove(0);
    let ask = |serial| Ask { serial, prompt: case.prompt.clone(), max_tokens: 24 };
    assert_eq!(host.whole(&ask(1)).await.tokens, case.greedy);
    let mut listen = host.node_config.clone();
    listen.listen = host.node.address();
    host.node.shut_down().await;
    while host.metrics.attach_epoch.get() != 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let refused = host.generate(&ask(2), v1::Phase::Full).await.expect_err("there is no node");
    assert_eq!(refused.code(), Code::Unavailable);
    host.node = kvasir_store_node::start(listen).await.expect("a node in the same place");
    host.attached(2).await;
    assert_eq!(host.whole(&ask(3)).await.tokens, case.greedy);
    assert!(super::tests::get(host.engine, "/readyz").await.starts_with("HTTP/1.1 200"));
    host.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_dropped_gives_its_slots_back() {
    let host = Host::start(Role::Both).await;
    let available = async || {
        let reply = host.node_client.clone().describe(v1::DescribeRequest {}).await;
        reply.expect("described").into_inner().slots_available
    };
    let before = available().await;
    let prompt: Vec<u32> = (0..50).map(|token| token + 10).collect();
    let ask = Ask { serial: 1, prompt, max_tokens: 4_000 };
    host.allocate(&ask, v1::Side::Prefill, Vec::new()).await;
    let mut events = host.call(&ask, v1::Phase::Full).await.expect("taken");
    for _ in 0..3 {
        events.message().await.expect("no error").expect("it goes on");
    }
    drop(events);
    let ended = host.metrics.sequences_ended.with_label_values(&["cancelled"]);
    while ended.get() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Blocks that the answer has filled stay, as cache that can be had; nothing else does.
    while available().await != before {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    host.end().await;
}
