//! What a fake store node has computed and what it keeps, as a real one answers for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use kvasir_proto::{BlockKey, Namespace, keys, v1};
use tonic::Status;

use super::pair::BLOCK_TOKENS;

/// A context: whose it is, its blocks, since when and until when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shelved {
    pub tenant: String,
    pub blocks: u32,
    pub created_unix_ms: u64,
    pub expires_unix_ms: u64,
}

/// By namespace and last key.
type Shelves = BTreeMap<(Vec<u8>, Vec<u8>), Shelved>;

#[derive(Debug, Default)]
pub(crate) struct Shelf {
    computed: BTreeSet<BlockKey>,
    pub contexts: Shelves,
}

impl Shelf {
    pub(crate) fn compute(&mut self, request: &v1::GenerateRequest) {
        let namespace = Namespace::try_from(request.namespace.as_slice()).expect("16 bytes");
        self.computed.extend(keys::chain(namespace, &request.prompt, BLOCK_TOKENS as usize));
    }

    pub(crate) fn has(&mut self, keys: &[u8]) {
        self.computed.extend(BlockKey::list(keys).expect("keys"));
    }

    /// Keeps as many of the leading blocks as are here, at most so many; or gives a context a new time.
    pub(crate) fn keep(
        &mut self,
        request: &v1::PersistContextRequest,
        blocks_max: usize,
    ) -> Result<v1::PersistContextReply, Status> {
        assert!(!request.tenant.is_empty() && request.ttl_ms > 0, "{request:?}");
        let now = now_unix_ms();
        let expires_unix_ms = now + request.ttl_ms;
        if !request.last_key.is_empty() {
            assert!(request.keys.is_empty(), "{request:?}");
            let at = (request.namespace.clone(), request.last_key.clone());
            let kept = self.of_tenant(&at, &request.tenant)?;
            kept.expires_unix_ms = expires_unix_ms;
            return Ok(reply(kept));
        }
        let keys = BlockKey::list(&request.keys).expect("keys");
        let blocks = keys.iter().take_while(|key| self.computed.contains(key)).count();
        if request.require_all_blocks && blocks.min(blocks_max) < keys.len() {
            return Err(Status::not_found("not all of it is here"));
        }
        let Some(last) = blocks.min(blocks_max).checked_sub(1) else {
            return Err(Status::not_found("the first block is not here"));
        };
        let at = (request.namespace.clone(), keys[last].0.to_vec());
        let kept = self.contexts.entry(at).or_insert(Shelved {
            tenant: request.tenant.clone(),
            blocks: last as u32 + 1,
            created_unix_ms: now,
            expires_unix_ms,
        });
        kept.expires_unix_ms = kept.expires_unix_ms.max(expires_unix_ms);
        Ok(reply(kept))
    }

    pub(crate) fn list(&self, request: &v1::ListContextsRequest) -> v1::ListContextsReply {
        let from = request.start_at.as_slice();
        let is_wanted = |at: &(Vec<u8>, Vec<u8>), kept: &Shelved| {
            kept.tenant == request.tenant && [&at.0[..], &at.1].concat().as_slice() > from
        };
        let wanted = self.contexts.iter().filter(|(at, kept)| is_wanted(at, kept));
        let mut page: Vec<_> = wanted.take(request.contexts_max as usize + 1).collect();
        let is_last = page.len() <= request.contexts_max as usize;
        page.truncate(request.contexts_max as usize);
        let last = page.last().filter(|_| !is_last);
        let next = last.map(|((namespace, last_key), _)| [&namespace[..], last_key].concat());
        let contexts = page.iter().map(|&((namespace, last_key), kept)| v1::PersistedContext {
            namespace: namespace.clone(),
            last_key: last_key.clone(),
            blocks: kept.blocks,
            created_unix_ms: kept.created_unix_ms,
            expires_unix_ms: kept.expires_unix_ms,
        });
        v1::ListContextsReply { contexts: contexts.collect(), next: next.unwrap_or_default() }
    }

    pub(crate) fn end(
        &mut self,
        request: &v1::DeleteContextRequest,
    ) -> Result<v1::DeleteContextReply, Status> {
        let at = (request.namespace.clone(), request.last_key.clone());
        self.of_tenant(&at, &request.tenant)?;
        self.contexts.remove(&at);
        Ok(v1::DeleteContextReply {})
    }

    fn of_tenant(&mut self, at: &(Vec<u8>, Vec<u8>), tenant: &str) -> Result<&mut Shelved, Status> {
        let kept = self.contexts.get_mut(at).filter(|kept| kept.tenant == tenant);
        kept.ok_or_else(|| Status::not_found("the tenant has no such context here"))
    }
}

fn reply(kept: &Shelved) -> v1::PersistContextReply {
    let Shelved { blocks, created_unix_ms, expires_unix_ms, .. } = *kept;
    v1::PersistContextReply { persisted_blocks: blocks, created_unix_ms, expires_unix_ms }
}

pub(crate) fn now_unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(now.as_millis()).expect("in range")
}
