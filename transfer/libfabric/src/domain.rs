//! A fabric and a domain on it: what memory, addresses, queues and endpoints belong to.
//!
//! Whatever is opened on a domain holds it, so that the order of closing is always right: an endpoint
//! goes before its queue and addresses, these before the domain, the domain before the fabric.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::error::{Failure, OpenError};
use crate::info::{Details, Info, Threading};
use crate::library::Library;
use crate::memory::Memory;
use crate::ops;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done where a thread can panic under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fabric: what all domains that reach each other have in common.
#[derive(Debug, Clone)]
pub struct Fabric(Arc<FabricInner>);

struct FabricInner {
    library: Library,
    raw: NonNull<fid_fabric>,
}

// SAFETY: providers lock fabrics themselves, whatever the threading model of their domains.
unsafe impl Send for FabricInner {}
// SAFETY: as above.
unsafe impl Sync for FabricInner {}

impl Fabric {
    /// Opens the fabric of `info`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(info: &Info) -> Result<Self, OpenError> {
        let library = info.library();
        let mut raw = ptr::null_mut();
        // SAFETY: the attributes live in `info`; `raw` is written on success.
        let result = unsafe {
            (library.symbols().fabric)(info.fabric_attributes(), &mut raw, ptr::null_mut())
        };
        let raw = opened(library, "fi_fabric", result, raw)?;
        Ok(Fabric(Arc::new(FabricInner { library, raw })))
    }
}

impl Drop for FabricInner {
    fn drop(&mut self) {
        // SAFETY: ours, and every domain on it is closed: each held it.
        let result = unsafe { ops::close(self.raw.as_ptr().cast()) };
        debug_assert_eq!(result, 0, "a fabric without domains closes");
    }
}

impl fmt::Debug for FabricInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").finish_non_exhaustive()
    }
}

/// One network interface (or what a provider makes of one).
#[derive(Debug, Clone)]
pub struct Domain(pub(crate) Arc<DomainInner>);

pub(crate) struct DomainInner {
    pub raw: NonNull<fid_domain>,
    pub fabric: Fabric,
    pub info: Info,
    pub keys: Mutex<Keys>,
    placing: Mutex<Placing>,
    /// Where the provider locks nothing, this does.
    serial: Option<Mutex<()>>,
}

// SAFETY: calls are serialised by the provider (`FI_THREAD_SAFE`) or by `serial`.
unsafe impl Send for DomainInner {}
// SAFETY: as above.
unsafe impl Sync for DomainInner {}

impl Domain {
    /// Opens the domain of `info` on its fabric.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(fabric: &Fabric, info: &Info) -> Result<Self, OpenError> {
        let library = fabric.0.library;
        let Some(info) = info.duplicate() else {
            return Err(library.failure("fi_dupinfo", -FI_ENOMEM).into());
        };
        let mut raw = ptr::null_mut();
        // SAFETY: fabric and info are live, and the info is a copy that is held as long.
        let result = unsafe { ops::domain(fabric.0.raw.as_ptr(), info.as_ptr(), &mut raw) };
        let raw = opened(library, "fi_domain", result, raw)?;
        let serial = (info.threading() == Threading::Domain).then(Mutex::default);
        let keys = Mutex::new(Keys::new(info.details().key_bytes));
        let fabric = fabric.clone();
        let placing = Mutex::default();
        Ok(Domain(Arc::new(DomainInner { raw, fabric, info, keys, placing, serial })))
    }

    /// What the domain was opened with.
    pub fn details(&self) -> &Details {
        self.0.info.details()
    }

    /// Regions that are closed and whose memory is held until no endpoint can place into it any more:
    /// see [`Closed::WhenEndpointsClose`](crate::region::Closed).
    pub fn memories_held(&self) -> usize {
        lock(&self.0.placing).held.len()
    }
}

impl DomainInner {
    /// Serialises a call, where the provider does not. Nothing that may call again, and nothing of
    /// the user's, runs under it.
    pub(crate) fn enter(&self) -> Option<MutexGuard<'_, ()>> {
        self.serial.as_ref().map(lock)
    }

    pub(crate) fn library(&self) -> Library {
        self.fabric.0.library
    }

    pub(crate) fn failure(&self, call: &'static str, result: impl Into<i64>) -> Failure {
        self.library().failure(call, result)
    }

    pub(crate) fn fabric_ptr(&self) -> *mut fid_fabric {
        self.fabric.0.raw.as_ptr()
    }

    /// An endpoint opens whose provider copies what arrives: see [`Placing`].
    pub(crate) fn software_endpoint_opened(&self) {
        lock(&self.placing).endpoints += 1;
    }

    pub(crate) fn software_endpoint_closed(&self) {
        let mut placing = lock(&self.placing);
        placing.endpoints -= 1;
        let free =
            if placing.endpoints == 0 { std::mem::take(&mut placing.held) } else { Vec::new() };
        drop(placing);
        // Owners are the user's: they are dropped with nothing locked.
        drop(free);
    }

    /// Takes over the memory of a region that was closed. Whether nothing can be placed into it any
    /// more; otherwise it is held until that is so.
    pub(crate) fn retire(&self, memory: Owner) -> bool {
        let mut placing = lock(&self.placing);
        if placing.endpoints > 0 {
            placing.held.push(memory);
            return false;
        }
        drop(placing);
        drop(memory);
        true
    }
}

