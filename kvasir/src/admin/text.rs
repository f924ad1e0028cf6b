//! Answers of a store node as text and as JSON.

use std::fmt::Write;

use kvasir_proto::{Share, v1};
use serde_json::{Value, json};

/// Above the lines of [`listed`].
pub(super) const LIST_HEAD: &str = "\
key                               namespace                         dram slot/generation  pins  ssd";

/// Above the lines of [`context`].
pub(super) const CONTEXTS_HEAD: &str = "\
namespace                         last key                          blocks  expires (Unix ms)  in";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn class(copy: &v1::SsdCopy) -> &'static str {
    match copy.block_class() {
        v1::BlockClass::Context => "context",
        v1::BlockClass::Normal | v1::BlockClass::Unspecified => "normal",
    }
}

fn ssd_json(copy: &v1::SsdCopy) -> Value {
    let mut value = json!({ "block_class": class(copy) });
    if copy.block_class() == v1::BlockClass::Context {
        value["tenant_hash"] = format!("{:016x}", copy.tenant_hash).into();
        value["expires_unix_ms"] = copy.expires_unix_ms.into();
    }
    if copy.bytes > 0 {
        value["bytes"] = copy.bytes.into();
    }
    value
}

fn dram_json(copy: &v1::DramCopy) -> Value {
    json!({ "slot": copy.slot, "generation": copy.generation, "pins": copy.pins })
}

pub(super) fn listed_json(block: &v1::ListedBlock) -> Value {
    json!({
        "key": hex(&block.key),
        "namespace": hex(&block.namespace),
        "dram": block.dram.as_ref().map(dram_json),
        "ssd": block.ssd.as_ref().map(ssd_json),
    })
}

pub(super) fn listed(block: &v1::ListedBlock) -> String {
    let (slot, pins) = match &block.dram {
        Some(copy) => (format!("{}/{}", copy.slot, copy.generation), copy.pins.to_string()),
        None => ("-".to_owned(), "-".to_owned()),
    };
    let ssd = block.ssd.as_ref().map_or("-", class);
    format!("{}  {}  {slot:>20}  {pins:>4}  {ssd}", hex(&block.key), hex(&block.namespace))
}

fn holder(holder: &v1::BlockHolder) -> String {
    use v1::block_holder::Holder;
    let name = match &holder.holder {
        // As logs print it, so that the two can be matched.
        Some(Holder::Share(share)) => match Share::from_wire(share.tx, share.side) {
            Ok(share) => format!("share {share}"),
            Err(_) => "unknown share".to_owned(),
        },
        Some(Holder::Engine(epoch)) => format!("engine of attachment {epoch}"),
        Some(Holder::Demotion(_)) => "demotion to the SSD".to_owned(),
        Some(Holder::Pin(pin)) => format!("pin {pin}"),
        None => "unknown".to_owned(),
    };
    match holder.remaining_ms {
        Some(left_ms) => format!("{name}, for another {left_ms} ms"),
        None => name,
    }
}

pub(super) fn inspection_json(found: &v1::BlockInspection) -> Value {
    json!({
        "key": hex(&found.key),
        "namespace": hex(&found.namespace),
        "parent": (!found.parent.is_empty()).then(|| hex(&found.parent)),
        "dram": found.dram.as_ref().map(dram_json),
        "ssd": found.ssd.as_ref().map(ssd_json),
        "promoting": found.promoting,
        "checksum": found.checksum.map(|sum| format!("{sum:016x}")),
        "checksum_matches": found.dram.as_ref().map(|_| found.checksum_matches),
        "holders": found.holders.iter().map(holder).collect::<Vec<_>>(),
    })
}

