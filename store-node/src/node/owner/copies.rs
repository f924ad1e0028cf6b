//! Contexts that are kept on several nodes: asking the others for them, and answering who waits for copies.
//! Which copies are lacking, and whose part it is to make them, is the block core's matter.

use kvasir_blocks::{ContextName, CopiedContext, PeerCopies};
use kvasir_proto::{Namespace, Tenant, v1};

use super::Owner;
use super::admin::block_key;
use super::contexts::copies;
use crate::clock;
use crate::node::command::{Refused, Reply};

/// Contexts that one call asks for. All that somebody waits for are among them.
pub(super) const ASKED_MAX: usize = 1_000;
/// How long who has a context made waits for its copies, in milliseconds: each is written to a disk.
const WITHIN_MS: u64 = 25_000;

/// Somebody who is told when a context has all of its copies.
#[derive(Debug)]
pub(super) struct Awaited {
    context: ContextName,
    /// What is known of its copies counts once the others have been asked so often: it may be from before they
    /// lost it.
    asks: u64,
    until_ms: u64,
    kept: v1::PersistContextReply,
    reply: Reply<v1::PersistContextReply>,
}

impl Owner {
    /// The context is durable here. Answers when it is elsewhere too.
    pub(super) fn await_copies(
        &mut self,
        context: ContextName,
        kept: v1::PersistContextReply,
        reply: Reply<v1::PersistContextReply>,
    ) {
        let now_ms = clock::now_ms();
        let until_ms = now_ms + WITHIN_MS;
        let asks = self.replication.asks + 1;
        self.replication.awaited.push(Awaited { context, asks, until_ms, kept, reply });
        // Who has it already is asked first: it may have been kept before.
        self.replication.checked_ms = None;
        self.look_for_copies(now_ms);
    }

    /// Asks the other nodes for contexts that are to be kept there too, when that is due.
    pub(super) fn look_for_copies(&mut self, now_ms: u64) {
        let (replication, every_ms) =
            (&self.replication, self.config.replication.check_interval_ms);
        let due = replication.checked_ms.is_none_or(|at_ms| now_ms >= at_ms + every_ms);
        if replication.checking || !due {
            return;
        }
        self.replication.checked_ms = Some(now_ms);
        let awaited: Vec<CopiedContext> = self
            .replication
            .awaited
            .iter()
            .filter_map(|awaited| self.blocks.copied_context(&awaited.context))
            .collect();
        let mut contexts = self.blocks.copied_contexts(ASKED_MAX.saturating_sub(awaited.len()));
        contexts.retain(|context| !awaited.contains(context));
        contexts.extend(awaited);
        if contexts.is_empty() {
            return;
        }
        self.replication.checking = true;
        self.replication.asks += 1;
        self.replication.ask_for(contexts, self.incarnation);
    }

    pub(super) fn copies_seen(&mut self, contexts: &[CopiedContext], peers: &[PeerCopies]) {
        let now_ms = clock::now_ms();
        self.replication.checking = false;
        self.blocks.copies_seen(now_ms, self.incarnation, contexts, peers);
        self.make_awaited();
        self.plan_copies(now_ms);
    }

    /// One copy after the other, as long as somebody waits.
    pub(super) fn make_awaited(&mut self) {
        let is_known = |awaited: &&Awaited| self.replication.knows(awaited.asks);
        for awaited in self.replication.awaited.iter().filter(is_known) {
            self.blocks.make_copies(&awaited.context);
        }
    }

    /// Answers whoever waits for copies that are all there, or that do not come in time.
    pub(super) fn answer_awaited(&mut self, now_ms: u64) {
        let awaited = std::mem::take(&mut self.replication.awaited);
        for Awaited { context, asks, until_ms, kept, reply } in awaited {
            let is_known = self.replication.knows(asks);
            let lacking = self.blocks.copies_lacking(&context);
            let answer = match self.blocks.copied_context(&context) {
                None => Err(Refused::Unavailable(
                    "the context was deleted in the meantime; try again".into(),
                )),
                // Its time may have been changed meanwhile, also to a shorter one.
                Some(CopiedContext { expires_unix_ms, .. }) if is_known && lacking == 0 => {
                    Ok(v1::PersistContextReply { expires_unix_ms, ..kept })
                }
                Some(_) if now_ms >= until_ms => Err(Refused::Unavailable(format!(
                    "the context is persisted on this node, but {lacking} of its replicas on other \
                     nodes are missing; try again"
                ))),
                Some(_) => {
                    let awaited = Awaited { context, asks, until_ms, kept, reply };
                    self.replication.awaited.push(awaited);
                    continue;
                }
            };
            drop(reply.send(answer));
        }
    }

    /// Another node asks which of these are kept here.
    pub(super) fn holds_contexts(
        &self,
        request: &v1::HoldsContextsRequest,
    ) -> Result<v1::HoldsContextsReply, Refused> {
        let count = request.contexts.len();
        if count > ASKED_MAX {
            let why =
                format!("field `contexts` has {count} entries; it must have at most {ASKED_MAX}");
            return Err(Refused::Invalid(why));
        }
        if !self.tiers.knows_ssd() {
            let why = "the SSD is unavailable and its contexts are unknown; try again later";
            return Err(Refused::Unavailable(why.into()));
        }
        let holds = |asked: &v1::HeldContext| {
            let context = CopiedContext {
                tenant: Tenant(asked.tenant_hash),
                namespace: Namespace::try_from(asked.namespace.as_slice())?,
                last: block_key(&asked.last_key)?,
                expires_unix_ms: asked.expires_unix_ms,
                copies: copies(asked.replicas)?,
            };
            Ok(self.blocks.keeps_copy(&context))
        };
        let holds: Result<_, Refused> = request.contexts.iter().map(holds).collect();
        Ok(v1::HoldsContextsReply { incarnation: self.incarnation, holds: holds? })
    }
}
