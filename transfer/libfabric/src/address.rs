//! Addresses of peers. A peer is inserted by the name that its endpoint has ([`EndpointName`]), which
//! travels in a handshake, and is removed when the last [`Peer`] is gone: every operation that is
//! under way holds its peer, because libfabric does not say what becomes of operations to an address
//! that is removed.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, Weak};

use crate::bindings::*;
use crate::completion::PeerId;
use crate::domain::{Domain, DomainInner, lock, opened};
use crate::error::{Failure, OpenError};
use crate::info::SHM;
use crate::{neighbours, ops};

/// What an endpoint is called: bytes of the provider's, to be carried to peers as they are.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointName(pub Vec<u8>);

/// Why a peer was not inserted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InsertError {
    /// It came from another provider, or was damaged: refuse the peer.
    #[error("{bytes} bytes are not an endpoint name of this provider")]
    NoName { bytes: usize },
    /// Remove peers, or open the vector for more.
    #[error("the address vector is full with {peers_max} peers")]
    Full { peers_max: usize },
    #[error("the libfabric provider refused the endpoint name of the peer")]
    Refused(#[source] Failure),
}

/// The longest name that is taken, and that an endpoint here may have.
pub(crate) const NAME_BYTES_MAX: usize = 256;

/// The peers that a domain knows. Shared by clones.
#[derive(Debug, Clone)]
pub struct AddressVector(pub(crate) Arc<VectorInner>);

pub(crate) struct VectorInner {
    pub raw: NonNull<fid_av>,
    domain: Arc<DomainInner>,
    format: u32,
    peers_max: usize,
    /// By name, as it was inserted: providers give one address to one name, however often it is inserted,
    /// so it must be removed once.
    peers: Mutex<BTreeMap<Vec<u8>, Known>>,
}

/// A peer's address, and the peer where somebody holds it.
type Known = (u64, Weak<PeerInner>);

// SAFETY: calls are serialised (see `DomainInner`).
unsafe impl Send for VectorInner {}
// SAFETY: as above.
unsafe impl Sync for VectorInner {}

/// A peer that operations can be posted to. Shared by clones; the last one removes it.
#[derive(Debug, Clone)]
pub struct Peer(pub(crate) Arc<PeerInner>);

pub(crate) struct PeerInner {
    pub address: u64,
    name: Vec<u8>,
    /// The name as it was inserted.
    padded: Vec<u8>,
    pub vector: Arc<VectorInner>,
}

impl AddressVector {
    /// Opens a vector for up to `peers_max` peers.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(domain: &Domain, peers_max: usize) -> Result<Self, OpenError> {
        let domain = domain.0.clone();
        let mut attributes = fi_av_attr {
            r#type: domain.info.address_vector_type(),
            rx_ctx_bits: 0,
            count: peers_max,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        };
        let mut raw = ptr::null_mut();
        let result = {
            let _serial = domain.enter();
            // SAFETY: the domain is live; `raw` is written on success.
            unsafe { ops::av_open(domain.raw.as_ptr(), &mut attributes, &mut raw) }
        };
        let raw = opened(domain.library(), "fi_av_open", result, raw)?;
        let format = domain.info.address_format();
        let peers = Mutex::default();
        Ok(AddressVector(Arc::new(VectorInner { raw, domain, format, peers_max, peers })))
    }

    /// Inserts the peer of this name, or answers with the one that is there.
    ///
    /// The name may come from anywhere: it is checked for what the provider would otherwise read
    /// beyond its end.
    ///
    /// # Errors
    /// [`InsertError`].
    pub fn insert(&self, name: &EndpointName) -> Result<Peer, InsertError> {
        let vector = &self.0;
        let padded = padded_name(&name.0, vector.format)
            .ok_or(InsertError::NoName { bytes: name.0.len() })?;
        let mut peers = lock(&vector.peers);
        let known = peers.get(&padded).map(|(address, peer)| (*address, peer.upgrade()));
        let address = match known {
            Some((_, Some(peer))) => return Ok(Peer(peer)),
            // Its last holder is about to remove it, and will find that it need not.
            Some((address, None)) => address,
            None if peers.len() >= vector.peers_max => {
                return Err(InsertError::Full { peers_max: vector.peers_max });
            }
            None => {
                if vector.domain.info.details().provider == SHM {
                    neighbours::told_of(&padded, vector.place());
                }
                vector.insert_raw(&padded)?
            }
        };
        let (name, vector) = (name.0.clone(), self.0.clone());
        let peer = Arc::new(PeerInner { address, name, padded: padded.clone(), vector });
        peers.insert(padded, (address, Arc::downgrade(&peer)));
        Ok(Peer(peer))
    }

    /// How many peers are in it.
    pub fn peers(&self) -> usize {
        lock(&self.0.peers).len()
    }
}

impl VectorInner {
    pub(crate) fn domain(&self) -> &Arc<DomainInner> {
        &self.domain
    }

    /// Which it is among those that are open.
    pub(crate) fn place(&self) -> neighbours::Vector {
        neighbours::Vector(self.raw.as_ptr().addr())
    }

