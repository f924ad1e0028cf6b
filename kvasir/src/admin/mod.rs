//! `kvasir admin`: commands of an administrator to one store node, and its answers as text or as JSON.
//! The node decides and refuses.

mod text;

use std::error::Error;
use std::time::Duration;

use kvasir_proto::v1;
use kvasir_proto::{BlockKey, Namespace};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use v1::admin_client::AdminClient;
use v1::store_node_client::StoreNodeClient;

use crate::output;

const CONNECT: Duration = Duration::from_secs(5);
const CALL: Duration = Duration::from_secs(30);
/// How often `drain --wait` asks.
const POLL: Duration = Duration::from_millis(200);
const PAGE_BLOCKS: u32 = 1_000;
const PAGE_CONTEXTS: u32 = 1_000;
/// The tenant of all requests at a conductor without API keys.
const ANONYMOUS: &str = "(anonymous)";

/// Flags of `kvasir admin`.
#[derive(Debug, clap::Args)]
pub(crate) struct Flags {
    /// gRPC address of the store node: `listen` in its configuration.
    #[arg(long, value_name = "ADDRESS")]
    node: String,

    /// Print only JSON: one object, or for a list one object per line.
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Show the node's engines, slots, tiers and the progress of a drain.
    Status,
    /// List the blocks of all tiers.
    List(ListFlags),
    /// Show the details of one block and verify its checksum.
    Inspect {
        /// The block's key: 32 hexadecimal digits.
        key: String,
    },
    /// Pin a block in DRAM, and all blocks before it, for a limited time.
    Pin {
        /// The block's key: 32 hexadecimal digits.
        key: String,
        /// Time to live of the pin; at most 86400 (a day).
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        ttl_seconds: u64,
    },
    /// Remove a pin.
    Unpin {
        /// The number that `pin` printed.
        pin: u64,
    },
    /// Evict a block and all blocks after it, or a namespace, from all tiers. Pinned blocks and contexts stay.
    Evict {
        /// The block's key: 32 hexadecimal digits.
        #[arg(long, conflicts_with = "namespace", required_unless_present = "namespace")]
        key: Option<String>,
        /// The hash of the namespace: 32 hexadecimal digits, as `list` prints it.
        #[arg(long)]
        namespace: Option<String>,
    },
    /// Copy a block, and all blocks before it, to another node, and wait for the end of the copy.
    Replicate {
        /// The block's key: 32 hexadecimal digits.
        key: String,
        /// gRPC address of the other node: `listen` in its configuration.
        #[arg(long, value_name = "ADDRESS")]
        to: String,
        /// Stop waiting after this time; the node continues.
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout_seconds: u64,
    },
    /// List the contexts of a tenant on this node and in its object store.
    Contexts {
        /// The tenant's name in the conductor's file of API keys. The default is the tenant of conductors without API keys.
        #[arg(long, default_value = ANONYMOUS)]
        tenant: String,
        /// The largest number to list; 0 for all.
        #[arg(long, value_name = "CONTEXTS", default_value_t = 1_000)]
        limit: usize,
    },
    /// Delete a context before its expiry. Its blocks become normal blocks. Waits until the deletion is durable.
    DeleteContext {
        /// The tenant, as for `contexts`.
        #[arg(long, default_value = ANONYMOUS)]
        tenant: String,
        /// The hash of its namespace: 32 hexadecimal digits, as `contexts` prints it.
        #[arg(long)]
        namespace: String,
        /// The key of its last block: 32 hexadecimal digits, as `contexts` prints it.
        #[arg(long)]
        key: String,
    },
    /// Drain the node: it accepts no new work and moves contexts and hot blocks to other nodes.
    Drain(DrainFlags),
}

impl Action {
    /// How long its calls may take.
    fn call(&self) -> Duration {
        match self {
            Action::Replicate { timeout_seconds, .. } => Duration::from_secs(*timeout_seconds),
            _ => CALL,
        }
    }
}

#[derive(Debug, clap::Args)]
struct ListFlags {
    /// Only blocks on this tier.
    #[arg(long, value_parser = ["dram", "ssd"])]
    tier: Option<String>,
    /// Only blocks of this class.
    #[arg(long, value_parser = ["normal", "context"])]
    block_class: Option<String>,
    /// Only blocks of this namespace: 32 hexadecimal digits.
    #[arg(long)]
    namespace: Option<String>,
    /// The largest number to list; 0 for all.
    #[arg(long, value_name = "BLOCKS", default_value_t = 1_000)]
    limit: usize,
}

