//! What is kept for tenants, as conductors and other nodes ask for it: contexts are kept, extended, listed and
//! dropped. What follows from that for blocks is the block core's matter.

use kvasir_blocks::{ContextName, KeepError, KeepRequest, PersistedContext};
use kvasir_proto::{BlockKey, COPIES_MAX, FieldError, Mark, Namespace, Tenant, v1};

use super::Owner;
use super::copies::ASKED_MAX;
use crate::clock;
use crate::node::command::{Refused, Reply};

/// Calls that may wait for the SSD, the object store or copies on other nodes at once.
const KEEPS_MAX: usize = ASKED_MAX;
/// Contexts of one page, where the caller does not say, and at most.
const PAGE: usize = 100;
const PAGE_MAX: usize = 1_000;

/// Who waits until a block is durable with its new mark, or without one.
#[derive(Debug)]
pub(super) enum Waits {
    /// With the chain, where there are to be copies of it.
    Keep(Reply<v1::PersistContextReply>, Option<Chain>),
    Drop(Reply<v1::DeleteContextReply>),
}

/// Of a tenant, in a namespace.
#[derive(Debug)]
pub(super) struct Chain(Tenant, Namespace, Vec<BlockKey>);

impl From<KeepError> for Refused {
    fn from(error: KeepError) -> Self {
        let why = error.to_string();
        match error {
            KeepError::NoSsd | KeepError::OtherTenant => Refused::Precondition(why),
            KeepError::Draining => Refused::Draining(why),
            KeepError::NotHere | KeepError::NoContext => Refused::NotFound(why),
            KeepError::OverQuota { .. } | KeepError::NoRoom => Refused::NoSpace(why),
            KeepError::Busy | KeepError::NoBucket => Refused::Unavailable(why),
        }
    }
}

/// The hash by which a tenant is known to nodes.
fn tenant(name: &str) -> Result<Tenant, Refused> {
    match name {
        "" => Err(Refused::Invalid("field `tenant` is missing".into())),
        name => Ok(Tenant(kvasir_transfer::checksum(name.as_bytes()))),
    }
}

/// On how many nodes a context is to be.
pub(super) fn copies(asked: u32) -> Result<u8, Refused> {
    match u8::try_from(asked.max(1)) {
        Ok(copies @ ..=COPIES_MAX) => Ok(copies),
        _ => Err(Refused::Invalid(format!(
            "field `replicas` is {asked}; it must be at most {COPIES_MAX}"
        ))),
    }
}

fn last_key(bytes: &[u8]) -> Result<BlockKey, Refused> {
    let keys = BlockKey::list(bytes)?;
    let [last] = keys[..] else {
        return Err(Refused::Invalid(format!(
            "field `last_key` has {} keys; it must have one",
            keys.len()
        )));
    };
    Ok(last)
}

impl Owner {
    pub(super) fn persist_context(
        &mut self,
        request: &v1::PersistContextRequest,
        reply: Reply<v1::PersistContextReply>,
    ) {
        let begun = match request.last_key.is_empty() {
            true => self.begin_keeping(request),
            false => self.begin_extending(request).map(|keep| (keep, None)),
        };
        match begun {
            Ok((keep, chain)) => drop(self.tiers.keeps.insert(keep, Waits::Keep(reply, chain))),
            Err(refused) => drop(reply.send(Err(refused))),
        }
    }

