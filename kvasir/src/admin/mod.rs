//! `kvasir admin`: what an administrator asks of one store node, and its answers as text or as JSON.
//! It decides nothing; what is refused is refused by the node, with what to do about it.

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
/// What a conductor without keys calls whoever asks.
const NOBODY: &str = "(nobody)";

/// Flags of `kvasir admin`.
#[derive(Debug, clap::Args)]
pub(crate) struct Flags {
    /// The store node's gRPC address: `listen` of its configuration.
    #[arg(long, value_name = "ADDRESS")]
    node: String,

    /// Prints JSON and nothing else: one object, of a list one object a line.
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Says what the node is, what it holds and how far a drain is.
    Status,
    /// Lists blocks of all tiers.
    List(ListFlags),
    /// Says all that is known of one block, and computes its checksum again.
    Inspect {
        /// The block's key: 32 hexadecimal digits.
        key: String,
    },
    /// Pins a block of the memory, and all before it, for a time.
    Pin {
        /// The block's key: 32 hexadecimal digits.
        key: String,
        /// After so many seconds it ends by itself; at most a day.
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        seconds: u64,
    },
    /// Ends a pin before its time.
    Unpin {
        /// The number that `pin` answered.
        pin: u64,
    },
    /// Evicts a block and all after it, or a namespace, from all tiers. What is pinned or kept stays.
    Evict {
        /// The block's key: 32 hexadecimal digits.
        #[arg(long, conflicts_with = "namespace", required_unless_present = "namespace")]
        key: Option<String>,
        /// The hash of the namespace: 32 hexadecimal digits, as `list` has it.
        #[arg(long)]
        namespace: Option<String>,
    },
    /// Copies a block, and all before it, to another node. Returns when they are there.
    Replicate {
        /// The block's key: 32 hexadecimal digits.
        key: String,
        /// The other node: `listen` of its configuration.
        #[arg(long, value_name = "ADDRESS")]
        to: String,
        /// Waits no longer than so many seconds; the node goes on.
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout: u64,
    },
    /// Lists what is kept for a tenant, from its own node or an object store.
    Contexts {
        /// The tenant's name in the conductor's file of keys; where there is none, that of everybody.
        #[arg(long, default_value = NOBODY)]
        tenant: String,
        /// At most so many; 0 for all.
        #[arg(long, value_name = "CONTEXTS", default_value_t = 1_000)]
        limit: usize,
    },
    /// Ends a context before its time: its blocks compete like any others. Returns when that is durable.
    DropContext {
        /// As for `contexts`.
        #[arg(long, default_value = NOBODY)]
        tenant: String,
        /// The hash of its namespace: 32 hexadecimal digits, as `contexts` has it.
        #[arg(long)]
        namespace: String,
        /// The key of its last block: 32 hexadecimal digits, as `contexts` has it.
        #[arg(long)]
        key: String,
    },
    /// Drains the node: it takes no new work, and what it must not lose moves to other nodes.
    Drain(DrainFlags),
}

impl Action {
    /// How long its calls may take.
    fn call(&self) -> Duration {
        match self {
            Action::Replicate { timeout, .. } => Duration::from_secs(*timeout),
            _ => CALL,
        }
    }
}

#[derive(Debug, clap::Args)]
struct ListFlags {
    /// Only blocks with a copy there: dram or ssd.
    #[arg(long, value_parser = ["dram", "ssd"])]
    tier: Option<String>,
    /// Only blocks of this class: normal or context.
    #[arg(long, value_parser = ["normal", "context"])]
    class: Option<String>,
    /// Only blocks of this namespace: 32 hexadecimal digits.
    #[arg(long)]
    namespace: Option<String>,
    /// At most so many; 0 for all.
    #[arg(long, value_name = "BLOCKS", default_value_t = 1_000)]
    limit: usize,
}

#[derive(Debug, clap::Args)]
struct DrainFlags {
    /// Where blocks may go, in place of the node's `replicas.peers`; may be given several times.
    #[arg(long, value_name = "ADDRESS")]
    to: Vec<String>,
    /// The most bytes of blocks that move though nobody was promised them, in place of the node's
    /// `replicas.drain_hot_bytes_max`.
    #[arg(long, value_name = "BYTES")]
    hot_bytes: Option<u64>,
    /// Returns only when the node has drained.
    #[arg(long)]
    wait: bool,
    /// With `--wait`: gives up after so many seconds; the node goes on.
    #[arg(long, value_name = "SECONDS", requires = "wait")]
    timeout: Option<u64>,
    /// Takes new work again.
    #[arg(long, conflicts_with_all = ["to", "hot_bytes", "wait"])]
    stop: bool,
}

