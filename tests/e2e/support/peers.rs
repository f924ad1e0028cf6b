//! The nodes and engines of a cluster, spoken to as a conductor does: what no client can ask for.

use kvasir_proto::v1::engine_client::EngineClient;
use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::v1::store_node_client::StoreNodeClient;
use kvasir_proto::{BlockKey, Namespace, keys, v1};
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::cluster::Cluster;
use super::vectors::BLOCK_TOKENS;

/// No lease of such length runs out by itself, however slow the machine is.
pub(crate) const LONG_LEASE_MS: u64 = 60_000;
/// No conductor of the cluster has it.
const INCARNATION: u64 = 77;

/// One engine with its node.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub node_name: String,
    pub node_address: String,
    pub node: StoreNodeClient<Channel>,
    engine: EngineClient<Channel>,
    namespace: Namespace,
    endpoint: Vec<u8>,
}

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    /// Different for each.
    pub serial: u64,
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    /// Of what it holds on nodes, until it is renewed.
    pub lease_ms: u64,
}

impl Ask {
    pub(crate) fn tx(&self) -> Option<v1::TxId> {
        Some(v1::TxId { conductor_incarnation: INCARNATION, serial: self.serial })
    }

    /// Full blocks before its last token.
    pub(crate) fn blocks(&self) -> u32 {
        ((self.prompt.len() - 1) / BLOCK_TOKENS) as u32
    }
}

fn address(cluster: &Cluster, process: &str) -> String {
    let state = cluster.state();
    let url = state["processes"][process]["metrics"].as_str().expect("a URL").to_owned();
    url.trim_start_matches("http://").split('/').next().expect("an address").to_owned()
}

impl Peer {
    /// The engine of this name.
    pub(crate) async fn of(cluster: &Cluster, engine: &str) -> Peer {
        let node_name = format!("{engine}-node");
        let node_address = address(cluster, &node_name);
        let node = StoreNodeClient::connect(format!("http://{node_address}")).await;
        let mut node = node.expect("the node listens");
        let engine = format!("http://{}", address(cluster, engine));
        let engine = EngineClient::connect(engine).await.expect("the engine listens");
        let described = node.describe(v1::DescribeRequest {}).await.expect("a description");
        let mut described = described.into_inner();
        let attached = described.instances.pop().and_then(|one| one.description?.model);
        let model = attached.expect("it is attached");
        let fingerprint: [u8; 32] = model.fingerprint.as_slice().try_into().expect("32 bytes");
        let namespace = keys::namespace(&fingerprint, &model.kv_dtype, "", "");
        Peer { node_name, node_address, node, engine, namespace, endpoint: described.endpoint }
    }

    fn allocation(
        &self,
        ask: &Ask,
        side: v1::Side,
        blocks: std::ops::Range<u32>,
    ) -> v1::TxAllocateRequest {
        let keys = keys::chain(self.namespace, &ask.prompt, BLOCK_TOKENS);
        let range = blocks.start as usize..blocks.end as usize;
        v1::TxAllocateRequest {
            tx: ask.tx(),
            side: side.into(),
            namespace: self.namespace.0.to_vec(),
            keys: BlockKey::concat(&keys[range]),
            prompt_tokens: ask.prompt.len() as u32 - blocks.start * BLOCK_TOKENS as u32,
            lease_ms: ask.lease_ms,
            generated_tokens_max: ask.max_tokens,
            ..v1::TxAllocateRequest::default()
        }
    }

    fn full_blocks(ask: &Ask) -> u32 {
        (ask.prompt.len() / BLOCK_TOKENS) as u32
    }

    async fn allocate(&self, request: v1::TxAllocateRequest) -> v1::TxAllocateReply {
        self.node.clone().tx_allocate(request).await.expect("room").into_inner()
    }

    async fn call(
        &self,
        ask: &Ask,
        routed: Vec<v1::RoutedSpan>,
    ) -> Result<Streaming<v1::GenerateEvent>, Status> {
        let request = v1::GenerateRequest {
            tx: ask.tx(),
            phase: v1::Phase::Full.into(),
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
            chunks: Vec::new(),
        };
        Ok(self.engine.clone().generate(request).await?.into_inner())
    }

