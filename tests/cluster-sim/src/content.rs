//! A model so small that every byte of its cache can be said beforehand. The rows of a page follow from
//! the rows of the page before it, as they lie in memory, and from the page's tokens; the next token
//! follows from the last page. So a wrong byte anywhere makes a wrong answer, as in a real model.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_proto::{BlockKey, Namespace, SlotLayout, keys};

use crate::plan::{OBJECTS, Plan, RequestPlan, TENANTS, namespace};
use crate::random::mix;

pub const BLOCK_TOKENS: u32 = 4;
pub const LAYERS: usize = 2;
const ROW_BYTES: u64 = 8;
pub const SLOT_BYTES: usize = LAYERS * BLOCK_TOKENS as usize * ROW_BYTES as usize;

pub type PageBytes = [u8; SLOT_BYTES];

pub fn layout() -> Arc<SlotLayout> {
    let layout = SlotLayout::layer_major(BLOCK_TOKENS, LAYERS, ROW_BYTES);
    Arc::new(layout.expect("no number of it is zero"))
}

/// What comes before the first page.
pub fn root(namespace: Namespace) -> PageBytes {
    let mut bytes = [0; SLOT_BYTES];
    bytes[..16].copy_from_slice(&namespace.0);
    bytes
}

/// The rows of a page with these tokens, after a page with those rows.
pub fn page(before: &PageBytes, tokens: &[u32]) -> PageBytes {
    let mut state = digest(before);
    for token in tokens {
        state = mix(state ^ u64::from(*token) ^ 0x5eed);
    }
    let mut bytes = [0; SLOT_BYTES];
    for (at, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&mix(state.wrapping_add(at as u64)).to_le_bytes());
    }
    bytes
}

/// Of its runs.
pub fn checksums(page: &PageBytes) -> Vec<u64> {
    let layout = layout();
    let runs = (0..layout.layers()).flat_map(|layer| layout.runs(layer));
    let bytes = |run: &kvasir_proto::SlotRun| {
        let start = run.offset_bytes as usize;
        kvasir_transfer::checksum(&page[start..start + run.length_bytes as usize])
    };
    runs.map(bytes).collect()
}

/// The token that follows the last page.
pub fn next_token(page: &PageBytes) -> u32 {
    (digest(page) >> 32) as u32
}

fn digest(page: &PageBytes) -> u64 {
    page.chunks(8).fold(0x1234_5678, |state, chunk| {
        mix(state ^ u64::from_le_bytes(chunk.try_into().expect("eight bytes")))
    })
}

/// One request as it must come out, whatever happens on the way.
#[derive(Debug, Clone)]
pub struct Expected {
    pub namespace: Namespace,
    /// Of all full blocks of prompt and answer.
    pub keys: Vec<BlockKey>,
    pub answer: Vec<u32>,
}

/// Bytes that a name can stand for, one after the other and then again.
const VERSIONS: u32 = 64;

/// A block as it must be; an object in its first version.
#[derive(Debug, Clone)]
pub struct Block {
    pub namespace: Namespace,
    pub parent: Option<BlockKey>,
    pub bytes: PageBytes,
}

/// What is true of a plan: computed from its prompts alone, without any node.
#[derive(Debug)]
pub struct Truth {
    pub requests: Vec<Expected>,
    pub blocks: BTreeMap<BlockKey, Block>,
    by_bytes: BTreeMap<PageBytes, BlockKey>,
    /// Of each tenant.
    objects: Vec<Vec<BlockKey>>,
    /// What the names of objects may stand for, one after the other.
    versions: BTreeMap<BlockKey, Vec<PageBytes>>,
}