    fn insert_raw(&self, name: &[u8]) -> Result<u64, InsertError> {
        let mut address = FI_ADDR_UNSPEC;
        let result = {
            let _serial = self.domain.enter();
            // SAFETY: the name is as long as its format needs (`padded_name`).
            unsafe { ops::av_insert(self.raw.as_ptr(), name.as_ptr().cast(), &mut address) }
        };
        match result {
            1 if address != FI_ADDR_UNSPEC => Ok(address),
            0 | 1 => Err(InsertError::Refused(self.domain.failure("fi_av_insert", -FI_EINVAL))),
            result => Err(InsertError::Refused(self.domain.failure("fi_av_insert", result))),
        }
    }

    fn remove(&self, peer: &PeerInner) {
        let mut peers = lock(&self.peers);
        let is_last = peers.get(&peer.padded).is_some_and(|(_, known)| known.strong_count() == 0);
        if !is_last {
            // Inserted again meanwhile, under the same address.
            return;
        }
        peers.remove(&peer.padded);
        let mut address = peer.address;
        let _serial = self.domain.enter();
        // SAFETY: inserted once and not removed yet, and no operation to it is under way. A provider
        // that refuses keeps the address until the vector is closed, which harms nothing.
        unsafe { ops::av_remove(self.raw.as_ptr(), &mut address) };
    }
}

impl Peer {
    /// Who it is in completions. Another peer may get the number when this one was removed.
    pub fn id(&self) -> PeerId {
        PeerId(self.0.address)
    }

    pub fn name(&self) -> EndpointName {
        EndpointName(self.0.name.clone())
    }
}

impl PartialEq for Peer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Peer {}

impl Drop for PeerInner {
    fn drop(&mut self) {
        self.vector.remove(self);
    }
}

impl Drop for VectorInner {
    fn drop(&mut self) {
        neighbours::vector_closed(self.place());
        let _serial = self.domain.enter();
        // SAFETY: ours, and every endpoint on it is closed: each held it.
        let result = unsafe { ops::close(self.raw.as_ptr().cast()) };
        debug_assert_eq!(result, 0, "an address vector without endpoints closes");
    }
}

impl fmt::Debug for VectorInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressVector").field("peers_max", &self.peers_max).finish_non_exhaustive()
    }
}

impl fmt::Debug for PeerInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The name, as long as a provider of this address format may read, and the same for all names that it
/// takes for the same. `None` when it is not of this format.
pub(crate) fn padded_name(name: &[u8], format: u32) -> Option<Vec<u8>> {
    /// `sa_family` and the sizes of the addresses that follow it, on Linux.
    const AF_INET: u16 = 2;
    const AF_INET6: u16 = 10;
    const IN_BYTES: usize = 16;
    const IN6_BYTES: usize = 28;
    const EFA_BYTES: usize = 32;

    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return None;
    }
    let family = name.get(..2).map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
    let is_in = family == Some(AF_INET) && name.len() == IN_BYTES;
    let is_in6 = family == Some(AF_INET6) && name.len() == IN6_BYTES;
    let fits = match format {
        FI_SOCKADDR => is_in || is_in6,
        FI_SOCKADDR_IN => is_in,
        FI_SOCKADDR_IN6 => is_in6,
        FI_ADDR_EFA => name.len() == EFA_BYTES,
        // A text: ended below, whatever it holds, and of no account behind its end.
        FI_ADDR_STR => true,
        _ => false,
    };
    let read = match format {
        FI_ADDR_STR => name.split(|byte| *byte == 0).next().filter(|text| !text.is_empty())?,
        _ => name,
    };
    let mut padded = read.to_vec();
    padded.resize(NAME_BYTES_MAX + 1, 0);
    fits.then_some(padded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_only_when_a_provider_cannot_read_beyond_them() {
        let mut ipv4 = [0; 16];
        ipv4[0] = 2;
        let mut ipv6 = [0; 28];
        ipv6[0] = 10;
        let takes = |name: &[u8], format| padded_name(name, format).is_some();
        assert!(takes(&ipv4, FI_SOCKADDR_IN) && takes(&ipv4, FI_SOCKADDR));
        assert!(takes(&ipv6, FI_SOCKADDR_IN6) && takes(&ipv6, FI_SOCKADDR));
        assert!(takes(&[7; 32], FI_ADDR_EFA) && takes(b"fi_shm://1:2", FI_ADDR_STR));
        // Too short, too long, of another family, empty, of a format that is not known.
        assert!(!takes(&ipv4[..15], FI_SOCKADDR_IN) && !takes(&[2], FI_SOCKADDR_IN));
        assert!(!takes(&ipv4, FI_SOCKADDR_IN6) && !takes(&[0; 16], FI_SOCKADDR_IN));
        assert!(!takes(&[7; 31], FI_ADDR_EFA) && !takes(b"", FI_ADDR_STR));
        assert!(!takes(&[b'a'; NAME_BYTES_MAX + 1], FI_ADDR_STR) && !takes(b"x", 0));
    }

    #[test]
    fn a_text_ends_whatever_it_holds() {
        let padded = padded_name(&[b'a'; NAME_BYTES_MAX], FI_ADDR_STR).expect("a text");
        assert_eq!(padded.last(), Some(&0));
        // A second name of one peer would have the peer removed while it is in use.
        let same =
            |name: &[u8]| padded_name(name, FI_ADDR_STR) == padded_name(b"fi_shm://1", FI_ADDR_STR);
        assert!(same(b"fi_shm://1\0") && same(b"fi_shm://1\0x") && !same(b"fi_shm://10"));
        assert_eq!(padded_name(b"\0x", FI_ADDR_STR), None);
    }
}
