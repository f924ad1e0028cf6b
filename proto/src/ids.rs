//! Newtypes for everything that is named or numbered, and their conversions from the wire.

use std::fmt;
use std::sync::Arc;

use crate::v1;

/// A field of a message that does not hold what it must.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    #[error("field `{0}` is missing")]
    Missing(&'static str),
    #[error("field `{field}` has {got} bytes; it must have {want}")]
    Length { field: &'static str, got: usize, want: &'static str },
    #[error("field `{field}` is {got}, which is not a known value")]
    Unknown { field: &'static str, got: i32 },
}

/// The name of a block's contents: 16 bytes of BLAKE3 (see [`crate::keys`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub [u8; 16]);

impl BlockKey {
    /// Splits concatenated 16-byte keys.
    ///
    /// # Errors
    /// [`FieldError::Length`] when the length is no multiple of 16.
    pub fn list(bytes: &[u8]) -> Result<Vec<BlockKey>, FieldError> {
        let (keys, rest) = bytes.as_chunks::<16>();
        if !rest.is_empty() {
            let want = "a multiple of 16";
            return Err(FieldError::Length { field: "keys", got: bytes.len(), want });
        }
        Ok(keys.iter().copied().map(BlockKey).collect())
    }

    /// Concatenates keys as the wire has them.
    pub fn concat(keys: &[BlockKey]) -> Vec<u8> {
        keys.iter().flat_map(|key| key.0).collect()
    }
}

/// The root of a key chain: a hash of model, KV dtype, tenant salt and adapter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(pub [u8; 16]);

impl TryFrom<&[u8]> for Namespace {
    type Error = FieldError;

    fn try_from(bytes: &[u8]) -> Result<Self, FieldError> {
        let got = bytes.len();
        bytes.try_into().map(Namespace).map_err(|_| FieldError::Length {
            field: "namespace",
            got,
            want: "16",
        })
    }
}

fn hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(&self.0, f)
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(&self.0, f)
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// The place of one block in a node's slot memory; `slot * slot_bytes` is its offset.
    SlotIndex(u32)
);
number!(
    /// Grows by one each time a slot is freed, so that a stale reference to it is seen.
    Generation(u32)
);
number!(
    /// The 32-bit immediate that a write carries and a counter counts.
    Imm(u32)
);
number!(
    /// Drawn anew each time a process starts; an old one is refused.
    Incarnation(u64)
);

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub Arc<str>);

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                $name(text.into())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

name!(
    /// A store node's configured name.
    NodeId
);
name!(
    /// An engine's configured name.
    InstanceId
);

/// Who pays for blocks of the context cache: a hash of the tenant's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant(pub u64);

/// How long a block is kept once its request is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// As long as there is room.
    Normal,
    /// Context cache: until this time, for this tenant.
    Context { tenant: Tenant, expires_unix_ms: u64 },
}

/// On a block with which something ends that was promised to a tenant: the block and all before it are of
/// the context class until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mark {
    pub tenant: Tenant,
    pub expires_unix_ms: u64,
    /// Of a context: since when there is one. `None`: what ends here is in no list, because it is an
    /// object, or was written before contexts were marked.
    pub created_unix_ms: Option<u64>,
    /// On how many nodes it is to be, of which this is one: 1 to [`COPIES_MAX`], and 1 of what is no context.
    pub copies: u8,
}

/// Nodes that keep one context at most.
pub const COPIES_MAX: u8 = 8;

/// One request's transaction; the same on every node that takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TxId {
    pub conductor_incarnation: u64,
    pub serial: u64,
}

impl fmt::Display for TxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}-{}", self.conductor_incarnation >> 32, self.serial)
    }
}

impl From<TxId> for v1::TxId {
    fn from(tx: TxId) -> Self {
        v1::TxId { conductor_incarnation: tx.conductor_incarnation, serial: tx.serial }
    }
}

impl From<v1::TxId> for TxId {
    fn from(tx: v1::TxId) -> Self {
        TxId { conductor_incarnation: tx.conductor_incarnation, serial: tx.serial }
    }
}

impl TryFrom<Option<v1::TxId>> for TxId {
    type Error = FieldError;

    fn try_from(tx: Option<v1::TxId>) -> Result<Self, FieldError> {
        tx.map(TxId::from).ok_or(FieldError::Missing("tx"))
    }
}

/// What a node does in a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// Pins what it has, reserves the rest, is written by its own engine.
    Prefill,
    /// Reserves what it lacks, is written by the prefill side's node, then grows.
    Decode,
    /// Pins committed blocks and sends them to another node.
    Source,
}

impl Side {
    /// Reads the enum of the wire.
    ///
    /// # Errors
    /// [`FieldError::Unknown`] when it is none of the three sides.
    pub fn from_wire(side: i32) -> Result<Self, FieldError> {
        match v1::Side::try_from(side) {
            Ok(v1::Side::Prefill) => Ok(Side::Prefill),
            Ok(v1::Side::Decode) => Ok(Side::Decode),
            Ok(v1::Side::Source) => Ok(Side::Source),
            Ok(v1::Side::Unspecified) | Err(_) => {
                Err(FieldError::Unknown { field: "side", got: side })
            }
        }
    }

    /// As the wire has it.
    pub fn to_wire(self) -> i32 {
        match self {
            Side::Prefill => v1::Side::Prefill as i32,
            Side::Decode => v1::Side::Decode as i32,
            Side::Source => v1::Side::Source as i32,
        }
    }
}

/// One node's share of a transaction. One node may hold two shares of one
/// transaction: it decodes and is the source of a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share {
    pub tx: TxId,
    pub side: Side,
}

impl Share {
    /// Reads both fields of a message.
    ///
    /// # Errors
    /// [`FieldError`] when the id is missing or the side unknown.
    pub fn from_wire(tx: Option<v1::TxId>, side: i32) -> Result<Self, FieldError> {
        Ok(Share { tx: tx.try_into()?, side: Side::from_wire(side)? })
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
            Side::Source => "source",
        };
        write!(f, "{}/{side}", self.tx)
    }
}