    /// Answered with what is here, and the rest computed.
    pub(crate) async fn here(&self, ask: &Ask) -> Vec<u32> {
        self.allocate(self.allocation(ask, v1::Side::Prefill, 0..Self::full_blocks(ask))).await;
        tokens(self.call(ask, Vec::new()).await.expect("it is taken"), async || ()).await
    }

    /// Answered with the prefix brought from another node first.
    pub(crate) async fn fetched(&self, source: &Peer, ask: &Ask) -> Vec<u32> {
        let until = ask.blocks();
        let wanted = v1::TxAllocateRequest {
            prompt_tokens: until * BLOCK_TOKENS as u32,
            fetch_until_block: until,
            ..source.allocation(ask, v1::Side::Source, 0..until)
        };
        assert_eq!(source.allocate(wanted).await.cached_blocks, until, "it has the prefix");
        let wanted = v1::TxAllocateRequest {
            fetch_until_block: until,
            writer_endpoint: source.endpoint.clone(),
            ..self.allocation(ask, v1::Side::Prefill, 0..Self::full_blocks(ask))
        };
        let targets = self.allocate(wanted).await.targets;
        let push = v1::TxPushRequest { tx: ask.tx(), side: v1::Side::Source.into(), targets };
        let pushed = source.node.clone().tx_push(push).await.expect("it is pushed").into_inner();
        assert_eq!(pushed.valid_blocks, until);
        tokens(self.call(ask, Vec::new()).await.expect("it is taken"), async || ()).await
    }

    /// Begins an answer with the prefix attended by the holders, each a part of it, as equal as can be.
    pub(crate) async fn routed(
        &self,
        holders: &[&Peer],
        ask: &Ask,
    ) -> Result<Streaming<v1::GenerateEvent>, Status> {
        let blocks = ask.blocks();
        let each = blocks.div_ceil(holders.len() as u32).max(1);
        let mut spans = Vec::new();
        for (holder, first) in holders.iter().zip((0..blocks).step_by(each as usize)) {
            let end = (first + each).min(blocks);
            let wanted = v1::TxAllocateRequest {
                prompt_tokens: end * BLOCK_TOKENS as u32,
                ..holder.allocation(ask, v1::Side::Source, 0..end)
            };
            assert_eq!(holder.allocate(wanted).await.cached_blocks, end, "it has the prefix");
            spans.push(v1::RoutedSpan {
                node_address: holder.node_address.clone(),
                tx: ask.tx(),
                lease_ms: ask.lease_ms,
                first_block: first,
                blocks: end - first,
            });
        }
        self.allocate(v1::TxAllocateRequest {
            cache_class: v1::CacheClass::Ephemeral.into(),
            ..self.allocation(ask, v1::Side::Prefill, blocks..Self::full_blocks(ask))
        })
        .await;
        self.call(ask, spans).await
    }

    /// What it has pinned for somebody who sends queries is let go.
    pub(crate) async fn lose_lease(&self, ask: &Ask) {
        let (side, reason) = (v1::Side::Source.into(), "a test".to_owned());
        let request = v1::TxAbortRequest { tx: ask.tx(), side, reason };
        self.node.clone().tx_abort(request).await.expect("it listens");
    }
}

/// The tokens up to the end, with `meanwhile` after the first ones.
pub(crate) async fn tokens(
    mut events: Streaming<v1::GenerateEvent>,
    meanwhile: impl AsyncFnOnce(),
) -> Vec<u32> {
    let (mut tokens, mut meanwhile) = (Vec::new(), Some(meanwhile));
    while let Some(event) = events.message().await.expect("no error") {
        if let Some(Event::Tokens(more)) = event.event {
            tokens.extend(more.tokens.iter().map(|token| token.id));
            if let Some(meanwhile) = meanwhile.take() {
                meanwhile().await;
            }
        }
    }
    tokens
}