/// Why an administrator was not served.
#[derive(Debug, thiserror::Error)]
enum AdminError {
    #[error(
        "no store node answers at {node} ({why}); --node is `listen` of its configuration, as in \
         127.0.0.1:7401"
    )]
    NoNode { node: String, why: String },
    #[error("{node} is no store node that can be administered: it may be older than this program")]
    Unknown { node: String },
    #[error("the node refuses: {0}")]
    Refused(String),
    #[error("{what} {got:?} must have 32 hexadecimal digits, as `kvasir admin list` prints them")]
    Hex { what: &'static str, got: String },
    #[error(
        "not copied after {seconds} s, and the node goes on; its metric kvasir_store_copies_total counts the end"
    )]
    NotCopied { seconds: u64 },
    #[error("not drained after {seconds} s, and the node goes on: {state}")]
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
        Action::Pin { key, seconds } => session.pin(key, *seconds).await,
        Action::Unpin { pin } => session.unpin(*pin).await,
        Action::Evict { key, namespace } => {
            session.evict(key.as_deref(), namespace.as_deref()).await
        }
        Action::Replicate { key, to, timeout } => session.replicate(key, to, *timeout).await,
        Action::Contexts { tenant, limit } => session.contexts(tenant, *limit).await,
        Action::DropContext { tenant, namespace, key } => {
            session.drop_context(tenant, namespace, key).await
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
        let class = match flags.class.as_deref() {
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
                from,
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
            &serde_json::json!({ "pin": pin, "blocks": blocks, "seconds": seconds }),
            &format!("pin {pin} holds {blocks} blocks for {seconds} s"),
        );
        Ok(())
    }

    async fn unpin(&mut self, pin: u64) -> Result<(), AdminError> {
        let unpinned = self.client.unpin(v1::UnpinRequest { pin }).await;
        unpinned.map_err(|status| self.failed(&status))?;
        self.say(&serde_json::json!({ "pin": pin }), &format!("pin {pin} has ended"));
        Ok(())
    }

    async fn evict(&mut self, key: Option<&str>, of: Option<&str>) -> Result<(), AdminError> {
        use v1::evict_request::What;
        let what = match (key, of) {
            (Some(key), _) => Some(What::Key(block_key(key)?)),
            (None, of) => of.map(namespace).transpose()?.map(What::Namespace),
        };
        let evicted = self.client.evict(v1::EvictRequest { what }).await;
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
            &format!("{to} has {blocks} blocks of the chain"),
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
                from,
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

    async fn drop_context(&mut self, tenant: &str, of: &str, key: &str) -> Result<(), AdminError> {
        let request = v1::DropContextRequest {
            tenant: tenant.to_owned(),
            namespace: namespace(of)?,
            last_key: block_key(key)?,
        };
        let dropped = self.store.drop_context(request).await;
        dropped.map_err(|status| self.refused(&status))?;
        self.say(
            &serde_json::json!({ "tenant": tenant, "namespace": of, "last_key": key }),
            "the context has ended, on this node",
        );
        Ok(())
    }

    async fn drain(&mut self, flags: &DrainFlags) -> Result<(), AdminError> {
        if flags.stop {
            let status = self.client.stop_drain(v1::StopDrainRequest {}).await;
            let status = status.map_err(|status| self.failed(&status))?.into_inner();
            self.say(&text::drain_json(&status), &text::drain(&status));
            return Ok(());
        }
        let request =
            v1::DrainRequest { targets: flags.to.clone(), hot_bytes_max: flags.hot_bytes };
        let begun = self.client.drain(request).await;
        let mut status = begun.map_err(|status| self.failed(&status))?.into_inner();
        let began = tokio::time::Instant::now();
        let mut said = String::new();
        while flags.wait && !status.drained {
            if let Some(seconds) = flags.timeout
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
                let why = "it does not drain any more: it was restarted, or told to stop draining";
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