impl Drop for DomainInner {
    fn drop(&mut self) {
        // SAFETY: ours, and all that was opened on it is closed: each held it.
        let result = unsafe { ops::close(self.raw.as_ptr().cast()) };
        debug_assert_eq!(result, 0, "a domain without objects closes");
    }
}

impl fmt::Debug for DomainInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("details", self.info.details()).finish_non_exhaustive()
    }
}

/// Who keeps the memory of a region: its owner, or a device's dma-buf.
pub(crate) type Owner = (Option<Arc<dyn Memory>>, Option<OwnedFd>);

/// Where the provider's own code copies what arrives, it checks key and range when a write begins, and
/// copies as the bytes come in: a region that is closed in between is still written. Only the closing
/// of the endpoint ends that for certain. So as long as there are such endpoints, the memory of
/// closed regions is held here.
#[derive(Default)]
struct Placing {
    endpoints: usize,
    held: Vec<Owner>,
}

/// Keys for regions, where the provider lets us choose. None is given twice in the life of a domain,
/// and where they begin is random, so that a key of an earlier process does not open a region of this
/// one. They are no secret: they travel in the clear.
#[derive(Debug)]
pub(crate) struct Keys {
    next: u64,
    given: u64,
    step: u64,
    mask: u64,
}

impl Keys {
    fn new(key_bytes: usize) -> Self {
        // The standard library's only source of randomness.
        let random = || RandomState::new().build_hasher().finish();
        Self::from_seed(key_bytes, random(), random())
    }

    fn from_seed(key_bytes: usize, first: u64, step: u64) -> Self {
        let mask = if key_bytes >= 8 { u64::MAX } else { (1 << (8 * key_bytes)) - 1 };
        // An odd step walks through all values before it comes back.
        Keys { next: first & mask, given: 0, step: step | 1, mask }
    }

    /// `None` when all are used up.
    pub(crate) fn next(&mut self) -> Option<u64> {
        // The mask is also how many more there are after the first.
        if self.given > self.mask || self.given == u64::MAX {
            return None;
        }
        self.given += 1;
        let key = self.next;
        self.next = self.next.wrapping_add(self.step) & self.mask;
        // Providers use it for "no key".
        if key == u64::MAX { self.next() } else { Some(key) }
    }
}

/// The object that a call made.
pub(crate) fn opened<T>(
    library: Library,
    call: &'static str,
    result: i32,
    raw: *mut T,
) -> Result<NonNull<T>, OpenError> {
    match NonNull::new(raw) {
        Some(raw) if result == 0 => Ok(raw),
        _ => Err(library.failure(call, if result == 0 { -FI_EIO } else { result }).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use crate::info::InfoRequest;

    /// That providers which lock nothing are not called twice at once cannot be seen from outside:
    /// those at hand lock all the same.
    #[test]
    fn calls_are_serialised_here_where_the_provider_does_not() {
        let Ok(library) = Library::open() else { return };
        for threading in [Threading::Safe, Threading::Domain] {
            let request = InfoRequest { threading, ..InfoRequest::default() };
            let Ok(infos) = library.infos(&request) else { return };
            let fabric = Fabric::open(&infos[0]).expect("the fabric opens");
            let domain = Domain::open(&fabric, &infos[0]).expect("the domain opens").0;
            let entered = domain.enter();
            assert_eq!(entered.is_some(), threading == Threading::Domain);
            let is_locked = domain.serial.as_ref().is_some_and(|serial| serial.try_lock().is_err());
            assert_eq!(is_locked, threading == Threading::Domain);
        }
    }

    #[test]
    fn no_key_is_given_twice_and_short_keys_run_out() {
        let mut keys = Keys::from_seed(1, 0x1234, 0x5678);
        let given: Vec<u64> = std::iter::from_fn(|| keys.next()).collect();
        assert_eq!(given.len(), 256);
        assert_eq!(given.iter().collect::<BTreeSet<_>>().len(), 256);
        assert!(given.iter().all(|key| *key < 256));
    }

    #[test]
    fn the_value_that_means_no_key_is_not_given() {
        let mut keys = Keys::from_seed(8, u64::MAX, 0);
        assert_eq!(keys.next(), Some(0));
    }

    #[test]
    fn keys_begin_elsewhere_in_each_domain() {
        let firsts: BTreeSet<_> = (0..8).map(|_| Keys::new(8).next()).collect();
        assert!(firsts.len() > 1);
    }
}