impl Truth {
    pub fn new(plan: &Plan) -> Self {
        let mut truth = Truth {
            requests: Vec::new(),
            blocks: BTreeMap::new(),
            by_bytes: BTreeMap::new(),
            objects: Vec::new(),
            versions: BTreeMap::new(),
        };
        for tenant in 0..TENANTS {
            let keys = (0..OBJECTS).map(|object| truth.put(namespace(tenant), object));
            let keys = keys.collect();
            truth.objects.push(keys);
        }
        for request in &plan.requests {
            let expected = truth.compute(request);
            truth.requests.push(expected);
        }
        truth
    }

    /// A block and those before it, the last one first.
    pub fn chain(&self, key: BlockKey) -> Vec<BlockKey> {
        let before = |key: &BlockKey| self.blocks.get(key).and_then(|block| block.parent);
        std::iter::successors(Some(key), before).collect()
    }

    /// An object of a tenant: a block that follows no other.
    pub fn object(&self, tenant: u64, object: u64) -> BlockKey {
        self.objects[tenant as usize][object as usize]
    }

    pub fn is_object(&self, key: BlockKey) -> bool {
        self.objects.iter().flatten().any(|of| *of == key)
    }

    fn put(&mut self, namespace: Namespace, object: u64) -> BlockKey {
        let mut tokens = [0x0b1e_c700 + object as u32; BLOCK_TOKENS as usize];
        let key = keys::chain(namespace, &tokens, BLOCK_TOKENS as usize)[0];
        let versions = (0..VERSIONS).map(|version| {
            tokens[1] = version;
            page(&root(namespace), &tokens)
        });
        let versions: Vec<PageBytes> = versions.collect();
        self.blocks.insert(key, Block { namespace, parent: None, bytes: versions[0] });
        self.by_bytes.extend(versions.iter().map(|bytes| (*bytes, key)));
        self.versions.insert(key, versions);
        key
    }

    /// What a name stands for after it was given other bytes so often.
    pub fn version(&self, key: BlockKey, version: u32) -> &PageBytes {
        &self.versions[&key][(version % VERSIONS) as usize]
    }

    /// Which version of an object these bytes are, of those up to the newest one: the last that it can be.
    pub fn version_of(&self, key: BlockKey, bytes: &PageBytes, newest: u32) -> Option<u32> {
        let at = self.versions.get(&key)?.iter().position(|version| version == bytes)? as u32;
        let before = (newest + VERSIONS - at) % VERSIONS;
        newest.checked_sub(before)
    }

    /// Whether a block may have these bytes: an object those of any version.
    pub fn may_be(&self, key: BlockKey, bytes: &PageBytes) -> bool {
        self.blocks.contains_key(&key) && self.by_bytes.get(bytes) == Some(&key)
    }

    /// The block with these rows.
    pub fn block_of(&self, bytes: &[u8]) -> Option<BlockKey> {
        self.by_bytes.get(bytes).copied()
    }

    fn compute(&mut self, request: &RequestPlan) -> Expected {
        let namespace = request.namespace();
        let mut tokens = request.prompt.clone();
        let mut answer = Vec::new();
        while answer.len() < request.generated_tokens as usize {
            let token = next_token(&last_page(namespace, &tokens));
            answer.push(token);
            tokens.push(token);
        }
        // The last token of an answer is never computed.
        tokens.pop();
        let keys = keys::chain(namespace, &tokens, BLOCK_TOKENS as usize);
        let mut before = root(namespace);
        let mut parent = None;
        for (key, tokens) in keys.iter().zip(tokens.chunks(BLOCK_TOKENS as usize)) {
            let bytes = page(&before, tokens);
            self.blocks.insert(*key, Block { namespace, parent, bytes });
            self.by_bytes.insert(bytes, *key);
            (before, parent) = (bytes, Some(*key));
        }
        Expected { namespace, keys, answer }
    }
}

fn last_page(namespace: Namespace, tokens: &[u32]) -> PageBytes {
    let pages = tokens.chunks(BLOCK_TOKENS as usize);
    pages.fold(root(namespace), |before, tokens| page(&before, tokens))
}
