//! What administrators ask for, from the wire to the core and back.

use kvasir_blocks::{
    AdminPinError, Evicted, Holder, Inspection, ListFilter, ListFrom, ListedBlock, Tier,
};
use kvasir_proto::{BlockKey, Class, FieldError, Namespace, v1};

use super::Owner;
use crate::clock;
use crate::node::command::{AdminCommand, Refused};

/// Blocks of one page of a list.
const PAGE_BLOCKS: u32 = 1_000;
const PAGE_BLOCKS_MAX: u32 = 10_000;

impl From<AdminPinError> for Refused {
    fn from(error: AdminPinError) -> Self {
        let why = error.to_string();
        match error {
            AdminPinError::NotHere => Refused::NotFound(why),
            AdminPinError::OnSsdOnly => Refused::Precondition(why),
            AdminPinError::BadTime => Refused::Invalid(why),
            AdminPinError::TooMany { .. } => Refused::NoSpace(why),
        }
    }
}

impl Owner {
    pub(super) fn take_admin(&mut self, command: AdminCommand) {
        // Whoever asked may have gone: then nobody wants the answer.
        match command {
            AdminCommand::Status(reply) => drop(reply.send(Ok(self.admin_status()))),
            AdminCommand::List(request, reply) => drop(reply.send(self.admin_list(&request))),
            AdminCommand::Inspect(request, reply) => drop(reply.send(self.admin_inspect(&request))),
            AdminCommand::Pin(request, reply) => drop(reply.send(self.admin_pin(&request))),
            AdminCommand::Unpin(request, reply) => drop(reply.send(self.admin_unpin(&request))),
            AdminCommand::Evict(request, reply) => drop(reply.send(self.admin_evict(&request))),
            AdminCommand::Replicate(request, reply) => self.replicate_block(&request, reply),
            AdminCommand::Drain(request, reply) => drop(reply.send(self.begin_drain(&request))),
            AdminCommand::StopDrain(reply) => drop(reply.send(Ok(self.cancel_drain()))),
        }
    }

    fn admin_status(&self) -> v1::AdminStatus {
        let counts = self.blocks.counts();
        v1::AdminStatus {
            node: Some(self.describe()),
            drain: Some(self.drain_status()),
            slots_allocated: counts.allocated,
            slots_committed: counts.committed,
            slots_evictable: counts.evictable,
            slots_releasing: counts.leaving,
            slots_quarantined: counts.quarantined,
            slots_promoting: counts.rising,
            shares: counts.shares,
            shares_aborting: counts.aborting,
            pins: counts.pins.into(),
            admin_pins: self.blocks.admin_pinned_blocks(),
            demoting_blocks: counts.sinking,
            context_blocks: counts.context_blocks,
            context_bytes: counts.context_bytes,
        }
    }

    fn admin_list(&self, request: &v1::ListRequest) -> Result<v1::ListReply, Refused> {
        let blocks_max = match request.blocks_max {
            0 => PAGE_BLOCKS,
            blocks if blocks <= PAGE_BLOCKS_MAX => blocks,
            blocks => {
                return Err(Refused::Invalid(format!(
                    "field `blocks_max` is {blocks}; it must be at most {PAGE_BLOCKS_MAX}"
                )));
            }
        };
        let filter = ListFilter {
            tier: tier(request.tier)?,
            kept: kept(request.block_class)?,
            namespace: match request.namespace.as_slice() {
                [] => None,
                bytes => Some(Namespace::try_from(bytes)?),
            },
        };
        let listed = self.blocks.list(&filter, list_from(&request.start_at)?, blocks_max as usize);
        Ok(v1::ListReply {
            blocks: listed.blocks.iter().map(listed_block).collect(),
            next: listed.next.map(list_token).unwrap_or_default(),
        })
    }

    fn admin_inspect(&self, request: &v1::InspectRequest) -> Result<v1::BlockInspection, Refused> {
        let found = self.blocks.inspect(block_key(&request.key)?);
        let found = found.ok_or_else(|| {
            Refused::NotFound("this node does not hold the block; ask a node that holds it".into())
        })?;
        let (now_ms, Inspection { dram, checksum, .. }) = (clock::now_ms(), &found);
        let computed = match (dram, &self.cache) {
            (Some(copy), Some(cache)) => Some(self.arena.checksum(&cache.layout, copy.slot)),
            _ => None,
        };
        Ok(v1::BlockInspection {
            key: found.key.0.to_vec(),
            namespace: found.namespace.0.to_vec(),
            parent: found.parent.map(|parent| parent.0.to_vec()).unwrap_or_default(),
            dram: dram.map(dram_copy),
            ssd: found.ssd.as_ref().map(|block| ssd_copy(block.class, block.bytes)),
            promoting: found.rising,
            checksum: *checksum,
            checksum_matches: computed.is_some() && computed == *checksum,
            holders: found.holders.iter().map(|holder| block_holder(*holder, now_ms)).collect(),
        })
    }

    fn admin_pin(&mut self, request: &v1::PinRequest) -> Result<v1::PinReply, Refused> {
        let key = block_key(&request.key)?;
        let pin = self.blocks.admin_pin(clock::now_ms(), key, request.ttl_ms)?;
        tracing::info!(
            ?key,
            pin = pin.pin,
            ttl_ms = request.ttl_ms,
            "an administrator pinned blocks"
        );
        Ok(v1::PinReply { pin: pin.pin, blocks: pin.blocks })
    }

