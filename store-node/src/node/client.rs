//! One client of objects, as the node sees it: its line, and what it holds. It only remembers; what is
//! done about it is decided in `owner::objects`.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::ObjectAt;
use kvasir_proto::{BlockKey, Namespace, Share, Tenant, v1};
use prost::Message;

use super::line::{Broken, Line};

/// Requests of one client that may wait for the SSD at once, and as many for other nodes; one more is answered
/// without the SSD, or refused.
pub(crate) const WAITING_MAX: usize = 64;
/// Numbers from here on are the node's own: a client's requests are below.
pub(crate) const OWN_NUMBERS: u64 = 1 << 63;

/// See the module.
#[derive(Debug)]
pub(crate) struct Client {
    pub name: String,
    pub namespace: Namespace,
    /// Whose quota it is that context objects count against; `None` when the client named none.
    pub tenant: Option<Tenant>,
    pub line: Line,
    /// What it has reserved and not committed, by the number of its request.
    pub puts: BTreeMap<u64, Put>,
    /// Gets that wait for the SSD.
    pub gets: BTreeMap<u64, Get>,
    /// What waits for objects of other nodes.
    pub fetches: BTreeMap<u64, Fetch>,
    /// Commits that wait until objects are durable.
    pub commits: BTreeMap<u64, Commit>,
    /// Objects that go with this client. Each has its slot, so that they are no more than those.
    pub ephemeral: BTreeMap<BlockKey, Ephemeral>,
    /// Shares that it was told to stop writing, and when.
    pub stopping: BTreeMap<Share, u64>,
}

/// An object that goes with the client that has put it.
#[derive(Debug)]
pub(crate) struct Ephemeral {
    pub object: ObjectAt,
    /// The name of the pin that keeps it until then.
    pub pin: u64,
}

/// Objects reserved together.
#[derive(Debug)]
pub(crate) struct Put {
    /// `None` when all of them were here.
    pub share: Option<Share>,
    pub keys: Vec<BlockKey>,
    /// Of each key: its page in the share, or `None` where it was here.
    pub pages: Vec<Option<u32>>,
}

/// Objects that are got together and some of which are being read from the SSD.
#[derive(Debug)]
pub(crate) struct Get {
    pub keys: Vec<BlockKey>,
    pub checksums: bool,
    /// What of it was in memory is pinned until then.
    pub is_held: bool,
    /// Reads that have not ended.
    pub rising: BTreeSet<Share>,
    /// Reads that have: each holds its object until the answer.
    pub risen: Vec<Share>,
}

/// Objects some of which are on their way here from another node.
#[derive(Debug)]
pub(crate) enum Fetch {
    /// Of each of these is then said whether it is here.
    Only(Vec<BlockKey>),
    /// Got then.
    Get(v1::GetObjects),
}

/// Objects that are committed together and some of which are being kept.
#[derive(Debug)]
pub(crate) struct Commit {
    pub outcomes: Vec<v1::ObjectOutcome>,
    pub why: String,
    pub keeping: usize,
}

impl Client {
    pub(crate) fn new(
        name: String,
        namespace: Namespace,
        tenant: Option<Tenant>,
        line: Line,
    ) -> Self {
        Client {
            name,
            namespace,
            tenant,
            line,
            puts: BTreeMap::new(),
            gets: BTreeMap::new(),
            fetches: BTreeMap::new(),
            commits: BTreeMap::new(),
            ephemeral: BTreeMap::new(),
            stopping: BTreeMap::new(),
        }
    }

    /// The next message, with its number.
    ///
    /// # Errors
    /// [`Broken`].
    pub(crate) fn next(&mut self) -> Result<Option<(u64, v1::client_to_node::Message)>, Broken> {
        self.line.next()?.map(message).transpose()
    }

    /// Answers a request.
    ///
    /// # Errors
    /// [`Broken`] when it has not taken anything for too long.
    pub(crate) fn answer(
        &mut self,
        request: u64,
        message: v1::node_to_client::Message,
    ) -> Result<(), Broken> {
        self.line.send(v1::NodeToClient { request, message: Some(message) }.encode_to_vec())
    }
}

/// What a record of a client says, and its number.
pub(crate) fn message(record: &[u8]) -> Result<(u64, v1::client_to_node::Message), Broken> {
    let decoded = v1::ClientToNode::decode(record);
    let decoded = decoded
        .map_err(|error| Broken(format!("cannot decode a message of the client: {error}")))?;
    let message = decoded.message.ok_or_else(|| Broken("the message is empty".into()))?;
    if decoded.request >= OWN_NUMBERS {
        return Err(Broken(format!("{} is not a valid request number", decoded.request)));
    }
    Ok((decoded.request, message))
}