#[derive(Debug, clap::Args)]
struct DrainFlags {
    /// gRPC address of a node that receives blocks, in place of the node's `replication.peers`. Can be repeated.
    #[arg(long, value_name = "ADDRESS")]
    to: Vec<String>,
    /// Limit for the bytes of hot blocks that move, in place of the node's
    /// `replication.drain_hot_bytes_max`.
    #[arg(long, value_name = "BYTES")]
    hot_bytes_max: Option<u64>,
    /// Wait until the node is drained.
    #[arg(long)]
    wait: bool,
    /// With `--wait`: stop waiting after this time; the node continues.
    #[arg(long, value_name = "SECONDS", requires = "wait")]
    timeout_seconds: Option<u64>,
    /// Cancel the drain: the node accepts new work again.
    #[arg(long, conflicts_with_all = ["to", "hot_bytes_max", "wait"])]
    cancel: bool,
}

/// Errors of `kvasir admin`.
#[derive(Debug, thiserror::Error)]
enum AdminError {
    #[error(
        "no store node answers at {node} ({why}); set --node to `listen` in its configuration, as in \
         127.0.0.1:7401"
    )]
    NoNode { node: String, why: String },
    #[error(
        "{node} is not a store node with an administration service; its version may be older than this program"
    )]
    Unknown { node: String },
    #[error("the store node refused the command: {0}")]
    Refused(String),
    #[error(
        "{what} {got:?} is invalid: write 32 hexadecimal digits, as `kvasir admin list` prints them"
    )]
    Hex { what: &'static str, got: String },
    #[error(
        "the copy did not end within {seconds} s, and the node continues; its metric kvasir_store_replications_total counts the outcome"
    )]
    NotCopied { seconds: u64 },
    #[error("the node is not drained after {seconds} s, and it continues: {state}")]
    NotDrained { seconds: u64, state: String },
}

pub(crate) fn run(flags: &Flags) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(serve(flags))?)
}

struct Session<'a> {
    node: &'a str,
    client: AdminClient<Channel>,
    /// The same node as conductors see it.
    store: StoreNodeClient<Channel>,
    json: bool,
}

async fn serve(flags: &Flags) -> Result<(), AdminError> {
    let node = flags.node.as_str();
    let no_node = |error: &dyn Error| AdminError::NoNode {
        node: node.to_owned(),
        why: output::sentence(error),
    };
    let endpoint = Endpoint::from_shared(format!("http://{node}")).map_err(|e| no_node(&e))?;
    let endpoint = endpoint.connect_timeout(CONNECT).timeout(flags.action.call());
    let channel = endpoint.connect().await.map_err(|error| no_node(&error))?;
    let (client, store) = (AdminClient::new(channel.clone()), StoreNodeClient::new(channel));
    let mut session = Session { node, client, store, json: flags.json };
    match &flags.action {
        Action::Status => session.status().await,
        Action::List(list) => session.list(list).await,
        Action::Inspect { key } => session.inspect(key).await,
        Action::Pin { key, ttl_seconds } => session.pin(key, *ttl_seconds).await,
        Action::Unpin { pin } => session.unpin(*pin).await,
        Action::Evict { key, namespace } => {
            session.evict(key.as_deref(), namespace.as_deref()).await
        }
        Action::Replicate { key, to, timeout_seconds } => {
            session.replicate(key, to, *timeout_seconds).await
        }
        Action::Contexts { tenant, limit } => session.contexts(tenant, *limit).await,
        Action::DeleteContext { tenant, namespace, key } => {
            session.delete_context(tenant, namespace, key).await
        }
        Action::Drain(drain) => session.drain(drain).await,
    }
}