pub(super) fn inspection(found: &v1::BlockInspection) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        // To a string, which takes all.
        let _ = writeln!(text, "{name:<10}  {value}");
    };
    line("key", &hex(&found.key));
    line("namespace", &hex(&found.namespace));
    let parent =
        if found.parent.is_empty() { "none (first block)".into() } else { hex(&found.parent) };
    line("parent", &parent);
    match &found.dram {
        Some(copy) => {
            let v1::DramCopy { slot, generation, pins } = copy;
            line("dram", &format!("slot {slot}, generation {generation}, {pins} pins"));
            let sum = found.checksum.unwrap_or_default();
            let state = match found.checksum_matches {
                true => format!("{sum:016x}, verified"),
                false => format!("{sum:016x}, MISMATCH: the copy is corrupt"),
            };
            line("checksum", &state);
        }
        None if found.promoting => line("dram", "promotion from the SSD"),
        None => line("dram", "absent"),
    }
    match &found.ssd {
        Some(copy) if copy.block_class() == v1::BlockClass::Context => {
            let (tenant, until, bytes) = (copy.tenant_hash, copy.expires_unix_ms, copy.bytes);
            let kept = format!(
                "context of tenant {tenant:016x}, expires at {until} (Unix ms), {bytes} bytes"
            );
            line("ssd", &kept);
        }
        Some(copy) => line("ssd", &format!("normal, {} bytes", copy.bytes)),
        None => line("ssd", "absent"),
    }
    found.holders.iter().for_each(|of| line("held by", &holder(of)));
    text
}

pub(super) fn context_json(context: &v1::PersistedContext) -> Value {
    json!({
        "namespace": hex(&context.namespace),
        "last_key": hex(&context.last_key),
        "blocks": context.blocks,
        "created_unix_ms": context.created_unix_ms,
        "expires_unix_ms": context.expires_unix_ms,
    })
}

pub(super) fn context(context: &v1::PersistedContext, now_unix_ms: u64) -> String {
    let v1::PersistedContext { namespace, last_key, blocks, expires_unix_ms, .. } = context;
    let left_s = expires_unix_ms.saturating_sub(now_unix_ms) / 1_000;
    let (namespace, last_key) = (hex(namespace), hex(last_key));
    format!("{namespace}  {last_key}  {blocks:>6}  {expires_unix_ms:>17}  {left_s} s")
}

pub(super) fn evicted_json(evicted: &v1::EvictReply) -> Value {
    json!({
        "dram_blocks": evicted.dram_blocks,
        "ssd_blocks": evicted.ssd_blocks,
        "pinned_blocks": evicted.pinned_blocks,
        "retained_blocks": evicted.retained_blocks,
    })
}

pub(super) fn evicted(evicted: &v1::EvictReply) -> String {
    let v1::EvictReply { dram_blocks, ssd_blocks, pinned_blocks, retained_blocks } = evicted;
    let mut text = format!("evicted {dram_blocks} blocks from DRAM and {ssd_blocks} from the SSD");
    if *pinned_blocks > 0 {
        let _ = write!(text, "; {pinned_blocks} pinned blocks stay (`inspect` shows the holders)");
    }
    if *retained_blocks > 0 {
        let _ = write!(
            text,
            "; {retained_blocks} blocks on the SSD stay: they belong to contexts or are being read"
        );
    }
    text
}

pub(super) fn drain_json(status: &v1::DrainStatus) -> Value {
    json!({
        "draining": status.draining,
        "drained": status.drained,
        "shares": status.shares,
        "context_chains_copied": status.context_chains_copied,
        "context_chains_left": status.context_chains_left,
        "hot_chains_copied": status.hot_chains_copied,
        "hot_chains_left": status.hot_chains_left,
        "hot_chains_failed": status.hot_chains_failed,
        "copies_in_flight": status.copies_in_flight,
        "waiting_for": status.waiting_for,
    })
}

/// One line.
pub(super) fn drain(status: &v1::DrainStatus) -> String {
    if !status.draining {
        return "serving".to_owned();
    }
    let v1::DrainStatus { context_chains_copied, context_chains_left, .. } = status;
    let v1::DrainStatus { hot_chains_copied, hot_chains_left, hot_chains_failed, .. } = status;
    let mut text = if status.drained { "drained".to_owned() } else { "draining".to_owned() };
    let _ = write!(
        text,
        ": {} shares open; context chains: {context_chains_copied} copied, {context_chains_left} left; hot \
         chains: {hot_chains_copied} copied, {hot_chains_left} left, {hot_chains_failed} failed",
        status.shares
    );
    if !status.waiting_for.is_empty() {
        let _ = write!(text, "; waiting for: {}", status.waiting_for);
        if status.waiting_for.starts_with("no other node") {
            text.push_str(" (set one with --to)");
        }
    }
    text
}

