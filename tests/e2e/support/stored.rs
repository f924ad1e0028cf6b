//! What a store node of a cluster has stored, seen through its administration and changed behind its
//! back: the bytes of its slots lie in a memfd, which `/proc` opens to whoever owns the process.

use std::fs::OpenOptions;
use std::path::PathBuf;

use kvasir_proto::v1::store_node_client::StoreNodeClient;
use kvasir_proto::{BlockKey, keys, v1};
use kvasir_transfer::memory::{Access, SharedMemory};
use tonic::transport::Channel;

use super::cluster::Cluster;

#[derive(Debug)]
pub(crate) struct Stored {
    client: StoreNodeClient<Channel>,
    slots: SharedMemory,
}

impl Stored {
    /// Of the node as it runs now; a restarted one is another.
    pub(crate) async fn of(cluster: &Cluster, node: &str) -> Stored {
        let state = cluster.state();
        let metrics = state["processes"][node]["metrics"].as_str().expect("a URL");
        let address = metrics.strip_suffix("/metrics").expect("where gRPC is, too").to_owned();
        let client = StoreNodeClient::connect(address).await.expect("the node answers");
        let slots = slot_memory(cluster.pid(node).expect("it runs"));
        let slots = OpenOptions::new().read(true).write(true).open(slots).expect("our process");
        // Mapped, because memory in huge pages cannot be written by calls.
        let bytes = usize::try_from(slots.metadata().expect("a size").len()).expect("it fits");
        let slots = SharedMemory::from_fd(slots.into(), bytes, Access::ReadWrite).expect("mapped");
        Stored { client, slots }
    }

    /// The keys of a prompt's full blocks.
    pub(crate) async fn keys(&mut self, prompt: &[u32]) -> Vec<BlockKey> {
        let node = self.client.describe(v1::DescribeRequest {}).await.expect("a description");
        let node = node.into_inner();
        let block_tokens = node.layout.expect("a layout").block_tokens;
        let namespace = self.namespace().await;
        keys::chain(namespace, prompt, block_tokens as usize)
    }

    /// Where the blocks of these keys lie, in their order. Only those that are there.
    pub(crate) async fn blocks(&mut self, keys: &[BlockKey]) -> Vec<v1::BlockLocation> {
        let request = v1::ListBlocksRequest { keys: BlockKey::concat(keys) };
        let listed = self.client.list_blocks(request).await.expect("a list").into_inner().blocks;
        let place = |key: &BlockKey| listed.iter().find(|place| place.key == key.0).cloned();
        keys.iter().filter_map(place).collect()
    }

    /// Keeps a prompt's blocks for a minute. Answers with their number, all of them durable.
    pub(crate) async fn keep(&mut self, prompt: &[u32]) -> Result<u32, tonic::Status> {
        let tenant = "test".into();
        self.keep_as(
            prompt,
            v1::PersistContextRequest {
                tenant,
                ttl_ms: 600_000,
                ..v1::PersistContextRequest::default()
            },
        )
        .await
    }

    /// The same of what another node has promised until then.
    pub(crate) async fn keep_until(
        &mut self,
        prompt: &[u32],
        expires_unix_ms: u64,
    ) -> Result<u32, tonic::Status> {
        let request = v1::PersistContextRequest {
            tenant_hash: 1,
            expires_unix_ms,
            ..v1::PersistContextRequest::default()
        };
        self.keep_as(prompt, request).await
    }

    async fn keep_as(
        &mut self,
        prompt: &[u32],
        request: v1::PersistContextRequest,
    ) -> Result<u32, tonic::Status> {
        let keys = self.keys(prompt).await;
        let request = v1::PersistContextRequest {
            namespace: self.namespace().await.0.to_vec(),
            keys: BlockKey::concat(&keys),
            ..request
        };
        Ok(self.client.persist_context(request).await?.into_inner().persisted_blocks)
    }

    /// What the node says of its SSD.
    pub(crate) async fn ssd(&mut self) -> v1::SsdStatus {
        let node = self.client.describe(v1::DescribeRequest {}).await.expect("a description");
        node.into_inner().ssd.expect("a node with an SSD")
    }

    async fn namespace(&mut self) -> kvasir_proto::Namespace {
        let node = self.client.describe(v1::DescribeRequest {}).await.expect("a description");
        let model = node.into_inner().instances.pop().and_then(|one| one.description?.model);
        let model = model.expect("an engine");
        keys::namespace(&model.fingerprint, &model.kv_dtype, "", "")
    }

    /// Changes the bytes of a block behind the node's back.
    pub(crate) fn change(&self, block: &v1::BlockLocation, change: impl FnOnce(&mut [u8])) {
        let mut bytes = vec![0; usize::try_from(block.length_bytes).expect("a slot")];
        let offset = usize::try_from(block.offset_bytes).expect("in the slot");
        self.slots.copy_to(offset, &mut bytes).expect("in the slot");
        change(&mut bytes);
        self.slots.copy_from(offset, &bytes).expect("in the slot");
    }
}

fn slot_memory(pid: u32) -> PathBuf {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("our process");
    descriptors
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            std::fs::read_link(path)
                .is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:kvasir-slots"))
        })
        .expect("a node has slots")
}