impl Session<'_> {
    fn failed(&self, status: &Status) -> AdminError {
        match status.code() {
            Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled => {
                let (node, why) = (self.node.to_owned(), status.message().to_owned());
                AdminError::NoNode { node, why }
            }
            Code::Unimplemented => AdminError::Unknown { node: self.node.to_owned() },
            _ => AdminError::Refused(status.message().to_owned()),
        }
    }

    /// As [`Self::failed`], of a call by which a node that is there may say that it cannot just now.
    fn refused(&self, status: &Status) -> AdminError {
        match status.code() {
            Code::Unavailable => AdminError::Refused(status.message().to_owned()),
            _ => self.failed(status),
        }
    }

    fn say(&self, json: &serde_json::Value, text: &str) {
        match self.json {
            true => output::say(&json.to_string()),
            false => output::say(text.trim_end()),
        }
    }

    async fn status(&mut self) -> Result<(), AdminError> {
        let status = self.client.status(v1::AdminStatusRequest {}).await;
        let status = status.map_err(|status| self.failed(&status))?.into_inner();
        self.say(&text::status_json(&status), &text::status(&status));
        Ok(())
    }

    async fn list(&mut self, flags: &ListFlags) -> Result<(), AdminError> {
        let tier = match flags.tier.as_deref() {
            Some("dram") => v1::Tier::Dram,
            Some(_) => v1::Tier::Ssd,
            None => v1::Tier::Unspecified,
        };
        let class = match flags.block_class.as_deref() {
            Some("normal") => v1::BlockClass::Normal,
            Some(_) => v1::BlockClass::Context,
            None => v1::BlockClass::Unspecified,
        };
        let namespace = flags.namespace.as_deref().map(namespace).transpose()?.unwrap_or_default();
        if !self.json {
            output::say(text::LIST_HEAD);
        }
        let (mut left, mut from) =
            (if flags.limit == 0 { usize::MAX } else { flags.limit }, vec![]);
        loop {
            let request = v1::ListRequest {
                tier: tier.into(),
                block_class: class.into(),
                namespace: namespace.clone(),
                blocks_max: u32::try_from(left).unwrap_or(PAGE_BLOCKS).clamp(1, PAGE_BLOCKS),
                start_at: from,
            };
            let page = self.client.list(request).await;
            let page = page.map_err(|status| self.failed(&status))?.into_inner();
            for block in page.blocks.iter().take(left) {
                self.say(&text::listed_json(block), &text::listed(block));
            }
            left = left.saturating_sub(page.blocks.len());
            from = page.next;
            if from.is_empty() || left == 0 {
                return Ok(());
            }
        }
    }

    async fn inspect(&mut self, key: &str) -> Result<(), AdminError> {
        let found = self.client.inspect(v1::InspectRequest { key: block_key(key)? }).await;
        let found = found.map_err(|status| self.failed(&status))?.into_inner();
        self.say(&text::inspection_json(&found), &text::inspection(&found));
        Ok(())
    }

    async fn pin(&mut self, key: &str, seconds: u64) -> Result<(), AdminError> {
        let ttl_ms = seconds.saturating_mul(1_000);
        let pin = self.client.pin(v1::PinRequest { key: block_key(key)?, ttl_ms }).await;
        let v1::PinReply { pin, blocks } = pin.map_err(|status| self.failed(&status))?.into_inner();
        self.say(
            &serde_json::json!({ "pin": pin, "blocks": blocks, "ttl_seconds": seconds }),
            &format!("pin {pin} holds {blocks} blocks for {seconds} s"),
        );
        Ok(())
    }

    async fn unpin(&mut self, pin: u64) -> Result<(), AdminError> {
        let unpinned = self.client.unpin(v1::UnpinRequest { pin }).await;
        unpinned.map_err(|status| self.failed(&status))?;
        self.say(&serde_json::json!({ "pin": pin }), &format!("removed pin {pin}"));
        Ok(())
    }

    async fn evict(&mut self, key: Option<&str>, of: Option<&str>) -> Result<(), AdminError> {
        use v1::evict_request::Target;
        let target = match (key, of) {
            (Some(key), _) => Some(Target::Key(block_key(key)?)),
            (None, of) => of.map(namespace).transpose()?.map(Target::Namespace),
        };
        let evicted = self.client.evict(v1::EvictRequest { target }).await;
        let evicted = evicted.map_err(|status| self.failed(&status))?.into_inner();
        self.say(&text::evicted_json(&evicted), &text::evicted(&evicted));
        Ok(())
    }

    async fn replicate(&mut self, key: &str, to: &str, seconds: u64) -> Result<(), AdminError> {
        let request = v1::ReplicateBlockRequest { key: block_key(key)?, target: to.to_owned() };
        let copied = self.client.replicate(request).await;
        let copied = copied.map_err(|status| match status.code() {
            Code::DeadlineExceeded | Code::Cancelled => AdminError::NotCopied { seconds },
            _ => self.refused(&status),
        })?;
        let blocks = copied.into_inner().blocks;
        self.say(
            &serde_json::json!({ "key": key, "to": to, "blocks": blocks }),
            &format!("{to} holds {blocks} blocks of the chain"),
        );
        Ok(())
    }

    async fn contexts(&mut self, tenant: &str, limit: usize) -> Result<(), AdminError> {
        if !self.json {
            output::say(text::CONTEXTS_HEAD);
        }
        let (mut left, mut from) = (if limit == 0 { usize::MAX } else { limit }, vec![]);
        loop {
            let request = v1::ListContextsRequest {
                tenant: tenant.to_owned(),
                contexts_max: u32::try_from(left).unwrap_or(PAGE_CONTEXTS).clamp(1, PAGE_CONTEXTS),
                start_at: from,
            };
            let page = self.store.list_contexts(request).await;
            let page = page.map_err(|status| self.refused(&status))?.into_inner();
            let now_unix_ms = unix_ms();
            for context in page.contexts.iter().take(left) {
                let line = text::context(context, now_unix_ms);
                self.say(&text::context_json(context), &line);
            }
            left = left.saturating_sub(page.contexts.len());
            from = page.next;
            if from.is_empty() || left == 0 {
                return Ok(());
            }
        }
    }

    async fn delete_context(
        &mut self,
        tenant: &str,
        of: &str,
        key: &str,
    ) -> Result<(), AdminError> {
        let request = v1::DeleteContextRequest {
            tenant: tenant.to_owned(),
            namespace: namespace(of)?,
            last_key: block_key(key)?,
        };
        let dropped = self.store.delete_context(request).await;
        dropped.map_err(|status| self.refused(&status))?;
        self.say(
            &serde_json::json!({ "tenant": tenant, "namespace": of, "last_key": key }),
            "deleted the context on this node",
        );
        Ok(())
    }

    async fn drain(&mut self, flags: &DrainFlags) -> Result<(), AdminError> {
        if flags.cancel {
            let status = self.client.cancel_drain(v1::CancelDrainRequest {}).await;
            let status = status.map_err(|status| self.failed(&status))?.into_inner();
            self.say(&text::drain_json(&status), &text::drain(&status));
            return Ok(());
        }
        let request =
            v1::DrainRequest { targets: flags.to.clone(), hot_bytes_max: flags.hot_bytes_max };
        let begun = self.client.drain(request).await;
        let mut status = begun.map_err(|status| self.failed(&status))?.into_inner();
        let began = tokio::time::Instant::now();
        let mut said = String::new();
        while flags.wait && !status.drained {
            if let Some(seconds) = flags.timeout_seconds
                && began.elapsed() >= Duration::from_secs(seconds)
            {
                return Err(AdminError::NotDrained { seconds, state: text::drain(&status) });
            }
            let now = text::drain(&status);
            if !self.json && now != said {
                output::say(&now);
                said = now;
            }
            tokio::time::sleep(POLL).await;
            let polled = self.client.status(v1::AdminStatusRequest {}).await;
            let polled = polled.map_err(|status| self.failed(&status))?.into_inner();
            status = polled.drain.unwrap_or_default();
            if !status.draining {
                let why = "the drain ended: the node was restarted, or the drain was cancelled";
                return Err(AdminError::Refused(why.to_owned()));
            }
        }
        self.say(&text::drain_json(&status), &text::drain(&status));
        Ok(())
    }
}

fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn block_key(text: &str) -> Result<Vec<u8>, AdminError> {
    let bytes = unhex(text).ok_or_else(|| AdminError::Hex { what: "key", got: text.into() })?;
    Ok(BlockKey(bytes).0.to_vec())
}

fn namespace(text: &str) -> Result<Vec<u8>, AdminError> {
    let wrong = || AdminError::Hex { what: "namespace", got: text.into() };
    Ok(Namespace(unhex(text).ok_or_else(wrong)?).0.to_vec())
}

fn unhex(text: &str) -> Option<[u8; 16]> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = is_hex.then(|| u128::from_str_radix(text, 16).ok()).flatten()?;
    Some(number.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_32_digits_and_nothing_else() {
        assert_eq!(
            unhex("000102030405060708090a0b0c0d0e0F"),
            Some(std::array::from_fn(|at| at as u8))
        );
        for wrong in
            ["", "00", "g0010203040506070809 0a0b0c0d0e0f", "+00102030405060708090a0b0c0d0e0f"]
        {
            assert_eq!(unhex(wrong), None, "{wrong}");
        }
        let refused = block_key("12").expect_err("too short").to_string();
        assert!(refused.contains("32 hexadecimal digits") && refused.contains("12"), "{refused}");
    }
}