    fn begin_keeping(
        &mut self,
        request: &v1::PersistContextRequest,
    ) -> Result<(u64, Option<Chain>), Refused> {
        // What another node has promised is one of its copies, and the others are its own matter.
        let is_first = !request.tenant.is_empty();
        self.has_room_for_keep(is_first)?;
        let copies = copies(request.replicas)?;
        let now = clock::unix_ms();
        let (tenant, expires_unix_ms, created_unix_ms) =
            match (request.tenant.as_str(), request.ttl_ms) {
                // What another node has promised.
                ("", 0) if request.expires_unix_ms > 0 => {
                    let since = Some(request.created_unix_ms).filter(|since| *since > 0);
                    (Tenant(request.tenant_hash), request.expires_unix_ms, since)
                }
                (name, ttl_ms) => (tenant(name)?, until(now, ttl_ms)?, Some(now)),
            };
        if expires_unix_ms <= now {
            let ago_ms = now - expires_unix_ms;
            return Err(Refused::Precondition(format!(
                "the context expired {ago_ms} ms ago by this node's clock; check that the clocks \
                 of the nodes agree"
            )));
        }
        let wanted = KeepRequest {
            namespace: Namespace::try_from(request.namespace.as_slice())?,
            keys: BlockKey::list(&request.keys)?,
            tenant,
            expires_unix_ms,
            created_unix_ms,
            copies,
        };
        if is_first && usize::from(copies) > 1 + self.replication.peers() && self.tiers.has_ssd() {
            let others = self.replication.peers();
            let why = format!(
                "{copies} replicas were requested, but this node knows only {others} other nodes: \
                 add nodes to `replication.peers` in store-node.toml"
            );
            return Err(Refused::Precondition(why));
        }
        let now_ms = clock::now_ms();
        let KeepRequest { namespace, keys, .. } = &wanted;
        if request.require_all_blocks {
            let here = self.blocks.keepable(now_ms, *namespace, keys);
            if here < keys.len() {
                let why =
                    format!("this node holds only {here} of the chain's {} blocks", keys.len());
                return Err(Refused::NotFound(why));
            }
        }
        let keep = self.blocks.keep(now_ms, &wanted)?;
        let KeepRequest { namespace, keys, tenant, .. } = wanted;
        Ok((keep, (is_first && copies > 1).then_some(Chain(tenant, namespace, keys))))
    }

    fn begin_extending(&mut self, request: &v1::PersistContextRequest) -> Result<u64, Refused> {
        if !request.keys.is_empty() {
            return Err(Refused::Invalid(
                "`last_key` extends a context and `keys` persists a chain: set only one of them"
                    .into(),
            ));
        }
        let context = context(&request.tenant, &request.namespace, &request.last_key)?;
        let expires_unix_ms = until(clock::unix_ms(), request.ttl_ms)?;
        self.knows_contexts()?;
        Ok(self.blocks.extend_context(clock::now_ms(), &context, expires_unix_ms)?)
    }

    pub(super) fn delete_context(
        &mut self,
        request: &v1::DeleteContextRequest,
        reply: Reply<v1::DeleteContextReply>,
    ) {
        match self.begin_dropping(request) {
            Ok(keep) => drop(self.tiers.keeps.insert(keep, Waits::Drop(reply))),
            Err(refused) => drop(reply.send(Err(refused))),
        }
    }

    fn begin_dropping(&mut self, request: &v1::DeleteContextRequest) -> Result<u64, Refused> {
        let context = context(&request.tenant, &request.namespace, &request.last_key)?;
        self.knows_contexts()?;
        Ok(self.blocks.delete_context(clock::now_ms(), &context)?)
    }

    /// What is on the SSD can be changed now, if there is one.
    fn knows_contexts(&self) -> Result<(), Refused> {
        self.has_room_for_keep(false)?;
        if self.tiers.has_ssd() && !self.blocks.ssd_is_usable(clock::now_ms()) {
            return Err(Refused::Unavailable("the SSD is unavailable; try again later".into()));
        }
        self.knows_bucket()
    }

    fn knows_bucket(&self) -> Result<(), Refused> {
        match self.tiers.bucket.as_ref().is_none_or(|bucket| bucket.is_listed) {
            true => Ok(()),
            false => {
                let why =
                    "the object store is not listed yet and may hold contexts; try again later";
                Err(Refused::Unavailable(why.into()))
            }
        }
    }

    /// Of what may wait for copies there are no more with those that do: else nodes that all have so many would
    /// refuse each other's copies.
    fn has_room_for_keep(&self, may_wait: bool) -> Result<(), Refused> {
        let waiting = if may_wait { self.replication.awaited.len() } else { 0 };
        match self.tiers.keeps.len() + waiting < KEEPS_MAX {
            true => Ok(()),
            false => Err(Refused::Unavailable(
                "too many chains are being persisted; try again later".into(),
            )),
        }
    }