    fn admin_unpin(&mut self, request: &v1::UnpinRequest) -> Result<v1::UnpinReply, Refused> {
        match self.blocks.admin_unpin(request.pin) {
            true => Ok(v1::UnpinReply {}),
            false => Err(Refused::NotFound(format!(
                "there is no pin {}: it may have expired",
                request.pin
            ))),
        }
    }

    fn admin_evict(&mut self, request: &v1::EvictRequest) -> Result<v1::EvictReply, Refused> {
        use v1::evict_request::Target;
        let now_ms = clock::now_ms();
        let evicted = match &request.target {
            None => return Err(FieldError::Missing("target").into()),
            Some(Target::Key(key)) => {
                self.blocks.admin_evict(now_ms, block_key(key)?).ok_or_else(|| {
                    Refused::NotFound(
                        "this node does not hold the block; ask a node that holds it".into(),
                    )
                })?
            }
            Some(Target::Namespace(namespace)) => {
                let namespace = Namespace::try_from(namespace.as_slice())?;
                self.blocks.admin_evict_namespace(now_ms, namespace)
            }
        };
        let Evicted { dram_blocks, ssd_blocks, pinned_blocks, kept_blocks } = evicted;
        tracing::info!(
            dram_blocks,
            ssd_blocks,
            pinned_blocks,
            retained_blocks = kept_blocks,
            "an administrator evicted blocks"
        );
        Ok(v1::EvictReply { dram_blocks, ssd_blocks, pinned_blocks, retained_blocks: kept_blocks })
    }
}

pub(super) fn block_key(bytes: &[u8]) -> Result<BlockKey, Refused> {
    let wrong = || FieldError::Length { field: "key", got: bytes.len(), want: "16" };
    Ok(bytes.try_into().map(BlockKey).map_err(|_| wrong())?)
}

fn tier(tier: i32) -> Result<Option<Tier>, Refused> {
    match v1::Tier::try_from(tier) {
        Ok(v1::Tier::Unspecified) => Ok(None),
        Ok(v1::Tier::Dram) => Ok(Some(Tier::Dram)),
        Ok(v1::Tier::Ssd) => Ok(Some(Tier::Ssd)),
        Ok(v1::Tier::Vram) => {
            Err(Refused::Invalid("blocks in an engine's own pool cannot be listed".into()))
        }
        Err(_) => Err(FieldError::Unknown { field: "tier", got: tier }.into()),
    }
}

fn kept(class: i32) -> Result<Option<bool>, Refused> {
    match v1::BlockClass::try_from(class) {
        Ok(v1::BlockClass::Unspecified) => Ok(None),
        Ok(v1::BlockClass::Normal) => Ok(Some(false)),
        Ok(v1::BlockClass::Context) => Ok(Some(true)),
        Err(_) => Err(FieldError::Unknown { field: "block_class", got: class }.into()),
    }
}

/// A byte for the tier, four for the place.
fn list_token(from: ListFrom) -> Vec<u8> {
    let mut token = vec![u8::from(from.tier == Tier::Ssd)];
    token.extend(from.place.to_le_bytes());
    token
}

fn list_from(token: &[u8]) -> Result<ListFrom, Refused> {
    match *token {
        [] => Ok(ListFrom::START),
        [tier @ 0..=1, a, b, c, d] => Ok(ListFrom {
            tier: if tier == 1 { Tier::Ssd } else { Tier::Dram },
            place: u32::from_le_bytes([a, b, c, d]),
        }),
        _ => Err(Refused::Invalid("field `start_at` is not the `next` of an earlier page".into())),
    }
}

fn listed_block(block: &ListedBlock) -> v1::ListedBlock {
    v1::ListedBlock {
        key: block.key.0.to_vec(),
        namespace: block.namespace.0.to_vec(),
        dram: block.dram.map(dram_copy),
        ssd: block.ssd.map(|class| ssd_copy(class, 0)),
    }
}

fn dram_copy(copy: kvasir_blocks::DramCopy) -> v1::DramCopy {
    v1::DramCopy { slot: copy.slot.0, generation: copy.generation.0, pins: copy.pins }
}

fn ssd_copy(class: Class, bytes: u64) -> v1::SsdCopy {
    let (block_class, tenant, expires_unix_ms) = match class {
        Class::Normal => (v1::BlockClass::Normal, 0, 0),
        Class::Context { tenant, expires_unix_ms } => {
            (v1::BlockClass::Context, tenant.0, expires_unix_ms)
        }
    };
    v1::SsdCopy { block_class: block_class.into(), tenant_hash: tenant, expires_unix_ms, bytes }
}

fn block_holder(holder: Holder, now_ms: u64) -> v1::BlockHolder {
    use v1::block_holder::Holder as Wire;
    let left = |until_ms: u64| until_ms.saturating_sub(now_ms);
    let (holder, left_ms) = match holder {
        Holder::Share { share, lease_until_ms } => {
            let wire = v1::TxShare { tx: Some(share.tx.into()), side: share.side.to_wire() };
            (Wire::Share(wire), lease_until_ms.map(left))
        }
        Holder::Engine { epoch } => (Wire::Engine(epoch.0), None),
        Holder::Sink => (Wire::Demotion(true), None),
        Holder::Admin { pin, until_ms } => (Wire::Pin(pin), Some(left(until_ms))),
    };
    v1::BlockHolder { holder: Some(holder), remaining_ms: left_ms }
}
