//! A store node in this process, called through gRPC and HTTP like any other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvasir_proto::{BlockKey, Share, v1};
use kvasir_store_node::config::Config;
use kvasir_store_node::{Running, start};
use kvasir_transfer::Domain;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::transport::Channel;
use v1::store_node_client::StoreNodeClient;

use super::until;

pub(crate) struct TestNode {
    pub client: StoreNodeClient<Channel>,
    running: Running,
    dir: TempDir,
}

pub(crate) fn node_config(dir: &Path, domain: Domain) -> Config {
    Config {
        node_id: "test".into(),
        listen: "127.0.0.1:0".parse().expect("an address"),
        transfer_listen: "127.0.0.1:0".parse().expect("an address"),
        attach_dir: dir.join("attach"),
        dram_bytes: 64 * 4096,
        tail_bytes: 1 << 20,
        transport: domain,
        drain_timeout_ms: 500,
        ..Config::default()
    }
}

impl TestNode {
    pub(crate) async fn start(domain: Domain) -> Self {
        TestNode::start_with(domain, |_| {}).await
    }

    pub(crate) async fn start_with(domain: Domain, change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut config = node_config(dir.path(), domain);
        change(&mut config);
        let running = start(config).await.expect("a node");
        let address = format!("http://{}", running.address());
        let client = StoreNodeClient::connect(address).await.expect("a connection");
        TestNode { client, running, dir }
    }

    pub(crate) fn attach_dir(&self) -> PathBuf {
        self.dir.path().join("attach")
    }

    pub(crate) fn address(&self) -> std::net::SocketAddr {
        self.running.address()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) async fn shut_down(mut self) {
        self.running.shut_down().await;
    }

    pub(crate) async fn describe(&mut self) -> v1::NodeDescription {
        self.client.describe(v1::DescribeRequest {}).await.expect("a description").into_inner()
    }

    /// The engines that are attached, in the order in which they came.
    pub(crate) async fn instances(&mut self) -> Vec<v1::InstanceDescription> {
        let attached = self.describe().await.instances.into_iter();
        attached.map(|attached| attached.description.expect("it is described")).collect()
    }

    pub(crate) async fn endpoint(&mut self) -> Vec<u8> {
        self.describe().await.endpoint
    }

    pub(crate) async fn allocate(
        &mut self,
        request: v1::TxAllocateRequest,
    ) -> Result<v1::TxAllocateReply, tonic::Status> {
        self.client.tx_allocate(request).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn push(
        &mut self,
        share: Share,
        targets: Option<v1::WriteTargets>,
    ) -> Result<v1::TxPushReply, tonic::Status> {
        let request =
            v1::TxPushRequest { tx: Some(share.tx.into()), side: share.side.to_wire(), targets };
        self.client.tx_push(request).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn commit(
        &mut self,
        share: Share,
        valid_blocks: u32,
        source_lost: bool,
    ) -> Result<v1::TxCommitReply, tonic::Status> {
        let request = v1::TxCommitRequest {
            tx: Some(share.tx.into()),
            side: share.side.to_wire(),
            valid_blocks,
            source_lost,
        };
        self.client.tx_commit(request).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn abort(&mut self, share: Share) -> bool {
        let request = v1::TxAbortRequest {
            tx: Some(share.tx.into()),
            side: share.side.to_wire(),
            reason: "the test says so".into(),
        };
        self.client.tx_abort(request).await.expect("an answer").into_inner().known
    }

    pub(crate) async fn renew(&mut self, share: Share, lease_ms: u64) -> bool {
        let renewed = v1::TxShare { tx: Some(share.tx.into()), side: share.side.to_wire() };
        let request = v1::RenewRequest { shares: vec![renewed], lease_ms };
        self.client.renew(request).await.expect("an answer").into_inner().unknown.is_empty()
    }

    pub(crate) async fn blocks(&mut self, keys: &[BlockKey]) -> Vec<v1::BlockLocation> {
        let request = v1::ListBlocksRequest { keys: BlockKey::concat(keys) };
        self.client.list_blocks(request).await.expect("an answer").into_inner().blocks
    }

    /// Waits until all these blocks are committed.
    pub(crate) async fn has_blocks(&mut self, keys: &[BlockKey]) {
        until("blocks are committed", async || {
            (self.blocks(keys).await.len() == keys.len()).then_some(())
        })
        .await;
    }

    pub(crate) async fn connect(&self) -> tokio::net::TcpStream {
        tokio::net::TcpStream::connect(self.running.address()).await.expect("a connection")
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let mut stream = self.connect().await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok());
        (status.expect("a status"), answer)
    }

    /// All samples of `/metrics`.
    pub(crate) async fn metrics(&self) -> BTreeMap<String, f64> {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200);
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        text.lines().filter(|line| line.starts_with("kvasir_")).filter_map(sample).collect()
    }

    pub(crate) async fn metric(&self, name: &str) -> f64 {
        self.metrics().await.get(&format!("kvasir_store_{name}")).copied().unwrap_or(0.0)
    }

    /// Waits until the metric has this value: gauges follow what was answered by a moment.
    pub(crate) async fn shows(&self, name: &str, value: f64) {
        let look = async || (self.metric(name).await == value).then_some(());
        until(&format!("{name} is {value}"), look).await;
    }

    /// Waits until nothing is held: no share, slot, pin, quarantine or tail room.
    pub(crate) async fn is_quiet(&self) {
        let held = [
            "shares",
            "shares_aborting",
            "pins",
            "tail_used_bytes",
            "slots{state=\"allocated\"}",
            "slots{state=\"releasing\"}",
            "slots{state=\"quarantined\"}",
        ];
        let mut left = Vec::new();
        let started = std::time::Instant::now();
        while started.elapsed() < super::PATIENCE {
            let metrics = self.metrics().await;
            let value = |name: &str| metrics.get(&format!("kvasir_store_{name}")).copied();
            left = held.iter().map(|name| (*name, value(name))).collect();
            left.retain(|(_, value)| *value != Some(0.0));
            if left.is_empty() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        panic!("still held: {left:?}");
    }
}