    pub(super) fn kept(&mut self, keep: u64, blocks: Option<u32>, mark: Option<Mark>) {
        if self.object_kept(keep, blocks) {
            return;
        }
        let Some(waits) = self.tiers.keeps.remove(&keep) else { return };
        let failed = || Refused::Unavailable("some blocks were not written; try again".into());
        match waits {
            Waits::Keep(reply, chain) => {
                let kept = |persisted_blocks| v1::PersistContextReply {
                    persisted_blocks,
                    created_unix_ms: mark.and_then(|mark| mark.created_unix_ms).unwrap_or(0),
                    expires_unix_ms: mark.map_or(0, |mark| mark.expires_unix_ms),
                };
                let copied =
                    chain.zip(blocks).and_then(|(Chain(tenant, namespace, keys), blocks)| {
                        let last = *keys.get((blocks as usize).checked_sub(1)?)?;
                        let context = ContextName { tenant, namespace, last };
                        // In an object store there are none to be made.
                        self.blocks.copied_context(&context).map(|_| context)
                    });
                match (copied, blocks) {
                    (Some(context), Some(blocks)) => {
                        self.await_copies(context, kept(blocks), reply);
                    }
                    (_, blocks) => drop(reply.send(blocks.map(kept).ok_or_else(failed))),
                }
            }
            Waits::Drop(reply) => {
                let dropped = |_| v1::DeleteContextReply {};
                drop(reply.send(blocks.map(dropped).ok_or_else(failed)));
            }
        }
    }

    pub(super) fn list_contexts(
        &self,
        request: &v1::ListContextsRequest,
    ) -> Result<v1::ListContextsReply, Refused> {
        let tenant = tenant(&request.tenant)?;
        let contexts_max = match request.contexts_max as usize {
            0 => PAGE,
            asked if asked <= PAGE_MAX => asked,
            asked => {
                let why = format!("field `contexts_max` is {asked}; it must be at most {PAGE_MAX}");
                return Err(Refused::Invalid(why));
            }
        };
        let after = match request.start_at.as_slice() {
            [] => None,
            from => Some(place(from)?),
        };
        if !self.tiers.knows_ssd() {
            let why = "the SSD is unavailable and its contexts are unknown; try again later";
            return Err(Refused::Unavailable(why.into()));
        }
        if !self.tiers.has_ssd() {
            self.knows_bucket()?;
        }
        let all = self.blocks.contexts(tenant, after, contexts_max + 1, clock::unix_ms());
        let page = &all[..all.len().min(contexts_max)];
        let next = page.last().filter(|_| all.len() > page.len());
        let place = |last: &PersistedContext| [last.namespace.0, last.last.0].concat();
        Ok(v1::ListContextsReply {
            contexts: page.iter().map(kept_context).collect(),
            next: next.map(place).unwrap_or_default(),
        })
    }
}

fn kept_context(context: &PersistedContext) -> v1::PersistedContext {
    v1::PersistedContext {
        namespace: context.namespace.0.to_vec(),
        last_key: context.last.0.to_vec(),
        blocks: context.blocks,
        created_unix_ms: context.created_unix_ms,
        expires_unix_ms: context.expires_unix_ms,
    }
}

/// A namespace and a last key, as `next` of a page has them.
fn place(from: &[u8]) -> Result<(Namespace, BlockKey), Refused> {
    let (namespace, key) = from.split_at_checked(16).ok_or(FieldError::Length {
        field: "from",
        want: "32",
        got: from.len(),
    })?;
    Ok((Namespace::try_from(namespace)?, last_key(key)?))
}

fn context(name: &str, namespace: &[u8], key: &[u8]) -> Result<ContextName, Refused> {
    let tenant = tenant(name)?;
    Ok(ContextName { tenant, namespace: Namespace::try_from(namespace)?, last: last_key(key)? })
}

/// The end of a time to live that begins now.
fn until(now_unix_ms: u64, ttl_ms: u64) -> Result<u64, Refused> {
    match ttl_ms {
        0 => Err(Refused::Invalid("field `ttl_ms` must be above 0".into())),
        ttl_ms => Ok(now_unix_ms.saturating_add(ttl_ms)),
    }
}