pub(super) fn status_json(status: &v1::AdminStatus) -> Value {
    let node = status.node.clone().unwrap_or_default();
    json!({
        "node": node.node_id,
        "incarnation": format!("{:016x}", node.incarnation),
        "instances": node.instances.iter().map(engine_json).collect::<Vec<_>>(),
        "slots": {
            "total": node.slots_total,
            "free": node.slots_free,
            "allocated": status.slots_allocated,
            "committed": status.slots_committed,
            "evictable": status.slots_evictable,
            "releasing": status.slots_releasing,
            "quarantined": status.slots_quarantined,
            "promoting": status.slots_promoting,
        },
        "shares": status.shares,
        "shares_aborting": status.shares_aborting,
        "pins": status.pins,
        "admin_pins": status.admin_pins,
        "demoting_blocks": status.demoting_blocks,
        "context_blocks": status.context_blocks,
        "context_bytes": status.context_bytes,
        "ssd": node.ssd.as_ref().map(|ssd| json!({
            "usable": ssd.usable,
            "state": ssd.state,
            "blocks": ssd.blocks,
            "used_bytes": ssd.used_bytes,
            "capacity_bytes": ssd.capacity_bytes,
        })),
        "drain": drain_json(&status.drain.clone().unwrap_or_default()),
    })
}

fn engine_json(attached: &v1::AttachedInstance) -> Value {
    let description = attached.description.clone().unwrap_or_default();
    let load = attached.load.unwrap_or_default();
    json!({
        "instance": description.instance_id,
        "role": role(description.role()),
        "current_role": role(description.current_role()),
        "attach_epoch": description.attach_epoch,
        "running_requests": load.running_requests,
        "waiting_requests": load.waiting_requests,
    })
}

/// One engine, in words.
fn engine(attached: &v1::AttachedInstance) -> String {
    let description = attached.description.clone().unwrap_or_default();
    let load = attached.load.unwrap_or_default();
    let current_role = match description.current_role() {
        v1::Role::Unspecified => description.role(),
        current => current,
    };
    format!(
        "{} ({}): {} running, {} waiting",
        description.instance_id,
        role(current_role).unwrap_or("?"),
        load.running_requests,
        load.waiting_requests
    )
}

fn role(role: v1::Role) -> Option<&'static str> {
    match role {
        v1::Role::Unspecified => None,
        v1::Role::Prefill => Some("prefill"),
        v1::Role::Decode => Some("decode"),
        v1::Role::Both => Some("both"),
    }
}

pub(super) fn status(status: &v1::AdminStatus) -> String {
    let node = status.node.clone().unwrap_or_default();
    let mut engines: Vec<String> = node.instances.iter().map(engine).collect();
    if engines.is_empty() {
        engines.push("none".to_owned());
    }
    let ssd = node.ssd.as_ref().map_or("none".to_owned(), |ssd| {
        let v1::SsdStatus { state, blocks, used_bytes, capacity_bytes, .. } = ssd;
        format!("{state}; {blocks} blocks, {used_bytes} of {capacity_bytes} bytes")
    });
    let mut text = String::new();
    let lines = [
        ("state", drain(&status.drain.clone().unwrap_or_default())),
        (
            "slots",
            format!(
                "{} in total: {} free, {} committed ({} evictable), {} allocated, {} promoting, {} releasing, \
                 {} quarantined",
                node.slots_total,
                node.slots_free,
                status.slots_committed,
                status.slots_evictable,
                status.slots_allocated,
                status.slots_promoting,
                status.slots_releasing,
                status.slots_quarantined
            ),
        ),
        ("shares", format!("{}, of which {} aborting", status.shares, status.shares_aborting)),
        ("pins", format!("{}, of which {} by administrators", status.pins, status.admin_pins)),
        ("context", format!("{} blocks, {} bytes", status.context_blocks, status.context_bytes)),
        ("ssd", ssd),
    ];
    let engines = engines.into_iter().map(|engine| ("engine", engine));
    for (name, value) in [("node", node.node_id)].into_iter().chain(engines).chain(lines) {
        // To a string, which takes all.
        let _ = writeln!(text, "{name:<7} {value}");
    }
    text
}
